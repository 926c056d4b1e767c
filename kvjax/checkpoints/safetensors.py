"""Hugging Face folders: config.json beside one or several .safetensors files.

The header is parsed here and rows are read by position, because safetensors' numpy backend knows neither bfloat16
nor float8, and because positioned reads work alike on a disk and on a bucket (`gs://`), with no page of the file
left mapped into the process.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np
from etils import epath

from kvjax.checkpoints.source import (
    TensorSource,
    TokenizerSource,
    human_count,
    one_line,
    parameter_count,
    read_json,
)
from kvjax.errors import ModelError

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER = 100_000_000  # bytes; the limit of the format itself
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class _Tensor(NamedTuple):
    """One entry of a header.

    Attributes:
      dtype: numpy's dtype.
      shape: row-major.
      offset: bytes from the start of the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsSource(TensorSource):
    """A folder of .safetensors shards, read row by row."""

    def __init__(self, folder: epath.Path, shards: tuple[epath.Path, ...]):
        """Reads config and headers, no tensor. Raises ModelError if any of them is missing or damaged."""
        self._folder = folder
        self.config = read_json(folder / "config.json", required=True)
        self.generation_config = read_json(folder / "generation_config.json")
        self.tokenizer_source = TokenizerSource(folder=folder)
        self._files: dict[epath.Path, BinaryIO] = {}
        self._tensors: dict[str, tuple[epath.Path, _Tensor]] = {}
        for shard in shards:
            self._tensors.update({name: (shard, tensor) for name, tensor in _read_header(shard).items()})

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name][1].dtype

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        path, tensor = self._tensors[name]
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        row = tensor.nbytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else tensor.nbytes
        wanted = _Tensor(tensor.dtype, shape, tensor.offset + start * row)
        file = self._open(path)
        file.seek(wanted.offset)
        data = file.read(wanted.nbytes)
        if len(data) != wanted.nbytes:
            raise ModelError(f"{path} ends inside tensor {name}: download or copy the file again.")
        return np.frombuffer(data, tensor.dtype).reshape(shape)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def describe(self) -> str:
        count = human_count(parameter_count(self))
        return f"safetensors folder {self._folder}: {len(self._tensors)} tensors, {count} parameters"

    def _open(self, path: epath.Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = path.open("rb")  # type: ignore[assignment]
        return self._files[path]


def open_safetensors(path: epath.PathLike) -> SafetensorsSource:
    """Opens a Hugging Face folder, or one .safetensors file whose folder has the config.json.

    Raises:
      ModelError: nothing readable is there; the text says what to do.
    """
    path = epath.Path(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent, (path,))
    return SafetensorsSource(path, _shards(path))


def _shards(folder: epath.Path) -> tuple[epath.Path, ...]:
    if (folder / INDEX).exists():
        return _indexed_shards(folder, read_json(folder / INDEX))
    if (folder / "model.safetensors").exists():
        return (folder / "model.safetensors",)
    files = sorted(folder.iterdir())
    found = tuple(file for file in files if file.suffix == ".safetensors")
    if found:
        return found
    pickles = [file.name for file in files if file.suffix in _PICKLES]
    if pickles:
        raise ModelError(
            f"{folder} holds only a pickle ({pickles[0]}), which can run code when read: convert it with "
            "transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)."
        )
    ggufs = [file.name for file in files if file.suffix == ".gguf"]
    other = "give a Hugging Face checkpoint folder or a .gguf file"
    remedy = f"name the file itself, {ggufs[0]}" if ggufs else other
    raise ModelError(f"{folder} holds no .safetensors file: {remedy}.")


def _indexed_shards(folder: epath.Path, index: Mapping[str, Any]) -> tuple[epath.Path, ...]:
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if _is_weight_map(weight_map) else set()
    if not names:
        raise ModelError(f"{folder / INDEX} has no usable weight_map: download or copy it again.")
    for name in sorted(names):
        if not (folder / name).exists():
            raise ModelError(f"Shard {folder / name} is missing: download or copy the whole folder again.")
    return tuple(folder / name for name in sorted(names))


def _is_weight_map(value: Any) -> TypeGuard[dict[str, str]]:
    """Whether every entry is a plain file name: an index must not reach out of its folder."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and name.endswith(".safetensors") and "/" not in name and "\\" not in name
        for name in value.values()
    )


def _read_header(path: epath.Path) -> dict[str, _Tensor]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelError(f"{path} is truncated or no safetensors file: download or copy it again.")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: check the name, or copy the folder again.") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path} has an unreadable header ({one_line(error)})"
        raise ModelError(f"{reason}: download or copy it again.") from error
    try:
        tensors = _parse_header(header, 8 + length)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path} has a damaged header ({one_line(error)}): download or copy it again.") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise ModelError(
            f"{path} is {size} bytes long where its header says {end}: it is truncated or damaged, "
            "download or copy it again."
        )
    return tensors


def _parse_header(header: Any, data_start: int) -> dict[str, _Tensor]:
    tensors = {}
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name} has the unsupported dtype {entry['dtype']}")
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"tensor {name} has impossible numbers")
        tensor = _Tensor(np.dtype(_DTYPES[entry["dtype"]]), shape, data_start + begin)
        if tensor.nbytes != end - begin:
            raise ValueError(f"tensor {name} spans {end - begin} bytes but needs {tensor.nbytes}")
        tensors[name] = tensor
        spans.append((begin, end))
    spans.sort()
    if any(begin != end for (_, end), (begin, _) in zip([(0, 0), *spans], spans, strict=False)):
        raise ValueError("tensors overlap or leave gaps")
    return tensors
