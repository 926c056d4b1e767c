"""`kvjax generate`: one prompt in, its text out, piece by piece."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.interrupts import INTERRUPTED
from kvjax.cli.options import ONE_SAMPLE, Loading, Seed, takes
from kvjax.cli.runtime import fitted, speak, status
from kvjax.errors import RequestError

if TYPE_CHECKING:
    from kvjax.llm import LLM

_CHAT = "Wrap the prompt as a user's message, or take it as it is (default: --chat if the model has a chat template)"


@takes(*ONE_SAMPLE)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from the standard input")],
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help=_CHAT, show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt")] = None,
    seed: Seed = 0,
    *,
    loading: Loading,
    sampling: dict[str, Any],
) -> None:
    """Write the text that follows a prompt."""
    if chat is False and system is not None:
        raise RequestError("--system needs a chat template, and --raw takes the prompt as it is: use one of them.")
    text = _read_stdin() if prompt == "-" else prompt
    written = ""
    try:
        with status("loading"):
            llm = loading.load()
        ids = llm.encode(_prompt(llm, text, chat, system))
        end = "\n" if sys.stdout.isatty() else ""  # a pipe gets the text and nothing else
        for piece in speak(llm, ids, fitted(llm, ids, sampling), seed, end):
            written += piece
    except KeyboardInterrupt:
        sys.stdout.write("\n" if written else "")
        raise typer.Exit(INTERRUPTED) from None


def _prompt(llm: LLM, text: str, chat: bool | None, system: str | None) -> str | list[dict[str, str]]:
    if chat is None:
        chat = llm.tokenizer.chat_template is not None or system is not None
    if not chat:
        return text
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"The standard input is no text ({error}): give UTF-8.") from error
