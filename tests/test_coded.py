"""Packed codes in the engine: against a model with plain arrays of what the codes mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import outputs, requests, tiny, tokens
from test_families import model_of
from test_mesh import mesh_of, over

from kvjax import cache as kv_cache
from kvjax import job, plans, storages
from kvjax.errors import RequestError, UserError
from kvjax.evaluation import scoring
from kvjax.eviction import Budget, named
from kvjax.eviction_rule import Eviction
from kvjax.pallas_kernels import kivi
from kvjax.pallas_kernels.packed import BITS, grouped
from kvjax.pallas_kernels.quantize import dequantize, quantize_rows
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams
from kvjax.types import KVSpec

NEW = 24
GREEDY, SAMPLED = SamplingParams(max_new_tokens=NEW), SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3)
PROMPTS = [[(7 * i * i + 3 * seed) % 200 + 3 for i in range(count)] for seed, count in enumerate((70, 31, 100, 5))]


def coded(storage: str, name: str = "tiny_qwen3", stacked: bool = False) -> Model:
    """A model with heads of 32 numbers, or of 16 (tiny_llama), or another family's."""
    load = tiny if name.startswith("tiny") else model_of
    return dataclasses.replace(load(name, stacked=stacked), storage=storages.resolve(storage, "float32"))


# --- names ----------------------------------------------------------------------------------------------------
NAMES = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int8/int8": "int8",
    "int4": "int4/int4",
    "int8/int4": "int8/int4",
    "int4:rotate": "int4/int4:rotate",
    "int4:recent=8,rotate": "int4/int4:recent=8,full=float16,rotate",
    "kivi4": "kivi4/kivi4:group=32,recent=128,full=float16",
    "kivi2:group=64,recent=64": "kivi2/kivi2:group=64,recent=64,full=float16",
    "kivi4/int8:recent=40": "kivi4/int8:group=32,recent=40,full=float16",
}


@pytest.mark.parametrize(("name", "full"), NAMES.items())
def test_names_in_full(name, full):
    assert storages.resolve(name, "float16") == full
    assert storages.resolve(full, "float16") == full
    stored = storages.parse(full)
    assert (stored.codes is None) == ("/" not in full)
    assert stored.full == ("float16" if stored.recent else "")


WRONG = {
    "kivi3": "'kivi3' is not one of float32, .*, kivi2",
    "int8/float32": "float32, bfloat16, float16 have no options, and are those of both",
    "float32:rotate": "have no options",
    "int4:group=32": "group is 32 or 64, of kivi4 and kivi2",
    "kivi4:group=16": "group is 32 or 64",
    "kivi4:recent=31": "a group of K is 32 rows, so recent is at least 32",
    "int4:rotated": "'rotated' is none of recent=N",
    "int4:recent=-1": "'recent=-1' is none of recent=N",
}


@pytest.mark.parametrize(("name", "said"), WRONG.items())
def test_names_that_mean_nothing(name, said):
    with pytest.raises(UserError, match=f"^K and V cannot be stored as '{name}': .*{said}"):
        storages.resolve(name, "float32")


def test_a_spec_wants_names_in_full():
    with pytest.raises(UserError, match=r"^'kivi4' is no storage's name in full"):
        KVSpec(8, 128, 128, None, "kivi4")


# --- bytes ----------------------------------------------------------------------------------------------------
BYTES = {  # of a row of 8 heads of 128 numbers, K and V; bfloat16 has 4096
    "int4": (2 * 8 * 64 + 2 * 8 * 4, 3.76),
    "kivi4": (2 * 8 * (64 + 4 * 4), 3.2),
    "kivi4:group=64": (2 * 8 * (64 + 2 * 4), 3.56),
    "kivi2": (2 * 8 * (32 + 4 * 4), 5.33),
    "int8/int4": (8 * (128 + 64) + 2 * 8 * 4, 2.56),
}


@pytest.mark.parametrize("layout", ["head_major", "joined"])
@pytest.mark.parametrize(("name", "size"), BYTES.items())
def test_bytes_are_those_allocated(name, size, layout):
    per_row, ratio = size
    spec = KVSpec(8, 128, 128, None, storages.resolve(name, "bfloat16"))
    assert spec.row_bytes == per_row and 4096 / per_row == pytest.approx(ratio, abs=0.005)
    config = plans.CacheConfig((spec, spec), 2, 128, 4, layout=layout)
    assert config.groups == ((spec,) if spec.recent is None else (spec, spec.recent))
    assert config.bytes_of(0) == 2 * 128 * per_row
    config = plans.with_window_pages(config, 128)
    cache = jax.eval_shape(lambda: kv_cache.init(config))
    held = sum(x.size * x.dtype.itemsize for group in cache.groups for x in jax.tree.leaves(group.kv))
    assert held == config.kv_bytes
    if spec.recent is not None:
        assert config.pool_of(1) == 2 * 3 + 1  # of two slots a window of 128 rows and an open page; a step's tokens


