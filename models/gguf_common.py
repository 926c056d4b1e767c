"""What the GGUF names of several families have in common: metadata keys, RoPE, windows, the order of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import ModelError
from kvjax.models.fields import MOST_LAYERS

_REFUSED = (
    "attention.temperature_scale",
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
)
"""Keys by which other models, under the same architecture name, change the mathematics."""

Order = Callable[[int], np.ndarray]
"""How many rows a tensor has → the stored row of each of Hugging Face's; see `kvjax.types.GGUFNames.rows`."""


class Keys(NamedTuple):
    """A file's metadata, as `GGUFNames.config` gets them.

    Attributes:
      metadata: key → Python value; next to the file's own keys "tensor_shapes" (GGUF name → row-major shape) and, where
        the file has such tensors, "rope_freqs.weight", "rope_factors_long.weight" and "rope_factors_short.weight" as
        lists of floats.
      arch: the architecture, with which most keys begin.
    """

    metadata: Mapping[str, Any]
    arch: str

    def get(self, key: str, otherwise: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", otherwise)

    def need(self, key: str) -> Any:
        return self.metadata[f"{self.arch}.{key}"]

    def has(self, tensor: str) -> bool:
        return tensor in self.metadata["tensor_shapes"]

    def same(self, key: str, otherwise: Any = None) -> Any:
        """A field that may be given once per layer, where all layers must agree."""
        value = self.get(key, otherwise) if otherwise is not None else self.need(key)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"This GGUF file has a different {key} in every layer, which is not supported.")
        return value[0]

    def decimal(self, key: str, otherwise: float | None = None) -> float:
        return decimal(self.get(key, otherwise) if otherwise is not None else self.need(key))

    def layers(self) -> int:
        """L. Raises ValueError for a number that no model has: lists of that length may be made."""
        count = self.need("block_count")
        if not 0 < count <= MOST_LAYERS:
            raise ValueError(f"{self.arch}.block_count is {count}")
        return count


def decimal(value: float) -> float:
    """The decimal that was stored as a float32: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def general(keys: Keys, architecture: str, model_type: str) -> dict[str, Any]:
    """Fields of config.json that all families have."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": keys.metadata["tensor_shapes"]["token_embd.weight"][0],
        "tie_word_embeddings": not keys.has("output.weight"),
        "bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def sizes(keys: Keys) -> dict[str, Any]:
    """The sizes of a model, as most of Hugging Face's config.json name them."""
    heads = keys.same("attention.head_count")
    return {
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.same("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length", keys.need("embedding_length") // heads),
        "max_position_embeddings": keys.need("context_length"),
    }


def refuse_variants(keys: Keys, *more: str) -> None:
    """Models that share the architecture's name but not its mathematics; `more` keys are refused too."""
    for key in (*_REFUSED, *more):
        if keys.get(key):
            raise ModelError(f"This GGUF file sets {keys.arch}.{key}, which is not supported.")


def refuse_other_values(keys: Keys) -> None:
    """Heads whose keys and values differ in size."""
    if keys.get("attention.value_length") != keys.get("attention.key_length"):
        raise ModelError("This GGUF file has keys and values of different sizes, which is not supported.")


def partial_rotary(keys: Keys, head_dim: int) -> dict[str, Any]:
    """`partial_rotary_factor`, where not the whole head is rotated."""
    rotated = keys.get("rope.dimension_count", head_dim)
    return {} if rotated == head_dim else {"partial_rotary_factor": share(rotated, head_dim)}


def share(rotated: int, head_dim: int) -> float:
    """The fraction of a head that makes `rotated` when it is multiplied by `head_dim` and cut to a whole number."""
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, 1.0)


