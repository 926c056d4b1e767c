"""The façade: `kvjax.load` and the one class that holds something, a model with its tokenizer."""

from __future__ import annotations

import codecs
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import job, stops
from kvjax.checkpoints.place import load_params
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.errors import ModelError, RequestError
from kvjax.job import Model, Options, Output, Report, Request, TokenLogprob
from kvjax.models import FAMILIES, family_of
from kvjax.pallas_kernels import LAYOUTS
from kvjax.pallas_kernels.paged_attention import BACKENDS
from kvjax.sampling_params import SamplingParams
from kvjax.sharding import param_sharding
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
      finish_reason: "stop" (a stop token or string) or "length".
      logprobs: one entry per token, when asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None


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
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt):
            ids = self.tokenizer.encode(self.tokenizer.apply_chat_template(prompt), add_special_tokens=False)  # type: ignore[arg-type]
        else:
            ids = _token_ids(prompt, self.model.config.vocab)
        if not ids:
            raise RequestError("The prompt is empty: give at least one token.")
        return tuple(ids)

    def requests(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> list[Request]:
        """The n requests of a prompt, checked. Raises RequestError for what can never be served."""
        params.validate(self.model.config.vocab)
        ids = self.encode(prompt)
        if len(ids) + params.max_new_tokens > self.context:
            raise RequestError(
                f"The prompt's {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the context of "
                f"{self.context} tokens: shorten the prompt or lower max_new_tokens."
            )
        return [Request(index, sample, ids, params) for sample in range(params.n)]

    def run(self, requests: Sequence[Request], *, seed: int = 0, follow: bool = False) -> Iterator[Report]:
        """Runs a job; see `kvjax.job.run`."""
        return job.run(self.model, requests, self.options, seed=_seed(seed), follow=follow)

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int = 0,
        on_report: Callable[[Report], None] | None = None,
        **sampling: Any,
    ) -> Any:
        """Generates from one prompt, or from many as one batch job.

        Args:
          prompts: a prompt (text, token ids, or a conversation), or a list of prompts.
          params: sampling parameters for all prompts, or one per prompt. Default: greedy, up to 256 tokens.
          seed: of the job; request i draws from (seed, i) unless its parameters have a seed of their own.
          on_report: called with every `Report`, about once a second.
          **sampling: fields of SamplingParams, instead of `params`.

        Returns:
          A Completion for one prompt, a list of them, in order, for many.

        Raises:
          RequestError: a prompt or parameter that can never be served; nothing has run then.
        """
        single, seed = _is_prompt(prompts), _seed(seed)
        items: list[Prompt] = [prompts] if single else list(prompts)
        requests = [
            request
            for index, (prompt, p) in enumerate(zip(items, _params_of(params, sampling, len(items)), strict=True))
            for request in self.requests(prompt, p, index)
        ]
        samples: dict[tuple[int, int], Sample] = {}
        for report in self.run(requests, seed=seed):
            for output in report.finished:
                samples[output.request.index, output.request.sample] = self.sample_of(output)
            if on_report:
                on_report(report)
        by_prompt: list[list[Request]] = [[] for _ in items]
        for request in requests:
            by_prompt[request.index].append(request)
        completions = [
            Completion(group[0].prompt, tuple(samples[r.index, r.sample] for r in group)) for group in by_prompt
        ]
        return completions[0] if single else completions

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
        (p,) = _params_of(params, sampling, 1)
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
        utf8, raw, done, sent = codecs.getincrementaldecoder("utf-8")("replace"), "", 0, 0
        options = dataclasses.replace(self.options, segment_seconds=0.15)  # a few pieces a second
        for report in job.run(self.model, requests, options, seed=seed, follow=True):
            for output in (*report.running, *report.finished):
                raw += utf8.decode(self._bytes(output.tokens[done:]))
                done = len(output.tokens)
                hidden = self._stripped(raw)
                text, safe = raw[hidden:], len(raw) - hidden - stops.held(raw, params.stop)
                if output.finish_reason:
                    text = self.sample_of(output).text
                    safe = len(text)
                if safe > sent:
                    yield text[sent:safe]
                    sent = safe
            if on_report:
                on_report(report)

    def sample_of(self, output: Output) -> Sample:
        """A finished output with its text, cut before the stop string that ended it."""
        params = output.request.params
        raw = self._bytes(output.tokens).decode(errors="replace")
        hidden = self._stripped(raw)
        if params.stop:  # matched where the device matched it: before a leading space is stripped
            exempt = len(self._bytes(output.tokens[: params.min_new_tokens]).decode(errors="replace"))
            raw, _ = stops.cut(raw, params.stop, exempt)
        return Sample(raw[hidden:], output.tokens, output.finish_reason or "", output.logprobs)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.model.token_bytes[token] for token in tokens)

    def _stripped(self, raw: str) -> int:
        """Characters at the beginning of a text that the tokenizer does not show: SentencePiece's first space."""
        return int(self.tokenizer.strips_space and raw.startswith(" "))

    def __repr__(self) -> str:
        return f"LLM({self.description or self.model.family.name}, context={self.context})"


