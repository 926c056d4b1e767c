"""Partial attention results, each over some of the keys, merged into that over all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(outs: jax.Array, lses: jax.Array, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Merges n results by their log-sum-exp (FlashAttention's online softmax, 2205.14135).

    Args:
      outs: (n, …, N, Hv), any float; each normalised over its own keys.
      lses: (n, …, N) float32 natural logs of the softmax denominators; −inf of a part where nothing is seen.
      sinks: (N,) float32 logits that join the denominator of the whole, which no part has counted.

    Returns:
      out (…, N, Hv) in float32 and lse (…, N); 0 and −inf where no part sees anything.
    """
    top = lses.max(axis=0)
    nothing = jnp.isneginf(top)
    safe = jnp.where(nothing, 0.0, top)
    weights = jnp.exp(lses - safe[None])
    total = weights.sum(axis=0)
    lse = jnp.where(nothing, -jnp.inf, safe + jnp.log(jnp.where(nothing, 1.0, total)))
    if sinks is not None:
        with_sinks = jnp.logaddexp(lse, jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape))
        lse = jnp.where(nothing, lse, with_sinks)
    share = jnp.where(nothing[None], 0.0, jnp.exp(lses - jnp.where(nothing, 0.0, lse)[None]))
    # What saw nothing may hold anything: it must not come back as 0 × NaN.
    outs = jnp.where(jnp.isneginf(lses)[..., None], 0.0, outs.astype(jnp.float32))
    return (outs * share[..., None]).sum(axis=0), lse
