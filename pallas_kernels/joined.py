"""The joined layout of pages, for TPUs: a row is one token's K of every head, then its V, cut into tiles of 128 lanes.

    lanes   | K of head 0 | K of head 1 | … | V of head 0 | V of head 1 | … | padding to a multiple of 128

Pages are (P, C, R, 128): tile c of row r holds lanes 128·c … of the row. A page is one contiguous piece of HBM, fetched
by one DMA. No lane is wasted on any head dim as long as all heads together fill whole tiles. Latent pages (MLA) hold
keys only, whose first numbers are the values. (With the rows whole, (P, R, lanes), v5e, v5p and v6e read a vector
register of bfloat16 in two halves.)

The MXU multiplies whole tiles of 128 lanes. Heads that share tiles form a unit: its keys are a range of whole tiles,
and each of its queries stands in its own head's lanes, with zeros elsewhere. Its output is a range of whole tiles too,
of which a head's lanes are kept.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

LANES = 128


def _tiles(start: int, stop: int) -> tuple[int, int]:
    """The range of whole tiles around lanes start … stop."""
    return start // LANES * LANES, -(-stop // LANES) * LANES


@dataclasses.dataclass(frozen=True)
class Unit:
    """Kv heads whose keys share tiles.

    Attributes:
      heads: (first, stop) kv heads.
      key: (start, stop) lanes of a row; multiples of 128.
      value: (start, stop) lanes of a row; multiples of 128.
    """

    heads: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Where heads lie in a row.

    Attributes:
      kv_heads: K.
      key_dim: H of the keys.
      value_dim: Hv.
      latent: whether the values are the first Hv numbers of the keys.
      values_at: first lane of the values, where it is not the one behind the keys (`packed.Codes.lanes`).
      filled: lanes of a row, where they are more than those in use need.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    values_at: int | None = None
    filled: int = 0

    def key_start(self, head: int) -> int:
        return head * self.key_dim

    def value_start(self, head: int) -> int:
        if self.latent:
            return head * self.key_dim
        first = self.kv_heads * self.key_dim if self.values_at is None else self.values_at
        return first + head * self.value_dim

    @property
    def used(self) -> int:
        """Lanes of a row up to the last that holds something."""
        return self.kv_heads * self.key_dim if self.latent else self.value_start(self.kv_heads)

    @property
    def row(self) -> int:
        """Lanes of a row, a multiple of 128."""
        return max(_tiles(0, self.used)[1], self.filled)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The heads in groups that fill whole tiles, of equal size but perhaps the last."""
        size = min(math.lcm(self.key_dim, LANES) // self.key_dim, self.kv_heads)
        units = []
        for first in range(0, self.kv_heads, size):
            stop = min(first + size, self.kv_heads)
            key = _tiles(self.key_start(first), self.key_start(stop - 1) + self.key_dim)
            value = _tiles(self.value_start(first), self.value_start(stop - 1) + self.value_dim)
            units.append(Unit((first, stop), key, value))
        return tuple(units)

    @property
    def key_width(self) -> int:
        """Lanes of the widest unit's keys."""
        return max(unit.key[1] - unit.key[0] for unit in self.units)

    @property
    def value_width(self) -> int:
        """Lanes of the widest unit's values."""
        return max(unit.value[1] - unit.value[0] for unit in self.units)


def rows(k: jax.Array, v: jax.Array | None, lanes: Lanes) -> jax.Array:
    """K (…, K, H) and V (…, K, Hv), or None where latent → rows (…, lanes.row)."""
    parts = [x.reshape(*x.shape[:-2], -1) for x in (k, v) if x is not None]
    joined = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return _padded(joined, 0, lanes.row)


def split(joined: jax.Array, lanes: Lanes) -> tuple[jax.Array, jax.Array]:
    """Rows (…, lanes.row) → K (…, K, H) and V (…, K, Hv)."""
    K, H, Hv = lanes.kv_heads, lanes.key_dim, lanes.value_dim
    k = joined[..., : K * H].reshape(*joined.shape[:-1], K, H)
    if lanes.latent:
        return k, k[..., :Hv]
    return k, joined[..., lanes.value_start(0) : lanes.used].reshape(*joined.shape[:-1], K, Hv)


def tiles(joined: jax.Array) -> jax.Array:
    """Rows (…, R, lanes.row) → pages (…, C, R, 128)."""
    return joined.reshape(*joined.shape[:-1], -1, LANES).swapaxes(-3, -2)


def rows_of(pages: jax.Array) -> jax.Array:
    """Pages (…, C, R, 128) → rows (…, R, lanes.row)."""
    rows_first = pages.swapaxes(-3, -2)
    return rows_first.reshape(*rows_first.shape[:-2], -1)


def spread(q: jax.Array, lanes: Lanes) -> jax.Array:
    """Queries (…, N, H) → (…, N, lanes.key_width): each in the lanes of its head's keys within the unit, else zeros."""
    if lanes.key_dim == lanes.key_width:
        return q
    group = q.shape[-2] // lanes.kv_heads
    parts = []
    for unit in lanes.units:
        for head in range(*unit.heads):
            mine = q[..., head * group : (head + 1) * group, :]
            parts.append(_padded(mine, lanes.key_start(head) - unit.key[0], lanes.key_width))
    return jnp.concatenate(parts, axis=-2)


def gather(out: jax.Array, lanes: Lanes) -> jax.Array:
    """Outputs (…, N, lanes.value_width) over all lanes of a unit → (…, N, Hv): each head's own."""
    if lanes.value_dim == lanes.value_width:
        return out
    group = out.shape[-2] // lanes.kv_heads
    parts = []
    for unit in lanes.units:
        for head in range(*unit.heads):
            start = lanes.value_start(head) - unit.value[0]
            parts.append(out[..., head * group : (head + 1) * group, start : start + lanes.value_dim])
    return jnp.concatenate(parts, axis=-2)


def _padded(x: jax.Array, start: int, width: int) -> jax.Array:
    """`x` at lanes start … of `width`, zeros elsewhere."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(start, width - start - x.shape[-1])])
