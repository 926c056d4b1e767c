"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention (MLA, 2405.04434) and experts chosen by groups.

The cache holds, of every token, one latent of `latent` numbers and one rotated key of `rope_dim` that all heads share:
a kv head of its own, whose values are the first `latent` numbers of its keys. The projection up from the latent goes to
attention with it, which absorbs it into q and the output or expands the latents (`pallas_kernels`' `latent.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models import decoder, fields, moe
from kvjax.models.gguf_deepseek import DEEPSEEK_GGUF
from kvjax.models.layers import bias_spec, biased, embed, gated_mlp, norm_spec, over_layers, project
from kvjax.models.layers import rms_norm as _rms_norm
from kvjax.models.layers import unembed as logits_of
from kvjax.models.moe import Routing
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table, rotation, softmax_factor
from kvjax.types import Family, KVSpec, Params, ParamSpec, Rotation

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ARCHITECTURES = (V2, V3)
_LATENT_EPS = 1e-6
"""Of the norms on latents, whatever rms_norm_eps says."""


@dataclasses.dataclass(frozen=True)
class DeepseekConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F of dense layers.
      heads: N.
      nope_dim: numbers of a head's q and k that are not rotated.
      rope_dim: numbers that are; k's are shared by all heads.
      value_dim: numbers of a head's v.
      latent: rank of the projection to k and v, the cached part.
      q_latent: rank of the projection to q, or None where it is a full matrix.
      norm_eps: of the layers' norms.
      rope: how positions become angles.
      interleaved: whether RoPE rotates neighbouring numbers.
      sparse: whether a layer's feed-forward is a mixture of experts; its length is L.
      routing: of the experts, or None.
      expert_ffw: F of a routed expert.
      shared_experts: experts that every token uses, as one of their width together; 0 is none.
      corrected: whether the choice of experts adds a learned correction (V3).
      attn_bias: bias on the first projections and on the output of attention.
      mlp_bias: bias on dense feed-forwards.
      tied: the unembedding is the embedding.
      context: longest sequence the engine will serve.
      trained_context: longest sequence the checkpoint promises.
    """

    vocab: int
    width: int
    ffw: int
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent: int
    q_latent: int | None
    norm_eps: float
    rope: Rope
    interleaved: bool
    sparse: tuple[bool, ...]
    routing: Routing | None
    expert_ffw: int
    shared_experts: int
    corrected: bool
    attn_bias: bool
    mlp_bias: bool
    tied: bool
    context: int
    trained_context: int

    @property
    def scale(self) -> float:
        """Multiplies q·k."""
        return (self.nope_dim + self.rope_dim) ** -0.5 * softmax_factor(self.rope)


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> DeepseekConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    third = fields.architecture(hf, ARCHITECTURES) == V3
    fields.choice(hf, "hidden_act", ("silu",), "silu")
    fields.refuse(hf, "moe_layer_freq", 1)
    layers, trained = fields.layer_count(hf), fields.count(hf, "max_position_embeddings", 4096 if third else 2048)
    dense = fields.count(hf, "first_k_dense_replace", 3 if third else 0, least=0)
    rope_dim = fields.count(hf, "qk_rope_head_dim", 64, most=fields.MOST_HEAD_DIM)
    sparse = tuple(layer >= dense for layer in range(layers))
    q_latent = hf.get("q_lora_rank", 1536)
    return DeepseekConfig(
        vocab=fields.count(hf, "vocab_size"),
        width=fields.count(hf, "hidden_size"),
        ffw=fields.count(hf, "intermediate_size"),
        heads=fields.count(hf, "num_attention_heads"),
        nope_dim=fields.count(hf, "qk_nope_head_dim", 128, most=fields.MOST_HEAD_DIM),
        rope_dim=rope_dim,
        value_dim=fields.count(hf, "v_head_dim", 128, most=fields.MOST_HEAD_DIM),
        latent=fields.count(hf, "kv_lora_rank", 512, most=fields.MOST_HEAD_DIM),
        q_latent=None if q_latent is None else fields.count({"q_lora_rank": q_latent}, "q_lora_rank"),
        norm_eps=fields.positive(hf, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(hf, rope_dim),
        interleaved=not third or fields.flag(hf, "rope_interleave", True),
        sparse=sparse,
        routing=_routing(hf, third) if any(sparse) else None,
        expert_ffw=fields.count(hf, "moe_intermediate_size", 2048 if third else 1407),
        shared_experts=fields.count(hf, "n_shared_experts", 1 if third else 2, least=0),
        corrected=third,
        attn_bias=fields.flag(hf, "attention_bias"),
        mlp_bias=not third and fields.flag(hf, "mlp_bias"),
        tied=fields.flag(hf, "tie_word_embeddings"),
        context=context or trained,
        trained_context=trained,
    )


def _routing(hf: Mapping[str, Any], third: bool) -> Routing:
    experts = fields.count(hf, "n_routed_experts", 256 if third else 64)
    chosen = fields.count(hf, "num_experts_per_tok", 8 if third else None, most=experts)
    scale = fields.positive(hf, "routed_scaling_factor", 2.5 if third else 1.0)
    if third:
        fields.choice(hf, "topk_method", ("noaux_tc",), "noaux_tc")
        fields.choice(hf, "scoring_func", ("sigmoid",), "sigmoid")
        groups = fields.count(hf, "n_group", 8)
        kept = fields.count(hf, "topk_group", 4, most=groups)
        normalize = fields.flag(hf, "norm_topk_prob", True)
        routing = Routing(experts, chosen, "sigmoid", normalize, scale, groups, kept, "top 2")
    else:
        fields.refuse(hf, "norm_topk_prob")
        fields.choice(hf, "scoring_func", ("softmax",), "softmax")
        method = fields.choice(hf, "topk_method", ("greedy", "group_limited_greedy"), "greedy")
        grouped = method == "group_limited_greedy"
        groups = fields.count(hf, "n_group") if grouped else 1
        kept = fields.count(hf, "topk_group", most=groups) if grouped else 1
        routing = Routing(experts, chosen, scale=scale, groups=groups, kept_groups=kept)
    if experts % routing.groups or chosen > experts // routing.groups * routing.kept_groups:
        raise fields.wrong("n_group", routing.groups, f"it has to divide {experts} experts into groups for {chosen}")
    return routing


def abstract(config: DeepseekConfig) -> Params:
    """The tree of ParamSpec."""
    return decoder.whole(
        config, [_abstract_layer(config, f"model.layers.{i}.", s) for i, s in enumerate(config.sparse)]
    )


def _abstract_layer(config: DeepseekConfig, prefix: str, sparse: bool) -> dict[str, Any]:
    D, N, C, Q = config.width, config.heads, config.latent, config.q_latent
    own = config.nope_dim + config.rope_dim
    attn = f"{prefix}self_attn."
    layer: dict[str, Any] = {
        "attn_norm": norm_spec(D, f"{prefix}input_layernorm.weight"),
        "to_latent": ParamSpec((C + config.rope_dim, D), (None, "width"), (f"{attn}kv_a_proj_with_mqa.weight",)),
        "latent_norm": norm_spec(C, f"{attn}kv_a_layernorm.weight", None),
        "from_latent": ParamSpec(
            (N, config.nope_dim + config.value_dim, C), ("heads", None, None), (f"{attn}kv_b_proj.weight",)
        ),
        "out": ParamSpec((D, N, config.value_dim), ("width", "heads", None), (f"{attn}o_proj.weight",)),
        "mlp_norm": norm_spec(D, f"{prefix}post_attention_layernorm.weight"),
    }
    if Q is None:
        layer["q"] = ParamSpec((N, own, D), ("heads", None, "width"), (f"{attn}q_proj.weight",))
    else:
        layer["to_q_latent"] = ParamSpec((Q, D), (None, "width"), (f"{attn}q_a_proj.weight",))
        layer["q_latent_norm"] = norm_spec(Q, f"{attn}q_a_layernorm.weight", None)
        layer["q"] = ParamSpec((N, own, Q), ("heads", None, None), (f"{attn}q_b_proj.weight",))
    if config.attn_bias:
        layer["to_latent_bias"] = bias_spec((C + config.rope_dim,), (None,), f"{attn}kv_a_proj_with_mqa.bias")
        layer["out_bias"] = bias_spec((D,), ("width",), f"{attn}o_proj.bias")
        if Q is not None:
            layer["to_q_latent_bias"] = bias_spec((Q,), (None,), f"{attn}q_a_proj.bias")
    if not sparse:
        return layer | decoder.mlp_specs(D, config.ffw, f"{prefix}mlp.", bias=config.mlp_bias)
    assert config.routing is not None
    E = config.routing.experts
    layer["router"] = ParamSpec((E, D), (None, "width"), (f"{prefix}mlp.gate.weight",))
    if config.corrected:
        layer["correction"] = bias_spec((E,), (None,), f"{prefix}mlp.gate.e_score_correction_bias")
    names = ("gate_proj", "up_proj", "down_proj")
    layer["experts"] = moe.expert_specs(E, D, config.expert_ffw, f"{prefix}mlp.experts.{{e}}", *names)
    if config.shared_experts:
        shared = config.expert_ffw * config.shared_experts
        layer |= decoder.mlp_specs(D, shared, f"{prefix}mlp.shared_experts.", bias=config.mlp_bias)
    return layer


def kv_specs(config: DeepseekConfig, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer: one head of latent and rotated key."""
    spec = KVSpec(1, config.latent + config.rope_dim, config.latent, None, storage, latent=True)
    return (spec,) * len(config.sparse)


def forward(
    params: Params, config: DeepseekConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    angles = cos_sin(rope_table(config.rope, config.context), positions)

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = _rms_norm(x, p["attn_norm"], config.norm_eps)
        q, key = queries_and_latent(config, p, h, angles)
        cache, out = attend(cache, layer, q, key, None, config.scale, up=p["from_latent"])
        x = x + decoder.attention_output(p, out)
        return cache, x + _feed_forward(config, p, _rms_norm(x, p["mlp_norm"], config.norm_eps))

    cache, x = over_layers(block, cache, embed(params["embed"], tokens), params["layers"])
    return cache, _rms_norm(x, params["final_norm"], config.norm_eps)


def queries_and_latent(
    config: DeepseekConfig, p: Params, h: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """h (T, D) → q (T, N, nope + rope) and what is cached, (T, 1, latent + rope), both rotated."""
    if config.q_latent is None:
        q = project(h, p["q"])
    else:
        down = biased(project(h, p["to_q_latent"]), p.get("to_q_latent_bias"))
        q = project(_rms_norm(down, p["q_latent_norm"], _LATENT_EPS), p["q"])
    both = biased(project(h, p["to_latent"]), p.get("to_latent_bias"))
    latent = _rms_norm(both[:, : config.latent], p["latent_norm"], _LATENT_EPS)
    turned = apply_rope(both[:, None, config.latent :], *angles, interleaved=config.interleaved)
    q_turned = apply_rope(q[..., config.nope_dim :], *angles, interleaved=config.interleaved)
    q = jnp.concatenate([q[..., : config.nope_dim], q_turned], axis=-1)
    return q, jnp.concatenate([latent[:, None], turned], axis=-1)


def _feed_forward(config: DeepseekConfig, p: Params, h: jax.Array) -> jax.Array:
    """h (T, D) → (T, D): dense, or routed experts and the shared one."""
    out = jnp.zeros_like(h)
    if "gate_up" in p:
        out = gated_mlp(h, p["gate_up"], p["down"], p.get("gate_up_bias"), p.get("down_bias"))
    if "router" not in p:
        return out
    assert config.routing is not None
    logits = logits_of(p["router"].astype(jnp.float32), h.astype(jnp.float32))
    weights, expert = moe.route(logits, config.routing, p.get("correction"))
    return out + moe.mixture(h, weights, expert, p["experts"], moe.swiglu_experts)


def rotations(config: DeepseekConfig) -> tuple[Rotation | None, ...]:
    """Of each layer."""
    return (rotation(config.rope, config.context, config.interleaved, config.nope_dim),) * len(config.sparse)


DEEPSEEK = Family(
    name="deepseek",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=kv_specs,
    forward=forward,
    unembed=decoder.unembed,
    gguf=DEEPSEEK_GGUF,
    unused=lambda config: (f"model.layers.{len(config.sparse)}.*",),  # V3's layer that predicts a second token
    rotations=rotations,
)
