"""Llama 1 to 3, Mistral, SmolLM2, Qwen2 (bias on q, k, v) and Qwen3 (norms on q and k): the pattern for all families.

A family is a config, an `abstract` tree of parameters, a forward function, and names; see `kvjax.types.Family`.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import ModelError
from kvjax.models.gguf_names import LLAMA_GGUF
from kvjax.models.layers import biased, over_layers, project, rms_norm, swiglu
from kvjax.models.positions import Rope, apply_rope, cos_sin, rope_from_hf, rope_table
from kvjax.types import Family, KVSpec, Params, ParamSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_MOST = 2**31 - 1
"""Of any size in config.json: positions and shapes are 32-bit numbers on the devices."""
_MOST_LAYERS = 10_000
_MOST_HEAD_DIM = 2**16


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
    context: int
    trained_context: int


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> LlamaConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    architecture = _architecture(hf)
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"hidden_act {reprlib.repr(hf['hidden_act'])} is not implemented for {architecture}, only 'silu' is"
        )
    width, heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
    kv_heads = _count(hf, "num_key_value_heads", heads)
    head_dim = _count(hf, "head_dim", width // heads, most=_MOST_HEAD_DIM)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    trained = _count(hf, "max_position_embeddings")
    attention_bias = _flag(hf, "attention_bias")
    return LlamaConfig(
        vocab=_count(hf, "vocab_size"),
        width=width,
        ffw=_count(hf, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(hf, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(hf, head_dim),
        windows=_windows(hf, _count(hf, "num_hidden_layers", most=_MOST_LAYERS)),
        tied=_flag(hf, "tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        out_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=_flag(hf, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        context=context or trained,
        trained_context=trained,
    )


def _architecture(hf: Mapping[str, Any]) -> str:
    """The first of the named architectures that is of this family."""
    return next(name for name in hf["architectures"] if name in ARCHITECTURES)


def _count(
    hf: Mapping[str, Any], field: str, otherwise: int | None = None, *, least: int = 1, most: int = _MOST
) -> int:
    """A whole number; null and an absent field are `otherwise`."""
    value = hf.get(field)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        raise _wrong(field, value, f"a {kind} is needed")
    if value > most:
        raise _wrong(field, value, f"at most {most} is possible")
    return value


def _positive(hf: Mapping[str, Any], field: str, otherwise: float) -> float:
    value = hf.get(field, otherwise)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not 0 < number < math.inf:
        raise _wrong(field, value, "a finite positive number is needed")
    return number


def _flag(hf: Mapping[str, Any], field: str, otherwise: bool = False) -> bool:
    """True or false; null and an absent field are `otherwise`."""
    value = hf.get(field)
    value = otherwise if value is None else value
    if not isinstance(value, bool):
        raise _wrong(field, value, "true or false is needed")
    return value


def _wrong(field: str, value: Any, needed: str) -> ModelError:
    return ModelError(f"config.json: {field} is {reprlib.repr(value)}, {needed}.")


def _windows(hf: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer slides. Qwen2 and Qwen3: only with use_sliding_window, from max_window_layers on.

    A sliding_window of null or 0 is none. Where no layer slides, the size and the first layer are not read.
    """
    kinds = _layer_types(hf, layers)
    slides = _flag(hf, "use_sliding_window", _architecture(hf) == "MistralForCausalLM")
    window = _count(hf, "sliding_window", 0, least=0) if slides else 0
    if not window:
        return (None,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    asked = hf.get("use_sliding_window") is not None
    first = _count(hf, "max_window_layers", 0, least=0) if asked else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _layer_types(hf: Mapping[str, Any], layers: int) -> list[str] | None:
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise _wrong("layer_types", kinds, f"a list of {layers} names out of {', '.join(known)} is needed")
    return list(kinds)


def abstract(config: LlamaConfig) -> Params:
    """The tree of ParamSpec. Projections keep Hugging Face's (out, in) order, so loading transposes nothing."""
    D, V = config.width, config.vocab
    tree: dict[str, Any] = {
        "embed": ParamSpec((V, D), ("vocab", "width"), ("model.embed_tokens.weight",)),
        "layers": [_abstract_layer(config, f"model.layers.{i}.") for i in range(len(config.windows))],
        "final_norm": ParamSpec((D,), ("width",), ("model.norm.weight",), init_scale=None),
    }
    if not config.tied:
        tree["unembed"] = ParamSpec((V, D), ("vocab", "width"), ("lm_head.weight",))
    return tree


def _abstract_layer(config: LlamaConfig, prefix: str) -> dict[str, ParamSpec]:
    D, F, N, K, H = config.width, config.ffw, config.heads, config.kv_heads, config.head_dim

    def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], *names: str) -> ParamSpec:
        return ParamSpec(shape, axes, tuple(f"{prefix}{name}.weight" for name in names))

    def bias(shape: tuple[int, ...], axes: tuple[str | None, ...], *names: str) -> ParamSpec:
        return ParamSpec(shape, axes, tuple(f"{prefix}{name}.bias" for name in names), init_scale=0.0)

    def norm(size: int, axis: str | None, name: str) -> ParamSpec:
        return ParamSpec((size,), (axis,), (f"{prefix}{name}.weight",), init_scale=None)

    layer = {
        "attn_norm": norm(D, "width", "input_layernorm"),
        "q": weight((N, H, D), ("heads", None, "width"), "self_attn.q_proj"),
        "kv": weight((2, K, H, D), (None, "kv_heads", None, "width"), "self_attn.k_proj", "self_attn.v_proj"),
        "out": weight((D, N, H), ("width", "heads", None), "self_attn.o_proj"),
        "mlp_norm": norm(D, "width", "post_attention_layernorm"),
        "gate_up": weight((2, F, D), (None, "ffw", "width"), "mlp.gate_proj", "mlp.up_proj"),
        "down": weight((D, F), ("width", "ffw"), "mlp.down_proj"),
    }
    if config.qkv_bias:
        layer["q_bias"] = bias((N, H), ("heads", None), "self_attn.q_proj")
        layer["kv_bias"] = bias((2, K, H), (None, "kv_heads", None), "self_attn.k_proj", "self_attn.v_proj")
    if config.out_bias:
        layer["out_bias"] = bias((D,), ("width",), "self_attn.o_proj")
    if config.mlp_bias:
        layer["gate_up_bias"] = bias((2, F), (None, "ffw"), "mlp.gate_proj", "mlp.up_proj")
        layer["down_bias"] = bias((D,), ("width",), "mlp.down_proj")
    if config.qk_norm:
        layer["q_norm"] = norm(H, None, "self_attn.q_norm")
        layer["k_norm"] = norm(H, None, "self_attn.k_norm")
    return layer


