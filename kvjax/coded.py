"""Layers whose K and V are packed codes, some of them with their newest rows in full precision besides (KIVI).

Codes are made once. Where a scale belongs to one row, a row's codes are written in the step that computes it. Where K
has groups of rows, they are written when the group is full, out of the rows in full precision: those have pages of
their own, of a group of layers (`CacheConfig.groups`) that gives back what is behind its window of W rows. A group of
rows is never longer than W, so its rows are still there.

Attention is two calls, merged. A token sees the W rows up to its own in full precision, and the codes of those before.
So what it sees depends on its place alone, not on how the job was cut into steps. KIVI (2402.02750) keeps K's rows
until a block of R is full, and V's newest R; here both are V's. A prompt's own tokens see codes, too, from W rows on;
the authors' prompt sees none.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import spread
from kvjax.control import for_each_page
from kvjax.pallas_kernels import (
    AttentionSpec,
    CodePages,
    Lanes,
    axes_of,
    init_code_pages,
    merge,
    paged_attention,
    read_pages,
    rotate,
    write_code_rows,
    write_rows,
)
from kvjax.pallas_kernels.packed import grouped
from kvjax.sharding import heads_and_rows
from kvjax.types import KVSpec

if TYPE_CHECKING:
    from kvjax.cache import BlockTable, CacheConfig, KVPages, Placement

AT_ONCE = 16
"""Groups of rows that are quantized in one go, at most."""


def init(config: CacheConfig, spec: KVSpec, pages: int, rows: int, parts: int) -> CodePages:
    """Zeroed pages of one array, of so many rows, of all `parts` that heads are divided into; `spec` is one part's."""
    codes = spec.stored.codes
    assert codes is not None
    lanes = Lanes(spec.kv_heads, spec.key_dim, spec.value_dim, spec.latent)
    one = init_code_pages(pages, rows, lanes, codes, config.layout)
    (k, v, k_scales, v_scales), _ = _axes(config, spec)

    def wide(x: jax.Array, axis: int) -> jax.Array:
        return jnp.concatenate([x] * parts, axis=axis) if parts > 1 else x

    return CodePages(
        wide(one.k, k),
        None if one.v is None else wide(one.v, v),
        wide(one.k_scales, k_scales),
        wide(one.v_scales, v_scales),
    )


