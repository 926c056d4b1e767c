"""The store: how K and V rows lie in pages. Only this file and the attention backends know the layout.

Keys and values lie apart, in one of two layouts:

    head_major    K (P, K, H, R), V (P, K, R, H): q·K and p·V are then products of a CPU's natural form, row by row
    token_major   K and V (P, R, K, H): a token's row is whole (K, H) tiles, which a TPU writes without touching others

(docs/decisions.md, "Layout of the pages").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LAYOUTS = ("head_major", "token_major")


def default_layout() -> str:
    """The layout that suits the default backend."""
    return "head_major" if jax.default_backend() == "cpu" else "token_major"


def init_pages(
    pages: int, rows: int, kv_heads: int, key_dim: int, value_dim: int, dtype: jnp.dtype, layout: str
) -> tuple[jax.Array, jax.Array]:
    """Zeroed pages of one layer: K and V, of the shapes of the layout."""
    if layout == "head_major":
        shapes = (pages, kv_heads, key_dim, rows), (pages, kv_heads, rows, value_dim)
    else:
        shapes = (pages, rows, kv_heads, key_dim), (pages, rows, kv_heads, value_dim)
    return jnp.zeros(shapes[0], dtype), jnp.zeros(shapes[1], dtype)


def write_rows(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    row: jax.Array,
    layout: str,
) -> tuple[jax.Array, jax.Array]:
    """Writes the K and V of T tokens into their rows, in place when the pages are donated.

    Args:
      k_pages: pages of K, as `init_pages` makes them.
      v_pages: pages of V.
      k: (T, K, H), cast to the pages' dtype.
      v: (T, K, Hv).
      page: (T,) int32 physical page of each token; an index of P or more drops the token.
      row: (T,) int32 row within the page, 0 ≤ row < R.
      layout: of the pages.

    Returns:
      The new k_pages and v_pages.
    """
    every = slice(None)
    k_place, v_place = ((page, every, every, row), (page, every, row)) if layout == "head_major" else ((page, row),) * 2
    k_pages = k_pages.at[k_place].set(k.astype(k_pages.dtype), mode="drop")
    v_pages = v_pages.at[v_place].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages
