"""Products with 8-bit codes without widening them.

The MXU takes 8-bit weights in half the time of bfloat16 ones, and codes of K and V need no conversion then. The other
side, queries or probabilities, has few rows, so each is cut into several 8-bit parts, one below the other, that are
together as precise as bfloat16: x = part 0 + part 1 / step + part 2 / step² + …, all times a norm. The products of the
parts are added up in float32 (of int8 exactly, in int32).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TILE = 32  # rows of an 8-bit tile


@dataclasses.dataclass(frozen=True)
class Parts:
    """How numbers in [-1, 1] are cut up.

    Attributes:
      dtype: of the parts.
      count: of parts.
      top: the code of 1 in part 0.
      step: how much finer a part is than the one before.
    """

    dtype: jnp.dtype
    count: int
    top: float
    step: float


PARTS = {
    # 127 · 128 steps on either side of 0, and 3 · 3 significant bits. The MXU takes one kind of float8 on either side;
    # numbers become float8_e5m2 by cutting off bits, float8_e4m3fn only in many steps before v7.
    "int8": Parts(jnp.dtype("int8"), 2, 127.0, 128.0),
    "float8_e4m3fn": Parts(jnp.dtype("float8_e5m2"), 3, 448.0, 8.0),
    "float8_e5m2": Parts(jnp.dtype("float8_e5m2"), 3, 448.0, 8.0),
}
"""Storage of the codes → how the other side is cut up."""


def rows(count: int, dtype: jnp.dtype) -> int:
    """Rows of the parts of `count` rows, whole tiles."""
    return -(-PARTS[dtype.name].count * count // TILE) * TILE


def split(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(r, n) float32 in [-1, 1] → (rows(r), n) codes: all of part 0, all of part 1, …, zeros."""
    parts = PARTS[dtype.name]
    rest, found = x * parts.top, []
    for _ in range(parts.count):
        code = jnp.round(rest) if parts.dtype == jnp.int8 else rest.astype(parts.dtype).astype(jnp.float32)
        found.append(code)
        rest = (rest - code) * parts.step
    padding = rows(x.shape[0], dtype) - parts.count * x.shape[0]
    if padding:
        found.append(jnp.zeros((padding, x.shape[1]), jnp.float32))
    joined = jnp.concatenate(found, axis=0)
    return joined.astype(jnp.int32).astype(jnp.int8) if parts.dtype == jnp.int8 else joined.astype(parts.dtype)


def combine(products: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
    """(rows(count), n) products of the parts, int32 or float32 → (count, n) float32."""
    parts = PARTS[dtype.name]
    total = products[:count].astype(jnp.float32)
    for part in range(1, parts.count):
        mine = products[part * count : (part + 1) * count].astype(jnp.float32)
        total += mine * (1 / parts.step**part)
    return total * (1 / parts.top)
