"""How many rows stay: of a sequence, of each layer, of each head."""

from __future__ import annotations

import dataclasses
import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import UserError
from kvjax.eviction.policy import is_count


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many rows each head keeps: a number of them, or a share of the sequence.

    Attributes:
      rows: at most so many, or None.
      share: ⌊n · share⌋ of n tokens, or None; kvpress' compression_ratio is 1 − share. See `share_of`.

    Raises:
      UserError: neither or both are given, or one is out of range.
    """

    rows: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.share is None):
            raise UserError("A cache budget is either rows or a share of the sequence: give one of rows and share.")
        if self.rows is not None and not is_count(self.rows, 1):
            raise UserError(f"The cache budget has rows={self.rows!r}, but a whole number from 1 is needed.")
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(f"The cache budget has share={self.share!r}, but a number above 0 and up to 1 is needed.")

    def count(self, n: jax.Array | int) -> jax.Array:
        """Rows to keep, int32, of `n` tokens.

        n counts the tokens of the sequence so far, not the rows that are left of them: a share of what is left would
        shrink the cache again each time.
        """
        n = jnp.asarray(n, jnp.int32)
        if self.rows is not None:
            return jnp.minimum(n, self.rows)
        return share_of(n, self.share or 0.0)

    def exact(self, n: jax.Array) -> jax.Array:
        """The same as float32, not rounded down."""
        if self.rows is not None:
            return self.count(n).astype(jnp.float32)
        part = _fraction(self.share or 0.0)
        rest = (n % part.denominator * part.numerator).astype(jnp.float32) / jnp.float32(part.denominator)
        return (n // part.denominator * part.numerator).astype(jnp.float32) + rest


def share_of(n: jax.Array, share: float) -> jax.Array:
    """⌊n · share⌋ in whole numbers, for n int32 of any shape and a share from 0 to 1.

    The share is taken as the nearest fraction with a denominator up to 10,000, so 0.1 of 10 is 1. In binary floating
    point int(10 · (1 − 0.9)), which is what kvpress computes, is 0.
    """
    part = _fraction(share)
    return n // part.denominator * part.numerator + n % part.denominator * part.numerator // part.denominator


@functools.lru_cache(maxsize=64)
def _fraction(share: float) -> fractions.Fraction:
    return fractions.Fraction(share).limit_denominator(10_000)


def pyramid(budget: Budget, n: jax.Array | int, layers: int, window: int = 64, beta: int = 20) -> jax.Array:
    """Rows to keep of each layer: fewer in higher layers, in a straight line (PyramidKV, 2406.02069; as kvpress).

    The mean over the layers is the budget b. The lowest layer gets 2b − b/β, the highest b/β; where the lowest would
    get more than the n − window rows that can go, it gets those, and the highest what leaves the mean at b. Where the
    highest would get less than the window, all layers get b.

    Args:
      budget: the mean over the layers.
      n: () int32 tokens of the sequence so far.
      layers: L.
      window: rows that the policy keeps anyway, SnapKV's window.
      beta: how steep; at least 1.

    Returns:
      (L,) int32, in float32 arithmetic: within one row of exact numbers up to a million tokens.

    Raises:
      UserError: beta is less than 1.
    """
    if beta < 1:
        raise UserError(f"The pyramid budget has beta={beta}, but at least 1 is needed.")
    n = jnp.asarray(n, jnp.int32)
    mean = budget.exact(n)
    free = (n - window).astype(jnp.float32)
    steep = mean * jnp.float32(2 - 1 / beta)
    most = jnp.minimum(steep, free)
    least = jnp.where(steep >= free, 2 * mean - most, mean * jnp.float32(1 / beta))
    sloped = (most >= least) & (least >= window) & (layers > 1)
    height = jnp.asarray(np.arange(layers) / max(layers - 1, 1), jnp.float32)
    counts = jnp.where(sloped, most - height * (most - least), jnp.broadcast_to(mean, (layers,)))
    return jnp.minimum(jnp.round(counts).astype(jnp.int32), n)
