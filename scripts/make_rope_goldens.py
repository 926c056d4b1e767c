"""Writes tests/goldens/rope.json: RoPE frequencies as Hugging Face transformers computes them.

    python scripts/make_rope_goldens.py [--out tests/goldens/rope.json]

Needs torch and transformers (the `peers` extra). Every case holds config.json fields in the form in which the named
model publishes them, the head dim, the length served, and what transformers makes of it: inv_freq (float32) and the
factor on cos and sin.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

OUT = pathlib.Path(__file__).parents[1] / "tests" / "goldens" / "rope.json"

LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN_V3 = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
YARN_OSS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
# Phi-3-vision-128k-instruct, under the name that the first Phi-3 checkpoints gave to longrope.
PHI_LISTS = {
    "short_factor": [1.05] * 3
    + [1.1] * 3
    + [1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9]
    + [2.0] * 19
    + [2.1, 2.1, 2.2, 2.35, 2.35, 2.35, 2.35, 2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05],
    "long_factor": [
        *(1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49),
        *(
            9.09,
            11.58,
            15.66,
            15.77,
            15.79,
            18.36,
            21.99,
            23.08,
            30.01,
            32.35,
            32.59,
            35.56,
            39.95,
            53.84,
            56.2,
            57.95,
        ),
        *(
            59.29,
            59.77,
            59.92,
            61.19,
            61.96,
            62.5,
            63.37,
            63.48,
            63.48,
            63.66,
            63.85,
            64.08,
            64.76,
            64.8,
            64.81,
            64.81,
        ),
    ],
    "type": "su",
}


def llama(positions: int, theta: float | None = None, **rest: Any) -> dict[str, Any]:
    """A config of the Llama form: hidden size 512, 4 heads of 128 unless `rest` says otherwise."""
    base = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": positions}
    return base | ({} if theta is None else {"rope_theta": theta}) | rest


PHI3 = llama(131072, 10000.0, hidden_size=384, original_max_position_embeddings=4096, rope_scaling=PHI_LISTS)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama2": (llama(4096, rope_scaling=None), 4096),
    "llama3.1": (llama(131072, 500000.0, rope_scaling=LLAMA_31), 131072),
    "llama3.2_1b": (llama(131072, 500000.0, head_dim=64, rope_scaling=LLAMA_31 | {"factor": 32.0}), 131072),
    "llama3_parameters": (llama(131072, rope_parameters=LLAMA_31 | {"rope_theta": 500000.0}), 131072),
    "qwen2.5_yarn": (
        llama(
            32768,
            1e6,
            rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        ),
        131072,
    ),
    "deepseek_v3": (llama(163840, 10000.0, head_dim=64, rope_scaling=YARN_V3), 163840),
    "deepseek_v2_mscale": (
        llama(163840, 10000.0, head_dim=64, rope_scaling=YARN_V3 | {"mscale": 0.707, "mscale_all_dim": 0.5}),
        163840,
    ),
    "gpt_oss": (llama(131072, 150000.0, head_dim=64, rope_scaling=YARN_OSS), 131072),
    "yarn_attention_factor": (
        llama(131072, 150000.0, head_dim=64, rope_scaling=YARN_OSS | {"attention_factor": 1.25}),
        131072,
    ),
    "phi3_short": (PHI3, 4096),
    "phi3_long": (PHI3, 4097),
    "phi4_mini_partial": (
        PHI3 | {"hidden_size": 512, "partial_rotary_factor": 0.75},
        131072,
    ),
    "dynamic_short": (llama(4096, 10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}), 1024),
    "dynamic_equal": (llama(4096, 10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}), 4096),
    "dynamic_long": (llama(4096, 10000.0, rope_scaling={"type": "dynamic", "factor": 2.0}), 20000),
    "linear": (llama(16384, 10000.0, rope_scaling={"type": "linear", "factor": 4.0}), 16384),
    "partial_linear": (
        llama(4096, 10000.0, partial_rotary_factor=0.25, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        4096,
    ),
}


def golden(fields: dict[str, Any], length: int) -> dict[str, Any]:
    """One case: transformers' inv_freq (dim/2,) float32 and attention factor for these config fields."""
    known = copy.deepcopy(fields)
    if known.get("rope_scaling") == PHI_LISTS:
        known["rope_scaling"]["type"] = "longrope"  # as Phi-3's own config class renames it
    config = transformers.LlamaConfig(**known)
    if "original_max_position_embeddings" in fields:  # an extra field of Phi-3's config, unknown to Llama's
        config.original_max_position_embeddings = fields["original_max_position_embeddings"]
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        inv_freq, factor = rotary.inv_freq, rotary.attention_scaling
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "config": fields,
        "head_dim": head_dim,
        "length": length,
        "kind": kind,
        "inv_freq": [float(f"{value:.9g}") for value in inv_freq.tolist()],
        "attention_factor": float(factor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="where to write (default: the tests' golden)")
    out = parser.parse_args().out
    cases = {name: golden(*case) for name, case in CASES.items()}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"versions": versions, "cases": cases}) + "\n")
    print(f"{len(cases)} cases, {out.stat().st_size:,} bytes: {out}")


if __name__ == "__main__":
    main()
