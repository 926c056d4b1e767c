"""The store: how K and V rows lie in pages. Only this file and the attention backends know the layout.

    head_major    K (P, K, H, R), V (P, K, R, H): q·K and p·V are then products of a CPU's natural form, row by row
    token_major   K and V (P, R, K, H): a token's row is whole (K, H) tiles, which XLA writes on a TPU in place, and
                  what the GPU's kernels read
    joined        K and V in one array (P, C, R, 128), see joined.py: what the TPU's kernels read and write

(docs/decisions.md, "Layout of the pages"). Latent pages (MLA) have keys only, whose first numbers are the values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import joined, write_rows_tpu
from kvjax.pallas_kernels.joined import Lanes

LAYOUTS = ("head_major", "token_major", "joined")


def default_layout(backend: str = "xla") -> str:
    """The layout that suits an attention backend on the default platform."""
    if backend.startswith("tpu"):
        return "joined"
    if backend.startswith("gpu"):
        return "token_major"
    return "head_major" if jax.default_backend() == "cpu" else "token_major"


def init_pages(
    pages: int, rows: int, lanes: Lanes, dtype: jnp.dtype, layout: str, parts: int = 1
) -> tuple[jax.Array, jax.Array | None]:
    """Zeroed pages of one layer: K and V, of the shapes of the layout; no V of its own in latent or joined pages.

    parts: over how many chips the heads are divided; `lanes` are then one part's, and the arrays hold all parts', one
    after another in the axis of the heads (`axes_of`).
    """
    K, H, Hv = lanes.kv_heads * parts, lanes.key_dim, lanes.value_dim
    if layout == "joined":
        return jnp.zeros((pages, parts * lanes.row // joined.LANES, rows, joined.LANES), dtype), None
    head_major = layout == "head_major"
    k = jnp.zeros((pages, K, H, rows) if head_major else (pages, rows, K, H), dtype)
    if lanes.latent:
        return k, None
    return k, jnp.zeros((pages, K, rows, Hv) if head_major else (pages, rows, K, Hv), dtype)


def axes_of(layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Which axis of the pages of K, and of V, counts heads and which rows: ((heads, rows), (heads, rows))."""
    return {"joined": ((1, 2), (1, 2)), "head_major": ((1, 3), (1, 2)), "token_major": ((2, 1), (2, 1))}[layout]


def write_rows(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    page: jax.Array,
    row: jax.Array,
    layout: str,
    *,
    slots: int | None = None,
    max_query: int | None = None,
    backend: str = "xla",
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
      slots: static; the tokens are those of at most so many slots, packed slot after slot. T where None.
      max_query: static; no slot has more tokens. Unknown where None.
      backend: of the attention: its kernels write as they read.

    Returns:
      The new k_pages and v_pages.
    """
    if layout == "joined":
        lanes = Lanes(k.shape[1], k.shape[2], k.shape[2] if v is None else v.shape[2], v is None)
        rows = joined.rows(k, v, lanes).astype(k_pages.dtype)
        if backend.startswith("tpu"):
            k_pages = write_rows_tpu.write_rows(
                k_pages, rows, page, row, one_per_stripe=max_query == 1, slots=slots,
                interpret=backend == "tpu_interpret",
            )  # fmt: skip
            return k_pages, None
        tiles = rows.reshape(*rows.shape[:-1], -1, joined.LANES)
        return k_pages.at[page, :, row].set(tiles, mode="drop"), None
    every = slice(None)
    k_place, v_place = ((page, every, every, row), (page, every, row)) if layout == "head_major" else ((page, row),) * 2
    k_pages = k_pages.at[k_place].set(k.astype(k_pages.dtype), mode="drop")
    if v_pages is not None and v is not None:
        v_pages = v_pages.at[v_place].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages


def read_pages(
    k_pages: jax.Array, v_pages: jax.Array | None, page: jax.Array, lanes: Lanes, layout: str
) -> tuple[jax.Array, jax.Array]:
    """K (…, R, K, H) and V (…, R, K, Hv) of pages (…) int32, as stored; an index of P or more reads some page."""
    k = k_pages.at[page].get(mode="clip")
    if layout == "joined":
        return joined.split(joined.rows_of(k), lanes)
    if layout == "head_major":
        k = jnp.moveaxis(k, -1, -3)  # (…, K, H, R)
    if v_pages is None:
        return k, k[..., : lanes.value_dim]
    v = v_pages.at[page].get(mode="clip")
    return k, v.swapaxes(-3, -2) if layout == "head_major" else v


def write_pages(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    lanes: Lanes,
    layout: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Overwrites whole pages (…) int32 with K (…, R, K, H) and V (…, R, K, Hv), as `read_pages` gives them; an index of
    P or more drops its page."""
    if layout == "joined":
        rows = joined.tiles(joined.rows(k, None if lanes.latent else v, lanes))
        return k_pages.at[page].set(rows, mode="drop"), None
    head_major = layout == "head_major"
    k_pages = k_pages.at[page].set(jnp.moveaxis(k, -3, -1) if head_major else k, mode="drop")
    if v_pages is not None:
        v_pages = v_pages.at[page].set(v.swapaxes(-3, -2) if head_major else v, mode="drop")
    return k_pages, v_pages
