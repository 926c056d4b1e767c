"""Checkpoints in Orbax's format, on a disk or in a bucket, still under Hugging Face's names.

kvjax.json               format version, and shape and dtype of every tensor; written last
params/                  what Orbax writes: {name: array}; `PyTreeCheckpointer().restore` reads it too
config.json, generation_config.json, tokenizer.json, tokenizer_config.json
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from kvjax.checkpoints.source import (
    CHUNK_BYTES,
    TensorSource,
    TokenizerSource,
    human_count,
    one_line,
    parameter_count,
    read_json,
)
from kvjax.errors import ModelError

MARKER = "kvjax.json"
FORMAT = 1
_PARAMS = "params"
_BATCH_BYTES = 32 << 20
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


class OrbaxSource(TensorSource):
    """A folder that `save` wrote, read some rows at a time."""

    def __init__(self, folder: epath.PathLike):
        """Reads the JSON files, no tensor. Raises ModelError if any is missing, damaged, or of a later format."""
        self._folder = epath.Path(folder)
        marker = read_json(self._folder / MARKER, required=True)
        if marker.get("format") != FORMAT:
            found = marker.get("format")
            raise ModelError(f"{self._folder} has checkpoint format {found!r}, but this kvjax reads {FORMAT}.")
        try:
            self._tensors = {name: _entry(value) for name, value in marker["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{self._folder / MARKER} is damaged ({one_line(error)}): save the checkpoint again."
            ) from error
        self._open: tuple[str, Any] = ("", None)
        self.config = read_json(self._folder / "config.json", required=True)
        self.generation_config = read_json(self._folder / "generation_config.json")
        self.tokenizer_source = TokenizerSource(folder=self._folder)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name][1]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        try:
            store = self._store(name)
            if store.shape != self.shape(name) or store.dtype.numpy_dtype != self.dtype(name):
                raise ValueError(f"it is {store.shape} {store.dtype.name}")
            return (store[start:stop] if store.shape else store).read().result()
        except (ValueError, OSError, NotImplementedError) as error:
            reason = f"{self._folder} has no readable tensor {name} ({one_line(error)}): save it again."
            raise ModelError(reason) from error

    def close(self) -> None:
        self._open = ("", None)

    def describe(self) -> str:
        count = human_count(parameter_count(self))
        return f"Orbax checkpoint {self._folder}: {len(self._tensors)} tensors, {count} parameters"

    def _store(self, name: str) -> Any:
        """The opened array; the last one is kept, for it is read in many pieces."""
        import tensorstore

        if self._open[0] != name:
            base = os.fspath(self._folder / _PARAMS)
            local = {"driver": "file", "path": f"{os.path.abspath(base)}/"}
            kvstore = {"driver": "ocdbt", "base": f"{base}/" if "://" in base else local, "path": f"{name}/"}
            # A missing chunk must be an error: zarr's way is to read it as zeros.
            spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
            self._open = (name, tensorstore.open(spec, open=True, read=True).result())
        return self._open[1]


def save(source: TensorSource, folder: epath.PathLike) -> None:
    """Writes a checkpoint as Orbax does, tensor by tensor: the host holds one at a time.

    On a disk the folder appears whole or not at all; in a bucket it counts as a checkpoint once `kvjax.json`, which
    is written last, is there.

    Args:
      source: any open checkpoint.
      folder: a path that does not exist, or a `gs://` address.

    Raises:
      ModelError: the folder exists, cannot be written, or a tensor cannot be read.
    """
    folder = epath.Path(folder)
    if folder.exists():
        raise ModelError(f"{folder} exists already: delete it, or choose another folder.")
    remote = "://" in os.fspath(folder)
    part = folder if remote else folder.with_name(f"{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True, exist_ok=True)
        _save_tensors(source, part / _PARAMS)
        _save_files(source, part)
        if not remote:
            part.rename(folder)
    except OSError as error:
        raise ModelError(f"The checkpoint cannot be written to {folder} ({one_line(error)}).") from error
    finally:
        if not remote:
            shutil.rmtree(part, ignore_errors=True)


def _save_files(source: TensorSource, folder: epath.Path) -> None:
    from kvjax.tokenizer import tokenizer_parts

    _write_json(folder / "config.json", source.config)
    _write_json(folder / "generation_config.json", source.generation_config)
    where = source.tokenizer_source
    if where.metadata is not None:
        backend, fields = tokenizer_parts(source)
        (folder / "tokenizer.json").write_text(backend.to_str())
        _write_json(folder / "tokenizer_config.json", fields)
    elif where.folder is not None:
        for name in _COPIED:
            if (where.folder / name).exists():
                (folder / name).write_text((where.folder / name).read_text())
    tensors = {name: [list(source.shape(name)), source.dtype(name).name] for name in source.names()}
    _write_json(folder / MARKER, {"format": FORMAT, "tensors": tensors})


def _write_json(path: epath.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False))


def _entry(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    import ml_dtypes

    shape, name = value
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"impossible shape {shape}")
    return tuple(shape), np.dtype(getattr(ml_dtypes, name, name))


class _Unread:
    """A leaf that Orbax takes for an array; its values are read when its turn comes."""

    def __init__(self, source: TensorSource, name: str):
        self.source, self.name = source, name
        self.shape, self.dtype = source.shape(name), source.dtype(name)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize


def _save_tensors(source: TensorSource, folder: epath.Path) -> None:
    import orbax.checkpoint as ocp

    tree = {name: _Unread(source, name) for name in source.names()}
    # Chunks of whole rows, for a reader that wants some rows. Uncompressed: on a busy two-core machine the default
    # model took 3.4 to 6.4 s to write so, 4.8 to 7.7 s with zstd, and zarr 3 with its stronger zstd 10 to 12 s.
    args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in tree}
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry(), use_ocdbt=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=args))


def _registry() -> Any:
    import jax
    from orbax.checkpoint import type_handlers

    class ReadLate(type_handlers.NumpyHandler):
        """Writes some arrays after others, each read just before and dropped just after."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            args = args or [type_handlers.SaveArgs()] * len(values)
            for batch in _batches([value.nbytes for value in values]):
                arrays = [value.source.read(value.name) for value in values[batch]]
                for written in await super().serialize(arrays, infos[batch], args[batch]):
                    written.result()
            return []

    return type_handlers.create_type_handler_registry(
        (_Unread, ReadLate(deepcopy_host_arrays=False)), (jax.Array, type_handlers.ArrayHandler())
    )


def _batches(sizes: list[int]) -> Iterator[slice]:
    """Neighbours that stay below `_BATCH_BYTES`, one at the least. One by one took 1.3 to 3 times as long."""
    start, total = 0, 0
    for stop, size in enumerate(sizes):
        if stop > start and total + size > _BATCH_BYTES:
            yield slice(start, stop)
            start, total = stop, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
