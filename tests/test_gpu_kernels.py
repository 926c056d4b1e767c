"""The GPU's attention kernels: interpreted with races looked for, bugs planted, and compiled ahead of time.

What is interpreted runs the kernels' arithmetic, copies and barriers on a CPU; what is compiled shows that Mosaic GPU
and ptxas take them, with which registers. Neither is a GPU: no test here times anything.
"""

import dataclasses
import functools
import inspect
import itertools
import os
import pathlib
import subprocess
import sys
from typing import Any

import gpu_aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_attention import AttentionSpec, Case, build, oracle, quantized

from kvjax.pallas_kernels import check, paged_attention
from kvjax.pallas_kernels.paged_attention import gpu_decode, gpu_prefill, gpu_tiles

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
interpreted = pytest.mark.skipif(
    VERSION < (0, 12), reason="Mosaic GPU's interpreter runs these kernels from JAX 0.12 on"
)
_cannot = "JAX 0.11 and newer compile these kernels" if VERSION < (0, 11) else gpu_aot.missing()
compilable = pytest.mark.skipif(_cannot is not None, reason=str(_cannot))
jitted = jax.jit(paged_attention, static_argnames=("spec", "max_query", "backend"))


@pytest.fixture(autouse=True)
def _reset_interpreter():
    """A kernel that failed leaves its state behind."""
    yield
    if VERSION >= (0, 12):
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # no public name yet

        interpret_pallas_call.reset_gpu_interpret_mode_state()


