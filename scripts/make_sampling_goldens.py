"""Writes tests/goldens/sampling.json: logits as Hugging Face's processors leave them, in the order it applies them.

Needs torch and transformers (the `peers` extra):

    python scripts/make_sampling_goldens.py tests/goldens/sampling.json
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin

ROWS, VOCABULARY, PROMPT, GENERATED, EOS = 3, 48, 6, 4, [2, 5]

CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"min_new_tokens": 5},
    {"min_new_tokens": 4},
    {"logit_bias": {2: 3.5, 7: -100.0, 11: 0.25}},
    {"temperature": 1.5, "top_k": 10, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.2, "repetition_penalty": 1.2},
    {
        "temperature": 0.9,
        "top_k": 12,
        "top_p": 0.85,
        "min_p": 0.02,
        "repetition_penalty": 1.5,
        "min_new_tokens": 8,
        "logit_bias": {2: 8.0, 3: -2.0, 40: 6.0},
    },
]


class Model(GenerationMixin):
    """As much of a model as building the chain of processors reads."""

    config = types.SimpleNamespace(is_encoder_decoder=False)

    def __init__(self) -> None:
        pass


def chain(case: dict[str, Any]) -> Any:
    """The processors that `generate` would apply, in its order."""
    fields = {name: value for name, value in case.items() if name != "logit_bias"}
    if "logit_bias" in case:
        fields["sequence_bias"] = [[[token], value] for token, value in case["logit_bias"].items()]
    config = GenerationConfig(**{"do_sample": True, "top_k": 0, **fields})
    config._eos_token_tensor = torch.tensor(EOS)
    return Model()._get_logits_processor(config, input_ids_seq_length=PROMPT)


def finite(row: list[float]) -> list[float | None]:
    return [None if value == float("-inf") else round(value, 7) for value in row]


def main(path: str) -> None:
    random = torch.Generator().manual_seed(0)
    # four decimals: exact enough to be read back, and no two values of a row alike
    logits = torch.randn(ROWS, VOCABULARY, generator=random).mul(2.5e4).round().div(1e4)
    tokens = torch.randint(0, VOCABULARY, (ROWS, PROMPT + GENERATED), generator=random)
    results = [
        {"params": case, "processed": [finite(row) for row in chain(case)(tokens, logits.clone()).tolist()]}
        for case in CASES
    ]
    golden = {
        "source": f"transformers {transformers.__version__}",
        "eos": EOS,
        "prompt": PROMPT,
        "tokens": tokens.tolist(),
        "logits": [[round(value, 4) for value in row] for row in logits.tolist()],
        "cases": results,
    }
    with open(path, "w") as file:
        json.dump(golden, file)
        file.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
