"""Paged attention in plain jnp for every platform, with a cost that follows the context in use.

The packed queries are cut into blocks of C tokens of one slot: C = 1 for slots that decode, more for prompt chunks.
Blocks are ordered by the pages that they see and processed a tile at a time; a tile walks its pages with an online
softmax (FlashAttention, 2205.14135), so that the only K/V ever gathered is one page per block of the tile. All loops
have trip counts known only at run time: idle slots cost nothing, and a short context costs little however long the
block table is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import joined, packed
from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.paged_attention.reference import tree_bit
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

BLOCK = 32  # C of prompt chunks: query tokens of one slot that share a page's K and V
TILE = 8  # blocks that walk their pages together; docs/decisions.md has the times of others
MASKED = -1e30  # a logit that is not seen
FLOOR = -1e20  # where the running maximum begins: exp(MASKED - FLOOR) is 0 even when a row has seen nothing yet


class _Blocks(NamedTuple):
    """Query blocks, those with the most pages first.

    Attributes:
      slot: (J,) int32, clipped to B − 1 where unused.
      first: (J,) int32 first packed token.
      size: (J,) int32 tokens, at most C; 0 where unused.
      used: () int32 number of blocks.
    """

    slot: jax.Array
    first: jax.Array
    size: jax.Array
    used: jax.Array


def query_blocks(row_starts: jax.Array, lengths: jax.Array, wanted: jax.Array, block: int, count: int) -> _Blocks:
    """Cuts the tokens of the slots in (B,) bool `wanted` into blocks; `count` is a static bound on their number.

    Example: row_starts [0, 1, 1, 6], block 4, all wanted → slots [0, 2, 2], first tokens [0, 1, 5], sizes [1, 4, 1].
    """
    tokens = jnp.where(wanted, row_starts[1:] - row_starts[:-1], 0)
    per_slot = (tokens + block - 1) // block
    ends = jnp.cumsum(per_slot, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    slot = jnp.minimum(slot, tokens.shape[0] - 1)
    offset = (index - (ends - per_slot)[slot]) * block
    size = jnp.where(index < ends[-1], jnp.clip(tokens[slot] - offset, 0, block), 0)
    # A tile walks as many pages as its longest block sees: blocks of like length belong together.
    seen = jnp.where(size > 0, lengths[slot] - tokens[slot] + offset + size, 0)
    order = jnp.argsort(-seen, stable=True)
    return _Blocks(slot[order], (row_starts[slot] + offset)[order], size[order], ends[-1])


def _dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = "highest" if y.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x.astype(y.dtype), y, precision=precision, preferred_element_type=jnp.float32)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    max_query: int,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    deal: Deal | None = None,
    first: jax.Array | None = None,
    ahead: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `kvjax.pallas_kernels.paged_attention.paged_attention`."""
    (T, N, _), B = q.shape, table.shape[0]
    tokens = row_starts[1:] - row_starts[:-1]
    if spec.lanes is not None:
        Hv = spec.lanes.value_dim
    else:
        Hv = (spec.latent or 0) if v_pages is None else v_pages.shape[-1]
        if spec.codes is not None:
            Hv = Hv * 8 // packed.BITS[spec.codes.value]
    carry = jnp.zeros((T, N, Hv), q.dtype), jnp.full((T, N), -jnp.inf, jnp.float32)
    arrays = q, k_pages, v_pages, table, lengths, row_starts, sinks, slopes, tree, scales, deal, first, ahead
    carry = _attend_blocks(carry, *arrays, spec, tokens == 1, 1, min(T, B))
    if max_query > 1:
        C = min(BLOCK, 1 << (max_query - 1).bit_length())
        carry = _attend_blocks(carry, *arrays, spec, tokens > 1, C, min(T, T // C + B))
    return carry


def _attend_blocks(
    carry: tuple[jax.Array, jax.Array],
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    tree: jax.Array | None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None,
    deal: Deal | None,
    from_row: jax.Array | None,
    ahead: jax.Array | None,
    spec: AttentionSpec,
    wanted: jax.Array,
    C: int,
    most: int,
) -> tuple[jax.Array, jax.Array]:
    """Fills in (out, lse) for the slots in (B,) bool `wanted`, at most `most` blocks of C tokens."""
    T, N, _ = q.shape
    head_major = spec.layout == "head_major"
    Hv = carry[0].shape[-1]
    if spec.lanes is not None:
        K, R = spec.lanes.kv_heads, k_pages.shape[2]
    else:
        K, R = (k_pages.shape[1], k_pages.shape[3]) if head_major else k_pages.shape[2:0:-1]
    k_rows, v_rows = ("bkhr", "bkrh") if head_major else ("brkh", "brkh")
    G, tile = N // K, min(TILE, most)
    if slopes is not None:
        row_slopes = jnp.tile(slopes.reshape(K, 1, G), (1, C, 1)).reshape(1, K, C * G, 1)
    words = None
    if spec.codes is not None:
        assert isinstance(scales, tuple)
        words, scales = scales, None
    assert not isinstance(scales, tuple)
    if v_pages is None and head_major:
        v_rows = k_rows  # the first Hv numbers of the transposed keys
    sink_rows: int | jax.Array = spec.sink_rows
    if deal is not None:
        sink_rows = deal.rows_before(jnp.int32(spec.sink_rows), R)
    has_first = spec.window is not None or from_row is not None
    blocks = query_blocks(row_starts, lengths, wanted, C, -(-most // tile) * tile)

    def attend_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        slot, first, size = (jax.lax.dynamic_slice_in_dim(x, i * tile, tile) for x in blocks[:3])
        step = jnp.arange(C, dtype=jnp.int32)[None, :]
        live = step < size[:, None]
        token = first[:, None] + step
        rows = lengths if ahead is None else lengths + ahead
        position = jnp.where(live, (rows[slot] - row_starts[slot + 1])[:, None] + token, -1)  # sees nothing

        # The rows that a token sees, here and on this chip: first … last.
        held, last = lengths[slot], position
        first_row = position - ((spec.window or 0) - 1)
        if deal is not None:
            held, last = deal.rows_before(held, R), deal.rows_before(position + 1, R) - 1
            first_row = deal.rows_before(jnp.maximum(first_row, 0), R)
        if ahead is not None:
            last = jnp.minimum(last, held[:, None] - 1)
        if from_row is not None:
            from_window = first_row if spec.window is not None else jnp.zeros_like(first_row)
            first_row = jnp.maximum(from_window, from_row[slot][:, None])

        # (tile, C, N, H) → (tile, K, C·G, H): the heads of a group share K and V, so they are rows of one product.
        grouped = q.at[token].get(mode="clip").reshape(tile, C, K, G, -1).swapaxes(1, 2)
        queries = grouped.reshape(tile, K, C * G, -1) * jnp.asarray(spec.scale, q.dtype)
        row_position, row_last, row_first = (
            jnp.repeat(x, G, axis=1)[:, None, :, None] for x in (position, last, first_row)
        )
        row_table, row_length = table[slot], held[:, None]

        def attend_page(page: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, l, acc = state
            physical = jax.lax.dynamic_index_in_dim(row_table, page, axis=1, keepdims=False)
            k = k_pages.at[physical].get(mode="clip")
            if words is not None and spec.codes is not None:
                v = None if v_pages is None else v_pages.at[physical].get(mode="clip")
                here = words[0].at[physical].get(mode="clip"), words[1].at[physical].get(mode="clip")
                k, v = packed.dequantized(k, v, here, spec.codes, spec.layout, spec.lanes, q.dtype)
            elif spec.lanes is not None:
                k, v = joined.split(joined.rows_of(k), spec.lanes)
            elif v_pages is not None:
                v = v_pages.at[physical].get(mode="clip")
            else:
                v = k[:, :, :Hv] if head_major else k[..., :Hv]
            if k.dtype.itemsize < 2:  # codes
                k, v = k.astype(q.dtype), v.astype(q.dtype)
            key = page * R + jnp.arange(R, dtype=jnp.int32)
            # Rows beyond the length belong to nobody and may hold NaN: they must not come back as 0 × NaN.
            owned = key[None, :] < row_length
            if has_first:  # nor those before what is seen, whose pages may be another's by now
                owned &= (key[None, :] >= row_nearest) | (key < sink_rows)[None, :]
            owned = owned.reshape(tile, *(R if axis == "r" else 1 for axis in v_rows[1:]))
            v = jnp.where(owned, v, jnp.zeros((), v.dtype))
            s = _dot(f"bkch,{k_rows}->bkcr", queries, k)
            if scales is not None:
                scale = scales.at[physical].get(mode="clip").reshape(tile, scales.shape[1], 1, -1)  # 1 or R rows
                s = s * scale[:, :K]
            if spec.soft_cap is not None:
                s = jnp.float32(spec.soft_cap) * jnp.tanh(s / jnp.float32(spec.soft_cap))
            key = key[None, None, None, :]
            if slopes is not None:
                at = key if deal is None else deal.position(key, R)
                s = s - row_slopes * (row_position - at).astype(jnp.float32)
            seen = key <= row_last
            if tree is not None:
                own = key - (row_length - row_size)[:, :, None, None]
                bits = tree_bit(row_tree, jnp.broadcast_to(own, (tile, C, 1, R)).reshape(tile * C, R))
                bits = jnp.repeat(bits.reshape(tile, 1, C, R), G, axis=2)
                seen = jnp.where(own < 0, True, bits) & (row_position >= 0)
            if has_first:
                seen &= (key >= row_first) | (key < sink_rows)
            s = jnp.where(seen, s, MASKED)
            m_new = jnp.maximum(m, s.max(axis=-1))
            shrink = jnp.exp(m - m_new)
            p = jnp.exp(s - m_new[..., None])
            total = l * shrink + p.sum(axis=-1)
            if scales is not None:
                p = jnp.where(seen, p * scale[:, -K:], 0.0)  # what is not seen may be NaN
            acc = acc * shrink[..., None] + _dot(f"bkcr,{v_rows}->bkch", p, v)
            return m_new, total, acc

        row_size = (row_starts[slot + 1] - row_starts[slot])[:, None]
        if tree is not None:
            row_tree = tree.at[token].get(mode="clip").reshape(tile * C, -1)
        first_page = jnp.int32(0)
        last_page = last.max() // R + 1
        if tree is not None:  # a token may see rows behind it
            last_page = (jnp.where(live, row_length, 0).max() + R - 1) // R
        if has_first:
            row_nearest = jnp.where(live, first_row, jnp.int32(2**30)).min(axis=1, keepdims=True)
            first_page = jnp.maximum(row_nearest.min(), 0) // R
        shape = (tile, K, C * G)
        state = (jnp.full(shape, FLOOR, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, Hv)))
        if has_first and spec.sink_rows:
            sink_pages = jnp.minimum((sink_rows + R - 1) // R, first_page)
            state = jax.lax.fori_loop(0, sink_pages, attend_page, state)
        m, l, acc = jax.lax.fori_loop(first_page, last_page, attend_page, state)
        nothing = l == 0.0  # where pages are dealt, or rows are elsewhere; otherwise a token sees itself
        if sinks is not None:
            row_sinks = jnp.tile(sinks.reshape(K, 1, G), (1, C, 1)).reshape(1, K, C * G)
            top = jnp.maximum(m, row_sinks)
            shrink = jnp.exp(m - top)
            m, l, acc = top, l * shrink + jnp.exp(row_sinks - top), acc * shrink[..., None]

        def of_tokens(x: jax.Array) -> jax.Array:
            """(tile, K, C·G, ...) → (tile, C, N, ...)."""
            return x.reshape(tile, K, C, G, *x.shape[3:]).swapaxes(1, 2).reshape(tile, C, N, *x.shape[3:])

        l, m = jnp.where(nothing, 1.0, l), jnp.where(nothing, -jnp.inf, m)
        place = jnp.where(live, token, T)
        out = out.at[place].set(of_tokens(acc / l[..., None]).astype(out.dtype), mode="drop")
        return out, lse.at[place].set(of_tokens(m + jnp.log(l)), mode="drop")

    return jax.lax.fori_loop(0, (blocks.used + tile - 1) // tile, attend_tile, carry)