def load(
    what: Any = None,
    *,
    context: int | None = None,
    dtype: Any = None,
    kv_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    layers: str = "unrolled",
    **options: Any,
) -> LLM:
    """Loads a model.

    Args:
      what: None for the default model (SmolLM2-135M-Instruct); a Hugging Face repo id; a folder of safetensors; a
        .gguf file; an Orbax checkpoint of `kvjax convert`; any path may be `gs://…`.
      context: longest prompt with output to serve; the checkpoint's own when None. Fixes length-dependent RoPE.
      dtype: of the parameters and activations; float32 on CPU and bfloat16 elsewhere when None.
      kv_dtype: of the cached K and V; as `dtype` when None.
      mesh: devices with axes named as in `kvjax.sharding`; parameters go straight onto it.
      layers: "unrolled" runs faster, "scanned" compiles one layer only.
      **options: fields of `kvjax.job.Options`: slots, rows, kv_bytes, packed.

    Raises:
      ModelError: the checkpoint cannot be loaded; the sentence says why and what to do.
    """
    if layers not in ("unrolled", "scanned"):
        raise ModelError(f"layers is {layers!r}: give 'unrolled' or 'scanned'.")
    if context is not None and (not isinstance(context, int) or context < 2):
        raise ModelError(f"context is {context!r}: give a whole number of tokens, at least 2.")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ModelError(f"mesh is {mesh!r}: give a jax.sharding.Mesh, e.g. jax.make_mesh((4,), ('model',)).")
    run_options = _options(options)
    on_cpu = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).platform == "cpu"
    dtype = _float_type("dtype", dtype or (jnp.float32 if on_cpu else jnp.bfloat16))
    storage = _float_type("kv_dtype", kv_dtype or dtype).name
    with open_checkpoint(what, FAMILIES) as source:
        family = family_of(source.config)
        config = family.config(source.config, context)
        tokenizer = Tokenizer.from_source(source)
        if tokenizer.vocab_size > config.vocab:
            raise ModelError(
                f"The tokenizer has {tokenizer.vocab_size} tokens and the model a vocabulary of {config.vocab}: "
                "the checkpoint mixes files of two models; take both from one."
            )
        stacked = layers == "scanned"
        params = load_params(
            source, family.abstract(config), dtype=dtype, sharding_of=param_sharding(mesh), stacked=stacked
        )
        description = source.describe()
    token_bytes = [tokenizer.token_bytes(token) for token in range(config.vocab)]
    model = Model(family, config, params, tokenizer.eos_ids, token_bytes, dtype.name, storage, stacked)
    return LLM(model, tokenizer, run_options, description)


def _options(fields: Mapping[str, Any]) -> Options:
    known = {field.name for field in dataclasses.fields(Options)}
    for name, value in fields.items():
        if name not in known:
            raise ModelError(f"load does not take {name}: the options are {', '.join(sorted(known))}.")
        default = getattr(Options, name)
        if isinstance(default, int) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ModelError(f"{name} is {value!r}: give a whole number of at least 1.")
        if isinstance(default, float) and (not isinstance(value, int | float) or not 0 < value < math.inf):
            raise ModelError(f"{name} is {value!r}: give a number of seconds over 0.")
        choices = {"backend": BACKENDS, "layout": (None, *LAYOUTS)}.get(name)
        if choices is not None and value not in choices:
            raise ModelError(f"{name} is {value!r}: give one of {', '.join(map(str, choices))}.")
    return Options(**fields)


def _float_type(name: str, dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"{name} {dtype!r} is not implemented: give float32, bfloat16 or float16.")
    return found


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


def _params_of(params: Any, fields: Mapping[str, Any], count: int) -> list[SamplingParams]:
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
