"""GGUF names of what has Llama's form: Llama, Mistral, SmolLM3, Qwen 2 and 3, Phi-3 and Phi-4, Mixtral, Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import ModelError
from kvjax.models import gguf_common as common
from kvjax.models.gguf_common import Keys, Order
from kvjax.types import GGUFNames

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
"""Architecture → Hugging Face's class and model_type."""
_MIXTRAL = ("MixtralForCausalLM", "mixtral")  # llama.cpp counts it as "llama"
_PAIRED = ("llama", "mistral3", "smollm3")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PACKED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}  # Phi-3's, in Hugging Face's order too
_PREFIX = "model.layers.{i}."


def _tensors(arch: str, config: Mapping[str, Any]) -> dict[str, str]:
    if arch == "phi3":
        return common.modules(_OUTER, _PREFIX, _INNER | _PACKED)
    if arch == "qwen3moe":
        names = common.experts(("gate_proj", "up_proj", "down_proj"), f"{_PREFIX}mlp.experts")
        return common.modules(_OUTER, _PREFIX, _INNER | {"ffn_gate_inp": "mlp.gate"}) | names
    names = common.experts(("w1", "w3", "w2"), f"{_PREFIX}block_sparse_moe.experts")
    return common.modules(_OUTER, _PREFIX, _INNER | {"ffn_gate_inp": "block_sparse_moe.gate"}) | names


def _rows(arch: str, config: Mapping[str, Any]) -> dict[str, Order]:
    """For these, llama.cpp rotates neighbouring pairs, so its converter interleaves the rows of q and k."""
    if arch not in _PAIRED:
        return {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {
        f"self_attn.{module}.{part}": common.halves(count)
        for module, count in heads.items()
        for part in ("weight", "bias")
    }


def _config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    keys = Keys(metadata, arch)
    common.refuse_variants(keys)
    common.refuse_other_values(keys)
    mixture = bool(keys.get("expert_count", 0))
    if mixture and arch not in ("llama", "qwen3moe"):
        raise ModelError(f"This GGUF file is a mixture of experts ({arch!r}), which is not supported.")
    config = {
        **common.general(keys, *(_MIXTRAL if mixture and arch == "llama" else _CLASSES[arch])),
        **common.sizes(keys),
        "intermediate_size": keys.same("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.decimal("rope.freq_base", 10000.0),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "sliding_window": keys.get("attention.sliding_window") or None,  # 0 is Phi-4's
        "rope_scaling": common.rope_scaling(keys),
    }
    config |= common.partial_rotary(keys, config["head_dim"])
    if arch == "smollm3":
        config["no_rope_layer_interval"] = 4  # which the file does not say, and llama.cpp takes for granted
    if arch == "phi3":
        config["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length")
    return config | (_experts(keys, arch) if mixture else {})


def _experts(keys: Keys, arch: str) -> dict[str, Any]:
    """Fields of a mixture, which every layer is. Where the file says nothing, weights of experts add up to 1."""
    count, chosen = keys.need("expert_count"), keys.need("expert_used_count")
    if arch == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": chosen}
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm", True),
    }


LLAMA_GGUF = GGUFNames(architectures=tuple(_CLASSES), tensors=_tensors, config=_config, rows=_rows, made={})
"""The names of the Llama family in GGUF files."""
