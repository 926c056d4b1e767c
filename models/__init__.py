"""Model families: pure functions over parameter pytrees. `FAMILIES` is the list that loaders choose from."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.errors import ModelError
from kvjax.models.llama import LLAMA
from kvjax.types import Family

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that runs a config.json. Raises ModelError, listing what is supported, when none does."""
    named = config.get("architectures")
    named = [] if named is None else named
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        needed = "a list of names, such as ['LlamaForCausalLM'], is needed"
        raise ModelError(f"config.json: architectures is {reprlib.repr(named)}, {needed}.")
    for family in FAMILIES:
        if any(name in family.architectures for name in named):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = f"architecture {named[0]}" if named else "config.json without 'architectures'"
    raise ModelError(f"{found} is not supported; kvjax runs {known}")


__all__ = ["FAMILIES", "family_of"]
