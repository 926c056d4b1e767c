"""llama.cpp's GGUF files, presented as Hugging Face: names, layout and config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from etils import epath

from kvjax.checkpoints.gguf_header import GGUFHeader, GGUFTensor, read_header
from kvjax.checkpoints.gguf_tensors import Made, renamed, runs
from kvjax.checkpoints.source import TensorSource, TokenizerSource, human_count, one_line, parameter_count
from kvjax.errors import ModelError
from kvjax.types import Family, GGUFNames

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are really hyper-parameters: `GGUFNames.config` gets them as lists, under these names."""

SHAPES_KEY = "tensor_shapes"
"""The key under which `GGUFNames.config` gets every tensor's shape: {GGUF name: row-major tuple}."""

_WIDE = 64
_DEQUANTIZE_BYTES = 2 << 20
_UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError)


class GGUFSource(TensorSource):
    """One GGUF file. Every tensor is read as float32, whatever its block format."""

    def __init__(self, path: epath.Path, families: Sequence[Family]):
        """Reads the header, no weights.

        Args:
          path: the file.
          families: those to choose from by `general.architecture`.

        Raises:
          ModelError: no GGUF file, damaged, or of an architecture that no family reads.
        """
        self._path = path
        self._file = _open(path)
        try:
            header = _header(path, self._file)
            self._load(header, _family_names(path, header.metadata, families))
        except BaseException:
            self._file.close()
            raise

    def _load(self, header: GGUFHeader, names: GGUFNames) -> None:
        metadata = dict(header.metadata)
        self._kinds = {tensor.kind for tensor in header.tensors.values()}
        metadata[SHAPES_KEY] = {name: tensor.shape for name, tensor in header.tensors.items()}
        for name in FACTOR_TENSORS:
            if name in header.tensors:
                metadata[name] = self._dequantize(header.tensors[name], 0, 1).reshape(-1).tolist()
        weights = {name: tensor for name, tensor in header.tensors.items() if name not in FACTOR_TENSORS}
        arch = header.metadata["general.architecture"]
        try:
            self.config = names.config(metadata, arch)
            self._tensors = renamed(weights, names, self.config, arch)
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"{self._path} has metadata that make no {arch} model ({reason}).") from error
        self.generation_config = _generation_config(header.metadata)
        self.tokenizer_source = TokenizerSource(metadata=header.metadata)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        found = self._tensors[name]
        if isinstance(found, Made):
            return self._make(found, start, stop)
        if found.order is not None:
            return self._gather(found.tensor, found.order[start:stop])
        return self._stored(found.tensor, start, stop)

    def close(self) -> None:
        self._file.close()

    def describe(self) -> str:
        from gguf.constants import GGMLQuantizationType

        kinds = ", ".join(sorted(GGMLQuantizationType(kind).name for kind in self._kinds))
        count = human_count(parameter_count(self))
        return f"GGUF file {self._path}: {len(self._tensors)} tensors ({kinds}), {count} parameters"

    def _stored(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Entries of the first axis, as they are stored."""
        if len(tensor.shape) == 1:
            return self._dequantize(tensor, 0, 1).reshape(-1)[start:stop]
        per_row = tensor.rows // max(1, tensor.shape[0])
        flat = self._dequantize(tensor, start * per_row, stop * per_row)
        return flat.reshape(stop - start, *tensor.shape[1:])

    def _gather(self, tensor: GGUFTensor, rows: np.ndarray) -> np.ndarray:
        """Stored rows of these numbers, in their order."""
        out = np.empty((len(rows), *tensor.shape[1:]), np.float32)
        for first, stop in runs(rows):
            here = (rows >= first) & (rows < stop)
            out[here] = self._stored(tensor, first, stop)[rows[here] - first]
        return out

    def _make(self, made: Made, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor made of others, reading no more of those than its recipe needs."""
        count = made.parts[0].shape[0]
        if made.recipe.whole:
            return made.recipe.make(*(self._stored(part, 0, part.shape[0]) for part in made.parts))[start:stop]
        ratio = made.shape[0] // count
        first, last = start // ratio, -(-stop // ratio)
        block = made.recipe.make(*(self._stored(part, first, last) for part in made.parts))
        return block[start - first * ratio : stop - first * ratio]

    def _dequantize(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Runs `start:stop` along the last axis, as (stop - start, shape[-1]) float32."""
        self._file.seek(tensor.offset + start * tensor.row_bytes)
        data = self._file.read((stop - start) * tensor.row_bytes)
        if len(data) != (stop - start) * tensor.row_bytes:
            raise ModelError(f"{self._path} ended while it was read: download or copy it again.")
        return _to_float32(np.frombuffer(data, np.uint8), tensor.kind, self._path).reshape(-1, tensor.shape[-1])


def open_gguf(path: epath.PathLike, families: Sequence[Family]) -> GGUFSource:
    """Opens a GGUF file with the family that reads its architecture. Raises ModelError."""
    return GGUFSource(epath.Path(path), families)


def _open(path: epath.Path) -> BinaryIO:
    try:
        return path.open("rb")  # type: ignore[return-value]
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: check the name.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)}).") from error


def _header(path: epath.Path, file: BinaryIO) -> GGUFHeader:
    try:
        header = read_header(file)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is no usable GGUF file: {one_line(error)}; download or copy it again.") from error
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is one part of a split GGUF: join them with `llama-gguf-split --merge` first.")
    return header


def _family_names(path: epath.Path, metadata: Mapping[str, Any], families: Sequence[Family]) -> GGUFNames:
    arch = metadata.get("general.architecture")
    readers = [family.gguf for family in families if family.gguf is not None]
    for names in readers:
        if arch in names.architectures:
            return names
    known = ", ".join(sorted({name for names in readers for name in names.architectures})) or "none"
    raise ModelError(f"{path} is of architecture {arch!r}, which is not supported; these are: {known}.")


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    from kvjax.gguf_tokenizer import eos_ids

    fields: dict[str, Any] = {"eos_token_id": list(eos_ids(metadata))}
    if "tokenizer.ggml.bos_token_id" in metadata:
        fields["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return fields


def _to_float32(data: np.ndarray, kind: int, path: epath.Path) -> np.ndarray:
    """Stored bytes (n,) uint8 → flat float32.

    The package needs several times its output, so it gets a few megabytes at a time; and it loops over 16 rows in
    Python, so it gets 64 blocks as one row: nine times faster (Q8_0) than a block a row.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    traits = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[traits]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block), np.float32)
    wide = _WIDE * max(1, _DEQUANTIZE_BYTES // (4 * block * _WIDE))
    for start in range(0, len(blocks), wide):
        part = blocks[start : start + wide]
        width = _WIDE if len(part) % _WIDE == 0 else 1
        rows = part.reshape(-1, width * block_bytes)
        out[start : start + wide] = _dequantize(rows, traits, path).reshape(-1, block)
    return out.reshape(-1)


def _dequantize(rows: np.ndarray, kind: GGMLQuantizationType, path: epath.Path) -> np.ndarray:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F64: "<f8"}
    if kind in plain:
        return rows.view(plain[kind])
    try:
        return quants.dequantize(rows, kind)
    except NotImplementedError:
        reason = f"{path} stores tensors as {kind.name}, which cannot be read: use another quantization."
        raise ModelError(reason) from None
