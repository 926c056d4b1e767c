"""The façade: `kvjax.load` and the one class that holds something, a model with its tokenizer."""

from __future__ import annotations

import codecs
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import beam, embedding, job, processes, stops, storages
from kvjax.cache_control import pins, without_marks
from kvjax.checkpoints.place import load_model
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.errors import ModelError, RequestError, UserError
from kvjax.eviction_options import eviction_of
from kvjax.job import Output, Report, TokenLogprob
from kvjax.models import FAMILIES, config_of, family_of
from kvjax.models.bert import encoder_of
from kvjax.pallas_kernels import LAYOUTS
from kvjax.pallas_kernels.paged_attention import BACKENDS
from kvjax.plans import Model, Options, Request
from kvjax.sampling_params import SamplingParams
from kvjax.sharding import MESH_AXES, automatic, param_sharding
from kvjax.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or a conversation of {"role": ..., "content": ...}."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One output of a prompt.

    Attributes:
      text: without special tokens, and without the stop string that ended it.
      tokens: generated token ids, the stop token and the tokens of the stop string included.
      finish_reason: "stop" (a stop token or string), "length", or "too_long": the memory for K and V cannot hold the
        request, or what it had become, even alone.
      logprobs: one entry per token, when asked for.
      cached_tokens: tokens of the prompt that were not computed, because another request with the same beginning had.
      score: of a beam search: the sum of log-probabilities over length ** length_penalty.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated for one prompt; `text`, `tokens`, `finish_reason` and `logprobs` are the first sample's.

    Attributes:
      prompt_tokens: token ids of the prompt.
      samples: n of them, in order.
    """

    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.samples[0].tokens

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.samples[0].logprobs


class LLM:
    """A loaded model, ready to generate. Made by `load`.

    Attributes:
      model: parameters and functions, for the functional level beneath.
      tokenizer: text to token ids and back.
      options: how jobs are run.
      description: one line on the checkpoint.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, options: Options, description: str = ""):
        self.model, self.tokenizer, self.options, self.description = model, tokenizer, options, description

    @property
    def context(self) -> int:
        """Most tokens that a prompt and its output may have together."""
        return self.model.config.context

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; a conversation goes through the chat template.

        Raises:
          RequestError: not a prompt, empty, or with token ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif _is_conversation(prompt):
            ids = self._encode_messages(prompt)  # type: ignore[arg-type]
        else:
            ids = _token_ids(prompt, self.model.config.vocab)
        if not ids:
            raise RequestError("The prompt is empty: give at least one token.")
        return tuple(ids)

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        text = self.tokenizer.apply_chat_template(without_marks(messages))
        return self.tokenizer.encode(text, add_special_tokens=False)

    def requests(self, prompt: Prompt, params: SamplingParams, index: int = 0, *, salt: str = "") -> list[Request]:
        """The n requests of a prompt, checked. Raises RequestError for what can never be served.

        Args:
          prompt: text, token ids or a conversation, whose messages may carry `cache_control` (kvjax.cache_control).
          params: sampling parameters.
          index: number of the prompt in its job.
          salt: only requests of equal salt share the K and V of equal beginnings.
        """
        params.validate(self.model.config.vocab)
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt is {salt!r}: give a text.")
        ids = self.encode(prompt)
        pinned = pins(prompt, self._encode_messages) if _is_conversation(prompt) else (0, 0)  # type: ignore[arg-type]
        if len(ids) + params.max_new_tokens > self.context:
            raise RequestError(
                f"The prompt's {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the context of "
                f"{self.context} tokens: shorten the prompt or lower max_new_tokens."
            )
        return [Request(index, sample, ids, params, salt, pinned) for sample in range(params.n)]

    def run(self, requests: Iterable[Request], *, seed: int = 0, follow: bool = False) -> Iterator[Report]:
        """Runs a job; see `kvjax.job.run`."""
        return job.run(self.model, requests, self.options, seed=_seed(seed), follow=follow)

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int = 0,
        cache_salt: str = "",
        on_report: Callable[[Report], None] | None = None,
        **sampling: Any,
    ) -> Any:
        """Generates from one prompt, or from many as one batch job.

        Args:
          prompts: a prompt (text, token ids, or a conversation), or a list of prompts.
          params: sampling parameters for all prompts, or one per prompt. Default: greedy, up to 256 tokens.
          seed: of the job; request i draws from (seed, i) unless its parameters have a seed of their own.
          cache_salt: prompts share the K and V of equal beginnings with those of the same salt only.
          on_report: called with every `Report`, about once a second.
          **sampling: fields of SamplingParams, instead of `params`.

        Returns:
          A Completion for one prompt, a list of them, in order, for many.

        Raises:
          RequestError: a prompt or parameter that can never be served; nothing has run then.
        """
        single, seed = _is_prompt(prompts), _seed(seed)
        items: list[Prompt] = [prompts] if single else list(prompts)
        each = params_of(params, sampling, len(items))
        groups = [
            self.requests(prompt, p, index, salt=cache_salt)
            for index, (prompt, p) in enumerate(zip(items, each, strict=True))
        ]
        found = [completion for _, completion in self._completions(groups, seed, True, on_report)]
        return found[0] if single else found

    def completions(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        ordered: bool = True,
        seed: int = 0,
        cache_salt: str = "",
        on_report: Callable[[Report], None] | None = None,
        **sampling: Any,
    ) -> Iterator[tuple[int, Completion]]:
        """Yields (index, Completion) of many prompts while the job runs.

        The prompts may come from a generator: they are read as there is room for them, and a job of any length needs
        the memory of what runs alone, and, where results are ordered, of those that wait for an earlier one.

        Args:
          prompts: texts, token ids or conversations.
          params: sampling parameters for all.
          ordered: in the order of the prompts; else as they finish.
          seed: as in `generate`, like the other arguments.

        Raises:
          RequestError: a prompt or parameter that can never be served; at the first `next` for the first 4,096
            prompts, before anything has run.
        """
        (p,) = params_of(params, sampling, 1)
        groups = (self.requests(prompt, p, index, salt=cache_salt) for index, prompt in enumerate(prompts))
        return self._completions(groups, _seed(seed), ordered, on_report)

    def _completions(
        self,
        groups: Iterable[list[Request]],
        seed: int,
        ordered: bool,
        on_report: Callable[[Report], None] | None,
    ) -> Iterator[tuple[int, Completion]]:
        """The n requests of each prompt → its completion, once all n are there."""
        samples: dict[int, dict[int, Sample]] = {}
        done: dict[int, Completion] = {}
        following = 0
        for report in self.run((request for group in groups for request in group), seed=seed):
            if on_report:
                on_report(report)
            for output in report.finished:
                request = output.request
                found = samples.setdefault(request.index, {})
                found[request.sample] = self.sample_of(output)
                if len(found) == request.params.n:
                    del samples[request.index]
                    done[request.index] = Completion(request.prompt, tuple(found[i] for i in range(request.params.n)))
            if not ordered:
                yield from sorted(done.items())
                done.clear()
            while following in done:
                yield following, done.pop(following)
                following += 1

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        on_report: Callable[[Report], None] | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yields the text of one prompt as it appears; the joined pieces equal `generate(...).text`.

        A piece never splits a character, and never holds the beginning of a stop string that is then cut off.
        Arguments and errors as in `generate`; the prompt is checked at once, not at the first piece.
        """
        (p,) = params_of(params, sampling, 1)
        if p.n != 1:
            raise RequestError(f"n is {p.n}, and a stream has one sample: use generate for several.")
        return self._stream(self.requests(prompt, p), p, _seed(seed), on_report)

    def _stream(
        self,
        requests: list[Request],
        params: SamplingParams,
        seed: int,
        on_report: Callable[[Report], None] | None,
    ) -> Iterator[str]:
        pieces = Pieces(self, params)
        options = dataclasses.replace(self.options, segment_seconds=0.15)  # a few pieces a second
        for report in job.run(self.model, requests, options, seed=seed, follow=True):
            for output in (*report.running, *report.finished):
                if piece := pieces.take(output):
                    yield piece
            if on_report:
                on_report(report)

    def beam_search(
        self,
        prompts: Any,
        width: int = 4,
        *,
        max_new_tokens: int = 256,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        n: int = 1,
        ignore_eos: bool = False,
    ) -> Any:
        """The n likeliest outputs that a beam search finds, as transformers' `generate(num_beams=width)` does.

        Args:
          prompts: a prompt, or a list of prompts, as in `generate`.
          width: beams of a prompt.
          max_new_tokens: tokens of an output at most.
          length_penalty: a score is the sum of log-probabilities over length ** length_penalty: over 0 favours longer
            outputs.
          early_stopping: True ends at `width` finished outputs; False when the best beam, if it ended now, would not
            be among them; "never" when it would not even if no token up to the limit cost anything.
          n: outputs to return, up to `width`.
          ignore_eos: do not end at end-of-sequence tokens.

        Returns:
          A Completion for one prompt, its samples best first, each with its `score`; a list of them for many.

        Raises:
          RequestError: a prompt or argument that can never be served, or more than `kv_bytes` can hold.
        """
        single = _is_prompt(prompts)
        beam.check(width, n, length_penalty, early_stopping)
        params = SamplingParams(max_new_tokens=max_new_tokens)
        asked = [self.requests(prompt, params)[0].prompt for prompt in ([prompts] if single else prompts)]
        eos = () if ignore_eos else self.model.eos
        best = beam.run(
            self.model, asked, int(width), int(max_new_tokens), self.options,
            eos=eos, length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        found = [
            Completion(prompt, tuple(map(self._sample_of_beam, outputs[:n])))
            for prompt, outputs in zip(asked, best, strict=True)
        ]
        return found[0] if single else found

    def _sample_of_beam(self, found: beam.Hypothesis) -> Sample:
        raw = self.text_bytes(found.tokens).decode(errors="replace")
        return Sample(raw[self.stripped(raw) :], found.tokens, found.finish_reason, score=found.score)

    def embed(self, prompts: Any, *, batch: int = 64, normalize: bool | None = None) -> np.ndarray:
        """One vector a prompt: the mean of the last hidden states, after the final norm, over the prompt's tokens.

        Args:
          prompts: a prompt, or a list of prompts, as in `generate`.
          batch: prompts computed at once, at most.
          normalize: whether to divide each vector by its length; None is no.

        Returns:
          (D,) float32 for one prompt, (len(prompts), D) for many.

        Raises:
          RequestError: not a prompt, empty, longer than the context, or a wrong argument.
        """
        single = _is_prompt(prompts)
        asked = [self.encode(prompt) for prompt in ([prompts] if single else prompts)]
        found = embedding.of_decoder(self.model, asked, batch=batch, normalize=normalize)
        return found[0] if single else found

    def sample_of(self, output: Output) -> Sample:
        """A finished output with its text, cut before the stop string that ended it."""
        params = output.request.params
        raw = self.text_bytes(output.tokens).decode(errors="replace")
        hidden = self.stripped(raw)
        if params.stop:  # matched where the device matched it: before a leading space is stripped
            exempt = len(self.text_bytes(output.tokens[: params.min_new_tokens]).decode(errors="replace"))
            raw, _ = stops.cut(raw, params.stop, exempt)
        reason = output.finish_reason or ""
        return Sample(raw[hidden:], output.tokens, reason, output.logprobs, output.cached_tokens)

    def text_bytes(self, tokens: Sequence[int]) -> bytes:
        """What tokens add to a text, in UTF-8 unless a character is cut."""
        return b"".join(self.model.token_bytes[token] for token in tokens)

    def stripped(self, raw: str) -> int:
        """Characters at the beginning of a text that the tokenizer does not show: SentencePiece's first space."""
        return int(self.tokenizer.strips_space and raw.startswith(" "))

    def __repr__(self) -> str:
        return f"LLM({self.description or self.model.family.name}, context={self.context})"


