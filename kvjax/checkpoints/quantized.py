"""Checkpoints whose weights are stored quantized, presented as if they were not: dequantized a few rows at a time.

mxfp4   gpt-oss: 4-bit floats in blocks of 32 with a power of two for a scale (OCP Microscaling Formats v1.0)
fp8     DeepSeek-V3: 8-bit floats (e4m3), a float32 scale for every tile of the matrix
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.checkpoints.source import TensorSource, human_count
from kvjax.errors import ModelError

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_E8M0_BIAS = 127


def dequantized(source: TensorSource) -> TensorSource:
    """The source, or a view of it that dequantizes. Raises ModelError for a form that cannot be read."""
    stated = source.config.get("quantization_config")
    if stated is None:
        return source
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    if method == "mxfp4" and any(name.endswith("_blocks") for name in source.names()):
        return MXFP4Source(source)
    if method == "fp8" and isinstance(stated, Mapping):
        return FP8Source(source, stated)
    raise ModelError(
        f"{source.describe()} is quantized by {method!r}, which cannot be read: use the unquantized checkpoint, or a "
        "GGUF file of the model."
    )


class _View(TensorSource):
    """Another source with some tensors put together from several."""

    def __init__(self, source: TensorSource):
        self._source = source
        self._stored = frozenset(source.names())
        self.config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        self.generation_config = source.generation_config
        self.tokenizer_source = source.tokenizer_source

    @abc.abstractmethod
    def _parts(self, name: str) -> tuple[str, str] | None:
        """The tensors (values, scales) that make up the one of this name; None if it is stored as it is."""

    @abc.abstractmethod
    def _name(self, stored: str) -> str | None:
        """The name under which a stored tensor appears; None for scales."""

    def names(self) -> tuple[str, ...]:
        found = (self._name(stored) for stored in self._source.names())
        return tuple(sorted(name for name in found if name is not None))

    def close(self) -> None:
        self._source.close()

    def describe(self) -> str:
        count = human_count(sum(math.prod(self.shape(name)) for name in self.names()))
        return f"{self._source.describe().rsplit(', ', 1)[0]}, {count} parameters, quantized"


class MXFP4Source(_View):
    """X_blocks (E, o, i/32, 16) uint8 and X_scales (E, o, i/32) uint8 → X (E, i, o) bfloat16, which holds them exactly.

    A byte has two numbers, the first in its lower half; a scale is a power of two with a bias of 127.
    """

    def _name(self, stored: str) -> str | None:
        if stored.endswith("_scales"):
            return None
        return stored.removesuffix("_blocks")

    def _parts(self, name: str) -> tuple[str, str] | None:
        pair = f"{name}_blocks", f"{name}_scales"
        if pair[0] not in self._stored:
            return None
        if pair[1] not in self._stored:
            raise ModelError(f"Tensor {pair[1]} is missing from {self._source.describe()}: is it the whole checkpoint?")
        return pair

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts(name)
        if parts is None:
            return self._source.shape(name)
        experts, out, groups, width = self._source.shape(parts[0])
        return experts, groups * width * 2, out

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name) if self._parts(name) is None else np.dtype(ml_dtypes.bfloat16)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        parts = self._parts(name)
        if parts is None:
            return self._source.read_rows(name, start, stop)
        out = np.empty((stop - start, *self.shape(name)[1:]), ml_dtypes.bfloat16)
        for i in range(start, stop):
            blocks, scales = (self._source.read_rows(part, i, i + 1)[0] for part in parts)
            out[i - start] = _mxfp4(blocks, scales).astype(ml_dtypes.bfloat16).T
        return out


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks (o, g, 16) uint8, scales (o, g) uint8 → (o, 32·g) float32."""
    numbers = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, -1)
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _E8M0_BIAS)
    return (numbers * powers[..., None]).reshape(scales.shape[0], -1)


class FP8Source(_View):
    """X.weight (o, i) float8 and X.weight_scale_inv (⌈o/128⌉, ⌈i/128⌉) float32 → X.weight float32, their product."""

    _SCALE = "_scale_inv"

    def __init__(self, source: TensorSource, stated: Mapping[str, Any]):
        super().__init__(source)
        tile = stated.get("weight_block_size")
        if not isinstance(tile, list | tuple) or len(tile) != 2 or any(not isinstance(n, int) or n < 1 for n in tile):
            raise ModelError(
                f"{source.describe()} is quantized to fp8 with weight_block_size {tile!r}: only tiles of two sizes, "
                "such as [128, 128], can be read."
            )
        self._tile = tuple(tile)

    def _name(self, stored: str) -> str | None:
        return None if stored.endswith(self._SCALE) else stored

    def _parts(self, name: str) -> tuple[str, str] | None:
        scale = f"{name}{self._SCALE}"
        return (name, scale) if scale in self._stored else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self._source.dtype(name) if self._parts(name) is None else np.dtype(np.float32)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows, parts = self._source.read_rows(name, start, stop), self._parts(name)
        if parts is None:
            return rows
        (tall, wide), (height, width) = self._tile, self._source.shape(name)
        if self._source.shape(parts[1]) != (-(-height // tall), -(-width // wide)):
            raise ModelError(
                f"Tensor {parts[1]} of {self._source.describe()} has shape {self._source.shape(parts[1])}, which does "
                f"not fit tiles of {tall} × {wide} of {(height, width)}."
            )
        scales = self._source.read_rows(parts[1], start // tall, -(-stop // tall)).astype(np.float32)
        of_row = np.arange(start, stop) // tall - start // tall
        return rows.astype(np.float32) * np.repeat(scales[of_row], wide, axis=1)[:, :width]
