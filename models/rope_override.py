"""Another scaling of RoPE than the checkpoint's: positions beyond the trained length, as `--rope yarn:4` asks."""

from __future__ import annotations

import json
import math
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.errors import ModelError

_WITH_FACTOR = ("linear", "ntk", "dynamic", "yarn")
_USAGE = (
    "give yarn:FACTOR, ntk:FACTOR, dynamic:FACTOR or linear:FACTOR, such as yarn:4; longrope:FILE with a JSON file of "
    "long_factor and short_factor; or default for none"
)
_MOST = 2**31 - 1
_OWN = ("rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")
"""What a scaling keeps of the checkpoint's."""


def parse(text: str) -> dict[str, Any]:
    """A command-line word → the fields of config.json's rope_scaling. Raises ModelError.

    Example: "yarn:4" → {"rope_type": "yarn", "factor": 4.0}.
    """
    kind, colon, rest = text.partition(":")
    if kind == "default" and not colon:
        return {"rope_type": "default"}
    if kind == "longrope" and rest:
        return {"rope_type": "longrope", **_factor_lists(rest)}
    try:
        factor = float(rest) if kind in _WITH_FACTOR else math.nan
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise ModelError(f"rope is {reprlib.repr(text)}: {_USAGE}.")
    return {"rope_type": kind, "factor": factor}


def _factor_lists(path: str) -> dict[str, Any]:
    try:
        found = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"rope is longrope:{path}, and that file cannot be read ({error}): {_USAGE}.") from error
    if not isinstance(found, Mapping) or not {"long_factor", "short_factor"} <= set(found):
        raise ModelError(f"{path} does not have long_factor and short_factor: {_USAGE}.")
    return dict(found)


def override(hf: Mapping[str, Any], rope: str | Mapping[str, Any]) -> dict[str, Any]:
    """config.json with another scaling of RoPE.

    The frequencies' base and the rotated part of a head stay the checkpoint's. The original length is what the
    checkpoint says it was trained with, unless `rope` names another; the longest sequence that the model promises is
    that length times the factor.

    Args:
      hf: fields of config.json.
      rope: a word as `parse` takes it, or the fields of rope_scaling.

    Raises:
      ModelError: the word or the fields cannot be read.
    """
    if not isinstance(rope, str | Mapping):
        raise ModelError(f"rope is {reprlib.repr(rope)}: {_USAGE}.")
    asked = parse(rope) if isinstance(rope, str) else _stated(rope)
    was = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = isinstance(was, Mapping) and any(isinstance(value, Mapping) for value in was.values())
    whole = was.get("full_attention", {}) if nested else was  # a local layer's few positions need no stretching
    whole = whole if isinstance(whole, Mapping) else {}
    original = _original(hf, whole)
    fields = {name: whole[name] for name in _OWN if name in whole}
    if asked["rope_type"] != "default" and original:
        fields["original_max_position_embeddings"] = original
    fields |= asked
    changed = {key: value for key, value in hf.items() if key != "original_max_position_embeddings"}
    if nested:
        changed |= {"rope_scaling": None, "rope_parameters": {**was, "full_attention": fields}}
    else:
        changed |= {"rope_scaling": fields, "rope_parameters": None}
    factor = asked.get("factor")
    length = fields.get("original_max_position_embeddings", original)
    if length and isinstance(factor, int | float):
        if not length * factor < _MOST:
            raise ModelError(f"rope stretches {length} tokens by {factor}: at most {_MOST} positions are possible.")
        changed["max_position_embeddings"] = int(length * factor)
    elif asked["rope_type"] == "default" and length:
        changed["max_position_embeddings"] = int(length)
    return changed


def _stated(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rope_scaling, whose kind may be called "type", as older files do."""
    fields = {key: value for key, value in rope.items() if key != "type"}
    fields.setdefault("rope_type", rope.get("type"))
    kind, factor = fields["rope_type"], fields.get("factor")
    if not isinstance(kind, str):
        raise ModelError(f"rope is {reprlib.repr(dict(rope))}, without a rope_type: {_USAGE}.")
    if kind in _WITH_FACTOR and (isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1):
        raise ModelError(f"rope is {reprlib.repr(dict(rope))}: {kind} needs a factor of at least 1.")
    return fields


def _original(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """The length of pretraining, 0 where it is unknown."""
    name = "original_max_position_embeddings"
    for value in (hf.get(name), fields.get(name), hf.get("max_position_embeddings")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return int(value)
    return 0
