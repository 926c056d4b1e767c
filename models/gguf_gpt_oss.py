"""GGUF names of gpt-oss. llama.cpp stores its experts' gate and up projections apart, and all of them as (out, in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.models import gguf_common as common
from kvjax.models.gguf_common import Keys
from kvjax.types import GGUFMade, GGUFNames

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_PREFIX = "model.layers.{i}."
_EXPERTS = f"{_PREFIX}mlp.experts."
_STORED = "blk.{i}.ffn_"
_AS_THEY_ARE = {
    "blk.{i}.attn_sinks.weight": f"{_PREFIX}self_attn.sinks",
    f"{_STORED}down_exps.bias": f"{_EXPERTS}down_proj_bias",
}


def _tensors(arch: str, config: Mapping[str, Any]) -> dict[str, str]:
    return common.modules(_OUTER, _PREFIX, _INNER) | _AS_THEY_ARE


def _equal(gate: tuple[int, ...], up: tuple[int, ...]) -> tuple[int, ...]:
    if gate != up:
        raise ValueError("they differ")
    return gate


def _alternating_shape(gate: tuple[int, ...], up: tuple[int, ...]) -> tuple[int, ...]:
    experts, ffw, width = _equal(gate, up)
    return experts, width, 2 * ffw


def _alternating(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate and up (E, F, D) → (E, D, 2·F), their columns in turn."""
    experts, ffw, width = gate.shape
    return np.stack([gate, up], axis=2).reshape(experts, 2 * ffw, width).swapaxes(1, 2)


def _alternating_biases_shape(gate: tuple[int, ...], up: tuple[int, ...]) -> tuple[int, ...]:
    experts, ffw = _equal(gate, up)
    return experts, 2 * ffw


def _alternating_biases(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.stack([gate, up], axis=2).reshape(len(gate), 2 * gate.shape[1])


def _turned_shape(down: tuple[int, ...]) -> tuple[int, ...]:
    experts, width, ffw = down
    return experts, ffw, width


def _turned(down: np.ndarray) -> np.ndarray:
    return down.swapaxes(1, 2)


_MADE = {
    f"{_EXPERTS}gate_up_proj": GGUFMade(
        (f"{_STORED}gate_exps.weight", f"{_STORED}up_exps.weight"), _alternating_shape, _alternating
    ),
    f"{_EXPERTS}gate_up_proj_bias": GGUFMade(
        (f"{_STORED}gate_exps.bias", f"{_STORED}up_exps.bias"), _alternating_biases_shape, _alternating_biases
    ),
    f"{_EXPERTS}down_proj": GGUFMade((f"{_STORED}down_exps.weight",), _turned_shape, _turned),
}


def _config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    keys = Keys(metadata, arch)
    common.refuse_variants(keys)
    common.refuse_other_values(keys)
    return {
        **common.general(keys, "GptOssForCausalLM", "gpt_oss"),
        **common.sizes(keys),
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "sliding_window": keys.need("attention.sliding_window"),
        "layer_types": common.layer_types(keys, 2),
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }


def _rope_scaling(keys: Keys) -> dict[str, Any]:
    """OpenAI's YaRN does not round the ends of its ramp; llama.cpp rounds them, and its files do not say."""
    scaling = common.rope_scaling(keys)
    if scaling is None:
        return {"rope_type": "default"}  # no rope_scaling at all would mean that of the released models
    return scaling | {"truncate": False} if scaling["rope_type"] == "yarn" else scaling


GPT_OSS_GGUF = GGUFNames(architectures=("gpt-oss",), tensors=_tensors, config=_config, rows=common.in_order, made=_MADE)
"""The names of gpt-oss in GGUF files."""
