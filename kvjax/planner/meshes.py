"""How devices are divided over the axes of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import re

from kvjax.errors import RequestError
from kvjax.sharding import MESH_AXES


@dataclasses.dataclass(frozen=True)
class Axes:
    """The shape of a mesh, its axes in the order of `kvjax.sharding.MESH_AXES`.

    Attributes:
      data: independent engines.
      seq: parts of every sequence.
      expert: parts of the experts of a layer.
      model: parts of heads, feed-forwards and vocabulary.
    """

    data: int = 1
    seq: int = 1
    expert: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.seq * self.expert * self.model

    def size(self, axis: str | None) -> int:
        """Of a mesh axis; 1 for None."""
        return 1 if axis is None else getattr(self, axis)

    def __str__(self) -> str:
        named = [f"{axis}={self.size(axis)}" for axis in MESH_AXES if self.size(axis) > 1]
        return ",".join(named) or "model=1"


def parse_mesh(text: str, devices: int) -> Axes:
    """A mesh as users write it: "seq=16,model=4"; what is not named is 1.

    Args:
      text: as the user gave it.
      devices: how many there are.

    Raises:
      RequestError: unknown axes, impossible sizes, or another product than the number of devices.
    """
    sizes: dict[str, int] = {}
    for part in str(text).split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES or name in sizes or not re.fullmatch("[1-9][0-9]{0,6}", size):
            known = ", ".join(MESH_AXES)
            raise RequestError(f"mesh is {text!r}: give each of the axes {known} at most once, as in seq=16,model=4.")
        sizes[name] = int(size)
    axes = Axes(**sizes)
    if axes.devices != devices:
        product = " × ".join(str(size) for size in sizes.values())
        equals = f" = {axes.devices}" if len(sizes) > 1 else ""
        raise RequestError(
            f"mesh is {text!r}: {product}{equals}, but there are {devices} devices; these must be equal."
        )
    return axes


@functools.cache
def shapes(devices: int) -> tuple[Axes, ...]:
    """Every mesh of so many devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return tuple(
        Axes(data, seq, expert, devices // (data * seq * expert))
        for data in divisors
        for seq in divisors
        if devices % (data * seq) == 0
        for expert in divisors
        if devices % (data * seq * expert) == 0
    )


def candidates(devices: int, *, heads: int, experts: int, batch: int, parts: int) -> tuple[Axes, ...]:
    """Meshes that divide the work evenly.

    Args:
      devices: how many there are.
      heads: N; `model` has to divide it, or every device would compute all heads.
      experts: E, 0 for none; `expert` has to divide it.
      batch: sequences; no more engines than that.
      parts: into how many a sequence can be dealt: pages of R rows of the longest one.
    """
    return tuple(
        axes
        for axes in shapes(devices)
        if heads % axes.model == 0
        and (experts or 1) % axes.expert == 0
        and axes.data <= batch
        and axes.seq <= max(parts, 1)
    )


def rounded_up(count: int, step: int) -> int:
    """The least multiple of `step` that is at least `count`."""
    return -(-count // step) * step
