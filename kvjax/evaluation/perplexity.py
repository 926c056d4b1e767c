"""Perplexity of a text by sliding windows, as Hugging Face's guide on perplexity of fixed-length models defines it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.errors import RequestError
from kvjax.evaluation import scoring
from kvjax.plans import Model, Options


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
      nats: mean −log p of a token.
      tokens: how many were predicted; the first of the text is not, since nothing stands before it.
      text_bytes: bytes of text that they stand for.
      scores: of the windows, with what the cache took.
    """

    nats: float
    tokens: int
    text_bytes: int
    scores: scoring.Scores

    @property
    def perplexity(self) -> float:
        """exp of the mean −log p of a token: depends on the tokenizer."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """−log2 p of the text over its bytes: can be compared between tokenizers. NaN if the tokens have no bytes."""
        return self.nats * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else math.nan


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first) of each window: tokens begin … end − 1 are computed, and first … end − 1 count.

    Each begins `stride` after the one before and counts the tokens that none before it has had, so that each token
    counts once, where it has most context: at least window − stride tokens, but for those of the first window.
    """
    done = 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        yield begin, end, max(done, begin + 1)  # a window's first token has nothing before it
        done = end
        if end == tokens:
            return


def perplexity(
    model: Model,
    ids: Sequence[int],
    options: Options | None = None,
    *,
    window: int = 1024,
    stride: int = 512,
    **how: Any,
) -> Perplexity:
    """The perplexity of a text.

    Where stride equals window, the windows have no token in common, and the first of each is not predicted.

    Args:
      model: the model.
      ids: token ids of the text.
      options: as for `scoring.logprobs`.
      window: tokens of a window, at most the context.
      stride: from one window's beginning to the next; smaller is more exact and takes window / stride as long.
      **how: more arguments of `scoring.logprobs`: chunk, slots, after, compress_at.

    Raises:
      RequestError: a text of fewer than two tokens, or a wrong window or stride.
    """
    context = model.config.context
    if not 2 <= window <= context:
        raise RequestError(f"The window is {window} tokens: give 2 to {context}, the model's context.")
    if not 1 <= stride <= window:
        raise RequestError(f"The stride is {stride} tokens: give 1 to {window}, the window.")
    if len(ids) < 2:
        raise RequestError(f"The text has {len(ids)} tokens: give one of at least 2.")
    # A last window of one token predicts nothing; it comes about where windows do not overlap.
    spans = [span for span in windows(len(ids), window, stride) if span[1] - span[0] > 1]
    scores = scoring.logprobs(model, [ids[begin:end] for begin, end, _ in spans], options, **how)
    parts = [
        values[first - begin - 1 :].astype(np.float64)
        for (begin, _, first), values in zip(spans, scores.logprobs, strict=True)
    ]
    counted = [token for _, end, first in spans for token in ids[first:end]]
    total = -sum(float(part.sum()) for part in parts)
    text_bytes = sum(len(model.token_bytes[token]) for token in counted)
    return Perplexity(total / len(counted), len(counted), text_bytes, scores)
