"""Reading config.json: fields of the right type and size, or one sentence that names the field."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.errors import ModelError

MOST = 2**31 - 1
"""Of any size in config.json: positions and shapes are 32-bit numbers on the devices."""
MOST_LAYERS = 10_000
MOST_HEAD_DIM = 2**16


def architecture(hf: Mapping[str, Any], known: Iterable[str]) -> str:
    """The first of the named architectures that is among the `known`."""
    known = tuple(known)
    return next(name for name in hf["architectures"] if name in known)


def count(hf: Mapping[str, Any], field: str, otherwise: int | None = None, *, least: int = 1, most: int = MOST) -> int:
    """A whole number; null and an absent field are `otherwise`."""
    value = hf.get(field)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        raise wrong(field, value, f"a {kind} is needed")
    if value > most:
        raise wrong(field, value, f"at most {most} is possible")
    return value


def layer_count(hf: Mapping[str, Any], field: str = "num_hidden_layers") -> int:
    return count(hf, field, most=MOST_LAYERS)


def positive(hf: Mapping[str, Any], field: str, otherwise: float | None = None) -> float:
    """A finite number over 0; an absent field is `otherwise`."""
    value = hf.get(field, otherwise)
    found = number(hf, field, otherwise)
    if not 0 < found < math.inf:
        raise wrong(field, value, "a finite positive number is needed")
    return found


def number(hf: Mapping[str, Any], field: str, otherwise: float | None = None) -> float:
    """A number, NaN for anything else; an absent field is `otherwise`."""
    value = hf.get(field, otherwise)
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def optional(hf: Mapping[str, Any], field: str) -> float | None:
    """A finite number over 0, or None where the field is null or absent."""
    return None if hf.get(field) is None else positive(hf, field)


def flag(hf: Mapping[str, Any], field: str, otherwise: bool = False) -> bool:
    """True or false; null and an absent field are `otherwise`."""
    value = hf.get(field)
    value = otherwise if value is None else value
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false is needed")
    return value


def choice(hf: Mapping[str, Any], field: str, known: Iterable[str], otherwise: str) -> str:
    """One of the `known` names; null and an absent field are `otherwise`."""
    known = tuple(known)
    value = hf.get(field)
    value = otherwise if value is None else value
    if not isinstance(value, str) or value not in known:
        raise ModelError(
            f"config.json: {field} {reprlib.repr(value)} is not implemented for {hf['architectures'][0]}, only "
            f"{', '.join(map(repr, known))} {'is' if len(known) == 1 else 'are'}."
        )
    return value


def refuse(hf: Mapping[str, Any], field: str, *plain: Any, what: str = "") -> None:
    """Raises ModelError where a field has another value than null, false, or one of the `plain` ones."""
    value = hf.get(field)
    if value is not None and value is not False and not any(value == p and type(value) is type(p) for p in plain):
        means = f" ({what})" if what else ""
        raise ModelError(
            f"config.json: {field} {reprlib.repr(value)}{means} is not implemented for {hf['architectures'][0]}."
        )


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises ModelError unless every kv head serves as many query heads."""
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def head_dim(width: int, heads: int) -> int:
    """H of a model whose heads divide its width. Raises ModelError if they do not."""
    if width % heads:
        raise ModelError(f"config.json: a width of {width} does not divide into {heads} heads.")
    return width // heads


def layer_types(hf: Mapping[str, Any], layers: int) -> list[str] | None:
    """The kind of attention of every layer, or None where config.json does not list them."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise wrong("layer_types", kinds, f"a list of {layers} names out of {', '.join(known)} is needed")
    return list(kinds)


def windows(hf: Mapping[str, Any], layers: int, slides: list[bool] | None = None) -> tuple[int | None, ...]:
    """The window of every layer: `sliding_window` in the layers of `layer_types` that slide, or of `slides`."""
    kinds = layer_types(hf, layers)
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    window = count(hf, "sliding_window", 0, least=0)
    return tuple((window or None) if slide else None for slide in slides or [True] * layers)


def wrong(field: str, value: Any, needed: str) -> ModelError:
    return ModelError(f"config.json: {field} is {reprlib.repr(value)}, {needed}.")
