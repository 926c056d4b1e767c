"""gpt-oss: learned sinks, a window in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder, fields, moe
from kvjax.models.gguf_gpt_oss import GPT_OSS_GGUF
from kvjax.models.layers import bias_spec, embed, norm_spec, over_layers, rms_norm
from kvjax.models.layers import unembed as logits_of
from kvjax.models.moe import Routing
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table, rotation
from kvjax.types import Family, Params, ParamSpec, Rotation

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True)
class GptOssConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F of an expert.
      heads: N.
      kv_heads: K.
      head_dim: H.
      norm_eps: of every RMS norm.
      rope: how positions become angles.
      windows: keys that each layer's queries see; None sees all. Its length is L.
      routing: of the experts.
      gate_slope: of the sigmoid in the experts' gate.
      gate_limit: bound on the gate and up projections.
      attn_bias: bias on all projections of attention.
      tied: the unembedding is the embedding.
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
    rope: Rope
    windows: tuple[int | None, ...]
    routing: Routing
    gate_slope: float
    gate_limit: float
    attn_bias: bool
    tied: bool
    context: int
    trained_context: int


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> GptOssConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    heads, kv_heads = fields.count(hf, "num_attention_heads", 64), fields.count(hf, "num_key_value_heads", 8)
    fields.check_groups(heads, kv_heads)
    fields.choice(hf, "hidden_act", ("silu",), "silu")
    head_dim = fields.count(hf, "head_dim", 64, most=fields.MOST_HEAD_DIM)
    layers, trained = fields.layer_count(hf), fields.count(hf, "max_position_embeddings", 131_072)
    experts = fields.count(hf, "num_local_experts", 128)
    rope = {"rope_theta": 150_000.0, **hf}
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        rope["rope_scaling"] = _YARN
    return GptOssConfig(
        vocab=fields.count(hf, "vocab_size", 201_088),
        width=fields.count(hf, "hidden_size", 2880),
        ffw=fields.count(hf, "intermediate_size", 2880),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive(hf, "rms_norm_eps", 1e-5),
        rope=rope_from_hf(rope, head_dim),
        windows=fields.windows({"sliding_window": 128, **hf}, layers, [i % 2 == 0 for i in range(layers)]),
        routing=Routing(experts, fields.count(hf, "num_experts_per_tok", 4, most=experts), "softmax of chosen"),
        gate_slope=fields.positive(hf, "swiglu_alpha", 1.702),
        gate_limit=fields.positive(hf, "swiglu_limit", 7.0),
        attn_bias=fields.flag(hf, "attention_bias", True),
        tied=fields.flag(hf, "tie_word_embeddings"),
        context=context or trained,
        trained_context=trained,
    )


def abstract(config: GptOssConfig) -> Params:
    """The tree of ParamSpec."""
    return decoder.whole(config, [_abstract_layer(config, f"model.layers.{i}.") for i in range(len(config.windows))])


def _abstract_layer(config: GptOssConfig, prefix: str) -> dict[str, Any]:
    D, F, N, E = config.width, config.ffw, config.heads, config.routing.experts
    experts = f"{prefix}mlp.experts."
    return {
        "attn_norm": norm_spec(D, f"{prefix}input_layernorm.weight"),
        **decoder.attention_specs(config, prefix, qkv_bias=config.attn_bias, out_bias=config.attn_bias),
        "sinks": bias_spec((N,), ("heads",), f"{prefix}self_attn.sinks"),
        "mlp_norm": norm_spec(D, f"{prefix}post_attention_layernorm.weight"),
        "router": ParamSpec((E, D), (None, "width"), (f"{prefix}mlp.router.weight",)),
        "router_bias": bias_spec((E,), (None,), f"{prefix}mlp.router.bias"),
        "experts": {  # columns of gate and up alternate
            "gate_up": ParamSpec((E, D, 2 * F), ("experts", "width", "ffw"), (f"{experts}gate_up_proj",)),
            "gate_up_bias": bias_spec((E, 2 * F), ("experts", "ffw"), f"{experts}gate_up_proj_bias"),
            "down": ParamSpec((E, F, D), ("experts", "ffw", "width"), (f"{experts}down_proj",)),
            "down_bias": bias_spec((E, D), ("experts", "width"), f"{experts}down_proj_bias"),
        },
    }


def forward(
    params: Params, config: GptOssConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    angles = cos_sin(rope_table(config.rope, config.context), positions)

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = rms_norm(x, p["attn_norm"], config.norm_eps)
        q, k, v = decoder.qkv(p, h)
        q, k, sinks = apply_rope(q, *angles), apply_rope(k, *angles), p["sinks"].astype(jnp.float32)
        cache, out = attend(cache, layer, q, k, v, config.head_dim**-0.5, sinks=sinks)
        x = x + decoder.attention_output(p, out)
        h = rms_norm(x, p["mlp_norm"], config.norm_eps)
        weights, expert = moe.route(logits_of(p["router"], h, p["router_bias"]), config.routing)
        return cache, x + moe.mixture(h, weights, expert, p["experts"], functools.partial(_experts, config))

    cache, x = over_layers(block, cache, embed(params["embed"], tokens), params["layers"])
    return cache, rms_norm(x, params["final_norm"], config.norm_eps)


def _experts(config: GptOssConfig, experts: Params, rows: jax.Array, dot: Callable, pick: Callable) -> jax.Array:
    """`compute` of `moe.mixture`: (up + 1)·gate·σ(α·gate), both clamped."""
    both = dot(rows, experts["gate_up"]) + pick(experts["gate_up_bias"])
    gate = jnp.minimum(both[:, 0::2], config.gate_limit)
    up = jnp.clip(both[:, 1::2], -config.gate_limit, config.gate_limit)
    hidden = (up + 1) * gate * jax.nn.sigmoid(gate * config.gate_slope)
    return dot(hidden, experts["down"]) + pick(experts["down_bias"])


def rotations(config: GptOssConfig) -> tuple[Rotation | None, ...]:
    """Of each layer."""
    return (rotation(config.rope, config.context),) * len(config.windows)


GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    config=config_from_hf,
    abstract=abstract,
    kv_specs=decoder.kv_specs,
    forward=forward,
    unembed=decoder.unembed,
    gguf=GPT_OSS_GGUF,
    rotations=rotations,
)
