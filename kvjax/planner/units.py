"""Numbers as people write them, and as they like to read them."""

from __future__ import annotations

import re

from kvjax.errors import RequestError

MOST_TOKENS = 2**31 - 1
"""Positions are 32-bit numbers on the devices."""

_TOKENS = re.compile(r"(?P<number>\d[\d_,]*(?:\.\d+)?)(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def parse_tokens(text: str | int, what: str = "context") -> int:
    """A number of tokens: "131072", "131,072", "128k" or "1M".

    k is 1,024 and M is 1,048,576: a "128K context" has 131,072 tokens in every model's config.json that says so, "1M"
    1,048,576, "10M" 10,485,760.

    Args:
      text: as the user gave it.
      what: the option, for messages.

    Raises:
      RequestError: it is no whole number of at least one token, or more than positions can count.
    """
    found = _TOKENS.fullmatch(str(text).strip())
    tokens = 0.0
    if found:
        tokens = float(re.sub("[_,]", "", found["number"])) * _UNITS[found["unit"].lower()]
    if tokens > MOST_TOKENS:  # infinity, too
        raise RequestError(f"{what} is {text!r}: positions are 32-bit numbers, so at most {MOST_TOKENS:,} is possible.")
    if tokens < 1 or tokens != int(tokens):
        raise RequestError(f"{what} is {text!r}: give a number of tokens, such as 131072, 128k (131,072) or 1M.")
    return int(tokens)


def bytes_text(count: float) -> str:
    """Bytes in GiB, MiB or KiB, with as many decimals as one wants to see."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def count_text(count: int) -> str:
    """A count of parameters: 70553706496 is "70.6B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
