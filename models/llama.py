"""Llama 1 to 3 and what has its form: Mistral, SmolLM2 and SmolLM3, Qwen2, Qwen3, Phi-3 and Phi-4, and the mixtures of
experts Mixtral and Qwen3-MoE. The pattern for all families.

A family is a config, an `abstract` tree of parameters, a forward function, and names; see `kvjax.types.Family`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder, fields, moe
from kvjax.models.gguf_llama import LLAMA_GGUF
from kvjax.models.layers import (
    embed,
    gated_mlp,
    norm_spec,
    over_layers,
    rms_norm,
)
from kvjax.models.layers import unembed as logits_of
from kvjax.models.moe import Routing
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table, rotation
from kvjax.types import Family, Params, ParamSpec, Rotation

QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
MISTRAL, MIXTRAL, PHI3, SMOLLM3 = "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, PHI3, SMOLLM3)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F.
      heads: N.
      kv_heads: K.
      head_dim: H.
      norm_eps: of every RMS norm.
      rope: how positions become angles.
      windows: keys that each layer's queries see; None sees all. Its length is L.
      tied: the unembedding is the embedding.
      qkv_bias: bias on the q, k and v projections.
      out_bias: bias on the attention's output projection.
      mlp_bias: bias on the feed-forward projections.
      qk_norm: RMS norm on each head of q and k.
      rotary: whether a layer rotates q and k at all (SmolLM3 leaves it out in every fourth).
      sparse: whether a layer's feed-forward is a mixture of experts.
      routing: of the experts, or None.
      expert_ffw: F of an expert.
      packed_names: Phi-3's checkpoints have q, k and v in one tensor, and gate and up in another.
      expert_names: of a sparse layer's router, of expert {e}, and of its gate, up and down projections.
      context: longest sequence the engine will serve; fixes length-dependent RoPE tables.
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
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary: tuple[bool, ...]
    sparse: tuple[bool, ...]
    routing: Routing | None
    expert_ffw: int
    packed_names: bool
    expert_names: tuple[str, ...]
    context: int
    trained_context: int


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> LlamaConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    architecture = fields.architecture(hf, ARCHITECTURES)
    if hf.get("hidden_act", "silu") != "silu":
        fields.choice(hf, "hidden_act", ("silu",), "silu")
    width, heads = fields.count(hf, "hidden_size"), fields.count(hf, "num_attention_heads")
    unsaid = heads if "num_key_value_heads" in hf else _KV_HEADS.get(architecture, heads)
    kv_heads = fields.count(hf, "num_key_value_heads", unsaid)
    head_dim = fields.count(hf, "head_dim", _HEAD_DIM.get(architecture, width // heads), most=fields.MOST_HEAD_DIM)
    fields.check_groups(heads, kv_heads)
    layers = fields.layer_count(hf)
    trained = fields.count(hf, "max_position_embeddings")
    attention_bias = fields.flag(hf, "attention_bias")
    sparse = _sparse(hf, architecture, layers)
    return LlamaConfig(
        vocab=fields.count(hf, "vocab_size"),
        width=width,
        ffw=fields.count(hf, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive(hf, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(_with_theta(hf, architecture), head_dim),
        windows=_windows(hf, architecture, layers),
        tied=fields.flag(hf, "tie_word_embeddings", architecture == SMOLLM3),
        qkv_bias=architecture == QWEN2 or attention_bias,
        out_bias=architecture != QWEN2 and attention_bias,
        mlp_bias=fields.flag(hf, "mlp_bias"),
        qk_norm=architecture in (QWEN3, QWEN3_MOE),
        rotary=_rotary(hf, architecture, layers),
        sparse=sparse,
        routing=_routing(hf, architecture) if any(sparse) else None,
        expert_ffw=fields.count(hf, "moe_intermediate_size" if architecture == QWEN3_MOE else "intermediate_size"),
        packed_names=architecture == PHI3,
        expert_names=_MIXTRAL_NAMES if architecture == MIXTRAL else _QWEN3_MOE_NAMES,
        context=context or trained,
        trained_context=trained,
    )


_KV_HEADS = {QWEN3_MOE: 4, MIXTRAL: 8, SMOLLM3: 4, MISTRAL: 8}
_HEAD_DIM: dict[str, int] = {QWEN3: 128}
"""Where config.json may leave them out, and transformers' defaults are not those of Llama."""
_MIXTRAL_NAMES = ("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", "w1", "w3", "w2")
_QWEN3_MOE_NAMES = ("mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")


