"""The store: how K and V rows lie in pages. Only this file and the attention backends know the layout.

Head-major, keys and values apart: k_pages (P, K, R, H), v_pages (P, K, R, Hv). One page of one head is then a
contiguous (R, H) matrix, which a batched matmul reads without a transposing copy (docs/decisions.md, "Layout").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def init_pages(
    pages: int, rows: int, kv_heads: int, key_dim: int, value_dim: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Zeroed pages of one layer: k_pages (P, K, R, H) and v_pages (P, K, R, Hv)."""
    k_pages = jnp.zeros((pages, kv_heads, rows, key_dim), dtype)
    v_pages = jnp.zeros((pages, kv_heads, rows, value_dim), dtype)
    return k_pages, v_pages


def write_rows(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, page: jax.Array, row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes the K and V of T tokens into their rows, in place when the pages are donated.

    Args:
      k_pages: (P, K, R, H).
      v_pages: (P, K, R, Hv).
      k: (T, K, H), cast to the pages' dtype.
      v: (T, K, Hv).
      page: (T,) int32 physical page of each token; an index of P or more drops the token.
      row: (T,) int32 row within the page, 0 ≤ row < R.

    Returns:
      The new k_pages and v_pages.
    """
    k_pages = k_pages.at[page, :, row].set(k.astype(k_pages.dtype), mode="drop")
    v_pages = v_pages.at[page, :, row].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages
