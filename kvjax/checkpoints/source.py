"""What every checkpoint format is presented as: Hugging Face names, layout and config."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from kvjax.errors import ModelError

CHUNK_BYTES = 8 << 20
"""Most bytes that `row_chunks` puts into one read: small enough not to count, large enough to stream."""


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint keeps its tokenizer.

    Attributes:
      folder: a folder with tokenizer.json and tokenizer_config.json, or None.
      metadata: GGUF metadata with the `tokenizer.*` keys, or None.
    """

    folder: epath.Path | None = None
    metadata: Mapping[str, Any] | None = None


class TensorSource(abc.ABC):
    """A checkpoint, read tensor by tensor. Usable as a context manager.

    Attributes:
      config: the fields of Hugging Face's config.json.
      generation_config: the fields of generation_config.json; empty without one.
      tokenizer_source: where the tokenizer is.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_source: TokenizerSource

    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The Hugging Face names of all tensors, sorted."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as Hugging Face stores it: linear weights are (out, in). KeyError if unknown."""

    @abc.abstractmethod
    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` gives; float32 where the stored form is quantized in blocks."""

    @abc.abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of the first axis, or the whole of a scalar. Raises ModelError if unreadable."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for people: format, place, size."""

    def read(self, name: str) -> np.ndarray:
        """A whole tensor, in the dtype that `dtype` names (bfloat16 and float8 are those of ml_dtypes)."""
        shape = self.shape(name)
        return self.read_rows(name, 0, shape[0] if shape else 1)

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the files. Reading afterwards is an error."""

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def row_chunks(rows: int, row_bytes: int, limit: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Splits `rows` into (start, stop) of at most `limit` bytes, one row at the least."""
    step = max(1, limit // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def parameter_count(source: TensorSource) -> int:
    """How many numbers the checkpoint holds."""
    return sum(math.prod(source.shape(name)) for name in source.names())


def human_count(count: int) -> str:
    """A parameter count in words: 134515008 is "135M"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def one_line(error: BaseException) -> str:
    """An exception's text for use inside a sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_json(path: epath.Path, *, required: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} for an absent one that is not required.

    Raises:
      ModelError: the file is required and absent, or holds no JSON object.
    """
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise ModelError(f"{path} is missing: download or copy the whole checkpoint folder again.") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)}): download or copy it again.") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({one_line(error)}): download or copy it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object: download or copy it again.")
    return value
