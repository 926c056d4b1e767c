"""Quest (2406.10774): all rows stay, and a query that decodes reads the pages that it may care for, head by head.

Of the keys of every page, the least and the greatest number of each channel are known. What q·k can be at most follows
from them, and the pages where that is most are read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import UserError
from kvjax.eviction.policy import is_count
from kvjax.eviction.selection import highest, places

LEAST = 3
"""Pages that are always read, if there are so many."""
COLUMNS = 64
"""Pages whose bounds are gathered at once."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How many pages of a head a query reads.

    Attributes:
      pages: so many, or None where a budget says it: of rows, as many pages as hold them; a share of the pages.
      dense: first layers of the model that read all of them.

    Raises:
      UserError: one is out of range.
    """

    pages: int | None = None
    dense: int = 2

    def __post_init__(self) -> None:
        if self.pages is not None and not is_count(self.pages, LEAST):
            raise UserError(f"Quest has pages={self.pages!r}, but a whole number from {LEAST} is needed.")
        if not is_count(self.dense, 0):
            raise UserError(f"Quest has dense={self.dense!r}, but a number of layers, 0 or more, is needed.")


def no_bounds(pages: int, head_dim: int, dtype: jnp.dtype) -> jax.Array:
    """Bounds of so many pages of one head, (P, 2, H): of each channel of its keys, the least and the greatest."""
    return jnp.zeros((pages, 2, head_dim), dtype)


def add_keys(bounds: jax.Array, keys: jax.Array, page: jax.Array, row: jax.Array) -> jax.Array:
    """Bounds (P, 2, H) with keys (W, H) written at rows (W,) int32 of pages (W,) int32, P for none.

    A page begins anew with its row 0, which is written no later than the others.
    """
    begun, keys = jnp.where(row == 0, page, bounds.shape[0]), keys.astype(bounds.dtype)
    # Of the keys, not of infinities: so this waits until the layer before has read its bounds, and nothing is copied.
    bounds = bounds.at[begun].set(jnp.stack([keys, keys], axis=1), mode="drop")
    return bounds.at[page, 0].min(keys, mode="drop").at[page, 1].max(keys, mode="drop")


def page_scores(bounds: jax.Array, q: jax.Array, table: jax.Array, used: jax.Array) -> jax.Array:
    """The most that q·k can be in each page: (T, K, M) float32, of a head's query heads the maximum.

    Args:
      bounds: (P, 2, H).
      q: (T, N, H).
      table: (T, K, M) int32 pages.
      used: (T,) int32; scores behind so many may be anything.
    """
    T, K, M = table.shape
    grouped = q.reshape(T, K, -1, q.shape[-1]).astype(jnp.float32)
    above, below = jnp.maximum(grouped, 0), jnp.minimum(grouped, 0)
    block = min(COLUMNS, M)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -M % block)))

    def add(i: jax.Array, scores: jax.Array) -> jax.Array:
        pages = jax.lax.dynamic_slice_in_dim(table, i * block, block, axis=2)
        near = bounds.at[pages].get(mode="clip").astype(jnp.float32)  # (T, K, block, 2, H)
        most = jnp.einsum("tkgh,tkch->tkgc", below, near[:, :, :, 0], precision="highest")
        most += jnp.einsum("tkgh,tkch->tkgc", above, near[:, :, :, 1], precision="highest")
        return jax.lax.dynamic_update_slice_in_dim(scores, most.max(axis=2), i * block, axis=2)

    blocks = (used.max() + block - 1) // block
    return jax.lax.fori_loop(0, blocks, add, jnp.zeros(table.shape, jnp.float32))[:, :, :M]


def chosen_pages(scores: jax.Array, table: jax.Array, used: jax.Array, count: jax.Array, most: int) -> jax.Array:
    """The pages that are read, in the order of the rows: (T, K, most) int32, anything behind the count.

    Args:
      scores: (T, K, M) float32.
      table: (T, K, M) int32.
      used: (T,) int32 pages of each token, the newest of which is always read.
      count: (T,) int32 pages to read, from 1 to `used`.
      most: static; the largest count.
    """
    T, K, M = table.shape
    column = jnp.arange(M, dtype=jnp.int32)[None, :]

    def of_heads(x: jax.Array) -> jax.Array:
        """(T,) → (T·K, 1)."""
        return jnp.repeat(x, K)[:, None]

    older = column < of_heads(used - 1)
    flat = jnp.where(older & ~jnp.isnan(scores.reshape(T * K, M)), scores.reshape(T * K, M), -jnp.inf)
    read = highest(flat, older, of_heads(count - 1)[:, 0]) | (column == of_heads(used - 1))
    columns = places(read, most).reshape(T, K, most)
    return jnp.take_along_axis(table, jnp.minimum(columns, M - 1), axis=2)
