"""Ctrl-C at any moment ends a command with code 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130


@contextmanager
def exit_at_once() -> Iterator[None]:
    """Ctrl-C ends the process meanwhile: raised within JAX's imports it would become another error, or a crash."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is ignored, as under nohup
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def not_lost() -> Iterator[None]:
    """Python drops what a signal raises within a callback, such as JAX's of the garbage collector: raises it again."""
    before = sys.unraisablehook

    def again(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            number = getattr(dropped.exc_type, "number", signal.SIGINT)
            main = threading.main_thread().ident
            threading.Timer(0.01, signal.pthread_kill, (main, number)).start()  # when the callback is over
        else:
            before(dropped)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def import_engine() -> None:
    """Imports JAX and all that needs it."""
    with exit_at_once():
        import kvjax.llm  # noqa: F401
