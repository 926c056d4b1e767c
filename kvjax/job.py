"""A batch job, seen from the host: requests go to the device, and come back as outputs.

Between two looks of the host the device runs alone: it admits, computes prompts, decodes, shares prefixes, stops and
frees pages (`kvjax.engine`). The host keeps the device's line filled, and holds nothing but what it cannot send yet.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import engines, plans, prefix, processes, sampling, sharding
from kvjax import requests as table
from kvjax.errors import RequestError
from kvjax.plans import Model, Options, Plan, Request
from kvjax.requests import CANCELLED, LENGTH, RUNNING, STOPPED, TOO_LONG, Item, Rows
from kvjax.state import EngineState, Policy, Program
from kvjax.stops import AutomatonBank

AHEAD = 4096
"""Requests whose shapes are looked at together, before the first of them runs."""

_REASONS = {STOPPED: "stop", LENGTH: "length", TOO_LONG: "too_long", CANCELLED: "cancelled"}


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities at one output token, under the model itself.

    Attributes:
      chosen: of the token that was generated.
      top: token id → log-probability of the likeliest tokens.
    """

    chosen: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Output:
    """What became of a request.

    Attributes:
      request: the request.
      tokens: generated token ids, the stop token included.
      finish_reason: "stop", "length", "too_long" (the memory for K and V cannot hold it, or what it had become) or
        "cancelled"; None while it runs.
      logprobs: one entry per token, when asked for.
      cached_tokens: tokens of the prompt that were not computed, because another request had.
      preempted: how often it gave way to others, because pages ran out.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    cached_tokens: int = dataclasses.field(default=0, compare=False)
    preempted: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the host saw at the end of a segment.

    Attributes:
      finished: requests that ended since the last report.
      running: the tokens so far of those that run; empty unless the job is followed.
      waiting: requests that do not run yet, or were preempted.
      computed: tokens passed through the model since the job began, prompts included.
      hit: tokens of prompts that were not computed, because another request had.
      preempted: how often a request had to give way because pages ran out.
      evicted: pages that the prefix index gave up for others.
      peak_pages: most pages in use at once since the job began, prefixes that are kept included: of all groups of
        layers, in the engine that had the most. Where rows are evicted, a page is one head's.
      peak_bytes: of these pages on each chip, scales and unfilled rows included; what `kv_bytes` bounds.
    """

    finished: tuple[Output, ...]
    running: tuple[Output, ...]
    waiting: int
    computed: int
    hit: int
    preempted: int
    evicted: int
    peak_pages: int
    peak_bytes: int


