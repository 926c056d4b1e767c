"""Tiny models of every family, rebuilt from seeds: the weights behind tests/goldens/families/*.npz.

The names and shapes of the tensors are those that transformers writes for these configs; they lie in the goldens
(scripts/make_family_goldens.py), with the seed. The configs together turn on every option that a family implements.
"""

from __future__ import annotations

import functools
import json
import pathlib
import zlib
from typing import Any

import numpy as np
from golden_models import CHAT_TEMPLATE, SPECIALS, VOCABULARY, tokenizer
from safetensors.numpy import save_file

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "families"

_COMMON = {"vocab_size": VOCABULARY, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
_DEEPSEEK = _LLAMA | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}
_NEOX = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
_PHI3 = _LLAMA | {"num_hidden_layers": 2, "original_max_position_embeddings": 4, "pad_token_id": 3}


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 1.5 * i for i in range(pairs)],
    }


CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_yarn": ("llama", "LlamaForCausalLM", _LLAMA | {"rope_scaling": _YARN}),
    "llama_linear": ("llama", "LlamaForCausalLM", _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral_nemo": ("mistral", "MistralForCausalLM", _LLAMA | {"head_dim": 24, "sliding_window": None}),
    "smollm3": (
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "smollm3_window": (
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "mixtral": ("mixtral", "MixtralForCausalLM", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "mixtral",
        "MixtralForCausalLM",
        _LLAMA | {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _LLAMA
        | {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        }
        | {"norm_topk_prob": True},
    ),
    "qwen3_moe_step": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _LLAMA
        | {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "phi3_long": (
        "phi3",
        "Phi3ForCausalLM",
        _PHI3 | {"partial_rotary_factor": 0.5, "rope_scaling": _longrope(4)},
    ),
    "phi3_short": (
        "phi3",
        "Phi3ForCausalLM",
        _PHI3
        | {"num_key_value_heads": 4, "original_max_position_embeddings": 256, "rope_scaling": _longrope(8)}
        | {"sliding_window": 12},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        _LLAMA
        | {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 4.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LLAMA
        | {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 8, "sliding_window_pattern": 3}
        | {"query_pre_attn_scalar": 20, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": True},
    ),
    "gemma3_new": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {key: value for key, value in _LLAMA.items() if key != "rope_theta"}
        | {"head_dim": 16, "sliding_window": 8, "attention_bias": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "query_pre_attn_scalar": 16}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            }
        },
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", _GPT2),
    "gpt2_flags": (
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2
        | {"n_inner": 80, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True}
        | {"scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "opt": (
        "opt",
        "OPTForCausalLM",
        {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 96}
        | {"max_position_embeddings": 128},
    ),
    "opt_plain": (
        "opt",
        "OPTForCausalLM",
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 96}
        | {"max_position_embeddings": 128, "enable_bias": False, "tie_word_embeddings": False},
    ),
    "neox": ("gpt_neox", "GPTNeoXForCausalLM", _NEOX),
    "neox_sequential": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}
        | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "falcon_7b": ("falcon", "FalconForCausalLM", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon_40b": (
        "falcon",
        "FalconForCausalLM",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon_sequential": (
        "falcon",
        "FalconForCausalLM",
        _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "bloom": ("bloom", "BloomForCausalLM", {"hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "bloom_normed": (
        "bloom",
        "BloomForCausalLM",
        {"hidden_size": 64, "n_layer": 2, "n_head": 8, "apply_residual_connection_post_layernorm": True},
    ),
    "mpt": (
        "mpt",
        "MptForCausalLM",
        {"d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256, "attn_config": {"alibi": True}},
    ),
    "mpt_flags": (
        "mpt",
        "MptForCausalLM",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
        | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 0.7, "softmax_scale": 0.4}},
    ),
    "xglm": (
        "xglm",
        "XGLMForCausalLM",
        {"d_model": 48, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 256}
        | {"pad_token_id": 1},
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "greedy"}
        | {"rope_scaling": _YARN | {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _DEEPSEEK
        | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 4.0, "attention_bias": True, "mlp_bias": False, "num_hidden_layers": 2},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK
        | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "topk_method": "noaux_tc"}
        | {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_scaling": _YARN | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        _LLAMA
        | {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 8, "num_local_experts": 6, "attention_bias": True}
        | {"num_experts_per_tok": 3, "rope_theta": 150000.0, "hidden_size": 64, "intermediate_size": 64}
        | {"rope_scaling": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    ),
}
"""Name → model_type, architecture, fields of config.json."""
NAMES = tuple(CONFIGS)


def config(name: str) -> dict[str, Any]:
    """The contents of the model's config.json, as hubs have it."""
    model_type, architecture, fields = CONFIGS[name]
    return {"architectures": [architecture], "model_type": model_type, **_COMMON, **fields}


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """What scripts/make_family_goldens.py wrote."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


def tensors(name: str, shapes: dict[str, list[int]], seed: int) -> dict[str, np.ndarray]:
    """The weights of a model of this name, float32, by Hugging Face tensor name."""
    return {key: _tensor(name, seed, key, tuple(shape)) for key, shape in shapes.items()}


def of(name: str) -> dict[str, np.ndarray]:
    """The weights of a golden model; raises if they are not those that transformers ran."""
    made = golden(name)
    found = tensors(name, json.loads(str(made["shapes"])), int(made["seed"]))
    assert checksum(found) == int(made["checksum"]), f"{name}: other weights than those of the golden"
    return found


def checksum(weights: dict[str, np.ndarray]) -> int:
    """CRC-32 of all weights in name order."""
    crc = 0
    for key, value in sorted(weights.items()):
        crc = zlib.crc32(value.astype("<f4").tobytes(), zlib.crc32(key.encode(), crc))
    return crc


def write_checkpoint(
    name: str, folder: str | pathlib.Path, weights: dict[str, np.ndarray] | None = None
) -> pathlib.Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name), indent=2))
    save_file(of(name) if weights is None else weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "pad_token": SPECIALS[3]},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def _tensor(name: str, seed: int, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform values of PCG64, a stream that NumPy keeps across versions as it may not the normal's."""
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(key.encode())]))
    center, deviation = _scale(name, key, shape)
    return (center + deviation * np.sqrt(12) * (rng.random(shape) - 0.5)).astype(np.float32)


_EMBEDDINGS = ("embed_tokens", "wte.", "embed_in", "word_embeddings.", "wpe.", "embed_positions")
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense.", "down_proj", "dense_4h_to_h", "fc2", ".w2.")
_ROUTERS = ("mlp.gate.", "block_sparse_moe.gate.", "router.")


def _scale(name: str, key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation such that attention is uneven and logits are spread over several units."""
    if len(shape) == 1:
        if "sinks" in key:
            return 0.0, 1.0
        if key.endswith("bias"):
            # Where the embedding is tied, large constants would make one token win everywhere.
            tied = name.startswith(("bloom", "xglm", "opt", "gpt2"))
            return 0.0, 0.1 if "correction" in key else 0.04 if tied else 0.3
        if "word_embeddings_layernorm" in key:
            return 0.3, 0.06
        return (0.0 if name.startswith("gemma") else 1.0), 0.2  # Gemma's gains are 1 + weight
    if key.endswith("_bias"):  # of experts, one row each
        return 0.0, 0.3
    if any(part in key for part in _EMBEDDINGS):  # small beside what the layers add: tied logits would repeat the input
        return 0.0, 0.05 if name.startswith(("gemma", "xglm")) else 0.3  # those two scale it up by √D
    inner = shape[-2] if "c_attn" in key or "c_proj" in key or "c_fc" in key or len(shape) == 3 else shape[-1]
    if key.startswith(("lm_head", "embed_out")) or any(part in key for part in _ROUTERS):
        gain = 3.0
    else:
        gain = 1.5
        if any(part in key for part in _OUTPUTS):
            gain = 4.0 if name.startswith(("bloom", "xglm", "opt")) else 2.0
    return 0.0, gain / float(np.sqrt(inner))
