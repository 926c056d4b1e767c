"""Parts of a decoder under the names that Llama gave them, and most families since: parameters, and what uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from kvjax.models.layers import bias_spec, biased, norm_spec, project
from kvjax.models.layers import unembed as logits_of
from kvjax.types import KVSpec, Params, ParamSpec


class Decoder(Protocol):
    """The fields of a config that every decoder has: V, D, and whether the unembedding is the embedding."""

    @property
    def vocab(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def tied(self) -> bool: ...


class Attention(Decoder, Protocol):
    """The fields of a config with grouped heads: N, K, H, and the window of each layer."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...


def whole(config: Decoder, layers: Sequence[Params]) -> Params:
    """The tree of ParamSpec around those of the layers."""
    D, V = config.width, config.vocab
    tree: dict[str, Any] = {
        "embed": ParamSpec((V, D), ("vocab", "width"), ("model.embed_tokens.weight",)),
        "layers": list(layers),
        "final_norm": norm_spec(D, "model.norm.weight"),
    }
    if not config.tied:
        tree["unembed"] = ParamSpec((V, D), ("vocab", "width"), ("lm_head.weight",))
    return tree


def attention_specs(config: Attention, prefix: str, *, qkv_bias: bool, out_bias: bool) -> dict[str, ParamSpec]:
    """Projections to q, k and v and from the heads; `prefix` is the layer's."""
    D, N, K, H = config.width, config.heads, config.kv_heads, config.head_dim
    q, k, v, out = (f"{prefix}self_attn.{part}_proj" for part in "qkvo")
    specs = {
        "q": ParamSpec((N, H, D), ("heads", None, "width"), (f"{q}.weight",)),
        "kv": ParamSpec((2, K, H, D), (None, "kv_heads", None, "width"), (f"{k}.weight", f"{v}.weight")),
        "out": ParamSpec((D, N, H), ("width", "heads", None), (f"{out}.weight",)),
    }
    if qkv_bias:
        specs["q_bias"] = bias_spec((N, H), ("heads", None), f"{q}.bias")
        specs["kv_bias"] = bias_spec((2, K, H), (None, "kv_heads", None), f"{k}.bias", f"{v}.bias")
    if out_bias:
        specs["out_bias"] = bias_spec((D,), ("width",), f"{out}.bias")
    return specs


def mlp_specs(width: int, ffw: int, name: str, *, bias: bool = False) -> dict[str, ParamSpec]:
    """A gated feed-forward; `name` is its module's, with the dot."""
    gate, up, down = (f"{name}{part}_proj" for part in ("gate", "up", "down"))
    specs = {
        "gate_up": ParamSpec((2, ffw, width), (None, "ffw", "width"), (f"{gate}.weight", f"{up}.weight")),
        "down": ParamSpec((width, ffw), ("width", "ffw"), (f"{down}.weight",)),
    }
    if bias:
        specs["gate_up_bias"] = bias_spec((2, ffw), (None, "ffw"), f"{gate}.bias", f"{up}.bias")
        specs["down_bias"] = bias_spec((width,), ("width",), f"{down}.bias")
    return specs


def qkv(p: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """h (T, D) → q (T, N, H), k (T, K, H), v (T, K, H)."""
    kv = biased(project(h, p["kv"]), p.get("kv_bias"))
    return biased(project(h, p["q"]), p.get("q_bias")), kv[:, 0], kv[:, 1]


def attention_output(p: Params, out: jax.Array) -> jax.Array:
    """Of the heads (T, N, H) → (T, D)."""
    return biased(project(out, p["out"]), p.get("out_bias"))


def kv_specs(config: Attention, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer: layers with and without a window are two groups."""
    H = config.head_dim
    return tuple(KVSpec(config.kv_heads, H, H, window, storage) for window in config.windows)


def unembed(params: Params, config: Decoder, hidden: jax.Array) -> jax.Array:
    """hidden (T, D) → logits (T, V) float32."""
    return logits_of(params["embed"] if config.tied else params["unembed"], hidden)
