"""How the TPU's kernels cut up their work, at most: sizes measured for a chip and a shape, or the same for all.

The sizes are limits. What is right for the call's own shape is a formula below them (`tpu.decode_blocks`,
`tpu_chunks.attend_chunks`), which keeps to VMEM; no size in the table is above the one that it takes the place of. So
what compiles without the table compiles with it.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.joined import LANES, Lanes
from kvjax.pallas_kernels.paged_attention import tpu_blocks

DECODE = 4096, 4096, 8
"""Of a block of decode: rows fetched together, rows computed together, units whose scores precede the first softmax."""
CHUNKS = 512, 512
"""Of a prompt: query tokens (C) and rows (S) of a block."""


def chip() -> str | None:
    """The chip that is traced for, as JAX names its version ("v5e", "7x"); None where that is not a TPU.

    It is the abstract mesh's, if that has one (`jax.set_mesh`), or the default device's. Ahead of time without a mesh
    that is the machine's own, whatever chip the arguments lie on: then None, which is safe.
    """
    try:
        return str(pltpu.get_tpu_info().chip_version)
    except ValueError:
        return None


def row_class(lanes: Lanes, heads: int) -> str:
    """What the products with a row look like: its units × lanes of their keys, and query rows of a unit, in tiles."""
    size = max(unit.heads[1] - unit.heads[0] for unit in lanes.units)
    rows = -(-size * (heads // lanes.kv_heads) // 8) * 8
    return f"{'latent ' if lanes.latent else ''}{len(lanes.units)}x{lanes.key_width} q{rows}"


def page_class(rows: int) -> int:
    """Pages of fewer than 128 rows count as pages of 16."""
    return LANES if rows >= LANES else 16


def key(chip: str, lanes: Lanes, heads: int, storage: str, rows: int) -> tuple[str, str, str, int]:
    """Where the table has the sizes for pages of `rows` rows; storage is the name of their dtype."""
    return chip, row_class(lanes, heads), storage, page_class(rows)


def decode_limits(lanes: Lanes, heads: int, pages: jax.Array) -> tuple[int, int, int]:
    """As in DECODE, for pages (P, lanes.row / 128, R, 128) and `heads` query heads."""
    on = chip()
    at = on and key(on, lanes, heads, pages.dtype.name, pages.shape[2])
    return tpu_blocks.DECODE.get(at, DECODE) if at else DECODE


def chunk_limits(lanes: Lanes, heads: int, pages: jax.Array) -> tuple[int, int]:
    """As in CHUNKS, for pages (P, lanes.row / 128, R, 128) and `heads` query heads."""
    on = chip()
    at = on and key(on, lanes, heads, pages.dtype.name, pages.shape[2])
    return tpu_blocks.CHUNKS.get(at, CHUNKS) if at else CHUNKS