class Pieces:
    """Turns the growing output of a request into pieces of text that never have to be taken back.

    A piece never splits a character, and never holds the beginning of a stop string that is then cut off.
    """

    def __init__(self, llm: LLM, params: SamplingParams):
        self._llm, self._stop = llm, params.stop
        self._utf8, self._raw = codecs.getincrementaldecoder("utf-8")("replace"), ""
        self._done = self._sent = 0

    def take(self, output: Output) -> str:
        """The text that an output has more than at the last call, as far as it is sure."""
        self._raw += self._utf8.decode(self._llm.text_bytes(output.tokens[self._done :]))
        self._done = len(output.tokens)
        hidden = self._llm.stripped(self._raw)
        text, safe = self._raw[hidden:], len(self._raw) - hidden - stops.held(self._raw, self._stop)
        if output.finish_reason:
            text = self._llm.sample_of(output).text
            safe = len(text)
        begin, self._sent = self._sent, max(self._sent, safe)
        return text[begin:safe]


def load(
    what: Any = None,
    *,
    context: int | None = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    layers: str = "unrolled",
    rope: str | Mapping[str, Any] | None = None,
    evict: Any = None,
    keep: int | float | None = None,
    evict_every: int = 32,
    **options: Any,
) -> LLM:
    """Loads a model.

    Args:
      what: None for the default model (SmolLM2-135M-Instruct); "minilm" for the default embedding model
        (all-MiniLM-L6-v2); a Hugging Face repo id; a folder of safetensors; a .gguf file; an Orbax checkpoint of
        `kvjax convert`; any path may be `gs://…`.
      context: longest prompt with output to serve; the checkpoint's own when None. Fixes length-dependent RoPE.
      dtype: of the parameters and activations; float32 on CPU and bfloat16 elsewhere when None.
      kv_dtype: of the cached K and V; as `dtype` when None; also int8, float8_e4m3fn, float8_e5m2, int4, kivi4, kivi2,
        K and V apart as "int8/int4", and options of codes as "kivi4:recent=64" (`kvjax.storages`).
      mesh: devices with axes named as in `kvjax.sharding`; parameters go straight onto it. Over the devices of several
        processes (`kvjax.processes`), each of them has to call the same functions with the same arguments.
      layers: "unrolled" runs faster, "scanned" compiles one layer only.
      rope: another scaling of RoPE than the checkpoint's, for positions beyond the trained length: "yarn:4", "ntk:2",
        "dynamic:4", "linear:2", "longrope:FILE", "default", or the fields of config.json's rope_scaling. Without a
        `context`, the trained length times the factor is served.
      evict: which cached rows go when a sequence has more than it keeps: the name of a policy, such as "snapkv",
        "h2o" or "streaming:sinks=4", a `kvjax.eviction.Policy`, or None to keep all. "+adakv" and "+pyramid" behind the
        name divide the budget among heads and layers (docs/eviction.md). Outputs are approximate then.
      keep: rows that each head keeps, such as 1024, or a share of the tokens, such as 0.5.
      evict_every: tokens generated between two evictions.
      **options: fields of `kvjax.plans.Options`: slots, kv_bytes, share_prefixes, ...

    Returns:
      An LLM; for the checkpoint of an encoder (BERT, RoBERTa) a `kvjax.Embedder`, of which only `embed` can be used.

    Raises:
      ModelError: the checkpoint cannot be loaded; the sentence says why and what to do.
    """
    if layers not in ("unrolled", "scanned"):
        raise ModelError(f"layers is {layers!r}: give 'unrolled' or 'scanned'.")
    if context is not None and (not isinstance(context, int) or context < 2):
        raise ModelError(f"context is {context!r}: give a whole number of tokens, at least 2.")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ModelError(f"mesh is {mesh!r}: give a jax.sharding.Mesh, e.g. jax.make_mesh((4,), ('model',)).")
    if mesh is not None and (unknown := [name for name in mesh.axis_names if name not in MESH_AXES]):
        raise ModelError(f"mesh has an axis {unknown[0]!r}: name its axes out of {', '.join(MESH_AXES)}.")
    if mesh is not None and processes.spans(mesh) and not set(range(processes.count())) <= _owners(mesh):
        raise ModelError("mesh has no device of some of the processes: make it of jax.devices(), or of local ones.")
    run_options, eviction = _options(options), eviction_of(evict, keep, evict_every)
    on_cpu = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform == "cpu"
    dtype = _float_type("dtype", dtype or (jnp.float32 if on_cpu else jnp.bfloat16))
    storage = _storage(kv_dtype, dtype.name)
    stacked = layers == "scanned"
    with open_checkpoint(what, FAMILIES) as source:
        if encoder := encoder_of(source.config):  # to a type checker an LLM: it refuses what an encoder cannot do
            how: Any = {"dtype": dtype, "mesh": mesh, "stacked": stacked, "rope": rope}
            return cast(Any, embedding.load(source, encoder, context, **how))
        family = family_of(source.config)
        config = config_of(family, source.config, context, rope)
        tokenizer = Tokenizer.from_source(source)
        if tokenizer.vocab_size > config.vocab:
            raise ModelError(
                f"The tokenizer has {tokenizer.vocab_size} tokens and the model a vocabulary of {config.vocab}: "
                "the checkpoint mixes files of two models; take both from one."
            )
        params = load_model(source, family, config, dtype=dtype, sharding_of=param_sharding(mesh), stacked=stacked)
        description = source.describe()
    token_bytes = [tokenizer.token_bytes(token) for token in range(config.vocab)]
    shape = None if mesh is None else automatic(mesh).abstract_mesh
    model = Model(family, config, params, tokenizer.eos_ids, token_bytes, dtype.name, storage, stacked, shape, eviction)
    _ = model.own_eviction  # refuses now what it could not do
    return LLM(model, tokenizer, run_options, description)


