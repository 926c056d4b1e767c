"""`kvjax batch`: prompts of a file in, records to a file out."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvjax.cli.interrupts import INTERRUPTED
from kvjax.cli.options import ALL, Loading, Seed, takes

if TYPE_CHECKING:
    from kvjax.batch import Progress, Summary

_SECONDS = 10.0
"""Between two lines of progress where nobody looks at a bar."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: a cluster's way to say that the machine is taken away."""

    number = signal.SIGTERM


@takes(*ALL)
def batch(
    source: Annotated[str, typer.Argument(metavar="IN", help="JSON lines: file, gs://… or - for stdin")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Records: file, gs://… or - for stdout")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew; delete the records in OUT")] = False,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(help="Most sequences that run at once", min=1)] = 64,
    *,
    loading: Loading,
    sampling: dict[str, Any],
) -> None:
    """Generate for every line of a file; run again, it goes on where it stopped."""
    from kvjax import batch as job

    shown = _Bar() if sys.stderr.isatty() else _Lines()
    try:
        with _raised_on_sigterm(), shown:
            summary = job.run(
                lambda: loading.load(slots=slots),
                source,
                target,
                defaults=sampling,
                seed=seed,
                overwrite=overwrite,
                settings=_settings(loading),
                on_progress=shown.show,
            )
    except KeyboardInterrupt as stop:
        print(_stopped(target), file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else INTERRUPTED) from None
    print(_said(summary, target), file=sys.stderr)


def _settings(loading: Loading) -> dict[str, Any]:
    """What `kvjax.batch.identity` will say of the model, found out without loading it."""
    import jax

    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES, family_of

    with open_checkpoint(loading.model, FAMILIES) as source:
        context = family_of(source.config).config(source.config, loading.context).context
        model = source.describe()
    dtype = loading.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return {"model": model, "context": context, "dtype": str(dtype), "kv_dtype": str(loading.kv_dtype or dtype)}


def _stopped(target: str) -> str:
    if target == "-":
        return "Stopped."
    return f"Stopped: what is finished is in {target}; run the same command again to go on from there."


def _said(summary: Summary, target: str) -> str:
    if summary.resumed == summary.lines:
        return f"{target} has all {summary.lines} records already: nothing to do."
    made = summary.lines - summary.resumed
    speed = summary.completion_tokens / summary.seconds if summary.seconds else 0.0
    resumed = f" ({summary.resumed} were there)" if summary.resumed else ""
    return (
        f"{made} records{resumed}, {summary.errors} of them errors: {summary.prompt_tokens} tokens of prompts, "
        f"{summary.completion_tokens} generated in {_clock(summary.seconds)}, {speed:.1f} tokens/s"
    )


class _Lines:
    """A line of progress now and then, for logs."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, progress: Progress) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            print(_progress_line(progress), file=sys.stderr, flush=True)


class _Bar:
    """A bar for a person who looks."""

    def __enter__(self) -> _Bar:
        from rich import progress as bars
        from rich.console import Console

        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.fields[text]}"))
        self._bar = bars.Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("loading", total=None, text="")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        text, phase = _progress_line(progress), "generating" if progress.tokens else "compiling"
        self._bar.update(self._task, completed=progress.done, total=progress.total, text=text, description=phase)


def _progress_line(progress: Progress) -> str:
    left = "" if progress.seconds_left is None else f", {_clock(progress.seconds_left)} left"
    return f"{progress.done}/{progress.total} lines, {progress.tokens_per_second:.1f} tokens/s{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@contextmanager
def _raised_on_sigterm() -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise _Terminated

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
