"""Multi-head latent attention (MLA, 2405.04434): what a head's keys and values are, of a latent that all heads share.

A row of the cache is a latent of C numbers and a rotated key of r. `up` (N, h + Hv, C) makes a head's keys (the h
numbers without position) and values of the latent. Two forms mean the same:

    absorbed   q · up meets the latents as they are, and the result is multiplied with up: (C + r) + C numbers a head
               and row, for decode, which is bound by the bytes of the rows
    expanded   keys and values of every head are made of each row: (h + r) + Hv numbers, after h + Hv times C for
               making them, for prompts, where many queries share that
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def per_head(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """An einsum with an axis in common to both and the output, such as heads; in x's dtype, accumulated in float32.

    XLA's CPU backend has no such product of bfloat16 into float32, so there the operands are widened first.
    """

    def wide(x: jax.Array, weight: jax.Array) -> jax.Array:
        wider = x.astype(jnp.float32), weight.astype(jnp.float32)
        return jnp.einsum(subscripts, *wider, precision="highest").astype(x.dtype)

    def narrow(x: jax.Array, weight: jax.Array) -> jax.Array:
        precision = "highest" if x.dtype == jnp.float32 else None
        y = jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=jnp.float32)
        return y.astype(x.dtype)

    return jax.lax.platform_dependent(x, weight, cpu=wide, default=narrow)


def check(q: jax.Array, up: jax.Array, key_dim: int, latent: int) -> int:
    """h, the numbers of a head's keys without position. Raises ValueError for shapes that do not fit each other."""
    h = q.shape[2] - (key_dim - latent)
    if up.shape[0] != q.shape[1] or up.shape[2] != latent or not 0 < h < up.shape[1]:
        raise ValueError(
            f"up is {up.shape} and q {q.shape}: of latents of {latent} and rows of {key_dim} numbers, up is "
            f"(N, h + Hv, {latent}) and q (T, N, h + {key_dim - latent})"
        )
    return h


def absorbed(q: jax.Array, up: jax.Array, h: int) -> jax.Array:
    """q (T, N, h + r) → (T, N, C + r), which meets latents instead of keys."""
    return jnp.concatenate([per_head("tnh,nhc->tnc", q[..., :h], up[:, :h]), q[..., h:]], axis=-1)


def values(latent: jax.Array, up: jax.Array, h: int) -> jax.Array:
    """Sums of latents (T, N, C) → sums of values (T, N, Hv)."""
    return per_head("tnc,nhc->tnh", latent, up[:, h:])


def expanded(rows: jax.Array, up: jax.Array, h: int) -> tuple[jax.Array, jax.Array]:
    """Rows (S, C + r) → the keys (S, N, h + r) and values (S, N, Hv) of every head."""
    C = up.shape[2]
    precision = "highest" if rows.dtype == jnp.float32 else None
    latent, turned = rows[:, None, :C], rows[:, None, C:]
    flat = up.reshape(-1, C).astype(rows.dtype)
    both = jnp.einsum("sc,fc->sf", latent[:, 0], flat, precision=precision, preferred_element_type=jnp.float32)
    both = both.astype(rows.dtype).reshape(-1, *up.shape[:2])
    turned = jnp.broadcast_to(turned, (*both.shape[:2], turned.shape[-1]))
    return jnp.concatenate([both[..., :h], turned], axis=-1), both[..., h:]
