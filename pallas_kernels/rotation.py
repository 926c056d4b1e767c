"""Rotation of a head's channels by a Hadamard matrix, before K is quantized in few bits (QuaRot, 2404.00456).

An outlier channel makes the scale of a whole row large. After x · H / √n every channel holds a share of each of the
old ones. The matrix is orthonormal, so q · k is what it was when Q is rotated as well.

Orders are those of Sylvester's doubling from 1, 12 or 20; of the last two, Paley's construction over the field of 11 or
19 elements: H = I + S, where S is the skew matrix bordered by ones of the quadratic characters of j − i.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

BASES = (1, 12, 20)


def rotate(x: jax.Array) -> jax.Array:
    """(…, H) → (…, H) in the dtype of x: rotated, computed in float32. For K as it is written, and for Q.

    Raises:
      ValueError: where no matrix of this order is built here.
    """
    return _times(x, hadamard(x.shape[-1]))


def rotate_back(x: jax.Array) -> jax.Array:
    """The inverse of `rotate`: for the output, where V was rotated as it was written."""
    return _times(x, hadamard(x.shape[-1]).T)


@functools.cache
def hadamard(n: int) -> np.ndarray:
    """(n, n) int8 of ±1 whose rows are orthogonal: H · Hᵀ = n · I.

    Raises:
      ValueError: where n is not 2^k times 1, 12 or 20.
    """
    for base in BASES:
        doublings, rest = divmod(n, base)
        if n > 0 and rest == 0 and doublings & (doublings - 1) == 0:
            matrix = np.ones((1, 1), np.int8) if base == 1 else _paley(base - 1)
            for _ in range(doublings.bit_length() - 1):
                matrix = np.block([[matrix, matrix], [matrix, -matrix]])
            return matrix
    raise ValueError(f"no Hadamard matrix of order {n} is known here (2^k times 1, 12 or 20): leave the rotation out")


def _paley(q: int) -> np.ndarray:
    """(q + 1, q + 1), for a prime q that is 3 mod 4."""
    squares = {i * i % q for i in range(1, q)}
    difference = (np.arange(q)[None, :] - np.arange(q)[:, None]) % q
    skew = np.zeros((q + 1, q + 1), np.int8)
    skew[0, 1:], skew[1:, 0] = 1, -1
    skew[1:, 1:] = np.where(difference == 0, 0, np.where(np.isin(difference, list(squares)), 1, -1))
    return skew + np.eye(q + 1, dtype=np.int8)


def _times(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    unit = jnp.asarray(matrix, jnp.float32) * jnp.float32(matrix.shape[0] ** -0.5)
    return jnp.matmul(x.astype(jnp.float32), unit, precision="highest").astype(x.dtype)
