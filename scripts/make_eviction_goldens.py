"""Writes tests/goldens/eviction.npz: which rows of a cache the published implementations keep.

    python scripts/make_eviction_goldens.py --h2o H2O --streaming-llm streaming-llm --tova TOVA [--out FILE]

Needs kvpress 0.5.5 with torch and transformers (`pip install kvpress==0.5.5`, best in an environment of its own), and
checkouts of FMInference/H2O, mit-han-lab/streaming-llm and schwartz-lab-NLP/TOVA, of which the cache classes alone are
executed: the rest of those files needs transformers of their time.

From kvpress: a Llama of three layers with random weights and grouped heads reads one prompt; stored are each layer's
queries (without RoPE), keys and values as cached, and the rows that each press keeps of them.
From the repositories: two heads with random queries and keys, first a prompt, then one query at a time, each attending
to the rows that the class under test has left; stored are the rows left after each step.
"""

from __future__ import annotations

import argparse
import ast
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvpress
import numpy as np
import torch
import transformers

OUT = pathlib.Path(__file__).parents[1] / "tests" / "goldens" / "eviction.npz"

TOKENS, LAYERS, WINDOW = 72, 3, 8
CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    # Wide, so that attention is far from uniform and scores are far apart.
    "initializer_range": 0.25,
}
RATIOS = (0.3, 0.5, 0.75)

PRESSES: dict[str, Callable[[float], Any]] = {
    "streaming": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "tova": kvpress.TOVAPress,
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=5),
    "observed": kvpress.ObservedAttentionPress,
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "expected_attention_mean": lambda ratio: kvpress.ExpectedAttentionPress(
        ratio, n_future_positions=64, n_sink=2, use_covariance=False, use_vnorm=False
    ),
    "pyramid": lambda ratio: kvpress.PyramidKVPress(ratio, window_size=WINDOW, kernel_size=5),
}
HEADWISE: dict[str, Callable[[float], Any]] = {
    f"adakv_{floor}_{name}": functools.partial(
        lambda name, floor, ratio: kvpress.AdaKVPress(PRESSES[name](ratio), floor), name, floor
    )
    for name in ("snapkv", "knorm", "expected_attention")
    for floor in (0.2, 0.9)  # with the usual 0.2, no head of this model falls to it
}


# --- kvpress --------------------------------------------------------------------------------------------------------


def model_of(attention: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


@contextmanager
def watched_queries(model: transformers.LlamaForCausalLM) -> Iterator[list[np.ndarray]]:
    found: list[np.ndarray] = []

    def keep(_module: Any, _args: Any, output: torch.Tensor) -> None:
        found.append(output[0].view(TOKENS, CONFIG["num_attention_heads"], -1).transpose(0, 1).numpy())

    hooks = [layer.self_attn.q_proj.register_forward_hook(keep) for layer in model.model.layers]
    yield found
    for hook in hooks:
        hook.remove()


def cached(model: transformers.LlamaForCausalLM, tokens: torch.Tensor, press: Any = None) -> list[Any]:
    """The layers of the cache after the prompt, each with keys and values (1, K, S, H)."""
    cache = transformers.DynamicCache()
    if press is None:
        model(tokens, past_key_values=cache)
    else:
        with press(model):
            model(tokens, past_key_values=cache)
    return list(cache.layers)


def rows_of(kept: torch.Tensor, whole: torch.Tensor) -> np.ndarray:
    """Which rows of whole (K, S, H) make up kept (K, n, H): (K, n), ascending. Each row is there once."""
    same = (kept[:, :, None] == whole[:, None]).all(-1)
    assert (same.sum(-1) == 1).all()
    return np.sort(same.int().argmax(-1).numpy(), axis=1)


def from_presses() -> dict[str, np.ndarray]:
    # No token twice: in the first layer its keys would have the same norm, and the order would be left to rounding.
    tokens = torch.randperm(CONFIG["vocab_size"], generator=torch.Generator().manual_seed(1))[None, :TOKENS]
    eager, sdpa = model_of("eager"), model_of("sdpa")
    with watched_queries(eager) as queries:
        plain = cached(eager, tokens)
    found = {
        "queries": np.stack(queries),
        "keys": np.stack([layer.keys[0].numpy() for layer in plain]),
        "values": np.stack([layer.values[0].numpy() for layer in plain]),
    }
    for ratio in RATIOS:
        for name, make in PRESSES.items():
            layers = cached(eager, tokens, make(ratio))
            for number, (layer, whole) in enumerate(zip(layers, plain, strict=True)):
                found[f"{name}/{ratio}/{number}"] = rows_of(layer.keys[0], whole.keys[0]).astype(np.int16)
        for name, make in HEADWISE.items():
            cached(sdpa, tokens, make(ratio))
            for number, layer in enumerate(sdpa.model.layers):
                mask = np.ones((CONFIG["num_key_value_heads"], TOKENS), bool)
                _, heads, rows = (x.numpy() for x in layer.self_attn.masked_key_indices)
                mask[heads, rows] = False
                found[f"{name}/{ratio}/{number}"] = np.packbits(mask, axis=1)
    press = kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(0.5, n_sink=4))
    found["rerotated"] = cached(eager, tokens, press)[0].keys[0].numpy()
    return found


