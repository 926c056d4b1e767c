"""The contracts between engine, models and loaders.

Dimension key, used in einsums, shape comments and annotations everywhere:

    B slots   T query tokens of a step, packed   S kv tokens   N q heads   K kv heads   G = N/K   H head dim
    D model   F ffw   V vocabulary   L layers   E experts   P pages   R rows a page   M pages a sequence   Q queue
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Params = Any
"""A pytree of arrays, of the structure that a family's `abstract` gives."""


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """What one layer keeps in the cache. Layers with equal specs form a group that shares pages and tables.

    Attributes:
      kv_heads: K.
      key_dim: H of the keys.
      value_dim: H of the values.
      window: keys a query sees, itself included; None sees all.
      storage: dtype name of the stored rows, e.g. "float32", "bfloat16".
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    storage: str = "bfloat16"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * jax.numpy.dtype(self.storage).itemsize


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: the same leaf yields its initial value, its sharding and its checkpoint tensors.

    Attributes:
      shape: as the forward function sees it.
      axes: a logical axis name (or None) per dimension; `kvjax.sharding` maps them to mesh axes.
      names: Hugging Face tensor names that make it up. One name: read as is. Several: each is transformed,
        then they are joined along `concat_axis`.
      transpose: whether each tensor, stored (out, in) by Hugging Face, is read as (in, out) and then reshaped.
      concat_axis: the axis of the transformed tensors along which several names are joined.
      init_scale: standard deviation of random initial values; 0 gives zeros, None gives ones.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    names: tuple[str, ...]
    transpose: bool = False
    concat_axis: int = 0
    init_scale: float | None = 0.02


class GGUFNames(NamedTuple):
    """How llama.cpp's container names a family's tensors and hyper-parameters.

    Attributes:
      architectures: values of `general.architecture` that this family reads.
      tensors: GGUF tensor name → Hugging Face name; "{i}" stands for the layer number in both.
      config: GGUF metadata (key → Python value) and architecture → Hugging Face config.json fields.
      permuted: for an architecture, Hugging Face name suffixes whose rows llama.cpp interleaves for its RoPE, with
        the config field that counts their heads; the reader undoes it.
    """

    architectures: tuple[str, ...]
    tensors: Mapping[str, str]
    config: Callable[[Mapping[str, Any], str], dict[str, Any]]
    permuted: Callable[[str], Mapping[str, str]]


class Family(NamedTuple):
    """A model family: a record of pure functions. The engine is passed one and never imports one.

    Attributes:
      name: for messages, e.g. "llama".
      architectures: values of config.json's `architectures` that this family runs.
      config: config.json fields (and the context length to serve, or None) → frozen config, of which the engine
        reads `vocab` (V), `width` (D) and `context`. Raises ModelError for an option that is not implemented.
      abstract: config → tree of ParamSpec: `{"embed": ..., "layers": [...], ...}`; `layers` holds one equal
        structure per layer, so it can be stacked for a scan.
      kv_specs: config, storage dtype name → one KVSpec per layer.
      forward: (params, config, tokens (T,), positions (T,), cache, attend) → (cache, hidden (T, D)), the final norm
        applied. `attend(cache, layer, q (T, N, H), k (T, K, H), v (T, K, H), scale) → (cache, out (T, N, H))`.
      unembed: (params, config, hidden (T, D)) → logits (T, V) float32.
      gguf: names in llama.cpp's container, or None.
    """

    name: str
    architectures: tuple[str, ...]
    config: Callable[..., Any]
    abstract: Callable[[Any], Any]
    kv_specs: Callable[[Any, str], tuple[KVSpec, ...]]
    forward: Callable[..., tuple[Any, jax.Array]]
    unembed: Callable[..., jax.Array]
    gguf: GGUFNames | None = None
