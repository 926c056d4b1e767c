"""Quantized storage of rows: codes of few bits and a float32 scale; x ≈ codes · scale.

The scales are symmetric, without a zero point: absmax quantization, as in LLM.int8() (2208.07339, section 2), per row.

    scale = max |x| / top        codes = round(x / scale), clipped to ±top

where `top` is the largest code. int8 leaves out −128 and int4 −8, so that −x gets the codes of x with the other sign.
The error is at most scale / 2 for integers; for fp8 it is 2⁻⁴ (e4m3fn) or 2⁻³ (e5m2) of the number, or half of the
smallest step times the scale. Casts to fp8 do not saturate: e4m3fn has no infinity, and over 464 gives NaN; e5m2 gives
infinity from 61440 on. Hence the clipping.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

TOPS = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest code of each storage."""


def quantize_rows(x: jax.Array, storage: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Rows with a scale each.

    Args:
      x: (…, H) finite, float32 or less.
      storage: dtype of the codes, one of TOPS.

    Returns:
      codes (…, H) of `storage`, and scale (…,) float32. A row of zeros, or of numbers so small that their scale is not
      a normal float32, has codes of 0 and a scale of 1.

    Raises:
      NotImplementedError: for another storage.
    """
    scale = jnp.abs(x).max(axis=-1).astype(jnp.float32) / _top(storage)
    scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
    return quantize(x, scale, storage), scale


def quantize_kv(k: jax.Array, v: jax.Array | None, storage: DTypeLike) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """K (T, K, H) and V (T, K, Hv) → their codes, and scales (T, 2·K) float32, those of K first; (T, K) without V."""
    k, k_scales = quantize_rows(k, storage)
    if v is None:
        return k, None, k_scales
    v, v_scales = quantize_rows(v, storage)
    return k, v, jnp.concatenate([k_scales, v_scales], axis=1)


def quantize(x: jax.Array, scale: ArrayLike, storage: DTypeLike) -> jax.Array:
    """Codes for a scale that is given, as one of a whole page, head or layer: what it does not reach is clipped.

    Args:
      x: (…), float32 or less.
      scale: float32 over the leading axes of `x`, each of full size or 1: (T, K) or (1, K) or () for (T, K, H).
      storage: dtype of the codes, one of TOPS.

    Returns:
      Codes of the shape of `x`.

    Raises:
      NotImplementedError: for another storage.
    """
    top = _top(storage)
    codes = jnp.clip(x.astype(jnp.float32) / _over(scale, x.ndim), -top, top)
    if jnp.issubdtype(storage, jnp.integer):
        codes = jnp.round(codes)  # half to even, as the casts to fp8
    return codes.astype(storage)


def dequantize(codes: jax.Array, scale: ArrayLike, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """codes · scale, computed in float32; scale as in `quantize`."""
    return (codes.astype(jnp.float32) * _over(scale, codes.ndim)).astype(dtype)


def _over(scale: ArrayLike, ndim: int) -> jax.Array:
    scale = jnp.asarray(scale, jnp.float32)
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))


def _top(storage: DTypeLike) -> float:
    name = jnp.dtype(storage).name
    if name not in TOPS:
        raise NotImplementedError(f"storage {name} is not quantized; there are {', '.join(TOPS)}")
    return TOPS[name]
