"""Writes tests/goldens/grouped_heads.npz: logits of tiny models whose kv heads are pooled, by transformers.

    python scripts/make_grouped_goldens.py [--out FILE]

Needs torch and transformers 5 (the `peers` extra). The models are those of tests/golden_models.py; here, NumPy pools
the heads of k and v by their mean, and transformers runs what comes out of it, float32, eager, without a cache.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import golden_models  # noqa: E402

CASES = (("tiny_llama_mha", 2), ("tiny_llama_mha", 1), ("tiny_qwen2", 1))
"""Heads of k and v before: 4, with biases on all projections, and 2, with biases on q, k and v."""
TOKENS = np.random.default_rng(0).integers(4, golden_models.VOCABULARY, 24)
LAST = 4


def pooled(name: str, kv_heads: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and weights of a golden model with fewer kv heads."""
    config, weights = golden_models.config(name), golden_models.tensors(name)
    before = config["num_key_value_heads"]
    for key, value in weights.items():
        if ".k_proj." in key or ".v_proj." in key:
            heads = np.split(value.astype(np.float64), before)
            groups = [heads[i : i + before // kv_heads] for i in range(0, before, before // kv_heads)]
            weights[key] = np.concatenate([np.mean(group, axis=0) for group in groups]).astype(np.float32)
    return config | {"num_key_value_heads": kv_heads}, weights


def logits(config: dict[str, Any], weights: dict[str, np.ndarray]) -> np.ndarray:
    """(LAST, V) float32, of the last tokens."""
    fields = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    made = transformers.AutoConfig.for_model(**fields, attn_implementation="eager")
    model = getattr(transformers, config["architectures"][0])(made).eval()
    loaded = model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()}, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)[None]).logits[0, -LAST:].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "goldens" / "grouped_heads.npz")
    out = parser.parse_args().out
    found = {f"{name}/{kv_heads}": logits(*pooled(name, kv_heads)) for name, kv_heads in CASES}
    np.savez_compressed(out, tokens=TOKENS.astype(np.int32), **found)  # type: ignore[arg-type]
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
