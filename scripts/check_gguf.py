"""Runs the GGUF files that tests/golden_gguf.py writes in llama.cpp, so that they are what llama.cpp means by them.

    python scripts/check_gguf.py                     # all models
    python scripts/check_gguf.py --only gpt2 bloom   # some

Needs llama-cpp-python (the `peers` extra). For every model it prints the largest difference of the logits of a prompt
of 40 tokens, relative to the largest logit: between llama.cpp and what transformers computed for the goldens, and
between llama.cpp and kvjax, both reading the file. Everything is float32, without flash attention. The second is to be
at most 1e-3; llama.cpp's GELU alone, a half-precision table of the variant with tanh, makes 4e-4. The first too, but
for models that have something that GGUF cannot say: `OTHERWISE` tells what.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import bench_peers
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checkpoints.place import load_model
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.models import FAMILIES, family_of
from kvjax.types import KVSpec

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))

import golden_families
import golden_gguf

ENOUGH = 1e-3
Model = tuple[dict[str, Any], dict[str, np.ndarray]]

OTHERWISE = {
    "smollm3": "every fourth layer without RoPE, here every second",
    "smollm3_window": "no windows, and every fourth layer without RoPE",
    "mixtral_window": "no windows",
    "qwen3_moe": "no dense layers",
    "qwen3_moe_step": "no dense layers, no biases, weights of experts divided by their sum",
    "phi3_short": "llama.cpp does not look at Phi's window",
    "gemma2": "softmax scale of the head dim",
    "gemma3": "softmax scale of the head dim",
    "gemma3_new": "no biases; windows in every second layer",
    "gpt2_flags": "plain softmax scale",
    "mpt_flags": "plain softmax scale",
    "bloom_normed": "residual before the norm",
    "deepseek_v2": "no biases; groups of experts by the sum of their best two",
    "gpt_oss": "ends of YaRN's ramp rounded",
}
"""Why llama.cpp does not compute what transformers did: its idea of the model."""


# --- what llama.cpp cannot load -----------------------------------------------------------------------------------


def without_biases(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Model:
    kept = {key: value for key, value in weights.items() if not (".self_attn." in key and key.endswith(".bias"))}
    return {**config, "attention_bias": False}, kept


def every_second(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Model:
    """Gemma 3 with windows in a pattern that llama.cpp knows."""
    config, weights = without_biases(config, weights)
    return {key: value for key, value in config.items() if key != "layer_types"} | {
        "sliding_window_pattern": 2
    }, weights


def zero_biases(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Model:
    """Biases that llama.cpp insists on."""
    added = {
        f"{key.removesuffix('.weight')}.bias": np.zeros(len(value), np.float32)
        for key, value in weights.items()
        if ".attention." in key and key.endswith(".weight")
    }
    return {**config, "attention_bias": True}, weights | added


def of_27_layers(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Model:
    """llama.cpp knows DeepSeek-V2-Lite by its number of layers: the further ones add nothing."""
    last = config["num_hidden_layers"] - 1
    of_last = {key: value for key, value in weights.items() if f".layers.{last}." in key}
    added = {
        key.replace(f".layers.{last}.", f".layers.{layer}."): value
        * (not key.endswith(("o_proj.weight", "down_proj.weight")))
        for layer in range(last + 1, 27)
        for key, value in of_last.items()
    }
    return {**config, "num_hidden_layers": 27}, weights | added


LOADABLE: dict[str, Callable[..., Model]] = {
    "qwen3_moe_step": without_biases,
    "gemma3_new": every_second,
    "neox_sequential": zero_biases,
    "deepseek_v2_lite": of_27_layers,
    "deepseek_v2": without_biases,
}


# --- logits -------------------------------------------------------------------------------------------------------


def llama_cpp_logits(path: pathlib.Path, prompt: np.ndarray) -> np.ndarray:
    """(T, V) of a prompt."""
    with (
        bench_peers.llama_model(str(path)) as model,
        model.context(1, len(prompt), 2, flash=False, float32=True) as context,
    ):
        context.decode([(0, i, int(token), True) for i, token in enumerate(prompt)])
        rows = (context.api.llama_get_logits_ith(context.context, i) for i in range(len(prompt)))
        return np.stack([np.ctypeslib.as_array(row, (context.vocab,)).copy() for row in rows])


def kvjax_logits(path: pathlib.Path, prompt: np.ndarray) -> np.ndarray:
    """(T, V) of a prompt, by kvjax's reader and families, with llama.cpp's idea of the model."""
    with open_checkpoint(path, FAMILIES) as source:
        family = family_of(source.config)
        config = as_llama_cpp(family.config(source.config, None))
        params = load_model(source, family, config, dtype=jnp.float32)
    positions = jnp.arange(len(prompt), dtype=jnp.int32)
    attend = dense(family.kv_specs(config, "float32"))
    _, hidden = family.forward(params, config, jnp.asarray(prompt), positions, None, attend)
    return np.asarray(family.unembed(params, config, hidden))


def as_llama_cpp(config: Any) -> Any:
    """It ignores Phi's window, rounds the ends of YaRN's ramp, and adds up the best two of a group of experts."""
    if getattr(config, "packed_names", False):
        return dataclasses.replace(config, windows=(None,) * len(config.windows))
    if getattr(config, "gate_limit", None):
        return dataclasses.replace(config, rope=dataclasses.replace(config.rope, truncate=True))
    if getattr(config, "latent", None) and config.routing.groups > 1:
        return dataclasses.replace(config, routing=dataclasses.replace(config.routing, group_score="top 2"))
    return config


def dense(specs: tuple[KVSpec, ...]) -> Callable[..., tuple[None, jax.Array]]:
    """`attend` over the step's own keys, with no cache: the whole prompt is in one step."""

    def attend(_: None, layer: int, q: Any, k: Any, v: Any, scale: float, *, soft_cap=None, sinks=None, slopes=None):
        T, N, _ = q.shape
        v = k[..., : specs[layer].value_dim] if v is None else v
        k, v = (jnp.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
        s = jnp.einsum("tnh,snh->nts", q, k, precision="highest") * scale
        s = s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)
        behind = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
        s = s if slopes is None else s - slopes[:, None, None] * behind
        s = jnp.where((behind >= 0) & (behind < (specs[layer].window or T)), s, -jnp.inf)
        if sinks is not None:
            s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (N, T, 1))], axis=-1)
        return None, jnp.einsum("nts,snh->tnh", jax.nn.softmax(s, axis=-1)[..., :T], v, precision="highest")

    return attend


