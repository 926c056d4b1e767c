"""Six tiny models of the Llama form, rebuilt from seeds: the weights behind tests/goldens/tiny_*.npz.

The goldens hold what transformers computes with these very arrays (scripts/make_goldens.py); tests rebuild them
here without torch. Each model turns on what the others leave off: grouped heads, tied embeddings, Llama 3's RoPE, a
sliding window, biases of q, k and v, norms of q and k, a head dim that is not D/N, biases everywhere.

NumPy, safetensors and tokenizers only.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 320
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "tiny_llama": {},
    "tiny_llama_tied_rope": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            # L0 = 32 puts one pair of eight in each of the kept and the blended band: most of them are scaled.
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "tiny_mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 8,
    },
    "tiny_qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "head_dim": None,  # D/N, unsaid
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "tiny_qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": None,  # in the form of transformers 5 instead
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention_bias": False,
    },
    "tiny_llama_mha": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": None,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
NAMES = tuple(_CHANGES)
_SEEDS = {
    "tiny_llama": 0,
    "tiny_llama_tied_rope": 11,
    "tiny_mistral": 10,
    "tiny_qwen2": 10,
    "tiny_qwen3": 9,
    "tiny_llama_mha": 0,
}
"""The best of 0 … 11: no greedy step of the goldens is nearly a tie (gaps > 0.008), nor does one token repeat."""


def config(name: str) -> dict[str, Any]:
    """The contents of the model's config.json."""
    return {key: value for key, value in (_COMMON | _CHANGES[name]).items() if value is not None}


def tensors(name: str) -> dict[str, np.ndarray]:
    """The model's weights, float32, by Hugging Face tensor name; no lm_head where it is tied, as in checkpoints."""
    return {key: _tensor(_SEEDS[name], key, shape) for key, shape in shapes(config(name)).items()}


def checksum(name: str) -> int:
    """CRC-32 of all weights in name order. Goldens carry it, so that other weights are not taken for a bug."""
    crc = 0
    for key, value in sorted(tensors(name).items()):
        crc = zlib.crc32(value.astype("<f4").tobytes(), zlib.crc32(key.encode(), crc))
    return crc


def write_checkpoint(name: str, folder: str | pathlib.Path) -> pathlib.Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name), indent=2))
    save_file(tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[3],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name → shape, (out, in) for matrices."""
    D, F = c["hidden_size"], c["intermediate_size"]
    H = c.get("head_dim") or D // c["num_attention_heads"]
    NH, KH = c["num_attention_heads"] * H, c["num_key_value_heads"] * H
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], D), "model.norm.weight": (D,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], D)
    matrices = {
        "self_attn.q_proj": (NH, D),
        "self_attn.k_proj": (KH, D),
        "self_attn.v_proj": (KH, D),
        "self_attn.o_proj": (D, NH),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    for i in range(c["num_hidden_layers"]):
        for part in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{part}.weight"] = (D,)
        for part, shape in matrices.items():
            out[f"model.layers.{i}.{part}.weight"] = shape
            if _has_bias(c, part):
                out[f"model.layers.{i}.{part}.bias"] = shape[:1]
        if c["model_type"] == "qwen3":
            for part in ("q_norm", "k_norm"):
                out[f"model.layers.{i}.self_attn.{part}.weight"] = (H,)
    return out


def tokenizer() -> Tokenizer:
    """Byte-level BPE of 320 entries: 4 specials, 256 bytes, and a merge for each of 60 syllables such as "ba"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(consonant, vowel) for consonant in "bcdfghlmnrst" for vowel in "aeiou"]
    entries = [*SPECIALS, *letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    return made


def _has_bias(c: dict[str, Any], part: str) -> bool:
    if part.startswith("mlp."):
        return c.get("mlp_bias", False)
    return c.get("attention_bias", False) or (c["model_type"] == "qwen2" and not part.endswith("o_proj"))


def _tensor(seed: int, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform values of PCG64, a stream that NumPy keeps across versions as it may not the normal's."""
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(key.encode())]))
    center, deviation = _scale(key, shape)
    return (center + deviation * np.sqrt(12) * (rng.random(shape) - 0.5)).astype(np.float32)


def _scale(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation such that attention is uneven and logits are spread over several units."""
    if "norm" in key:
        return 1.0, 0.2
    if key.endswith("bias"):
        return 0.0, 0.3
    if "embed_tokens" in key:  # small beside what the layers add: tied logits would repeat the input token
        return 0.0, 0.3
    gains = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 2.0, "lm_head": 3.0}
    gain = next((gain for part, gain in gains.items() if part in key), 1.0)
    return 0.0, gain / float(np.sqrt(shape[-1]))
