"""How a user says what is evicted: "snapkv:window=32+adakv" and a budget, as an `Eviction` and back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from kvjax.errors import ModelError, UserError
from kvjax.eviction import POLICIES, Budget, Policy, named
from kvjax.eviction_rule import Eviction

WRAPPERS = {"adakv": "heads", "pyramid": "layers"}
"""What follows a policy's name behind a +, and whose budgets it divides."""


def eviction_of(evict: Any, keep: Any, every: Any = 32) -> Eviction | None:
    """What is evicted, or None for nothing.

    Args:
      evict: name of a policy (`kvjax.eviction.POLICIES`) with its options and budget wrappers, as in
        "snapkv:window=32,kernel=7+adakv+pyramid"; or a `kvjax.eviction.Policy`; or an Eviction; or None.
      keep: what each head keeps: rows, if it is a whole number, or a share of the tokens, below 1. None with "duo",
        whose options say it; with "quest" what is read, unless pages say it.
      every: tokens generated between two evictions.

    Raises:
      ModelError: they do not go together, or one is out of range; the sentence says which.
    """
    if evict is None or (isinstance(evict, str) and evict == "none"):
        if keep is not None:
            raise ModelError(f"keep is {keep!r} but nothing is evicted: give evict, one of {_names()}.")
        return None
    if isinstance(evict, Eviction):
        return evict
    try:
        if isinstance(evict, str):
            name, *wrappers = re.split(r"\+(?=[^/.,=]*$)", evict)  # a file's name may have a + and a comma, too
            policy = _policy(name)
        elif isinstance(evict, Policy):
            policy, wrappers = evict, []
        else:
            raise UserError(f"evict is {evict!r}: give a policy or its name, one of {_names()}.")
        divided: dict[str, Any] = {}
        for wrapper in wrappers:
            if wrapper not in WRAPPERS:
                raise UserError(f"evict has +{wrapper}: give {policy.name}+adakv, {policy.name}+pyramid, or both.")
            divided[WRAPPERS[wrapper]] = wrapper
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UserError(f"evict_every is {every!r}: give a whole number of tokens, at least 1.")
        return Eviction(policy, _budget(policy, keep), every, **divided)
    except ModelError:
        raise
    except UserError as error:
        raise ModelError(str(error)) from error


def _names() -> str:
    return ", ".join(name for name in POLICIES if name != "none")


def _budget(policy: Policy, keep: Any) -> Budget:
    if policy.whole:
        if keep is not None:
            raise UserError(f"keep is {keep!r}, but {policy.name} says what heads keep: leave keep out.")
        return Budget(rows=max(policy.sinks + policy.recent, 1))
    if policy.reads is not None and policy.reads.pages is not None:
        if keep is not None:
            raise UserError(f"keep is {keep!r} and {policy.name} has pages={policy.reads.pages}: give one of them.")
        return Budget(share=1.0)
    if policy.reads is not None and keep is None:
        raise UserError("Quest reads some pages of each head: give pages, as in quest:pages=32, or keep, such as 0.25.")
    if keep is None:
        raise UserError("Evicting rows needs a budget: give keep, rows such as 1024 or a share such as 0.5.")
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        raise UserError(f"keep is {keep!r}: give rows, such as 1024, or a share of the tokens, such as 0.5.")
    return Budget(rows=keep) if isinstance(keep, int) else Budget(share=keep)


def _policy(text: str) -> Policy:
    name, _, given = text.partition(":")
    options = {}
    for part in re.split(r",(?=[\w ]*(?:=|$))", given) if given else ():
        key, sign, value = part.partition("=")
        if not sign:
            raise UserError(f"evict is {text!r}: give options as NAME=VALUE, such as snapkv:window=32.")
        options[key.strip()] = _value(value.strip())
    return named(name.strip(), **options)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def keep_of(text: str | None) -> int | float | None:
    """Rows or a share, of "1024", "0.5" or "50%". Raises ModelError."""
    if text is None:
        return None
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        raise ModelError(f"--keep is {text!r}: give rows, such as 1024, or a share, such as 0.5 or 50%.") from None


def described(eviction: Eviction | None) -> str | None:
    """The same text for equal evictions, in every process."""
    if eviction is None:
        return None
    policy, score = eviction.policy, eviction.policy.score
    if dataclasses.is_dataclass(score):
        scored = repr(score)
    else:
        scored = f"{getattr(score, '__module__', '')}.{getattr(score, '__qualname__', repr(score))}"
    rest = dataclasses.replace(policy, score=None)
    return f"{scored} {rest!r} {eviction.budget!r} every {eviction.every} {eviction.layers} {eviction.heads}"
