"""`kvjax embed`: texts in, one JSON line with the embedding of each out."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli.interrupts import import_engine
from kvjax.cli.options import Dtype, Loading
from kvjax.cli.runtime import status
from kvjax.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

_LINES = 1024
"""Lines of the standard input that are read before their embeddings are written."""


def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts (default: the lines of the standard input)")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model, as for generate, or minilm")] = "minilm",
    context: Annotated[int | None, typer.Option(help="Most tokens of a text (default: the model's own)")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of parameters (default: float32 on CPUs, else bfloat16)")] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--raw", help="Divide by the length or not (default: as the model says)")
    ] = None,
    batch: Annotated[int, typer.Option(help="Most texts that are computed at once", min=1)] = 64,
) -> None:
    """Write the embeddings of texts, a JSON object a line."""
    import_engine()
    with status("loading"):
        loaded = Loading(model=model, context=context, dtype=dtype).load()
    lines = iter(texts) if texts else _lines()
    while chunk := list(itertools.islice(lines, _LINES)):
        for text, vector in zip(chunk, loaded.embed(chunk, batch=batch, normalize=normalize), strict=True):
            print(json.dumps({"text": text, "embedding": _numbers(vector)}, ensure_ascii=False))
        sys.stdout.flush()


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(f"The standard input is no text ({error}): give UTF-8.") from error


def _numbers(vector: np.ndarray) -> list[float]:
    """As float64 whose shortest decimals are the float32's: 0.1, not 0.10000000149011612."""
    return [float(str(number)) for number in vector]
