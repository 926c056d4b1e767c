"""Falcon: one kv head (7B) or a few (40B), RoPE, attention and feed-forward side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gguf_gpt, gpt
from kvjax.models.layers import ACTIVATIONS
from kvjax.models.positions import rope_from_hf
from kvjax.types import Family, Params

_LAYER = "transformer.h.{i}"
NAMES = {
    "embed": "transformer.word_embeddings",
    "attn_norm": f"{_LAYER}.input_layernorm",
    "qkv": f"{_LAYER}.self_attention.query_key_value",
    "out": f"{_LAYER}.self_attention.dense",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "up": f"{_LAYER}.mlp.dense_h_to_4h",
    "down": f"{_LAYER}.mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "unembed": "lm_head",
}
_TWO_NORMS = NAMES | {"attn_norm": f"{_LAYER}.ln_attn", "mlp_norm": f"{_LAYER}.ln_mlp"}


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    fields.refuse(hf, "alibi", what="Falcon-RW's rounded ALiBi")
    width, heads = fields.count(hf, "hidden_size", 4544), fields.count(hf, "num_attention_heads", 71)
    new = fields.flag(hf, "new_decoder_architecture")
    one_kv_head = not new and fields.flag(hf, "multi_query", True)
    kv_heads = 1 if one_kv_head else fields.count(hf, "num_kv_heads", heads) if new else heads
    fields.check_groups(heads, kv_heads)
    head_dim, trained = fields.head_dim(width, heads), fields.count(hf, "max_position_embeddings", 2048)
    parallel = new or fields.flag(hf, "parallel_attn", True)
    norms = fields.count(hf, "num_ln_in_parallel_attn", 2 if new else 1, most=2)
    if not new and parallel and norms == 2:
        raise fields.wrong("num_ln_in_parallel_attn", 2, "it needs new_decoder_architecture")
    bias = fields.flag(hf, "bias")
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 65024),
        width=width,
        ffw=fields.count(hf, "ffn_hidden_size", 4 * width),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=fields.layer_count(hf),
        norm_eps=fields.positive(hf, "layer_norm_epsilon", 1e-5),
        activation=fields.choice(hf, "activation", ACTIVATIONS, "gelu"),
        packing="KGH",
        context=context or trained,
        trained_context=trained,
        rope=rope_from_hf(hf, head_dim),
        parallel=parallel,
        own_mlp_norm=not parallel or norms == 2,
        attn_bias=bias,
        mlp_bias=bias,
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


def abstract(config: gpt.GPTConfig) -> Params:
    """The tree of ParamSpec; Falcon-40B names its norms otherwise."""
    return gpt.abstract(config, _TWO_NORMS if config.parallel and config.own_mlp_norm else NAMES)


FALCON = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    config=config_from_hf,
    abstract=abstract,
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    gguf=gguf_gpt.falcon(NAMES, _TWO_NORMS),
    prefix="transformer.",
    rotations=gpt.rotations,
)
