"""The transformer with layer norms, in the forms of the years before Llama.

GPT-2, OPT, GPT-NeoX, Falcon, BLOOM, MPT and XGLM differ in how they know positions, how q, k and v lie in their tensor,
in biases, and in whether attention and feed-forward follow each other or stand side by side. Those choices are
`GPTConfig`; a family's own file reads them from config.json and names the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import ModelError
from kvjax.models.layers import bias_spec, biased, embed, layer_norm, mlp, norm_spec, over_layers, project
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_table, rotation, sinusoids
from kvjax.types import KVSpec, Params, ParamSpec, Rotation


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F.
      heads: N.
      kv_heads: K.
      head_dim: H.
      layers: L.
      norm_eps: of every layer norm.
      activation: of the feed-forward, by Hugging Face's name.
      packing: order of the rows of the projection to q, k and v: "3NH" (all of q, then k, then v), "N3H" (q, k and v of
        each head), or "KGH" (of each kv head its G queries, its k and its v).
      context: longest sequence the engine will serve.
      trained_context: longest sequence the checkpoint promises.
      rope: rotary positions, or None.
      slopes: of ALiBi, one a head; () is none.
      learned_positions: rows of the table of learned positions; 0 is none.
      sinusoidal: whether sines and cosines of the position are added to the embedding.
      position_offset: added to every position.
      embed_scale: multiplies the embedding.
      embed_norm: layer norm on the embedding.
      parallel: attention and feed-forward both see the layer's input.
      own_mlp_norm: with `parallel`, whether the feed-forward has a norm of its own.
      residual_normed: the residual is the normed input (BLOOM's apply_residual_connection_post_layernorm).
      norm_bias: whether layer norms have biases.
      attn_bias: bias on q, k, v and on the attention's output.
      mlp_bias: bias on the feed-forward.
      clip: bound on q, k and v, or None.
      scale: multiplies q·k; None is 1/√H.
      by_layer: whether layer i's q·k is divided by i + 1 as well.
      tied: the unembedding is the embedding.
    """

    vocab: int
    width: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    norm_eps: float
    activation: str
    packing: str
    context: int
    trained_context: int
    rope: Rope | None = None
    slopes: tuple[float, ...] = ()
    learned_positions: int = 0
    sinusoidal: bool = False
    position_offset: int = 0
    embed_scale: float = 1.0
    embed_norm: bool = False
    parallel: bool = False
    own_mlp_norm: bool = True
    residual_normed: bool = False
    norm_bias: bool = True
    attn_bias: bool = True
    mlp_bias: bool = True
    clip: float | None = None
    scale: float | None = None
    by_layer: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        if self.learned_positions and self.context > self.trained_context:
            raise ModelError(
                f"A context of {self.context} tokens was asked for, but the model has learned its "
                f"{self.trained_context} positions one by one: give a context of at most {self.trained_context}."
            )


Names = Mapping[str, str | tuple[str, ...]]
"""Parameter → the module, or modules, that hold its weight and bias; "{i}" stands for the layer."""


def abstract(config: GPTConfig, names: Names, transposed: bool = False) -> Params:
    """The tree of ParamSpec. `transposed`: the layers' matrices are stored (in, out), as GPT-2's are."""
    D, V = config.width, config.vocab
    tree: dict[str, Any] = {
        "embed": ParamSpec((V, D), ("vocab", "width"), _named(names, "embed")),
        "layers": [_abstract_layer(config, _of_layer(names, i), transposed) for i in range(config.layers)],
        **_norm(config, names, "final_norm"),
    }
    if config.embed_norm:
        tree |= _norm(config, names, "embed_norm")
    if config.learned_positions:
        tree["positions"] = ParamSpec((config.learned_positions, D), (None, "width"), _named(names, "positions"))
    if not config.tied:
        tree["unembed"] = ParamSpec((V, D), ("vocab", "width"), _named(names, "unembed"))
    return tree


