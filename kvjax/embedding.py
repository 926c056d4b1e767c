"""Texts to vectors, by encoders such as BERT or by the hidden states of a decoder. Nothing is cached.

Texts are put side by side in batches of few shapes, as packed tokens (T = B·S), so that the families' own forward
functions compute them; the `attend` they are given here is a dense one that keeps the texts apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import pooling
from kvjax.checkpoints.place import load_params
from kvjax.checkpoints.source import TensorSource, one_line
from kvjax.errors import ModelError, RequestError
from kvjax.models import config_of
from kvjax.models.layers import full_precision
from kvjax.models.layers import soft_cap as capped
from kvjax.pallas_kernels.paged_attention import latent
from kvjax.plans import Model, power_of_two
from kvjax.pooling import Pooling
from kvjax.sharding import param_sharding
from kvjax.tokenizer import tokenizer_parts
from kvjax.types import Family, KVSpec, Params, ParamSpec

if TYPE_CHECKING:
    import tokenizers

_LEAST_WIDTH = 16
_TOKENS = 8192
"""Tokens of a batch at most, padding included, unless a single text has more: bounds the memory of activations."""
_QUERIES = 256
"""Queries whose logits are held at once: a long text's (S, S) matrix is never whole."""
_ENCODED = 1024
"""Texts that the tokenizer is given at once: what it returns beside the ids takes kilobytes a text."""
_UNSEEN = -1e30
"""The logit of a key that a query does not see: finite, so that a row of padding alone gives no NaN."""

_DECODING = (
    *("generate", "stream", "completions", "beam_search", "requests", "run", "encode"),
    *("model", "options", "tokenizer", "context"),
)
"""What an LLM has and an Embedder has not: its use gets a sentence instead of an AttributeError."""
_TEXTS = "give a text or a list of texts"


@dataclasses.dataclass(frozen=True)
class Program:
    """The static half of a batch; a program is compiled for each, and each of its shapes.

    Attributes:
      forward: the family's.
      config: the family's.
      specs: one KVSpec a layer, for windows and where the values are.
      causal: whether a token sees only those before it, as in a decoder.
      modes: of `kvjax.pooling.pool`.
    """

    forward: Callable[..., tuple[Any, jax.Array]]
    config: Any
    specs: tuple[KVSpec, ...]
    causal: bool
    modes: tuple[str, ...]


