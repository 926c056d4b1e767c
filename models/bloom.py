"""BLOOM: ALiBi, a norm on the embedding."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gguf_gpt, gpt
from kvjax.models.positions import alibi_slopes
from kvjax.types import Family

_LAYER = "transformer.h.{i}"
NAMES = {
    "embed": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    "attn_norm": f"{_LAYER}.input_layernorm",
    "qkv": f"{_LAYER}.self_attention.query_key_value",
    "out": f"{_LAYER}.self_attention.dense",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "up": f"{_LAYER}.mlp.dense_h_to_4h",
    "down": f"{_LAYER}.mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "unembed": "lm_head",
}
TRAINED_CONTEXT = 2048
"""Of every BLOOM; config.json does not say it, and ALiBi has no limit."""


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    width = fields.count(hf, "n_embed", fields.count(hf, "hidden_size", 64))
    heads = fields.count(hf, "n_head", fields.count(hf, "num_attention_heads", 8))
    trained = fields.count(hf, "seq_length", TRAINED_CONTEXT)
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 250880),
        width=width,
        ffw=4 * width,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf, "n_layer" if "n_layer" in hf else "num_hidden_layers"),
        norm_eps=fields.positive(hf, "layer_norm_epsilon", 1e-5),
        activation="gelu_fast",
        packing="N3H",
        context=context or trained,
        trained_context=trained,
        slopes=alibi_slopes(heads),
        embed_norm=True,
        residual_normed=fields.flag(hf, "apply_residual_connection_post_layernorm"),
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


BLOOM = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    gguf=gguf_gpt.bloom(NAMES),
    prefix="transformer.",
    rotations=gpt.rotations,
)
