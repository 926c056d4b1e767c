"""One suite over every backend of paged attention, against a float64 oracle that shares no code with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pallas_kernels import (
    LAYOUTS,
    AttentionSpec,
    Lanes,
    init_pages,
    joined,
    kivi,
    merge,
    packed,
    paged_attention,
    write_rows,
)
from kvjax.pallas_kernels.packed import Codes, init_code_pages, write_code_rows
from kvjax.pallas_kernels.paged_attention import BACKENDS as ALL
from kvjax.pallas_kernels.quantize import dequantize, quantize, quantize_rows

BACKENDS = [name for name in ALL if name != "tpu" and not name.startswith("gpu")]
"""The others: compiled ahead of time in test_tpu_kernels.py, test_gpu_kernels.py, which also interprets the GPU's."""
jitted = jax.jit(paged_attention, static_argnames=("spec", "max_query", "backend"))


def attend(arrays, spec, max_query=1, backend="xla", **features):
    """`arrays` hold pages as (P, K, R, H); the layouts turn them round, and latent specs have no V."""
    q, k, v, table, lengths, starts = map(jnp.asarray, arrays)
    v_pages = None if spec.latent else v
    if backend.startswith("tpu") or spec.layout == "joined":
        lanes = Lanes(k.shape[1], k.shape[3], spec.latent or v.shape[3], spec.latent is not None)
        spec = dataclasses.replace(spec, layout="joined", lanes=lanes)
        v_rows = None if v_pages is None else v_pages.swapaxes(1, 2)
        k, v_pages = joined.tiles(joined.rows(k.swapaxes(1, 2), v_rows, lanes)), None
    elif spec.layout == "token_major":
        k, v_pages = k.swapaxes(1, 2), None if spec.latent else v.swapaxes(1, 2)
    else:
        k = k.swapaxes(2, 3)
    return jitted(q, k, v_pages, table, lengths, starts, spec=spec, max_query=max_query, backend=backend, **features)


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch: per slot, the rows it holds and how many of them are this step's queries."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    rows: int = 8
    padding: int = 3
    seed: int = 0
    pages: int | None = None

    def fitted(self, slots: int = 8, pages: int = 16, tokens: int = 112) -> "Case":
        """The same with empty slots, pages and padding up to sizes that others have, too: one compilation for all."""
        if self.pages is not None or len(self.lengths) > slots or max(self.lengths) > pages * self.rows:
            return self
        empty = (0,) * (slots - len(self.lengths))
        padding = (slots if max(self.queries) < 2 else tokens) - sum(self.queries)
        lengths, queries = self.lengths + empty, self.queries + empty
        return dataclasses.replace(self, lengths=lengths, queries=queries, pages=pages, padding=padding)


