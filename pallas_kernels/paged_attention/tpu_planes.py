"""How the TPU's kernels read pages of codes that share bytes (packed.py): planes by shifts and masks of whole words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import packed
from kvjax.pallas_kernels.joined import LANES, Lanes
from kvjax.pallas_kernels.packed import Codes

LOW = {4: 0x0F0F0F0F, 2: 0x03030303}
"""The code in the low bits of each byte of a word."""


@dataclasses.dataclass(frozen=True)
class Planes:
    """K or V of a page of codes.

    Attributes:
      first: tile of bytes of a page where it begins.
      tiles: of bytes.
      lane: of the unpacked row where it begins, a multiple of 128.
      bits: of a code.
      dtype: of codes that are unpacked: int8, or the float8 that they are.
      signed: codes of 4 bits are from −8 to 7, not from 0.
      group: numbers that share a scale and a zero; 0 where rows or pages have a scale.
    """

    first: int
    tiles: int
    lane: int
    bits: int
    dtype: jnp.dtype
    signed: bool
    group: int

    def read(self, load: Callable[[jax.Array | int], jax.Array], tile: jax.Array | int) -> jax.Array:
        """Tile `tile`, from lane 128 · tile of the unpacked row on: (rows, 128) of `dtype`.

        load: tile of bytes of a page → (rows, 128) uint8, of 32 rows or a multiple.
        """
        number = tile - self.lane // LANES
        if self.bits == 8:
            return pltpu.bitcast(load(self.first + number), self.dtype)
        plane: jax.Array | int
        if isinstance(number, int):
            plane = number // self.tiles
        else:
            plane = jax.lax.div(number, jnp.int32(self.tiles))
        place = number - plane * self.tiles
        words = pltpu.bitcast(load(self.first + place), jnp.int32)
        words = jax.lax.shift_right_logical(words, jnp.int32(plane * self.bits)) & LOW[self.bits]
        if self.signed:  # 8 becomes 0xF8: no byte carries into the next
            negative = words & 0x08080808
            words |= (negative << 5) - (negative << 1)
        return pltpu.bitcast(words, jnp.int8)


def of_pages(codes: Codes, lanes: Lanes) -> tuple[Planes, Planes]:
    """K and V of pages; `lanes` as `Codes.lanes` gives them."""
    assert lanes.values_at is not None
    sizes = lanes.values_at, lanes.row - lanes.values_at
    planes: list[Planes] = []
    first = lane = 0
    for storage, size in zip((codes.key, codes.value), sizes, strict=True):
        bits = packed.BITS[storage]
        tiles = size * bits // 8 // LANES
        dtype = jnp.dtype(storage if storage.startswith("float") else "int8")
        group = codes.group if packed.grouped(storage) else 0
        planes.append(Planes(first, tiles, lane, bits, dtype, storage == "int4", group))
        first, lane = first + tiles, lane + size
    return planes[0], planes[1]


def split_words(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 words of groups → scale and zero, float32; as `kivi.split_words`, of vector registers."""
    return pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32), pltpu.bitcast(words << 16, jnp.float32)
