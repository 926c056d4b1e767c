"""Chat templates: Jinja programs out of a checkpoint, rendered in a sandbox as Hugging Face renders them."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvjax.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation.

    Args:
      template: the Jinja source.
      messages: {"role": ..., "content": ...}, in order.
      add_generation_prompt: whether the text ends where the assistant's answer begins.
      **variables: more names for the template, e.g. bos_token, tools, enable_thinking.

    Raises:
      RequestError: the messages have a wrong shape, or the template is wrong or refuses them.
    """
    _check(messages)
    names = {"tools": None, "documents": None, **variables}
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
    except Exception as error:  # a template is a program out of a file: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"The chat template cannot render these messages: {reason}") from error


def _check(messages: Any) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('Messages must be a non-empty list of {"role": ..., "content": ...}.')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'Message {number} must be a {{"role": ..., "content": ...}} with a text as role.')
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise RequestError(f"Message {number} must have a text or a list of parts as content.")


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
