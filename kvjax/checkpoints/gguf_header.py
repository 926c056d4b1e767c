"""The header of a GGUF file: metadata and the tensor table.

The gguf package's own reader makes an array object of every string: 2.9 s for a vocabulary of 49,152, and an
endless loop on a damaged array length. Here every length is checked against what the file still holds.
"""

from __future__ import annotations

import math
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_MAX_DIMS = 8


class GGUFTensor(NamedTuple):
    """One entry of the tensor table.

    Attributes:
      shape: row-major, as numpy and Hugging Face write it.
      kind: a GGMLQuantizationType number.
      offset: bytes from the start of the file.
      row_bytes: stored bytes of one run along the last axis.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Runs along the last axis."""
        return math.prod(self.shape[:-1])


class GGUFHeader(NamedTuple):
    """Metadata (key → Python value) and tensors by GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Reader:
    """Little-endian values off a file, never more than it holds. Raises ValueError."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.size = file.seek(0, 2)
        self.left = self.size
        file.seek(0)

    @property
    def position(self) -> int:
        return self.size - self.left

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"needs {count} bytes where {self.left} are left")
        self.left -= count
        return self._file.read(count)

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        return self.take(self.u64()).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        return self._scalars(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            return self._scalars(kind, count)
        if depth > 2 or count > self.left // 8:  # a string or an array takes eight bytes at the least
            raise ValueError(f"an array of {count} values does not fit")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def read_header(file: BinaryIO) -> GGUFHeader:
    """Reads metadata and the tensor table, and checks that the file holds every tensor.

    Raises:
      ValueError: the file is no GGUF file, damaged, truncated, or of an unknown version; the text says which.
    """
    reader = _Reader(file)
    if reader.size < 24 or reader.take(4) != _MAGIC:
        raise ValueError("it does not start as a GGUF file does")
    version = reader.u32()
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported, only little-endian 2 and 3 are")
    tensor_count, key_count = reader.u64(), reader.u64()
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        metadata[key] = reader.value(reader.u32())
    infos = [_tensor_info(reader) for _ in range(tensor_count)]
    return GGUFHeader(metadata, _place(infos, _data_start(metadata, reader.position), reader.size))


def _data_start(metadata: dict[str, Any], position: int) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"its alignment {alignment} is no power of two")
    return -(-position // alignment) * alignment


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, row-major shape, type, offset within the data)."""
    name, dims = reader.string(), reader.u32()
    if not 1 <= dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reader.u64() for _ in range(dims))[::-1]
    return name, shape, reader.u32(), reader.u64()


def _place(infos: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int) -> dict[str, GGUFTensor]:
    from gguf.constants import GGML_QUANT_SIZES

    blocks = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in blocks:
            raise ValueError(f"tensor {name} has the unknown type {kind}")
        block, block_bytes = blocks[kind]
        if shape[-1] % block:
            raise ValueError(f"tensor {name} has rows of {shape[-1]}, no multiple of its block of {block}")
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensor = GGUFTensor(shape, kind, start + offset, shape[-1] // block * block_bytes)
        if tensor.offset + tensor.rows * tensor.row_bytes > size:
            raise ValueError(f"it ends at {size} bytes, inside tensor {name}")
        tensors[name] = tensor
    return tensors