def _owners(mesh: jax.sharding.Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def _options(fields: Mapping[str, Any]) -> Options:
    known = {field.name for field in dataclasses.fields(Options)}
    for name, value in fields.items():
        if name not in known:
            raise ModelError(f"load does not take {name}: the options are {', '.join(sorted(known))}.")
        default = getattr(Options, name)
        if name in ("rows", "queue", "refill", "prefix_ttl") and value is None:
            continue
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ModelError(f"{name} is {value!r}: give True or False.")
        elif name == "prefix_ttl":
            default = 0.0
        elif name in ("rows", "queue", "refill"):
            default = 1
        if type(default) is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"{name} is {value!r}: give a whole number of at least 1.")
        if isinstance(default, float) and (not isinstance(value, int | float) or not 0 < value < math.inf):
            raise ModelError(f"{name} is {value!r}: give a number of seconds over 0.")
        choices = {"backend": (None, *BACKENDS), "layout": (None, *LAYOUTS)}.get(name)
        if choices is not None and value not in choices:
            raise ModelError(f"{name} is {value!r}: give one of {', '.join(map(str, choices))}.")
        if name == "backend" and value in ("tpu", "gpu") and jax.default_backend() != value:
            also = f"leave it out, or give '{value}_interpret'"
            raise ModelError(f"backend is '{value}', and there is none here: {also}.")
    return Options(**fields)