def layer_types(keys: Keys, period: int) -> list[str]:
    """Which layers slide: all but every `period`-th, or as the file says, by a period or layer by layer."""
    stated = keys.get("attention.sliding_window_pattern", period)
    layers = keys.layers()
    slides = stated if isinstance(stated, list) else [(i + 1) % stated != 0 for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def modules(outer: Mapping[str, str], prefix: str, inner: Mapping[str, str]) -> dict[str, str]:
    """Tensor names, from names of modules that may have a weight and a bias.

    Args:
      outer: GGUF module → Hugging Face module, outside of layers.
      prefix: of Hugging Face's modules in a layer, such as "model.layers.{i}.".
      inner: GGUF module → Hugging Face module, in a layer.
    """
    named = {**outer, **{f"blk.{{i}}.{theirs}": f"{prefix}{ours}" for theirs, ours in inner.items()}}
    return {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in named.items() for part in ("weight", "bias")}


def experts(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Names of experts' gate, up and down projections: in stacks, or one by one as in files before April 2024."""
    pairs = list(zip(("gate", "up", "down"), names, strict=True))
    stacked = {f"blk.{{i}}.ffn_{theirs}_exps.weight": f"{prefix}.{{e}}.{ours}.weight" for theirs, ours in pairs}
    single = {f"blk.{{i}}.ffn_{theirs}.{{e}}.weight": f"{prefix}.{{e}}.{ours}.weight" for theirs, ours in pairs}
    return stacked | single


# --- the order of rows --------------------------------------------------------------------------------------------


def in_order(arch: str, config: Mapping[str, Any]) -> dict[str, Order]:
    """`GGUFNames.rows` of families whose rows are as Hugging Face has them."""
    return {}


def halves(heads: int) -> Order:
    """Stored as neighbouring pairs, as llama.cpp rotates them; Hugging Face has both halves of a head apart."""
    return lambda rows: np.arange(rows).reshape(heads, _each(rows, 2 * heads), 2).swapaxes(1, 2).reshape(-1)


def by_head(heads: int) -> Order:
    """Stored as all of q, then k, then v; Hugging Face has q, k and v of each head."""
    return lambda rows: np.arange(rows).reshape(3, heads, _each(rows, 3 * heads)).swapaxes(0, 1).reshape(-1)


def by_group(heads: int, kv_heads: int) -> Order:
    """Stored as all of q, then k, then v; Hugging Face has, of each kv head, its queries, its k and its v."""

    def order(rows: int) -> np.ndarray:
        dim = _each(rows, heads + 2 * kv_heads)
        q, k, v = np.split(np.arange(rows), [heads * dim, (heads + kv_heads) * dim])
        parts = [part.reshape(kv_heads, -1, dim) for part in (q, k, v)]
        return np.concatenate(parts, axis=1).reshape(-1)

    return order


def _each(rows: int, parts: int) -> int:
    if rows % parts:
        raise ValueError(f"{rows} rows do not split into {parts} parts")
    return rows // parts


# --- RoPE ---------------------------------------------------------------------------------------------------------


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope_scaling` of config.json.

    Llama 3 files carry the divisors of their rotary frequencies ready computed, and not the four numbers that
    Hugging Face computes them from: they become
    `rope_scaling={"rope_type": "factors", "divisors": [H / 2 floats]}`, which `positions.rope_from_hf` reads:
    inverse_frequency / divisors, with no scaling of the attention.
    """
    if "rope_freqs.weight" in keys.metadata:
        return {"rope_type": "factors", "divisors": keys.metadata["rope_freqs.weight"]}
    if "rope_factors_long.weight" in keys.metadata:
        return _longrope(keys)
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    kind = keys.get("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": decimal(factor)}
    if kind != "yarn":
        raise ModelError(f"This GGUF file scales its rotary embedding by {kind!r}, which is not supported.")
    return _yarn(keys, decimal(factor))


def _longrope(keys: Keys) -> dict[str, Any]:
    """Phi-3's and Phi-4's; the factor on cos and sin is left out where it is what follows from the lengths."""
    original, factor = keys.get("rope.scaling.original_context_length"), keys.get("rope.scaling.attn_factor")
    if original and factor is not None:
        stretch = keys.need("context_length") / original
        usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        factor = None if math.isclose(factor, usual, rel_tol=1e-6) else factor
    fields = {
        "rope_type": "longrope",
        "long_factor": [decimal(number) for number in keys.metadata["rope_factors_long.weight"]],
        "short_factor": [decimal(number) for number in keys.metadata["rope_factors_short.weight"]],
        "original_max_position_embeddings": original,
        "attention_factor": factor,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    def get(key: str, otherwise: Any = None) -> Any:
        return keys.get(f"rope.scaling.{key}", otherwise)

    if get("yarn_log_multiplier"):
        raise ModelError("This GGUF file sets rope.scaling.yarn_log_multiplier, which is not supported.")
    fields = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": get("original_context_length"),
        "beta_fast": get("yarn_beta_fast"),
        "beta_slow": get("yarn_beta_slow"),
        "attention_factor": get("yarn_attn_factor"),  # Hugging Face's field, where it is given
    }
    if get("attn_factor", 1.0) != 1.0:  # llama.cpp multiplies YaRN's own factor, Hugging Face replaces it
        fields["attention_factor"] = get("attn_factor") * (0.1 * math.log(factor) + 1.0)
    return {key: value for key, value in fields.items() if value is not None}
