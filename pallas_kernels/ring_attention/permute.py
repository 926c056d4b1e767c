"""Ring attention in plain jnp: `lax.ppermute` and a blockwise online softmax (2310.01889), for every platform.

Whole blocks travel both ways at once, n / 2 hops each, rather than halves of them n − 1 hops: a link carries the same
bytes, in half as many steps; a step absorbs two blocks, so the running softmax is read and written half as often; and
a window, which looks one way only, needs no more than the hops that it spans. In hop h a rank has the keys of the ranks
h before it (they went right) and h behind it (left).

The permutation of a block is begun before the block is computed, and nothing in between depends on it: XLA overlaps
them where it can. The trip counts of the hops are the same on all devices, those of blocks are a rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.ring_attention.visibility import bounds, may_see, sees

BLOCK = 512  # queries and keys computed together at most
MASKED = -1e30  # a logit that is not seen
FLOOR = -1e20  # where the running maximum begins: exp(MASKED - FLOOR) is 0 even when a row has seen nothing yet


class Travelling(NamedTuple):
    """What goes around: k (S, K, H), v (S, K, Hv), scales (S, 2·K) or None."""

    k: jax.Array
    v: jax.Array
    scales: jax.Array | None


class Running(NamedTuple):
    """The online softmax of I blocks of queries: R = block · G rows, those of a token's group side by side.

    Attributes:
      top: (I, K, R) float32 running maximum.
      total: (I, K, R) float32 denominator.
      acc: (I, K, R, Hv) float32 numerator.
    """

    top: jax.Array
    total: jax.Array
    acc: jax.Array


def padded(x: jax.Array, block: int, value: int = 0) -> jax.Array:
    """The first axis filled up to a multiple of block."""
    short = -x.shape[0] % block
    return jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1), constant_values=value) if short else x


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the shard_map that is traced."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def zero_of(*arrays: jax.Array | None) -> jax.Array:
    """0, () int32, that differs between ranks like the arrays, as far as `check_vma` knows.

    What a loop carries must be marked like what is added to it; marks have had another name in each version of JAX.
    """
    total = jnp.int32(0)
    for x in arrays:
        if x is not None and x.size:
            first = x.ravel()[0]
            total += (first != first).astype(jnp.int32) * 0
    return total


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    spec: AttentionSpec,
    axis: str,
    scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    q_block: int = BLOCK,
    kv_block: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `kvjax.pallas_kernels.ring_attention.ring_attention`; segments are there."""
    (T, N, _), (S, K, Hv) = q.shape, v.shape
    G, n, rank = N // K, jax.lax.axis_size(axis), jax.lax.axis_index(axis).astype(jnp.int32)
    block, keys = min(q_block, T), min(kv_block, S)

    position, segment = padded(q_positions, block), padded(q_segments, block, -1)
    I = position.shape[0] // block
    rows = padded(q, block).reshape(I, block, K, G, -1).swapaxes(1, 2).reshape(I, K, block * G, -1)
    row_position, row_segment = (jnp.repeat(x.reshape(I, block), G, axis=1) for x in (position, segment))
    # Everybody's positions are gathered, they are few bytes: so a rank knows now what it will need of whom.
    own = padded(kv_positions, keys), padded(kv_segments, keys, -1)
    key_position, key_segment = (jax.lax.all_gather(x, axis) for x in own)
    mine, theirs = bounds(position, segment, block), bounds(key_position, key_segment, keys)
    q_bounds = jax.tree.map(lambda x: x[None, :, None], mine)
    k_bounds = jax.tree.map(lambda x: x[:, None, :], theirs)
    needed = may_see(q_bounds, k_bounds, spec)  # (n, I, J)
    visits = jnp.argsort(~needed, axis=-1, stable=True).astype(jnp.int32)  # the blocks that are needed come first
    counts = needed.sum(axis=-1, dtype=jnp.int32)

    def absorb(state: Running, kv: Travelling, distance: jax.Array | int, wanted: jax.Array | bool = True) -> Running:
        """Adds the keys of the rank that is `distance` before this one to the running softmax."""
        source = (rank - distance) % n
        order, count = visits[source], jnp.where(wanted, counts[source], 0)
        kpos, kseg = key_position[source], key_segment[source]

        def absorb_into(i: jax.Array, state: Running) -> Running:
            queries = rows[i] * jnp.asarray(spec.scale, q.dtype) if q.dtype == jnp.float32 else rows[i]
            factor = jnp.float32(1.0 if q.dtype == jnp.float32 else spec.scale)

            def absorb_block(t: jax.Array, part: Running) -> Running:
                start = order[i, t] * keys

                def cut(x: jax.Array) -> jax.Array:
                    return jax.lax.dynamic_slice_in_dim(x, start, keys)

                k, v = (cut(x).astype(q.dtype) for x in (kv.k, kv.v))
                s = _dot("krh,skh->krs", queries, k) * factor
                if kv.scales is not None:
                    by_row = cut(kv.scales).T[:, None, :]  # (2·K, 1, keys)
                    s = s * by_row[:K]
                if spec.soft_cap is not None:
                    s = jnp.float32(spec.soft_cap) * jnp.tanh(s / jnp.float32(spec.soft_cap))
                seen = sees(
                    row_position[i][:, None], cut(kpos)[None, :], row_segment[i][:, None], cut(kseg)[None, :], spec
                )
                s = jnp.where(seen[None], s, MASKED)
                top = jnp.maximum(part.top, s.max(axis=-1))
                shrink = jnp.exp(part.top - top)
                p = jnp.exp(s - top[..., None])
                total = part.total * shrink + p.sum(axis=-1)
                if kv.scales is not None:
                    p = p * by_row[K:]
                return Running(top, total, part.acc * shrink[..., None] + _dot("krs,skh->krh", p, v))

            part = jax.tree.map(lambda x: x[i], state)
            part = jax.lax.fori_loop(0, count[i], absorb_block, part)
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), state, part)

        return jax.lax.fori_loop(0, I, absorb_into, state)

    shape = (I, K, block * G)
    state = Running(jnp.full(shape, FLOOR, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, Hv)))
    zero = zero_of(q, k, v, scales, q_positions, kv_positions, q_segments, kv_segments, rank)
    state = jax.tree.map(lambda x: x + zero.astype(x.dtype), state)
    here = Travelling(padded(k, keys), padded(v, keys), None if scales is None else padded(scales, keys))
    state = _around(absorb, state, here, needed.any(axis=(1, 2)), n, rank, axis)
    return _finished(state, sinks, (T, N, Hv), q.dtype, G)