def attend(arrays, spec, max_query, **features):
    """`arrays` hold pages as (P, K, R, H). Numbers of pages behind a slot's length lead nowhere."""
    q, k, v, table, lengths, starts = arrays
    R = k.shape[2]
    table = np.where(np.arange(table.shape[1]) < -(-np.asarray(lengths)[:, None] // R), table, 1 << 20)
    spec = dataclasses.replace(spec, layout="token_major")
    k, v = jnp.asarray(k).swapaxes(1, 2), None if spec.latent else jnp.asarray(v).swapaxes(1, 2)
    arrays = jnp.asarray(q), k, v, jnp.asarray(table), jnp.asarray(lengths), jnp.asarray(starts)
    return jitted(*arrays, spec=spec, max_query=max_query, backend="gpu_interpret", **features)


OUT = {"bfloat16": 2**-7, "float16": 2**-10}
"""Of numbers around 2: half a unit of the output, and weights rounded to as many bits."""


def verify(arrays, meaning, spec, dtype="bfloat16", max_query=None, **features):
    """Against the float64 oracle over what the codes mean; features apply to both, but scales."""
    mine = {name: jnp.asarray(x) for name, x in features.items()}
    most = int(np.diff(arrays[-1]).max())
    out, lse = attend(arrays, spec, max_query or max(1, most), **mine)
    features.pop("scales", None)
    want, want_lse = oracle(meaning, spec, **features)
    assert out.dtype == arrays[0].dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=OUT[dtype], atol=OUT[dtype])


def rounded(arrays, dtype="bfloat16"):
    """(the arrays in 16 bits, the same in float32)."""
    q, k, v, *rest = arrays
    narrow = [np.asarray(jnp.asarray(x).astype(dtype)) for x in (q, k, v)]
    return (*narrow, *rest), (*(x.astype(np.float32) for x in narrow), *rest)


def shape(lengths, queries, **sizes) -> Case:
    return Case(lengths, queries, **({"kv_heads": 1, "dim": 64, "value_dim": 64, "rows": 32} | sizes))


RAGGED = {
    "decode around pages": shape((1, 31, 32, 33), (1, 1, 1, 1)),
    "decode with empty slots": shape((0, 64, 65, 0), (0, 1, 1, 0)),
    "decode in splits": shape((700, 5), (1, 1)),
    "nothing at all": shape((0, 0), (0, 0)),
    "whole prompts": shape((31, 32, 33), (31, 32, 33)),
    "chunks": shape((33, 130), (33, 2)),
    "decode rows beside a chunk": shape((21, 0, 130), (1, 0, 25), kv_heads=2),
    "chunk of several blocks": shape((110, 9), (50, 9)),
}
SPECS = {
    "plain": AttentionSpec(0.125),
    "window 1": AttentionSpec(0.125, window=1),
    "window 5": AttentionSpec(0.125, window=5),
    "window over blocks": AttentionSpec(0.125, window=70),
    "soft cap": AttentionSpec(0.125, soft_cap=1.5),
    "window and first rows": AttentionSpec(0.125, window=30, sink_rows=3),
}
QUICK = {
    *itertools.product(("decode around pages", "decode in splits", "decode rows beside a chunk"), ("plain",)),
    ("chunk of several blocks", "plain"),
    ("nothing at all", "plain"),
    ("decode rows beside a chunk", "window and first rows"),
    ("decode with empty slots", "window over blocks"),
    ("chunks", "soft cap"),
}


def some_quick(first, second, quick):
    """Parameters of all pairs, those not in `quick` slow: a kernel is interpreted for seconds."""
    return [
        pytest.param(a, b, marks=[] if (a, b) in quick else [pytest.mark.slow])
        for a, b in itertools.product(first, second)
    ]


@interpreted
@pytest.mark.parametrize("case, spec", some_quick(RAGGED, SPECS, QUICK))
def test_matches_float64_oracle(case, spec):
    arrays, meaning = rounded(build(RAGGED[case]))
    verify(arrays, meaning, SPECS[spec])


SINKS = {"sinks": np.array([-1.0, 0.5, 3.0, 9.0], np.float32)}
SLOPES = {"slopes": np.array([0.5, 0.25, 0.0, 0.0625], np.float32)}


@interpreted
@pytest.mark.parametrize(
    "features, spec",
    some_quick(("sinks", "slopes", "both"), ("plain", "window and first rows"), {("both", "plain")}),
)
def test_sinks_and_slopes(features, spec):
    values = {"sinks": SINKS, "slopes": SLOPES, "both": SINKS | SLOPES}[features]
    arrays, meaning = rounded(build(RAGGED["decode rows beside a chunk"]))
    verify(arrays, meaning, SPECS[spec], **values)


HEADS = [(1, 1), (4, 4), (8, 1), (9, 3), (14, 2), (80, 1)]
DIMS = [(64, 64, 8), (64, 64, 128), (80, 80, 32), (96, 96, 16), (128, 128, 64), (192, 128, 64), (256, 256, 16)]
QUICK_SHAPES = {((9, 3), (80, 80, 32)), ((1, 1), (96, 96, 16)), ((80, 1), (64, 64, 128)), ((4, 4), (192, 128, 64))}


@interpreted
@pytest.mark.parametrize("heads, dims", some_quick(HEADS, DIMS, QUICK_SHAPES))
def test_shapes(heads, dims):
    arrays, meaning = rounded(build(Case((33, 70), (1, 9), *heads, *dims)))
    verify(arrays, meaning, AttentionSpec(dims[0] ** -0.5))


@interpreted
@pytest.mark.parametrize("case", ["decode in splits", "chunks"])
def test_float16(case):
    arrays, meaning = rounded(build(RAGGED[case]), "float16")
    verify(arrays, meaning, SPECS["plain"], "float16")


@interpreted
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", [16, pytest.param(72, marks=pytest.mark.slow)])
def test_the_latent_head_of_deepseek(heads, rows):
    arrays, meaning = rounded(build(Case((33, 70), (1, 9), heads, 1, 576, 512, rows)))
    verify(arrays, meaning, AttentionSpec(192**-0.5, latent=512))


def codes(case: Case, storage: str, by_page: bool):
    """(codes with bfloat16 queries, what they mean, scales)."""
    arrays, meaning, scales = quantized(case, storage, by_page)
    q = jnp.asarray(arrays[0]).astype(jnp.bfloat16)
    return (q, *arrays[1:]), (np.asarray(q, np.float32), *meaning[1:]), scales


STORAGES = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")
QUICK_CODES = {("int8", "row"), ("float8_e4m3fn", "page"), ("int4", "row")}


@interpreted
@pytest.mark.parametrize("storage, by", some_quick(STORAGES, ("row", "page", "pages of 16"), QUICK_CODES))
def test_codes_and_scales(storage, by):
    case = shape((130, 70), (1, 9), rows=16 if by == "pages of 16" else 64)
    arrays, meaning, scales = codes(case, storage, by != "row")
    verify(arrays, meaning, SPECS["plain"], scales=scales)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (128, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("by_page", [False, True], ids=["by row", "by page"])
def test_widths_of_codes(dims, by_page):
    latent = 512 if dims[0] == 576 else None
    case = Case((130, 70), (1, 9), 4, 1 if latent else 2, dims[0], dims[1], rows=64)
    arrays, meaning, scales = codes(case, "int8", by_page)
    if latent:
        scales = scales[:, :1]
        meaning = (*meaning[:2], meaning[1][..., :512], *meaning[3:])
    verify(arrays, meaning, AttentionSpec(dims[0] ** -0.5, latent=latent), scales=scales)


@interpreted
@pytest.mark.parametrize("count", [7, pytest.param(70, marks=pytest.mark.slow)])
def test_a_tree_of_tokens(count):
    """Each new token sees its ancestors and what came before. A slot with one token asks for itself, or does not."""
    rng = np.random.default_rng(count)
    parent = [int(rng.integers(-1, i)) if i else -1 for i in range(count)]
    words = np.zeros((count + 4, -(-count // 32)), np.uint32)
    for i in range(count):
        j = i
        while j >= 0:
            words[1 + i, j // 32] |= np.uint32(1 << (j % 32))
            j = parent[j]
    words[:, -1] |= np.uint32(0x80000000)  # of no row: it hides nothing and shows nothing
    words[1 + count, 0] = 1
    lengths, queries = (20, 100 + count, 5), (1, count, 1)  # the first slot's token does not see itself
    arrays, meaning = rounded(build(shape(lengths, queries, padding=2)))
    verify(arrays, meaning, SPECS["plain"], tree=words.view(np.int32))


PAIRED = ("window", "first rows", "soft cap", "sinks", "slopes", "scales", "tree", "odd heads")
PAIRS = [
    pair
    for pair in itertools.combinations(PAIRED, 2)
    if not ("tree" in pair and {"window", "first rows", "slopes"} & set(pair))  # refused
]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_pairs_of_features(pair):
    """Decode rows beside a chunk: each feature with each other one."""
    heads, kv_heads = (9, 3) if "odd heads" in pair else (4, 2)
    lengths, queries = (200, 0, 131, 70), (1, 0, 9, 1)
    case = shape(lengths, queries, heads=heads, kv_heads=kv_heads, rows=32)
    window = 90 if {"window", "first rows"} & set(pair) else None
    spec = AttentionSpec(
        0.125, window, soft_cap=2.0 if "soft cap" in pair else None, sink_rows=3 if "first rows" in pair else 0
    )
    features: dict[str, Any] = {}
    if "sinks" in pair:
        features["sinks"] = np.linspace(-1, 4, heads).astype(np.float32)
    if "slopes" in pair:
        features["slopes"] = np.linspace(0, 0.5, heads).astype(np.float32)
    if "tree" in pair:
        chains = np.tril(np.random.default_rng(0).integers(0, 2, (9, 9))) | np.eye(9, dtype=int)
        features["tree"] = np.ones((sum(queries) + case.padding, 1), np.int32)  # a token alone sees itself
        features["tree"][1:10, 0] = (chains << np.arange(9)).sum(axis=1)
    if "scales" in pair:
        arrays, meaning, features["scales"] = codes(case, "int8", by_page=False)
    else:
        arrays, meaning = rounded(build(case))
    verify(arrays, meaning, spec, **features)


@interpreted
@pytest.mark.slow
def test_a_table_for_each_head():
    """Every kv head of a slot has its own pages, and its own number of them."""
    K, G, R, H, M = 2, 3, 16, 64, 4
    counts, rng = (1, 12), np.random.default_rng(0)
    B, T = len(counts), sum(counts) + 2
    lengths = np.maximum(rng.integers(1, M * R, (B, K)), np.asarray(counts)[:, None]).astype(np.int32)
    table = rng.permutation(B * K * M).reshape(B, K, M).astype(np.int32)
    k, v = (rng.standard_normal((B * K * M, 1, R, H)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((T, K * G, H)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays, meaning = rounded((q, k, v, table, lengths, starts))
    q16, k16, v16, *rest = map(jnp.asarray, arrays)
    spec = dataclasses.replace(SPECS["plain"], layout="token_major")
    pages = k16.swapaxes(1, 2), v16.swapaxes(1, 2)
    out, lse = jitted(q16, *pages, *rest, spec=spec, max_query=12, backend="gpu_interpret")
    for head in range(K):
        mine = slice(head * G, (head + 1) * G)
        alone = meaning[0][:, mine], *meaning[1:3], table[:, head], lengths[:, head], starts
        want, want_lse = oracle(alone, SPECS["plain"])
        np.testing.assert_allclose(np.asarray(out, np.float32)[:, mine], want, rtol=2**-7, atol=2**-7)
        np.testing.assert_allclose(np.asarray(lse)[:, mine], want_lse, rtol=5e-6, atol=5e-6)


# Bugs planted in the kernels, and what the interpreter says of them.


def run_decode(storage="bfloat16"):
    """One slot of four blocks through a ring of two."""
    case = shape((200,), (1,), heads=1, kv_heads=1, padding=0)
    scales = None
    if storage == "bfloat16":
        (q, k, v, table, lengths, _), meaning = rounded(build(case))
    else:
        (q, k, v, table, lengths, _), meaning, scales = codes(case, storage, by_page=False)
    k, v = (jnp.asarray(x).swapaxes(1, 2) for x in (k, v))
    out, _ = gpu_decode.attend_decode(
        jnp.asarray(q), k, v, jnp.asarray(table), jnp.asarray(lengths), SPECS["plain"],
        scales=scales, splits=1, stages=2, interpret=gpu_tiles.interpret_params(),
    )  # fmt: skip
    return np.abs(np.asarray(out) - oracle(meaning, SPECS["plain"])[0]).max()


def run_prefill(storage="bfloat16"):
    """One block of 128 queries over five blocks, through a ring of two."""
    case = shape((290,), (120,), heads=1, kv_heads=1, padding=0)
    (q, k, v, *rest), meaning = rounded(build(case))
    k, v = (jnp.asarray(x).swapaxes(1, 2) for x in (k, v))
    table, lengths, starts = map(jnp.asarray, rest)
    out, _ = gpu_prefill.attend_chunks(
        jnp.asarray(q), k, v, table, lengths, starts, jnp.asarray([True]), SPECS["plain"],
        max_query=120, stages=2, interpret=gpu_tiles.interpret_params(),
    )  # fmt: skip
    return np.abs(np.asarray(out, np.float32) - oracle(meaning, SPECS["plain"])[0]).max()


K_WAIT, V_WAIT = (f'plgpu.barrier_wait(smem["{x}_full"].at[ring])' for x in "kv")
FREE_WAIT = 'plgpu.barrier_wait(smem[f"{name}_free"].at[slot])'
EARLY_K = ((K_WAIT, f'{K_WAIT}; plgpu.barrier_arrive(smem["k_free"].at[ring])'),
           ('            plgpu.barrier_arrive(smem["k_free"].at[ring])\n', "            pass\n"))  # fmt: skip
FREE_V = 'plgpu.barrier_arrive(smem["k_free" if latent else "v_free"].at[ring])'
EARLY_V = (V_WAIT, f"{V_WAIT}; {FREE_V}"), (f"        {FREE_V}\n", "")
DECODE, CHUNKS = gpu_decode._attend, gpu_prefill._consume
BUGS: dict[str, tuple[Any, Any, Any]] = {
    "decode: Q not awaited": (run_decode, DECODE, [('plgpu.barrier_wait(smem["q_full"])', "pass")]),
    "decode: K not awaited": (run_decode, DECODE, [(K_WAIT, "pass")]),
    "decode: V not awaited": (run_decode, DECODE, [(V_WAIT, "pass")]),
    "decode: K freed before its product": (run_decode, DECODE, EARLY_K),
    "decode: V freed before its product": (run_decode, DECODE, EARLY_V),
    "decode: filled without waiting": (run_decode, gpu_tiles._produce_copied, [(FREE_WAIT, "pass")]),
    "decode: cleaned without waiting": (
        run_decode, gpu_tiles._produce_copied, [('plgpu.barrier_wait(smem["edge"])', "pass")],
    ),
    "decode: result not committed": (
        run_decode, gpu_decode._finish, [('tiles.publish(smem["out"], ', 'plgpu.store(smem["out"], ')],
    ),
    "codes: not awaited": (
        functools.partial(run_decode, "int8"), gpu_tiles._produce_widened,
        [('plgpu.barrier_wait(smem[f"{name}_landed"].at[raw_slot])', "pass")],
    ),
    "codes: widened before the slot is free": (
        functools.partial(run_decode, "int8"), gpu_tiles._produce_widened, [(FREE_WAIT, "pass")],
    ),
    "codes: scales read without a commit": (
        functools.partial(run_decode, "int8"), DECODE,
        [("            plgpu.commit_smem()  # before the next copy to it\n", "")],
    ),
    "chunks: K not awaited": (run_prefill, CHUNKS, [(K_WAIT, "pass")]),
    "chunks: V not awaited": (run_prefill, CHUNKS, [(V_WAIT, "pass")]),
    "chunks: K freed before its product": (run_prefill, CHUNKS, EARLY_K),
    "chunks: V freed before its product": (run_prefill, CHUNKS, EARLY_V),
    "chunks: filled without waiting": (run_prefill, gpu_tiles._produce_copied, [(FREE_WAIT, "pass")]),
    "chunks: result not committed": (
        run_prefill, CHUNKS, [("tiles.publish(q_tile.at[:, my_columns], ", "plgpu.store(q_tile.at[:, my_columns], ")],
    ),
}  # fmt: skip


def planted(function, edits):
    """The function with its source edited."""
    module = sys.modules[function.__module__]
    source = inspect.getsource(function)
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = dict(vars(module))
    exec(compile(source, f"planted in {function.__name__}", "exec"), names)
    return module, names[function.__name__]


@interpreted
@pytest.mark.parametrize("run", [run_decode, functools.partial(run_decode, "int8"), run_prefill])
def test_no_races_where_nothing_is_planted(run):
    assert run() < 2**-6


@interpreted
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug, monkeypatch):
    run, function, edits = BUGS[bug]
    module, changed = planted(function, edits)
    monkeypatch.setattr(module, function.__name__, changed)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run()


@interpreted
def test_a_row_that_is_nobodys_would_reach_the_result(monkeypatch):
    """Without the cleaning, NaN behind a slot's length comes back as 0 · NaN."""
    module, changed = planted(
        gpu_tiles._clean, [("jnp.where(walk.owned(token), value, jnp.zeros((), value.dtype))", "value")]
    )
    monkeypatch.setattr(module, "_clean", changed)
    assert np.isnan(run_decode())


def test_refuses_what_it_cannot_do():
    spec = dataclasses.replace(SPECS["plain"], layout="token_major")

    def call(dim=64, value_dim=64, rows=16, dtype="bfloat16", q_dtype="bfloat16", spec=spec, layout="token_major"):
        arrays = build(Case((3,), (1,), dim=dim, value_dim=value_dim, rows=rows))
        q, k, v, table, lengths, starts = map(jnp.asarray, arrays)
        q, k, v = q.astype(q_dtype), k.swapaxes(1, 2).astype(dtype), v.swapaxes(1, 2).astype(dtype)
        if layout == "head_major":
            k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
        spec = dataclasses.replace(spec, layout=layout)
        return paged_attention(q, k, v, table, lengths, starts, spec, max_query=1, backend="gpu_interpret")

    def refuses(reason, **how):
        with pytest.raises(NotImplementedError, match=reason):
            call(**how)

    refuses("read pages of the layout 'token_major'", layout="head_major")
    refuses("these pages hold float32, which wgmma does not multiply", dtype="float32")
    refuses("pages of 24 rows: the GPU's kernels read 64 rows at once", rows=24)
    if VERSION < (0, 12):
        refuses("JAX 0.1[12] or newer")
        return
    refuses("keys of 72 numbers: wgmma multiplies 16 at once", dim=72)
    refuses("values of 32 numbers: wgmma's products have at least 64 rows", value_dim=32)
    refuses("wider than keys", value_dim=128)
    refuses("int4: a GPU copies 16 bytes at once", dim=80, value_dim=80, dtype="int4")
    refuses("float16 queries: weights times scales underflow", dtype="int8", q_dtype="float16")
    with pytest.raises(NotImplementedError, match="these pages hold float32"):
        check("gpu", "token_major", 64, "float32")


# Compiled ahead of time.


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call to compile; by default Llama-3-8B's attention in a mixed step of 64 slots."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int | None = None
    storage: str = "bfloat16"
    rows: int = 64
    spec: AttentionSpec = dataclasses.field(default_factory=lambda: AttentionSpec(0.1, layout="token_major"))
    max_query: int = 512
    slots: int = 64
    width: int = 64
    scales: int = 0
    sinks: bool = False
    slopes: bool = False
    tree: bool = False


def compiled(chip: str, shape: Shape):
    T = shape.slots + (shape.max_query if shape.max_query > 1 else 0)
    P, latent = 4 * shape.slots, shape.spec.latent is not None
    storage = jnp.dtype(shape.storage)

    def array(*sizes, dtype: Any = jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    features = {}
    if shape.scales:
        by_row = (shape.rows,) if shape.scales == 3 else ()
        features["scales"] = array(P, (1 if latent else 2) * shape.kv_heads, *by_row, dtype=jnp.float32)
    for feature in ("sinks", "slopes"):
        if getattr(shape, feature):
            features[feature] = array(shape.heads, dtype=jnp.float32)
    if shape.tree:
        features["tree"] = array(T, -(-shape.max_query // 32))
    pages = (P, shape.rows, shape.kv_heads)
    arrays = (
        array(T, shape.heads, shape.dim, dtype=storage if storage.itemsize == 2 else jnp.bfloat16),
        array(*pages, shape.dim, dtype=storage),
        None if latent else array(*pages, shape.value_dim or shape.dim, dtype=storage),
        array(shape.slots, shape.width),
        array(shape.slots),
        array(shape.slots + 1),
    )
    attend = functools.partial(paged_attention, spec=shape.spec, max_query=shape.max_query, backend="gpu")
    return gpu_aot.compile_for(chip, lambda arrays, features: attend(*arrays, **features), arrays, features)


LATENT = AttentionSpec(0.1, latent=512, layout="token_major")
EVERYTHING = AttentionSpec(0.1, window=1000, sink_rows=4, soft_cap=30.0, layout="token_major")
MLA: dict[str, Any] = {"dim": 576, "spec": LATENT, "kv_heads": 1}
SHAPES = {
    "llama 3": Shape(),
    "int8": Shape(storage="int8", scales=3),
    "float16, pages of 16": Shape(storage="float16", dim=64, rows=16),
    "heads of 80": Shape(dim=80, rows=16),
    "heads of 96": Shape(dim=96, rows=32),
    "heads of 192 and 128": Shape(dim=192, value_dim=128),
    "heads of 192": Shape(dim=192),
    "heads of 256": Shape(dim=256, heads=16),
    "pages of 8": Shape(rows=8),
    "pages of 128": Shape(rows=128),
    "32 heads a kv head": Shape(kv_heads=1),
    "128 heads a kv head": Shape(heads=128, kv_heads=1),
    "everything": Shape(spec=EVERYTHING, sinks=True, slopes=True),
    "tree": Shape(tree=True, max_query=64),
    "latent": Shape(heads=128, **MLA),
    "latent, few heads": Shape(heads=16, **MLA),
    "int8 by page": Shape(storage="int8", scales=2),
    "int8, everything": Shape(storage="int8", scales=3, spec=EVERYTHING, sinks=True, slopes=True),
    "int8, heads of 80": Shape(storage="int8", scales=3, dim=80, rows=16),
    "int8, heads of 96": Shape(storage="int8", scales=3, dim=96),
    "int8, heads of 256": Shape(storage="int8", scales=3, dim=256, heads=16),
    "float8_e4m3fn": Shape(storage="float8_e4m3fn", scales=3),
    "float8_e5m2 by page of 16": Shape(storage="float8_e5m2", scales=2, rows=16),
    "int4": Shape(storage="int4", scales=3),
    "latent int8": Shape(storage="int8", scales=3, heads=128, **MLA),
    "latent float8_e4m3fn by page": Shape(storage="float8_e4m3fn", scales=2, heads=128, **MLA),
}
QUICK_COMPILED = ("llama 3", "int8", "heads of 80")


@compilable
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[] if name in QUICK_COMPILED else [pytest.mark.slow]) for name in SHAPES]
)
def test_compiles_for_an_h200_without_spills(shape):
    kernels = compiled("h200", SHAPES[shape]).kernels
    # Of 256 and 384 threads: a core has 65,536.
    most = {"kvjax_paged_decode": 255, "kvjax_paged_prefill": 168}
    assert {kernel.name for kernel in kernels} <= set(most) and any("prefill" in kernel.name for kernel in kernels)
    for kernel in kernels:
        assert kernel.shared <= gpu_tiles.SHARED and kernel.registers <= most[kernel.name]
        if VERSION < (0, 12) and shape.startswith("latent"):
            continue  # JAX 0.11 makes code with more live at once; docs/gpu.md has what is spilled
        assert kernel.spilled == 0, kernel.text


@compilable
@pytest.mark.slow
def test_a_b200_lacks_wgmma():
    """Blackwell's tensor cores have other instructions: the kernels are Hopper's. LLVM ends the process over it."""
    program = "import test_gpu_kernels as t; t.compiled('b200', t.Shape(max_query=1))"
    paths = os.pathsep.join((str(pathlib.Path(__file__).parent), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode and "wgmma" in done.stderr and "not supported on" in done.stderr
