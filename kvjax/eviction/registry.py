"""The policies by name, as a command line or a configuration gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.errors import UserError
from kvjax.eviction import scores
from kvjax.eviction.duo import retrieval_heads
from kvjax.eviction.policy import Policy
from kvjax.eviction.quest import Reading


def none() -> Policy:
    """Evicts nothing."""
    return Policy("none", None, together=True)


def truncate() -> Policy:
    """The first rows: once the budget is spent, later ones are not kept, as where a prompt is cut at a limit."""
    return Policy("truncate", scores.oldest, together=True)


def window() -> Policy:
    """The newest rows (Longformer, 2004.05150; Mistral, 2310.06825)."""
    return Policy("window", scores.newest, together=True)


def streaming(sinks: int = 4, positions: str = "token") -> Policy:
    """The first `sinks` rows and the newest (StreamingLLM, 2309.17453). The authors number rows as `positions="slot"`
    does, by their place in the cache."""
    return Policy("streaming", scores.newest, sinks=sinks, together=True, positions=positions)


def duo(
    heads: str | Sequence[Sequence[bool]],
    sinks: int = 128,
    recent: int = 256,
    threshold: float = 0.5,
    within: int | None = 1024,
) -> Policy:
    """The first `sinks` rows and `recent` newest in streaming heads, everything in retrieval heads (DuoAttention,
    2410.10819). `heads` says which are which: a file for `retrieval_heads`, or of each layer, for each kv head, whether
    it is a retrieval head."""
    whole = retrieval_heads(heads, threshold) if isinstance(heads, str) else tuple(tuple(line) for line in heads)
    return Policy("duo", scores.newest, sinks=sinks, recent=recent, whole=whole, within=within)


def quest(pages: int | None = None, dense: int = 2) -> Policy:
    """Evicts nothing: what decodes reads `pages` of each head, but in the first `dense` layers (Quest, 2406.10774)."""
    return Policy("quest", None, decode=False, reads=Reading(pages, dense))


def h2o(recent_share: float = 0.5, recent: int = 0) -> Policy:
    """Heavy hitters, by the sum of the weights of all queries, and recent rows, half of each (2306.14048)."""
    return Policy("h2o", scores.weights, recent=recent, recent_share=recent_share, watch="all")


def tova(recent: int = 1) -> Policy:
    """By the newest query's weights, the mean over all heads (2401.06104). kvpress keeps the last row; `recent=0` as
    the authors do."""
    return Policy("tova", scores.weights, recent=recent, watch="last", together=True)


def snapkv(window: int = 64, kernel: int = 5, pool: str = "avg") -> Policy:
    """By what the prompt's last queries look at, and those queries' rows (2404.14469)."""
    score = scores.PooledWeights(window, kernel, pool)
    return Policy("snapkv", score, recent=window, watch=window, decode=False)


def observed(sinks: int = 0, recent: int = 0) -> Policy:
    """By the mean weight of the queries that could see the row."""
    return Policy("observed", scores.mean_weights, sinks, recent, watch="all")


def knorm(sinks: int = 0, recent: int = 0) -> Policy:
    """Short keys stay (2406.11430)."""
    return Policy("knorm", scores.short_keys, sinks, recent)


def keydiff(sinks: int = 0, recent: int = 0) -> Policy:
    """Keys unlike the mean stay (2504.15364)."""
    return Policy("keydiff", scores.different_keys, sinks, recent)


def expected_attention(
    frequencies: Sequence[float] | None = None, sinks: int = 4, recent: int = 0, **options: Any
) -> Policy:
    """By the attention to be expected of queries to come (2510.00636); options of `scores.ExpectedAttention`."""
    turned = None if frequencies is None else tuple(float(f) for f in frequencies)
    score = scores.ExpectedAttention(turned, sinks=sinks, **options)
    return Policy("expected_attention", score, sinks, recent, moments=True)


POLICIES: dict[str, Callable[..., Policy]] = {
    made.__name__: made
    for made in (
        *(none, truncate, window, streaming, duo, quest),
        *(h2o, tova, snapkv, observed),
        *(knorm, keydiff, expected_attention),
    )
}


def named(name: str, **options: Any) -> Policy:
    """The policy of that name.

    Args:
      name: one of `POLICIES`.
      options: of the function of that name.

    Raises:
      UserError: an unknown name or option, an option missing or out of range.
    """
    if name not in POLICIES:
        raise UserError(f"Eviction policy {name!r} is not one of {', '.join(POLICIES)}.")
    known = _options(name)
    for option in options:
        if option not in known:
            takes = f"its options are {', '.join(known)}" if known else "it has none"
            raise UserError(f"Eviction policy {name!r} has no option {option!r}: {takes}.")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(f"Eviction policy {name!r} needs the option {option!r}.")
    return POLICIES[name](**options)


def _options(name: str) -> dict[str, inspect.Parameter]:
    known = dict(inspect.signature(POLICIES[name]).parameters)
    if known.pop("options", None):
        known |= inspect.signature(scores.ExpectedAttention).parameters
    return known
