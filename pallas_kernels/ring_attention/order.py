"""Which positions of a sequence a rank of the ring holds, and how equal that makes the causal work.

A causal query sees what comes before it, so ranks that hold the sequence in its plain order wait for the last one.
Zigzag gives each rank a piece of the front and the mirrored one of the back; striped deals tokens like cards
(2311.09431). Both are equal over the whole ring; zigzag is equal in every hop too, and its runs are long, so that whole
blocks of keys are seen or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Order = Callable[[int, int], np.ndarray]


def plain(n: int, T: int) -> np.ndarray:
    """(n, T) int32: rank r holds T tokens from r · T on."""
    return np.arange(n * T, dtype=np.int32).reshape(n, T)


def zigzag(n: int, T: int) -> np.ndarray:
    """(n, T) int32: of 2 n chunks rank r holds chunks r and 2 n − 1 − r.

    Example: zigzag(2, 4) → [[0, 1, 6, 7], [2, 3, 4, 5]].

    Raises:
      ValueError: when T is odd.
    """
    if T % 2:
        raise ValueError(f"zigzag gives each rank two chunks of equal length: {T} tokens are odd")
    chunks = np.arange(n * T, dtype=np.int32).reshape(2 * n, T // 2)
    return np.concatenate([chunks[:n], chunks[: n - 1 : -1]], axis=1)


def striped(n: int, T: int) -> np.ndarray:
    """(n, T) int32: token i lies on rank i mod n."""
    return np.arange(n * T, dtype=np.int32).reshape(T, n).T.copy()


class Balance(NamedTuple):
    """Mean / max of the ranks' causal work: 1 where all do the same.

    Attributes:
      overall: of the whole ring.
      hops: of each hop, in order: what one waits for if every hop ends with the slowest rank.
      stepped: mean work of all hops / sum of the hops' maxima: of the whole ring, if every hop waits.
    """

    overall: float
    hops: tuple[float, ...]
    stepped: float


def pairs(queries: np.ndarray, keys: np.ndarray, window: int | None = None) -> int:
    """How many pairs of a query and a key that it sees there are; keys (S,) positions in any order."""
    ordered = np.sort(keys)
    seen = np.searchsorted(ordered, queries, side="right")
    if window is not None:
        seen = seen - np.searchsorted(ordered, queries - window, side="right")
    return int(seen.sum())


def work(positions: np.ndarray, window: int | None = None) -> np.ndarray:
    """Pairs that each rank computes in each hop: (n // 2 + 1, n) int64.

    In hop h a rank has the keys of the ranks h before and h behind it, which have come from either side; hop 0 is its
    own, and of an even n the last is one rank, not two.
    """
    n = len(positions)
    done = np.zeros((n // 2 + 1, n), np.int64)
    for hop in range(n // 2 + 1):
        for rank in range(n):
            for source in {(rank - hop) % n, (rank + hop) % n}:
                done[hop, rank] += pairs(positions[rank], positions[source], window)
    return done


def balance(order: Order, n: int, T: int, window: int | None = None) -> Balance:
    """How equal the causal work of n ranks of T tokens is in an order: `plain`, `striped` or `zigzag`."""
    done = work(order(n, T), window)
    total = done.sum(axis=0)
    hops = tuple(float(hop.mean() / hop.max()) if hop.max() else 1.0 for hop in done)
    return Balance(float(total.mean() / total.max()), hops, float(total.mean() / done.max(axis=1).sum()))
