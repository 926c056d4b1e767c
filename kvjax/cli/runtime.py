"""What commands do around the model: the compilation cache, status lines, and text that appears piece by piece."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvjax.job import Report
    from kvjax.llm import LLM


def keep_compiled() -> None:
    """Lets XLA keep what it compiles on the disk: the second run of a command starts many seconds sooner.

    KVJAX_NO_COMPILE_CACHE=1 turns it off; a place that the user gave JAX is left alone.
    """
    if os.environ.get("KVJAX_NO_COMPILE_CACHE", "0") not in ("", "0"):
        return
    import jax

    from kvjax.checkpoints.default_model import cache_folder

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Shows what is going on, to a person who looks; the text of the output stays alone on stdout."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def note(text: str) -> None:
    """A line for a person who looks."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).print(text, style="dim", highlight=False, markup=False)


def fitted(llm: LLM, prompt: Sequence[int], sampling: dict[str, Any], most: int = 256) -> SamplingParams:
    """Sampling parameters; a length that the user did not choose is what the context has room for."""
    room = max(1, llm.context - len(prompt))
    return SamplingParams.from_dict({"max_new_tokens": min(most, room), **sampling})


def speak(llm: LLM, prompt: Sequence[int], params: SamplingParams, seed: int, end: str) -> Iterator[str]:
    """Streams an answer and then `end` to stdout; yields the pieces, so that an interrupted caller has them.

    Raises:
      RequestError: the prompt or the parameters can never be served.
    """
    seen: list[tuple[float, int]] = []  # (time, tokens of output) at every report

    def on_report(report: Report) -> None:
        seen.append((time.monotonic(), sum(len(o.tokens) for o in (*report.running, *report.finished))))

    pieces = llm.stream(prompt, params, seed=seed, on_report=on_report)
    with status("compiling"):
        first = next(pieces, "")
    for piece in itertools.chain([first], pieces):
        yield piece  # before it is written: a Ctrl-C in between must not find a caller who does not know of it
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write(end)
    sys.stdout.flush()
    _note_speed(len(prompt), seen)


def _note_speed(prompt: int, seen: Sequence[tuple[float, int]]) -> None:
    """The first report comes with prompt and compilation behind it; the speed is that of what follows."""
    (began, before), (ended, total) = seen[0], seen[-1]
    speed = f", {(total - before) / (ended - began):.1f} tokens/s" if total > before else ""
    note(f"{prompt} tokens of prompt, {total} tokens of output{speed}")
