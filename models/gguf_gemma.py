"""GGUF names of Gemma 2 and Gemma 3. The gains of norms are stored with 1 added, and stay so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import gguf_common as common
from kvjax.models.gguf_common import Keys
from kvjax.types import GGUFNames

_CLASSES = {"gemma2": ("Gemma2ForCausalLM", "gemma2"), "gemma3": ("Gemma3ForCausalLM", "gemma3_text")}
_PERIOD = {"gemma2": 2, "gemma3": 6}
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose softmax scale is (D/N)^-½ and not H^-½: the files do not say it."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _tensors(arch: str, config: Mapping[str, Any]) -> dict[str, str]:
    return common.modules(_OUTER, "model.layers.{i}.", _INNER)


def _config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    keys = Keys(metadata, arch)
    common.refuse_variants(keys, *(["final_logit_softcapping"] if arch == "gemma3" else []))
    common.refuse_other_values(keys)
    config = {
        **common.general(keys, *_CLASSES[arch]),
        **common.sizes(keys),
        "intermediate_size": keys.same("feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "rope_scaling": common.rope_scaling(keys),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "layer_types": common.layer_types(keys, _PERIOD[arch]),
        "norms_hold_gains": True,
    }
    wide = config["num_hidden_layers"] == _WIDE_SCALE_LAYERS[arch]
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return config | {"query_pre_attn_scalar": scalar} | (_second(keys) if arch == "gemma2" else _third(keys))


def _second(keys: Keys) -> dict[str, Any]:
    return {
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
    }


def _third(keys: Keys) -> dict[str, Any]:
    return {
        "sliding_window": keys.get("attention.sliding_window", 0),
        "rope_local_base_freq": keys.decimal("rope.freq_base_swa", 10000.0),
    }


GEMMA_GGUF = GGUFNames(architectures=tuple(_CLASSES), tensors=_tensors, config=_config, rows=common.in_order, made={})
"""The names of the Gemma family in GGUF files."""
