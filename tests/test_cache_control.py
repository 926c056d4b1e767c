"""Break points in conversations: how many tokens they pin, and what is refused."""

import re
from typing import Any

import pytest

from kvjax.cache_control import pins, without_marks
from kvjax.errors import RequestError

HOUR = {"type": "ephemeral", "ttl": "1h"}
MINUTES = {"type": "ephemeral"}


def encode(messages) -> list[int]:
    """<role>content</>, a token a character; a template that insists on ending with the user, as some do."""
    assert messages[-1]["role"] == "user"
    text = "".join(f"<{m['role']}>{_text(m['content'])}</>" for m in messages) + "<assistant>"
    return [ord(c) for c in text]


def _text(content) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def conversation(system_mark=None, example_mark=None, question_mark=None):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
    ]
    for message, mark in zip(messages, (system_mark, None, example_mark, question_mark), strict=True):
        if mark:
            message["cache_control"] = mark
    return messages


def test_tokens_up_to_the_end_of_the_marked_message():
    system = len("<system>Be brief.</>")
    example = system + len("<user>Hi</><assistant>Hello</>")
    whole = len(encode(conversation()))
    header = len("<user>")  # what follows begins alike, whatever its content
    assert pins(conversation(), encode) == (0, 0)
    assert pins(conversation(system_mark=HOUR), encode) == (0, system + header)
    assert pins(conversation(HOUR, MINUTES), encode) == (example + header, system + header)
    assert pins(conversation(MINUTES, MINUTES), encode) == (example + header, 0)
    assert pins(conversation(question_mark=HOUR), encode) == (0, whole)


def test_marks_in_parts_count_to_the_end_of_their_message():
    parts = [{"type": "text", "text": "Be ", "cache_control": HOUR}, {"type": "text", "text": "brief."}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": parts}, {"role": "user", "content": "Why?"}]
    assert pins(messages, encode) == (0, len("<system>Be brief.</><user>"))
    bare = without_marks(messages)
    assert bare[0]["content"] == [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert "cache_control" in messages[0]["content"][0]  # the caller's own is as it was


@pytest.mark.parametrize("mark", [{"type": "ephemeral", "ttl": "2h"}, {"ttl": "1h"}, "1h", {**HOUR, "x": 1}, True])
def test_refuses_what_is_no_mark(mark):
    with pytest.raises(RequestError, match=re.escape('give {"type": "ephemeral"}, with "ttl": "5m" or "1h"')):
        pins(conversation(mark), encode)


def test_refuses_more_than_four():
    messages = [{"role": "user", "content": "x", "cache_control": HOUR}] * 5
    with pytest.raises(RequestError, match="5 cache_control marks: give at most 4"):
        pins(messages, encode)