def _with_theta(hf: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """Adds the base of RoPE where config.json leaves it out and transformers' default is not 10,000."""
    default = {SMOLLM3: 2_000_000.0, MIXTRAL: 1_000_000.0}.get(architecture)
    return {"rope_theta": default, **hf} if default else hf


def _windows(hf: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Mistral, Mixtral, Phi-3: every layer slides. Others: only with use_sliding_window, from max_window_layers on.

    SmolLM3 slides where it does not rotate. A sliding_window of null or 0 is none. Where no layer slides, the size and
    the first layer are not read.
    """
    kinds = fields.layer_types(hf, layers)
    slides = fields.flag(hf, "use_sliding_window", architecture in (MISTRAL, MIXTRAL, PHI3))
    window = fields.count(hf, "sliding_window", 0, least=0) if slides else 0
    if not window:
        return (None,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == SMOLLM3:
        return tuple(None if rotates else window for rotates in _rotary(hf, architecture, layers))
    asked = hf.get("use_sliding_window") is not None and architecture != QWEN3_MOE
    first = fields.count(hf, "max_window_layers", 0, least=0) if asked else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _rotary(hf: Mapping[str, Any], architecture: str, layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` is 1 where a layer does rotate; every fourth does not by default."""
    if architecture != SMOLLM3:
        return (True,) * layers
    listed = hf.get("no_rope_layers")
    if listed is None:
        interval = fields.count(hf, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list | tuple) or len(listed) < layers or any(kind not in (0, 1) for kind in listed):
        raise fields.wrong("no_rope_layers", listed, f"a list of at least {layers} zeros and ones is needed")
    return tuple(bool(kind) for kind in listed[:layers])


def _sparse(hf: Mapping[str, Any], architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture == MIXTRAL:
        return (True,) * layers
    if architecture != QWEN3_MOE:
        return (False,) * layers
    step = fields.count(hf, "decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or any(not isinstance(layer, int) for layer in dense):
        raise fields.wrong("mlp_only_layers", dense, "a list of layer numbers is needed")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _routing(hf: Mapping[str, Any], architecture: str) -> Routing:
    mixtral = architecture == MIXTRAL
    experts = fields.count(hf, "num_local_experts" if mixtral else "num_experts", 8 if mixtral else None)
    chosen = fields.count(hf, "num_experts_per_tok", 2 if mixtral else 8, most=experts)
    return Routing(experts, chosen, normalize=mixtral or fields.flag(hf, "norm_topk_prob"))


def abstract(config: LlamaConfig) -> Params:
    """The tree of ParamSpec. Projections keep Hugging Face's (out, in) order, so loading transposes nothing."""
    return decoder.whole(
        config, [_abstract_layer(config, f"model.layers.{i}.", s) for i, s in enumerate(config.sparse)]
    )


def _abstract_layer(config: LlamaConfig, prefix: str, sparse: bool) -> dict[str, Any]:
    D, H = config.width, config.head_dim
    layer: dict[str, Any] = {
        "attn_norm": norm_spec(D, f"{prefix}input_layernorm.weight"),
        **decoder.attention_specs(config, prefix, qkv_bias=config.qkv_bias, out_bias=config.out_bias),
        "mlp_norm": norm_spec(D, f"{prefix}post_attention_layernorm.weight"),
    }
    if config.qk_norm:
        layer["q_norm"] = norm_spec(H, f"{prefix}self_attn.q_norm.weight", None)
        layer["k_norm"] = norm_spec(H, f"{prefix}self_attn.k_norm.weight", None)
    if sparse:
        return layer | _sparse_specs(config, prefix)
    layer |= decoder.mlp_specs(D, config.ffw, f"{prefix}mlp.", bias=config.mlp_bias)
    return layer | _packed(config, layer, prefix) if config.packed_names else layer


def _packed(config: LlamaConfig, layer: dict[str, ParamSpec], prefix: str) -> dict[str, ParamSpec]:
    """Phi-3's: q, k and v are rows of one tensor, gate and up another."""
    rows, own = (config.heads + 2 * config.kv_heads) * config.head_dim, config.heads * config.head_dim
    names = (f"{prefix}self_attn.qkv_proj.weight",)
    return {
        "q": dataclasses.replace(layer["q"], names=names, rows=(0, own, rows)),
        "kv": dataclasses.replace(layer["kv"], names=names, rows=(own, rows, rows)),
        "gate_up": dataclasses.replace(layer["gate_up"], names=(f"{prefix}mlp.gate_up_proj.weight",)),
    }


def _sparse_specs(config: LlamaConfig, prefix: str) -> dict[str, Any]:
    assert config.routing is not None
    E, D = config.routing.experts, config.width
    router, expert, *projections = config.expert_names
    specs = moe.expert_specs(E, D, config.expert_ffw, prefix + expert, *projections)
    return {"router": ParamSpec((E, D), (None, "width"), (f"{prefix}{router}.weight",)), "experts": specs}


def forward(
    params: Params, config: LlamaConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    cos, sin = cos_sin(rope_table(config.rope, config.context), positions)

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = rms_norm(x, p["attn_norm"], config.norm_eps)
        q, k, v = decoder.qkv(p, h)
        if config.qk_norm:
            q, k = rms_norm(q, p["q_norm"], config.norm_eps), rms_norm(k, p["k_norm"], config.norm_eps)
        q, k = _rotated(config, layer, q, k, cos, sin)
        cache, out = attend(cache, layer, q, k, v, config.head_dim**-0.5)
        x = x + decoder.attention_output(p, out)
        return cache, x + _feed_forward(config, p, rms_norm(x, p["mlp_norm"], config.norm_eps))

    x = embed(params["embed"], tokens)
    cache, x = over_layers(block, cache, x, params["layers"])
    return cache, rms_norm(x, params["final_norm"], config.norm_eps)


def _rotated(
    config: LlamaConfig, layer: int | jax.Array, q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """q and k rotated, in the layers that rotate; `layer` is traced where layers are scanned."""
    if all(config.rotary) or (isinstance(layer, int) and config.rotary[layer]):
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    if isinstance(layer, int):
        return q, k
    rotates = jnp.asarray(config.rotary)[layer]
    return jnp.where(rotates, apply_rope(q, cos, sin), q), jnp.where(rotates, apply_rope(k, cos, sin), k)


def _feed_forward(config: LlamaConfig, p: Params, h: jax.Array) -> jax.Array:
    """h (T, D) → (T, D), by the layer's feed-forward or its experts."""
    if "router" not in p:
        return gated_mlp(h, p["gate_up"], p["down"], p.get("gate_up_bias"), p.get("down_bias"))
    assert config.routing is not None
    weights, expert = moe.route(logits_of(p["router"], h), config.routing)
    return moe.mixture(h, weights, expert, p["experts"], moe.swiglu_experts)


def rotations(config: LlamaConfig) -> tuple[Rotation | None, ...]:
    """Of each layer."""
    turned = rotation(config.rope, config.context)
    return tuple(turned if rotates else None for rotates in config.rotary)


LLAMA = Family(
    name="llama",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=decoder.kv_specs,
    forward=forward,
    unembed=decoder.unembed,
    gguf=LLAMA_GGUF,
    rotations=rotations,
)
