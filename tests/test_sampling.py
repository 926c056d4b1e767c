"""Sampling: Hugging Face's values, brute force in numpy, the right distribution, the same tokens in any slot."""

import json
import pathlib

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvjax import sampling
from kvjax.sampling_params import SamplingParams

GOLDEN = json.loads((pathlib.Path(__file__).parent / "goldens" / "sampling.json").read_text())
INF = float("inf")

_sample = jax.jit(sampling.sample, static_argnums=4)
_admit = jax.jit(sampling.admit)


def make_state(params, eos=(), seed=0, requests=None, samples=None, vocab_size=None, history=None):
    """Rows 0..len(params)-1 of a state that holds just them."""
    requests = range(len(params)) if requests is None else requests
    rows = sampling.pack(params, eos=eos, seed=seed, requests=requests, samples=samples)
    state = sampling.init(len(params), rows.bias_ids.shape[1], rows.stop_ids.shape[1])
    state = _admit(state, jnp.arange(len(params)), rows)
    return sampling.take(state, jnp.arange(len(params)), history and sampling.recount(history, vocab_size))


def no_history(rows):
    return sampling.History(jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))


def draw(logits, state, generated=None, active=None, logprobs=None):
    rows = logits.shape[0]
    generated = jnp.zeros(rows, jnp.int32) if generated is None else generated
    active = jnp.ones(rows, bool) if active is None else active
    return _sample(jnp.asarray(logits, jnp.float32), state, generated, active, logprobs)


@jax.jit
def _processed(logits, state, generated):
    return sampling.warp(sampling.edit(logits, state, generated), state, jnp.ones(logits.shape[0], bool))


def random_logits(shape, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(size=shape, scale=scale).astype(np.float32)


# --- against Hugging Face and numpy


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "+".join(case["params"]))
def test_processed_logits_equal_hugging_faces(case):
    fields = {"temperature": 1.0, **case["params"]}
    logits = np.array(GOLDEN["logits"], np.float32)
    tokens = jnp.array(GOLDEN["tokens"], jnp.int32)
    rows, steps = tokens.shape
    history = sampling.History(tokens, jnp.full(rows, GOLDEN["prompt"]), jnp.full(rows, steps))
    params = [SamplingParams.from_dict(fields).validate(logits.shape[1])] * rows
    state = make_state(params, GOLDEN["eos"], vocab_size=logits.shape[1], history=history)
    generated = jnp.full(rows, steps - GOLDEN["prompt"])

    got = np.asarray(_processed(jnp.asarray(logits), state, generated))

    want = np.array([[-INF if v is None else v for v in row] for row in case["processed"]])
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def reference_cutoff(row, top_k, top_p, min_p):
    """The kept set by sorting, in float64, ties kept; and how near top_p came to deciding otherwise."""
    row = row.astype(np.float64)
    top = row.max()
    weight = (row == top).astype(float) if np.isinf(top) else np.exp(row - top)
    keep = np.ones(len(row), bool)
    if top_k:
        keep &= row >= np.sort(row)[::-1][min(top_k, len(row)) - 1]
    margin = 1.0
    if top_p:
        weight_p = np.where(keep, weight, 0)
        above = np.array([weight_p[row > v].sum() for v in row]) / weight_p.sum()
        margin = np.abs(above - top_p).min()
        keep &= above < top_p
    if min_p:
        keep &= weight >= min_p
        # in float32, at the very value, either answer is right; of the maximum itself there is no doubt
        margin = min(margin, np.abs(weight[row < top] - min_p).min(initial=1.0))
    return keep, margin


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -INF, INF, 3e38, -3e38]),
    st.floats(-20, 20, width=32, allow_subnormal=False),
)
_cutoff = jax.jit(sampling.cutoff)


@settings(max_examples=300, deadline=None)
@given(
    row=st.lists(numbers, min_size=9, max_size=9),
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(0.0), st.floats(2**-20, 0.9990234375, width=32)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(2**-20, 1, width=32)),
)
def test_cutoffs_equal_sorting(row, top_k, top_p, min_p):
    x = np.array([row, random_logits(9)], np.float32)
    keep, margin = reference_cutoff(x[0], top_k, top_p, min_p)
    assume(margin > 1e-6)
    off = jnp.zeros(2).at[0]
    cut = _cutoff(x, jnp.array([top_k, 0]), off.set(top_p), off.set(min_p))
    np.testing.assert_array_equal(x[0] >= np.asarray(cut)[0], keep)
    assert np.asarray(cut)[1, 0] == -INF, "a row without filters is left alone"


