"""The meaning of paged attention in plain jnp: the oracle of every backend, written to be read, not to be fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import joined, packed
from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.paged_attention import latent
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec


def query_slots(row_starts: jax.Array, tokens: int) -> jax.Array:
    """(T,) int32: the slot of each packed token; B for padding behind the last row."""
    index = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.searchsorted(row_starts[1:], index, side="right", method="compare_all").astype(jnp.int32)


def query_positions(row_starts: jax.Array, lengths: jax.Array, slots: jax.Array) -> jax.Array:
    """(T,) int32: the position of each packed token: a slot's tokens are the last of its length."""
    row_ends = row_starts[1:]
    safe = jnp.minimum(slots, lengths.shape[0] - 1)
    return lengths[safe] - row_ends[safe] + jnp.arange(slots.shape[0], dtype=jnp.int32)


def tree_bit(tree: jax.Array, index: jax.Array) -> jax.Array:
    """(T, S) bool: bit `index` (T, S) of each token's mask (T, W) int32; False outside of it."""
    word = jnp.take_along_axis(tree, jnp.clip(index >> 5, 0, tree.shape[1] - 1), axis=1)
    return ((word >> (index & 31)) & 1 == 1) & (index >= 0) & (index < 32 * tree.shape[1])


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    up: jax.Array | None = None,
    deal: Deal | None = None,
    first: jax.Array | None = None,
    ahead: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers every slot's whole context for every token, then a dense softmax. Arguments as in `__init__`."""
    T, N, _ = q.shape
    if spec.codes is not None:
        assert isinstance(scales, tuple)
        dtype = jnp.dtype(jnp.float32)
        k_pages, v_pages = packed.dequantized(k_pages, v_pages, scales, spec.codes, spec.layout, spec.lanes, dtype)
        scales = None
        if spec.layout == "head_major":
            k_pages, v_pages = k_pages.transpose(0, 3, 1, 2), v_pages.swapaxes(1, 2)
    elif spec.lanes is not None:
        k_pages, v_pages = joined.split(joined.rows_of(k_pages), spec.lanes)
    elif spec.layout == "head_major":
        k_pages = k_pages.transpose(0, 3, 1, 2)
        v_pages = None if v_pages is None else v_pages.swapaxes(1, 2)
    if v_pages is None:
        v_pages = k_pages[..., : spec.latent]
    P, R, K, _ = k_pages.shape
    if scales is not None:
        assert isinstance(scales, jax.Array)
        if scales.ndim == 2:
            scales = scales[..., None]
        by_row = scales.swapaxes(1, 2)[..., None]  # (P, R, 2·K, 1), or R of 1
        k_pages = k_pages.astype(jnp.float32) * by_row[:, :, :K]
        v_pages = v_pages.astype(jnp.float32) * by_row[:, :, -K:]
    if up is not None:
        h = q.shape[2] - (k_pages.shape[3] - up.shape[2])
        k, v = latent.expanded(k_pages.reshape(P * R, -1).astype(jnp.float32), up, h)
        k_pages, v_pages = k.reshape(P, R, N, -1), v.reshape(P, R, N, -1)
        K = N
    B, M = table.shape
    slots = query_slots(row_starts, T)
    positions = query_positions(row_starts, lengths if ahead is None else lengths + ahead, slots)
    safe = jnp.minimum(slots, B - 1)

    # (B, M, R, K, H) → (B, S, K, H) → one context per token (T, S, K, H)
    k = k_pages.at[table].get(mode="clip").reshape(B, M * R, K, -1)[safe].astype(jnp.float32)
    v = v_pages.at[table].get(mode="clip").reshape(B, M * R, K, -1)[safe].astype(jnp.float32)
    key_position = jnp.arange(M * R, dtype=jnp.int32)[None, :]
    if deal is not None:
        key_position = deal.position(key_position, R)
    visible = key_position <= positions[:, None]
    if tree is not None:
        own = key_position - (lengths[safe] - (row_starts[1:] - row_starts[:-1])[safe])[:, None]  # among the new rows
        visible = jnp.where(own >= 0, tree_bit(tree, own), True)
    visible &= (slots < B)[:, None] & (key_position < lengths[safe][:, None])
    if spec.window is not None:
        near = key_position > positions[:, None] - spec.window
        visible &= near | (key_position < spec.sink_rows)
    if first is not None:
        visible &= (key_position >= first[safe][:, None]) | (key_position < spec.sink_rows)
    v = jnp.where(visible[:, :, None, None], v, 0.0)  # a poisoned row must not come back as 0 × NaN

    grouped = q.reshape(T, K, N // K, -1).astype(jnp.float32)
    logits = jnp.einsum("tkgh,tskh->tkgs", grouped, k, precision="highest") * jnp.float32(spec.scale)
    if spec.soft_cap is not None:
        logits = jnp.float32(spec.soft_cap) * jnp.tanh(logits / jnp.float32(spec.soft_cap))
    if slopes is not None:
        distance = (positions[:, None] - key_position).astype(jnp.float32)
        logits -= slopes.reshape(1, K, N // K, 1) * distance[:, None, None, :]
    logits = jnp.where(visible[:, None, None, :], logits, -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)  # −inf where nothing is visible
    if sinks is not None:
        lse = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks.reshape(1, K, N // K)))
    weights = jnp.where(
        jnp.isneginf(lse)[..., None], 0.0, jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
    )
    out = jnp.einsum("tkgs,tskh->tkgh", weights, v, precision="highest")
    return out.reshape(T, N, -1).astype(q.dtype), lse.reshape(T, N)
