"""Paged attention by TPU kernels: slots with one token, then those with more (prompt chunks, trees)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import joined
from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.packed import Codes
from kvjax.pallas_kernels.paged_attention import latent, tpu_sizes
from kvjax.pallas_kernels.paged_attention.reference import query_slots
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.paged_attention.tpu_chunks import attend_chunks, expands
from kvjax.pallas_kernels.paged_attention.tpu_decode import DecodeBlocks, attend_rows

STORAGE = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")

FETCHED = 16 << 20  # bytes of a block of decode: two lie in VMEM, of which a core of a TPU7x has 64 MiB

PIECE_OF_CODES = 1024  # rows of a piece of packed codes, whose unpacking makes a long program of a longer one


def decode_blocks(
    rows: int, page: int, row_bytes: int, limits: tuple[int, int, int] = tpu_sizes.DECODE
) -> DecodeBlocks:
    """How decode is cut up, for slots of up to `rows` rows in pages of `page` rows of `row_bytes` bytes.

    limits: see `tpu_sizes.DECODE`.
    """
    most, piece, ahead = limits
    page = max(page, joined.LANES)
    block = page
    while block < most and 2 * block * row_bytes <= FETCHED and block < rows:
        block *= 2
    piece = min(block, piece)
    sizes = [piece, *(size for size in (1024, 512, 256) if size < piece)]
    return DecodeBlocks(block, tuple((size, ahead) for size in sizes))


def check(layout: str, rows: int, storage: jnp.dtype, scaled: bool, codes: Codes | None = None) -> None:
    """Raises NotImplementedError, with the reason, for pages that the kernels cannot read.

    scaled: whether they are codes with scales.
    codes: what packed pages hold.
    """
    if layout != "joined":
        raise NotImplementedError(f"the TPU's kernels read pages of the layout 'joined'; these are {layout!r}")
    if storage.name not in (STORAGE if codes is None else ("uint8",)):
        raise NotImplementedError(f"the TPU's kernels read {', '.join(STORAGE)}; these pages hold {storage.name}")
    tile = 64 if storage.name == "int4" else 32 // storage.itemsize
    if rows % tile:
        raise NotImplementedError(f"pages of {rows} rows of {storage.name}: a TPU reads {tile} rows at once")
    if scaled and rows % joined.LANES:
        raise NotImplementedError(f"pages of {rows} rows of {storage.name}: scales are applied to 128 rows at once")
    if rows & (rows - 1):
        raise NotImplementedError(f"pages of {rows} rows: the TPU's kernels want a power of two")


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    max_query: int,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    up: jax.Array | None = None,
    deal: Deal | None = None,
    *,
    first: jax.Array | None = None,
    ahead: jax.Array | None = None,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `kvjax.pallas_kernels.paged_attention.paged_attention`.

    Raises:
      NotImplementedError: for another layout than "joined", for pages of less than a tile of rows, or that do not
        divide into blocks.
    """
    lanes = spec.lanes
    check(spec.layout, pages.shape[2], pages.dtype, scales is not None, spec.codes)
    assert lanes is not None
    R, row_bytes = pages.shape[2], pages.shape[1] * joined.LANES * pages.dtype.itemsize
    if spec.codes is not None:
        spec.codes.check(R, lanes, spec.layout)
        lanes = spec.codes.lanes(lanes)
    tokens = row_starts[1:] - row_starts[:-1]
    held, nearest = lengths, None  # rows of a slot that are here, and the first of them in its window
    if deal is not None:
        _check_dealt(deal, spec, slopes)
        held = deal.rows_before(lengths, R)
        if spec.window is not None:
            nearest = deal.rows_before(jnp.maximum(lengths - spec.window, 0), R)
    elif first is not None or (ahead is not None and spec.window is not None):
        nearest = jnp.zeros_like(lengths) if first is None else first
        if spec.window is not None:
            nearest = jnp.maximum(nearest, lengths + (0 if ahead is None else ahead) - spec.window)
    some = held > (0 if nearest is None or spec.sink_rows else nearest)
    alone, several = (tokens == 1) & some, (tokens > 1) & (held > 0)
    how: Any = {"scales": scales, "sinks": sinks, "slopes": slopes, "interpret": interpret, "ahead": ahead}
    limits = tpu_sizes.decode_limits(lanes, q.shape[1], pages)
    if spec.codes is not None:
        limits = limits[0], min(limits[1], PIECE_OF_CODES), limits[2]
    blocks = decode_blocks(table.shape[1] * R, R, row_bytes, limits)

    def rows(q: jax.Array, row_starts: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        spread = joined.spread(q, lanes)
        return attend_rows(
            spread, pages, table, held, row_starts, alone, lanes, spec,
            blocks=blocks, nearest=nearest, with_lse=with_lse, **how,
        )  # fmt: skip

    def chunks(
        q: jax.Array, out: jax.Array, lse: jax.Array | None, up: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        if lse is not None:
            lse = jnp.broadcast_to(lse[..., None], (*lse.shape, joined.LANES))
        out, lse = attend_chunks(
            q, pages, table, lengths, row_starts, several, out, lse, lanes, spec,
            tree=tree, up=up, deal=deal, first=first, **how,
        )  # fmt: skip
        return out, None if lse is None else lse[..., 0]

    h = 0 if up is None else latent.check(q, up, lanes.key_dim, lanes.value_dim)
    expanding = up is not None and sinks is None and slopes is None and expands(lanes, q.shape[1], q.dtype)
    if up is not None and max_query > 1 and expanding:
        out, lse = chunks(q, *_absorbed_alone(q, up, h, row_starts, alone, rows), up)
        out = out[..., : up.shape[1] - h]
    else:
        if up is not None:
            q = latent.absorbed(q, up, h)
        out, lse = rows(q, row_starts)
        if max_query > 1:
            out, lse = chunks(joined.spread(q, lanes), out, lse)
        out = joined.gather(out, lanes)
        if up is not None:
            out = latent.values(out, up, h)
    used = jnp.arange(q.shape[0], dtype=jnp.int32) < row_starts[-1]
    # And not of a slot of which nothing is here.
    used &= (alone | several)[jnp.minimum(query_slots(row_starts, q.shape[0]), alone.shape[0] - 1)]
    out = jnp.where(used[:, None, None], out, 0)
    return out, None if lse is None else jnp.where(used[:, None], lse, -jnp.inf)


def _check_dealt(deal: Deal, spec: AttentionSpec, slopes: jax.Array | None) -> None:
    if slopes is not None:
        raise NotImplementedError("dealt pages with ALiBi on the TPU's kernels: take the backend 'xla'")
    if spec.sink_rows:
        raise NotImplementedError("dealt pages with sink rows on the TPU's kernels: take the backend 'xla'")


def _absorbed_alone(
    q: jax.Array,
    up: jax.Array,
    h: int,
    row_starts: jax.Array,
    alone: jax.Array,
    attend_rows_of: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
) -> tuple[jax.Array, jax.Array | None]:
    """What the slots of one token get, by the absorbed form: only their B tokens are absorbed, not a chunk's.

    Returns:
      out (T, N, Hv filled up to a multiple of 128), zeros elsewhere, and lse (T, N), −inf elsewhere.
    """
    (T, N, _), B = q.shape, alone.shape[0]
    token = jnp.minimum(row_starts[:-1], T - 1)
    rows, lse = attend_rows_of(latent.absorbed(q[token], up, h), jnp.arange(B + 1, dtype=jnp.int32))
    place = jnp.where(alone, token, T)
    rows = latent.values(rows, up, h)
    width = -(-rows.shape[-1] // joined.LANES) * joined.LANES
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, width - rows.shape[-1])))
    out = jnp.zeros((T, N, width), q.dtype).at[place].set(rows, mode="drop")
    if lse is not None:
        lse = jnp.full((T, N), -jnp.inf, jnp.float32).at[place].set(lse, mode="drop")
    return out, lse