@pytest.mark.parametrize("vocab_size", [3, 128, 1000, 50257])
def test_cutoffs_of_a_whole_vocabulary(vocab_size):
    x = random_logits((6, vocab_size))
    top_k = np.array([1, 2, 50, 0, 0, 40])
    top_p = np.array([0, 0, 0, 0.5, 0.9, 0.95], np.float32)
    cut = np.asarray(_cutoff(x, jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p), jnp.zeros(6)))
    for i in range(6):
        order = np.sort(x[i].astype(np.float64))[::-1]
        kept = order[: top_k[i] or None]
        mass = np.cumsum(np.exp(kept) / np.exp(kept).sum())
        count = np.searchsorted(mass, top_p[i]) + 1 if top_p[i] else len(kept)
        # at the edge float32 and float64 may differ by a token
        assert (x[i] >= cut[i]).sum() == pytest.approx(count, abs=0 if vocab_size < 1001 or not top_p[i] else 1)


def test_ties_with_the_last_kept_value_are_kept():
    x = jnp.array([[0.0, -0.0, 1.0, -1.0]])
    off = jnp.zeros(1)
    assert sampling.cutoff(x, jnp.array([2]), off, off)[0, 0] == 0.0  # three tokens pass
    assert sampling.cutoff(x, jnp.array([0]), jnp.array([0.6]), off)[0, 0] == 0.0  # 0.48 + 0.18 + 0.18


def test_bias_and_penalties_of_mixed_rows():
    """By hand: one row of each, and one with nothing, which must not change by a bit."""
    logits = random_logits((5, 16))
    params = [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.25),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(logit_bias={3: 1.5, 15: -100.0}),
        SamplingParams(),
    ]
    tokens = jnp.array([[7, 7, 3, 9, 9, 9, 1]] * 5)  # the prompt 7 7 3, then 9 9 9; the 1 is past the end
    history = sampling.History(tokens, jnp.full(5, 3), jnp.full(5, 6))
    state = make_state(params, vocab_size=16, history=history)
    got = jax.jit(sampling.edit)(jnp.asarray(logits), state, jnp.full(5, 3))

    want = logits.copy()
    want[0, 9] -= 0.5
    want[1, 9] -= 0.75
    for token in (7, 3, 9):
        want[2, token] *= 0.5 if want[2, token] > 0 else 2.0
    want[3, 3] += 1.5
    want[3, 15] -= 100
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(got)[4], logits[4])


def test_the_worked_example_of_the_guide():
    params = SamplingParams(
        repetition_penalty=1.25, frequency_penalty=0.1, min_new_tokens=5, temperature=0.5, top_k=3, top_p=0.8
    )
    history = sampling.History(jnp.array([[0]]), jnp.array([0]), jnp.array([1]))
    state = make_state([params], eos=[4], vocab_size=5, history=history)
    got = _processed(jnp.array([[2.0, 1.0, 0.5, 0.0, -1.0]]), state, jnp.array([1]))
    np.testing.assert_allclose(got, [[3, 2, -INF, -INF, -INF]], rtol=1e-6)
    np.testing.assert_allclose(jax.nn.softmax(got)[0, :2], [0.731, 0.269], atol=5e-4)


def test_no_stop_token_before_the_minimum():
    logits = np.zeros((2, 8), np.float32)
    logits[:, 4] = 9  # eos
    logits[:, 6] = 8  # a stop token of the request
    logits[:, 1] = 7
    state = make_state([SamplingParams(min_new_tokens=3, stop_token_ids=(6,)), SamplingParams()], eos=[4])
    assert draw(logits, state, jnp.array([2, 2]))[0].tolist() == [1, 4]
    assert draw(logits, state, jnp.array([3, 3]))[0].tolist() == [4, 4]


def test_greedy_rows_ignore_filters_and_take_the_first_maximum():
    logits = random_logits((3, 300))
    logits[1, [7, 200, 299]] = 99
    logits[2, 299] = 99
    params = [SamplingParams(top_k=3, top_p=0.1, min_p=0.5), SamplingParams(), SamplingParams()]
    assert draw(logits, make_state(params))[0].tolist() == [int(logits[0].argmax()), 7, 299]


# --- random numbers


def test_bits_are_jaxs_bit_for_bit():
    keys = jax.random.split(jax.random.key(3, impl="threefry2x32"), 4)
    with jax.threefry_partitionable(True):
        want = jax.vmap(lambda key: jax.random.bits(key, (1001,)))(keys)
    np.testing.assert_array_equal(sampling.random_bits(jax.random.key_data(keys), 1001), want)


