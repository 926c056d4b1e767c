"""The commands and what they have in common: options before the command, errors, exit codes."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvjax
from kvjax.cli.batch import batch
from kvjax.cli.chat import chat
from kvjax.cli.convert import convert
from kvjax.cli.embed import embed
from kvjax.cli.evaluate import evaluate
from kvjax.cli.generate import generate
from kvjax.cli.info import info
from kvjax.cli.interrupts import INTERRUPTED
from kvjax.cli.plan import plan
from kvjax.errors import UserError

BAD_INPUT = 2

# click's, or that of the copy of click within newer typers, which has no public name.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class _Group(TyperGroup):
    """Says what the user did wrong in one line. Other exceptions are our fault and keep their tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params["debug"]:
                raise
            _say(str(error))
            raise typer.Exit(BAD_INPUT) from None

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.pop("standalone_mode", True)
        options["standalone_mode"] = False
        try:
            code = super().main(*args, **options)
        except _ClickException as error:
            _say(error.format_message())
            code = BAD_INPUT
        except typer.Abort:
            code = INTERRUPTED
        if standalone:
            sys.exit(code)
        return code


def _say(message: str) -> None:
    print("error:", " ".join(message.split()), file=sys.stderr)


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, batch, embed, info, plan, convert):
    app.command()(command)
app.command("eval")(evaluate)  # which is a name that Python has


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("-v", "--debug", help="Show tracebacks of every error.")] = False,
) -> None:
    """Runs large language models on CPUs, GPUs and TPUs with JAX."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets a "?", not an exception
            stream.reconfigure(errors="replace")
    if version:
        print(kvjax.__version__)
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())
