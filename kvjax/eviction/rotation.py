"""RoPE after the fact: cached keys moved to other positions, and the mean rotation of positions to come.

Frequencies are radians per position of each rotated pair, a tuple of floats: those of
`kvjax.models.positions.inverse_frequencies`, which the models' own angles come from too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

Frequencies = tuple[float, ...]

_BASE = 256
_DIGITS = 4  # reach every int32


def rerotate(keys: jax.Array, shift: jax.Array, frequencies: Frequencies, interleaved: bool = False) -> jax.Array:
    """Cached keys, moved by a number of positions: RoPE(k, p) becomes RoPE(k, p + shift).

    After an eviction, `slot - position` of each row kept moves it to the position that its place in the cache has, as
    StreamingLLM wants it (2309.17453; kvpress' KeyRerotationPress). A key that is moved again and again gathers a
    rounding each time, of its own dtype: over many steps, cache keys without RoPE instead.

    Args:
      keys: (K, S, H), RoPE applied, of any float dtype; dims beyond the rotated ones are left as they are.
      shift: (K, S) int32, negative for an earlier position.
      frequencies: n radians per position, of pairs (i, i + n).
      interleaved: pairs are (2i, 2i + 1) instead.

    Returns:
      (K, S, H) of keys' dtype, computed in float32.
    """
    return rotate(keys, *angles(frequencies, shift), interleaved)


def angles(frequencies: Frequencies, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of positions (…) int32, of either sign: two (…, n) float32, within 1e-6 of float64 at each position.

    A float32 product of position and frequency would be off by 0.5 radian at 10 million, so the digits of the position
    in base 256 are looked up, and their angles added, as in `kvjax.models.positions.cos_sin`.
    """
    table = jnp.asarray(_table(frequencies))
    size = jnp.abs(positions)
    cos, sin = table[0, 0][size % _BASE], table[0, 1][size % _BASE]
    for place in range(1, _DIGITS):
        digit = size // _BASE**place % _BASE
        cos_d, sin_d = table[place, 0][digit], table[place, 1][digit]
        cos, sin = cos * cos_d - sin * sin_d, sin * cos_d + cos * sin_d
    return cos, jnp.where(positions[..., None] < 0, -sin, sin)


@functools.lru_cache(maxsize=16)
def _table(frequencies: Frequencies) -> np.ndarray:
    """(digits, 2, 256, n) float32: cos and sin of each value of each digit of a position."""
    places = float(_BASE) ** np.arange(_DIGITS)
    turned = np.arange(_BASE)[None, :, None] * places[:, None, None] * np.asarray(frequencies, np.float64)
    table = np.stack([np.cos(turned), np.sin(turned)], axis=1).astype(np.float32)
    table.setflags(write=False)
    return table


def mean_rotation(frequencies: Frequencies, start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Means of cos and sin over the positions start … start + count − 1: two (n,) float32; start is () int32.

    The mean of e^(i(start + j)f) over j is e^(i·start·f) times the mean of e^(ijf), which the host knows.
    """
    ahead = np.exp(1j * np.arange(count)[:, None] * np.asarray(frequencies, np.float64)[None]).mean(axis=0)
    mean_cos, mean_sin = jnp.asarray(ahead.real, jnp.float32), jnp.asarray(ahead.imag, jnp.float32)
    cos, sin = angles(frequencies, start)
    return cos * mean_cos - sin * mean_sin, sin * mean_cos + cos * mean_sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
    """x (…, H) with its first 2n dims turned by cos, sin (…, n), whose shape is x's but for the last axis."""
    pairs = cos.shape[-1]
    rotary = x[..., : 2 * pairs].astype(jnp.float32)
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary[..., :pairs], rotary[..., pairs:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = jnp.stack(turned, axis=-1).reshape(rotary.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([joined.astype(x.dtype), x[..., 2 * pairs :]], axis=-1)