def test_key_is_the_chain_of_seed_request_sample_and_index():
    state = make_state([SamplingParams(seed=11), SamplingParams()], seed=5, requests=[8, 9], samples=[0, 2])
    keys = sampling.token_keys(state, jnp.array([4, 6]))
    for row, path in zip(keys, [(11, 0, 0, 4), (5, 9, 2, 6)], strict=True):
        key = jax.random.key(path[0], impl="threefry2x32")
        for part in path[1:]:
            key = jax.random.fold_in(key, part)
        np.testing.assert_array_equal(row, jax.random.key_data(key))


def test_gumbel_noise_is_finite_and_standard():
    edge = sampling._gumbel(jnp.array([0, 1, 2**31, 2**32 - 1], jnp.uint32))
    assert np.isfinite(edge).all()
    noise = np.asarray(sampling._gumbel(sampling.random_bits(jnp.array([[1, 2]], jnp.uint32), 100_000)))[0]
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_distribution(fields):
    """χ² of 40,960 tokens: 4,096 requests, ten tokens each."""
    logits = random_logits(8, seed=4, scale=1.5)
    x = logits.astype(np.float64) / fields["temperature"]
    keep, _ = reference_cutoff(x, fields.get("top_k", 0), fields.get("top_p", 0), fields.get("min_p", 0))
    exact = np.where(keep, np.exp(x), 0) / np.exp(x[keep]).sum()

    state = make_state([SamplingParams(**fields)] * 4096, seed=1)
    rows = np.tile(logits, (4096, 1))
    counts = np.zeros(8)
    for index in range(10):
        counts += np.bincount(draw(rows, state, jnp.full(4096, index))[0], minlength=8)

    assert counts[~keep].sum() == 0
    if keep.sum() > 1:
        assert scipy.stats.chisquare(counts[keep], exact[keep] * counts.sum()).pvalue > 1e-3


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.2, top_p=0.9, seed=3),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0, 5: -9.0}, frequency_penalty=0.3),
    SamplingParams(min_new_tokens=9, presence_penalty=0.5),
]


def test_the_same_tokens_in_any_slot_and_batch():
    logits = random_logits((8, 1000))
    generated = np.arange(8) + 2
    history = np.random.default_rng(1).integers(0, 1000, (8, 12)).astype(np.int32)

    def tokens(order):
        order = np.asarray(order)
        past = sampling.History(history[order], 12 - generated[order], np.full(len(order), 12))
        past = jax.tree.map(lambda a: jnp.asarray(a, jnp.int32), past)
        state = make_state([MIXED[i] for i in order], [2], 7, order, vocab_size=1000, history=past)
        return draw(logits[order], state, jnp.asarray(generated[order], jnp.int32))[0].tolist()

    together = tokens(range(8))
    order = np.random.default_rng(2).permutation(8)
    assert tokens(order) == [together[i] for i in order]
    assert [tokens([i])[0] for i in range(8)] == together
    assert tokens([5, 5, 1]) == [together[5], together[5], together[1]]


def test_seeds_requests_and_samples():
    logits = np.zeros((4, 4096), np.float32)
    free, seeded = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=9)

    def tokens(params, **kwargs):
        return draw(logits[: len(params)], make_state(params, **kwargs))[0].tolist()

    first = tokens([free, free, seeded, seeded], samples=[0, 1, 0, 1])
    assert len(set(first)) == 4
    assert tokens([seeded, seeded], seed=77, requests=[5, 6], samples=[0, 1]) == first[2:], "independent of the job"
    assert tokens([free], seed=77) != first[:1]
    assert tokens([free], requests=[1]) != first[:1]


# --- the rest of the contract


def test_inactive_rows_ask_for_nothing_and_disturb_no_one():
    logits = random_logits((2, 64))
    logits[1] = np.nan
    state = make_state([SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)])
    alone = make_state([SamplingParams(temperature=1.0)])
    tokens, _ = draw(logits, state, active=jnp.array([True, False]))
    assert tokens[0] == draw(logits[:1], alone)[0][0]


