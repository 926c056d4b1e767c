"""Model families: pure functions over parameter pytrees. `FAMILIES` is the list that loaders choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import ModelError
from kvjax.models.llama import LLAMA
from kvjax.types import Family

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that runs a config.json. Raises ModelError, listing what is supported, when none does."""
    named = config.get("architectures") or []
    for family in FAMILIES:
        if any(name in family.architectures for name in named):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = f"architecture {named[0]}" if named else "config.json without 'architectures'"
    raise ModelError(f"{found} is not supported; kvjax runs {known}")


__all__ = ["FAMILIES", "family_of"]
