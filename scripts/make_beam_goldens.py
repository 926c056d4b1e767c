"""Writes tests/goldens/beam.json: what Hugging Face transformers' beam search finds with the tiny golden models.

Needs torch and transformers 5 (the `peers` extra), and what scripts/make_goldens.py imports:

    python scripts/make_beam_goldens.py tests/goldens/beam.json

Two prompts of different lengths are searched in one call, padded on the left. The end-of-sequence tokens are those of
40 draws whose outputs differ most in length and between the rules. Every case is computed again in float64, a prompt
at a time: where the two disagree on a token, padding or rounding decides, and SystemExit is raised.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import golden_models
from make_goldens import tiny_model

MODELS = ("tiny_llama", "tiny_mistral")
LENGTHS = (21, 9)
STEPS, ENDS, TRIES = 20, 4, 40
CASES: list[dict[str, Any]] = [
    *(
        {"width": width, "length_penalty": penalty, "early_stopping": early}
        for width, penalty, early in itertools.product((1, 3, 5), (0.5, 1.0, 2.0), (False, True))
    ),
    {"width": 5, "length_penalty": 2.0, "early_stopping": "never"},
    {"width": 5, "length_penalty": 0.0, "early_stopping": False},
    {"width": 5, "length_penalty": -1.0, "early_stopping": False},
]
OTHER = {"width": 3, "length_penalty": 1.0, "early_stopping": False}
"""Also with a single end-of-sequence token, and with none."""


def beams(model: torch.nn.Module, prompts: list[list[int]], eos: list[int], case: dict[str, Any]) -> list[list[dict]]:
    """For each prompt its outputs, best first: {"tokens": generated ids, "score": a float}."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    W = case["width"]
    # With one beam `generate` decodes greedily, without scores; `_beam_search` does the same for it as for any other.
    strategy = {} if W > 1 else {"custom_generate": type(model)._beam_search}
    config = transformers.GenerationConfig(
        num_beams=W, num_return_sequences=W, do_sample=False, max_new_tokens=STEPS, pad_token_id=0,
        eos_token_id=eos or None, length_penalty=case["length_penalty"], early_stopping=case["early_stopping"],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, generation_config=config, **strategy)
    outputs = [
        {"tokens": cut(row[longest:].tolist(), eos), "score": round(float(score), 6)}
        for row, score in zip(found.sequences, found.sequences_scores, strict=True)
    ]
    return [outputs[i * W : (i + 1) * W] for i in range(len(prompts))]


def cut(tokens: list[int], eos: list[int]) -> list[int]:
    """Without the padding behind the first end-of-sequence token."""
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def candidates(model: torch.nn.Module, prompts: list[list[int]]) -> list[int]:
    """Tokens that beams come by when nothing ends them, the most frequent first."""
    free = beams(model, prompts, [], {"width": 5, "length_penalty": 1.0, "early_stopping": False})
    seen = collections.Counter(token for row in free for output in row for token in set(output["tokens"][1:]))
    return [token for token, _ in seen.most_common()]


def worth(model: torch.nn.Module, prompts: list[list[int]], eos: list[int]) -> int:
    """How much a case with these end-of-sequence tokens tests: outputs that rules change, and lengths above one."""
    variants = [
        [output["tokens"] for row in beams(model, prompts, eos, {"width": width, **rules}) for output in row]
        for width in (3, 5)
        for rules in (
            {"length_penalty": 2.0, "early_stopping": False},
            {"length_penalty": 2.0, "early_stopping": True},
            {"length_penalty": 0.5, "early_stopping": False},
        )
    ]
    changed = sum(
        one != other
        for a, b in ((0, 1), (0, 2), (3, 4), (3, 5))
        for one, other in zip(variants[a], variants[b], strict=True)
    )
    return changed + sum(len({len(tokens) for tokens in outputs} - {1}) for outputs in variants)


def golden(name: str) -> dict[str, Any]:
    """Prompts, end-of-sequence tokens and the outputs of every case."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, golden_models.VOCABULARY, length).tolist() for length in LENGTHS]
    model, precise = tiny_model(name), tiny_model(name).double()
    seen = candidates(model, prompts)
    sets = [rng.choice(seen, ENDS, replace=False).tolist() for _ in range(TRIES)]
    many = max(sets, key=lambda eos: worth(model, prompts, eos))
    one = max(([token] for token in seen[:TRIES]), key=lambda eos: worth(model, prompts, eos))
    cases = []
    for case, ends in [*((case, many) for case in CASES), (OTHER, one), (OTHER, [])]:
        found = beams(model, prompts, ends, case)
        for row, prompt in zip(found, prompts, strict=True):
            (alone,) = beams(precise, [prompt], ends, case)
            if [output["tokens"] for output in row] != [output["tokens"] for output in alone]:
                raise SystemExit(f"{name}, {case}: a prompt alone in float64 finds other tokens.")
        cases.append({**case, "eos": ends, "outputs": found})
        print(name, case, ends, [[len(output["tokens"]) for output in row] for row in found])
    return {"checksum": golden_models.checksum(name), "prompts": prompts, "cases": cases}


def main(path: str) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    out = {"source": f"transformers {transformers.__version__}", "steps": STEPS}
    out["models"] = {name: golden(name) for name in MODELS}
    with open(path, "w") as file:
        json.dump(out, file)
        file.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