# --- the table ----------------------------------------------------------------------------------------------------


def differences(name: str, folder: pathlib.Path) -> Iterator[float]:
    """llama.cpp's logits against the golden, and against kvjax."""
    golden = golden_families.golden(name)
    config, weights = golden_gguf.model(name)
    if name in LOADABLE:
        config, weights = LOADABLE[name](config, weights)
    path = golden_gguf.write_model(config, weights, folder / f"{name}.gguf")
    found = llama_cpp_logits(path, golden["prompt_2"])
    yield float(np.abs(found[:, golden["columns"]] - golden["all_2"]).max() / golden["largest_2"])
    yield float(np.abs(found - kvjax_logits(path, golden["prompt_2"])).max() / np.abs(found).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=golden_gguf.NAMES, help="which models (default: all)")
    arguments = parser.parse_args()
    failed = []
    print(f"{'model':18}{'architecture':14}{'transformers':>14}{'kvjax':>10}  llama.cpp has")
    with tempfile.TemporaryDirectory() as folder:
        for name in golden_gguf.NAMES if arguments.only is None else arguments.only:
            to_golden, to_kvjax = differences(name, pathlib.Path(folder))
            arch = golden_gguf.ARCHITECTURES[golden_families.CONFIGS[name][1]]
            print(f"{name:18}{arch:14}{to_golden:14.1e}{to_kvjax:10.1e}  {OTHERWISE.get(name, '')}", flush=True)
            if to_kvjax > ENOUGH or (to_golden > ENOUGH and name not in OTHERWISE):
                failed.append(name)
    if failed:
        raise SystemExit(f"Differences above {ENOUGH}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
