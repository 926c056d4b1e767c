"""One parameter on the host: its tensors read a few rows at a time, transposed, joined and cast."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvjax.checkpoints.source import TensorSource, row_chunks
from kvjax.errors import ModelError
from kvjax.types import ParamSpec

_ALIGNMENT = 64  # bytes at which a CPU device of jax adopts an array's memory instead of copying it


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of unset values that a CPU device adopts without a copy. Raises ModelError if memory is too small."""
    size = math.prod(shape) * dtype.itemsize
    try:
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:  # the latter two beyond what an address can tell
        reason = "check the sizes in config.json, or take a machine with more memory"
        raise ModelError(f"A parameter of shape {shape} does not fit into the host's memory: {reason}.") from error
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def fill(source: TensorSource, spec: ParamSpec, out: np.ndarray) -> None:
    """Reads the tensors of one parameter.

    Args:
      source: the checkpoint, which has all of `spec.names`.
      spec: the parameter.
      out: array of `spec.shape`, of any dtype, that is overwritten.

    Raises:
      ModelError: a tensor has another shape; the text names it, what was found and what was expected.
    """
    begin, axis = 0, spec.concat_axis
    for name in spec.names:
        if source.dtype(name).kind in "iub":
            raise ModelError(
                f"Tensor {name} of {source.describe()} holds integers ({source.dtype(name)}) where the model has "
                "weights: it is quantized in a way that is not supported."
            )
    if spec.rows is not None:
        _fill_rows(source, spec, out)
        return
    for name in spec.names:
        share = _share(source.shape(name), spec)
        end = begin + share[axis] if share and len(spec.names) > 1 else begin
        if share is None or (share and end > spec.shape[axis]):
            raise _shape_error(source, name, spec)
        part = out[(slice(None),) * axis + (slice(begin, end),)] if len(spec.names) > 1 else out
        _fill_part(source, name, spec.transpose, part)
        begin = end
    if len(spec.names) > 1 and begin != spec.shape[axis]:
        raise _shape_error(source, spec.names[-1], spec)


def _fill_rows(source: TensorSource, spec: ParamSpec, out: np.ndarray) -> None:
    """Some rows of one tensor, where other parameters have the rest."""
    assert spec.rows is not None and len(spec.names) == 1 and not spec.transpose
    (name,), (start, stop, count) = spec.names, spec.rows
    stored = source.shape(name)
    part = (stop - start, *stored[1:])
    if not stored or stored[0] != count or part not in _merged(spec.shape, len(part)):
        raise ModelError(
            f"Tensor {name} of {source.describe()} has shape {stored}, but the model expects {count} rows, of which "
            f"{start} to {stop} make {spec.shape}."
        )
    view = out.reshape(part)
    row_bytes = math.prod(stored[1:]) * max(out.dtype.itemsize, source.dtype(name).itemsize)
    for first, last in row_chunks(stop - start, row_bytes):
        view[first:last] = source.read_rows(name, start + first, start + last).astype(out.dtype, copy=False)


def _fill_part(source: TensorSource, name: str, transpose: bool, part: np.ndarray) -> None:
    stored = source.shape(name)
    view = part.reshape(_transposed(stored) if transpose else stored)
    if not stored or not np.may_share_memory(view, part):  # numpy cannot show this share in the tensor's shape
        whole = source.read(name).astype(part.dtype, copy=False)
        part[...] = (whole.swapaxes(-1, -2) if transpose else whole).reshape(part.shape)
        return
    rows = view.swapaxes(-1, -2) if transpose else view
    row_bytes = math.prod(stored[1:]) * max(part.dtype.itemsize, source.dtype(name).itemsize)
    for start, stop in row_chunks(stored[0], row_bytes):
        rows[start:stop] = source.read_rows(name, start, stop).astype(part.dtype, copy=False)


def _share(stored: tuple[int, ...], spec: ParamSpec) -> tuple[int, ...] | None:
    """The part of a parameter that a tensor of the shape `stored` makes; None if it cannot be part of it."""
    if spec.transpose and len(stored) < 2:
        return None
    read = _transposed(stored) if spec.transpose else stored
    share = spec.shape
    if len(spec.names) > 1:
        before, after = spec.shape[: spec.concat_axis], spec.shape[spec.concat_axis + 1 :]
        share = (*before, math.prod(stored) // math.prod(before + after), *after)
    return share if read in _merged(share, len(read)) else None


def _merged(shape: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    """All shapes of `rank` axes made by merging neighbours: of (6, 2, 4) into two axes, (6, 8) and (12, 4)."""
    if rank <= 1:
        if rank == 1 or not shape:
            yield (math.prod(shape),) * rank
        return
    for cut in range(1, len(shape) - rank + 2):
        for rest in _merged(shape[cut:], rank - 1):
            yield (math.prod(shape[:cut]), *rest)


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _shape_error(source: TensorSource, name: str, spec: ParamSpec) -> ModelError:
    found = source.shape(name)
    if len(spec.names) > 1:
        expected = f"{len(spec.names)} parts that join to {spec.shape} along axis {spec.concat_axis}"
    else:
        expected = _expected(found, spec)
    return ModelError(f"Tensor {name} of {source.describe()} has shape {found}, but the model expects {expected}.")


def _expected(found: tuple[int, ...], spec: ParamSpec) -> str:
    """The stored shapes that would do: those of as many axes as were found, if that says enough."""
    ranks = range(2 if spec.transpose else 1, len(spec.shape) + 1)
    if len(found) > 1 and len(found) in ranks:
        ranks = range(len(found), len(found) + 1)
    shapes = [shape for rank in ranks for shape in _merged(spec.shape, rank)] or [spec.shape]
    return " or ".join(str(_transposed(shape) if spec.transpose else shape) for shape in shapes)
