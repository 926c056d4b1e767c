"""Stop strings, matched on the device token by token, also where they straddle tokens.

An Aho-Corasick automaton over bytes (Aho and Corasick, "Efficient string matching", 1975) is lifted to tokens on
the host: (state, token) → state, the state after all bytes of the token. The device looks up one entry per slot and
step. Only generated tokens are matched; special tokens are b"" and change nothing.

Letters beside those of `kvjax.types`: A automata (sets of stop strings), S states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import RequestError

MAX_TABLE_BYTES = 256 * 2**20
"""Default bound on the table of a job: 16 states of 150k tokens are 2.4 MB, so about a hundred such sets."""


class TokenBytes(NamedTuple):
    """The vocabulary as one buffer, longest token first, so that the tokens with a j-th byte are a prefix.

    Attributes:
      data: all bytes, one after another.
      order: (V,) token ids, longest first.
      starts: (V,) where each of them begins in `data`.
      longest_with: for each j, how many tokens have more than j bytes.
    """

    data: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    longest_with: np.ndarray

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> TokenBytes:
        lengths = np.fromiter(map(len, token_bytes), np.int64, len(token_bytes))
        order = np.argsort(-lengths, kind="stable")
        starts = (np.cumsum(lengths) - lengths)[order]
        shorter = np.cumsum(np.bincount(lengths, minlength=1))[:-1]
        return cls(np.frombuffer(b"".join(token_bytes), np.uint8), order, starts, len(token_bytes) - shorter)


def lift(stop_strings: Iterable[str], token_bytes: Sequence[bytes]) -> np.ndarray:
    """The token automaton of a set of stop strings.

    Args:
      stop_strings: not empty strings; none at all gives an automaton that never matches.
      token_bytes: what each token adds to the text; V of them, b"" for special and padding tokens.

    Returns:
      (S, V) of the smallest signed integer dtype: (state, token) → state. State 0 is the start; the last state
      means "matched", and is never left.
    """
    return _lift(_automaton(_trie(stop_strings)), TokenBytes.of(token_bytes))


def _lift(goto: np.ndarray, vocabulary: TokenBytes) -> np.ndarray:
    """(S, 256) → (S, V): all tokens advance by a byte at a time, from every state at once."""
    states = np.repeat(np.arange(len(goto), dtype=goto.dtype)[:, None], len(vocabulary.order), axis=1)
    for j, count in enumerate(vocabulary.longest_with):
        byte = vocabulary.data[vocabulary.starts[:count] + j]
        states[:, :count] = goto[states[:, :count], byte[None, :]]
    table = np.empty_like(states)
    table[:, vocabulary.order] = states
    return table


class _Trie(NamedTuple):
    """The prefixes of the stop strings.

    Attributes:
      children: for each prefix, next byte → prefix; 0 is the empty prefix, every other comes after its parent.
      complete: for each prefix, whether it is a stop string.
    """

    children: list[dict[int, int]]
    complete: list[bool]

    @property
    def states(self) -> int:
        """S of the automaton: the incomplete prefixes, and "matched"."""
        return self.complete.count(False) + 1


def _trie(stop_strings: Iterable[str]) -> _Trie:
    patterns = {text.encode() for text in stop_strings}
    trie = _Trie([{}], [False])
    for pattern in sorted(patterns):
        # one that contains another is never the first to be complete; without it no prefix hides a match
        if not any(other in pattern for other in patterns if other != pattern):
            _insert(trie, pattern)
    return trie


def _insert(trie: _Trie, pattern: bytes) -> None:
    node = 0
    for byte in pattern:
        if byte not in trie.children[node]:
            trie.children[node][byte] = len(trie.children)
            trie.children.append({})
            trie.complete.append(False)
        node = trie.children[node][byte]
    trie.complete[node] = True


def _automaton(trie: _Trie) -> np.ndarray:
    """(S, 256), state and byte → state; the last state is absorbing and means that a stop string occurred."""
    goto = np.zeros((len(trie.children), 256), np.int64)
    suffix = [0] * len(trie.children)  # the longest proper suffix that is a prefix as well
    queue = [0]
    for node in queue:  # breadth first: a suffix is shorter, so its row is complete
        goto[node] = goto[suffix[node]]
        for byte, child in trie.children[node].items():
            suffix[child] = int(goto[node, byte]) if node else 0
            goto[node, byte] = child
            queue.append(child)
    complete = np.array(trie.complete)
    number = np.where(complete, trie.states - 1, np.cumsum(~complete) - 1)
    rows = np.vstack([number[goto[~complete]], np.full((1, 256), trie.states - 1)])
    return rows.astype(_state_dtype(trie.states))


def _state_dtype(states: int) -> np.dtype:
    return np.dtype(np.int8 if states <= 2**7 else np.int16 if states <= 2**15 else np.int32)


class AutomatonBank:
    """The automata of a job, one per distinct set of stop strings; lives on the host. Id 0 is the empty set.

    Attributes:
      max_bytes: bound on the size of the table.
    """

    def __init__(self, token_bytes: Sequence[bytes], max_bytes: int = MAX_TABLE_BYTES) -> None:
        """`token_bytes`: what each of the model's V tokens adds to the text; b"" for special and padding tokens."""
        self.max_bytes = max_bytes
        self._vocabulary = TokenBytes.of(token_bytes)
        self._ids: dict[frozenset[str], int] = {frozenset(): 0}
        self._tables: list[np.ndarray] = [_lift(_automaton(_trie(())), self._vocabulary)]

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, stop_set: Iterable[str]) -> int:
        """The id of a set of stop strings; equal sets share one.

        Raises:
          RequestError: the table would outgrow `max_bytes`; the bank is unchanged.
        """
        stops = frozenset(stop_set)
        if stops in self._ids:
            return self._ids[stops]
        trie = _trie(stops)
        self._check_size(stops, trie.states)
        self._ids[stops] = len(self._tables)
        self._tables.append(_lift(_automaton(trie), self._vocabulary))
        return self._ids[stops]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(A, S, V) of the table: A and S are powers of two, so that programs are rarely recompiled."""
        return self._shape(len(self._tables), max(map(len, self._tables)))

    def table(self) -> np.ndarray:
        """(A, S, V) for `advance`. The last of all S states means "matched", in every automaton.

        A table that grew since keeps the meaning of every other state, so running slots carry theirs over.
        """
        shape = self.shape
        out = np.zeros(shape, _state_dtype(shape[1]))
        out[:, -1] = shape[1] - 1
        for padded, table in zip(out, self._tables, strict=False):
            live = len(table) - 1
            padded[:live] = np.where(table[:live] == live, shape[1] - 1, table[:live])
        return out

    def _shape(self, automata: int, states: int) -> tuple[int, int, int]:
        return _power_of_two(automata), _power_of_two(states), len(self._vocabulary.order)

    def _check_size(self, stops: frozenset[str], states: int) -> None:
        shape = self._shape(len(self._tables) + 1, max(states, *map(len, self._tables)))
        size = int(np.prod(shape)) * _state_dtype(shape[1]).itemsize
        if size > self.max_bytes:
            raise RequestError(
                f"stop {_shortened(sorted(stops))} would grow the table of the job's stop strings, "
                f"{len(self._tables)} different sets, to {size / 2**20:.1f} MB, over {self.max_bytes / 2**20:.1f} "
                "MB: use fewer or shorter strings, or fewer different sets in one job."
            )


def _shortened(stops: Sequence[str]) -> str:
    text = repr(stops)
    return text if len(text) <= 80 else text[:77] + "..."


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def no_stops(vocab: int) -> np.ndarray:
    """(1, 2, V) table of one automaton that never matches."""
    return np.stack([np.zeros((1, vocab), np.int8), np.ones((1, vocab), np.int8)], axis=1)


def advance(
    bank_table: jax.Array, automaton: jax.Array, state: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Feeds each row's token to its automaton.

    Args:
      bank_table: (A, S, V), `AutomatonBank.table`.
      automaton: (B,) int32, ids of `AutomatonBank.add`.
      state: (B,) int32, 0 at the first generated token.
      token: (B,) int32.

    Returns:
      state (B,) int32, and matched (B,) bool: a stop string is complete, in this token or before.
    """
    state = bank_table[automaton, state, token].astype(jnp.int32)
    return state, state == bank_table.shape[1] - 1


def cut(text: str, stops: Sequence[str], start: int = 0) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string; or all of it, and None.

    First to be complete, not first to begin, as one who reads byte by byte sees it: so the result depends neither
    on how the text was split into tokens nor on what comes later. Of several that end at the same place the longest
    counts. ("abcd" with stops "abcd" and "bc" gives "a", "bc".)

    Args:
      text: what was generated.
      stops: not empty strings.
      start: where to begin to look, for outputs of a minimum length.
    """
    found = [(begin + len(stop), begin, stop) for stop in stops if (begin := text.find(stop, start)) >= 0]
    if not found:
        return text, None
    _, begin, stop = min(found)
    return text[:begin], stop


def held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a streamed text may yet become a stop string, and must wait."""
    longest = max(map(len, stops), default=0) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0
    )
