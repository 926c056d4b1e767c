"""The golden models as GGUF files, in float32: names from the gguf package, keys and layout as llama.cpp's converter
writes them. scripts/check_gguf.py runs these files in llama.cpp, so that they are more than our own idea of the format.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import golden_families
import numpy as np
from golden_models import SPECIALS, tokenizer

Config = Mapping[str, Any]
Weights = Mapping[str, np.ndarray]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "SmolLM3ForCausalLM": "smollm3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
    "FalconForCausalLM": "falcon",
    "BloomForCausalLM": "bloom",
    "MptForCausalLM": "mpt",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
}
"""Hugging Face's class → llama.cpp's architecture. OPT and XGLM have none."""

NOT_THERE = ("falcon_sequential",)
"""llama.cpp's Falcon has attention and feed-forward side by side only."""

UNSAID: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 2},
    "smollm3_window": {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    "mixtral_window": {"sliding_window": 8},
    "qwen3_moe_step": {"norm_topk_prob": False},
    "gemma2": {"query_pre_attn_scalar": 40},
    "gemma3": {"query_pre_attn_scalar": 20},
    "gpt2_flags": {
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
    },
    "neox_sequential": {"hidden_act": "gelu_new"},
    "bloom_normed": {"apply_residual_connection_post_layernorm": True},
    "mpt_flags": {"attn_config": {"softmax_scale": 0.4}},
}
"""What a GGUF file has no key for, and llama.cpp takes for granted to be otherwise: name → fields of config.json."""

ADAPTED = ("qwen3_moe", "qwen3_moe_step")
"""llama.cpp's Qwen3-MoE has no dense layers, so theirs become sparse: these models are not those of the goldens."""

NAMES = tuple(
    name
    for name, (_, architecture, _) in golden_families.CONFIGS.items()
    if architecture in ARCHITECTURES and name not in NOT_THERE
)


def model(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and the weights of a golden model, in a form that GGUF has; see `ADAPTED`."""
    config, weights = golden_families.config(name), golden_families.of(name)
    return _all_sparse(config, weights) if name in ADAPTED else (config, weights)


def _all_sparse(config: Config, weights: Weights) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The dense layers of a Qwen3-MoE get the experts of a sparse one."""
    sparse = next(key.split(".mlp.")[0] for key in weights if ".mlp.experts." in key)
    experts = {key.split(".mlp.")[1]: value for key, value in weights.items() if key.startswith(f"{sparse}.mlp.")}
    kept = {
        key: value for key, value in weights.items() if ".mlp." not in key or ".mlp.gate." in key or ".experts." in key
    }
    for layer in range(config["num_hidden_layers"]):
        kept = {f"model.layers.{layer}.mlp.{key}": value for key, value in experts.items()} | kept
    return {key: value for key, value in config.items() if key not in ("mlp_only_layers", "decoder_sparse_step")}, kept


def with_unsaid(name: str, config: Config) -> dict[str, Any]:
    """The config.json that a reader made of the file of a golden model, completed by `UNSAID`."""
    said = dict(config)
    for key, value in UNSAID.get(name, {}).items():
        said[key] = {**said[key], **value} if isinstance(value, dict) else value
    return said


def write(name: str, path: pathlib.Path, **how: Any) -> pathlib.Path:
    """Writes the GGUF file of a golden model; `how` as for `write_model`."""
    return write_model(*model(name), path, **how)


def write_model(config: Config, weights: Weights, path: pathlib.Path, extra: Mapping[str, Any] | None = None) -> Any:
    """Writes a GGUF file and returns its path.

    Args:
      config: fields of config.json.
      weights: tensors by Hugging Face name.
      path: of the file.
      extra: further keys, without the architecture, that replace those written otherwise; None leaves one out.
    """
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in ({**_KEYS[arch](config), **(extra or {})}).items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    _add_tokenizer(writer, config)
    for key, value in stored(arch, config, weights).items():
        writer.add_tensor(key, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds[str] = writer.add_string
    kinds.get(type(value), writer.add_array)(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, config: Config) -> None:
    found = json.loads(tokenizer().to_str())["model"]
    entries = sorted(found["vocab"], key=lambda entry: found["vocab"][entry])
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(entries)
    writer.add_token_types([kinds.CONTROL if entry in SPECIALS else kinds.NORMAL for entry in entries])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in found["merges"]])
    for add, field in (
        (writer.add_bos_token_id, "bos_token_id"),
        (writer.add_eos_token_id, "eos_token_id"),
        (writer.add_pad_token_id, "pad_token_id"),
    ):
        add(config[field])


# --- tensors ------------------------------------------------------------------------------------------------------


