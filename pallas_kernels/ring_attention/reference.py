"""The meaning of ring attention: everybody's keys gathered, then a dense softmax. To be read, not to be fast."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.ring_attention.visibility import sees


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
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `kvjax.pallas_kernels.ring_attention.ring_attention`; segments are there."""
    (T, N, _), K = q.shape, k.shape[1]

    def everybody(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axis, tiled=True)

    keys, values = everybody(k).astype(jnp.float32), everybody(v).astype(jnp.float32)
    if scales is not None:
        by_row = everybody(scales)[..., None]  # (n · S, 2·K, 1)
        keys, values = keys * by_row[:, :K], values * by_row[:, K:]
    seen = sees(
        q_positions[:, None], everybody(kv_positions)[None, :], q_segments[:, None], everybody(kv_segments)[None, :],
        spec,
    )[:, None, None, :]  # fmt: skip
    grouped = q.reshape(T, K, N // K, -1).astype(jnp.float32)
    logits = jnp.einsum("tkgh,skh->tkgs", grouped, keys, precision="highest") * jnp.float32(spec.scale)
    if spec.soft_cap is not None:
        logits = jnp.float32(spec.soft_cap) * jnp.tanh(logits / jnp.float32(spec.soft_cap))
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)  # −inf where nothing is seen
    if sinks is not None:
        lse = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks.reshape(1, K, N // K)))
    base = jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]
    weights = jnp.where(seen, jnp.exp(logits - base), 0.0)
    out = jnp.einsum("tkgs,skh->tkgh", weights, values, precision="highest")
    return out.reshape(T, N, -1).astype(q.dtype), lse.reshape(T, N)
