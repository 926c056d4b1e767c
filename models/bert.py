"""BERT and RoBERTa: encoders, whose tokens see each other in both directions. They make embeddings, not texts.

An encoder is a `Family` like the others, but for two things: it has no `unembed`, and the `attend` that its forward
function is given lets every token see the whole text, so nothing of it is ever cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from kvjax.errors import ModelError
from kvjax.models import fields
from kvjax.models.layers import (
    ACTIVATIONS,
    bias_spec,
    biased,
    embed,
    layer_norm,
    mlp,
    norm_spec,
    over_layers,
    project,
)
from kvjax.types import Family, KVSpec, Params, ParamSpec

ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")
ROBERTA_ARCHITECTURES = ("RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM")


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Static description of a model; every field changes the compiled program.

    Attributes:
      vocab: V.
      width: D.
      ffw: F.
      heads: N.
      head_dim: H.
      layers: L.
      norm_eps: of every layer norm.
      activation: of the feed-forward, by Hugging Face's name.
      learned_positions: rows of the table of positions.
      position_offset: added to every position.
      token_types: rows of the table of token types, of which a text by itself has the first.
      prefix: the beginning of every tensor's name.
      context: longest text that is served.
      trained_context: longest text that the checkpoint has positions for.
    """

    vocab: int
    width: int
    ffw: int
    heads: int
    head_dim: int
    layers: int
    norm_eps: float
    activation: str
    learned_positions: int
    position_offset: int
    token_types: int
    prefix: str
    context: int
    trained_context: int

    def __post_init__(self) -> None:
        if self.context > self.trained_context:
            raise ModelError(
                f"A context of {self.context} tokens was asked for, but the model has learned its "
                f"{self.trained_context} positions one by one: give a context of at most {self.trained_context}."
            )


def config_from_hf(hf: Mapping[str, Any], context: int | None = None) -> BertConfig:
    """Reads config.json. Raises ModelError, naming the field, for what is missing or not implemented."""
    roberta = fields.architecture(hf, (*ARCHITECTURES, *ROBERTA_ARCHITECTURES)) in ROBERTA_ARCHITECTURES
    fields.refuse(hf, "position_embedding_type", "absolute")
    fields.refuse(hf, "is_decoder", what="a decoder with the layers of BERT")
    fields.refuse(hf, "add_cross_attention")
    width, heads = fields.count(hf, "hidden_size"), fields.count(hf, "num_attention_heads")
    rows = fields.count(hf, "max_position_embeddings")
    offset = fields.count(hf, "pad_token_id", 1, least=0) + 1 if roberta else 0
    if rows <= offset:
        raise fields.wrong("max_position_embeddings", rows, f"more than {offset} are needed")
    return BertConfig(
        vocab=fields.count(hf, "vocab_size"),
        width=width,
        ffw=fields.count(hf, "intermediate_size"),
        heads=heads,
        head_dim=fields.head_dim(width, heads),
        layers=fields.layer_count(hf),
        norm_eps=fields.positive(hf, "layer_norm_eps", 1e-12),
        activation=fields.choice(hf, "hidden_act", ACTIVATIONS, "gelu"),
        learned_positions=rows,
        position_offset=offset,
        token_types=fields.count(hf, "type_vocab_size", 2),
        prefix="roberta." if roberta else "bert.",
        context=context or rows - offset,
        trained_context=rows - offset,
    )


def abstract(config: BertConfig) -> Params:
    """The tree of ParamSpec."""
    D, prefix = config.width, f"{config.prefix}embeddings."

    def table(rows: int, name: str, axis: str | None = None) -> ParamSpec:
        return ParamSpec((rows, D), (axis, "width"), (f"{prefix}{name}_embeddings.weight",))

    return {
        "embed": table(config.vocab, "word", "vocab"),
        "positions": table(config.learned_positions, "position"),
        "token_types": table(config.token_types, "token_type"),
        **_norm(config, "embed_norm", f"{prefix}LayerNorm"),
        "layers": [_abstract_layer(config, f"{config.prefix}encoder.layer.{i}.") for i in range(config.layers)],
    }


