"""The TPU's attention kernels: no races, compiled ahead of time for four chips, and in the engine."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import golden_families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny, tokens
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import SingleDeviceSharding
from test_paged_attention import AttentionSpec, Case, build, in_bytes, oracle

from kvjax import plans
from kvjax.checkpoints.place import init_params
from kvjax.errors import RequestError
from kvjax.models.deepseek import DEEPSEEK
from kvjax.pallas_kernels import Lanes, joined, paged_attention
from kvjax.pallas_kernels.packed import Codes, init_code_pages
from kvjax.pallas_kernels.paged_attention import tpu_chunks
from kvjax.pallas_kernels.paged_attention.tpu_chunks import attend_chunks
from kvjax.pallas_kernels.paged_attention.tpu_decode import DecodeBlocks, attend_rows
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


@functools.cache
def chip(name: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[name]).devices[0])


RACES = [
    pytest.param(kernel, mode, marks=[pytest.mark.slow] if (kernel, mode) == ("expanded", "eager") else [])
    for kernel in ("rows", "chunks", "expanded")
    for mode in ("on_wait", "eager")
]
PACKED_RACES = [
    pytest.param(kernel, mode, marks=[pytest.mark.slow] if (kernel, mode) != ("rows", "on_wait") else [])
    for kernel in ("rows", "chunks")
    for mode in ("on_wait", "eager")
]


@pytest.mark.parametrize(("kernel", "mode"), PACKED_RACES)
def test_no_races_over_packed_codes(kernel, mode):
    """Groups of K in buffers of pages, those of V and scales of rows in buffers of rows, all used again."""
    interpret = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    one = kernel == "rows"
    case = Case((700, 0, 130, 300), (1, 0, 1, 1) if one else (130, 0, 3, 0), rows=128, dim=64, value_dim=64, padding=0)
    codes = Codes("kivi4", "kivi4" if one else "int4")
    arrays, scales, meaning = in_bytes(case, codes, "joined", False)
    q, pages, _, table, lengths, starts = arrays
    lanes = Lanes(2, 64, 64)
    spec = AttentionSpec(0.125, layout="joined", lanes=lanes, codes=codes)
    wide, counts = codes.lanes(lanes), np.diff(starts)
    q = joined.spread(jnp.asarray(q), wide)
    how: dict[str, Any] = {"lanes": wide, "spec": spec, "interpret": interpret, "scales": scales}
    if one:
        how["blocks"] = DecodeBlocks(256, ((256, 1), (128, 1)))
    else:
        how |= {"out": jnp.zeros((*q.shape[:2], 128)), "lse": jnp.zeros((*q.shape[:2], 128)), "blocks": (128, 128)}
    attend: Any = attend_rows if one else attend_chunks
    wanted = counts == 1 if one else counts > 1
    out, _ = attend(q, pages, *map(jnp.asarray, (table, lengths, starts, wanted)), **how)
    want, _ = oracle(meaning, AttentionSpec(0.125))
    np.testing.assert_allclose(joined.gather(out, wide), want, rtol=1e-2, atol=1e-2)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


@pytest.mark.parametrize(("kernel", "mode"), RACES)
def test_no_races(kernel, mode):
    """Several blocks of several slots: every buffer is used again. A DMA moves at the wait, or at once."""
    interpret = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    one = kernel == "rows"
    case = Case((700, 0, 130, 300), (1, 0, 1, 1) if one else (130, 0, 3, 0), rows=32, dim=128, value_dim=128)
    if kernel == "expanded":  # two groups of heads
        case = dataclasses.replace(case, heads=16, kv_heads=1, dim=128 + 24)
    arrays = q, k, v, table, lengths, starts = build(dataclasses.replace(case, padding=0))
    latent = kernel == "expanded"
    lanes, spec = Lanes(case.kv_heads, case.dim, 128, latent), AttentionSpec(0.1, latent=128 if latent else None)
    v_rows = None if latent else jnp.asarray(v.swapaxes(1, 2))
    spec = dataclasses.replace(spec, layout="joined", lanes=lanes)
    pages = joined.tiles(joined.rows(jnp.asarray(k.swapaxes(1, 2)), v_rows, lanes))
    counts = np.diff(starts)
    attend: Any = attend_rows if one else attend_chunks
    how: dict[str, Any] = {"lanes": lanes, "spec": spec, "interpret": interpret}
    if one:
        how["blocks"] = DecodeBlocks(256, ((256, 1), (128, 1)))
    else:
        how |= {"out": jnp.zeros((*q.shape[:2], 128)), "lse": jnp.zeros((*q.shape[:2], 128)), "blocks": (128, 128)}
    if latent:
        how["blocks"] = (256, 128)
        how["up"] = up = np.random.default_rng(0).standard_normal((16, 128 + 128, 128)).astype(np.float32) / 11
        rotated = np.broadcast_to(k[..., 128:], (k.shape[0], 16, *k.shape[2:3], 24))
        made = np.einsum("pkrc,nhc->pnrh", k[..., :128], up)
        arrays = q, np.concatenate([made[..., :128], rotated], axis=-1), made[..., 128:], table, lengths, starts
        spec = dataclasses.replace(spec, latent=None)
    wanted = counts == 1 if one else counts > 1
    out, lse = attend(q, pages, *map(jnp.asarray, (table, lengths, starts, wanted)), **how)
    lse = lse if one else lse[..., 0]
    want, want_lse = oracle(arrays, spec)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call to compile; by default Llama-3-8B's attention in a mixed step of 64 slots."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int | None = None
    storage: str = "bfloat16"
    rows: int = 128
    spec: AttentionSpec = dataclasses.field(default_factory=lambda: AttentionSpec(0.1))
    max_query: int = 512
    slots: int = 64
    width: int = 32
    scales: int = 0
    sinks: bool = False
    slopes: bool = False
    tree: bool = False
    up: tuple[int, int] | None = None
    """Of latents: a head's key numbers without position, and its values."""
    codes: Codes | None = None
    elsewhere: tuple[str, ...] = ()


