"""OPT: learned positions from the third row on, biases everywhere, ReLU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gpt
from kvjax.models.layers import ACTIVATIONS
from kvjax.types import Family

_LAYER = "model.decoder.layers.{i}"
NAMES: gpt.Names = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "attn_norm": f"{_LAYER}.self_attn_layer_norm",
    "qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "out": f"{_LAYER}.self_attn.out_proj",
    "mlp_norm": f"{_LAYER}.final_layer_norm",
    "up": f"{_LAYER}.fc1",
    "down": f"{_LAYER}.fc2",
    "final_norm": "model.decoder.final_layer_norm",
    "unembed": "lm_head",
}
_OFFSET = 2


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    width, heads = fields.count(hf, "hidden_size", 768), fields.count(hf, "num_attention_heads", 12)
    positions = fields.count(hf, "max_position_embeddings", 2048)
    fields.refuse(hf, "word_embed_proj_dim", width, what="embeddings of another width, as in OPT-350m")
    fields.refuse(hf, "_remove_final_layer_norm", what="no final norm")
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not fields.flag(hf, name, True):
            raise fields.wrong(name, False, "only true is implemented for OPT")
    bias = fields.flag(hf, "enable_bias", True)
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 50272),
        width=width,
        ffw=fields.count(hf, "ffn_dim", 3072),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf),
        norm_eps=1e-5,
        activation=fields.choice(hf, "activation_function", ACTIVATIONS, "relu"),
        packing="3NH",
        context=context or positions,
        trained_context=positions,
        learned_positions=positions + _OFFSET,
        position_offset=_OFFSET,
        attn_bias=bias,
        mlp_bias=bias,
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    prefix="model.",
    rotations=gpt.rotations,
)
