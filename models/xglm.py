"""XGLM: sinusoidal positions, a scaled embedding."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gpt
from kvjax.models.layers import ACTIVATIONS
from kvjax.types import Family

_LAYER = "model.layers.{i}"
NAMES: gpt.Names = {
    "embed": "model.embed_tokens",
    "attn_norm": f"{_LAYER}.self_attn_layer_norm",
    "qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "out": f"{_LAYER}.self_attn.out_proj",
    "mlp_norm": f"{_LAYER}.final_layer_norm",
    "up": f"{_LAYER}.fc1",
    "down": f"{_LAYER}.fc2",
    "final_norm": "model.layer_norm",
    "unembed": "lm_head",
}
_OFFSET = 2


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    fields.refuse(hf, "add_cross_attention", what="encoder-decoder")
    if (
        fields.count(hf, "pad_token_id", 1, least=0) >= _OFFSET
    ):  # transformers takes that position's sinusoid for padding
        raise fields.wrong("pad_token_id", hf["pad_token_id"], f"XGLM needs one below {_OFFSET}")
    width, heads = fields.count(hf, "d_model", 1024), fields.count(hf, "attention_heads", 16)
    trained = fields.count(hf, "max_position_embeddings", 2048)
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 256008),
        width=width,
        ffw=fields.count(hf, "ffn_dim", 4096),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf, "num_layers"),
        norm_eps=1e-5,
        activation=fields.choice(hf, "activation_function", ACTIVATIONS, "gelu"),
        packing="3NH",
        context=context or trained,
        trained_context=trained,
        sinusoidal=True,
        position_offset=_OFFSET,
        embed_scale=math.sqrt(width) if fields.flag(hf, "scale_embedding", True) else 1.0,
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


XGLM = Family(
    name="xglm",
    architectures=("XGLMForCausalLM",),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    prefix="model.",
    rotations=gpt.rotations,
)
