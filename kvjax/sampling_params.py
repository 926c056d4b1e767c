"""What a request asks of the sampler: plain host data, checked once, before anything reaches the device."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from kvjax.errors import RequestError

MAX_LOGPROBS = 20
"""The OpenAI API's bound on `top_logprobs`."""

MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature may leave float32, and sampling is greedy in all but name."""

ALIASES = {"max_tokens": "max_new_tokens"}
"""Other names of fields, as the OpenAI API spells them."""

MAX_SAMPLES = 4096
"""Bound on `n`: a mistyped one should not fill the memory with requests."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. The defaults are greedy decoding of up to 256 tokens, without penalties or stops.

    Construction only normalises containers; `validate` checks the values, since some bounds need the vocabulary.

    Attributes:
      max_new_tokens: tokens to generate at most.
      min_new_tokens: until so many are generated, stop tokens are impossible and stop strings do not count.
      temperature: divides the logits; 0 takes the most likely token (greedy), and the filters below do nothing.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probabilities sum to top_p; 1 keeps all.
      min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
      repetition_penalty: over 1 discourages tokens of the prompt and of the output (Hugging Face's meaning).
      presence_penalty: subtracted from the logit of every token already generated (OpenAI's meaning).
      frequency_penalty: subtracted once per time the token was generated (OpenAI's meaning).
      logit_bias: token id → number added to its logit.
      stop: strings that end the output, and are not part of it; a single string is accepted.
      stop_token_ids: token ids that end the output, besides the end-of-sequence tokens.
      ignore_eos: do not end at end-of-sequence tokens.
      logprobs: None for none, 0 for those of the generated tokens, n for the n likeliest tokens as well.
      seed: fixes the request's random numbers whatever else is in the job; None derives them from the job's seed.
      n: independent samples of this prompt.
      evict_at: where the model evicts cached rows, tokens of the prompt after which it does so for the first time, so
        that the rest of the prompt meets a compressed cache; None for the end of the prompt.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    evict_at: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", {_as_token(k): v for k, v in self.logit_bias.items()})
        for field in dataclasses.fields(self):  # numpy's numbers become Python's
            value = getattr(self, field.name)
            if isinstance(value, numbers.Number) and hasattr(value, "item"):
                object.__setattr__(self, field.name, value.item())

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Reads the parameters of a JSON request; null stands for the default, as in the OpenAI API.

        Raises:
          RequestError: an unknown field, or one given under two names.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, Mapping):
            raise RequestError(f"Sampling parameters are {fields!r}: give a mapping of names to values.")
        values: dict[str, Any] = {}
        for given, value in fields.items():
            name = ALIASES.get(given, given)
            if name not in known:
                raise RequestError(_unknown(str(given), [*known, *ALIASES]))
            if value is None:
                continue
            if name in values:
                alias = given if given != name else next(a for a in ALIASES if ALIASES[a] == name and a in fields)
                raise RequestError(f"{name} is given twice, also as {alias}: give one of them.")
            values[name] = value
        return cls(**values)

    @property
    def penalizes(self) -> bool:
        """Whether the sampler must remember which tokens occurred."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> SamplingParams:
        """Checks every value, and returns self.

        Raises:
          RequestError: names the first wrong field, its value and the remedy.
        """
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}: "
                "lower the one or raise the other."
            )
        _real("temperature", self.temperature, 0.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature is {self.temperature!r}: give 0 for greedy decoding, or at least {MIN_TEMPERATURE}."
            )
        _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0.0, 1.0, above=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, above=True)
        _real("presence_penalty", self.presence_penalty)
        _real("frequency_penalty", self.frequency_penalty)
        _bias(self.logit_bias, vocab_size)
        _stops(self.stop)
        _tokens("stop_token_ids", self.stop_token_ids, vocab_size)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}: give true or false.")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**32 - 1)
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.evict_at is not None:
            _integer("evict_at", self.evict_at, 1)
        return self


def _as_tuple(value: Any) -> Any:
    """One string or number, a list, or None → tuple; anything else stays, for `validate` to refuse."""
    if value is None:
        return ()
    if isinstance(value, (str, numbers.Number)):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)) else value


def _as_token(key: Any) -> Any:
    """A key of a JSON object → token id; JSON has only string keys."""
    # No vocabulary has ids of more digits, and Python refuses to read thousands of them.
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the known ones are {', '.join(known)}."
    return f"{name} is not a sampling parameter: {remedy}"


def _bounds(low: float | None, high: float | None, above: bool) -> str:
    least = "" if low is None else f"over {low:g}" if above else f"at least {low:g}"
    most = "" if high is None else f"at most {high:g}" if high < 1e6 else f"at most {high}"
    text = " and ".join(part for part in (least, most) if part)
    return f" {text}" if text else ""


def _check(name: str, value: Any, kind: str, low: float | None, high: float | None, above: bool) -> None:
    below = low is not None and (value <= low if above else value < low)
    if below or (high is not None and value > high):
        raise RequestError(f"{name} is {value!r}: give {kind}{_bounds(low, high, above)}.")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    # bool is an int in Python, but `"top_k": true` is a mistake
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} is {value!r}: give a whole number{_bounds(low, high, False)}.")
    _check(name, value, "a whole number", low, 2**31 - 1 if high is None else high, False)


def _real(name: str, value: Any, low: float | None = None, high: float | None = None, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_finite(value):
        raise RequestError(f"{name} is {value!r}: give a finite number{_bounds(low, high, above)}.")
    _check(name, value, "a number", low, high, above)


def _is_finite(value: Any) -> bool:
    """Whether it is a finite float32, which the sampler computes in."""
    try:
        return abs(float(value)) <= 3.4028234663852886e38
    except OverflowError:  # an int beyond the largest float64
        return False


def _tokens(name: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, tuple):
        raise RequestError(f"{name} is {ids!r}: give a list of token ids.")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(
                f"{name} contains {token!r}: give token ids from 0 to {vocab_size - 1}, the model's vocabulary."
            )


def _bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}: give a mapping from token id to number.")
    _tokens("logit_bias", tuple(bias), vocab_size)
    for token, value in bias.items():
        _real(f"logit_bias of token {token}", value)


def _stops(stops: Any) -> None:
    if not isinstance(stops, tuple) or not all(isinstance(text, str) for text in stops):
        raise RequestError(f"stop is {stops!r}: give a string or a list of strings.")
    if any("\ufffd" in text for text in stops):
        raise RequestError(
            "stop contains U+FFFD, which stands for bytes that are no text, and no token spells it: remove it."
        )
    if "" in stops:
        raise RequestError('stop contains the empty string "", which would end every output at once: remove it.')
    for text in stops:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError(f"stop contains {text!r}, half of a surrogate pair, which is not text: remove it.")