def pyramid_budgets() -> dict[str, np.ndarray]:
    """Rows of each layer for many lengths: inputs (cases, 5) and counts (cases, 32), -1 where there is no layer."""
    cases, counts = [], []
    for n in (100, 513, 2048, 4096, 30_011):
        for ratio in (0.1, 0.5, 0.75, 0.9):
            for layers, window, beta in ((2, 8, 20), (4, 8, 4), (32, 64, 20)):
                press = kvpress.PyramidKVPress(ratio, window_size=window, beta=beta)
                made = [press.get_layer_budget(_module(layers, i), n) for i in range(layers)]
                cases.append((n, ratio, layers, window, beta))
                counts.append(made + [-1] * (32 - layers))
    return {"pyramid_cases": np.asarray(cases), "pyramid_counts": np.asarray(counts, np.int32)}


def _module(layers: int, index: int) -> Any:
    module = torch.nn.Module()
    module.layer_idx, module.config = index, argparse.Namespace(num_hidden_layers=layers)
    return module


# --- the authors' repositories --------------------------------------------------------------------------------------

PROMPT, STEPS, HEADS, DIM = 24, 24, 2, 8


def class_of(file: pathlib.Path, name: str, **needed: Any) -> Any:
    """One class of a source file, and the helpers above it that it needs, executed without the file's imports."""
    wanted: list[ast.stmt] = [
        node
        for node in ast.parse(file.read_text()).body
        if (isinstance(node, ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.FunctionDef) and node.name.startswith("slice"))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIM_TO_SLICE")
    ]
    space = {"torch": torch, **needed}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), space)
    return space[name]


def attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries (heads, n, d) at the end of keys (heads, m, d) → causal weights (1, heads, n, m)."""
    scores = queries @ keys.transpose(1, 2) / math.sqrt(DIM)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1)[None]


def replay(evict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Feeds a prompt, then single queries, to `evict(keys, places, weights)`; the places left after each step."""
    generator = torch.Generator().manual_seed(2)
    queries, new = (torch.randn(HEADS, PROMPT + STEPS, DIM, generator=generator) * 2 for _ in range(2))
    numbers = torch.arange(PROMPT + STEPS, dtype=torch.float32).expand(1, HEADS, -1)[..., None]
    keys, places, left, start = new[None, :, :0], numbers[:, :, :0], [], 0
    for stop in (PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)):
        keys = torch.cat([keys, new[None, :, start:stop]], 2)
        places = torch.cat([places, numbers[:, :, start:stop]], 2)
        keys, places = evict(keys, places, attention(queries[:, start:stop], keys[0]))
        left.append(np.sort(places[0, :, :, 0].numpy().astype(np.int16), axis=1))
        start = stop
    return queries.numpy(), new.numpy(), np.stack(left)


def from_repositories(h2o: pathlib.Path, streaming: pathlib.Path, tova: pathlib.Path) -> dict[str, np.ndarray]:
    heavy = class_of(h2o / "h2o_hf/utils_real_drop/modify_llama.py", "H2OKVCache_LayerWise")(4, 6)
    start_recent = class_of(streaming / "streaming_llm/kv_cache.py", "StartRecentKVCache")(4, 6)
    typing = dict.fromkeys(("List", "Dict", "Any"), Any)
    newest = class_of(
        tova / "src/tova_cache.py", "TOVACache", DynamicCache=object, Optional=_Anything, Tuple=_Anything, **typing
    )

    def by_tova(keys: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = newest(10)
        wide = places.expand(-1, -1, -1, DIM)  # it gathers values by the head dim of the keys
        cache.key_cache, cache.value_cache = [keys], [wide]
        cache.reduce(0, weights)
        return cache.key_cache[0], cache.value_cache[0][..., :1]

    queries, keys, by_h2o = replay(lambda keys, places, weights: tuple(_h2o(heavy, keys, places, weights)))
    _, _, by_streaming = replay(lambda keys, places, weights: tuple(start_recent([[keys, places]])[0]))
    _, _, by_newest = replay(by_tova)
    return {
        "replay_queries": queries,
        "replay_keys": keys,
        "replay_h2o": by_h2o,
        "replay_streaming": by_streaming,
        "replay_tova": by_newest,
    }


def _h2o(heavy: Any, keys: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> Any:
    wide = places.expand(-1, -1, -1, DIM)  # it reshapes values by the head dim of the keys
    keys, wide = heavy((keys, wide), weights)
    return keys, wide[..., :1]


class _Anything:
    """Stands for typing's names in annotations that are executed with a class."""

    def __class_getitem__(cls, _: Any) -> Any:
        return Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("h2o", "streaming-llm", "tova"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True, help="its checkout")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    with torch.no_grad():
        found = from_presses() | pyramid_budgets() | from_repositories(args.h2o, args.streaming_llm, args.tova)
    np.savez_compressed(args.out, **found)  # type: ignore[arg-type]
    print(f"{args.out}: {args.out.stat().st_size} bytes, {len(found)} arrays")


if __name__ == "__main__":
    main()
