"""`kvjax batch`: prompts of a file in, records to a file out."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvjax.cli.interrupts import INTERRUPTED
from kvjax.cli.options import ALL, Loading, Seed, takes
from kvjax.errors import RequestError

if TYPE_CHECKING:
    from kvjax.batch import Progress, Summary
    from kvjax.processes import Session

_SECONDS = 10.0
"""Between two lines of progress where nobody looks at a bar."""


_PATIENCE = 1.0
"""Seconds after SIGTERM in which Python has to get its turn, before anything has run; a compilation takes many."""

TERMINATED = 143

_TOGETHER: dict[str, Any] = {"rich_help_panel": "Several processes"}


class _Terminated(KeyboardInterrupt):
    """SIGTERM came, a cluster's way to say that the machine is taken away, for the second time."""

    number = signal.SIGTERM


@takes(*ALL)
def batch(
    source: Annotated[str, typer.Argument(metavar="IN", help="JSON lines: file, gs://… or - for stdin")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Records: file, gs://… or - for stdout")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew; delete the records in OUT")] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do the share of machine I of N, counted from 0, into OUT.I-of-N"),
    ] = None,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(help="Most sequences that run at once", min=1)] = 64,
    snapshot_every: Annotated[
        float | None, typer.Option(help="Seconds between snapshots of what runs, beside OUT (default: none)")
    ] = None,
    snapshot_kv: Annotated[
        bool, typer.Option("--snapshot-kv/--no-snapshot-kv", help="Snapshots hold K and V, or compute them again")
    ] = True,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="One of several: a TPU pod or cluster that JAX knows", **_TOGETHER)
    ] = False,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Or: where process 0 listens", **_TOGETHER)
    ] = None,
    processes: Annotated[int | None, typer.Option(help="How many processes there are", min=1, **_TOGETHER)] = None,
    process: Annotated[int | None, typer.Option(help="Which this is, from 0", min=0, **_TOGETHER)] = None,
    process_timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which one is gone", min=1, **_TOGETHER)
    ] = 60,
    *,
    loading: Loading,
    sampling: dict[str, Any],
) -> None:
    """Generate for every line of a file; run again, it goes on where it stopped."""
    run = functools.partial(
        _run, source, target, overwrite, shard, seed, slots, snapshot_every, snapshot_kv, loading, sampling
    )
    if not distributed and (coordinator, processes, process) == (None, None, None):
        run(None)
        return
    from kvjax import processes as together

    if distributed and (coordinator, processes, process) != (None, None, None):
        raise RequestError("--distributed finds out --coordinator, --processes and --process: leave them out.")
    join = functools.partial(together.initialize, coordinator, processes, process, timeout=process_timeout)
    with _once_said(), together.quiet(), join() as session:
        shapes = {"slots": slots, "overwrite": overwrite, "mesh": loading.mesh, "layers": loading.layers.value}
        together.check_same(option=shapes)
        run(session)


@contextlib.contextmanager
def _once_said() -> Iterator[None]:
    """What process 0 refuses is said by it alone."""
    from kvjax.processes import ToldError, index

    try:
        yield
    except ToldError:
        if index() == 0:
            raise
        raise typer.Exit(2) from None


