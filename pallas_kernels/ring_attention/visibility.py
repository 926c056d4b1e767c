"""Who sees whom: of tokens, and of blocks of tokens by the least and greatest position and segment in them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

FAR = 2**31 - 1


def sees(
    q_position: jax.Array, k_position: jax.Array, q_segment: jax.Array, k_segment: jax.Array, spec: AttentionSpec
) -> jax.Array:
    """Whether a query sees a key: int32 of any shapes that broadcast → bool. Negative segments are padding."""
    seen = (k_position <= q_position) & (q_segment == k_segment) & (q_segment >= 0)
    if spec.window is not None:
        near = q_position - k_position < spec.window
        seen &= (near | (k_position < spec.sink_rows)) if spec.sink_rows else near
    return seen


class Bounds(NamedTuple):
    """Of blocks of tokens, padding left out; a block of padding has none, and low > high.

    Attributes:
      low: (…) int32 least position.
      high: (…) int32 greatest position.
      first: (…) int32 least segment.
      last: (…) int32 greatest segment.
      whole: (…) bool, whether there is no padding in it.
    """

    low: jax.Array
    high: jax.Array
    first: jax.Array
    last: jax.Array
    whole: jax.Array


def bounds(positions: jax.Array, segments: jax.Array, block: int) -> Bounds:
    """Of (…, T) positions and segments, T a multiple of block: (…, T / block) of each."""

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, block)

    owned = blocks(segments) >= 0

    def least(x: jax.Array) -> jax.Array:
        return jnp.where(owned, blocks(x), FAR).min(axis=-1)

    def greatest(x: jax.Array) -> jax.Array:
        return jnp.where(owned, blocks(x), -FAR).max(axis=-1)

    return Bounds(least(positions), greatest(positions), least(segments), greatest(segments), owned.all(axis=-1))


def may_see(q: Bounds, k: Bounds, spec: AttentionSpec) -> jax.Array:
    """Whether a query of a block may see a key of a block: False only if none does."""
    seen = (k.low <= q.high) & (k.first <= q.last) & (q.first <= k.last)
    if spec.window is not None:
        near = k.high > q.low - spec.window
        seen &= (near | (k.low < spec.sink_rows)) if spec.sink_rows else near
    return seen & (q.low <= q.high) & (k.low <= k.high)


def all_see(q: Bounds, k: Bounds, spec: AttentionSpec) -> jax.Array:
    """Whether every query of a block sees every key of a block, so that nothing need be masked."""
    seen = (k.high <= q.low) & q.whole & k.whole
    seen &= (q.first == q.last) & (k.first == k.last) & (q.first == k.first)
    if spec.window is not None:
        near = k.low > q.high - spec.window  # overflows where there is no token, and then nothing comes of it
        seen &= (near | (k.high < spec.sink_rows)) if spec.sink_rows else near
    return seen
