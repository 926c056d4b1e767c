"""From the tensors of a GGUF file to Hugging Face's: names, and where each one's numbers are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.checkpoints.gguf_header import GGUFTensor
from kvjax.types import GGUFMade, GGUFNames

_LAYER = re.compile(r"^blk\.(\d+)\.")
_EXPERT = re.compile(r"\.(\d+)\.(?=(weight|bias)$)")
_NEAR = 64


class Stored(NamedTuple):
    """A tensor stored row by row. `order` is the stored row of each of Hugging Face's; None: they are the same."""

    tensor: GGUFTensor
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape


class Made(NamedTuple):
    """A tensor made of stored ones; see `kvjax.types.GGUFMade`."""

    shape: tuple[int, ...]
    parts: tuple[GGUFTensor, ...]
    recipe: GGUFMade


def renamed(
    tensors: Mapping[str, GGUFTensor], names: GGUFNames, config: Mapping[str, Any], arch: str
) -> dict[str, Stored | Made]:
    """Hugging Face name → tensor. A name without a counterpart stays, for the loader to report.

    Raises:
      ValueError: a tensor has a shape that cannot be.
    """
    known, orders = names.tensors(arch, config), names.rows(arch, config)
    found, used = _made(tensors, names.made)
    for name, tensor in tensors.items():
        if name not in used:
            for new, part in _named(name, tensor, known):
                found[new] = Stored(part, _order(name, new, part, orders))
    return found


def runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges (first, stop) that together hold all of `rows`; small gaps are read along with what is around them."""
    ordered = np.sort(rows)
    for part in np.split(ordered, np.flatnonzero(np.diff(ordered) > _NEAR) + 1):
        if part.size:
            yield int(part[0]), int(part[-1]) + 1


def _named(name: str, tensor: GGUFTensor, known: Mapping[str, str]) -> Iterator[tuple[str, GGUFTensor]]:
    """Names and tensors that a stored one becomes: itself, or each expert of a stack."""
    layer, expert = _LAYER.match(name), _EXPERT.search(name)
    new = known.get(_EXPERT.sub(".{e}.", _LAYER.sub("blk.{i}.", name)), name)
    if layer:
        new = new.replace("{i}", layer.group(1))
    if "{e}" not in new:
        yield new, tensor
    elif expert:
        yield new.replace("{e}", expert.group(1)), tensor
    else:
        for e, part in enumerate(_entries(name, tensor)):
            yield new.replace("{e}", str(e)), part


def _entries(name: str, tensor: GGUFTensor) -> list[GGUFTensor]:
    """A stack's entries, as if they were stored one by one."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        raise ValueError(f"{name} of shape {tensor.shape} is no stack of experts")
    count, *shape = tensor.shape
    size = tensor.rows // count * tensor.row_bytes
    return [tensor._replace(shape=tuple(shape), offset=tensor.offset + e * size) for e in range(count)]


def _order(
    name: str, new: str, tensor: GGUFTensor, orders: Mapping[str, Callable[[int], np.ndarray]]
) -> np.ndarray | None:
    for suffix, order in orders.items():
        if new.endswith(suffix) and 0 not in tensor.shape:
            try:
                return order(tensor.shape[0])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return None


def _made(
    tensors: Mapping[str, GGUFTensor], recipes: Mapping[str, GGUFMade]
) -> tuple[dict[str, Stored | Made], set[str]]:
    """Tensors that have to be made, of every layer that has all of their parts; and the names of those parts."""
    layers = sorted({layer.group(1) for layer in map(_LAYER.match, tensors) if layer}) if recipes else []
    found: dict[str, Stored | Made] = {}
    used: set[str] = set()
    for name, recipe in recipes.items():
        for layer in layers:
            parts = [part.replace("{i}", layer) for part in recipe.parts]
            if all(part in tensors for part in parts):
                found[name.replace("{i}", layer)] = _make(parts, tuple(tensors[part] for part in parts), recipe)
                used.update(parts)
    return found, used


def _make(names: list[str], parts: tuple[GGUFTensor, ...], recipe: GGUFMade) -> Made:
    shapes = [part.shape for part in parts]
    if any(0 in shape for shape in shapes) or (not recipe.whole and len({shape[0] for shape in shapes}) != 1):
        raise ValueError(f"{' and '.join(names)} of shapes {shapes} do not fit together")
    try:
        return Made(recipe.shape(*shapes), parts, recipe)
    except ValueError as error:
        raise ValueError(f"{' and '.join(names)} of shapes {shapes} do not fit together ({error})") from error
