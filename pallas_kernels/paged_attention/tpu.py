"""Paged attention by TPU kernels: slots with one token, then those with more (prompt chunks, trees)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import joined
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.paged_attention.tpu_chunks import attend_chunks
from kvjax.pallas_kernels.paged_attention.tpu_decode import DecodeBlocks, attend_rows

STORAGE = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")

AHEAD = 8  # units whose scores are computed before the first softmax; docs/performance.md
FETCHED = 16 << 20  # bytes of a block of decode: two lie in VMEM, of which a core of a TPU7x has 64 MiB


def decode_blocks(rows: int, page: int, row_bytes: int) -> DecodeBlocks:
    """How decode is cut up, for slots of up to `rows` rows in pages of `page` rows of `row_bytes` bytes."""
    page = max(page, joined.LANES)
    block = page
    while block < 4096 and 2 * block * row_bytes <= FETCHED and block < rows:
        block *= 2
    sizes = [block, *(size for size in (1024, 512, 256) if size < block)]
    return DecodeBlocks(block, tuple((size, AHEAD) for size in sizes))


def check(layout: str, rows: int, storage: jnp.dtype, scaled: bool) -> None:
    """Raises NotImplementedError, with the reason, for pages that the kernels cannot read.

    scaled: whether they are codes with scales.
    """
    if layout != "joined":
        raise NotImplementedError(f"the TPU's kernels read pages of the layout 'joined'; these are {layout!r}")
    if storage.name not in STORAGE:
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
    scales: jax.Array | None = None,
    *,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Arguments as in `kvjax.pallas_kernels.paged_attention.paged_attention`.

    Raises:
      NotImplementedError: for another layout than "joined", for pages of less than a tile of rows, or that do not
        divide into blocks.
    """
    lanes = spec.lanes
    check(spec.layout, pages.shape[2], pages.dtype, scales is not None)
    assert lanes is not None
    R = pages.shape[2]
    tokens = row_starts[1:] - row_starts[:-1]
    blocks = decode_blocks(table.shape[1] * R, R, lanes.row * pages.dtype.itemsize)
    spread = joined.spread(q, lanes)
    out, lse = attend_rows(
        spread, pages, table, lengths, row_starts, (tokens == 1) & (lengths > 0), lanes, spec,
        blocks=blocks, scales=scales, sinks=sinks, slopes=slopes, with_lse=with_lse, interpret=interpret,
    )  # fmt: skip
    if max_query > 1:
        wide = None if lse is None else jnp.broadcast_to(lse[..., None], (*lse.shape, joined.LANES))
        out, wide = attend_chunks(
            spread, pages, table, lengths, row_starts, (tokens > 1) & (lengths > 0), out, wide, lanes, spec,
            scales=scales, sinks=sinks, slopes=slopes, tree=tree, interpret=interpret,
        )  # fmt: skip
        lse = None if wide is None else wide[..., 0]
    used = jnp.arange(q.shape[0], dtype=jnp.int32) < row_starts[-1]
    out = jnp.where(used[:, None, None], joined.gather(out, lanes), 0)
    return out, None if lse is None else jnp.where(used[:, None], lse, -jnp.inf)