def _norm(config: BertConfig, key: str, name: str) -> dict[str, ParamSpec]:
    return {
        key: norm_spec(config.width, f"{name}.weight"),
        f"{key}_bias": bias_spec((config.width,), ("width",), f"{name}.bias"),
    }


def _abstract_layer(config: BertConfig, prefix: str) -> dict[str, ParamSpec]:
    D, F, N, H = config.width, config.ffw, config.heads, config.head_dim
    layer = {
        **_norm(config, "attn_norm", f"{prefix}attention.output.LayerNorm"),
        **_norm(config, "mlp_norm", f"{prefix}output.LayerNorm"),
    }

    def linear(key: str, out: tuple, out_axes: tuple, inner: tuple, inner_axes: tuple, *modules: str) -> None:
        names = tuple(f"{prefix}{module}" for module in modules)
        layer[key] = ParamSpec((*out, *inner), (*out_axes, *inner_axes), tuple(f"{name}.weight" for name in names))
        layer[f"{key}_bias"] = bias_spec(out, out_axes, *(f"{name}.bias" for name in names))

    qkv = [f"attention.self.{name}" for name in ("query", "key", "value")]
    linear("qkv", (3, N, H), (None, "heads", None), (D,), ("width",), *qkv)
    linear("out", (D,), ("width",), (N, H), ("heads", None), "attention.output.dense")
    linear("up", (F,), ("ffw",), (D,), ("width",), "intermediate.dense")
    linear("down", (D,), ("width",), (F,), ("ffw",), "output.dense")
    return layer


def kv_specs(config: BertConfig, storage: str) -> tuple[KVSpec, ...]:
    """One KVSpec a layer: what a token's attention is made of, though none of it is kept."""
    return (KVSpec(config.heads, config.head_dim, config.head_dim, None, storage),) * config.layers


def forward(
    params: Params, config: BertConfig, tokens: jax.Array, positions: jax.Array, cache: Any, attend: Any
) -> tuple[Any, jax.Array]:
    """tokens (T,), positions (T,) → (cache, hidden (T, D)). See `kvjax.types.Family`."""

    def block(cache: Any, x: jax.Array, layer: int | jax.Array, p: Params) -> tuple[Any, jax.Array]:
        qkv = biased(project(x, p["qkv"]), p["qkv_bias"])
        cache, out = attend(cache, layer, qkv[:, 0], qkv[:, 1], qkv[:, 2], config.head_dim**-0.5)
        x = _normed(config, p, "attn_norm", x + biased(project(out, p["out"]), p["out_bias"]))
        made = mlp(x, p["up"], p["down"], p["up_bias"], p["down_bias"], activation=config.activation)
        return cache, _normed(config, p, "mlp_norm", x + made)

    x = embed(params["embed"], tokens) + embed(params["positions"], positions + config.position_offset)
    x = _normed(config, params, "embed_norm", x + params["token_types"][:1])
    return over_layers(block, cache, x, params["layers"])


def _normed(config: BertConfig, p: Params, key: str, x: jax.Array) -> jax.Array:
    return layer_norm(x, p[key], p[f"{key}_bias"], config.norm_eps)


def unembed(params: Params, config: BertConfig, hidden: jax.Array) -> jax.Array:
    """Raises NotImplementedError: an encoder has no next token."""
    raise NotImplementedError("an encoder predicts no next token: take its hidden states")


def encoder_of(hf: Mapping[str, Any]) -> Family | None:
    """The encoder that runs a config.json, or None where it is not one of an encoder that is implemented."""
    named = hf.get("architectures")
    named = named if isinstance(named, list | tuple) else ()
    return next((family for family in ENCODERS if any(name in family.architectures for name in named)), None)


BERT = Family(
    name="bert",
    architectures=ARCHITECTURES,
    config=config_from_hf,
    abstract=abstract,
    kv_specs=kv_specs,
    forward=forward,
    unembed=unembed,
    prefix="bert.",
    unused=lambda config: ("cls.*", "*pooler.*", "*embeddings.position_ids"),
)
ROBERTA = BERT._replace(
    name="roberta",
    architectures=ROBERTA_ARCHITECTURES,
    prefix="roberta.",
    unused=lambda config: ("lm_head.*", "*pooler.*", "*embeddings.position_ids"),
)
ENCODERS = (BERT, ROBERTA)
