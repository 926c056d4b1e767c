"""How hidden states become one vector: what the files of sentence-transformers say of it, and the arithmetic."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from kvjax.checkpoints.source import one_line, read_json
from kvjax.errors import ModelError

_MODES = ("cls", "max", "mean")
"""In the order in which sentence-transformers joins the vectors of several."""
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclasses.dataclass(frozen=True)
class Pooling:
    """What is done with a text before the encoder, and with its hidden states after it.

    Attributes:
      modes: "cls" is the first token's state, "max" and "mean" are over all tokens; the vectors of several are joined.
      normalize: whether vectors are divided by their length, so that a dot product is a cosine.
      max_length: tokens of a text at most, those that the tokenizer adds included; None for what the model has learned.
      lowercase: whether texts are lowercased, whatever the tokenizer does.
      prompt: what is put before every text.
    """

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False
    prompt: str = ""


def pool(hidden: jax.Array, lengths: jax.Array, modes: tuple[str, ...]) -> jax.Array:
    """Hidden states (B, S, D) of texts of `lengths` (B,) tokens → (B, D × modes) float32; padding does not count."""
    hidden = hidden.astype(jnp.float32)
    real = (jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None])[:, :, None]
    count = jnp.maximum(lengths, 1)[:, None].astype(jnp.float32)
    made = {
        "cls": lambda: hidden[:, 0],
        "max": lambda: jnp.where(real, hidden, -jnp.inf).max(axis=1),
        "mean": lambda: jnp.where(real, hidden, 0.0).sum(axis=1) / count,
    }
    return jnp.concatenate([made[mode]() for mode in modes], axis=-1)


def read(folder: epath.Path) -> Pooling:
    """The pooling of a checkpoint's folder; without files that say otherwise it is the mean, not normalized.

    Raises:
      ModelError: a file is damaged, or asks for what is not implemented.
    """
    modules = _modules(folder)
    limits = read_json(folder / "sentence_bert_config.json")
    prompt = _prompt(folder)
    max_length = limits.get("max_seq_length")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise _wrong(folder / "sentence_bert_config.json", "max_seq_length", max_length, "a whole number of tokens")
    return Pooling(
        modes=_modes(modules["Pooling"], prompt) if "Pooling" in modules else Pooling.modes,
        normalize="Normalize" in modules,
        max_length=max_length,
        lowercase=limits.get("do_lower_case") is True,
        prompt=prompt,
    )


def _modules(folder: epath.Path) -> dict[str, epath.Path]:
    """The kind of each module → its folder, in their order; {} without modules.json."""
    file = folder / "modules.json"
    if not file.exists():
        return {}
    try:
        listed = json.loads(file.read_text())
        found = {entry["type"].rpartition(".")[2]: folder / entry["path"] for entry in listed}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({one_line(error)}): download or copy it again.") from error
    for kind in found:
        if kind not in _MODULES:
            raise ModelError(f"{file}: a module {kind} is not implemented, only {', '.join(_MODULES)} are.")
    return found


def _modes(folder: epath.Path, prompt: str) -> tuple[str, ...]:
    """Reads a Pooling module's config.json: a flag for each mode, as pooling_mode_mean_tokens, or the name of one."""
    file = folder / "config.json"
    fields = read_json(file, required=True)
    flags = [name.removeprefix("pooling_mode_") for name, value in fields.items() if value is True and "_mode_" in name]
    asked = [name.removesuffix("_tokens").removesuffix("_token") for name in flags]
    if "pooling_mode" in fields:
        asked = [str(fields["pooling_mode"])]
    unknown = [name for name in asked if name not in _MODES]
    if unknown or not asked:
        found = f"pooling by {', '.join(unknown)} is not implemented" if unknown else "no pooling is named"
        raise ModelError(f"{file}: {found}; kvjax pools by {', '.join(_MODES)}.")
    if prompt and fields.get("include_prompt") is False:
        raise _wrong(file, "include_prompt", False, "a prompt that counts in the pooling")
    return tuple(mode for mode in _MODES if mode in asked)


def _prompt(folder: epath.Path) -> str:
    """The prompt that sentence-transformers puts before a text when it is told nothing else."""
    file = folder / "config_sentence_transformers.json"
    fields: Mapping[str, Any] = read_json(file)
    name, prompts = fields.get("default_prompt_name"), fields.get("prompts")
    if name is None:
        return ""
    found = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    if not isinstance(found, str):
        raise _wrong(file, "default_prompt_name", name, "the name of one of its prompts")
    return found


def _wrong(file: epath.Path, field: str, value: Any, needed: str) -> ModelError:
    return ModelError(f"{file}: {field} is {reprlib.repr(value)}, {needed} is needed.")
