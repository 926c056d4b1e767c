"""MPT: ALiBi, no biases."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models import decoder, fields, gguf_gpt, gpt
from kvjax.models.positions import alibi_slopes
from kvjax.types import Family

_LAYER = "transformer.blocks.{i}"
NAMES = {
    "embed": "transformer.wte",
    "attn_norm": f"{_LAYER}.norm_1",
    "qkv": f"{_LAYER}.attn.Wqkv",
    "out": f"{_LAYER}.attn.out_proj",
    "mlp_norm": f"{_LAYER}.norm_2",
    "up": f"{_LAYER}.ffn.up_proj",
    "down": f"{_LAYER}.ffn.down_proj",
    "final_norm": "transformer.norm_f",
    "unembed": "lm_head",
}


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> gpt.GPTConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    inner = hf.get("attn_config") or {}
    if not isinstance(inner, Mapping):
        raise fields.wrong("attn_config", inner, "an object is needed")
    attention = {"architectures": hf["architectures"], **inner}
    fields.refuse(attention, "alibi_bias_max", 8)  # transformers takes 8 whatever it says
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        fields.refuse(attention, name)
    fields.choice(attention, "attn_type", ("multihead_attention",), "multihead_attention")
    fields.refuse(hf, "logit_scale")
    fields.refuse(hf, "expansion_ratio", 4)
    for name, where in (("alibi", attention), ("no_bias", hf)):
        if not fields.flag(where, name, True):
            raise fields.wrong(name, False, "only true is implemented for MPT")
    width, heads = fields.count(hf, "d_model", 2048), fields.count(hf, "n_heads", 16)
    trained = fields.count(hf, "max_seq_len", 2048)
    return gpt.GPTConfig(
        vocab=fields.count(hf, "vocab_size", 50368),
        width=width,
        ffw=4 * width,
        heads=heads,
        kv_heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf, "n_layers"),
        norm_eps=fields.positive(hf, "layer_norm_epsilon", 1e-5),
        activation="gelu",
        packing="3NH",
        context=context or trained,
        trained_context=trained,
        slopes=alibi_slopes(heads),
        norm_bias=False,
        attn_bias=False,
        mlp_bias=False,
        clip=fields.optional(attention, "clip_qkv"),
        scale=fields.optional(attention, "softmax_scale"),
        tied=fields.flag(hf, "tie_word_embeddings", True),
    )


MPT = Family(
    name="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    config=config_from_hf,
    abstract=functools.partial(gpt.abstract, names=NAMES),
    kv_specs=gpt.kv_specs,
    forward=gpt.forward,
    unembed=decoder.unembed,
    gguf=gguf_gpt.mpt(NAMES),
    prefix="transformer.",
    rotations=gpt.rotations,
)
