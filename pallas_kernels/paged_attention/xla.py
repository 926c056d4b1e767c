"""Paged attention in plain jnp for every platform, with a cost that follows the context in use.

The packed queries are cut into blocks of C tokens of one slot. Blocks are processed a tile at a time, and a tile
walks the pages of its slots with an online softmax (FlashAttention, 2205.14135), so that the only K/V ever gathered
is one page per block of the tile. Both loops have trip counts known only at run time: idle slots cost nothing, and
a short context costs little however long the block table is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

BLOCK = 32  # C: query tokens of one slot that share a page's K and V
TILE = 16  # blocks that walk their pages together; measured in docs/decisions.md
MASKED = -1e30  # finite, so that a fully masked page gives exp(0) × 0 and never NaN


def _query_blocks(row_starts: jax.Array, block: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts each slot's tokens into blocks: slot (count,), first token (count,), and the number of blocks used.

    Example: row_starts [0, 1, 1, 6], block 4 → slots [0, 2, 2], first tokens [0, 1, 5], 3 blocks.
    """
    tokens = row_starts[1:] - row_starts[:-1]
    ends = jnp.cumsum((tokens + block - 1) // block, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    safe = jnp.minimum(slot, tokens.shape[0] - 1)
    before = ends[safe] - (tokens[safe] + block - 1) // block
    return slot, row_starts[safe] + (index - before) * block, ends[-1]


def _dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = "highest" if y.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x.astype(y.dtype), y, precision=precision, preferred_element_type=jnp.float32)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    max_query: int,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `kvjax.pallas_kernels.paged_attention.paged_attention`."""
    T, N, _ = q.shape
    head_major = spec.layout == "head_major"
    _, *inner, Hv = v_pages.shape
    K, R = inner if head_major else inner[::-1]
    rows = "bkrh" if head_major else "brkh"
    B, _ = table.shape
    G = N // K
    C = min(BLOCK, 1 << (max_query - 1).bit_length())
    blocks = min(T, T // C + B)
    tile = min(TILE, blocks)
    slots, firsts, used = _query_blocks(row_starts, C, -(-blocks // tile) * tile)

    def visible_keys(position: jax.Array, page: jax.Array) -> jax.Array:
        """(tile, C, R) bool: which rows of the page each query sees; padding has position −1 and sees none."""
        key = page * R + jnp.arange(R, dtype=jnp.int32)[None, None, :]
        seen = key <= position[:, :, None]
        return seen if spec.window is None else seen & (key > position[:, :, None] - spec.window)

    def attend_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        slot = jnp.minimum(jax.lax.dynamic_slice_in_dim(slots, i * tile, tile), B - 1)
        first = jax.lax.dynamic_slice_in_dim(firsts, i * tile, tile)
        token = first[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
        live = (i * tile + jnp.arange(tile, dtype=jnp.int32) < used)[:, None] & (token < row_starts[slot + 1][:, None])
        position = jnp.where(live, lengths[slot][:, None] - row_starts[slot + 1][:, None] + token, -1)

        queries = q.at[token].get(mode="clip").reshape(tile, C, K, G, -1).swapaxes(1, 2).reshape(tile, K, C * G, -1)
        row_table = table[slot]

        def attend_page(page: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, l, acc = state
            physical = jax.lax.dynamic_index_in_dim(row_table, page, axis=1, keepdims=False)
            k = k_pages.at[physical].get(mode="clip")
            v = v_pages.at[physical].get(mode="clip")
            # Rows beyond the length belong to nobody and may hold NaN: they must not come back as 0 × NaN.
            owned = page * R + jnp.arange(R, dtype=jnp.int32)[None, :] < lengths[slot][:, None]
            owned = owned[:, None, :, None] if head_major else owned[:, :, None, None]
            v = jnp.where(owned, v, jnp.zeros((), v.dtype))
            s = _dot(f"bkch,{rows}->bkcr", queries, k) * jnp.float32(spec.scale)
            if spec.soft_cap is not None:
                s = jnp.float32(spec.soft_cap) * jnp.tanh(s / jnp.float32(spec.soft_cap))
            seen = jnp.repeat(visible_keys(position, page), G, axis=1)[:, None]
            s = jnp.where(seen, s, MASKED)
            m_new = jnp.maximum(m, s.max(axis=-1))
            shrink = jnp.exp(m - m_new)
            p = jnp.where(seen, jnp.exp(s - m_new[..., None]), 0.0)
            acc = acc * shrink[..., None] + _dot(f"bkcr,{rows}->bkch", p, v)
            return m_new, l * shrink + p.sum(axis=-1), acc

        first_page = jnp.int32(0)
        if spec.window is not None:
            nearest = jnp.where(live, position - (spec.window - 1), jnp.int32(2**30)).min()
            first_page = jnp.maximum(nearest, 0) // R
        shape = (tile, K, C * G)
        state = (
            jnp.full(shape, MASKED, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, Hv), jnp.float32),
        )
        m, l, acc = jax.lax.fori_loop(first_page, position.max() // R + 1, attend_page, state)

        def packed(x: jax.Array) -> jax.Array:
            """(tile, K, C·G, ...) → (tile, C, N, ...)."""
            return x.reshape(tile, K, C, G, *x.shape[3:]).swapaxes(1, 2).reshape(tile, C, N, *x.shape[3:])

        nonzero = jnp.where(l > 0, l, 1.0)
        place = jnp.where(live, token, T)
        out = out.at[place].set(packed(acc / nonzero[..., None]).astype(out.dtype), mode="drop")
        lse = lse.at[place].set(packed(jnp.where(l > 0, m + jnp.log(nonzero), -jnp.inf)), mode="drop")
        return out, lse

    empty = jnp.zeros((T, N, Hv), q.dtype), jnp.full((T, N), -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, (used + tile - 1) // tile, attend_tile, empty)
