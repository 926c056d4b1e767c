"""Attention over the rows that heads hold: all, sinks and others by their places, or the pages that Quest reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvjax.eviction import angles, rotate
from kvjax.eviction.quest import chosen_pages, page_scores
from kvjax.pages import pages_for
from kvjax.pallas_kernels import merge
from kvjax.types import Rotation

if TYPE_CHECKING:
    from kvjax.cache import Placement
    from kvjax.eviction_rule import Eviction

OverRows = Callable[..., tuple[jax.Array, jax.Array | None]]
"""`paged_attention` of q over a layer's pages, all else by keyword."""


def over_all(
    over_rows: OverRows, q: jax.Array, table: jax.Array, sinks: jax.Array | None, with_lse: bool, **how: Any
) -> tuple[jax.Array, jax.Array | None]:
    """`paged_attention` with a table (B, K, M) of each head's pages, whether there are several heads or one.

    Args:
      over_rows: of the layer.
      q: (T, N, H).
      table: (B, K, M) int32.
      sinks: (N,) float32 or None.
      with_lse: static.
      how: `lengths`, and `first` and `ahead` where they are given, are (B, K).
    """
    if table.shape[1] > 1:
        out, lse = over_rows(q, table=table, with_lse=with_lse or sinks is not None, **how)
        if sinks is None:
            return out, lse
        assert lse is not None
        merged, lse = merge(out[None], lse[None], sinks)
        return merged.astype(out.dtype), lse
    how |= {name: how[name][:, 0] for name in ("lengths", "first", "ahead") if name in how}
    return over_rows(q, table=table[:, 0], sinks=sinks, with_lse=with_lse, **how)


def by_place(
    eviction: Eviction,
    placement: Placement,
    over_rows: OverRows,
    q: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    rotation: Rotation,
    turns: jax.Array,
) -> jax.Array:
    """Attention where a row's position is its place among those held: (T, N, Hv).

    RoPE makes products of distances. Those to the rows behind the sinks are what they were, for no row between two of
    them, or between them and the query, has gone. The sinks' are smaller by the rows that went: to them, the query is
    turned back by as many positions.

    Args:
      eviction: what is evicted.
      placement: of the step's tokens.
      over_rows: of the layer.
      q: (T, N, H), position encoded.
      table: (B, K, M) int32.
      lengths: (B, K) int32, of a slot's heads the same.
      sinks: (N,) float32 logits that join the denominator, or None.
      rotation: of the layer.
      turns: () bool whether it does turn.
    """
    gone = placement.positions - places_of(placement, lengths)
    moved = turn(q, rotation, jnp.where(turns, -gone, 0))
    first = jnp.minimum(lengths, eviction.policy.sinks)
    how: dict[str, Any] = {"row_starts": placement.row_starts, "max_query": placement.max_query}
    near, lse = over_all(over_rows, moved, table, None, True, lengths=first, ahead=lengths - first, **how)
    far, far_lse = over_all(over_rows, q, table, None, True, lengths=lengths, first=first, **how)
    assert lse is not None and far_lse is not None
    return merge(jnp.stack([near, far]), jnp.stack([lse, far_lse]), sinks)[0].astype(q.dtype)


def places_of(placement: Placement, lengths: jax.Array) -> jax.Array:
    """(T,) int32: the row of each token among those of its slot's first head, lengths (B, K)."""
    slot = jnp.minimum(placement.slots, lengths.shape[0] - 1)
    index = jnp.arange(placement.slots.shape[0], dtype=jnp.int32)
    return lengths[slot, 0] - placement.row_starts[slot + 1] + index


def turn(q: jax.Array, rotation: Rotation, by: jax.Array, factor: float | jax.Array = 1.0) -> jax.Array:
    """q (T, N, H), which are turned, by so many positions (T,) int32 more, and what is turned times a factor."""
    cos, sin = (x[:, None, :] * factor for x in angles(rotation.frequencies, by))
    shape = (*q.shape[:2], cos.shape[-1])
    cos, sin = (jnp.broadcast_to(x, shape) for x in (cos, sin))
    moved = rotate(q[..., rotation.first :], cos, sin, rotation.interleaved)
    return jnp.concatenate([q[..., : rotation.first], moved], axis=-1)


def by_pages(
    eviction: Eviction,
    placement: Placement,
    over_rows: OverRows,
    q: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    bounds: jax.Array,
    layer: int | jax.Array,
    rows: int,
) -> jax.Array:
    """Attention where tokens behind the prompt read a few pages of each head: (T, N, Hv).

    Whether a token does is a matter of its position, not of the step that computes it, so that it is the same alone, in
    a batch, and where it is computed again in one step with others. Such tokens become slots of their own, of one token
    each, whose tables are the pages that they read.

    Args:
      eviction: what is read.
      placement: of the step's tokens.
      over_rows: of the layer.
      q: (T, N, H).
      table: (B, K, M) int32.
      lengths: (B, K) int32, of a slot's heads the same.
      sinks: (N,) float32 logits that join the denominator, or None.
      bounds: (P, 2, H) of the pages' keys, this step's included.
      layer: of the model.
      rows: R.
    """
    (T, (B, K, M)), reading = (q.shape[0], table.shape), eviction.policy.reads
    assert reading is not None
    how: dict[str, Any] = {"row_starts": placement.row_starts, "max_query": placement.max_query}
    if placement.context is None or (isinstance(layer, int) and layer < reading.dense):
        return over_all(over_rows, q, table, sinks, False, lengths=lengths, **how)[0]
    slot = jnp.minimum(placement.slots, B - 1)
    few = (placement.slots < B) & (placement.positions >= placement.context[slot])
    few &= jnp.asarray(layer, jnp.int32) >= reading.dense
    # What a kernel leaves where a slot has no row to see is written over: all tokens of such a slot read few pages.
    dense = jnp.zeros((B,), bool).at[jnp.where(few, B, placement.slots)].set(True, mode="drop")
    out, _ = over_all(over_rows, q, table, sinks, False, lengths=jnp.where(dense[:, None], lengths, 0), **how)
    place, most = places_of(placement, lengths), eviction.most_pages(M, rows)
    order = jnp.pad(jnp.argsort(~few, stable=True).astype(jnp.int32), (0, -T % B), constant_values=T)

    def read(i: jax.Array, out: jax.Array) -> jax.Array:
        token = jax.lax.dynamic_slice_in_dim(order, i * B, B)
        live = few.at[token].get(mode="fill", fill_value=False)
        own, row, queries = (x.at[token].get(mode="clip") for x in (slot, place, q))
        used = jnp.where(live, pages_for(row + 1, rows), 1)
        count = eviction.pages_read(used, rows)
        pages = chosen_pages(page_scores(bounds, queries, table[own], used), table[own], used, count, most)
        held = jnp.where(live, (count - 1) * rows + row % rows + 1, 0)
        found, _ = over_all(
            over_rows, queries, pages, sinks, False, lengths=jnp.broadcast_to(held[:, None], (B, K)),
            row_starts=jnp.arange(B + 1, dtype=jnp.int32), max_query=1,
        )  # fmt: skip
        return out.at[jnp.where(live, token, T)].set(found, mode="drop")

    return jax.lax.fori_loop(0, (few.sum(dtype=jnp.int32) + B - 1) // B, read, out)
