"""How llama.cpp's GGUF files name the tensors and hyper-parameters of the Llama-like families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.errors import ModelError
from kvjax.types import GGUFNames

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Architecture → Hugging Face's class and model_type."""

_UNSUPPORTED = (
    "attention.temperature_scale",
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
)
"""Keys by which other models, under the same architecture name, change the mathematics."""

_LAYER_MODULES = {
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
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
} | {
    f"blk.{{i}}.{theirs}.{part}": f"model.layers.{{i}}.{ours}.{part}"
    for theirs, ours in _LAYER_MODULES.items()
    for part in ("weight", "bias")
}


def _permuted(arch: str) -> Mapping[str, str]:
    """llama.cpp rotates neighbouring pairs for these two, so its converter interleaves the rows of q and k."""
    if arch not in ("llama", "mistral3"):
        return {}
    return {
        f"self_attn.{module}.{part}": field
        for module, field in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))
        for part in ("weight", "bias")
    }


def _config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """GGUF metadata → config.json fields.

    Next to the file's own keys, `metadata` has "tensor_shapes" (GGUF name → row-major shape) and, where the file
    has such tensors, "rope_freqs.weight", "rope_factors_long.weight" and "rope_factors_short.weight" as lists of
    floats.

    Llama 3 files carry the divisors of their rotary frequencies ready computed, and not the four numbers that
    Hugging Face computes them from: they become
    `rope_scaling={"rope_type": "factors", "divisors": [H / 2 floats]}`, which `positions.rope_from_hf` reads:
    inverse_frequency / divisors, with no scaling of the attention.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        return metadata[f"{arch}.{key}"]

    _refuse_variants(metadata, arch)
    shapes = metadata["tensor_shapes"]
    heads = _same(need("attention.head_count"), "attention.head_count")
    head_dim = get("attention.key_length", need("embedding_length") // heads)
    architecture, model_type = _CLASSES[arch]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same(get("attention.head_count_kv", heads), "attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": _same(need("feed_forward_length"), "feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(get("rope.freq_base", 10000.0)),
        "max_position_embeddings": need("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "sliding_window": get("attention.sliding_window"),
        "rope_scaling": _rope_scaling(metadata, arch),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if get("rope.dimension_count", head_dim) != head_dim:
        config["partial_rotary_factor"] = get("rope.dimension_count") / head_dim
    return config


def _refuse_variants(metadata: Mapping[str, Any], arch: str) -> None:
    """Models that share the architecture's name but not its mathematics."""
    if metadata.get(f"{arch}.expert_count", 0):
        raise ModelError(f"This GGUF file is a mixture of experts ({arch!r}), which is not supported.")
    for key in _UNSUPPORTED:
        if metadata.get(f"{arch}.{key}"):
            raise ModelError(f"This GGUF file sets {arch}.{key}, which is not supported.")
    if metadata.get(f"{arch}.attention.value_length") != metadata.get(f"{arch}.attention.key_length"):
        raise ModelError("This GGUF file has keys and values of different sizes, which is not supported.")


def _same(value: Any, key: str) -> int:
    """A field that may be given once per layer, where all layers must agree."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"This GGUF file has a different {key} in every layer, which is not supported.")
    return value[0]


def _decimal(value: float) -> float:
    """The decimal that was stored as a float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(metadata: Mapping[str, Any], arch: str) -> dict[str, Any] | None:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.rope.scaling.{key}", default)

    if "rope_freqs.weight" in metadata:
        return {"rope_type": "factors", "divisors": metadata["rope_freqs.weight"]}
    original = get("original_context_length")
    if "rope_factors_long.weight" in metadata:
        fields = {
            "rope_type": "longrope",
            "long_factor": metadata["rope_factors_long.weight"],
            "short_factor": metadata["rope_factors_short.weight"],
            "original_max_position_embeddings": original,
            "attention_factor": get("attn_factor"),
        }
        return {key: value for key, value in fields.items() if value is not None}
    factor = get("factor", metadata.get(f"{arch}.rope.scale_linear"))
    kind = get("type", "linear" if factor else "none")
    if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(f"This GGUF file scales its rotary embedding by {kind!r}, which is not supported.")
    return _yarn(factor, original, get)


def _yarn(factor: float, original: int | None, get: Any) -> dict[str, Any]:
    if get("yarn_log_multiplier"):
        raise ModelError("This GGUF file sets rope.scaling.yarn_log_multiplier, which is not supported.")
    fields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": get("yarn_beta_fast"),
        "beta_slow": get("yarn_beta_slow"),
    }
    if get("attn_factor", 1.0) != 1.0:  # llama.cpp multiplies YaRN's own factor, Hugging Face replaces it
        fields["attention_factor"] = get("attn_factor") * (0.1 * math.log(factor) + 1.0)
    return {key: value for key, value in fields.items() if value is not None}


LLAMA_GGUF = GGUFNames(architectures=tuple(_CLASSES), tensors=_TENSORS, config=_config, permuted=_permuted)
"""The names of Llama, Mistral, Qwen 2 and Qwen 3 in GGUF files."""