@functools.partial(jax.jit, static_argnums=0)
def compute(program: Program, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """tokens (B, S) int32, of which each row's first `lengths` (B,) int32 are real → (B, D × modes) float32."""
    B, S = tokens.shape
    last = jnp.maximum(lengths - 1, 0)[:, None]
    positions = jnp.minimum(jnp.arange(S, dtype=jnp.int32)[None], last)  # padding stays where the model has positions
    attend = dense_attend(program.specs, lengths, S, causal=program.causal)
    _, hidden = program.forward(params, program.config, tokens.reshape(-1), positions.reshape(-1), None, attend)
    return pooling.pool(hidden.reshape(B, S, -1), lengths, program.modes)


def dense_attend(specs: Sequence[KVSpec], lengths: jax.Array, width: int, *, causal: bool) -> Callable[..., Any]:
    """An `attend` for a family's forward function over B texts of S = `width` packed tokens each, without a cache.

    Args:
      specs: one KVSpec a layer.
      lengths: (B,) int32 real tokens of each text; those behind them are not seen.
      width: S, a power of two.
      causal: whether a token sees only those before it.

    Returns:
      As `kvjax.types.Family.forward` wants it; the cache is handed on as it is.
    """
    rows = lengths.shape[0]
    windows = jnp.asarray([spec.window or width for spec in specs], jnp.int32)
    key = jnp.arange(width, dtype=jnp.int32)[None]
    real = (key < lengths[:, None])[:, None]  # (B, 1, S)
    shared = {spec.shares for spec in specs} - {None}
    rows_of: dict[int, tuple[jax.Array, jax.Array | None]] = {}  # of layers that others share

    def attend(
        cache: Any,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        slopes: jax.Array | None = None,
        up: jax.Array | None = None,
    ) -> tuple[Any, jax.Array]:
        if shared:  # then no layers are scanned
            source = specs[int(layer)].shares
            if source is not None:
                k, v = rows_of[source]
            elif int(layer) in shared and k is not None:
                rows_of[int(layer)] = k, v
        assert k is not None
        if up is not None:
            k, v = latent.expanded(k[:, 0], up, q.shape[2] - (k.shape[2] - up.shape[2]))
        v = k[..., : specs[0].value_dim] if v is None else v
        q, k, v = (x.reshape(rows, width, *x.shape[1:]) for x in (q, k, v))
        N, K = q.shape[2], k.shape[2]
        per_head = [None if x is None else x.astype(jnp.float32).reshape(1, K, N // K, 1, 1) for x in (sinks, slopes)]

        def block(start: int | jax.Array) -> jax.Array:
            """Queries start … start + C → (B, C, N, Hv)."""
            part = jax.lax.dynamic_slice_in_dim(q, start, min(width, _QUERIES), axis=1)
            query = start + jnp.arange(part.shape[1], dtype=jnp.int32)[:, None]
            distance = query - key
            seen = real & ((distance >= 0) & (distance < windows[layer]))[None] if causal else real
            logits = capped(_logits(part, k, scale), soft_cap)
            if per_head[1] is not None:
                logits -= per_head[1] * distance.astype(jnp.float32)[None, None, None]
            weights = _softmax(jnp.where(seen[:, None, None], logits, _UNSEEN), per_head[0]).astype(v.dtype)
            out = jnp.einsum("bkgcs,bskh->bckgh", weights, v, precision=full_precision(v))
            return out.reshape(rows, part.shape[1], N, -1)

        if width <= _QUERIES:
            out = block(0)
        else:
            blocks = jax.lax.map(block, jnp.arange(0, width, _QUERIES, dtype=jnp.int32))
            out = blocks.swapaxes(0, 1)
        return cache, out.reshape(rows * width, N, -1)

    return attend


def _logits(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """q (B, C, N, H), k (B, S, K, H) → (B, K, G, C, S) float32."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    wide = jnp.einsum(
        "bckgh,bskh->bkgcs", grouped, k, precision=full_precision(q), preferred_element_type=jnp.float32
    )  # fmt: skip
    return wide * jnp.float32(scale)


def _softmax(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the last axis; sinks (1, K, G, 1, 1) take their share and give nothing."""
    largest = logits.max(axis=-1, keepdims=True)
    largest = largest if sinks is None else jnp.maximum(largest, sinks)
    weights = jnp.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / (total if sinks is None else total + jnp.exp(sinks - largest))


def vectors(program: Program, params: Params, texts: Sequence[Sequence[int]], batch: int) -> np.ndarray:
    """Token ids of texts → (len(texts), D × modes) float32, in their order.

    Texts of about equal length go together, padded to a power of two in both directions. The longest go first: if the
    memory is too small for them, that is seen at once.
    """
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    found = np.zeros((len(texts), program.config.width * len(program.modes)), np.float32)
    made: list[tuple[list[int], jax.Array]] = []
    start = 0
    while start < len(order):
        width = power_of_two(max(len(texts[order[start]]), _LEAST_WIDTH))
        rows = max(1, min(batch, _TOKENS // width))
        chosen = order[start : start + rows]
        tokens, lengths = _padded([texts[i] for i in chosen], min(rows, power_of_two(len(chosen))), width)
        made.append((chosen, compute(program, params, tokens, lengths)))
        start += rows
    for chosen, result in made:
        found[chosen] = np.asarray(result)[: len(chosen)]
    return found


def _padded(texts: Sequence[Sequence[int]], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros((rows,), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
    return tokens, lengths


def of_decoder(
    model: Model, prompts: Sequence[Sequence[int]], *, batch: int = 64, normalize: bool | None = None
) -> np.ndarray:
    """The mean of a decoder's last hidden states, after the final norm, over the tokens of each prompt.

    Args:
      model: the loaded model.
      prompts: token ids.
      batch: prompts computed at once, at most.
      normalize: whether to divide each vector by its length; None is no.

    Returns:
      (len(prompts), D) float32.

    Raises:
      RequestError: a prompt longer than the model's context, or a wrong argument.
    """
    _check(batch, normalize)
    for i, prompt in enumerate(prompts):
        if len(prompt) > model.config.context:
            raise RequestError(
                f"Prompt {i} has {len(prompt)} tokens and the context is {model.config.context}: shorten the prompt."
            )
    specs = model.family.kv_specs(model.config, model.storage)
    program = Program(model.family.forward, model.config, specs, causal=True, modes=("mean",))
    return _normalized(vectors(program, model.params, prompts, batch), bool(normalize))


class Embedder:
    """A loaded encoder. Made by `kvjax.load`; its one method is `embed`.

    Attributes:
      family: the encoder's functions.
      config: its config.
      params: its parameters, on the devices.
      pooling: how hidden states become a vector.
      max_length: tokens of a text at most, the tokenizer's own included; what is longer is cut at its end.
      description: one line on the checkpoint.
    """

    def __init__(
        self,
        family: Family,
        config: Any,
        params: Params,
        backend: tokenizers.Tokenizer,
        pooling: Pooling,
        description: str = "",
    ):
        self.family, self.config, self.params = family, config, params
        self.pooling, self.description = pooling, description
        self.max_length = config.context
        backend.no_padding()  # tokenizer.json may ask for some, and for another length
        backend.enable_truncation(self.max_length)  # keeps the last [SEP]
        self._backend = backend
        specs = family.kv_specs(config, "float32")
        self._program = Program(family.forward, config, specs, causal=False, modes=pooling.modes)

    @property
    def width(self) -> int:
        """How many numbers an embedding has."""
        return self.config.width * len(self.pooling.modes)

    def embed(self, texts: Any, *, batch: int = 64, normalize: bool | None = None) -> np.ndarray:
        """The embeddings of texts.

        Args:
          texts: a text, or any number of them.
          batch: texts computed at once, at most.
          normalize: whether to divide each vector by its length; as the checkpoint says when None.

        Returns:
          (width,) float32 for one text, (len(texts), width) in the order of the texts for many. A text's embedding
          does not depend on the others, but for rounding.

        Raises:
          RequestError: something else than texts, or a wrong argument.
        """
        _check(batch, normalize)
        single = isinstance(texts, str)
        ids = self._token_ids([texts] if single else _checked(texts))
        found = vectors(self._program, self.params, ids, batch)
        found = _normalized(found, self.pooling.normalize if normalize is None else normalize)
        return found[0] if single else found

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        texts = [self.pooling.prompt + (text.lower() if self.pooling.lowercase else text) for text in texts]
        found: list[list[int]] = []
        try:
            for start in range(0, len(texts), _ENCODED):
                found += [encoding.ids for encoding in self._backend.encode_batch(texts[start : start + _ENCODED])]
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"A text cannot be encoded ({one_line(error)}): give valid Unicode.") from error
        for i, ids in enumerate(found):
            if not ids:
                raise RequestError(f"Text {i} is empty: give at least one token.")
        return found

    def __getattr__(self, name: str) -> Any:
        if name in _DECODING:  # asked only for what is not there
            raise RequestError("This is an embedding model, which can only embed(texts): load another to generate.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"Embedder({self.description or self.family.name}, width={self.width}, max_length={self.max_length})"


def load(
    source: TensorSource,
    family: Family,
    context: int | None = None,
    *,
    dtype: Any = np.float32,
    mesh: jax.sharding.Mesh | None = None,
    stacked: bool = False,
    rope: Any = None,
) -> Embedder:
    """Loads an encoder; `kvjax.load` calls it, and its arguments are those.

    Raises:
      ModelError: the checkpoint cannot be loaded; the sentence says why and what to do.
    """
    config, pooled = read_config(source, family, context, rope)
    backend, _ = tokenizer_parts(source)
    if (known := backend.get_vocab_size(with_added_tokens=True)) > config.vocab:
        raise ModelError(
            f"The tokenizer has {known} tokens and the model a vocabulary of {config.vocab}: "
            "the checkpoint mixes files of two models; take both from one."
        )
    specs = _with_old_names(source, family.abstract(config))
    params = load_params(
        source, specs, dtype=dtype, sharding_of=param_sharding(mesh), stacked=stacked,
        prefix=family.prefix, unused=family.unused(config),
    )  # fmt: skip
    return Embedder(family, config, params, backend, pooled, source.describe())


def read_config(
    source: TensorSource, family: Family, context: int | None = None, rope: Any = None
) -> tuple[Any, Pooling]:
    """Config and pooling of an encoder's checkpoint; `config.context` is how many tokens of a text are seen at most.

    Raises:
      ModelError: a field is missing, wrong, or asks for what is not implemented.
    """
    folder = source.tokenizer_source.folder
    pooled = pooling.read(folder) if folder is not None else Pooling()
    config = config_of(family, source.config, context, rope)
    if context is None and pooled.max_length is not None:
        config = dataclasses.replace(config, context=min(pooled.max_length, config.context))
    return config, pooled


def _with_old_names(source: TensorSource, specs: Any) -> Any:
    """The specs with names of this checkpoint: the first BERTs call a layer norm's weight gamma and its bias beta."""
    if not any(name.endswith("LayerNorm.gamma") for name in source.names()):
        return specs

    def old(spec: ParamSpec) -> ParamSpec:
        names = (name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in spec.names)
        names = (name.replace("LayerNorm.bias", "LayerNorm.beta") for name in names)
        return dataclasses.replace(spec, names=tuple(names))

    return jax.tree.map(old, specs)


def _checked(texts: Any) -> list[str]:
    if isinstance(texts, Mapping | bytes | bytearray) or not isinstance(texts, Iterable):
        raise RequestError(f"Texts of type {type(texts).__name__} cannot be read: {_TEXTS}.")
    found = list(texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise RequestError(f"Text {i} is of type {type(text).__name__}: {_TEXTS}.")
    return found


def _check(batch: Any, normalize: Any) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise RequestError(f"batch is {batch!r}: give a whole number of at least 1.")
    if normalize is not None and not isinstance(normalize, bool):
        raise RequestError(f"normalize is {normalize!r}: give True, False or None.")


def _normalized(found: np.ndarray, asked: bool) -> np.ndarray:
    if not asked:
        return found
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))
