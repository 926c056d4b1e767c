"""Mathematics that families share. T tokens, D model, N/K heads, H head dim, F ffw, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.sharding import divided_here
from kvjax.types import Params, ParamSpec

Activation = Callable[[jax.Array], jax.Array]


def _gelu_fast(x: jax.Array) -> jax.Array:
    """Megatron's GELU, with √(2/π) cut to eight digits."""
    return 0.5 * x * (1 + jnp.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu_fast": _gelu_fast,
}
"""Activations by Hugging Face's names."""


def full_precision(x: jax.Array) -> str | None:
    """The precision argument with which float32 is multiplied in full float32 on every platform."""
    return "highest" if x.dtype == jnp.float32 else None


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Linear map: x (T, *in), weight (*out, *in) → (T, *out) in x's dtype, accumulated in float32.

    Both are flattened to matrices first: of einsums over several axes, XLA's CPU compiler makes a transposed copy of
    the weight every time (measured: 3 to 5 times slower). Over a mesh the outputs stay apart: an axis that is divided
    among chips, behind one that is not, cannot be flattened where it lies, and the whole weight would be gathered.
    """
    out = weight.shape[: weight.ndim - x.ndim + 1]
    rows = out if divided_here() else (math.prod(out),)
    x_flat, w_flat = x.reshape(x.shape[0], -1), weight.reshape(*rows, math.prod(x.shape[1:]))
    y = jnp.einsum("ti,...i->t...", x_flat, w_flat, precision=full_precision(x), preferred_element_type=jnp.float32)
    return y.astype(x.dtype).reshape(x.shape[0], *out)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, one_plus: bool = False) -> jax.Array:
    """Root-mean-square norm over the last axis (1910.07467), computed in float32, in x's dtype.

    With `one_plus` the gain is 1 + weight, applied before the cast to x's dtype, as Gemma has it.
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = weight.reshape((1,) * (x.ndim - 1) + (-1,))
    if one_plus:
        return (normal * (1 + gain.astype(jnp.float32))).astype(x.dtype)
    return normal.astype(x.dtype) * gain.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Layer norm over the last axis (1607.06450), computed in float32, in x's dtype. x (T, D), weight and bias (D,)."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return biased((normal * weight[None].astype(jnp.float32)).astype(x.dtype), bias)


def biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Adds a bias that has every axis of x but the first; None adds nothing."""
    return x if bias is None else x + bias[None].astype(x.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap·tanh(x / cap); None leaves x as it is."""
    return x if cap is None else jnp.asarray(cap, x.dtype) * jnp.tanh(x / jnp.asarray(cap, x.dtype))


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    activation: str = "silu",
) -> jax.Array:
    """Gated feed-forward (SwiGLU, GeGLU: 2002.05202).

    x (T, D), gate_up (2, F, D), down (D, F), biases (2, F) and (D,) → (T, D).
    """
    hidden = biased(project(x, gate_up), gate_up_bias)
    return biased(project(ACTIVATIONS[activation](hidden[:, 0]) * hidden[:, 1], down), down_bias)


def mlp(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    activation: str,
) -> jax.Array:
    """Feed-forward of two linear maps: x (T, D), up (F, D), down (D, F), biases (F,) and (D,) → (T, D)."""
    hidden = ACTIVATIONS[activation](biased(project(x, up), up_bias))
    return biased(project(hidden, down), down_bias)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of an embedding: table (V, D), tokens (T,) → (T, D)."""
    return table.at[tokens].get(mode="clip")


def unembed(weight: jax.Array, hidden: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Logits: weight (V, D), hidden (T, D), bias (V,) → (T, V) float32."""
    precision = full_precision(hidden)
    logits = jnp.einsum("td,vd->tv", hidden, weight, precision=precision, preferred_element_type=jnp.float32)
    return biased(logits, bias)


def norm_spec(size: int, name: str, axis: str | None = "width") -> ParamSpec:
    """A norm's gain."""
    return ParamSpec((size,), (axis,), (name,), init_scale=None)


def bias_spec(shape: tuple[int, ...], axes: tuple[str | None, ...], *names: str) -> ParamSpec:
    """A bias, zeros at first."""
    return ParamSpec(shape, axes, names, init_scale=0.0)


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
