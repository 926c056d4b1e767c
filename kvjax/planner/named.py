"""Models that can be planned for by name: what their config.json says, as far as sizes depend on it.

The families read these as they read any config.json, so that weights and K and V are counted by the engine itself.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

Config = dict[str, Any]


def _gpt2(width: int, layers: int, heads: int, context: int = 1024) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": context,
    }


def _decoder(architecture: str, width: int, ffw: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": ffw,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _llama(*sizes: int, vocab: int = 32000, context: int = 2048, **more: Any) -> Config:
    return _decoder("Llama", *sizes, vocab_size=vocab, max_position_embeddings=context, **more)


def _llama3(*sizes: int, **more: Any) -> Config:
    return _llama(*sizes, vocab=128256, **{"context": 8192, "rope_theta": 500000.0, **more})


def _llama31(*sizes: int, factor: float = 8.0, **more: Any) -> Config:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama3(*sizes, context=131072, rope_scaling=rope, **more)


def _mistral(vocab: int, window: int | None, theta: float) -> Config:
    return _decoder(
        "Mistral", 4096, 14336, 32, 32, 8,
        vocab_size=vocab, max_position_embeddings=32768, sliding_window=window, rope_theta=theta,
    )  # fmt: skip


def _mixtral(*sizes: int, context: int) -> Config:
    return _decoder(
        "Mixtral", *sizes,
        vocab_size=32000, max_position_embeddings=context, rope_theta=1e6, sliding_window=None,
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def _qwen2(*sizes: int, vocab: int = 152064, context: int = 131072, tied: bool = False) -> Config:
    return _decoder(
        "Qwen2", *sizes,
        vocab_size=vocab, max_position_embeddings=context, rope_theta=1e6, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen3(*sizes: int, tied: bool = False) -> Config:
    return _decoder(
        "Qwen3", *sizes,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=tied,
    )  # fmt: skip


def _qwen3_moe(*sizes: int, expert_ffw: int) -> Config:
    return _decoder(
        "Qwen3Moe", *sizes,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6,
        moe_intermediate_size=expert_ffw, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip


def _gemma2(*sizes: int, head_dim: int, scalar: int) -> Config:
    return _decoder(
        "Gemma2", *sizes,
        head_dim=head_dim, query_pre_attn_scalar=scalar, vocab_size=256000, max_position_embeddings=8192,
        sliding_window=4096,
    )  # fmt: skip


def _gemma3(*sizes: int, head_dim: int = 256, scalar: int = 256, **more: Any) -> Config:
    return _decoder(
        "Gemma3", *sizes,
        **{
            "head_dim": head_dim, "query_pre_attn_scalar": scalar, "vocab_size": 262208,
            "max_position_embeddings": 131072, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **more,
        },
    )  # fmt: skip


def _deepseek(version: str, *sizes: int, vocab: int, mscale: float, **more: Any) -> Config:
    rope = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": mscale, "mscale_all_dim": mscale,
    }  # fmt: skip
    return _decoder(
        f"Deepseek{version}", *sizes,
        vocab_size=vocab, max_position_embeddings=163840, rope_scaling=rope, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, **more,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Config:
    return _decoder(
        "GptOss", 2880, 2880, layers, 64, 8,
        head_dim=64, vocab_size=201088, max_position_embeddings=131072, sliding_window=128,
        num_local_experts=experts, num_experts_per_tok=4,
    )  # fmt: skip


_DEEPSEEK_V3 = _deepseek(
    "V3", 7168, 18432, 61, 128, 128,
    vocab=129280, mscale=1.0, q_lora_rank=1536, moe_intermediate_size=2048, n_routed_experts=256,
    num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=3, n_group=8, topk_group=4,
    routed_scaling_factor=2.5,
)  # fmt: skip
_LLAMA_31_70B = _llama31(8192, 28672, 80, 64, 8)

# Sizes stand in the order of `_decoder`: width, ffw, layers, heads, kv heads.
CONFIGS: dict[str, Config] = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, vocab=49152, context=8192, rope_theta=1e5, tie_word_embeddings=True),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-3": _gpt2(12288, 96, 96, 2048),  # as a shape: 2005.14165, table 2.1
    "llama-1-7b": _llama(4096, 11008, 32, 32, 32),
    "llama-1-13b": _llama(5120, 13824, 40, 40, 40),
    "llama-1-30b": _llama(6656, 17920, 60, 52, 52),
    "llama-1-65b": _llama(8192, 22016, 80, 64, 64),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, context=4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, context=4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, context=4096),
    "llama-3-8b": _llama3(4096, 14336, 32, 32, 8),
    "llama-3-70b": _llama3(8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _llama31(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _LLAMA_31_70B,
    "llama-3.1-405b": _llama31(16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _llama31(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama31(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, tie_word_embeddings=True),
    "llama-3.3-70b": _LLAMA_31_70B,
    "mistral-7b-v0.1": _mistral(32000, 4096, 1e4),
    "mistral-7b-v0.3": _mistral(32768, None, 1e6),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 8, context=32768),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 8, context=65536),
    "qwen2-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "qwen2-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "qwen2-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2-72b": _qwen2(8192, 29568, 80, 64, 8),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, vocab=151936, context=32768, tied=True),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, expert_ffw=768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 94, 64, 4, expert_ffw=1536),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256, scalar=256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, head_dim=256, scalar=256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, scalar=144),
    "gemma-3-1b": _gemma3(
        1152, 6912, 26, 4, 1,
        vocab_size=262144, max_position_embeddings=32768, sliding_window=512, rope_scaling=None,
    ),
    "gemma-3-4b": _gemma3(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _gemma3(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _gemma3(5376, 21504, 62, 32, 16, head_dim=128, scalar=168),
    "deepseek-v2": _deepseek(
        "V2", 5120, 12288, 60, 128, 128,
        vocab=102400, mscale=0.707, q_lora_rank=1536, moe_intermediate_size=1536, n_routed_experts=160,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, topk_method="group_limited_greedy",
        n_group=8, topk_group=3, routed_scaling_factor=16.0,
    ),
    "deepseek-v2-lite": _deepseek(
        "V2", 2048, 10944, 27, 16, 16,
        vocab=102400, mscale=0.707, q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy",
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
"""Name → config.json."""

_ALIASES = {
    "default": "smollm2-135m",
    "smollm2": "smollm2-135m",
    "gpt2-small": "gpt2",
    "gpt-3-175b": "gpt-3",
    "llama-1-33b": "llama-1-30b",
    **{f"llama-{size}": f"llama-1-{size}" for size in ("7b", "13b", "30b", "33b", "65b")},
    "mistral-7b": "mistral-7b-v0.3",
    "qwen2.5-0.5b": "qwen2-0.5b",  # of the same shape, as are the next ones
    "qwen2.5-1.5b": "qwen2-1.5b",
    "qwen2.5-7b": "qwen2-7b",
    "qwen2.5-72b": "qwen2-72b",
    "deepseek-r1-0528": "deepseek-r1",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
}
_ALIASES["llama-33b"] = "llama-1-30b"

_TAIL = re.compile(r"-(hf|instruct|chat|base|it|pt|preview|instruct-v0\.\d)$")


def known_as(name: str) -> str | None:
    """The key of `CONFIGS` that a user means, or None: "Llama-3.1-70B-Instruct", "llama3_8b" and "gpt2" are found."""
    plain = _plain(name)
    for form in (plain, _TAIL.sub("", plain)):
        form = _ALIASES.get(form, form)
        if form in CONFIGS:
            return form
    return None


def _plain(name: str) -> str:
    """Lower case, dashes alone, and one between a family's name and its number."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).replace("meta-llama", "llama").replace("gpt-2", "gpt2")
    plain = re.sub(r"^(llama|gemma|mixtral|deepseek|gpt|qwen|mistral)-?(?=[0-9vr])", r"\1-", plain)
    return plain.replace("qwen-", "qwen").replace("gpt-2", "gpt2")


def nearest(name: str, count: int = 4) -> tuple[str, ...]:
    """The names of `CONFIGS` that are most like one that is not there."""
    return tuple(difflib.get_close_matches(_plain(name), CONFIGS, n=count, cutoff=0.5))
