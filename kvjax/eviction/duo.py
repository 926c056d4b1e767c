"""DuoAttention (2410.10819): retrieval heads keep all rows, streaming heads sinks and newest; a file says which."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from kvjax.errors import UserError

Heads = tuple[tuple[bool, ...], ...]
"""Of each layer and kv head, (L, K)."""


def retrieval_heads(path: str | pathlib.Path, threshold: float = 0.5) -> Heads:
    """Which heads are retrieval heads: those whose number in a file is at least the threshold.

    Args:
      path: a table of L lines with K numbers, divided by tabs or blanks, as the authors' full_attention_heads.tsv; or,
        if its name ends in .json, L lists of K numbers or booleans.
      threshold: from 0, which makes all of them retrieval heads where numbers are not negative.

    Raises:
      UserError: the file cannot be read, or is not such a table.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise UserError(f"duo has threshold={threshold!r}, but a number such as 0.5 is needed.")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"The heads of duo cannot be read from {str(path)!r} ({error}): give a file of them."
        ) from error
    table = _numbers(text, str(path).endswith(".json"))
    if table is None or not table or not table[0] or len({len(line) for line in table}) > 1:
        wanted = "one list, or line, for each layer, with one number for each kv head, is needed"
        raise UserError(f"{str(path)!r} is not a table of heads: {wanted}.")
    return tuple(tuple(number >= threshold for number in line) for line in table)


def _numbers(text: str, is_json: bool) -> list[list[float]] | None:
    """The table, or None if it is none."""
    try:
        found: Any = json.loads(text) if is_json else [line.split() for line in text.splitlines() if line.strip()]
        if not isinstance(found, list) or not all(isinstance(line, list) for line in found):
            return None
        if is_json and not all(isinstance(number, int | float) for line in found for number in line):
            return None
        table = [[float(number) for number in line] for line in found]
    except (ValueError, OverflowError, RecursionError):
        return None
    return table if all(math.isfinite(number) for line in table for number in line) else None
