"""Gemma 2 and Gemma 3 (text): local and global layers, norms before and after each half, soft caps (2) or q and k norms
(3), a RoPE of each kind of layer (3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder, fields
from kvjax.models.gguf_gemma import GEMMA_GGUF
from kvjax.models.layers import (
    ACTIVATIONS,
    embed,
    gated_mlp,
    norm_spec,
    over_layers,
    rms_norm,
    soft_cap,
)
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table, rotation
from kvjax.types import Family, Params, ParamSpec, Rotation

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
    fields.check_groups(heads, kv_heads)
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
    return decoder.whole(config, [_abstract_layer(config, f"model.layers.{i}.") for i in range(len(config.windows))])


def _abstract_layer(config: GemmaConfig, prefix: str) -> dict[str, ParamSpec]:
    D, H = config.width, config.head_dim
    layer = {
        "attn_norm": norm_spec(D, f"{prefix}input_layernorm.weight"),
        **decoder.attention_specs(config, prefix, qkv_bias=config.attn_bias, out_bias=config.attn_bias),
        "after_attn_norm": norm_spec(D, f"{prefix}post_attention_layernorm.weight"),
        "mlp_norm": norm_spec(D, f"{prefix}pre_feedforward_layernorm.weight"),
        **decoder.mlp_specs(D, config.ffw, f"{prefix}mlp."),
        "after_mlp_norm": norm_spec(D, f"{prefix}post_feedforward_layernorm.weight"),
    }
    if config.qk_norm:
        layer["q_norm"] = norm_spec(H, f"{prefix}self_attn.q_norm.weight", None)
        layer["k_norm"] = norm_spec(H, f"{prefix}self_attn.k_norm.weight", None)
    return layer


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
        q, k, v = decoder.qkv(p, h)
        if config.qk_norm:
            q, k = norm(p, "q_norm", q), norm(p, "k_norm", k)
        q, k = apply_rope(q, *angles(layer)), apply_rope(k, *angles(layer))
        cache, out = attend(cache, layer, q, k, v, config.scale, soft_cap=config.attn_cap)
        x = x + norm(p, "after_attn_norm", decoder.attention_output(p, out))
        out = gated_mlp(norm(p, "mlp_norm", x), p["gate_up"], p["down"], activation=config.activation)
        return cache, x + norm(p, "after_mlp_norm", out)

    x = embed(params["embed"], tokens)
    cache, x = over_layers(block, cache, x * jnp.asarray(config.width**0.5, x.dtype), params["layers"])
    return cache, norm(params, "final_norm", x)


def unembed(params: Params, config: GemmaConfig, hidden: jax.Array) -> jax.Array:
    """hidden (T, D) → logits (T, V) float32."""
    return soft_cap(decoder.unembed(params, config, hidden), config.final_cap)


def rotations(config: GemmaConfig) -> tuple[Rotation | None, ...]:
    """Of each layer."""
    ropes = [config.rope if window is None else config.local_rope for window in config.windows]
    return tuple(rotation(rope, config.context) for rope in ropes)


GEMMA = Family(
    name="gemma",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=decoder.kv_specs,
    forward=forward,
    unembed=unembed,
    gguf=GEMMA_GGUF,
    rotations=rotations,
)
