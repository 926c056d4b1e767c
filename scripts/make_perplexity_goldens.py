"""Writes tests/goldens/perplexity.json: perplexity by Hugging Face transformers, float32 on the CPU.

    python scripts/make_perplexity_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch and transformers 5 (the `peers` extra); the GGUF file is that of make_goldens.py.

The windows are those of transformers' guide on the perplexity of fixed-length models: labels of tokens that an earlier
window has counted are −100. Each window's loss is multiplied by the number of labels that the model, which shifts them
by one, has averaged over; the guide's own count is one too small for every window but the first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import warnings
import zlib

import make_goldens
import numpy as np
import torch
import transformers

TINY = ("tiny_llama", "tiny_mistral")
TOKENS = 200
SPANS = ((64, 24), (64, 64), (128, 100))
PROSE = make_goldens.ROOT / "kvjax" / "evaluation" / "prose.txt"
PROSE_SPAN = (1024, 512)


def nats(model: torch.nn.Module, ids: np.ndarray, window: int, stride: int) -> tuple[float, int]:
    """Mean negative log-likelihood of a token, and the number of tokens."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end].tolist()])
        labels = inputs.clone()
        labels[:, : before - begin] = -100
        valid = int((labels[:, 1:] != -100).sum())
        if valid:
            with torch.inference_mode():
                total += float(model(inputs, labels=labels, use_cache=False).loss) * valid
        count, before = count + valid, end
        if end == len(ids):
            break
    return total / count, count


def tiny_ids(name: str) -> np.ndarray:
    """Random tokens of the model's vocabulary; the golden keeps them."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(4, 320, TOKENS)


def rows(model: torch.nn.Module, ids: np.ndarray, spans: tuple[tuple[int, int], ...]) -> list[dict[str, float]]:
    found = []
    for window, stride in spans:
        mean, count = nats(model, ids, window, stride)
        found.append({"window": window, "stride": stride, "nats": mean, "tokens": count})
        print(f"  window {window}, stride {stride}: {mean:.6f} nats, {count} tokens, {np.exp(mean):.4f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="path of the GGUF file")
    default = make_goldens.ROOT / "tests" / "goldens" / "perplexity.json"
    parser.add_argument("--out", type=pathlib.Path, default=default)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "`past_key_values`", FutureWarning)
    made: dict[str, object] = {key: str(value) for key, value in make_goldens.versions().items()}
    for name in TINY:
        ids, model = tiny_ids(name), make_goldens.tiny_model(name)
        made[name] = {"ids": ids.tolist(), "found": rows(model, ids, SPANS)}
    model, tokenizer = make_goldens.smollm2_model(arguments.gguf.resolve())
    ids = np.asarray(tokenizer.encode(PROSE.read_text(encoding="utf-8")))
    made["smollm2"] = {"tokens": len(ids), "found": rows(model, ids, (PROSE_SPAN,))}
    arguments.out.write_text(json.dumps(made) + "\n")
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
