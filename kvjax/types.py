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
import numpy as np

from kvjax import storages
from kvjax.pallas_kernels import packed

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
      storage: how the rows are stored, a name in full of `kvjax.storages`: "float32", "bfloat16", …; of 8 bits ("int8",
        "float8_e4m3fn", "float8_e5m2") they are codes, with a float32 scale for each head's row of K and of V; others
        are packed codes. A layer whose window is no longer than the rows in full precision has no codes.
      latent: whether the values are the first `value_dim` numbers of the keys, and not stored again (MLA).
      shares: an earlier layer whose rows this one reads, having none of its own (cross-layer attention, 2405.12981;
        Gemma 3n). The other fields are those of that layer.
      twin: whether these are the newest rows, in full precision, of layers that have codes of all rows, too.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    storage: str = "bfloat16"
    latent: bool = False
    shares: int | None = None
    twin: bool = False

    def __post_init__(self) -> None:
        stored = self.stored
        if stored.recent and self.window is not None and self.window <= stored.recent:
            object.__setattr__(self, "storage", stored.full)

    @property
    def stored(self) -> storages.Storage:
        """What `storage` means."""
        return storages.parse(self.storage)

    @property
    def recent(self) -> KVSpec | None:
        """The newest rows in full precision that such a layer keeps, too; None where it keeps none."""
        stored = self.stored
        if not stored.recent or self.shares is not None:
            return None
        return dataclasses.replace(self, window=stored.recent, storage=stored.full, twin=True)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, but for those of rows in full precision."""
        if self.shares is not None:
            return 0
        codes = self.stored.codes
        if codes is not None:
            per_key, per_value = (packed.BITS[kind] for kind in (codes.key, codes.value))
            return self.kv_heads * (self.key_dim * per_key + self.value_dim * per_value) // 8 + 4 * self.scales
        numbers = self.key_dim if self.latent else self.key_dim + self.value_dim
        return self.kv_heads * numbers * self.stored.dtype.itemsize + 4 * self.scales

    @property
    def scales(self) -> int:
        """Scales of one token in one layer, words of 4 bytes: one of its keys and one of its values in each head, one
        for each group in KIVI; 0 where rows are not codes."""
        codes = self.stored.codes
        if codes is not None:
            parts = ((codes.key, self.key_dim), (codes.value, self.value_dim))
            each = sum(-(-dim // codes.group) if packed.grouped(kind) else 1 for kind, dim in parts)
            return self.kv_heads * each
        return self.kv_heads * (1 if self.latent else 2) if self.stored.scaled else 0


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How a layer turns its queries and keys by their positions (RoPE, 2104.09864).

    Attributes:
      frequencies: n radians per position, of as many pairs of dims.
      factor: multiplies cos and sin, and so what is turned.
      interleaved: pairs are (2i, 2i + 1) instead of (i, i + n).
      first: the first dim of a query that is turned; those behind the pairs are left as they are, too.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False
    first: int = 0


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
      rows: (start, stop, all): the rows of the one tensor that are read, where it holds other parameters too; None
        reads the whole tensor.
      init_scale: standard deviation of random initial values; 0 gives zeros, None gives ones.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    names: tuple[str, ...]
    transpose: bool = False
    concat_axis: int = 0
    rows: tuple[int, int, int] | None = None
    init_scale: float | None = 0.02


class GGUFMade(NamedTuple):
    """A Hugging Face tensor that GGUF files do not hold row by row, made of one or several stored ones.

    Attributes:
      parts: names of the stored tensors; "{i}" stands for the layer number.
      shape: row-major shapes of the parts → that of the tensor. Raises ValueError if they do not fit.
      make: the parts, float32 → the tensor.
      whole: False: from entries a … b of every part's first axis `make` makes those of the tensor's, or as many times
        more as its first axis is longer, so it need not see more. True: it needs the whole parts for any row.
    """

    parts: tuple[str, ...]
    shape: Callable[..., tuple[int, ...]]
    make: Callable[..., np.ndarray]
    whole: bool = False


class GGUFNames(NamedTuple):
    """How llama.cpp's container names a family's tensors and hyper-parameters, and how it holds them.

    Attributes:
      architectures: values of `general.architecture` that this family reads.
      tensors: architecture and config.json fields → {GGUF tensor name: Hugging Face name}; "{i}" stands for the layer
        number in both, "{e}" for that of an expert. Where only Hugging Face's name has "{e}", the stored tensor is the
        stack of all experts.
      config: GGUF metadata (key → Python value) and architecture → Hugging Face config.json fields.
      rows: architecture and config.json fields → {Hugging Face name suffix: order}, for tensors whose rows llama.cpp
        stores in another order: `order(count)` is, for each of Hugging Face's rows, the number of the stored one.
        Raises ValueError if there cannot be so many rows.
      made: Hugging Face name → how it is made, for what is none of the above.
    """

    architectures: tuple[str, ...]
    tensors: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
    config: Callable[[Mapping[str, Any], str], dict[str, Any]]
    rows: Callable[[str, Mapping[str, Any]], Mapping[str, Callable[[int], np.ndarray]]]
    made: Mapping[str, GGUFMade]


class Family(NamedTuple):
    """A model family: a record of pure functions. The engine is passed one and never imports one.

    Attributes:
      name: for messages, e.g. "llama".
      architectures: values of config.json's `architectures` that this family runs.
      config: config.json fields (and the context length to serve, or None) → frozen config, of which the engine
        reads `vocab` (V), `width` (D) and `context`. Raises ModelError for an option that is not implemented.
      abstract: config → tree of ParamSpec: `{"embed": ..., "layers": [...], ...}`; where every layer of `layers` has
        the same structure, they can be stacked for a scan.
      kv_specs: config, storage dtype name → one KVSpec per layer.
      forward: (params, config, tokens (T,), positions (T,), cache, attend) → (cache, hidden (T, D)), the final norm
        applied. `attend(cache, layer, q (T, N, H), k (T, K, H), v (T, K, H), scale) → (cache, out (T, N, H))`, which
        also takes `soft_cap`, `sinks`, `slopes` and `up` as `kvjax.cache.attend` does; v is None where the spec is
        latent, and k and v are where it shares another layer's rows.
      unembed: (params, config, hidden (T, D)) → logits (T, V) float32.
      gguf: names in llama.cpp's container, or None.
      prefix: what checkpoints saved from the bare transformer leave out at the beginning of names.
      unused: config → patterns of tensors that a checkpoint may have and the forward function does not need.
      rotations: config → what each layer turns q and k by before it calls `attend`, None for a layer that does not. No
        function: it is not known.
    """

    name: str
    architectures: tuple[str, ...]
    config: Callable[..., Any]
    abstract: Callable[[Any], Any]
    kv_specs: Callable[[Any, str], tuple[KVSpec, ...]]
    forward: Callable[..., tuple[Any, jax.Array]]
    unembed: Callable[..., jax.Array]
    gguf: GGUFNames | None = None
    prefix: str = "model."
    unused: Callable[[Any], tuple[str, ...]] = lambda config: ()
    rotations: Callable[[Any], tuple[Rotation | None, ...]] | None = None
