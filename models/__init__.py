"""Model families: pure functions over parameter pytrees. `FAMILIES` is the list that loaders choose from."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.errors import ModelError
from kvjax.models import rope_override
from kvjax.models.bert import ENCODERS
from kvjax.models.bloom import BLOOM
from kvjax.models.deepseek import DEEPSEEK
from kvjax.models.falcon import FALCON
from kvjax.models.gemma import GEMMA
from kvjax.models.gpt2 import GPT2
from kvjax.models.gpt_oss import GPT_OSS
from kvjax.models.llama import LLAMA
from kvjax.models.mpt import MPT
from kvjax.models.neox import NEOX
from kvjax.models.opt import OPT
from kvjax.models.xglm import XGLM
from kvjax.types import Family

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, GEMMA, DEEPSEEK, GPT_OSS),
    *(GPT2, OPT, NEOX, FALCON, BLOOM, MPT, XGLM),
)

REFUSED = {
    "Gemma3ForConditionalGeneration": "its vision tower is not implemented: extract the text model, Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "its vision tower is not implemented",
    "LlavaForConditionalGeneration": "its vision tower is not implemented",
    "Qwen2VLForConditionalGeneration": "its vision tower is not implemented",
    "Qwen2_5_VLForConditionalGeneration": "its vision tower is not implemented",
    "Qwen3VLForConditionalGeneration": "its vision tower is not implemented",
    "MllamaForConditionalGeneration": "its vision tower is not implemented",
    "Phi3VForCausalLM": "its vision tower is not implemented",
    "Phi4MMForCausalLM": "its vision and speech towers are not implemented",
    "Llama4ForConditionalGeneration": "its vision tower is not implemented",
    "T5ForConditionalGeneration": "it is an encoder-decoder",
    "BartForConditionalGeneration": "it is an encoder-decoder",
    "MT5ForConditionalGeneration": "it is an encoder-decoder",
    "WhisperForConditionalGeneration": "it is an encoder-decoder",
} | dict.fromkeys(
    (name for encoder in ENCODERS for name in encoder.architectures),
    "it is an encoder, which generates nothing: use `kvjax embed`, or kvjax.load(...).embed",
)
"""Architectures that users are likely to try, and why they do not run."""


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
    for name in named:
        if name in REFUSED:
            raise ModelError(f"architecture {name} is not supported: {REFUSED[name]}.")
    known = ", ".join(family.name for family in FAMILIES)
    found = f"architecture {named[0]}" if named else "config.json without 'architectures'"
    raise ModelError(f"{found} is not supported; kvjax runs the families {known}, listed in its README.")


def config_of(
    family: Family,
    hf: Mapping[str, Any],
    context: int | None = None,
    rope: str | Mapping[str, Any] | None = None,
) -> Any:
    """The config of a model, with another scaling of RoPE where one is given. Raises ModelError."""
    if rope is None:
        return family.config(hf, context)
    if getattr(family.config(hf, None), "rope", None) is None:
        raise ModelError(
            f"rope is {reprlib.repr(rope)}, but {hf['architectures'][0]} has no rotary positions to scale."
        )
    return family.config(rope_override.override(hf, rope), context)


__all__ = ["FAMILIES", "REFUSED", "config_of", "family_of"]
