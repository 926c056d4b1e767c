"""GGUF names of the families with layer norms: GPT-2, GPT-NeoX, Falcon, BLOOM, MPT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.errors import ModelError
from kvjax.models import gguf_common as common
from kvjax.models.gguf_common import Keys, Order
from kvjax.types import GGUFMade, GGUFNames

Names = Mapping[str, Any]
"""Parameter → Hugging Face's module, as each family has it for its checkpoints; "{i}" stands for the layer."""

_THEIRS = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "positions": "position_embd",
    "attn_norm": "blk.{i}.attn_norm",
    "qkv": "blk.{i}.attn_qkv",
    "out": "blk.{i}.attn_output",
    "mlp_norm": "blk.{i}.ffn_norm",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "final_norm": "output_norm",
    "unembed": "output",
}
"""Parameter → GGUF's module."""


def _modules(names: Names, theirs: Mapping[str, str] = _THEIRS) -> dict[str, str]:
    return common.modules({theirs[key]: name for key, name in names.items()}, "", {})


def _of_config(keys: Keys, architecture: str, model_type: str) -> dict[str, Any]:
    """Fields that these families have under the same names."""
    common.refuse_variants(keys)
    return {
        **common.general(keys, architecture, model_type),
        "layer_norm_epsilon": keys.decimal("attention.layer_norm_epsilon"),
    }


def _only_query_heads(keys: Keys) -> int:
    """N, of a model whose queries have a key each."""
    heads = keys.same("attention.head_count")
    if keys.same("attention.head_count_kv", heads) != heads:
        raise ModelError(f"This GGUF file has fewer key heads than query heads ({keys.arch}), which is not supported.")
    return heads


# --- GPT-2 --------------------------------------------------------------------------------------------------------


def gpt2(names: Names) -> GGUFNames:
    """Hugging Face stores the layers' matrices (in, out); llama.cpp's converter turns them around."""

    def config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
        keys = Keys(metadata, arch)
        return {
            **_of_config(keys, "GPT2LMHeadModel", "gpt2"),
            "n_embd": keys.need("embedding_length"),
            "n_layer": keys.layers(),
            "n_head": _only_query_heads(keys),
            "n_inner": keys.same("feed_forward_length"),
            "n_positions": metadata["tensor_shapes"]["position_embd.weight"][0],
            "activation_function": "gelu_new",
        }

    matrices = ("qkv", "out", "up", "down")
    made = {f"{names[key]}.weight": _turned(f"{_THEIRS[key]}.weight") for key in matrices}
    return GGUFNames(("gpt2",), lambda arch, config: _modules(names), config, common.in_order, made)


def _turned(stored: str) -> GGUFMade:
    return GGUFMade((stored,), shape=lambda shape: shape[::-1], make=np.transpose, whole=True)


# --- GPT-NeoX -----------------------------------------------------------------------------------------------------


