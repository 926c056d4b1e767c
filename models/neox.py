"""GPT-NeoX and Pythia: RoPE on a part of every head, attention and feed-forward side by side."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gguf_gpt, gpt
from kvjax.models.layers import ACTIVATIONS
from kvjax.models.positions import rope_from_hf
from kvjax.types import Family

_LAYER = "gpt_neox.layers.{i}"
NAMES = {
    "embed": "gpt_neox.embed_in",
    "attn_norm": f"{_LAYER}.input_layernorm",
    "qkv": f"{_LAYER}.attention.query_key_value",
    "out": f"{_LAYER}.attention.dense",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "up": f"{_LAYER}.mlp.dense_h_to_4h",
    "down": f"{_LAYER}.mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "unembed": "embed_out",
}


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    width, heads = fields.count(hf, "hidden_size", 6144), fields.count(hf, "num_attention_heads", 64)
    head_dim, trained = fields.head_dim(width, heads), fields.count(hf, "max_position_embeddings", 2048)
    rope = {
        "rope_theta": fields.positive(hf, "rotary_emb_base", 10_000.0),
        "partial_rotary_factor": fields.positive(hf, "rotary_pct", 0.25),
    } | dict(hf)
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 50432),
        width=width,
        ffw=fields.count(hf, "intermediate_size", 4 * width),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        layers=fields.layer_count(hf),
        norm_eps=fields.positive(hf, "layer_norm_eps", 1e-5),
        activation=fields.choice(hf, "hidden_act", ACTIVATIONS, "gelu"),
        packing="N3H",
        context=context or trained,
        trained_context=trained,
        rope=rope_from_hf(rope, head_dim),
        parallel=fields.flag(hf, "use_parallel_residual", True),
        attn_bias=fields.flag(hf, "attention_bias", True),
        tied=fields.flag(hf, "tie_word_embeddings"),
    )


NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    gguf=gguf_gpt.neox(NAMES),
    prefix="gpt_neox.",
    rotations=gpt.rotations,
)