def page_bytes(config: CacheConfig, spec: KVSpec) -> int:
    """Bytes of a page in one layer on a chip."""
    return jax.eval_shape(lambda: init(config, spec, 1, config.rows // config.seq, 1)).nbytes


def shardings(config: CacheConfig, spec: KVSpec, heads: str | None, rows: str | None) -> tuple[PartitionSpec, ...]:
    """Of the codes of K and of V, and the scales of K and of V: heads and rows over those mesh axes."""
    return tuple(heads_and_rows(*axes, heads, rows) for axes in zip(*_axes(config, spec), strict=True))


def _axes(config: CacheConfig, spec: KVSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which axis counts heads, and which rows or groups of them: of the codes of K and of V, and of their scales."""
    codes, ((k, k_rows), (v, v_rows)) = spec.stored.codes, axes_of(config.layout)
    assert codes is not None
    scales = (2, 1) if grouped(codes.key) else (1, 2)
    return (k, v, scales[0], 1), (k_rows, v_rows, scales[1], 2)


def attend(
    config: CacheConfig,
    spec: KVSpec,
    what: AttentionSpec,
    backend: str,
    placement: Placement,
    pages: tuple[KVPages, ...],
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    tables: tuple[BlockTable, ...],
    offsets: tuple[jax.Array, ...],
    features: dict[str, jax.Array | None],
) -> tuple[tuple[KVPages, ...], jax.Array]:
    """`kvjax.cache.attend` on one chip: `pages`, `tables` and `offsets` of the codes, then of the rows in full
    precision, if there are any."""
    stored, codes, n = spec.stored, spec.stored.codes, config.seq
    assert codes is not None
    W, slopes, deal = stored.recent, features["slopes"], spread.deal(n)
    sinks = features["sinks"] if deal is None else None  # of dealt rows, they join the denominator of the whole
    if stored.rotate:
        q, k = rotate(q), None if k is None else rotate(k)
    if placement.divided:  # queries go to every chip, which also writes the rows of its own pages
        q = spread.whole(q, n)
        k, v = (None if x is None else spread.whole(x, n) for x in (k, v))
    held = CodePages(pages[0].k[0], pages[0].v[0] if pages[0].v else None, *pages[0].scales[0])
    full = pages[1] if W else None
    if k is not None and v is not None:
        held, full = _written(config, spec, placement, held, full, k, v, tables, offsets, backend)
    before = None if what.window is None else what.window - W
    out, lse = paged_attention(
        q, held.k, held.v, tables[0].pages + offsets[0], jnp.maximum(tables[0].lengths - W, 0), placement.row_starts,
        dataclasses.replace(what, window=before, codes=codes), sinks=None if W else sinks, slopes=slopes,
        scales=(held.k_scales, held.v_scales), deal=deal, max_query=placement.max_query,
        with_lse=W > 0 or deal is not None, backend=backend,
    )  # fmt: skip
    kept = pages[0].replace(
        k=(held.k,), v=() if held.v is None else (held.v,), scales=((held.k_scales, held.v_scales),)
    )

    def of_all(out: jax.Array, lse: jax.Array | None) -> jax.Array:
        """With what other chips' rows give."""
        if deal is None:
            return out.astype(q.dtype)
        assert lse is not None
        return spread.merged(out, lse, features["sinks"], placement.divided, n)[0].astype(q.dtype)

    if full is None:
        return (kept,), of_all(out, lse)
    near, near_lse = paged_attention(
        q, full.k[0], full.v[0] if full.v else None, tables[1].pages + offsets[1], tables[1].lengths,
        placement.row_starts, dataclasses.replace(what, window=W), slopes=slopes, deal=deal,
        max_query=placement.max_query, backend=backend,
    )  # fmt: skip
    assert lse is not None and near_lse is not None
    if slopes is not None:  # they were W rows nearer there
        lse = lse - W * slopes[None, :]
    return (kept, full), of_all(*merge(jnp.stack([out, near]), jnp.stack([lse, near_lse]), sinks))


def _written(
    config: CacheConfig,
    spec: KVSpec,
    placement: Placement,
    held: CodePages,
    full: KVPages | None,
    k: jax.Array,
    v: jax.Array,
    tables: tuple[BlockTable, ...],
    offsets: tuple[jax.Array, ...],
    backend: str,
) -> tuple[CodePages, KVPages | None]:
    """The step's rows in the pages in full precision, if there are any, and as codes."""
    stored, codes = spec.stored, spec.stored.codes
    assert codes is not None
    how: Any = {"max_query": placement.max_query, "backend": backend}
    if full is not None:
        page, row, runs = placement.places(config, tables[1], offsets[1], full.k[0].shape[0])
        k_pages, v_pages = write_rows(
            full.k[0], full.v[0] if full.v else None, k, v, page, row, config.layout, slots=runs, **how
        )
        full = full.replace(k=(k_pages,), v=() if v_pages is None else (v_pages,))
    if stored.grouped:
        assert full is not None
        return _with_full_groups(config, spec, placement, held, full, tables, offsets, backend), full
    page, row, runs = placement.places(config, tables[0], offsets[0], held.k.shape[0])
    return write_code_rows(held, k, v, page, row, codes, config.layout, slots=runs, **how), full


def _with_full_groups(
    config: CacheConfig,
    spec: KVSpec,
    placement: Placement,
    held: CodePages,
    full: KVPages,
    tables: tuple[BlockTable, ...],
    offsets: tuple[jax.Array, ...],
    backend: str,
) -> CodePages:
    """The codes of all groups of rows that this step filled, written."""
    codes, lanes = spec.stored.codes, Lanes(spec.kv_heads, spec.key_dim, spec.value_dim)
    assert codes is not None
    G, R, P, deal = codes.group, config.rows // config.seq, held.k.shape[0], spread.deal(config.seq)
    T, B = placement.slots.shape[0], config.slots
    tokens = placement.row_starts[1:] - placement.row_starts[:-1]
    lengths = tables[0].lengths
    within = jnp.arange(G, dtype=jnp.int32)

    def quantize(held: CodePages, slot: jax.Array, number: jax.Array) -> CodePages:
        """Groups (W,) of slots (W,), B for none."""
        here, own, start = slot < B, jnp.minimum(slot, B - 1), jnp.maximum(number * G, 0)
        column = jnp.minimum(start // config.rows, config.pages_per_slot - 1)
        if deal is not None:  # a chip has whole groups
            here, start = here & deal.owns(start, R), deal.rows_before(start, R)
        target, source = (table.pages[own, column] + offset for table, offset in zip(tables, offsets, strict=True))
        rows = start[:, None] % R + within[None, :]  # (W, G)
        k, v = (
            jnp.take_along_axis(x, rows[..., None, None], axis=1).reshape(-1, *x.shape[2:])
            for x in read_pages(full.k[0], full.v[0] if full.v else None, source, lanes, config.layout)
        )
        page = jnp.repeat(jnp.where(here, target, P), G)
        return write_code_rows(
            held, k, v, page, rows.reshape(-1), codes, config.layout,
            slots=slot.shape[0], max_query=G, backend=backend,
        )  # fmt: skip

    first, last = (lengths - tokens) // G, lengths // G
    return for_each_page(first, last, quantize, held, width=min(AT_ONCE, T // G + B))