def neox(names: Names) -> GGUFNames:
    """The files do not name the activation: it is taken for "gelu", which all of EleutherAI's have."""

    def config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
        keys = Keys(metadata, arch)
        width, heads = keys.need("embedding_length"), _only_query_heads(keys)
        return {
            **_of_config(keys, "GPTNeoXForCausalLM", "gpt_neox"),
            "layer_norm_eps": keys.decimal("attention.layer_norm_epsilon"),
            "hidden_size": width,
            "num_hidden_layers": keys.layers(),
            "num_attention_heads": heads,
            "intermediate_size": keys.same("feed_forward_length"),
            "max_position_embeddings": keys.need("context_length"),
            "hidden_act": "gelu",
            "rotary_pct": common.share(keys.get("rope.dimension_count", width // heads), width // heads),
            "rotary_emb_base": keys.decimal("rope.freq_base", 10000.0),
            "rope_scaling": common.rope_scaling(keys),
            "use_parallel_residual": keys.get("use_parallel_residual", True),
            "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        }

    return GGUFNames(("gptneox",), lambda arch, config: _modules(names), config, _heads_of(names), {})


def _heads_of(names: Names) -> Callable[[str, Mapping[str, Any]], Mapping[str, Order]]:
    """`GGUFNames.rows`, where Hugging Face has q, k and v of each head together."""

    def rows(arch: str, config: Mapping[str, Any]) -> dict[str, Order]:
        return _qkv_rows(names, common.by_head(config["num_attention_heads"]))

    return rows


def _qkv_rows(names: Names, order: Order) -> dict[str, Order]:
    suffix = names["qkv"].split("{i}")[-1]
    return {f"{suffix}.{part}": order for part in ("weight", "bias")}


# --- Falcon -------------------------------------------------------------------------------------------------------


def falcon(names: Names, two_norms: Names) -> GGUFNames:
    """`two_norms`: names where attention and feed-forward have a norm each (40B)."""
    second = _THEIRS | {"attn_norm": "blk.{i}.attn_norm_2", "mlp_norm": "blk.{i}.attn_norm"}

    def config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
        keys = Keys(metadata, arch)
        kv_heads = keys.same("attention.head_count_kv", keys.same("attention.head_count"))
        norms = 2 if keys.has("blk.0.attn_norm_2.weight") else 1
        return {
            **_of_config(keys, "FalconForCausalLM", "falcon"),
            "hidden_size": keys.need("embedding_length"),
            "num_hidden_layers": keys.layers(),
            "num_attention_heads": keys.same("attention.head_count"),
            "num_kv_heads": kv_heads,
            "ffn_hidden_size": keys.same("feed_forward_length"),
            "max_position_embeddings": keys.need("context_length"),
            "activation": "gelu",
            "rope_theta": keys.decimal("rope.freq_base", 10000.0),
            "rope_scaling": common.rope_scaling(keys),
            "parallel_attn": True,
            "new_decoder_architecture": norms == 2 or kv_heads > 1,
            "multi_query": kv_heads == 1,
            "num_ln_in_parallel_attn": norms,
            "bias": keys.has("blk.0.attn_qkv.bias"),
        }

    def tensors(arch: str, config: Mapping[str, Any]) -> dict[str, str]:
        return _modules(two_norms, second) if config["num_ln_in_parallel_attn"] == 2 else _modules(names)

    def rows(arch: str, config: Mapping[str, Any]) -> dict[str, Order]:
        return _qkv_rows(names, common.by_group(config["num_attention_heads"], config["num_kv_heads"]))

    return GGUFNames(("falcon",), tensors, config, rows, {})


# --- BLOOM and MPT ------------------------------------------------------------------------------------------------


def bloom(names: Names) -> GGUFNames:
    def config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
        keys = Keys(metadata, arch)
        heads = _only_query_heads(keys)
        return {
            **_of_config(keys, "BloomForCausalLM", "bloom"),
            "hidden_size": keys.need("embedding_length"),
            "n_layer": keys.layers(),
            "n_head": heads,
            "num_attention_heads": heads,
            "seq_length": keys.need("context_length"),
        }

    return GGUFNames(("bloom",), lambda arch, config: _modules(names), config, _heads_of(names), {})


def mpt(names: Names) -> GGUFNames:
    def config(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
        keys = Keys(metadata, arch)
        steepest = keys.decimal("attention.max_alibi_bias", 0.0)
        attention = {
            "alibi": steepest > 0,
            "alibi_bias_max": (int(steepest) if steepest == int(steepest) else steepest) or None,
            "clip_qkv": keys.get("attention.clamp_kqv") and keys.decimal("attention.clamp_kqv"),
            "qk_ln": keys.has("blk.0.attn_q_norm.weight"),
        }
        return {
            **_of_config(keys, "MptForCausalLM", "mpt"),
            "d_model": keys.need("embedding_length"),
            "n_layers": keys.layers(),
            "n_heads": _only_query_heads(keys),
            "max_seq_len": keys.need("context_length"),
            "no_bias": not keys.has("blk.0.attn_qkv.bias"),
            "attn_config": attention,
        }

    return GGUFNames(("mpt",), lambda arch, config: _modules(names), config, common.in_order, {})
