"""A policy: how rows are scored, what must stay whatever its score, and which queries are watched for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from kvjax.errors import UserError
from kvjax.eviction.rows import Rows

if TYPE_CHECKING:
    from kvjax.eviction.quest import Reading

Score = Callable[[Rows], jax.Array]
WATCH = ("none", "all", "last")
POSITIONS = ("token", "slot")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which rows of a head stay when its budget is spent. Static and hashable: another policy is another program.

    Attributes:
      name: for messages and tables.
      score: Rows → (K, S) float32, higher stays; a NaN counts as the lowest. It is given rows with zeros behind each
        head's length, and what it says of those is not read. None never evicts. It must be hashable: a function, or a
        frozen dataclass that can be called; two that are equal share a compiled program.
      sinks: first rows of a head that always stay.
      recent: last rows of a head that always stay.
      recent_share: share of the budget that is for the last rows, where that is more than `recent`.
      watch: which queries' weights are summed in `Rows.weights`: "none"; "all", prompt and output; "last", only the
        newest query, whose weights replace the earlier; or a number w, the last w queries of the prompt.
      moments: whether it reads `Rows.moments`, of the queries from position `sinks` on.
      together: all kv heads of a layer keep the same rows: their scores are averaged. Lengths must be equal.
      decode: whether its scores still mean something for rows that decode steps wrote, so that it can evict between
        them; otherwise it compresses the prompt, once.
      positions: what attention takes for a row's position: "token", its token's in the sequence; or "slot", its place
        among the rows that are left, for a policy that keeps the first `sinks` rows and the newest.
      whole: of each layer, which kv heads keep every row whatever the budget; empty where none does. What a budget
        counts are the others. `select`, which sees one layer, is not concerned.
      within: tokens of a prompt after which rows go before its end, or None to keep them to its end.
      reads: where no row goes, but not all are read: how many pages of a head decoding queries read.

    Raises:
      UserError: a field is out of range.
    """

    name: str
    score: Score | None
    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0
    watch: str | int = "none"
    moments: bool = False
    together: bool = False
    decode: bool = True
    positions: str = "token"
    whole: tuple[tuple[bool, ...], ...] = ()
    within: int | None = None
    reads: Reading | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.watch, str) and self.watch in WATCH
        if not named and not is_count(self.watch, 1):
            choices = ", ".join(repr(name) for name in WATCH)
            raise self._wrong("watch", self.watch, f"{choices} or a number of queries is needed")
        for field in ("sinks", "recent"):
            if not is_count(getattr(self, field), 0):
                raise self._wrong(field, getattr(self, field), "a number of rows, 0 or more, is needed")
        if self.within is not None and not is_count(self.within, 1):
            raise self._wrong("within", self.within, "a number of tokens from 1, or None, is needed")
        if self.positions not in POSITIONS:
            raise self._wrong("positions", self.positions, f"{' or '.join(map(repr, POSITIONS))} is needed")
        if not 0 <= self.recent_share <= 1:
            raise self._wrong("recent_share", self.recent_share, "a share of the budget, from 0 to 1, is needed")

    def _wrong(self, field: str, value: object, needed: str) -> UserError:
        return UserError(f"Eviction policy {self.name!r}: {field} is {value!r}, {needed}.")


def is_count(value: object, least: int) -> bool:
    """Whether it is a whole number of at least `least`; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