@dataclasses.dataclass
class Entry:
    """A request on the host, and what it holds when it has run already.

    Attributes:
      order: number of its submission.
      request: the request.
      tokens: its prompt, then its output so far.
      stop_state: of its stop automaton.
      hit: tokens found in the prefix index before.
      preempted: how often it gave way before.
      logprobs: of the output so far, as arrays.
    """

    order: int
    request: Request
    tokens: tuple[int, ...]
    stop_state: int = 0
    hit: int = 0
    preempted: int = 0
    logprobs: tuple[np.ndarray, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the host knows of a job between two segments; with the engine's state, all of the job.

    Attributes:
      seed: of requests without one.
      plan: the shapes of the device's state, or None.
      order: number of the next submission.
      seconds: the job's clock.
      entries: all unfinished requests as if they had been preempted, by order.
      live: the orders of those that are on the device.
      ended: finished, and not reported yet, with the reason.
      stops: the sets of stop strings in the table, in its order.
      before: statistics of engines that are gone.
      total: statistics up to now.
    """

    seed: int
    plan: Plan | None
    order: int
    seconds: float
    entries: tuple[Entry, ...]
    live: frozenset[int]
    ended: tuple[tuple[Entry, str], ...]
    stops: tuple[frozenset[str], ...]
    before: dict[str, int]
    total: dict[str, int]


class Job:
    """The host's side of a running engine.

    Attributes:
      model: what generates.
      options: how.
      seed: of requests without one.
      waiting: requests that the device has no room for yet.
      live: requests on the device, by order.
      plan: the shapes of the device's state; None before the first segment, and chosen then.
      state: the engine's state, or None.
      several: whether several processes hold it together: each runs the same job, with the same requests.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        seed: int = 0,
        plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`plan`: shapes to begin with; they grow when a request needs more, at the price of a compilation."""
        self.model, self.options, self.seed, self.plan = model, options, seed, plan
        self.waiting: collections.deque[Entry] = collections.deque()
        self.live: dict[int, Entry] = {}
        self.state: EngineState | None = None
        self.program: Program | None = None
        self._bank = _Bank(model.token_bytes)
        self._spare = _Bank(model.token_bytes)
        self._table = self._bank.shape, len(self._bank)
        self._order = 0
        self._clock, self._pace = clock, _Pace(options.segment_seconds)
        self._began = clock()
        self.several = processes.spans(sharding.mesh_of(model.params))
        self._told: int | None = None  # process 0's clock
        self._cancelled: list[Output] = []
        self._before = dict.fromkeys((*_STATISTICS, *_PEAKS), 0)
        self._seen: dict[str, np.ndarray] = {}  # of each engine, at the last look
        self._at: dict[int, int] = {}  # the engine of each live request

    # --- requests ------------------------------------------------------------------------------------------
    def add(self, request: Request) -> int:
        """Takes a request; returns the number of its submission. Raises RequestError if it can never be served."""
        self.check(request)
        order, self._order = self._order, self._order + 1
        self.waiting.append(Entry(order, request, request.prompt))
        return order

    def check(self, request: Request) -> None:
        """Raises RequestError if a request can never be served."""
        plans.check(request, self.model.config.context)
        if not self._bank.takes(request.params.stop) and not self._spare.takes(request.params.stop):
            self._spare = _Bank(self.model.token_bytes)
            self._spare.add(request.params.stop)

    def cancel(self, orders: Iterable[int]) -> None:
        """Gives up requests; they are among the finished of the next report, with what they have generated."""
        gone = set(orders)
        self._cancelled += [_held(entry) for entry in self.waiting if entry.order in gone]
        self.waiting = collections.deque(entry for entry in self.waiting if entry.order not in gone)
        found = sorted(gone & self.live.keys())
        for some in _batched(found, 64):
            padded = np.asarray([*some, *[-1] * (64 - len(some))], np.int32)
            assert self.program is not None
            self.state = engines.cancel(self.program, self.state, self._policy(0, False), padded)

    @property
    def unfinished(self) -> int:
        """Requests that have not been reported as finished."""
        return len(self.waiting) + len(self.live) + len(self._cancelled)

    @property
    def room(self) -> int:
        """How many requests more the device could take; before the first segment, `AHEAD`."""
        if self.plan is None:
            return max(0, AHEAD - len(self.waiting))
        return max(0, self._engines * self.plan.queue - len(self.live) - len(self.waiting))

    # --- segments ------------------------------------------------------------------------------------------
    def advance(self, *, follow: bool = False, more: bool = False) -> Report:
        """Runs one segment.

        Args:
          follow: whether the report holds the tokens of running requests.
          more: whether requests will be added: the segment then ends before the device's line is empty.
        """
        finished, self._cancelled = self._cancelled, []
        running: list[Output] = []
        if self.waiting or self.live:
            self._refill()
            finished += self._run(more or bool(self.waiting))
            running = self._view() if follow else []
        counts = self.statistics()
        waiting = len(self.waiting) + int(self._seen["waiting"].sum() if self.state is not None else 0)
        return Report(tuple(finished), tuple(running), waiting, **counts)

    def _run(self, more: bool) -> list[Output]:
        assert self.plan is not None and self.program is not None
        policy = self._policy(None, more)
        self._told = None
        with self._pace:
            self.state = engines.run(self.program, self.model.params, self.state, policy, packed=self.plan.packed)
            finished = self._collect()
            self._look()
            self._pace.step = int(self._seen["step"].max())
        return finished

    def _look(self) -> None:
        """Notes what the device says of itself."""
        assert self.program is not None
        seen = jax.device_get(engines.glance(self.program, self.state))
        self._seen = {name: np.array(value) for name, value in seen.items()}

    @property
    def _engines(self) -> int:
        return sharding.sizes(self.model.mesh)["data"]

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Makes what the host decides of the next segment the same in all processes: what process 0 has decided.

        Once between two segments; a segment before which it was not called does so itself.

        Args:
          flags: of the caller's own.

        Returns:
          Which of the flags any process has raised.
        """
        if not self.several:
            return flags
        (self._pace.steps, self._told), raised = processes.agree((self._pace.steps, self.seconds), flags)
        return raised

    def _policy(self, steps: int | None, more: bool) -> Policy:
        """With more to come the segment ends while the line can still fill all slots: who runs with whom does not
        depend on when the host looks. `steps`: None for what the pace says."""
        assert self.plan is not None and self.state is not None
        if self._told is None:
            self.agree()
        slots, options = self.plan.cache.slots, self.options
        low = np.minimum(slots if more else 0, self._seen["waiting"]).astype(np.int32)
        ttl = prefix.FOREVER if options.prefix_ttl is None else min(round(options.prefix_ttl), prefix.FOREVER)
        numbers: Any = {  # NumPy's: the same on every process
            "steps": np.int32(self._pace.steps if steps is None else steps),
            "low": low if self._engines > 1 else low[0],
            "refill": np.int32(max(1, slots // 8) if options.refill is None else options.refill),
            "clock": np.int32(self.seconds if self._told is None else self._told),
            "ttl": np.int32(ttl),
        }
        return Policy(**numbers)

    @property
    def seconds(self) -> int:
        """The job's clock."""
        return int(self._clock() - self._began)

    def _collect(self) -> list[Output]:
        assert self.plan is not None and self.program is not None
        outputs: list[Output] = []
        most = self.plan.cache.slots
        while True:
            self.state, rows = engines.collect(self.program, self.state, most=most)
            rows = jax.device_get(rows)
            found = [i for i, order in enumerate(rows.order.tolist()) if order >= 0]
            outputs += [_output(rows, i, self._leave(int(rows.order[i])).request) for i in found]
            if (rows.order.reshape(-1, most) < 0).any(axis=1).all():
                return sorted(outputs, key=lambda output: (output.request.index, output.request.sample))

    def _leave(self, order: int) -> Entry:
        del self._at[order]
        return self.live.pop(order)

    def _view(self) -> list[Output]:
        assert self.program is not None
        rows = jax.device_get(engines.view(self.program, self.state))
        return [_output(rows, i, self.live[order].request) for i, order in enumerate(rows.order.tolist()) if order >= 0]

    # --- to the device and back ----------------------------------------------------------------------------
    def _refill(self) -> None:
        """Sends what the device has room for; a request that does not fit its shapes makes larger ones first."""
        if self.plan is None or not all(self.plan.covers(self.model, entry.request) for entry in self.waiting):
            self._rebuild()
        assert self.plan is not None
        free = self._watched(self._engines * self.plan.queue - len(self.live))
        self._update_automata()
        assert self.program is not None
        shares, slots = self._shares(free), self.plan.cache.slots
        for first in range(0, max(map(len, shares)), slots):
            some = [entries[first : first + slots] for entries in shares]
            rows = [self._rows(entries) for entries in some]
            new = rows[0] if len(rows) == 1 else jax.tree.map(lambda *x: np.stack(x), *rows)
            self.state = engines.submit(self.program, self.state, new)
            for e, entries in enumerate(some):
                self.live.update({entry.order: entry for entry in entries})
                self._at.update({entry.order: e for entry in entries})
                self._seen["waiting"][e] += len(entries)

    def _shares(self, most: int) -> list[list[Entry]]:
        """Takes up to `most` waiting requests, each for the engine that has the least to do and room for it.

        Samples of one prompt go to one engine, which shares its pages.
        """
        assert self.plan is not None
        load = self._load()
        shares: list[list[Entry]] = [[] for _ in load]
        for _ in range(min(most, len(self.waiting))):
            entry = self.waiting[0]
            room = [e for e, (number, _) in enumerate(load) if number < self.plan.queue]
            same = [e for e in room if shares[e] and shares[e][-1].request.prompt == entry.request.prompt]
            chosen = min(same or room, key=lambda e: load[e][1], default=None)
            if chosen is None:
                break
            shares[chosen].append(self.waiting.popleft())
            load[chosen] = load[chosen][0] + 1, load[chosen][1] + _work(entry)
        return shares

    def _load(self) -> list[tuple[int, int]]:
        """Of each engine: requests in its table, and the tokens that they may come to hold."""
        held: list[list[Entry]] = [[] for _ in range(self._engines)]
        for order, entry in self.live.items():
            held[self._at[order]].append(entry)
        return [(len(entries), sum(map(_work, entries))) for entries in held]

    def _rebuild(self) -> None:
        """A new state with shapes for everything that waits and runs; what runs is computed again."""
        self.withdraw()
        self.plan = plans.plan(self.model, [entry.request for entry in self.waiting], self.options, self.plan)
        self._start()

    def _start(self) -> None:
        assert self.plan is not None
        self._table = self._bank.shape, len(self._bank)
        self.program, self.state = plans.start(self.model, self.plan, self._bank.table())
        self._look()
        self._pace.begin_again()

    def _update_automata(self) -> None:
        if self.state is None:
            self._start()
        elif self._table != (self._bank.shape, len(self._bank)):
            # A larger table is another program; one of the same shape only has more of it in use.
            self._table = self._bank.shape, len(self._bank)
            self.state = self.state.replace(automata=sharding.put(self._bank.table(), self.state.automata.sharding))

    def _watched(self, most: int) -> int:
        """How many of the first `most` that wait have their stop strings in the table.

        A full table is made anew for those that run and wait once no more than half of it is in use.
        """
        used = {frozenset(entry.request.params.stop) for entry in self.live.values()}
        for number, entry in enumerate(itertools.islice(self.waiting, max(0, most))):
            stop = frozenset(entry.request.params.stop)
            if not self._bank.takes(stop):
                if 2 * len(used) > len(self._bank):
                    return number
                self._renew(used)
                if not self._bank.takes(stop):
                    return number
            used.add(stop)
        return most

    def _renew(self, used: Iterable[frozenset[str]]) -> None:
        """A table of these sets of stop strings alone; running requests are told their new numbers in it."""
        self._bank = _Bank(self.model.token_bytes, self._bank.shape)
        for stop in sorted(used, key=sorted):
            self._bank.add(stop)
        if self.state is not None:
            self._look()
            live = [self.live.get(order) for order in self._seen["order"].reshape(-1).tolist()]
            ids = [0 if entry is None else self._bank.add(entry.request.params.stop) for entry in live]
            old = self.state.requests.automaton
            new = sharding.put(np.asarray(ids, np.int32).reshape(old.shape), old.sharding)
            requests = self.state.requests.replace(automaton=new)
            self._table = _STALE
            self.state = self.state.replace(requests=requests)

    def withdraw(self) -> None:
        """Takes every request back from the device, as if it had been preempted, and forgets the device's state."""
        if self.state is not None:
            entries = self._entries()
            self._before = self.statistics()
            self.waiting = collections.deque(entries)
            self.live, self._at, self.state, self.program = {}, {}, None, None

    def _entries(self) -> list[Entry]:
        """All unfinished requests as if they had been preempted, by order; those that have ended are collected."""
        if self.state is None:
            return list(self.waiting)
        assert self.program is not None
        self._cancelled += self._collect()
        rows = jax.device_get(engines.view(self.program, self.state, every=True))
        entries = [
            _entry(rows, i, self.live[order])
            for i, order in enumerate(rows.order.tolist())
            if rows.status[i] in (table.WAITING, RUNNING) and order in self.live
        ]
        return sorted([*entries, *self.waiting], key=lambda entry: entry.order)

    # --- snapshots (kvjax.snapshots) -----------------------------------------------------------------------
    def memory(self) -> Memory:
        """What the host knows; with `state`, which is donated to the next segment, all of the job."""
        entries = tuple(self._entries())
        return Memory(
            seed=self.seed,
            plan=self.plan,
            order=self._order,
            seconds=self._clock() - self._began,
            entries=entries,
            live=frozenset(self.live),
            ended=tuple(map(_ended, self._cancelled)),
            stops=tuple(self._bank.sets),
            before=dict(self._before),
            total=self.statistics(),
        )

    def remember(self, memory: Memory, state: EngineState | None = None) -> None:
        """Makes a new job the one that was, with the state of its engine; without it, as after `withdraw`.

        With a state, the memory's plan is this job's. The table of stop strings is made here.
        """
        self.seed, self._order = memory.seed, memory.order
        self._began = self._clock() - memory.seconds
        self._cancelled = [_held(entry, reason) for entry, reason in memory.ended]
        self.waiting = collections.deque(e for e in memory.entries if state is None or e.order not in memory.live)
        self._before |= memory.total if state is None else memory.before
        if state is None:
            return
        assert self.plan is not None and self.plan == memory.plan
        self.live = {entry.order: entry for entry in memory.entries if entry.order in memory.live}
        for stop in memory.stops:
            self._bank.add(stop)
        shapes = self.plan
        self.program = plans.program_of(
            self.model, shapes.cache, logprobs=shapes.logprobs, backend=shapes.backend, share=shapes.share
        )
        self.state = state.replace(automata=sharding.put(self._bank.table(), state.automata.sharding))
        self._table = self._bank.shape, len(self._bank)
        self._look()
        held = self._seen["order"].tolist()
        self._at = {order: e for e, row in enumerate(held) for order in row if order in self.live}

    def _rows(self, entries: Sequence[Entry]) -> Rows:
        assert self.plan is not None
        requests = [entry.request for entry in entries]
        sampler = sampling.pack(
            [request.params for request in requests],
            eos=self.model.eos,
            seed=self.seed,
            requests=[request.index for request in requests],
            samples=[request.sample for request in requests],
            shape=(self.plan.biases, self.plan.stops),
        )
        items = [
            Item(
                order=entry.order,
                tokens=entry.tokens,
                prompt=len(entry.request.prompt),
                limit=entry.request.length,
                automaton=self._bank.add(entry.request.params.stop),
                stop_state=entry.stop_state,
                root=prefix.namespace(entry.request.salt, positions=self.model.positions),
                pins=entry.request.pins,
                hit=entry.hit,
                preempted=entry.preempted,
                logprobs=entry.logprobs,
                evict_at=entry.request.params.evict_at,
            )
            for entry in entries
        ]
        cache = self.plan.cache
        return table.pack(items, sampler, cache.slots, cache.capacity, self.plan.logprobs)

    def statistics(self) -> dict[str, int]:
        """The counters of a `Report`."""
        if self.state is None:
            return dict(self._before)
        assert self.plan is not None
        counts = {name: self._before[name] + int(self._seen[name].sum()) for name in _STATISTICS}
        pages, sizes = self._seen["peak"], plans.page_bytes(self.plan.cache)  # (E, G), (G,)
        # The LEDGER's pages have no bytes: they count tokens, and hold nothing.
        peaks = int((pages @ (sizes > 0)).max()), int((pages @ sizes).max())
        return counts | {name: max(self._before[name], peak) for name, peak in zip(_PEAKS, peaks, strict=True)}


_STATISTICS = ("computed", "hit", "preempted", "evicted")  # summed up over engines
_PEAKS = ("peak_pages", "peak_bytes")
_STALE = ((0, 0, 0), 0)  # of a table that the device has to be given again


class _Bank(AutomatonBank):
    """An AutomatonBank that can be full.

    Attributes:
      sets: of stop strings, in the order of their ids.
    """

    def __init__(self, token_bytes: Sequence[bytes], least: tuple[int, int, int] = (1, 1, 1)):
        """`least`: the shape of the table before, which this one keeps, and with it the program, if it can."""
        super().__init__(token_bytes)
        self.sets: list[frozenset[str]] = [frozenset()]
        self._least = least

    @property
    def shape(self) -> tuple[int, int, int]:
        own, (automata, states, _) = super().shape, self._least
        padded = max(own[0], automata), max(own[1], states), own[2]
        width = 1 if padded[1] <= 2**7 else 2 if padded[1] <= 2**15 else 4
        return padded if width * math.prod(padded) <= self.max_bytes else own

    def add(self, stop_set: Iterable[str]) -> int:
        stop = frozenset(stop_set)
        number = super().add(stop)
        if number == len(self.sets):
            self.sets.append(stop)
        return number

    def takes(self, stop_set: Iterable[str]) -> bool:
        """Adds a set if there is room for it; whether it is in the table."""
        try:
            self.add(stop_set)
        except RequestError:
            return False
        return True


class _Pace:
    """Chooses how many steps a segment has, from how long the last one took."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.begin_again()

    def begin_again(self) -> None:
        self.step, self.steps, self._warm = 0, 4, False

    def __enter__(self) -> None:
        self._began, self._before = time.monotonic(), self.step

    def __exit__(self, *_: object) -> None:
        done, elapsed = self.step - self._before, time.monotonic() - self._began
        if self._warm and done > 0:  # the first segment compiles
            self.steps = max(1, min(1024, round(self.seconds * done / elapsed)))
        self._warm = True


def run(
    model: Model,
    requests: Iterable[Request],
    options: Options,
    *,
    seed: int = 0,
    follow: bool = False,
) -> Iterator[Report]:
    """Generates all requests; yields a report after every segment.

    Args:
      model: the model.
      requests: in the order in which they start; any iterable, read as the job goes on.
      options: how.
      seed: the job's, for requests without one.
      follow: whether reports hold the tokens of running requests.

    Raises:
      RequestError: a request can never be served. Of the first `AHEAD` requests nothing has run then.
    """
    yield from drive(Job(model, options, seed=seed), requests, follow=follow)


def drive(job: Job, requests: Iterable[Request], *, follow: bool = False) -> Iterator[Report]:
    """Runs a job until it and the requests are at their end."""
    source = iter(requests)
    ahead: collections.deque[Request] = collections.deque()
    exhausted = False
    while True:
        while not exhausted and len(ahead) < (AHEAD if job.plan is None else job.room):
            request = next(source, None)
            if request is None:
                exhausted = True
            else:
                job.check(request)
                ahead.append(request)
        if job.plan is None and ahead:
            job.plan = plans.plan(job.model, list(ahead), job.options)
        for _ in range(min(job.room, len(ahead))):
            job.add(ahead.popleft())
        if not job.unfinished:
            return
        yield job.advance(follow=follow, more=bool(ahead) or not exhausted)


def _work(entry: Entry) -> int:
    """Tokens that a request may still have to be computed."""
    return entry.request.length


def _batched(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _output(rows: Rows, i: int, request: Request) -> Output:
    start, known = len(request.prompt), int(rows.known[i])
    return Output(
        request=request,
        tokens=tuple(rows.tokens[i, start:known].tolist()),
        finish_reason=_REASONS.get(int(rows.status[i])),
        logprobs=_logprobs(request, _of_output(rows, i, request)),
        cached_tokens=int(rows.hit[i]),
        preempted=int(rows.preempted[i]),
    )


def _of_output(rows: Rows, i: int, request: Request) -> tuple[np.ndarray, ...] | None:
    """The row's log-probabilities, as arrays."""
    if rows.logprobs is None:
        return None
    return tuple(np.asarray(array[i, len(request.prompt) : int(rows.known[i])]) for array in rows.logprobs)


def _logprobs(request: Request, arrays: tuple[np.ndarray, ...] | None) -> tuple[TokenLogprob, ...] | None:
    top = request.params.logprobs
    if top is None:
        return None
    if arrays is None:
        return ()
    return tuple(
        TokenLogprob(float(c), dict(zip(i[:top].tolist(), v[:top].tolist(), strict=True)))
        for c, i, v in zip(*arrays, strict=True)
    )


def _entry(rows: Rows, i: int, before: Entry) -> Entry:
    return dataclasses.replace(
        before,
        tokens=tuple(rows.tokens[i, : int(rows.known[i])].tolist()),
        stop_state=int(rows.stop_state[i]),
        hit=int(rows.hit[i]),
        preempted=int(rows.preempted[i]),
        logprobs=_of_output(rows, i, before.request),
    )


def _ended(output: Output) -> tuple[Entry, str]:
    """The inverse of `_held`; the order is gone."""
    request, logprobs = output.request, None
    if output.logprobs is not None:
        count, top = len(output.logprobs), request.params.logprobs or 0
        logprobs = (
            np.asarray([entry.chosen for entry in output.logprobs], np.float32),
            np.asarray([list(entry.top) for entry in output.logprobs], np.int32).reshape(count, top),
            np.asarray([list(entry.top.values()) for entry in output.logprobs], np.float32).reshape(count, top),
        )
    tokens = request.prompt + output.tokens
    entry = Entry(-1, request, tokens, hit=output.cached_tokens, preempted=output.preempted, logprobs=logprobs)
    return entry, output.finish_reason or ""


def _held(entry: Entry, reason: str = "cancelled") -> Output:
    """The output of a request that has ended, by default because it was cancelled before it reached the device."""
    request = entry.request
    return Output(
        request,
        entry.tokens[len(request.prompt) :],
        reason,
        _logprobs(request, entry.logprobs),
        entry.hit,
        entry.preempted,
    )