def _run(
    source: str,
    target: str,
    overwrite: bool,
    shard: str | None,
    seed: int,
    slots: int,
    snapshot_every: float | None,
    snapshot_kv: bool,
    loading: Loading,
    sampling: dict[str, Any],
    session: Session | None,
) -> None:
    """`session`: of this process, where it is one of several."""
    from kvjax import batch as job

    leads = session is None or session.leads
    shown = _Silent() if not leads else _Bar() if sys.stderr.isatty() else _Lines()
    written = job.shard_path(target, shard)
    said = _stopped(written)
    try:
        with _Sigterm(0 if target != "-" else TERMINATED, said, session) as sigterm, shown:

            def progress(now: Progress) -> None:
                sigterm.running = sigterm.running or now.tokens > 0
                shown.show(now)

            summary = job.run(
                lambda: loading.load(slots=slots),
                source,
                target,
                defaults=sampling,
                seed=seed,
                overwrite=overwrite,
                shard=shard,
                settings=_settings(loading),
                on_progress=progress,
                snapshot_every=snapshot_every,
                snapshot_kv=snapshot_kv,
                stop=lambda: sigterm.asked,
            )
    except KeyboardInterrupt as stop:
        _leave(said, TERMINATED if isinstance(stop, _Terminated) else INTERRUPTED, session)
    if leads:
        print(said if summary.done < summary.lines else _said(summary, written), file=sys.stderr)
    if summary.done < summary.lines:
        if session is not None:
            session.close()
        raise typer.Exit(sigterm.code)


def _settings(loading: Loading) -> dict[str, Any]:
    """What `kvjax.batch.identity` will say of the model, found out without loading it."""
    import jax

    from kvjax import storages
    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.eviction_options import described, eviction_of, keep_of
    from kvjax.models import FAMILIES, config_of, family_of

    with open_checkpoint(loading.model, FAMILIES) as source:
        config = config_of(family_of(source.config), source.config, loading.context, loading.rope)
        model = source.describe()
    dtype = loading.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    settings = {"model": model, "context": config.context, "dtype": str(dtype)}
    settings["kv_dtype"] = storages.resolve(loading.kv_dtype or str(dtype), str(dtype))
    eviction = described(eviction_of(loading.evict, keep_of(loading.keep), loading.evict_every))
    settings |= {"rope": loading.rope} if loading.rope else {}
    return settings | ({} if eviction is None else {"evict": eviction})


def _leave(said: str, code: int, session: Session | None = None) -> NoReturn:
    """Ends the process without Python's own end, which can crash after an exception in the middle of JAX."""
    if session is not None:
        session.tell(f"Process {session.index} of {session.count} was stopped{said.removeprefix('Stopped')}", code)
    from kvjax.processes import show

    show(said)
    os._exit(code)


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
        f"{summary.completion_tokens} generated in {_clock(summary.seconds)}, {speed:.1f} tokens/s; "
        f"{summary.hit} tokens of prompts were shared, {summary.preempted} preemptions"
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


class _Silent(_Lines):
    """Nothing, where another process speaks."""

    def show(self, progress: Progress) -> None:
        pass


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


class _Sigterm:
    """SIGTERM asks the run to stop after its segment, with a snapshot; a second one ends it at once.

    Before anything has run there is nothing to save: then the first one ends the process, also within a compilation,
    where Python gets no turn.

    Attributes:
      asked: whether it came while the job ran.
      running: whether anything has run; set by the owner.
      code: exit code of a run that it ends, but for the second time.
    """

    def __init__(self, code: int, said: str, session: Session | None = None):
        """`said`: the last line for the user."""
        self.asked = self.running = False
        self.code, self._said, self._seen, self._session = code, said, False, session

    def __enter__(self) -> _Sigterm:
        self._before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, self._handle)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._others = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._others)
        signal.signal(signal.SIGTERM, self._before)
        os.close(self._write)  # the thread reads the end
        self._thread.join()
        os.close(self._read)

    def _handle(self, *_: object) -> None:
        self._seen = True
        if not self.running:
            _leave(self._said, self.code, self._session)
        if self.asked:
            raise _Terminated
        self.asked = True

    def _watch(self) -> None:
        """The interpreter writes the numbers of signals into the pipe as they come, its handlers wait for a turn."""
        while numbers := os.read(self._read, 64):
            if signal.SIGTERM in numbers and not self._handled() and not self.running:
                _leave(self._said, self.code, self._session)

    def _handled(self) -> bool:
        until = time.monotonic() + _PATIENCE
        while not self._seen and time.monotonic() < until:
            time.sleep(0.02)
        return self._seen
