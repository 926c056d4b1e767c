"""KIVI: asymmetric codes of 4 or 2 bits with a scale and a zero for each group of numbers (2402.02750).

    scale = (max − min) / (2^bits − 1)        code = round((x − zero) / scale)        x ≈ code · scale + zero

with zero = min. K is grouped per channel, over `group` consecutive rows of a head: its outliers stay in their
channels. V is grouped per row, over `group` consecutive channels. Codes round half to even, as the functions of the
authors do (jy-yuan/KIVI, quant/new_pack.py); where all numbers of a group are equal those divide by zero, and here the
scale is 1.

Scales and zeros are kept in 16 bits, by default as bfloat16: what a TPU widens by a shift. They are rounded outward,
the zero down and the scale up, and the codes are made with what was rounded. So the codes reach the whole group, and
the error stays within half a step. The step that is stored is wider than the exact one, by |min| / (2^bits − 1) / 128
at most for the zero, and then by 1 / 128 of itself at most.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BITS = (4, 2)


def quantize_groups(
    x: jax.Array, bits: int, group: int, axis: int, dtype: DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes of numbers in groups of `group` along an axis.

    Args:
      x: (…, n, …) finite, float32 or less; of at most 3e38 / 2, so that a range is no infinity.
      bits: of a code, one of BITS.
      group: numbers that share a scale; divides n.
      axis: along which they lie, n long.
      dtype: of the scales and zeros. float32 gives those of the paper; others are rounded outward.

    Returns:
      codes of the shape of x, uint8 in [0, 2^bits); scale and zero of that shape with n / group for n.

    Raises:
      ValueError: for other bits, or where the group does not divide n.
    """
    if bits not in BITS:
        raise ValueError(f"KIVI codes have 4 or 2 bits; {bits} were asked for")
    axis %= x.ndim
    grouped = _grouped(x.astype(jnp.float32), group, axis)
    low, high = grouped.min(axis=axis + 1), grouped.max(axis=axis + 1)
    top = jnp.float32((1 << bits) - 1)
    zero = _rounded(low, dtype, up=False)
    scale = (high - zero.astype(jnp.float32)) / top
    # Too small for a normal number is as good as none; and 1 cannot turn what is not finite into NaN.
    scale = _rounded(jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0), dtype, up=True)
    spread = [jnp.expand_dims(y.astype(jnp.float32), axis + 1) for y in (scale, zero)]
    codes = jnp.round(jnp.clip((grouped - spread[1]) / spread[0], 0, top))
    return codes.astype(jnp.uint8).reshape(x.shape), scale, zero


def dequantize_groups(
    codes: jax.Array, scale: jax.Array, zero: jax.Array, axis: int, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """code · scale + zero, computed in float32; the arguments as `quantize_groups` returns them."""
    axis %= codes.ndim
    grouped = _grouped(codes.astype(jnp.float32), codes.shape[axis] // scale.shape[axis], axis)
    scale, zero = (jnp.expand_dims(y.astype(jnp.float32), axis + 1) for y in (scale, zero))
    return (grouped * scale + zero).reshape(codes.shape).astype(dtype)


def join_words(scale: jax.Array, zero: jax.Array) -> jax.Array:
    """Scale and zero, bfloat16 (…) → uint32 (…): one word, the scale in its high half."""
    high, low = (jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (scale, zero))
    return (high << 16) | low


def split_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 (…) → scale and zero, float32 (…)."""
    halves = words & jnp.uint32(0xFFFF0000), words << 16
    scale, zero = (jax.lax.bitcast_convert_type(x, jnp.float32) for x in halves)
    return scale, zero


def _grouped(x: jax.Array, group: int, axis: int) -> jax.Array:
    """(…, n, …) → (…, n / group, group, …)."""
    n = x.shape[axis]
    if group < 1 or n % group:
        raise ValueError(f"groups of {group} do not divide {n} numbers: choose a group that does")
    return x.reshape(*x.shape[:axis], n // group, group, *x.shape[axis + 1 :])


def _rounded(x: jax.Array, dtype: DTypeLike, up: bool) -> jax.Array:
    """float32 → the nearest number of `dtype` that is not below, or not above."""
    near = x.astype(dtype)
    if jnp.dtype(dtype) == jnp.float32:
        return near
    wide = near.astype(jnp.float32)
    next_one = jnp.nextafter(near, jnp.full_like(near, jnp.inf if up else -jnp.inf))
    return jnp.where(wide < x if up else wide > x, next_one, near)
