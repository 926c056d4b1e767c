"""Gemma 2 and Gemma 3 (text): local and global layers, norms before and after each half, soft caps (2) or q and k norms
(3), a RoPE of each kind of layer (3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import ModelError
from kvjax.models import fields
from kvjax.models.gguf_gemma import GEMMA_GGUF
from kvjax.models.layers import (
    ACTIVATIONS,
    biased,
    embed,
    gated_mlp,
    norm_spec,
    over_layers,
    project,
    rms_norm,
    soft_cap,
)
from kvjax.models.layers import bias_spec as _bias
from kvjax.models.layers import unembed as logits_of
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table
from kvjax.types import Family, KVSpec, Params, ParamSpec

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
ARCHITECTURES = (GEMMA2, GEMMA3)


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F.
      heads: N.
      kv_heads: K.
      head_dim: H.
      norm_eps: of every RMS norm.
      activation: of the feed-forward's gate.
      rope: of global layers.
      local_rope: of local layers.
      windows: keys that each layer's queries see; None sees all. Its length is L.
      scale: multiplies q·k.
      attn_cap: soft cap of the attention's logits, or None.
      final_cap: soft cap of the output's logits, or None.
      qk_norm: RMS norm on each head of q and k.
      attn_bias: bias on all projections of attention.
      tied: the unembedding is the embedding.
      one_plus: gains of norms are 1 + weight; GGUF files hold them added up.
      context: longest sequence the engine will serve.
      trained_context: longest sequence the checkpoint promises.
    """

    vocab: int
    width: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope: Rope
    local_rope: Rope
    windows: tuple[int | None, ...]
    scale: float
    attn_cap: float | None
    final_cap: float | None
    qk_norm: bool
    attn_bias: bool
    tied: bool
    one_plus: bool
    context: int
    trained_context: int


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> GemmaConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    third = fields.architecture(hf, ARCHITECTURES) == GEMMA3
    fields.refuse(hf, "use_bidirectional_attention", what="an encoder")
    heads, kv_heads = fields.count(hf, "num_attention_heads", 8), fields.count(hf, "num_key_value_heads", 4)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.count(hf, "head_dim", 256, most=fields.MOST_HEAD_DIM)
    layers, trained = fields.layer_count(hf), fields.count(hf, "max_position_embeddings", 131_072 if third else 8192)
    pattern = fields.count(hf, "sliding_window_pattern", 6) if third else 2
    rope, local_rope = _ropes(hf, head_dim, third)
    return GemmaConfig(
        vocab=fields.count(hf, "vocab_size", 262_208 if third else 256_000),
        width=fields.count(hf, "hidden_size", 2304),
        ffw=fields.count(hf, "intermediate_size", 9216),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive(hf, "rms_norm_eps", 1e-6),
        activation=fields.choice(hf, "hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        rope=rope,
        local_rope=local_rope,
        windows=fields.windows({"sliding_window": 4096, **hf}, layers, [(i + 1) % pattern != 0 for i in range(layers)]),
        scale=fields.positive(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attn_cap=fields.optional({} if third else {"attn_logit_softcapping": 50.0, **hf}, "attn_logit_softcapping"),
        final_cap=fields.optional({} if third else {"final_logit_softcapping": 30.0, **hf}, "final_logit_softcapping"),
        qk_norm=third,
        attn_bias=fields.flag(hf, "attention_bias"),
        tied=fields.flag(hf, "tie_word_embeddings", True),
        one_plus=not fields.flag(hf, "norms_hold_gains"),  # kvjax's own word, for GGUF files
        context=context or trained,
        trained_context=trained,
    )


def _ropes(hf: Mapping[str, Any], head_dim: int, third: bool) -> tuple[Rope, Rope]:
    """Of global and of local layers. Only Gemma 3 has two; transformers 5 writes them as one object a kind of layer."""
    if not third:
        rope = rope_from_hf(hf, head_dim)
        return rope, rope
    nested = hf.get("rope_parameters")
    if isinstance(nested, Mapping) and any(isinstance(value, Mapping) for value in nested.values()):
        return rope_from_hf(hf, head_dim, "full_attention"), rope_from_hf(
            {**hf, "rope_scaling": None}, head_dim, "sliding_attention"
        )
    local = {"rope_theta": fields.positive(hf, "rope_local_base_freq", 10_000.0)}
    return rope_from_hf({"rope_theta": 1_000_000.0, **hf}, head_dim), rope_from_hf(local, head_dim)


def abstract(config: GemmaConfig) -> Params:
    """The tree of ParamSpec."""
    D, V = config.width, config.vocab
    tree: dict[str, Any] = {
        "embed": ParamSpec((V, D), ("vocab", "width"), ("model.embed_tokens.weight",)),
        "layers": [_abstract_layer(config, f"model.layers.{i}.") for i in range(len(config.windows))],
        "final_norm": norm_spec(D, "model.norm.weight"),
    }
    if not config.tied:
        tree["unembed"] = ParamSpec((V, D), ("vocab", "width"), ("lm_head.weight",))
    return tree


def _abstract_layer(config: GemmaConfig, prefix: str) -> dict[str, ParamSpec]:
    D, F, N, K, H = config.width, config.ffw, config.heads, config.kv_heads, config.head_dim
    attention = [f"{prefix}self_attn.{part}_proj" for part in "qkvo"]
    layer = {
        "attn_norm": norm_spec(D, f"{prefix}input_layernorm.weight"),
        "q": ParamSpec((N, H, D), ("heads", None, "width"), (f"{attention[0]}.weight",)),
        "kv": ParamSpec(
            (2, K, H, D), (None, "kv_heads", None, "width"), tuple(f"{name}.weight" for name in attention[1:3])
        ),
        "out": ParamSpec((D, N, H), ("width", "heads", None), (f"{attention[3]}.weight",)),
        "after_attn_norm": norm_spec(D, f"{prefix}post_attention_layernorm.weight"),
        "mlp_norm": norm_spec(D, f"{prefix}pre_feedforward_layernorm.weight"),
        "gate_up": ParamSpec(
            (2, F, D), (None, "ffw", "width"), (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
        ),
        "down": ParamSpec((D, F), ("width", "ffw"), (f"{prefix}mlp.down_proj.weight",)),
        "after_mlp_norm": norm_spec(D, f"{prefix}post_feedforward_layernorm.weight"),
    }
    if config.attn_bias:
        layer["q_bias"] = _bias((N, H), ("heads", None), f"{attention[0]}.bias")
        layer["kv_bias"] = _bias((2, K, H), (None, "kv_heads", None), *(f"{name}.bias" for name in attention[1:3]))
        layer["out_bias"] = _bias((D,), ("width",), f"{attention[3]}.bias")
    if config.qk_norm:
        layer["q_norm"] = norm_spec(H, f"{prefix}self_attn.q_norm.weight", None)
        layer["k_norm"] = norm_spec(H, f"{prefix}self_attn.k_norm.weight", None)
    return layer


def kv_specs(config: GemmaConfig, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer: local and global layers are two groups."""
    return tuple(
        KVSpec(config.kv_heads, config.head_dim, config.head_dim, window, storage) for window in config.windows
    )


def forward(
    params: Params, config: GemmaConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    whole = cos_sin(rope_table(config.rope, config.context), positions)
    local = whole if config.local_rope == config.rope else cos_sin(
        rope_table(config.local_rope, config.context), positions
    )  # fmt: skip
    slides = [window is not None for window in config.windows]

    def angles(layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        if isinstance(layer, int):
            return local if slides[layer] else whole
        return jax.tree.map(lambda x, y: jnp.where(jnp.asarray(slides)[layer], x, y), local, whole)

    def norm(p: Params, key: str, x: jax.Array) -> jax.Array:
        return rms_norm(x, p[key], config.norm_eps, one_plus=config.one_plus)

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = norm(p, "attn_norm", x)
        q = biased(project(h, p["q"]), p.get("q_bias"))
        kv = biased(project(h, p["kv"]), p.get("kv_bias"))
        k, v = kv[:, 0], kv[:, 1]
        if config.qk_norm:
            q, k = norm(p, "q_norm", q), norm(p, "k_norm", k)
        q, k = apply_rope(q, *angles(layer)), apply_rope(k, *angles(layer))
        cache, out = attend(cache, layer, q, k, v, config.scale, soft_cap=config.attn_cap)
        x = x + norm(p, "after_attn_norm", biased(project(out, p["out"]), p.get("out_bias")))
        out = gated_mlp(norm(p, "mlp_norm", x), p["gate_up"], p["down"], activation=config.activation)
        return cache, x + norm(p, "after_mlp_norm", out)

    x = embed(params["embed"], tokens)
    cache, x = over_layers(block, cache, x * jnp.asarray(config.width**0.5, x.dtype), params["layers"])
    return cache, norm(params, "final_norm", x)


def unembed(params: Params, config: GemmaConfig, hidden: jax.Array) -> jax.Array:
    """hidden (T, D) → logits (T, V) float32."""
    return soft_cap(logits_of(params["embed"] if config.tied else params["unembed"], hidden), config.final_cap)


GEMMA = Family(
    name="gemma",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=kv_specs,
    forward=forward,
    unembed=unembed,
    gguf=GEMMA_GGUF,
)
