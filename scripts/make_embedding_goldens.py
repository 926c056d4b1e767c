"""Writes tests/goldens/embeddings.npz: embeddings by Hugging Face transformers, float32 on the CPU.

    python scripts/make_embedding_goldens.py --minilm FOLDER

Needs torch and transformers 5 (the `peers` extra). FOLDER is all-MiniLM-L6-v2, as `kvjax.load("minilm")` leaves it in
the cache. Pooling is that of sentence-transformers, written out: over real tokens only, then divided by the length.

The tiny models see each text by itself, without padding; MiniLM sees all of them as one padded batch. Tokens of MiniLM
are those of transformers' own tokenizer, cut to 256.
"""

from __future__ import annotations

import argparse
import pathlib

import make_goldens
import numpy as np
import torch
import transformers

import golden_embeddings  # isort: skip  (tests/ is on the path since make_goldens was imported)

MOST = 256
KEPT = 16


def tiny_model(name: str) -> torch.nn.Module:
    """The transformers model of a tiny config, with exactly the arrays of golden_embeddings."""
    config = transformers.AutoConfig.for_model(**golden_embeddings.config(name))
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    state = {key: torch.from_numpy(value) for key, value in golden_embeddings.tensors(name).items()}
    model.load_state_dict(state, strict=True)
    return model


def tiny_golden(name: str) -> dict[str, np.ndarray]:
    """Keys <name>_cls, <name>_max, <name>_mean: (texts, D) float32; <name>_checksum of the weights."""
    model, tokenizer = tiny_model(name), golden_embeddings.tokenizer()
    tokenizer.enable_truncation(golden_embeddings.POSITIONS)
    pooled: dict[str, list[np.ndarray]] = {mode: [] for mode in golden_embeddings.MODES}
    for text in golden_embeddings.TEXTS:
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        for mode, vector in (("cls", hidden[0]), ("max", hidden.max(0).values), ("mean", hidden.mean(0))):
            pooled[mode].append(vector.numpy())
    made = {f"{name}_{mode}": np.stack(vectors) for mode, vectors in pooled.items()}
    return made | {f"{name}_checksum": np.array(golden_embeddings.checksum(name), np.uint32)}


def minilm_golden(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Keys minilm_first (texts, 16), minilm_cosine (texts, texts) float32 and minilm_tokens (texts,) int32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch = tokenizer(
        list(golden_embeddings.SENTENCES), padding=True, truncation=True, max_length=MOST, return_tensors="pt"
    )  # fmt: skip
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None].float()
        vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    return {
        "minilm_first": vectors[:, :KEPT].numpy(),
        "minilm_cosine": (vectors @ vectors.T).numpy(),
        "minilm_tokens": batch["attention_mask"].sum(1).numpy().astype(np.int32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=pathlib.Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--out", type=pathlib.Path, default=make_goldens.ROOT / "tests" / "goldens" / "embeddings.npz")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    made = make_goldens.versions()
    for name in golden_embeddings.NAMES:
        made |= tiny_golden(name)
    made |= minilm_golden(arguments.minilm.resolve())
    np.savez_compressed(arguments.out, **made)  # type: ignore[arg-type]
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes, tokens {made['minilm_tokens'].tolist()}")


if __name__ == "__main__":
    main()
