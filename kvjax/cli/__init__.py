"""The command line; docs/cli.md describes it. One file per command, each imported when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line, the process's own by default, and returns its exit code."""
    from kvjax.cli.app import app

    try:
        app(args=args, prog_name="kvjax")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
