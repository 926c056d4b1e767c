"""Partial attention over disjoint keys, made one."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys of a and of b, of the attention over each (2310.01889; 2501.01005, §2.2).

        out = out_a − σ(lse_b − lse_a) · (out_a − out_b)        lse = log(exp lse_a + exp lse_b)

    A part that saw nothing, of which lse is −inf, changes nothing; of two such the result is 0 and −inf.

    Args:
      out_a: (…, N, Hv) any float.
      lse_a: (…, N) float32, natural log.
      out_b: as out_a.
      lse_b: as lse_a.

    Returns:
      out (…, N, Hv) in the dtype of out_a, and lse (…, N) float32.
    """
    top = jnp.maximum(lse_a, lse_b)
    base = jnp.where(jnp.isneginf(top), 0.0, top)  # −inf − −inf is NaN
    a, b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    share = (b / jnp.where(a + b == 0.0, 1.0, a + b))[..., None]
    x, y = out_a.astype(jnp.float32), out_b.astype(jnp.float32)
    # What saw nothing may hold anything: it must not come back as 0 × NaN.
    x = jnp.where(jnp.isneginf(lse_a)[..., None], 0.0, x)
    y = jnp.where(jnp.isneginf(lse_b)[..., None], 0.0, y)
    return (x - share * (x - y)).astype(out_a.dtype), base + jnp.log(a + b)