def _dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = "highest" if y.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x.astype(y.dtype), y, precision=precision, preferred_element_type=jnp.float32)


def hops(needed: jax.Array, n: int, rank: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """How far blocks must go right and left for all ranks to get what they need, (n,) bool of each: () int32 each.

    axes: over which the answer is to be the same.
    """
    source = jnp.arange(n, dtype=jnp.int32)
    before, behind = (rank - source) % n, (source - rank) % n
    goes_right = before <= n // 2
    right = jnp.where(needed & goes_right, before, 0).max()
    left = jnp.where(needed & ~goes_right, behind, 0).max()
    # Marked as differing along each of the axes, which the maximum over them asks for.
    zero = sum((jax.lax.axis_index(name) * 0 for name in axes), start=jnp.int32(0))
    right, left = jax.lax.pmax(jnp.stack([right, left]).astype(jnp.int32) + zero[None], axes)
    return right, left


def _around(
    absorb: Callable[..., Running],
    state: Running,
    here: Travelling,
    needed: jax.Array,
    n: int,
    rank: jax.Array,
    axis: str,
) -> Running:
    """Own keys, and those that come from either side as far as anybody needs them."""
    if n == 1:
        return absorb(state, here, 0)
    # On all axes: rings side by side take part in one and the same collective, so they go equally far.
    right_hops, left_hops = hops(needed, n, rank, manual_axes())
    both = jnp.minimum(right_hops, left_hops)

    def moved(kv: Travelling, step: int) -> Travelling:
        to = [(i, (i + step) % n) for i in range(n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, to), kv)

    def hop_both(h: jax.Array, carry: tuple[Running, Travelling, Travelling]):
        state, right, left = carry
        arriving = moved(right, 1), moved(left, -1)
        state = absorb(state, right, h)
        state = absorb(state, left, -h, h > 0)  # before the first hop both are the rank's own
        return state, *arriving

    def hop_right(h: jax.Array, carry: tuple[Running, Travelling]):
        state, right = carry
        arriving = moved(right, 1)
        return absorb(state, right, h), arriving

    def hop_left(h: jax.Array, carry: tuple[Running, Travelling]):
        state, left = carry
        arriving = moved(left, -1)
        return absorb(state, left, -h, (h > 0) | (right_hops == 0)), arriving

    state, right, left = jax.lax.fori_loop(0, both, hop_both, (state, here, here))
    state, right = jax.lax.fori_loop(both, right_hops, hop_right, (state, right))
    state, left = jax.lax.fori_loop(both, left_hops, hop_left, (state, left))
    state = absorb(state, right, right_hops, (right_hops > 0) | (left_hops == 0))
    return absorb(state, left, -left_hops, left_hops > 0)


def _finished(
    state: Running, sinks: jax.Array | None, shape: tuple[int, int, int], dtype: jnp.dtype, G: int
) -> tuple[jax.Array, jax.Array]:
    """The running softmax → out (T, N, Hv) and lse (T, N)."""
    (T, N, _), (I, K, R) = shape, state.top.shape
    top, total, acc = state
    seen = total > 0.0
    if sinks is not None:
        row_sinks = jnp.tile(sinks.astype(jnp.float32).reshape(1, K, 1, G), (1, 1, R // G, 1)).reshape(1, K, R)
        higher = jnp.maximum(top, row_sinks)
        shrink = jnp.exp(top - higher)
        top, total, acc = higher, total * shrink + jnp.exp(row_sinks - higher), acc * shrink[..., None]
    total = jnp.where(seen, total, 1.0)
    out = jnp.where(seen[..., None], acc / total[..., None], 0.0)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)

    def packed(x: jax.Array) -> jax.Array:
        """(I, K, R, …) → (T, N, …)."""
        x = x.reshape(I, K, R // G, G, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(I * (R // G), N, *x.shape[4:])[:T]

    return packed(out).astype(dtype), packed(lse)
