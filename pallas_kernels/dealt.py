"""Pages of a sequence dealt over chips, so that each holds 1/n of every context (context parallelism).

A page of a block table has n parts of R rows, one on each chip; the table is the same on all of them. Parts are dealt
there and back, so that chips with equally many pages also have equally much causal work (zigzag order):

    page 0    part 0 · part 1 · … · part n−1        rows 0 … nR−1 of the sequence, in this order
    page 1    part n−1 · … · part 1 · part 0        the next nR

A chip sees its parts of a sequence as one shorter sequence of *local* rows, in the order of their positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


class Deal(struct.PyTreeNode):
    """Whose rows these are.

    Attributes:
      part: () int32 number of this chip's part, `jax.lax.axis_index` of the mesh axis.
      parts: n, static.
    """

    part: jax.Array
    parts: int = struct.field(pytree_node=False)

    def _turn(self, page: jax.Array) -> jax.Array:
        """Where this part stands within a page: the part-th, or in every other page the part-th from the end."""
        return jnp.where(page % 2 == 0, self.part, self.parts - 1 - self.part)

    def rows_before(self, position: jax.Array, rows: int) -> jax.Array:
        """Local rows, of R a page, whose position is below `position` int32, which is at least 0."""
        page, rest = position // (self.parts * rows), position % (self.parts * rows)
        return page * rows + jnp.clip(rest - self._turn(page) * rows, 0, rows)

    def position(self, row: jax.Array, rows: int) -> jax.Array:
        """The position of a local row int32: the inverse of `rows_before`."""
        page = row // rows
        return (page * self.parts + self._turn(page)) * rows + row % rows

    def owns(self, position: jax.Array, rows: int) -> jax.Array:
        """Whether the row at a position int32 is among this part's."""
        return position // rows % self.parts == self._turn(position // (self.parts * rows))