def _of_layer(names: Names, layer: int) -> Names:
    def fill(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return name.format(i=layer) if isinstance(name, str) else tuple(part.format(i=layer) for part in name)

    return {key: fill(name) for key, name in names.items()}


def _named(names: Names, key: str, part: str = "weight") -> tuple[str, ...]:
    found = names[key]
    return tuple(f"{name}.{part}" for name in ((found,) if isinstance(found, str) else found))


def _norm(config: GPTConfig, names: Names, key: str) -> dict[str, ParamSpec]:
    specs = {key: norm_spec(config.width, *_named(names, key))}
    if config.norm_bias:
        specs[f"{key}_bias"] = bias_spec((config.width,), ("width",), *_named(names, key, "bias"))
    return specs


def _abstract_layer(config: GPTConfig, names: Names, transposed: bool) -> dict[str, ParamSpec]:
    D, F, N, K, H = config.width, config.ffw, config.heads, config.kv_heads, config.head_dim
    qkv, axes = {
        "3NH": ((3, N, H), (None, "heads", None)),
        "N3H": ((N, 3, H), ("heads", None, None)),
        "KGH": ((K, N // K + 2, H), ("kv_heads", None, None)),
    }[config.packing]
    layer = _norm(config, names, "attn_norm")
    if config.own_mlp_norm:
        layer |= _norm(config, names, "mlp_norm")

    def linear(key: str, out: tuple, out_axes: tuple, inner: tuple, inner_axes: tuple, bias: bool) -> None:
        spec = ParamSpec((*out, *inner), (*out_axes, *inner_axes), _named(names, key), transpose=transposed)
        layer[key] = spec
        if bias:
            layer[f"{key}_bias"] = bias_spec(out, out_axes, *_named(names, key, "bias"))

    linear("qkv", qkv, axes, (D,), ("width",), config.attn_bias)
    linear("out", (D,), ("width",), (N, H), ("heads", None), config.attn_bias)
    linear("up", (F,), ("ffw",), (D,), ("width",), config.mlp_bias)
    linear("down", (D,), ("width",), (F,), ("ffw",), config.mlp_bias)
    return layer


def kv_specs(config: GPTConfig, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer."""
    return (KVSpec(config.kv_heads, config.head_dim, config.head_dim, None, storage),) * config.layers


def forward(
    params: Params, config: GPTConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    angles = None if config.rope is None else cos_sin(rope_table(config.rope, config.context), positions)
    slopes = jnp.asarray(config.slopes, jnp.float32) if config.slopes else None
    scale = config.head_dim**-0.5 if config.scale is None else config.scale

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = _normed(config, p, "attn_norm", x)
        q, k, v = _qkv(config, p, h)
        if angles is not None:
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        if config.by_layer:
            q = q / jnp.asarray(layer + 1, q.dtype)
        cache, out = attend(cache, layer, q, k, v, scale, slopes=slopes)
        attended = biased(project(out, p["out"]), p.get("out_bias"))
        if config.parallel:
            return cache, x + attended + _mlp(
                config, p, _normed(config, p, "mlp_norm", x) if config.own_mlp_norm else h
            )
        x = (h if config.residual_normed else x) + attended
        h = _normed(config, p, "mlp_norm", x)
        return cache, (h if config.residual_normed else x) + _mlp(config, p, h)

    cache, x = over_layers(block, cache, _embedded(params, config, tokens, positions), params["layers"])
    return cache, _normed(config, params, "final_norm", x)


def _normed(config: GPTConfig, p: Params, key: str, x: jax.Array) -> jax.Array:
    return layer_norm(x, p[key], p.get(f"{key}_bias"), config.norm_eps)


def _mlp(config: GPTConfig, p: Params, h: jax.Array) -> jax.Array:
    return mlp(h, p["up"], p["down"], p.get("up_bias"), p.get("down_bias"), activation=config.activation)


def rotations(config: GPTConfig) -> tuple[Rotation | None, ...]:
    """Of each layer."""
    return (None if config.rope is None else rotation(config.rope, config.context),) * config.layers


def _embedded(params: Params, config: GPTConfig, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """tokens (T,), positions (T,) → (T, D), with whatever is added for positions."""
    x = embed(params["embed"], tokens)
    x = x * jnp.asarray(config.embed_scale, x.dtype)
    if config.embed_norm:
        x = _normed(config, params, "embed_norm", x)
    if config.learned_positions:
        x = x + embed(params["positions"], positions + config.position_offset)
    if config.sinusoidal:
        places, longest = positions + config.position_offset, config.context + config.position_offset
        x = x + sinusoids(places, config.width, longest).astype(x.dtype)
    return x


def _qkv(config: GPTConfig, p: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """h (T, D) → q (T, N, H), k (T, K, H), v (T, K, H)."""
    qkv = biased(project(h, p["qkv"]), p.get("qkv_bias"))
    if config.clip is not None:
        qkv = jnp.clip(qkv, -config.clip, config.clip)
    if config.packing == "3NH":
        return qkv[:, 0], qkv[:, 1], qkv[:, 2]
    if config.packing == "N3H":
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    q = qkv[:, :, :-2].reshape(h.shape[0], config.heads, config.head_dim)
    return q, qkv[:, :, -2], qkv[:, :, -1]