def kv_specs(config: LlamaConfig, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer."""
    return tuple(
        KVSpec(config.kv_heads, config.head_dim, config.head_dim, window, storage) for window in config.windows
    )


def forward(
    params: Params, config: LlamaConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""
    cos, sin = cos_sin(rope_table(config.rope, config.context), positions)

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        h = rms_norm(x, p["attn_norm"], config.norm_eps)
        q, k, v = _qkv(config, p, h)
        cache, out = attend(cache, layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, config.head_dim**-0.5)
        x = x + biased(project(out, p["out"]), p.get("out_bias"))
        h = rms_norm(x, p["mlp_norm"], config.norm_eps)
        return cache, x + swiglu(h, p["gate_up"], p["down"], p.get("gate_up_bias"), p.get("down_bias"))

    x = params["embed"].at[tokens].get(mode="clip")
    cache, x = over_layers(block, cache, x, params["layers"])
    return cache, rms_norm(x, params["final_norm"], config.norm_eps)


def _qkv(config: LlamaConfig, p: Params, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """h (T, D) → q (T, N, H), k (T, K, H), v (T, K, H), before RoPE."""
    q = biased(project(h, p["q"]), p.get("q_bias"))
    kv = biased(project(h, p["kv"]), p.get("kv_bias"))
    k, v = kv[:, 0], kv[:, 1]
    if config.qk_norm:
        q, k = rms_norm(q, p["q_norm"], config.norm_eps), rms_norm(k, p["k_norm"], config.norm_eps)
    return q, k, v


def unembed(params: Params, config: LlamaConfig, hidden: jax.Array) -> jax.Array:
    """hidden (T, D) → logits (T, V) float32."""
    weight = params["embed"] if config.tied else params["unembed"]
    precision = "highest" if hidden.dtype == jnp.float32 else None
    return jnp.einsum("td,vd->tv", hidden, weight, precision=precision, preferred_element_type=jnp.float32)


LLAMA = Family(
    name="llama",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=kv_specs,
    forward=forward,
    unembed=unembed,
    gguf=LLAMA_GGUF,
)