@pytest.mark.parametrize("params", MIXED, ids=lambda p: f"T{p.temperature}")
def test_nan_and_infinite_rows_give_valid_tokens(params):
    logits = np.zeros((5, 130), np.float32)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[1, 129] = 40
    logits[2] = -INF
    logits[3, 77] = INF
    logits[4] = np.where(np.arange(130) == 9, 0, -INF)
    state = make_state([params] * 5, [2], vocab_size=130, history=no_history(5))
    tokens, _ = draw(logits, state)
    assert tokens.tolist() == [0, 129, 0, 77, 9]


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits((2, 50))
    params = [SamplingParams(logit_bias={17: 100.0}), SamplingParams(temperature=3.0, top_k=1)]
    want = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    tokens, out = draw(logits, make_state(params), logprobs=3)
    assert tokens.tolist() == [17, int(logits[1].argmax())]
    np.testing.assert_allclose(out.chosen, want[[0, 1], tokens], rtol=1e-5)
    order = np.argsort(-logits, axis=1)[:, :3]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_values, np.take_along_axis(want, order, 1), rtol=1e-5)
    _, chosen_only = draw(logits, make_state(params), logprobs=0)
    assert chosen_only.top_ids.shape == (2, 0)
    np.testing.assert_array_equal(chosen_only.chosen, out.chosen)
    assert draw(logits, make_state(params))[1] is None


def test_admission_after_a_preemption_recounts_what_was_generated():
    tokens = jnp.array([[4, 5, 0, 0, 0], [6, 0, 0, 0, 0]])
    history = sampling.History(tokens, jnp.array([2, 1]), jnp.array([2, 1]))
    state: sampling.Counts | None = sampling.recount(history, 10)
    for step in ([7, 8], [7, 6], [1, 3]):
        state = sampling.observe(state, jnp.array(step), jnp.array([True, step[1] != 3]))

    again = jnp.array([[4, 5, 7, 7, 1], [6, 8, 6, 0, 0]])
    resumed = sampling.recount(sampling.History(again, jnp.array([2, 1]), jnp.array([5, 3])), 10)
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    assert state is not None
    assert state.counts[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 2, 0, 0]
    assert state.seen[1].nonzero()[0].tolist() == [6, 8]


def test_admit_sets_only_its_slots():
    state = make_state([SamplingParams(temperature=float(i), stop_token_ids=(i,)) for i in range(4)])
    rows = sampling.pack([SamplingParams(temperature=9.0)] * 3, eos=[5], seed=0, requests=[0, 0, 0], shape=(1, 1))
    after = _admit(state, jnp.array([2, 4, -1]), rows)
    assert after.temperature.tolist() == [0, 1, 9, 3]
    assert after.stop_ids.tolist() == [[0], [1], [5], [3]]
    jax.tree.map(lambda new, old: np.testing.assert_equal(new.dtype, old.dtype), after, state)


def test_stopped():
    params = [SamplingParams(stop_token_ids=(7,)), SamplingParams(ignore_eos=True), SamplingParams()]
    state = make_state(params, eos=[1, 2])
    assert state.stop_ids.tolist() == [[1, 2, 7, -1], [-1] * 4, [1, 2, -1, -1]]
    assert sampling.stopped(jnp.array([7, 1, 2]), state).tolist() == [True, False, True]
    assert sampling.stopped(jnp.array([3, 7, 7]), state).tolist() == [False, False, False]


def test_widths_are_powers_of_two():
    params = [SamplingParams(logit_bias=dict.fromkeys(range(5), 1.0)), SamplingParams(stop_token_ids=(1, 2))]
    assert sampling.widths(params, eos=[0]) == (8, 4)
    assert sampling.widths([], eos=[]) == (1, 1)


def equations(jaxpr, into_cond):
    """All equations, into nested programs; those inside `cond` only if asked."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "cond" or into_cond:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from equations(inner, into_cond)


def test_an_all_greedy_batch_pays_for_an_arg_max_alone():
    state = sampling.take(sampling.init(4, 1, 1), jnp.arange(4), sampling.no_counts(4, 512))
    closed = jax.make_jaxpr(sampling.sample)(jnp.zeros((4, 512)), state, jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    outside = list(equations(closed.jaxpr, into_cond=False))
    (branch,) = [e for e in outside if e.primitive.name == "cond"]
    wide = [e for e in outside if e is not branch and any(v.aval.size >= 512 for v in e.outvars)]
    assert not wide, "work on the vocabulary outside of the branch"
    greedy = {e.primitive.name for e in equations(branch.params["branches"][0].jaxpr, into_cond=True)}
    assert greedy >= {"reduce_max", "argmax"}
    assert not greedy & {"exp", "log", "log1p", "scatter", "scan", "sort", "top_k", "div", "shift_left"}
    everything = {e.primitive.name for e in equations(closed.jaxpr, into_cond=True)}
    assert {"scan", "log1p"} <= everything
    assert not everything & {"sort", "top_k", "pure_callback", "io_callback"}
