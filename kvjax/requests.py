"""The table of requests on the device: from submission to collection a request is one row; a slot only points at it.

Rows that wait stand in a line. They enter slots in its order, and go back to its front when pages run out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kvjax import prefix, sampling
from kvjax.sampling import Logprobs, SamplerState

EMPTY, WAITING, RUNNING, STOPPED, LENGTH, TOO_LONG, CANCELLED = range(7)
"""Status of a row. STOPPED: a stop token or stop string came. LENGTH: the token limit was reached. TOO_LONG: the pages
of the whole cache cannot hold it, or what it had become. CANCELLED: the host gave it up."""

Array = Any
"""A jax.Array; a numpy array where rows are still on the host, or are there again."""

PIN_SECONDS = (300, 3600)
"""How long a prefix can be pinned, in the job's seconds: the two times to live of Anthropic's `cache_control`."""


class Requests(struct.PyTreeNode):
    """Q requests of up to S tokens, M pages of R rows each.

    Attributes:
      tokens: (Q·S,) int32 prompt, then output, request after request. Flat, because a TPU tiles a matrix, and copied it
        into the linear order of single tokens in every step (134 MB for 4,096 requests of 8,192).
      known: (Q,) int32 how many of them are known. Those beyond the cached length are still to be computed.
      prompt: (Q,) int32 length of the prompt.
      context: (Q,) int32 tokens of it after which rows are evicted for the first time, where they are.
      limit: (Q,) int32 value of `known` at which the request ends, at most S.
      status: (Q,) int32, EMPTY, WAITING, ...
      order: (Q,) int32 number of the submission; the largest is the newest.
      automaton: (Q,) int32 which stop automaton watches the output.
      stop_state: (Q,) int32 its state.
      root: (Q, 4) uint32 where its digests begin: `prefix.namespace`.
      digests: (Q, M, 4) uint32 of all tokens up to the end of each full page; the first `hashed` count.
      hashed: (Q,) int32.
      tail: (Q, 4) uint32 digest of the prompt without its last token.
      pins: (Q, 2) int32 tokens of the prompt to be pinned for each of `PIN_SECONDS`; 0 for none.
      hit: (Q,) int32 tokens that were not computed because another request had.
      preempted: (Q,) int32 how often it had to give way.
      sampler: sampling parameters, without counts.
      logprobs: of each of `tokens`: chosen (Q·S,), top_ids and top_values (Q·S, n); None when not recorded.
    """

    tokens: jax.Array
    known: jax.Array
    prompt: jax.Array
    context: jax.Array
    limit: jax.Array
    status: jax.Array
    order: jax.Array
    automaton: jax.Array
    stop_state: jax.Array
    root: jax.Array
    digests: jax.Array
    hashed: jax.Array
    tail: jax.Array
    pins: jax.Array
    hit: jax.Array
    preempted: jax.Array
    sampler: SamplerState
    logprobs: Logprobs | None

    @property
    def capacity(self) -> int:
        """S."""
        return self.tokens.shape[0] // self.status.shape[0]

    def place(self, row: jax.Array, position: jax.Array) -> jax.Array:
        """Where the tokens of rows stand; Q·S for a row of Q or more, or a position of S."""
        Q, S = self.status.shape[0], self.capacity
        return jnp.where((row < Q) & (position < S), row * S + position, Q * S)


class Line(struct.PyTreeNode):
    """Who waits, first come first served: a ring.

    Attributes:
      rows: (Q,) int32 rows of Requests.
      head: () int32 where the first one stands.
      count: () int32 how many wait.
    """

    rows: jax.Array
    head: jax.Array
    count: jax.Array

    def at(self, rank: jax.Array) -> jax.Array:
        """The row that is the rank-th to wait; Q where nobody is."""
        Q = self.rows.shape[0]
        return jnp.where((rank >= 0) & (rank < self.count), self.rows[(self.head + rank) % Q], Q)


class Rows(struct.PyTreeNode):
    """Requests as the host hands them over, A rows; and as it gets them back.

    Attributes:
      order: (A,) int32, -1 for padding.
      status: (A,) int32; ignored in a submission.
      tokens: (A, S) int32 prompt, then output from before: a request may go on where another engine left it.
      known: (A,) int32.
      prompt: (A,) int32.
      context: (A,) int32.
      limit: (A,) int32.
      automaton: (A,) int32.
      stop_state: (A,) int32.
      root: (A, 4) uint32.
      pins: (A, 2) int32.
      hit: (A,) int32.
      preempted: (A,) int32.
      sampler: rows as `sampling.pack` makes them; None on the way back.
      logprobs: as in Requests; None where not recorded.
    """

    order: Array
    status: Array
    tokens: Array
    known: Array
    prompt: Array
    context: Array
    limit: Array
    automaton: Array
    stop_state: Array
    root: Array
    pins: Array
    hit: Array
    preempted: Array
    sampler: Any
    logprobs: Logprobs | None


_COUNTERS = ("order", "status", "known", "prompt", "context", "limit", "automaton", "stop_state", "hit", "preempted")


def init(rows: int, capacity: int, pages: int, biases: int, stops: int, top: int | None) -> Requests:
    """An empty table: Q rows of S tokens on M pages, J biases, Z stop tokens, `top` log-probabilities or None."""
    return Requests(
        tokens=jnp.zeros((rows * capacity,), jnp.int32),
        root=jnp.zeros((rows, 4), jnp.uint32),
        digests=jnp.zeros((rows, pages, 4), jnp.uint32),
        hashed=jnp.zeros((rows,), jnp.int32),
        tail=jnp.zeros((rows, 4), jnp.uint32),
        pins=jnp.zeros((rows, 2), jnp.int32),
        sampler=sampling.init(rows, biases, stops),
        logprobs=_no_logprobs(top, rows * capacity),
        **{name: jnp.zeros((rows,), jnp.int32) for name in _COUNTERS},
    )


def line(rows: int) -> Line:
    """A line in which nobody waits."""
    return Line(jnp.zeros((rows,), jnp.int32), jnp.int32(0), jnp.int32(0))


def _no_logprobs(top: int | None, tokens: int) -> Logprobs | None:
    if top is None:
        return None
    return Logprobs(jnp.zeros((tokens,)), jnp.zeros((tokens, top), jnp.int32), jnp.zeros((tokens, top)))


@dataclasses.dataclass(frozen=True)
class Item:
    """One request to submit, as the host knows it.

    Attributes:
      order: number of the submission.
      tokens: its prompt, then output from before, if it has run already.
      prompt: length of the prompt.
      limit: number of tokens at which it ends.
      automaton: which stop automaton watches it.
      stop_state: the automaton's state.
      root: (4,) uint32, `prefix.namespace`; None for the common one.
      pins: tokens of the prompt to be pinned for each of `PIN_SECONDS`.
      hit: counted before.
      preempted: counted before.
      logprobs: of the output from before, as arrays (n,), (n, top), (n, top).
      evict_at: tokens of the prompt after which rows are evicted for the first time; None for all.
    """

    order: int
    tokens: Sequence[int]
    prompt: int
    limit: int
    automaton: int = 0
    stop_state: int = 0
    root: np.ndarray | None = None
    pins: tuple[int, int] = (0, 0)
    hit: int = 0
    preempted: int = 0
    logprobs: tuple[np.ndarray, ...] | None = None
    evict_at: int | None = None

    @property
    def context(self) -> int:
        """`evict_at`, within the prompt."""
        return self.prompt if self.evict_at is None else min(self.evict_at, self.prompt)


def pack(items: Sequence[Item], sampler: SamplerState, width: int, capacity: int, top: int | None = None) -> Rows:
    """Rows for `submit`, made on the host and padded to `width` ≥ len(items): one compilation serves any number.

    Args:
      items: the requests.
      sampler: their rows, as `sampling.pack` makes them.
      width: A.
      capacity: S.
      top: as the table has.
    """
    n = len(items)
    held = np.zeros((width, capacity), np.int32)
    roots, pins = np.zeros((width, 4), np.uint32), np.zeros((width, 2), np.int32)
    logprobs = None if top is None else Logprobs(*_blank(top, width, capacity))
    for row, item in enumerate(items):
        held[row, : len(item.tokens)] = item.tokens
        pins[row] = item.pins
        if item.root is not None:
            roots[row] = item.root
        if logprobs is not None and item.logprobs is not None:
            for array, old in zip(logprobs, item.logprobs, strict=True):
                held_here = array[row, item.prompt : len(item.tokens)]
                held_here[..., : old.shape[-1]] = old  # an engine with fewer top log-probabilities may have made it

    def column(name: str, padding: int = 0) -> np.ndarray:
        return np.asarray([*(getattr(item, name) for item in items), *[padding] * (width - n)], np.int32)

    names = ("prompt", "context", "limit", "automaton", "stop_state", "hit", "preempted")
    return Rows(
        order=column("order", -1),
        status=np.zeros(width, np.int32),
        tokens=held,
        known=np.asarray([*(len(item.tokens) for item in items), *[0] * (width - n)], np.int32),
        root=roots,
        pins=pins,
        sampler=jax.tree.map(lambda x: np.concatenate([x, np.zeros((width - n, *x.shape[1:]), x.dtype)]), sampler),
        logprobs=logprobs,
        **{name: column(name) for name in names},
    )


def _blank(top: int, rows: int, capacity: int) -> tuple[Any, Any, Any]:
    wide = (rows, capacity, top)
    return np.zeros((rows, capacity), np.float32), np.zeros(wide, np.int32), np.zeros(wide, np.float32)


def submit(requests: Requests, waiting: Line, new: Rows) -> tuple[Requests, Line]:
    """Puts requests into empty rows and at the end of the line, in their order; there must be rows for all."""
    Q, S, M = requests.status.shape[0], requests.capacity, requests.digests.shape[1]
    real = jnp.asarray(new.order) >= 0
    rank = jnp.cumsum(real, dtype=jnp.int32) - 1
    empty = jnp.cumsum(requests.status == EMPTY, dtype=jnp.int32)
    row = jnp.searchsorted(empty, rank + 1, method="scan").astype(jnp.int32)
    row = jnp.where(real, row, Q)

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[row].set(value, mode="drop")

    def put_flat(old: jax.Array, value: jax.Array) -> jax.Array:
        return put(old.reshape(Q, S, *old.shape[1:]), value).reshape(old.shape)

    root, tokens = jnp.asarray(new.root), jnp.asarray(new.tokens)
    made = {
        "status": jnp.full(row.shape, WAITING, jnp.int32),
        "digests": prefix.page_digests(root, tokens, S // M),
        "hashed": jnp.asarray(new.known) // (S // M),
        "tail": prefix.prefix_digest(root, tokens, jnp.asarray(new.prompt) - 1),
    }
    given = ("root", "pins", *(name for name in _COUNTERS if name != "status"))
    made |= {name: jnp.asarray(getattr(new, name)) for name in given}
    requests = requests.replace(
        sampler=sampling.admit(requests.sampler, row, new.sampler),
        tokens=put_flat(requests.tokens, tokens),
        logprobs=jax.tree.map(put_flat, requests.logprobs, new.logprobs),
        **{name: put(getattr(requests, name), value) for name, value in made.items()},
    )
    place = jnp.where(real, (waiting.head + waiting.count + rank) % Q, Q)
    return requests, waiting.replace(
        rows=waiting.rows.at[place].set(row, mode="drop"), count=waiting.count + real.sum(dtype=jnp.int32)
    )


def look(requests: Requests, row: jax.Array) -> Rows:
    """Copies of the rows (A,) int32; their order is -1 where the row is Q."""
    Q, S = requests.status.shape[0], requests.capacity

    def take(x: jax.Array) -> jax.Array:
        return x.at[row].get(mode="clip")

    def take_flat(x: jax.Array) -> jax.Array:
        return take(x.reshape(Q, S, *x.shape[1:]))

    columns = {name: take(getattr(requests, name)) for name in (*_COUNTERS, "root", "pins")}
    columns["order"] = jnp.where(row < Q, columns["order"], -1)
    logprobs = jax.tree.map(take_flat, requests.logprobs)
    return Rows(tokens=take_flat(requests.tokens), sampler=None, logprobs=logprobs, **columns)


def collect(requests: Requests, most: int) -> tuple[Requests, Rows]:
    """Takes up to `most` rows that have ended out of the table."""
    ended = requests.status > RUNNING
    number = jnp.cumsum(ended, dtype=jnp.int32)
    row = jnp.searchsorted(number, jnp.arange(most, dtype=jnp.int32) + 1, method="scan").astype(jnp.int32)
    status = requests.status.at[row].set(EMPTY, mode="drop")
    return requests.replace(status=status), look(requests, row)


def leave_line(waiting: Line, gone: jax.Array) -> Line:
    """The line without the rows in (Q,) bool `gone`, the others in their order."""
    Q = gone.shape[0]
    row = waiting.at(jnp.arange(Q, dtype=jnp.int32))
    stays = (row < Q) & ~gone.at[row].get(mode="clip")
    place = jnp.where(stays, jnp.cumsum(stays, dtype=jnp.int32) - 1, Q)
    rows = jnp.zeros_like(waiting.rows).at[place].set(row, mode="drop")
    return Line(rows, jnp.int32(0), stays.sum(dtype=jnp.int32))