def stored(arch: str, config: Config, weights: Weights) -> dict[str, np.ndarray]:
    """GGUF tensor name → row-major array."""
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    known = gguf.get_tensor_name_map(kind, layers)
    found = dict(_factors(config))
    for name, value in _stacked(weights).items():
        for new, part in _converted(arch, config, name, value):
            theirs = known.get_name(new, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, f"the gguf package has no name for {new} of {arch}"
            found[theirs] = part
    return found


def _stacked(weights: Weights) -> dict[str, np.ndarray]:
    """Experts that are stored one by one, as one tensor each."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if one is None:
            found[name] = value
        else:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = value
    return found | {name: np.stack([parts[e] for e in range(len(parts))]) for name, parts in experts.items()}


def _factors(config: Config) -> Iterator[tuple[str, np.ndarray]]:
    scaling = config.get("rope_scaling") or {}
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            yield f"rope_factors_{kind}.weight", np.asarray(scaling[f"{kind}_factor"], np.float32)


def _converted(arch: str, config: Config, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What the converter makes of one tensor, under names that the gguf package knows."""
    if arch in ("llama", "smollm3") and re.search(r"\.[qk]_proj\.", name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        value = value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
    elif arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        value = value + np.float32(1)
    elif arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        value = value.T
    elif "query_key_value" in name:
        value = _query_key_value(arch, config, value)
    elif name.endswith("kv_b_proj.weight"):
        yield from _kv_b(config, name, value)
        return
    elif arch == "gpt-oss" and ".experts." in name:
        yield from _gpt_oss_experts(name, value)
        return
    if arch == "bloom":
        name = name.removeprefix("transformer.")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield (f"{name}.weight" if name.endswith("sinks") else name), value


def _query_key_value(arch: str, config: Config, value: np.ndarray) -> np.ndarray:
    """Rows of q, then of k, then of v."""
    heads = config["n_head" if "n_head" in config else "num_attention_heads"]
    if arch != "falcon":
        split = value.reshape(heads, 3, len(value) // heads // 3, -1)
        return np.concatenate([split[:, j] for j in range(3)]).reshape(value.shape)
    kv_heads = _falcon_kv_heads(config)
    split = value.reshape(kv_heads, heads // kv_heads + 2, config["hidden_size"] // heads, -1)
    parts = [split[:, :-2], split[:, -2], split[:, -1]]
    return np.concatenate([part.reshape(-1, value.shape[-1]) for part in parts])


def _kv_b(config: Config, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    nope = config["qk_nope_head_dim"]
    split = value.reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
    yield name.replace("kv_b_proj", "k_b_proj"), split[:, :nope].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), split[:, nope:]


def _gpt_oss_experts(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    module, kind = (name[: -len("_bias")], "bias") if name.endswith("_bias") else (name, "weight")
    value = value if kind == "bias" else value.swapaxes(1, 2)
    if module.endswith("down_proj"):
        yield f"{module}.{kind}", value
    else:
        yield module.replace("gate_up_proj", f"gate_proj.{kind}"), value[:, ::2]
        yield module.replace("gate_up_proj", f"up_proj.{kind}"), value[:, 1::2]


# --- keys ---------------------------------------------------------------------------------------------------------


def _base(config: Config) -> dict[str, Any]:
    """Keys that the converter writes for every model whose class does not say otherwise."""
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    whole, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": whole.get("rope_theta", config.get("rope_theta")),
        "rope.freq_base_swa": local.get("rope_theta", config.get("rope_local_base_freq")),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}.get(config.get("scoring_func", "")),
        **_scaling(whole),
    }


def _scaling(rope: Config) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
    }


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama(config: Config) -> dict[str, Any]:
    return _base(config) | {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_dim(config)}


def _qwen3moe(config: Config) -> dict[str, Any]:
    return _base(config) | {"expert_feed_forward_length": config["moe_intermediate_size"]}


def _phi3(config: Config) -> dict[str, Any]:
    longest, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    stretch = longest / original
    factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return _base(config) | {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor,
        "rope.dimension_count": int(config.get("partial_rotary_factor", 1.0) * _head_dim(config)),
        "attention.sliding_window": config.get("sliding_window") or 0,
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return _base(config) | {
        "rope.freq_base": None,
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3(config: Config) -> dict[str, Any]:
    kinds = config.get("layer_types")
    slides = None if kinds is None else [kind == "sliding_attention" for kind in kinds]
    return _base(config) | {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides or config["sliding_window_pattern"],
    }


def _deepseek2(config: Config) -> dict[str, Any]:
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    scale = (config.get("rope_scaling") or {}).get("mscale_all_dim")
    return _base(config) | {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": scale and 0.1 * scale,
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    return _base(config) | {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": config.get("n_inner", 4 * config["n_embd"]),
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": 1e-5,
    }


def _gptneox(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": int(config["rotary_pct"] * _head_dim(config)),
        "attention.head_count": config["num_attention_heads"],
        "use_parallel_residual": config.get("use_parallel_residual", True),
        "attention.layer_norm_epsilon": 1e-5,
        **_scaling(config.get("rope_scaling") or {}),
    }


def _falcon_kv_heads(config: Config) -> int:
    return config.get("num_kv_heads", 1)


def _falcon(config: Config) -> dict[str, Any]:
    return {
        "context_length": config["max_position_embeddings"],
        "tensor_data_layout": "jploski",
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("ffn_hidden_size", 4 * config["hidden_size"]),
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": _falcon_kv_heads(config),
        "attention.layer_norm_epsilon": 1e-5,
    }


def _bloom(config: Config) -> dict[str, Any]:
    return {
        "context_length": config.get("seq_length", 2048),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 4 * config["hidden_size"],
        "block_count": config["n_layer"],
        "attention.head_count": config["n_head"],
        "attention.head_count_kv": config["n_head"],
        "attention.layer_norm_epsilon": 1e-5,
    }


def _mpt(config: Config) -> dict[str, Any]:
    attention = config["attn_config"]
    return {
        "context_length": config["max_seq_len"],
        "embedding_length": config["d_model"],
        "block_count": config["n_layers"],
        "feed_forward_length": 4 * config["d_model"],
        "attention.head_count": config["n_heads"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": attention.get("clip_qkv"),
        "attention.max_alibi_bias": float(attention.get("alibi_bias_max", 8)),
    }


_KEYS = {
    "llama": _llama,
    "smollm3": _llama,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
}
