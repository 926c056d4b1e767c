"""`kvjax convert`: any checkpoint to Orbax, with fewer kv heads where asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli.interrupts import import_engine

if TYPE_CHECKING:
    from kvjax.checkpoints.source import TensorSource


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Model, as for generate")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder to make, or gs://… address")],
    kv_heads: Annotated[
        int | None, typer.Option(help="Pool the heads of k and v to so many, by the mean (GQA, MQA); for experiments")
    ] = None,
) -> None:
    """Write a checkpoint in Orbax's format, which loads fastest and can lie in a bucket."""
    import_engine()
    from kvjax.checkpoints.grouped import pooled_heads
    from kvjax.checkpoints.orbax import save
    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES, family_of

    with open_checkpoint(source, FAMILIES) as opened:
        family = family_of(opened.config)
        family.config(opened.config, None)  # refuse now what could not be loaded afterwards
        converted = opened if kv_heads is None else pooled_heads(opened, family, kv_heads)
        with _shown_progress(len(opened.names())) as advance:
            save(_watched(converted, advance), target)
    print(f"{target}: {len(opened.names())} tensors", file=sys.stderr)


def _watched(source: TensorSource, advance: Callable[[], None]) -> TensorSource:
    """The same source, telling of every tensor that is read."""
    read = source.read

    def read_and_tell(name: str):  # type: ignore[no-untyped-def]
        value = read(name)
        advance()
        return value

    source.read = read_and_tell  # type: ignore[method-assign]
    return source


@contextmanager
def _shown_progress(tensors: int) -> Iterator[Callable[[], None]]:
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("converting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("converting", total=tensors)
        yield lambda: progress.advance(task)