def _float_type(name: str, dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    known = storages.FLOATS
    if found is None or found.name not in known:
        raise ModelError(f"{name} {dtype!r} is not implemented: give {', '.join(known[:-1])} or {known[-1]}.")
    return found


def _storage(kv_dtype: Any, dtype: str) -> str:
    """The storage of K and V, its name in full."""
    try:
        return storages.resolve(kv_dtype if isinstance(kv_dtype, str) else jnp.dtype(kv_dtype or dtype).name, dtype)
    except UserError as error:
        raise ModelError(str(error)) from None
    except TypeError:
        known = ", ".join(storages.NAMES)
        raise ModelError(f"kv_dtype is {kv_dtype!r}: give a name out of {known}, or a dtype.") from None


_PROMPTS = (
    'give a text, a list of token ids, a list of messages {"role": ..., "content": ...}, or a list of such prompts'
)


def _is_prompt(prompts: Any) -> bool:
    """Whether it is one prompt, not many: a text, a list of ids, or a list of messages."""
    if isinstance(prompts, str):
        return True
    if (
        isinstance(prompts, Mapping | bytes | bytearray)
        or not hasattr(prompts, "__getitem__")
        or not _has_length(prompts)
    ):
        raise RequestError(f"Prompts of type {type(prompts).__name__} cannot be read: {_PROMPTS}.")
    if len(prompts) == 0:
        return False
    first = prompts[0]
    return isinstance(first, Mapping) or (hasattr(first, "__index__") and getattr(first, "ndim", 0) == 0)


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) for message in prompt)
    )


