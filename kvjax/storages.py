"""How K and V are stored: what a user calls it, and what that means.

float32, bfloat16, float16                   numbers
int8, float8_e4m3fn, float8_e5m2             codes of 8 bits, with a scale for each row of a head
int4                                         codes of 4 bits, the same
kivi4, kivi2                                 codes of 4 or 2 bits with a scale and a zero for each group (KIVI)
K/V, such as int8/int4 or kivi4/int4         K and V apart; K is the more sensitive
NAME:OPTION,OPTION                           of codes:
    recent=N    the newest N rows are kept in full precision, too (of KIVI 128, otherwise none)
    group=64    of KIVI: numbers that share a scale and a zero (32)
    rotate      K is rotated by a Hadamard matrix before it is quantized, and Q with it
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from kvjax.errors import UserError
from kvjax.pallas_kernels.packed import BITS, Codes, grouped

FLOATS = ("float32", "bfloat16", "float16")
CODES_OF_8_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
NAMES = (*FLOATS, *BITS)
RECENT = 128
"""Rows in full precision of KIVI (2402.02750, R)."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the rows of K and V are stored.

    Attributes:
      dtype: of the arrays: the numbers' own; uint8 where codes are packed.
      codes: what packed bytes stand for; None for numbers, and for 8-bit codes that are a dtype of JAX.
      recent: the newest rows that are kept in full precision, besides.
      full: name of the dtype of these.
      rotate: whether K, and Q, are rotated.
    """

    dtype: jnp.dtype
    codes: Codes | None = None
    recent: int = 0
    full: str = ""
    rotate: bool = False

    @property
    def scaled(self) -> bool:
        """Whether rows are codes of 8 bits that are a dtype of JAX, with a scale each."""
        return self.codes is None and self.dtype.itemsize == 1

    @property
    def grouped(self) -> bool:
        """Whether codes of K are made of several rows at once."""
        return self.codes is not None and grouped(self.codes.key)


def resolve(name: str, full: str) -> str:
    """The name in full, which depends on no default: what a model keeps, and what snapshots are compared by.

    Args:
      name: see the head of this file.
      full: name of the dtype of rows in full precision.

    Raises:
      UserError: a name or an option that does not exist, or is out of range.
    """
    kinds, _, options = name.partition(":")
    key, _, value = kinds.partition("/")
    value = value or key
    for kind in (key, value):
        if kind not in NAMES:
            raise UserError(f"K and V cannot be stored as {name!r}: {kind!r} is not one of {', '.join(NAMES)}.")
    if key in FLOATS or value in FLOATS:
        if key != value or options:
            raise UserError(
                f"K and V cannot be stored as {name!r}: {', '.join(FLOATS)} have no options, and are those of both."
            )
        return key
    if key == value and key in CODES_OF_8_BITS and not options:
        return key
    found = _options(name, options)
    grouped_key, has_groups = grouped(key), grouped(key) or grouped(value)
    group, recent = found.pop("group", 32), found.pop("recent", RECENT if has_groups else 0)
    if group not in (32, 64) or ("group=" in options and not has_groups):
        raise UserError(f"K and V cannot be stored as {name!r}: group is 32 or 64, of kivi4 and kivi2.")
    if recent < (group if grouped_key else 0):
        raise UserError(
            f"K and V cannot be stored as {name!r}: a group of K is {group} rows, so recent is at least {group}."
        )
    parts = [f"group={group}"] if has_groups else []
    parts += [f"recent={recent}", f"full={full}"] if recent else []
    parts += ["rotate"] if "rotate" in found else []
    return f"{key}/{value}" + (":" + ",".join(parts) if parts else "")


def _options(name: str, options: str) -> dict[str, int]:
    found = {}
    for option in filter(None, options.split(",")):
        key, _, number = option.partition("=")
        if option == "rotate":
            found[key] = 1
        elif key in ("recent", "group") and number.isascii() and number.isdigit():
            found[key] = int(number)
        elif key != "full":  # of a name in full, which is resolved again
            raise UserError(
                f"K and V cannot be stored as {name!r}: {option!r} is none of recent=N, group=32, group=64 and rotate."
            )
    return found


@functools.cache
def parse(name: str) -> Storage:
    """What a name in full (`resolve`) means. Raises UserError for another."""
    kinds, _, text = name.partition(":")
    key, apart, value = kinds.partition("/")
    if not apart:
        if text or key not in (*FLOATS, *CODES_OF_8_BITS, "int4"):
            raise UserError(f"{name!r} is no storage's name in full: give what kvjax.storages.resolve makes of it.")
        return Storage(jnp.dtype(key))
    options = dict(option.partition("=")[::2] for option in text.split(",") if option)
    return Storage(
        dtype=jnp.dtype("uint8"),
        codes=Codes(key, value, int(options.get("group", 32))),
        recent=int(options.get("recent", 0)),
        full=options.get("full", ""),
        rotate="rotate" in options,
    )
