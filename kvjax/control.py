"""Control flow inside the loop that leaves large arrays where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


def when(flag: jax.Array, update: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`update(carry)` if the () bool flag is set, else the carry: a conditional as a loop of one round or none.

    XLA updates a loop's carry in place on every platform. Through `lax.cond` the CPU backend copies what passes, at
    the entry of one branch and the exit of the other (docs/decisions.md, "No conditional around the pages").
    """
    _, result = jax.lax.while_loop(
        lambda held: held[0], lambda held: (jnp.bool_(False), update(held[1])), (flag, carry)
    )
    return result


def for_each_page(
    first: jax.Array,
    last: jax.Array,
    visit: Callable[[Carry, jax.Array, jax.Array], Carry],
    carry: Carry,
    width: int = 256,
) -> Carry:
    """Visits the columns [first, last) of every row of a block table, `width` of them at a time.

    The cost follows the number of columns named: nothing to visit is no round at all.

    Args:
      first: (B,) int32.
      last: (B,) int32, at least `first`.
      visit: (carry, row (W,) int32, column (W,) int32) → carry; the row is B where there is nothing to visit.
      carry: what the visits pass on.
      width: W, static.
    """
    ends = jnp.cumsum(last - first, dtype=jnp.int32)
    rows = first.shape[0]

    def visit_some(held: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        base, inner = held
        index = base + jnp.arange(width, dtype=jnp.int32)
        row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
        safe = jnp.minimum(row, rows - 1)
        return base + width, visit(inner, row, last[safe] - ends[safe] + index)

    _, result = jax.lax.while_loop(lambda held: held[0] < ends[-1], visit_some, (jnp.int32(0), carry))
    return result