def build(case: Case):
    """Random pages in permuted order; rows beyond a length, and free pages, are NaN."""
    rng = np.random.default_rng(case.seed)
    B, M = len(case.lengths), case.pages or max(1, -(-max(case.lengths) // case.rows))
    P = B * M + 3
    table = rng.permutation(P)[: B * M].reshape(B, M).astype(np.int32)
    k = np.full((P, case.kv_heads, case.rows, case.dim), np.nan, np.float32)
    v = np.full((P, case.kv_heads, case.rows, case.value_dim), np.nan, np.float32)
    for b, length in enumerate(case.lengths):
        for position in range(length):
            page, row = table[b, position // case.rows], position % case.rows
            k[page, :, row] = rng.standard_normal((case.kv_heads, case.dim))
            v[page, :, row] = rng.standard_normal((case.kv_heads, case.value_dim))
    T = sum(case.queries) + case.padding
    q = rng.standard_normal((T, case.heads, case.dim)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    return q, k, v, table, np.asarray(case.lengths, np.int32), starts


def oracle(arrays, spec: AttentionSpec, sinks=None, slopes=None, tree=None, first=None, ahead=None):
    """Token by token, head by head, in float64."""
    q, k, v, table, lengths, starts = arrays
    if spec.latent:
        v = k[..., : spec.latent]
    T, N, _ = q.shape
    K, R = k.shape[1:3]
    out, lse = np.zeros((T, N, v.shape[-1])), np.full((T, N), -np.inf)
    for b, length in enumerate(lengths):
        count = starts[b + 1] - starts[b]
        for i in range(count):
            position = length + (0 if ahead is None else ahead[b]) - count + i
            start = 0 if spec.window is None else max(0, position - spec.window + 1)
            start = max(start, 0 if first is None else first[b])
            near = [*range(min(start, spec.sink_rows, length)), *range(start, min(position + 1, length))]
            if not near:
                continue
            if tree is not None:
                words = np.asarray(tree[starts[b] + i]).view(np.uint32)
                new = [j for j in range(count) if words[j // 32] >> np.uint32(j % 32) & 1]
                near = [*range(length - count), *(length - count + j for j in new)]
            keys = [(table[b, p // R], p % R) for p in near]
            for n in range(N):
                head = n // (N // K)
                k_rows = np.array([k[page, head, row] for page, row in keys], np.float64)
                v_rows = np.array([v[page, head, row] for page, row in keys], np.float64)
                s = k_rows @ q[starts[b] + i, n].astype(np.float64) * spec.scale
                if spec.soft_cap:
                    s = spec.soft_cap * np.tanh(s / spec.soft_cap)
                if slopes is not None:
                    s = s - slopes[n] * (position - np.array(near))
                if sinks is not None:
                    s = np.append(s, np.float64(sinks[n]))
                    v_rows = np.append(v_rows, np.zeros((1, v_rows.shape[1])), axis=0)
                top = s.max()
                p = np.exp(s - top)
                out[starts[b] + i, n] = p @ v_rows / p.sum()
                lse[starts[b] + i, n] = top + np.log(p.sum())
    return out, lse


def check(case: Case, spec: AttentionSpec, backend: str, tolerance: float = 2e-6, **features) -> None:
    arrays = build(case.fitted())
    want_out, want_lse = oracle(arrays, spec, **features)
    max_query = 1 if max(case.queries) < 2 else 128
    out, lse = attend(arrays, spec, max_query, backend, **features)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out), want_out, rtol=tolerance, atol=tolerance)


RAGGED = {
    "decode": Case(lengths=(1, 7, 8, 9, 40), queries=(1, 1, 1, 1, 1)),
    "decode with empty slots": Case(lengths=(0, 5, 0, 17, 0), queries=(0, 1, 0, 1, 0)),
    "nothing at all": Case(lengths=(0, 0), queries=(0, 0)),
    "whole prompts": Case(lengths=(7, 8, 9), queries=(7, 8, 9)),
    "chunks": Case(lengths=(50, 33, 64), queries=(13, 33, 1)),
    "decode rows beside a chunk": Case(lengths=(21, 3, 0, 70, 12), queries=(1, 1, 0, 45, 1)),
    "chunk longer than a block": Case(lengths=(100, 9), queries=(70, 9)),
    "fewer rows than new tokens": Case(lengths=(5, 0, 20, 33), queries=(13, 9, 0, 70)),
    "many slots": Case(lengths=tuple(range(1, 41)), queries=(1,) * 40),
}
SPECS = {
    "plain": AttentionSpec(0.25),
    "window 1": AttentionSpec(0.25, window=1),
    "window 5": AttentionSpec(0.25, window=5),
    "window over a page": AttentionSpec(0.25, window=20),
    "soft cap": AttentionSpec(0.25, soft_cap=1.5),
    "window and soft cap": AttentionSpec(0.25, window=9, soft_cap=2.0),
    "window and first rows": AttentionSpec(0.25, window=9, sink_rows=3),
    "token major": AttentionSpec(0.25, window=9, layout="token_major"),
    "joined": AttentionSpec(0.25, window=9, sink_rows=11, layout="joined", lanes=Lanes(2, 16, 16)),
}


def over_backends(**quick):
    """Parametrizes over names and backends; interpreted kernels, which take long to compile, quickly only for some.

    quick: name of the argument = (all values, those of a quick run).
    """
    [(name, (values, some))] = quick.items()
    interpreted = [backend for backend in BACKENDS if backend.endswith("interpret")]
    cases = [
        pytest.param(value, backend, id=f"{value}-{backend}", marks=[pytest.mark.slow] if slow else [])
        for value in values
        for backend in BACKENDS
        for slow in [backend in interpreted and value not in some]
    ]
    return pytest.mark.parametrize((name, "backend"), cases)


@over_backends(spec=(SPECS, ("plain", "window and soft cap", "window and first rows")))
@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
def test_matches_float64_oracle(case, spec, backend):
    check(case, SPECS[spec], backend)


SINKS = {"no sinks": {}, "sinks": {"sinks": np.array([-1.0, 0.5, 3.0, 9.0], np.float32)}}
SLOPES = {"no slopes": {}, "slopes": {"slopes": np.array([0.5, 0.25, 0.0, 0.0625], np.float32)}}
FEATURES = {f"{a} {b}": SINKS[a] | SLOPES[b] for a in SINKS for b in SLOPES if a == "sinks" or b == "slopes"}


@over_backends(spec=(("plain", "window and soft cap", "token major"), ("window and soft cap",)))
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("case", ["decode with empty slots", "chunks", "decode rows beside a chunk"])
def test_sinks_and_slopes(case, spec, features, backend):
    check(RAGGED[case], SPECS[spec], backend, **features)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink_rows", [0, 9])
@pytest.mark.parametrize("queries", [(1, 1, 1, 1, 0), (1, 17, 30, 1, 0)])
def test_pages_behind_the_window_are_not_read(queries, sink_rows, backend):
    """They were given back: their entries name no page, and the page that stands there for want of another is NaN."""
    case = Case((70, 90, 30, 5, 0), queries).fitted(tokens=64)
    spec = AttentionSpec(0.25, window=20, sink_rows=sink_rows)
    arrays = build(case)
    expected, expected_lse = oracle(arrays, spec)
    table = arrays[3].copy()
    for b, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        kept = -(-sink_rows // case.rows)
        table[b, kept : max(kept, (length - count - 20 + 1) // case.rows)] = 2**30
    arrays = *arrays[:3], table, *arrays[4:]
    out, lse = attend(arrays, spec, max(queries), backend)
    live = sum(case.queries)
    np.testing.assert_allclose(out[:live], expected[:live], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse[:live], expected_lse[:live], rtol=2e-5, atol=2e-6)


@over_backends(layout=(LAYOUTS, ("joined",)))
@pytest.mark.parametrize("case", ["decode", "chunks", "decode rows beside a chunk"])
def test_latent_values(case, layout, backend):
    """One head of keys, whose first numbers are the values (MLA)."""
    case = dataclasses.replace(RAGGED[case], heads=6, kv_heads=1, dim=24)
    lanes = Lanes(1, 24, 16, latent=True) if layout == "joined" else None
    check(case, AttentionSpec(0.25, latent=16, layout=layout, lanes=lanes), backend)


@over_backends(dim=((576,), ()))
def test_the_latent_head_of_deepseek(dim, backend):
    check(Case((33, 5, 130), (1, 5, 9), 16, 1, dim, 512, 32), AttentionSpec(192**-0.5, latent=512), backend, 1e-5)


UP = {
    "one group of heads": (4, 16, 128, 128, 40),
    "two groups": (16, 24, 128, 32, 16),
    "latents that fill no tile": (4, 16, 24, 40, 16),
}
"""Heads, rotated numbers of a key, of a latent, of a head's keys without position, of its values."""


@over_backends(up=(UP, ("one group of heads",)))
@pytest.mark.parametrize("queries", [(1, 1, 0, 1), (1, 70, 0, 9)], ids=["decode", "chunks"])
@pytest.mark.parametrize("window", [None, 30])
def test_keys_and_values_made_of_latents(window, queries, up, backend):
    """MLA, absorbed or expanded: attention over the keys and values of every head."""
    heads, r, latent, nope, value_dim = UP[up]
    case = Case((130, 75, 0, 33), queries, heads, 1, latent + r, latent, 16, pages=16)
    q, rows, _, *rest = build(case)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((*q.shape[:2], nope + r)).astype(np.float32)
    weights = (rng.standard_normal((heads, nope + value_dim, latent)) / latent**0.5).astype(np.float32)
    made = np.einsum("pkrc,nhc->pnrh", rows[..., :latent].astype(np.float64), weights)
    turned = np.broadcast_to(rows[..., latent:], (*made.shape[:3], r))
    keys = np.concatenate([made[..., :nope], turned], axis=-1)
    spec = AttentionSpec(0.1, window=window)
    want, want_lse = oracle((q, keys, made[..., nope:], *rest), spec)
    spec = dataclasses.replace(spec, latent=latent)
    out, lse = attend((q, rows, rows, *rest), spec, max(queries), backend, up=jnp.asarray(weights))
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)


HEADS = [(1, 1), (4, 4), (8, 1), (9, 3), (14, 2)]
DIMS = [(64, 64, 16), (80, 80, 32), (128, 128, 16), (24, 16, 8)]
QUICK = {((9, 3), (64, 64, 16)), ((4, 4), (80, 80, 32)), ((8, 1), (24, 16, 8))}
"""Of the shapes, for which a kernel is interpreted in a quick run, too: it takes long to compile."""
SHAPES = [
    pytest.param(heads, dims, backend, marks=[pytest.mark.slow] if slow else [])
    for backend in BACKENDS
    for heads in HEADS
    for dims in DIMS
    for slow in [backend.startswith("tpu") and (heads, dims) not in QUICK]
]


@pytest.mark.parametrize("heads, dims, backend", SHAPES)
def test_shapes(heads, dims, backend):
    case = Case((33, 5, 17), (1, 5, 9), *heads, *dims)
    check(case, AttentionSpec(dims[0] ** -0.5), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_thousands_of_rows(backend):
    check(Case((2500, 3000), (1, 2), heads=2, kv_heads=1, rows=64), AttentionSpec(0.25), backend)


ERROR = {"int8": 2e-4, "float8_e4m3fn": 5e-3, "float8_e5m2": 5e-3, "int4": 1e-2}
"""Of attention over codes against attention over what they mean: queries and weights are cut into 8-bit parts."""


def quantized(case: Case, storage: str, by_page: bool):
    """The case with codes for K and V, their scales, and what they mean; what is nobody's is NaN where it can be."""
    q, k, v, *rest = build(case)
    codes, meaning, scales = [], [], []
    for x in (k, v):
        _, scale = quantize_rows(jnp.nan_to_num(x), storage)  # (P, K, R)
        held = ~np.isnan(x).any(axis=3)
        if by_page:
            scale = jnp.broadcast_to(jnp.where(held, scale, 0).max(axis=2, keepdims=True), scale.shape)
        else:
            scale = jnp.where(held, scale, jnp.nan)
        code = quantize(jnp.nan_to_num(x), jnp.nan_to_num(scale, nan=1.0), storage)
        codes.append(jnp.where(np.isnan(x), jnp.nan, code.astype(jnp.float32)).astype(code.dtype))
        meaning.append(np.asarray(code.astype(jnp.float32) * scale[..., None]))
        scales.append(scale[:, :, 0] if by_page else scale)
    return (q, *codes, *rest), (q, *meaning, *rest), jnp.concatenate(scales, axis=1)


@over_backends(storage=(ERROR, ("int8", "float8_e4m3fn")))
@pytest.mark.parametrize("by_page", [False, True], ids=["by row", "by page"])
@pytest.mark.parametrize("queries", [(1, 0, 1, 1), (1, 9, 0, 40)], ids=["decode", "chunks"])
def test_codes_and_scales(queries, storage, by_page, backend):
    case = Case((130, 20, 300, 257), queries, heads=4, kv_heads=2, dim=64, value_dim=64, rows=128)
    arrays, meaning, scales = quantized(case, storage, by_page)
    want, want_lse = oracle(meaning, AttentionSpec(0.125))
    out, lse = attend(arrays, AttentionSpec(0.125), max(queries), backend, scales=scales)
    tolerance = 1e-5
    if backend.startswith("tpu"):  # chunks are multiplied in bfloat16
        tolerance = ERROR[storage] if max(queries) == 1 else 1e-2
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out), want, rtol=tolerance, atol=tolerance)


@over_backends(storage=(("int8", "float8_e4m3fn"), ()))
def test_codes_of_latents(storage, backend):
    """MLA's latents in 8 bits with a scale for each row: absorbed where a token stands alone, else expanded."""
    heads, r, latent, nope, value_dim = UP["two groups"]
    case = Case((130, 20, 300), (1, 0, 40), heads, 1, latent + r, latent, 128)
    q, rows, _, *rest = build(case)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((*q.shape[:2], nope + r)).astype(np.float32)
    weights = (rng.standard_normal((heads, nope + value_dim, latent)) / latent**0.5).astype(np.float32)
    codes, scales = quantize_rows(jnp.nan_to_num(rows), storage)
    held = np.where(np.isnan(rows), np.nan, np.asarray(codes.astype(jnp.float32) * scales[..., None]))
    scales = jnp.where(np.isnan(rows).any(axis=3), jnp.nan, scales)
    spec = AttentionSpec(0.1, latent=latent)
    want, want_lse = attend((q, held, held, *rest), spec, 40, "reference", up=jnp.asarray(weights))
    out, lse = attend((q, codes, codes, *rest), spec, 40, backend, up=jnp.asarray(weights), scales=scales)
    tolerance = 1e-2 if backend.startswith("tpu") else 1e-5
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out), want, rtol=tolerance, atol=tolerance)


ELSEWHERE = {
    "first": (AttentionSpec(0.25), (0, 33, 20, 0, 70, 0), None),
    "ahead": (AttentionSpec(0.25), None, (0, 45, 70, 7, 3, 1)),
    "all": (AttentionSpec(0.25, window=60, sink_rows=3, soft_cap=2.0), (0, 33, 20, 0, 70, 5), (1, 45, 90, 7, 30, 1)),
}
"""Rows that a call does not see: the first ones of each slot, and those behind the ones held."""


@over_backends(what=(ELSEWHERE, ("all",)))
@pytest.mark.parametrize("queries", [(1,) * 6, (1, 40, 4, 0, 1, 1)], ids=["decode", "chunks"])
def test_rows_that_are_elsewhere(queries, what, backend):
    """Pages wholly before `first` are anybody's, and their entries of the table anything; slot 4 sees nothing here."""
    spec, first, ahead = ELSEWHERE[what]
    case = Case((40, 65, 64, 9, 69, 0) if ahead else (40, 65, 64, 9, 90, 0), queries, rows=16, pages=6)
    case = dataclasses.replace(case, lengths=(*case.lengths[:5], 0 if ahead else 1))
    arrays = q, k, v, table, lengths, starts = build(case)
    given = {name: np.asarray(x, np.int32) for name, x in (("first", first), ("ahead", ahead)) if x}
    want, want_lse = oracle(arrays, spec, **given)
    stale = table.copy()
    for b, row in enumerate(first or ()):
        stale[b, -(-spec.sink_rows // 16) : row // 16] = 10**6 if b % 2 else stale[(b + 1) % 6, 0]
    out, lse = attend((q, k, v, stale, lengths, starts), spec, max(queries), backend, **given)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(np.asarray(out), want, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_rows_behind_are_never_read():
    """What the interpreter would refuse: a DMA from a page that does not exist."""
    case = Case((90,), (1,), rows=16, pages=6)
    q, k, v, table, lengths, starts = build(case)
    table[0, :3] = 10**8
    first = np.asarray([48], np.int32)
    for queries in (1, 20):
        starts = np.asarray([0, queries], np.int32)
        arrays = np.resize(q, (24, *q.shape[1:])), k, v, table, lengths, starts
        want, _ = oracle(arrays, AttentionSpec(0.25), first=first)
        out, _ = attend(arrays, AttentionSpec(0.25), queries, "tpu_interpret", first=first)
        np.testing.assert_allclose(np.asarray(out), want, rtol=2e-6, atol=2e-6)


STORAGES = {
    "int4": Codes("int4", "int4"),
    "int4 by page": Codes("int4", "int4"),
    "kivi4": Codes("kivi4", "kivi4"),
    "kivi4 and kivi2": Codes("kivi4", "kivi2", 64),
    "int8 and int4": Codes("int8", "int4"),
    "kivi2 and float8": Codes("kivi2", "float8_e5m2"),
}
LAYOUT_OF = {"reference": "token_major", "xla": "head_major", "tpu_interpret": "joined"}


def in_bytes(case: Case, codes: Codes, layout: str, by_page: bool):
    """The case in packed pages of a layout, their scales, and what they mean.

    Bytes of nobody's rows are 0xFF, and their scales NaN. By page, all rows have the largest number 7, so that a page's
    scale is that of its rows.
    """
    q, k, _, table, lengths, starts = build(case)
    rng = np.random.default_rng(case.seed + 1)
    lanes = Lanes(case.kv_heads, case.dim, case.value_dim)
    pages = init_code_pages(k.shape[0], case.rows, lanes, codes, layout)
    poison = {jnp.dtype("uint8"): 0xFF, jnp.dtype("uint32"): 0xFFFFFFFF, jnp.dtype("float32"): np.nan}
    pages = jax.tree.map(lambda x: jnp.full_like(x, poison[x.dtype]), pages)
    written = [-(-length // 64) * 64 if "kivi" in codes.key else length for length in lengths]
    place = np.concatenate([np.arange(n) for n in written])
    page = np.concatenate([table[b, np.arange(n) // case.rows] for b, n in enumerate(written)])
    row = (place % case.rows).astype(np.int32)
    numbers, meanings = [], []
    for dim, storage, axis in ((case.dim, codes.key, 0), (case.value_dim, codes.value, 2)):
        x = jnp.asarray(rng.standard_normal((len(page), case.kv_heads, dim)) + 0.5, jnp.float32)
        if by_page:
            x = jnp.round(x).clip(-7, 7).at[..., 0].set(7)
        if packed.grouped(storage):
            meaning = kivi.dequantize_groups(*kivi.quantize_groups(x, packed.BITS[storage], codes.group, axis), axis)
        else:
            meaning = dequantize(*quantize_rows(x, storage))
        numbers.append(x)
        meanings.append(np.full((k.shape[0], case.kv_heads, case.rows, dim), np.nan, np.float32))
        meanings[-1][page, :, row] = np.asarray(meaning)
    pages = write_codes(pages, *numbers, jnp.asarray(page), jnp.asarray(row), codes, layout)
    scales = pages.k_scales, pages.v_scales
    if by_page:
        scales = scales[0][..., 0], scales[1][..., 0]
    return (q, pages.k, pages.v, table, lengths, starts), scales, (q, *meanings, table, lengths, starts)


write_codes = jax.jit(write_code_rows, static_argnums=(5, 6))


@over_backends(storage=(STORAGES, ("kivi4",)))
@pytest.mark.parametrize("queries", [(1, 0, 1, 1), (1, 9, 0, 40)], ids=["decode", "chunks"])
def test_packed_codes(queries, storage, backend):
    """Some rows are elsewhere, too, as they are where K has groups: the queries stand behind all rows held."""
    case = Case((140, 5, 320, 257), queries, 4, 2, 64, 64, rows=128, pages=3)
    codes, layout = STORAGES[storage], LAYOUT_OF[backend]
    arrays, scales, meaning = in_bytes(case, codes, layout, "page" in storage)
    given = {"first": np.asarray([0, 0, 150, 100], np.int32), "ahead": np.asarray([3, 40, 0, 40], np.int32)}
    want, want_lse = oracle(meaning, AttentionSpec(0.125), **given)
    spec = AttentionSpec(0.125, codes=codes, layout=layout, lanes=Lanes(2, 64, 64) if layout == "joined" else None)
    out, lse = jitted(
        *arrays[:2], arrays[2], *map(jnp.asarray, arrays[3:]), spec=spec, max_query=max(queries), backend=backend,
        scales=scales, **given,
    )  # fmt: skip
    tolerance = 1e-5
    if backend.startswith("tpu"):  # keys of groups, and chunks, are multiplied in bfloat16
        tolerance = 1e-2 if codes.key.startswith("kivi") or max(queries) > 1 else 5e-3
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [1, 9])
def test_a_recent_window_is_merged_with_what_is_quantized(count):
    """KIVI: 128 rows in groups, 37 as they were, `count` new tokens: two calls and a merge are one over both."""
    case = Case((128,), (count,), 4, 2, 64, 64, rows=64, padding=0)
    arrays, scales, (q, k, v, table, _, starts) = in_bytes(case, Codes("kivi4", "kivi4"), "head_major", False)
    rng = np.random.default_rng(5)
    recent = [rng.standard_normal((1, 2, 64, 64)).astype(np.float32) for _ in range(2)]
    spec, length = AttentionSpec(0.125, soft_cap=3.0), np.asarray([37], np.int32)
    old = jitted(
        *arrays[:2], arrays[2], *map(jnp.asarray, arrays[3:]), scales=scales, ahead=length, max_query=count,
        spec=dataclasses.replace(spec, codes=Codes("kivi4", "kivi4")), backend="xla",
    )  # fmt: skip
    new = attend((q, *recent, np.zeros((1, 1), np.int32), length, starts), spec, count)
    out, lse = merge(jnp.stack([old[0], new[0]]), jnp.stack([old[1], new[1]]))
    both = [np.concatenate([x, y]) for x, y in zip((k, v), recent, strict=True)]
    table = np.append(table, np.int32(k.shape[0]))[None]
    want, want_lse = oracle((q, *both, table, np.asarray([165]), starts), spec)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


PAIRED = ("window", "first rows", "soft cap", "sinks", "slopes", "scales", "tree", "odd heads")
PAIRS = [
    (a, b)
    for i, a in enumerate(PAIRED)
    for b in PAIRED[i + 1 :]
    if not ("tree" in (a, b) and {"window", "first rows", "slopes"} & {a, b})  # refused
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_pairs_of_features(pair, backend):
    """Decode rows beside a chunk: each feature with each other one."""
    heads, kv_heads = (9, 3) if "odd heads" in pair else (4, 2)
    lengths, queries = (300, 0, 131, 140), (1, 0, 9, 1)
    case = Case(lengths, queries, heads, kv_heads, 32, 32, rows=128)
    window = 140 if {"window", "first rows"} & set(pair) else None
    spec = AttentionSpec(
        0.2, window, soft_cap=2.0 if "soft cap" in pair else None, sink_rows=3 if "first rows" in pair else 0
    )
    features: dict[str, Any] = {}
    if "sinks" in pair:
        features["sinks"] = np.linspace(-1, 4, heads).astype(np.float32)
    if "slopes" in pair:
        features["slopes"] = np.linspace(0, 0.5, heads).astype(np.float32)
    if "tree" in pair:
        chains = np.tril(np.random.default_rng(0).integers(0, 2, (9, 9))) | np.eye(9, dtype=int)
        tree = np.ones((sum(queries) + case.padding, 1), np.int32)  # a token alone sees itself
        tree[1:10, 0] = (chains << np.arange(9)).sum(axis=1)
        features["tree"] = tree
    scales: dict[str, Any] = {}
    tolerance = 1e-5
    if "scales" in pair:
        arrays, meaning, of_rows = quantized(case, "int8", False)
        scales, tolerance = {"scales": of_rows}, 1e-5 if not backend.startswith("tpu") else 1e-2
    else:
        arrays = meaning = build(case)
    want, want_lse = oracle(meaning, spec, **features)
    out, lse = attend(arrays, spec, max(queries), backend, **features, **scales)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(np.asarray(out), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 0, 12)], ids=["decode", "chunks"])
def test_a_table_for_each_head(counts, backend):
    """Every kv head of a slot has its own pages, and its own number of them."""
    K, G, R, H, M = 2, 3, 16, 32, 4
    rng = np.random.default_rng(0)
    B, T = len(counts), sum(counts) + 2
    lengths = np.maximum(rng.integers(1, M * R, (B, K)), np.asarray(counts)[:, None]).astype(np.int32)
    table = rng.permutation(B * K * M).reshape(B, K, M).astype(np.int32)
    k, v = (rng.standard_normal((B * K * M, 1, R, H)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((T, K * G, H)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    out, lse = attend((q, k, v, table, lengths, starts), AttentionSpec(0.25), max(counts), backend)
    for head in range(K):
        mine = slice(head * G, (head + 1) * G)
        alone = q[:, mine], k, v, table[:, head], lengths[:, head], starts
        want, want_lse = oracle(alone, AttentionSpec(0.25))
        np.testing.assert_allclose(np.asarray(out)[:, mine], want, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(np.asarray(lse)[:, mine], want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [7, 40])
def test_a_tree_of_tokens(count, backend):
    """Each new token sees its ancestors and what came before; its own path alone gives the same."""
    rng = np.random.default_rng(count)
    parent = [rng.integers(-1, i) if i else -1 for i in range(count)]
    paths: list[list[int]] = []
    for i in range(count):
        paths.append([*(paths[parent[i]] if parent[i] >= 0 else []), i])
    words = np.zeros((count + 4, -(-count // 32)), np.uint32)
    for i, path in enumerate(paths):
        for j in path:
            words[i, j // 32] |= np.uint32(1 << (j % 32))
    case = Case((37 + count,), (count,), rows=16, padding=4)
    arrays = q, k, v, table, *_ = build(case)
    out, lse = attend(arrays, AttentionSpec(0.25), count, backend, tree=jnp.asarray(words.view(np.int32)))
    order = [*range(37)]
    for i, path in enumerate(paths):
        rows = [(table[0, p // 16], p % 16) for p in order + [37 + j for j in path]]
        flat = [np.stack([x[page, :, row] for page, row in rows], axis=1)[None] for x in (k, v)]  # one page of a path
        alone = q[i : i + 1], *flat, np.zeros((1, 1), np.int32), np.asarray([len(rows)]), np.asarray([0, 1])
        want, want_lse = oracle(alone, AttentionSpec(0.25))
        np.testing.assert_allclose(np.asarray(out)[i], want[0], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(np.asarray(lse)[i], want_lse[0], rtol=2e-6, atol=2e-6)


SLOTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=6, max_size=6)


@settings(max_examples=100, deadline=None)
@given(SLOTS, st.sampled_from([None, 1, 8, 30]), st.integers(0, 2**16))
def test_any_ragged_batch(slots, window, seed):
    check_any(slots, AttentionSpec(0.25, window=window), seed, "xla")


@settings(max_examples=30, deadline=None)
@given(SLOTS, st.sampled_from([(None, 0), (13, 3)]), st.integers(0, 2**16))
def test_any_ragged_batch_interpreted(slots, window, seed):
    check_any(slots, AttentionSpec(0.25, window=window[0], sink_rows=window[1]), seed, "tpu_interpret")


def check_any(slots, spec, seed, backend):
    lengths = tuple(length for length, _ in slots)
    queries = tuple(min(length, query) for length, query in slots)
    case = Case(lengths, queries, padding=250 - sum(queries), seed=seed, pages=5)  # one shape, one compilation
    check(case, spec, backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("queries", [(1, 1), (1, 20)], ids=["decode", "chunks"])
def test_bfloat16_pages_accumulate_in_float32(queries, backend):
    q, k, v, *rest = build(Case(lengths=(300, 41), queries=queries, rows=32))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    want, _ = oracle((*(x.astype(np.float32) for x in (q, k, v)), *rest), AttentionSpec(0.25))
    out, lse = attend((q, k, v, *rest), AttentionSpec(0.25), max(queries), backend)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    # The weights are rounded to bfloat16 (8 bits) before they meet V; nothing else is.
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2**-8 * 2, rtol=2**-7)


def test_partial_results_merge_by_log_sum_exp():
    """Attention over two halves of a context, merged by lse, is attention over the whole."""
    case = Case(lengths=(32,), queries=(1,), padding=0)
    q, k, v, table, lengths, starts = build(case)
    spec = AttentionSpec(0.25)
    whole, whole_lse = attend((q, k, v, table, lengths, starts), spec)
    half = np.asarray([16], np.int32)
    parts = [attend((q, k, v, t, half, starts), spec) for t in (table[:, :2], table[:, 2:])]
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * jnp.exp(part - lse)[..., None] for out, part in parts)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)
    np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_rows_puts_tokens_in_place_and_drops_padding(layout):
    k_pages, v_pages = init_pages(3, 4, Lanes(2, 5, 6), jnp.dtype("float32"), layout)
    k, v = jnp.arange(30.0).reshape(3, 2, 5), jnp.arange(36.0).reshape(3, 2, 6)
    page, row = jnp.asarray([2, 0, 3], jnp.int32), jnp.asarray([1, 3, 0], jnp.int32)
    assert (v_pages is None) == (layout == "joined")
    k_pages, v_pages = write_rows(k_pages, v_pages, k, v, page, row, layout)
    if v_pages is None:
        k_pages, v_pages = joined.split(joined.rows_of(k_pages), Lanes(2, 5, 6))
    elif layout == "head_major":
        k_pages = k_pages.transpose(0, 3, 1, 2)
        v_pages = v_pages.swapaxes(1, 2)
    np.testing.assert_array_equal(k_pages[2, 1], k[0])
    np.testing.assert_array_equal(v_pages[0, 3], v[1])
    assert float(k_pages.sum()) == float(k[:2].sum())


def test_refuses_what_it_cannot_do():
    arrays = build(Case((3,), (1,)))
    with pytest.raises(NotImplementedError, match="backend 'mosaic' does not exist"):
        attend(arrays, AttentionSpec(1.0), backend="mosaic")
    with pytest.raises(ValueError, match="3 query heads do not divide into 2 kv heads"):
        attend((arrays[0][:, :3], *arrays[1:]), AttentionSpec(1.0))
    with pytest.raises(ValueError, match="V has pages of its own, or spec"):
        q, k, _, table, lengths, starts = map(jnp.asarray, arrays)
        paged_attention(q, k, None, table, lengths, starts, AttentionSpec(1.0), max_query=1)
    with pytest.raises(ValueError, match="packed pages have a pair of scales"):
        attend(arrays, AttentionSpec(1.0, codes=Codes("int4", "int4")))
    with pytest.raises(NotImplementedError, match=r"rows elsewhere .* on the GPU's kernels: take the backend 'xla'"):
        attend(arrays, AttentionSpec(1.0, layout="token_major"), backend="gpu", first=np.zeros(1, np.int32))
    with pytest.raises(NotImplementedError, match="a tree whose rows are not in these pages"):
        ahead = {"ahead": np.ones(1, np.int32), "tree": jnp.ones((4, 1), jnp.int32)}
        attend(arrays, AttentionSpec(1.0), **ahead)
    with pytest.raises(ValueError, match="window is 0"):
        AttentionSpec(1.0, window=0)
