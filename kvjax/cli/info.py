"""`kvjax info`: what a checkpoint is, and what its cache will cost. No weight is read."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.interrupts import import_engine

if TYPE_CHECKING:
    from kvjax.checkpoints.source import TensorSource
    from kvjax.types import Family

_STORAGES = ("float32", "bfloat16", "int8")
_CONTEXTS = 1024


def info(
    model: Annotated[str | None, typer.Argument(help="Model, as for generate (default: SmolLM2-135M)")] = None,
    context: Annotated[int | None, typer.Option(help="Longest prompt with output to serve")] = None,
    rope: Annotated[str | None, typer.Option(help="Scale RoPE as for generate, e.g. yarn:4")] = None,
    families: Annotated[bool, typer.Option("--families", help="List the architectures that kvjax runs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
) -> None:
    """Show a model's configuration and the bytes of its KV cache, or what models there are."""
    import_engine()
    if families:
        found = _families()
        print(json.dumps(found, indent=1) if as_json else _table({name: " ".join(of) for name, of in found.items()}))
        return
    facts = describe(model, context, rope)
    print(json.dumps(facts, indent=1, ensure_ascii=False) if as_json else _table(facts))


def _families() -> dict[str, tuple[str, ...]]:
    """Family → values of config.json's `architectures` that it runs."""
    from kvjax.models import FAMILIES
    from kvjax.models.bert import ENCODERS

    return {family.name: family.architectures for family in (*FAMILIES, *ENCODERS)}


def describe(what: str | None, context: int | None = None, rope: str | None = None) -> dict[str, Any]:
    """Facts about a checkpoint, from its headers alone. Raises ModelError."""
    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES, config_of, family_of
    from kvjax.models.bert import encoder_of
    from kvjax.tokenizer import Tokenizer

    with open_checkpoint(what, FAMILIES) as source:
        if encoder := encoder_of(source.config):
            return _encoder(source, encoder, context, rope)
        family = family_of(source.config)
        config = config_of(family, source.config, context, rope)
        tokenizer = Tokenizer.from_source(source)
        return {
            **_named(source, family),
            "layers": len(family.kv_specs(config, "float32")),
            **dataclasses.asdict(config),
            **_weights(source),
            "kv": {storage: _kv(family.kv_specs(config, storage), config.context) for storage in _STORAGES},
            "chat_template": tokenizer.chat_template is not None,
            "bos_id": tokenizer.bos_id,
            "eos_ids": list(tokenizer.eos_ids),
        }


def _encoder(source: TensorSource, family: Family, context: int | None, rope: str | None) -> dict[str, Any]:
    """Facts about an encoder, which has no cache."""
    from kvjax.embedding import read_config

    config, pooling = read_config(source, family, context, rope)
    return {
        **_named(source, family),
        "kind": "encoder: text to embedding",
        **dataclasses.asdict(config),
        "pooling": ", ".join(pooling.modes),
        "normalized": pooling.normalize,
        **_weights(source),
    }


def _named(source: TensorSource, family: Family) -> dict[str, Any]:
    architecture = next(name for name in source.config["architectures"] if name in family.architectures)
    return {"model": source.describe(), "architecture": architecture, "family": family.name}


def _weights(source: TensorSource) -> dict[str, Any]:
    from kvjax.checkpoints.source import parameter_count

    dtypes = collections.Counter(source.dtype(name).name for name in source.names())
    return {"parameters": parameter_count(source), "dtypes": dict(dtypes)}


def _kv(specs: Any, context: int) -> dict[str, int]:
    token = sum(spec.row_bytes for spec in specs)
    return {"bytes_per_token": token, "bytes_at_1024": token * _CONTEXTS, "bytes_at_context": token * context}


def _table(facts: Mapping[str, Any]) -> str:
    rows = {}
    for name, value in facts.items():
        if name == "kv":
            for storage, sizes in value.items():
                rows[f"kv {storage}"] = _sizes(sizes, facts["context"])
        elif name == "windows":
            rows[name] = _windows(value)
        elif name in ("rope", "local_rope") and value is not None:
            rows[name] = _rope(value)
        elif name == "routing" and value is not None:
            rows[name] = ", ".join(f"{key.replace('_', ' ')} {_short(item)}" for key, item in value.items())
        elif name in _OF_NAMES or value is None or value == ():
            continue
        elif name == "dtypes":
            rows[name] = ", ".join(f"{kind} ({count} tensors)" for kind, count in value.items())
        else:
            rows[name] = _short(value)
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name.replace('_', ' '):{width}}{value}" for name, value in rows.items())


_OF_NAMES = ("packed_names", "expert_names", "packing")
"""Of interest to the loader only."""


def _sizes(sizes: Mapping[str, int], context: int) -> str:
    at = f"{_bytes(sizes['bytes_at_1024'])} at 1,024 tokens, {_bytes(sizes['bytes_at_context'])} at {context:,}"
    return f"{sizes['bytes_per_token']:,} bytes per token: {at}"


def _rope(rope: Mapping[str, Any]) -> str:
    plain = ("kind", "theta", "dim")  # the others say how a scaled one is stretched
    shown = rope if rope.get("kind") != "default" else {key: rope[key] for key in plain}
    return ", ".join(f"{key} {_short(item)}" for key, item in shown.items() if item not in (None, ()))


def _windows(windows: tuple[int | None, ...]) -> str:
    sliding = sorted({window for window in windows if window is not None})
    layers = sum(window is not None for window in windows)
    return f"{', '.join(map(str, sliding))} in {layers} of {len(windows)} layers" if sliding else "none"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, bool) for item in value):
        return "all layers" if all(value) else f"{sum(value)} of {len(value)} layers"
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers" if len(value) > 8 else ", ".join(map(str, value))
    return str(value)


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
