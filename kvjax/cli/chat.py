"""`kvjax chat`: a conversation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.options import ONE_SAMPLE, Loading, Seed, takes
from kvjax.cli.runtime import fitted, note, speak, status
from kvjax.errors import RequestError
from kvjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvjax.llm import LLM

_MOST = 1024
_HELP = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT, remove it
/quit           end, as Ctrl-D does
Ctrl-C          stop the answer; at the prompt, a second one ends the chat"""


@takes(*ONE_SAMPLE)
def chat(
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    seed: Seed = 0,
    *,
    loading: Loading,
    sampling: dict[str, Any],
) -> None:
    """Talk with a model; /help lists what can be typed."""
    with status("loading"):
        llm = loading.load()
    if llm.tokenizer.chat_template is None:
        raise RequestError("This model has no chat template: use kvjax generate.")
    SamplingParams.from_dict(sampling).validate(llm.model.config.vocab)  # once, not at every message
    conversation = _Conversation(llm, system, seed, sampling)
    note("/help lists the commands; Ctrl-D ends.")
    interrupts = 0
    while interrupts < 2:
        try:
            line = _read_line()
            if line is None or line.strip() == "/quit":
                break
            interrupts = 0
            if line.strip():
                interrupts = conversation.take(line.strip())
        except KeyboardInterrupt:
            interrupts += 1
            print("\n" + ("(Ctrl-C again ends the chat)" if interrupts < 2 else ""))


class _Conversation:
    """What was said so far."""

    def __init__(self, llm: LLM, system: str | None, seed: int, sampling: dict[str, Any]):
        self.llm, self.system, self.seed, self.sampling = llm, system, seed, sampling
        self.messages: list[dict[str, str]] = []

    def take(self, line: str) -> int:
        """Obeys a command or answers; returns how often Ctrl-C was pressed meanwhile."""
        command, _, rest = line.partition(" ")
        if not line.startswith("/"):
            return self._answer(line)
        if command == "/reset":
            self.messages = []
            print("(the conversation is forgotten)")
        elif command == "/system":
            self.system = rest.strip() or None
            print("(the system message is set)" if self.system else "(no system message)")
        elif command == "/help":
            print(_HELP)
        else:
            print(f"There is no command {command}: /help lists them.")
        return 0

    def _answer(self, line: str) -> int:
        before = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": line}
        answer, interrupts = "", 0
        try:
            ids = self.llm.encode([*before, *self.messages, question])
            if len(ids) >= self.llm.context:
                raise RequestError(
                    f"The conversation has {len(ids)} tokens with this message, and the context {self.llm.context}: "
                    "say less, or type /reset to begin a new one."
                )
            params = fitted(self.llm, ids, self.sampling, _MOST)
            # Another seed each turn: the same one would draw the same numbers again.
            for piece in speak(self.llm, ids, params, self.seed + len(self.messages), "\n"):
                answer += piece
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            interrupts = 1
            print()
        if answer:  # the template would show the model an empty answer of its own
            self.messages += [question, {"role": "assistant", "content": answer}]
        return interrupts


def _read_line() -> str | None:
    """What the user typed; None at the end. Lines from a pipe come without a prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line if line else None
    import readline  # noqa: F401  arrow keys and history for `input`

    try:
        return input("> ")
    except EOFError:
        print()
        return None
