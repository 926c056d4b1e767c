"""Mathematics that families share. T tokens, D model, N/K heads, H head dim, F ffw, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.types import Params


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Linear map: x (T, *in), weight (*out, *in) → (T, *out) in x's dtype, accumulated in float32.

    Both are flattened to matrices first: of einsums over several axes, XLA's CPU compiler makes a transposed copy of
    the weight every time (measured: 3 to 5 times slower). float32 is multiplied in full float32 on every platform.
    """
    inputs = x.ndim - 1
    out = weight.shape[: weight.ndim - inputs]
    x_flat, w_flat = x.reshape(x.shape[0], -1), weight.reshape(-1, math.prod(x.shape[1:]))
    precision = "highest" if x.dtype == jnp.float32 else None
    y = jnp.einsum("ti,oi->to", x_flat, w_flat, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype).reshape(x.shape[0], *out)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (1910.07467), computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias that has every axis of x but the first; None adds nothing."""
    return x if bias is None else x + bias[None].astype(x.dtype)


def swiglu(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> jax.Array:
    """SwiGLU feed-forward (2002.05202). x (T, D), gate_up (2, F, D), down (D, F), biases (2, F) and (D,) → (T, D)."""
    hidden = biased(project(x, gate_up), gate_up_bias)
    return biased(project(jax.nn.silu(hidden[:, 0]) * hidden[:, 1], down), down_bias)


def over_layers(
    block: Callable[[Any, jax.Array, int | jax.Array, Params], tuple[Any, jax.Array]],
    cache: Any,
    x: jax.Array,
    layers: Params,
) -> tuple[Any, jax.Array]:
    """Runs `block(cache, x, layer, params) → (cache, x)` over all layers.

    Unrolled when `layers` is a list of per-layer trees; one `lax.scan` when it is one tree whose leaves have a
    leading L axis, which compiles a single layer however many there are.
    """
    if isinstance(layers, list | tuple):
        for layer, params in enumerate(layers):
            cache, x = block(cache, x, layer, params)
        return cache, x

    def body(carry: tuple[Any, jax.Array], inputs: tuple[jax.Array, Params]) -> tuple[tuple[Any, jax.Array], None]:
        return block(*carry, *inputs), None

    count = jax.tree.leaves(layers)[0].shape[0]
    (cache, x), _ = jax.lax.scan(body, (cache, x), (jnp.arange(count, dtype=jnp.int32), layers))
    return cache, x
