"""The store: how K and V rows lie in pages. Only this file and the attention backends know the layout.

Keys and values lie apart, in one of two layouts:

    head_major    K (P, K, H, R), V (P, K, R, H): q·K and p·V are then products of a CPU's natural form, row by row
    token_major   K and V (P, R, K, H): a token's row is whole (K, H) tiles, which a TPU writes without touching others

(docs/decisions.md, "Layout of the pages"). Latent pages (MLA) have keys only, whose first numbers are the values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LAYOUTS = ("head_major", "token_major")


def default_layout() -> str:
    """The layout that suits the default backend."""
    return "head_major" if jax.default_backend() == "cpu" else "token_major"


def init_pages(
    pages: int, rows: int, kv_heads: int, key_dim: int, value_dim: int | None, dtype: jnp.dtype, layout: str
) -> tuple[jax.Array, jax.Array | None]:
    """Zeroed pages of one layer: K and V, of the shapes of the layout; no V where `value_dim` is None."""
    head_major = layout == "head_major"
    k = jnp.zeros((pages, kv_heads, key_dim, rows) if head_major else (pages, rows, kv_heads, key_dim), dtype)
    if value_dim is None:
        return k, None
    return k, jnp.zeros((pages, kv_heads, rows, value_dim) if head_major else (pages, rows, kv_heads, value_dim), dtype)


def write_rows(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    page: jax.Array,
    row: jax.Array,
    layout: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Writes the K and V of T tokens into their rows, in place when the pages are donated.

    Args:
      k_pages: pages of K, as `init_pages` makes them.
      v_pages: pages of V, or None.
      k: (T, K, H), cast to the pages' dtype.
      v: (T, K, Hv); None where there are no pages of V.
      page: (T,) int32 physical page of each token; an index of P or more drops the token.
      row: (T,) int32 row within the page, 0 ≤ row < R.
      layout: of the pages.

    Returns:
      The new k_pages and v_pages.
    """
    every = slice(None)
    k_place, v_place = ((page, every, every, row), (page, every, row)) if layout == "head_major" else ((page, row),) * 2
    k_pages = k_pages.at[k_place].set(k.astype(k_pages.dtype), mode="drop")
    if v_pages is not None and v is not None:
        v_pages = v_pages.at[v_place].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages
