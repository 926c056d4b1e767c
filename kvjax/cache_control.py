"""Break points in a conversation up to which its K and V are to be kept, as Anthropic's API marks them.

    {"role": "system", "content": "...", "cache_control": {"type": "ephemeral", "ttl": "1h"}}

The mark stands in a message, or in one of its parts, and counts to the end of that message. Pages up to there are not
evicted for others for 5 minutes ("5m", the default) or 1 hour ("1h") after their last use; equal beginnings are shared
with or without a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax.errors import RequestError
from kvjax.requests import PIN_SECONDS

Messages = Sequence[Mapping[str, Any]]

MOST = 4
"""Break points that a conversation may have."""

_TTL = dict(zip(("5m", "1h"), PIN_SECONDS, strict=True))
_OTHER = "\N{SNOWMAN}"


def pins(messages: Messages, encode: Callable[[Messages], Sequence[int]]) -> tuple[int, int]:
    """How many tokens of a conversation to keep for each of `PIN_SECONDS`.

    Args:
      messages: the conversation.
      encode: token ids of a conversation.

    Raises:
      RequestError: a mark that is none, or too many of them.
    """
    marks = [(i, seconds) for i, message in enumerate(messages) for seconds in _marks(message)]
    if len(marks) > MOST:
        raise RequestError(f"The messages have {len(marks)} cache_control marks: give at most {MOST}.")
    tokens = dict.fromkeys(PIN_SECONDS, 0)
    for i, seconds in marks:
        tokens[seconds] = max(tokens[seconds], _end(messages, i, encode))
    five_minutes, hour = (tokens[seconds] for seconds in PIN_SECONDS)
    return five_minutes, hour


def without_marks(messages: Messages) -> list[dict[str, Any]]:
    """The messages as a chat template should see them."""
    return [_bare(message) for message in messages]


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in message.items() if key != "cache_control"}
    if isinstance(bare.get("content"), list):
        bare["content"] = [_bare(part) if isinstance(part, Mapping) else part for part in bare["content"]]
    return bare


def _marks(message: Mapping[str, Any]) -> list[int]:
    """The seconds of each mark in a message and its parts."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    found = [holder["cache_control"] for holder in (message, *parts) if holder.get("cache_control") is not None]
    return [_seconds(mark) for mark in found]


def _seconds(mark: Any) -> int:
    ttl = mark.get("ttl", "5m") if isinstance(mark, Mapping) else None
    if ttl not in _TTL or mark.get("type") != "ephemeral" or not mark.keys() <= {"type", "ttl"}:
        raise RequestError(
            f'cache_control is {mark!r}: give {{"type": "ephemeral"}}, with "ttl": "5m" or "1h" if you like.'
        )
    return _TTL[ttl]


def _end(messages: Messages, i: int, encode: Callable[[Messages], Sequence[int]]) -> int:
    """Tokens that do not depend on what follows message i: all that two endings have in common.

    A template may refuse a conversation that ends there, so what follows is replaced rather than cut off.
    """
    whole = encode(messages)
    rest = messages[i + 1 :]
    if not rest:
        return len(whole)
    other = encode([*messages[: i + 1], *({**message, "content": _OTHER} for message in rest)])
    return next((n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), min(len(whole), len(other)))