def compiled(name: str, shape: Shape):
    latent = shape.spec.latent is not None
    lanes = Lanes(shape.kv_heads, shape.dim, shape.value_dim or shape.dim, latent)
    spec = dataclasses.replace(shape.spec, layout="joined", lanes=lanes)
    compute = jnp.float32 if shape.storage == "float32" else jnp.bfloat16
    T = shape.slots if shape.max_query == 1 else shape.slots + shape.max_query
    pages = 4 * shape.slots

    def array(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=chip(name))

    features: dict[str, Any] = {}
    if codes := shape.codes:
        spec = dataclasses.replace(spec, codes=codes)
        made = jax.eval_shape(lambda: init_code_pages(pages, shape.rows, lanes, codes, "joined"))
        stored, *scales = (array(*x.shape, dtype=x.dtype) for x in (made.k, made.k_scales, made.v_scales))
        features["scales"] = tuple(scales)
    else:
        stored = array(pages, lanes.row // 128, shape.rows, 128, dtype=jnp.dtype(shape.storage))
    for feature in shape.elsewhere:
        features[feature] = array(shape.slots)
    if shape.scales:
        by_row = (shape.rows,) if shape.scales == 3 else ()
        features["scales"] = array(pages, (1 if latent else 2) * shape.kv_heads, *by_row, dtype=jnp.float32)
    for feature in ("sinks", "slopes"):
        if getattr(shape, feature):
            features[feature] = array(shape.heads, dtype=jnp.float32)
    if shape.tree:
        features["tree"] = array(T, 2)
    dim = shape.dim
    if shape.up:
        dim = shape.up[0] + shape.dim - lanes.value_dim
        features["up"] = array(shape.heads, sum(shape.up), lanes.value_dim, dtype=compute)
    attend = jax.jit(functools.partial(paged_attention, spec=spec, max_query=shape.max_query, backend="tpu"))
    return attend.lower(
        array(T, shape.heads, dim, dtype=compute),
        stored,
        None,
        array(shape.slots, shape.width),
        array(shape.slots),
        array(shape.slots + 1),
        **features,
    ).compile()


LATENT = AttentionSpec(0.1, latent=512)
EVERYTHING = AttentionSpec(0.1, window=1000, sink_rows=4, soft_cap=30.0)
QUICK = {
    "llama 3": Shape(),
    "int8": Shape(storage="int8", scales=3),
    "float8": Shape(storage="float8_e4m3fn", scales=2),
    "pages of 16": Shape(rows=16, dim=64, width=256),
    "every feature": Shape(spec=EVERYTHING, sinks=True, slopes=True, rows=64),
    "a tree": Shape(tree=True, max_query=64),
    "kivi4": Shape(codes=Codes("kivi4", "kivi4"), elsewhere=("first", "ahead"), max_query=1),
    "latent": Shape(16, 1, 576, 512, spec=LATENT, max_query=128),
    "latent, expanded": Shape(16, 1, 576, 512, spec=LATENT, up=(128, 128)),
}
MORE = {
    **{f"{dim}": Shape(heads=16, kv_heads=4, dim=dim) for dim in (80, 96, 192, 256)},
    **{f"pages of {rows}": Shape(rows=rows, width=4096 // rows) for rows in (16, 32, 64, 256)},
    "float8_e5m2": Shape(storage="float8_e5m2", scales=3),
    "int4": Shape(storage="int4", scales=3),
    "int8 in pages": Shape(storage="int8", scales=2, rows=256),
    "float32": Shape(storage="float32"),
    "packed int4": Shape(codes=Codes("int4", "int4")),
    "kivi4 with window": Shape(codes=Codes("kivi4", "kivi4"), spec=EVERYTHING, elsewhere=("first", "ahead")),
    "int8 and kivi2": Shape(codes=Codes("int8", "kivi2", 64), rows=256),
    "float8 and int4, odd heads": Shape(9, 3, 64, codes=Codes("float8_e4m3fn", "int4")),
    "pages behind a window": Shape(spec=EVERYTHING, elsewhere=("first", "ahead")),
    "many heads": Shape(heads=32, kv_heads=32),
    "one head": Shape(heads=8, kv_heads=1, dim=64),
    "odd heads": Shape(heads=9, kv_heads=3, dim=64),
    "v3's latent": Shape(128, 1, 576, 512, spec=LATENT, max_query=1),
    "v3's latent, expanded": Shape(128, 1, 576, 512, spec=LATENT, max_query=2048, up=(128, 128)),
    "int8 latent, expanded": Shape(16, 1, 576, 512, "int8", spec=LATENT, scales=3, up=(128, 128)),
    "decode of every feature": Shape(spec=EVERYTHING, sinks=True, slopes=True, max_query=1),
}
TABLES = {
    "64 slots of 32k pages": Shape(slots=64, width=1 << 15, rows=16),
    "4096 slots": Shape(slots=4096, width=64, max_query=1),
}


QUICK_CALLS = [
    pytest.param(shape, name, id=f"{label}-{name}", marks=[] if quick else [pytest.mark.slow])
    for label, shape in QUICK.items()
    for name in CHIPS
    for quick in [
        label == "llama 3" or (name == "7x" and not label.startswith("latent")) or (name, label) == ("v5e", "int8")
    ]
]


@pytest.mark.parametrize(("shape", "name"), QUICK_CALLS)
def test_compiles(shape, name):
    compiled(name, shape)


MORE_CALLS = [
    pytest.param(shape, name, id=f"{label}-{name}")
    for i, (label, shape) in enumerate(MORE.items())
    for name in (("v5e", "7x"), ("v5p", "v6e"))[i % 2]
]
"""Two chips each, in turn: a compilation takes 15 s."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name"), MORE_CALLS)
def test_compiles_more(shape, name):
    compiled(name, shape)


@pytest.mark.parametrize("name", ["v5e", "7x"])
@pytest.mark.parametrize("shape", TABLES.values(), ids=TABLES)
def test_tables_larger_than_smem(shape, name):
    """2 million entries, of which SMEM holds 258 thousand; and many slots."""
    compiled(name, shape)


GREEDY = SamplingParams(max_new_tokens=12)
PROMPTS = [np.random.default_rng(n).integers(4, 320, n).tolist() for n in (5, 1, 17, 40, 3)]


@pytest.mark.parametrize("name", ["tiny_llama", pytest.param("tiny_mistral", marks=[pytest.mark.slow])])
def test_the_engine_gives_the_same_tokens(name):
    """Chunked prompts, refilled slots, forked pages, a window: interpreted."""
    model = tiny(name)
    asked = [*PROMPTS, [*PROMPTS[3][:30], 7, 8]]
    options = {"slots": 4, "packed": 16, "rows": 8}
    want = tokens(model, asked, GREEDY, **options)
    assert tokens(model, asked, GREEDY, backend="tpu_interpret", **options) == want


@pytest.mark.slow
def test_latents_are_expanded_in_the_engine():
    """MLA with latents of whole tiles: prompts expand them, decode absorbs; tokens as of plain jnp, which absorbs."""
    hf = golden_families.config("deepseek_v3") | {"kv_lora_rank": 128, "num_hidden_layers": 2}
    config = DEEPSEEK.config(hf, None)
    params = init_params(jax.random.key(0), DEEPSEEK.abstract(config), dtype=jnp.float32)
    model = Model(DEEPSEEK, config, params, (), [b"?"] * config.vocab, "float32", "float32", False)
    options = {"slots": 4, "packed": 16, "rows": 8}
    prompts = [[token % config.vocab for token in prompt] for prompt in PROMPTS]
    want = tokens(model, prompts, GREEDY, **options)
    with mock.patch.object(tpu_chunks, "_kernel", wraps=tpu_chunks._kernel) as kernel:
        assert tokens(model, prompts, GREEDY, backend="tpu_interpret", **options) == want
    assert all("up" in call.kwargs["names"] for call in kernel.call_args_list) and kernel.called


@pytest.mark.slow
def test_codes_in_the_engine():
    """K and V of 8 bits: the kernels' tokens are those of plain jnp."""
    model = tiny("tiny_llama", storage="int8")
    options = {"slots": 4, "packed": 16, "rows": 128}
    want = tokens(model, PROMPTS, GREEDY, **options)
    got = tokens(model, PROMPTS, GREEDY, backend="tpu_interpret", **options)
    same = sum(a == b for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.9 * sum(map(len, want))  # the tiny model's choices are near ties


def test_refuses_what_a_tpu_cannot_read():
    model = tiny("tiny_llama")
    for options, message in (
        ({"rows": 4}, "pages of 4 rows of float32: a TPU reads 8 rows at once"),
        ({"rows": 24}, "pages of 24 rows: the TPU's kernels want a power of two"),
        ({"rows": 8, "layout": "head_major"}, "read pages of the layout 'joined'; these are 'head_major'"),
    ):
        with pytest.raises(RequestError, match=message):
            tokens(model, PROMPTS, GREEDY, backend="tpu_interpret", **options)
    with pytest.raises(RequestError, match="scales are applied to 128 rows at once"):
        tokens(tiny("tiny_llama", storage="int8"), PROMPTS, GREEDY, backend="tpu_interpret", rows=32)
    for storage, backend, rows in (("int8", "tpu", 128), ("int8", "xla", 64), ("float32", "tpu", 64)):
        assert plans.rows_of(tiny("tiny_llama", storage=storage), Options(backend=backend)) == rows


def test_says_what_does_not_fit_vmem():
    """DeepSeek-V3 with keys and values cached for every head."""
    with pytest.raises(NotImplementedError, match="prompts of 128 heads over 128 kv heads of 192 and 128 numbers"):
        compiled("v5e", Shape(128, 128, 192, 128))


def test_agrees_with_jax_own_ragged_paged_attention():
    """Decode rows and a chunk, a window and a soft cap, against JAX's reference of its own kernel."""
    case = dataclasses.replace(Case((70, 33, 64), (1, 20, 1), heads=8, dim=128, value_dim=128, rows=16), padding=0)
    q, k, v, table, lengths, starts = map(jnp.asarray, build(case))
    interleaved = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, *k.shape[2:]).swapaxes(1, 2)  # K, V, K, V, …
    want = ref_ragged_paged_attention(
        q, jnp.nan_to_num(interleaved), lengths, table, starts, jnp.asarray([3], jnp.int32),
        sm_scale=0.1, sliding_window=30, soft_cap=5.0,
    )  # fmt: skip
    out = attend_interpreted(q, k, v, table, lengths, starts, AttentionSpec(0.1, window=30, soft_cap=5.0), 20)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_agrees_with_jax_own_paged_attention():
    """Decode, against JAX's kernel, interpreted as well, which rounds queries to bfloat16."""
    case = dataclasses.replace(Case((70, 33, 128), (1, 1, 1), heads=8, dim=128, value_dim=128, rows=16), padding=0)
    q, k, v, table, lengths, starts = map(jnp.asarray, build(case))
    by_head = [jnp.nan_to_num(x).swapaxes(0, 1) for x in (k, v)]
    lenient = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with pltpu.force_tpu_interpret_mode(), lenient[0], lenient[1]:
        want = jax_paged_attention(q * 0.1, *by_head, lengths, table, pages_per_compute_block=4)
    out = attend_interpreted(q, k, v, table, lengths, starts, AttentionSpec(0.1), 1)
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=1e-2)


def attend_interpreted(q, k, v, table, lengths, starts, spec, max_query):
    """The kernels on pages (P, K, R, H)."""
    lanes = Lanes(k.shape[1], k.shape[3], v.shape[3])
    spec = dataclasses.replace(spec, layout="joined", lanes=lanes)
    pages = joined.tiles(joined.rows(k.swapaxes(1, 2), v.swapaxes(1, 2), lanes))
    rest = {"max_query": max_query, "backend": "tpu_interpret"}
    return paged_attention(q, pages, None, table, lengths, starts, spec, **rest)[0]
