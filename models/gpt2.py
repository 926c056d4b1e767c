"""GPT-2: learned positions, q, k and v in one tensor, matrices stored (in, out)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gguf_gpt, gpt
from kvjax.models.layers import ACTIVATIONS
from kvjax.types import Family

NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "attn_norm": "transformer.h.{i}.ln_1",
    "qkv": "transformer.h.{i}.attn.c_attn",
    "out": "transformer.h.{i}.attn.c_proj",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "up": "transformer.h.{i}.mlp.c_fc",
    "down": "transformer.h.{i}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "unembed": "lm_head",
}


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    width, heads = fields.count(hf, "n_embd", 768), fields.count(hf, "n_head", 12)
    positions = fields.count(hf, "n_positions", 1024)
    fields.refuse(hf, "add_cross_attention", what="encoder-decoder")
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 50257),
        width=width,
        ffw=fields.count(hf, "n_inner", 4 * width),
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf, "n_layer"),
        norm_eps=fields.positive(hf, "layer_norm_epsilon", 1e-5),
        activation=fields.choice(hf, "activation_function", ACTIVATIONS, "gelu_new"),
        packing="3NH",
        context=context or positions,
        trained_context=positions,
        learned_positions=positions,
        scale=None if fields.flag(hf, "scale_attn_weights", True) else 1.0,
        by_layer=fields.flag(hf, "scale_attn_by_inverse_layer_idx"),
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES, transposed=True),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    gguf=gguf_gpt.gpt2(NAMES),
    prefix="transformer.",
    rotations=gpt.rotations,
)
