"""The command line; docs/cli.md describes it. One file per command, each imported when its turn comes."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kvjax.cli.interrupts import INTERRUPTED, exit_at_once, not_lost


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line, the process's own by default, and returns its exit code."""
    try:
        with exit_at_once():
            from kvjax.cli.app import app
        with not_lost():
            app(args=args, prog_name="kvjax")
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if args is None:  # the process ends: what comes during Python's own end must not change its code
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0
