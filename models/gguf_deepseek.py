"""GGUF names of DeepSeek-V2 and V3, and of what shares their architecture there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.errors import ModelError
from kvjax.models import gguf_common as common
from kvjax.models.gguf_common import Keys
from kvjax.types import GGUFMade, GGUFNames

_SECOND, _THIRD = ("DeepseekV2ForCausalLM", "deepseek_v2"), ("DeepseekV3ForCausalLM", "deepseek_v3")
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # in files before April 2025
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_PREFIX = "model.layers.{i}."
_CORRECTION = {"blk.{i}.exp_probs_b.bias": f"{_PREFIX}mlp.gate.e_score_correction_bias"}


def _tensors(arch: str, config: Mapping[str, Any]) -> dict[str, str]:
    experts = common.experts(("gate_proj", "up_proj", "down_proj"), f"{_PREFIX}mlp.experts")
    return common.modules(_OUTER, _PREFIX, _INNER) | experts | _CORRECTION


def _both_shape(k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, ...]:
    heads, latent, nope = k
    same, value, rank = v
    if (same, rank) != (heads, latent):
        raise ValueError("they are of different heads or latents")
    return heads * (nope + value), latent


def _both(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The projection from the latent: k (N, C, nope) and v (N, value, C) → (N·(nope + value), C), head by head."""
    return np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, v.shape[-1])


def _config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """GGUF metadata → config.json fields.

    Files of DeepSeek-V3 before October 2025 do not say that experts are chosen by groups; they are read, as llama.cpp
    reads them, as if they were not.
    """
    keys = Keys(metadata, arch)
    common.refuse_variants(keys)
    third = keys.get("expert_gating_func", _SOFTMAX) == _SIGMOID
    if not third and keys.get("expert_gating_func", _SOFTMAX) not in (0, _SOFTMAX):
        raise ModelError(f"This GGUF file sets {arch}.expert_gating_func to another than softmax or sigmoid.")
    rotated = keys.need("rope.dimension_count")
    config = {
        **common.general(keys, *(_THIRD if third else _SECOND)),
        **common.sizes(keys),
        "intermediate_size": keys.same("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "attention_bias": keys.has("blk.0.attn_kv_a_mqa.bias"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": (keys.get("attention.key_length_mla") or keys.need("attention.key_length")) - rotated,
        "v_head_dim": keys.get("attention.value_length_mla") or keys.need("attention.value_length"),
        **_experts(keys, third),
    }
    del config["head_dim"], config["num_key_value_heads"]  # of the latent, which llama.cpp counts as a head
    return config


def _experts(keys: Keys, third: bool) -> dict[str, Any]:
    groups = keys.get("expert_group_count", 1)
    return {
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "n_routed_experts": keys.get("expert_count"),
        "num_experts_per_tok": keys.get("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "routed_scaling_factor": keys.decimal("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "scoring_func": "sigmoid" if third else "softmax",
        "topk_method": "noaux_tc" if third else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", 1),
    }


def _rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """With DeepSeek's scale of the softmax, stored as a tenth; its other scale equals it in all models there are."""
    metadata = {key: value for key, value in keys.metadata.items() if key != f"{keys.arch}.{_LOG_MULTIPLIER}"}
    scaling = common.rope_scaling(keys._replace(metadata=metadata))
    if scaling is None or not keys.get(_LOG_MULTIPLIER):
        return scaling
    scale = round(10 * keys.decimal(_LOG_MULTIPLIER), 6)
    return scaling | {"mscale": scale, "mscale_all_dim": scale}


DEEPSEEK_GGUF = GGUFNames(
    architectures=("deepseek2",),
    tensors=_tensors,
    config=_config,
    rows=common.in_order,
    made={
        f"{_PREFIX}self_attn.kv_b_proj.weight": GGUFMade(
            ("blk.{i}.attn_k_b.weight", "blk.{i}.attn_v_b.weight"), _both_shape, _both
        )
    },
)
"""The names of the DeepSeek family in GGUF files."""