def _has_length(value: Any) -> bool:
    try:
        return len(value) >= 0
    except TypeError:  # an array of no dimensions has the method, and no length
        return False


def _token_ids(prompt: Any, vocab: int) -> list[int]:
    try:
        if isinstance(prompt, bytes | bytearray) or any(isinstance(token, bool) for token in prompt):
            raise TypeError
        ids = [token.__index__() for token in prompt]
    except (TypeError, AttributeError) as error:
        raise RequestError(f"A prompt of type {type(prompt).__name__} cannot be read: {_PROMPTS}.") from error
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError(f"The prompt contains token id {token}: the model's vocabulary has 0 to {vocab - 1}.")
    return ids


def params_of(params: Any, fields: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts, given as one, as a list, or as fields. Raises RequestError."""
    if params is None:
        return [SamplingParams.from_dict(fields)] * count
    if fields:
        raise RequestError(f"Sampling parameters are given twice, as params and as {', '.join(fields)}: use one way.")
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params is {params!r}: give a SamplingParams, or a list of one for each prompt.")
    if len(params) != count:
        raise RequestError(f"There are {count} prompts and {len(params)} sampling parameters: give one for each.")
    return list(params)


def _seed(seed: Any) -> int:
    try:
        if isinstance(seed, bool) or not 0 <= seed.__index__() < 2**32:
            raise AttributeError
        return seed.__index__()
    except AttributeError:
        raise RequestError(f"seed is {seed!r}: give a whole number from 0 to {2**32 - 1}.") from None
