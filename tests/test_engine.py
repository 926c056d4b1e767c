"""The loop: a request's tokens depend on nothing but the request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import goldens, outputs, requests, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax.engines
from kvjax import job, plans
from kvjax.errors import RequestError
from kvjax.eviction import Budget, named
from kvjax.eviction_rule import Eviction
from kvjax.plans import Options, Request
from kvjax.sampling_params import SamplingParams

MODEL = "tiny_llama"


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 320, n).tolist() for n in lengths]


GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1)
LENGTHS = (5, 1, 17, 8, 40, 9, 16, 3, 31)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batched_equals_alone(params):
    model, asked = tiny(MODEL), requests(prompts(LENGTHS), params)
    alone = [outputs(model, [request])[0].tokens for request in asked]
    assert [o.tokens for o in outputs(model, asked)] == alone
    assert [o.tokens for o in outputs(model, asked[::-1])] == alone[::-1]


@pytest.mark.parametrize(
    ("storage", "layout"), [("int8", "joined"), pytest.param("float8_e4m3fn", "head_major", marks=[pytest.mark.slow])]
)
def test_codes_of_k_and_v_belong_to_their_token(storage, layout):
    """A row is quantized by itself: batches, chunks, preemption and forks change no token."""
    model, asked = tiny(MODEL, storage=storage), requests(prompts(LENGTHS[4:]), GREEDY)
    alone = [outputs(model, [request], layout=layout)[0].tokens for request in asked]
    assert [o.tokens for o in outputs(model, asked, packed=16, slots=4, layout=layout)] == alone
    exact = [o.tokens for o in outputs(tiny(MODEL), asked)]
    same = sum(a == b for x, y in zip(alone, exact, strict=True) for a, b in zip(x, y, strict=True))
    assert same > {"int8": 0.8, "float8_e4m3fn": 0.2}[storage] * sum(map(len, exact))


def test_codes_need_half_the_memory():
    wide, codes = (
        tiny(MODEL, storage=storage).family.kv_specs(tiny(MODEL).config, storage)[0] for storage in ("bfloat16", "int8")
    )
    assert codes.row_bytes == wide.row_bytes // 2 + 4 * 2 * wide.kv_heads  # and the scales


@pytest.mark.parametrize(
    "options",
    [
        {"packed": 16, "slots": 4},  # chunked prompts, refilled slots
        {"rows": 16},
        {"rows": 1, "slots": 2},
        {"segment_seconds": 1e-6},  # the host looks after every step
        {"backend": "reference"},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_job_is_run(options):
    model, asked = tiny(MODEL), prompts(LENGTHS)
    each = [GREEDY, SAMPLED] * len(asked)
    assert tokens(model, asked, each[: len(asked)], **options) == tokens(model, asked, each[: len(asked)])


def test_preemption_recomputes_the_same_tokens():
    each = [SAMPLED, GREEDY] * len(LENGTHS)
    model, asked = tiny(MODEL), requests(prompts(LENGTHS), each[: len(LENGTHS)])
    page_bytes = 8 * sum(spec.row_bytes for spec in model.family.kv_specs(model.config, "float32"))
    preempted = 0
    done = {}
    # The longest request needs 8 pages; nine at once want 29.
    for report in job.run(model, asked, Options(rows=8, kv_bytes=9 * page_bytes, segment_seconds=0.1)):
        preempted = report.preempted
        done.update({o.request.index: o for o in report.finished})
    assert preempted > 0
    assert [done[i].tokens for i in range(len(asked))] == [o.tokens for o in outputs(model, asked)]


def peaks(model, lengths, **options):
    """(peak_pages, peak_bytes) of a job of prompts of these lengths with 4 tokens of output each, pages of 8 rows."""
    asked = requests(prompts(lengths), SamplingParams(max_new_tokens=4))
    options = {"rows": 8, "share_prefixes": False, **options}
    report = list(job.run(model, asked, Options(**options)))[-1]
    return report.peak_pages, report.peak_bytes


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_job_reports_the_most_pages_that_were_in_use_at_once(storage):
    model = tiny(MODEL, storage=storage)
    page_bytes = 8 * sum(spec.row_bytes for spec in model.family.kv_specs(model.config, storage))
    # The last token of an output is never cached: at most 20 rows of 17 + 4 tokens, in 3 pages, and 8 and 12 rows.
    assert peaks(model, [5, 17, 9], slots=1) == (3, 3 * page_bytes)
    assert peaks(model, [5, 17, 9], slots=4) == (1 + 3 + 2, 6 * page_bytes)


def test_pages_kept_for_others_are_in_use():
    model = tiny(MODEL)
    assert peaks(model, [16, 16, 16], slots=1)[0] == 3  # 19 rows
    # Two full pages of each stay as long as there are others, and there are 4.
    assert peaks(model, [16, 16, 16], slots=1, share_prefixes=True)[0] == 4


def test_where_rows_are_evicted_the_peak_is_of_heads():
    """A prompt of 32 rows is whole before it is compressed to 8; the next one meets only what is left of it."""
    model = tiny(MODEL)
    specs = model.family.kv_specs(model.config, "float32")
    model = dataclasses.replace(model, eviction=Eviction(named("knorm"), Budget(rows=8)))
    heads = sum(spec.kv_heads for spec in specs)
    page_bytes = 8 * (specs[0].row_bytes // specs[0].kv_heads + 4)  # and a row's position
    assert peaks(model, [32], slots=1) == (4 * heads, 4 * heads * page_bytes)
    assert peaks(model, [32, 32], slots=2, packed=32) == ((4 + 2) * heads, (4 + 2) * heads * page_bytes)


def test_the_peak_stays_when_a_job_begins_again_with_larger_shapes():
    model, asked = tiny(MODEL), requests(prompts([30, 3]), SamplingParams(max_new_tokens=4))
    one = job.Job(model, Options(rows=8, slots=1, share_prefixes=False))
    before = list(job.drive(one, asked[:1]))[-1]
    one.withdraw()
    after = list(job.drive(one, asked[1:]))[-1]
    assert before.peak_pages == after.peak_pages == 5
    assert before.peak_bytes == after.peak_bytes > 0


def test_preemption_keeps_logprobs_and_stop_state():
    params = SamplingParams(max_new_tokens=20, logprobs=2)
    model, asked = tiny(MODEL), requests(prompts(LENGTHS), params)
    page_bytes = 8 * sum(spec.row_bytes for spec in model.family.kv_specs(model.config, "float32"))
    whole = outputs(model, asked)
    tight = outputs(model, asked, kv_bytes=9 * page_bytes)
    for a, b in zip(whole, tight, strict=True):
        assert a.tokens == b.tokens and a.logprobs and b.logprobs and len(b.logprobs) == 20
        np.testing.assert_allclose([x.chosen for x in a.logprobs], [x.chosen for x in b.logprobs], atol=1e-5)
        assert [list(x.top) for x in a.logprobs] == [list(x.top) for x in b.logprobs]
        assert all(x.chosen == pytest.approx(max(x.top.values())) for x in b.logprobs)  # greedy


def overlapping() -> list[list[int]]:
    """Prompts with beginnings in common: a page, several, all but the last token, all."""
    own, common = prompts(LENGTHS), prompts([40], seed=1)[0]
    return [
        *own,
        *(common[:n] + rest for n, rest in zip((40, 40, 24, 16, 9), own, strict=False)),
        common,
        common,
        common[:-1],
    ]


@functools.cache
def alone() -> list[tuple[int, ...]]:
    """Each of the overlapping prompts by itself, sampled."""
    asked = requests(overlapping(), SAMPLED)
    return [outputs(tiny(MODEL), [request], share_prefixes=False)[0].tokens for request in asked]


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(len(overlapping()))),
    # Few combinations of what is compiled; the rest is free.
    shape=st.sampled_from([(2, 32, 40, True), (16, 32, 40, True), (16, 64, 12, True), (4, 32, 12, False)]),
    refill=st.integers(1, 4),
    segment_seconds=st.sampled_from([1e-6, 0.01, 0.2]),
)
def test_tokens_depend_on_nothing_but_the_request(order, shape, refill, segment_seconds):
    """Sampled tokens in any order, slots, chunks, pages, segments; with prefixes found or not, preempted or not."""
    slots, packed, pages, share = shape
    model, asked = tiny(MODEL), requests(overlapping(), SAMPLED)
    page_bytes = 8 * sum(spec.row_bytes for spec in model.family.kv_specs(model.config, "float32"))
    found = outputs(
        model,
        [asked[i] for i in order],
        slots=slots,
        packed=packed,
        kv_bytes=pages * page_bytes,
        share_prefixes=share,
        refill=refill,
        segment_seconds=segment_seconds,
    )
    assert [o.tokens for o in found] == [alone()[i] for i in order]


def test_ends_at_stop_tokens_limits_and_minimum():
    golden = goldens(MODEL)
    greedy = golden["greedy_0"].tolist()
    stop = greedy[5]
    first = greedy.index(stop)
    ask = [
        SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)),
        SamplingParams(max_new_tokens=3),
        SamplingParams(max_new_tokens=1),
    ]
    out = outputs(tiny(MODEL), requests([golden["prompt_0"]] * 3, ask))
    assert list(out[0].tokens) == greedy[: first + 1] and out[0].finish_reason == "stop"
    assert list(out[1].tokens) == greedy[:3] and out[1].finish_reason == "length"
    assert list(out[2].tokens) == greedy[:1] and out[2].finish_reason == "length"
    held = SamplingParams(max_new_tokens=30, min_new_tokens=first + 1, stop_token_ids=(stop,))
    (longer,) = outputs(tiny(MODEL), requests([golden["prompt_0"]], held))
    assert len(longer.tokens) > first + 1 and stop not in longer.tokens[: first + 1]
    assert list(longer.tokens[:first]) == greedy[:first]


def test_a_minimum_length_holds_even_when_every_token_is_a_stop_token():
    params = SamplingParams(max_new_tokens=5, min_new_tokens=3, stop_token_ids=tuple(range(320)))
    (out,) = outputs(tiny(MODEL), requests([[5, 6]], params))
    assert len(out.tokens) == 4 and out.finish_reason == "stop"


def test_stop_strings_straddle_tokens_and_respect_the_minimum():
    """Every token is one byte here, so a stop string of three characters always spans three tokens."""
    golden = goldens(MODEL)
    greedy = [t % 256 for t in golden["greedy_0"].tolist()]
    start = next(i for i in range(4, 60) if all(b < 128 for b in greedy[i : i + 3]))
    stop = bytes(greedy[start : start + 3]).decode()
    end = bytes(greedy).find(stop.encode()) + 3
    (out,) = outputs(tiny(MODEL), requests([golden["prompt_0"]], SamplingParams(max_new_tokens=64, stop=(stop,))))
    assert list(out.tokens) == golden["greedy_0"].tolist()[:end] and out.finish_reason == "stop"
    late = SamplingParams(max_new_tokens=64, stop=(stop,), min_new_tokens=end - 1)  # the match would begin too early
    (out,) = outputs(tiny(MODEL), requests([golden["prompt_0"]], late))
    assert len(out.tokens) > end


def test_samples_of_a_prompt_differ_and_are_reproducible():
    params = SamplingParams(max_new_tokens=12, temperature=1.0, n=3)
    prompt = tuple(prompts([9])[0])
    asked = [Request(0, sample, prompt, params) for sample in range(3)]
    first = [o.tokens for o in outputs(tiny(MODEL), asked)]
    assert len(set(first)) == 3
    assert [o.tokens for o in outputs(tiny(MODEL), asked[::-1])] == first[::-1]
    assert [o.tokens for o in outputs(tiny(MODEL), asked, seed=1)] != first


def test_a_request_with_its_own_seed_ignores_its_place_in_the_job():
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7)
    prompt = prompts([9])[0]
    (alone,) = tokens(tiny(MODEL), [prompt], params)
    assert tokens(tiny(MODEL), [[5, 6, 7], prompt], params)[1] == alone
    without = SamplingParams(max_new_tokens=12, temperature=1.0)
    first, second = tokens(tiny(MODEL), [prompt, prompt], without)
    assert first != second


def test_refuses_what_can_never_be_served():
    model = tiny(MODEL)
    with pytest.raises(RequestError, match="exceed the context of 256 tokens"):
        list(job.run(model, requests([[5] * 250], SamplingParams(max_new_tokens=10)), Options()))
    with pytest.raises(RequestError, match="kv_bytes is 1, and a page of 8 tokens needs 6144 bytes of K and V"):
        list(job.run(model, requests([[5] * 30], SamplingParams(max_new_tokens=1)), Options(rows=8, kv_bytes=1)))
    with pytest.raises(RequestError, match="prompt is empty"):
        list(job.run(model, requests([[]], GREEDY), Options()))


def compilations() -> list[int]:
    return [f._cache_size() for f in (kvjax.engines.run, kvjax.engines.submit, kvjax.engines.collect)]  # type: ignore[attr-defined]


def test_one_compilation_serves_a_job_however_often_slots_refill():
    model = tiny(MODEL)
    before = compilations()
    asked = requests(prompts([7] * 23), SamplingParams(max_new_tokens=11))
    outputs(model, asked, slots=4, rows=4, segment_seconds=1e-6)
    after = compilations()
    assert after == [n + 1 for n in before]


def test_poisoned_free_pages_never_reach_an_output():
    """All pages NaN before the job: every row that is read has been written by its owner."""
    model, asked = tiny(MODEL), requests(prompts(LENGTHS), GREEDY)
    want = [o.tokens for o in outputs(model, asked)]
    original = plans.start

    def poisoned(*args):
        program, state = original(*args)
        groups = [g.replace(kv=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), g.kv)) for g in state.cache.groups]
        return program, state.replace(cache=state.cache.replace(groups=tuple(groups)))

    plans.start = poisoned
    try:
        assert [o.tokens for o in outputs(model, asked, slots=4)] == want
    finally:
        plans.start = original