# --- against plain arrays -------------------------------------------------------------------------------------
def meaning(x: np.ndarray, kind: str, group: int, axis: int) -> np.ndarray:
    """What the codes of rows (S, K, H) stand for; rows behind the last whole group, which has none, stay."""
    if not grouped(kind):
        return np.asarray(dequantize(*quantize_rows(jnp.asarray(x), kind)))
    whole = len(x) - (len(x) % group if axis == 0 else 0)
    if whole == 0:
        return x
    some = kivi.quantize_groups(jnp.asarray(x[:whole]), BITS[kind], group, axis)
    return np.concatenate([kivi.dequantize_groups(*some, axis), x[whole:]])


def whole(model: Model, sequence: Sequence[int]) -> np.ndarray:
    """Logits of every token of a sequence computed at once, in float64, over what the codes mean."""
    specs = model.family.kv_specs(model.config, model.storage)
    rows_of: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(cache, layer, q, k, v, scale, *, soft_cap=None, sinks=None, slopes=None, up=None):
        spec = specs[layer]
        k, v = rows_of[layer] = rows_of[spec.shares] if k is None else (k, v)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        (S, N), K = q.shape[:2], k.shape[1]
        near = np.arange(S)[:, None] - np.arange(S)[None, :]  # how far back a row is
        codes, recent = spec.stored.codes, spec.stored.recent
        pairs = [(k, v, near >= 0)]
        if codes is not None:
            coded_k = meaning(k.astype(np.float32), codes.key, codes.group, 0)
            coded_v = meaning(v.astype(np.float32), codes.value, codes.group, 2)
            pairs = [(k, v, (near >= 0) & (near < recent)), (coded_k, coded_v, near >= recent)]
        seen = np.concatenate([visible & (near < (spec.window or S)) for _, _, visible in pairs], axis=1)
        keys, values = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        out = np.zeros((S, N, v.shape[2]))
        for n in range(N):
            head = n // (N // K)
            scores = q[:, n] @ keys[:, head].T * scale
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - float(slopes[n]) * np.concatenate([near] * len(pairs), axis=1)
            scores = np.where(seen, scores, -np.inf)
            top = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - top)
            total = p.sum(axis=1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(float(sinks[n]) - top)
            out[:, n] = p / total @ values[:, head]
        return cache, jnp.asarray(out, jnp.float32)

    positions = jnp.arange(len(sequence), dtype=jnp.int32)
    _, hidden = model.family.forward(
        model.params, model.config, jnp.asarray(sequence, jnp.int32), positions, None, attend
    )
    return np.asarray(model.family.unembed(model.params, model.config, hidden))


def assert_greedy(model: Model, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
    """Every token is the likeliest after what comes before it."""
    for prompt, output in zip(prompts, found, strict=True):
        logits = whole(model, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        assert list(output) == logits.argmax(axis=-1).tolist()


ORACLE = [
    ("kivi4:recent=32", "tiny_qwen3", "head_major"),
    pytest.param("kivi2/int4:recent=40", "tiny_llama", "joined", marks=pytest.mark.slow),
    pytest.param("int4:recent=5", "tiny_mistral", "head_major", marks=pytest.mark.slow),  # a window of more rows
    pytest.param("kivi4/kivi2:recent=33", "tiny_qwen3", "token_major", marks=pytest.mark.slow),
    pytest.param("int4", "gemma2", "head_major", marks=pytest.mark.slow),  # two groups of layers, soft cap
    ("kivi4/int4:recent=32", "gpt_oss", "head_major"),  # learned sinks; layers with a window of 8 have no codes
    pytest.param("int8/int4:recent=3", "bloom", "head_major", marks=pytest.mark.slow),  # ALiBi
]


@pytest.mark.parametrize(("storage", "name", "layout"), ORACLE)
def test_a_token_sees_the_newest_rows_as_they_are_and_codes_of_the_others(storage, name, layout):
    """Prompts in chunks of 16 beside others' outputs, in pages of 32. Without an index, pages that come back are taken
    at once, and those of codes and of rows in full precision have other numbers."""
    model = coded(storage, name)
    how = {"packed": 16, "slots": 2, "rows": 32, "layout": layout, "share_prefixes": False}
    assert_greedy(model, PROMPTS, tokens(model, PROMPTS, GREEDY, **how))


def test_a_text_is_scored_in_chunks_as_at_once():
    model, text = coded("kivi4:recent=32"), PROMPTS[2]
    logits = jax.nn.log_softmax(jnp.asarray(whole(model, text)), axis=-1)
    want = np.asarray(logits)[np.arange(len(text) - 1), text[1:]]
    found = scoring.logprobs(model, [text], Options(rows=32), chunk=32)
    np.testing.assert_allclose(found.logprobs[0], want, rtol=1e-5, atol=2e-5)
    config = plans.cache_config(model, 1, len(text), Options(rows=32), 32)
    codes, full = (config.bytes_of(group) for group in (0, 1))
    assert found.peak == 4 * codes + 2 * full  # of 100 rows, and of the newest 32 before pages went
    assert found.bytes_per_token == (4 * codes + 2 * full) / len(text)


@pytest.mark.slow
def test_rotated_keys_give_what_keys_give():
    """In full precision the rotation changes nothing but rounding; in codes it changes the codes."""
    exact = tokens(coded("float32"), PROMPTS, GREEDY, rows=32)
    assert tokens(coded("int8:rotate,recent=256"), PROMPTS, GREEDY, rows=32) == exact


# --- however the job is run -----------------------------------------------------------------------------------
def alone(model: Model, params: SamplingParams) -> list[list[int]]:
    return [list(outputs(model, [request], rows=32)[0].tokens) for request in requests(PROMPTS, params)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"packed": 16, "slots": 2}, marks=pytest.mark.slow),
        pytest.param({"rows": 64}, marks=pytest.mark.slow),
        pytest.param({"share_prefixes": False}, marks=pytest.mark.slow),
        pytest.param({"backend": "reference"}, marks=pytest.mark.slow),
        pytest.param({"backend": "tpu_interpret", "layout": "joined", "rows": 128}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_job_is_run(options):
    model = coded("kivi4:recent=32")
    assert tokens(model, PROMPTS, SAMPLED, **{"rows": 32, **options}) == alone(model, SAMPLED)


def test_prefixes_and_preemption(monkeypatch):
    """Prompts that go on from a beginning of another, and codes of 6 pages for four requests of up to 4."""
    model = coded("kivi4:recent=32")
    prompts = [*PROMPTS, PROMPTS[2][:64] + PROMPTS[0][:20], PROMPTS[2], PROMPTS[2][:-1]]
    asked = requests(prompts, SAMPLED)
    want = [outputs(model, [request], rows=32, share_prefixes=False)[0].tokens for request in asked]
    assert [o.tokens for o in outputs(model, asked, rows=32, slots=2)] == want

    def few(config: plans.CacheConfig, kv_bytes: int, packed: int) -> plans.CacheConfig:
        return dataclasses.replace(plans.with_window_pages(config, packed), pages=6)

    monkeypatch.setattr(plans, "_within", few)
    preempted, done = 0, dict[int, tuple[int, ...]]()
    for report in job.run(model, asked, Options(rows=32, slots=4, packed=64, segment_seconds=0.1)):
        preempted = report.preempted
        done |= {o.request.index: o.tokens for o in report.finished}
    assert preempted > 0
    assert [done[i] for i in range(len(asked))] == want


@pytest.mark.slow
def test_scanned_layers():
    model = coded("kivi4:recent=32")
    assert tokens(coded("kivi4:recent=32", stacked=True), PROMPTS, GREEDY, rows=32) == tokens(
        model, PROMPTS, GREEDY, rows=32
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["head_major", "joined"])
def test_heads_divided_over_chips(layout):
    model = coded("kivi4:recent=32", stacked=True)
    want = tokens(model, PROMPTS, GREEDY, rows=32, layout=layout)
    assert tokens(over(model, mesh_of(data=2, model=2)), PROMPTS, GREEDY, rows=32, layout=layout) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "axes"),
    [
        ("kivi4:recent=32", {"seq": 2, "model": 2}),
        ("int8/int4", {"seq": 4}),
        ("int4:rotate,recent=40", {"data": 2, "seq": 2}),
    ],
    ids=str,
)
def test_sequences_dealt_over_chips(storage, axes):
    """A group of rows lies on one chip, which makes its codes; pages of 32 rows on each."""
    model = coded(storage, stacked=True)
    want = tokens(model, PROMPTS, GREEDY, rows=32, packed=64)
    assert tokens(over(model, mesh_of(**axes)), PROMPTS, GREEDY, rows=32, packed=64) == want


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_mistral", "gpt_oss"])
def test_dealt_layers_with_windows_and_sinks(name):
    model = coded("int8/int4:recent=8", name)
    want = tokens(model, PROMPTS, GREEDY, rows=8, packed=64)
    assert tokens(over(model, mesh_of(seq=2)), PROMPTS, GREEDY, rows=8, packed=64) == want


# --- what does not go -----------------------------------------------------------------------------------------
def test_what_codes_do_not_fit_is_said_at_once():
    prompt = requests([[1, 2, 3]], GREEDY)
    with pytest.raises(RequestError, match="pages of 16 rows do not hold whole groups of 32 rows"):
        outputs(coded("kivi4"), prompt, rows=16)
    with pytest.raises(RequestError, match="values of 16 numbers are no whole groups of 32: take int4 or int8 for V"):
        outputs(coded("kivi4", "tiny_llama"), prompt, rows=32)
    with pytest.raises(RequestError, match="latent pages have no packed codes"):
        outputs(coded("int4", "deepseek_v3"), prompt, rows=32)
    evicting = Eviction(named("knorm"), Budget(rows=8))
    with pytest.raises(RequestError, match="Rows of packed codes are not evicted so far"):
        outputs(dataclasses.replace(coded("kivi4:recent=32"), eviction=evicting), prompt)
    with pytest.raises(RequestError, match="pages of 16 rows do not hold whole groups of 32 rows"):
        outputs(over(coded("kivi4:recent=32", stacked=True), mesh_of(seq=2)), prompt, rows=16)
