"""The engine against a plain-Python model of every step, and prefix sharing case by case."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from reference_scheduler import INDEX, Page, Request, Scheduler

from kvjax import engine, plans, prefix, sampling
from kvjax import requests as table
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.requests import CANCELLED, EMPTY, LENGTH, RUNNING, STOPPED, TOO_LONG, Item
from kvjax.sampling_params import SamplingParams
from kvjax.state import EngineState, Policy, Program
from kvjax.stops import no_stops

SLOTS, ROWS, LONGEST, QUEUE, PACKED = 4, 4, 8, 16, 16
CAPACITY = ROWS * LONGEST
ORDINARY = 14
"""Pages: fewer than the 32 that four long requests want."""
TIGHT = 6
"""Pages: fewer than one long request wants."""


# --- the engine, one device program a step ----------------------------------------------------------------------
def deep_forward(params, config, ids, positions, cache, attend):
    """The toy with a second layer that sees the first: unlike its K and V, a page's tell of all tokens before it."""
    mixed = (ids * (positions + 1)) % 97
    hidden = jnp.stack([ids.astype(jnp.float32), mixed.astype(jnp.float32)], axis=1)
    for layer in range(config.layers):
        v = hidden[:, None, :]
        cache, out = attend(cache, layer, jnp.zeros_like(v), v, v, 1.0)
        hidden = jnp.mod(jnp.round(out[:, 0] * (positions + 1).astype(jnp.float32)[:, None]), jnp.float32(97))
    return cache, hidden


def deep_continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the deep toy of two layers generates."""
    tokens = list(prompt)
    for _ in range(count):
        rows = [(token, token * (i + 1) % 97) for i, token in enumerate(tokens)]
        for _ in range(2):
            sums = zip(*(itertools.accumulate(column) for column in zip(*rows, strict=True)), strict=True)
            rows = [(a % 97, b % 97) for a, b in sums]
        tokens.append((rows[-1][0] * 7 + rows[-1][1] * 3) % (toy.VOCAB - 1))
    return tokens[len(prompt) :]


@functools.cache
def program_of(layers: int, pages: int, *, deep: bool = False) -> Program:
    model = toy.model(layers)
    if deep:
        model = dataclasses.replace(model, family=toy.Family("deep", forward=deep_forward))  # type: ignore[arg-type]
    config = CacheConfig(model.family.kv_specs(model.config, "float32"), SLOTS, ROWS, LONGEST, pages=pages)
    assert len(config.groups) == layers
    return plans.program_of(model, config)


class View(NamedTuple):
    """What is compared, as numpy arrays; those of the groups have a leading axis for the group."""

    tokens: Any
    known: Any
    status: Any
    order: Any
    hit: Any
    preempted: Any
    hashed: Any
    digests: Any
    slots: Any
    line: Any
    waiting: Any
    blocked: Any
    step: Any
    stats: Any
    refs: Any
    last_use: Any
    free: Any
    height: Any
    table: Any
    lengths: Any
    ways: Any
    place: Any
    digest: Any
    page_tokens: Any
    parent: Any
    depth: Any
    live: Any
    pinned: Any
    sisters: Any


def view_of(state: EngineState) -> View:
    requests, index, groups = state.requests, state.index, state.cache.groups
    assert index is not None
    count = requests.status.shape[0]
    return View(
        tokens=requests.tokens.reshape(count, -1),
        known=requests.known,
        status=requests.status,
        order=requests.order,
        hit=requests.hit,
        preempted=requests.preempted,
        hashed=requests.hashed,
        digests=jax.lax.bitcast_convert_type(requests.digests, jnp.int32),
        slots=state.slots.request,
        line=state.line.at(jnp.arange(count, dtype=jnp.int32)),
        waiting=state.line.count,
        blocked=state.blocked,
        step=state.step,
        stats=jnp.stack(jax.tree.leaves(state.stats.replace(peak=state.stats.peak[0]))),
        refs=jnp.stack([g.pool.refs for g in groups]),
        last_use=jnp.stack([g.pool.last_use for g in groups]),
        free=jnp.stack([g.pool.free for g in groups]),
        height=jnp.stack([g.pool.height for g in groups]),
        table=jnp.stack([g.table.pages for g in groups]),
        lengths=jnp.stack([g.table.lengths for g in groups]),
        ways=index.ways,
        place=index.place,
        digest=jax.lax.bitcast_convert_type(index.digest, jnp.int32),
        page_tokens=index.tokens,
        parent=index.parent,
        depth=index.depth,
        live=index.live,
        pinned=index.pinned,
        sisters=index.sisters,
    )


@jax.jit
def packed_view(state: EngineState) -> jax.Array:
    """The view as one vector: one transfer a step."""
    return jnp.concatenate([x.astype(jnp.int32).ravel() for x in view_of(state)])


def unpacked(vector: np.ndarray, shapes: View) -> View:
    ends = np.cumsum([int(np.prod(x.shape)) for x in shapes])
    parts = np.split(vector, ends[:-1])
    return View(*(part.reshape(x.shape) for part, x in zip(parts, shapes, strict=True)))


def poisoned(state: EngineState) -> EngineState:
    """NaN in every row of K and V that nobody owns."""

    def spoil(group):
        free = group.pool.refs == 0
        kv = jax.tree.map(lambda x: jnp.where(free[:, None, None, None], jnp.float32(jnp.nan), x), group.kv)
        return group.replace(kv=kv)

    return state.replace(cache=state.cache.replace(groups=tuple(spoil(group) for group in state.cache.groups)))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def advance(program: Program, state: EngineState, policy: Policy) -> tuple[EngineState, jax.Array]:
    state = engine.run(program, {}, poisoned(state), policy, packed=PACKED)
    return state, packed_view(state)


@jax.jit
def duplicate(state: EngineState) -> EngineState:
    return jax.tree.map(jnp.copy, state)


def new_state(program: Program) -> EngineState:
    """An empty engine, whose groups take their pages from opposite ends: else all would use the same numbers."""
    state = engine_state.init(program, jnp.asarray(no_stops(toy.VOCAB)), rows=QUEUE)
    first, *others = state.cache.groups
    groups = [g.replace(pool=g.pool.replace(free=jnp.flip(g.pool.free))) for g in others]
    return state.replace(cache=state.cache.replace(groups=(first, *groups)))


def rows_of(requests: Sequence[Request]) -> table.Rows:
    """As the host would send them."""
    params = [
        SamplingParams(max_new_tokens=CAPACITY, stop_token_ids=() if r.stop is None else (r.stop,)) for r in requests
    ]
    sampler = sampling.pack(params, eos=(), seed=0, requests=[r.order for r in requests], shape=(1, 1))
    items = [Item(r.order, r.tokens, r.prompt, r.limit, root=prefix.namespace(r.salt), pins=r.pins) for r in requests]
    return table.pack(items, sampler, SLOTS, CAPACITY)


class Pair:
    """The engine and the model of it, side by side.

    Attributes:
      model: in Python.
      state: on the device.
      steps: that both have run.
      digests: of (salt, tokens), as the device computes them.
      indexed: pages of the model that were in the index at the last look.
    """

    def __init__(self, layers: int = 1, pages: int = ORDINARY):
        self.layers, self.program = layers, program_of(layers, pages)
        self.state = new_state(self.program)
        self.shapes = jax.eval_shape(view_of, self.state)
        self.model = Scheduler(SLOTS, ROWS, pages, PACKED, lambda tokens: toy.continuation(tokens, 1, layers)[0])
        self.steps = self.orders = 0
        self.digests: dict[tuple, tuple] = {}
        self.indexed: set[Page] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        assert len(requests) <= SLOTS and len(self.model.requests) + len(requests) <= QUEUE
        for request in requests:
            request.order = self.orders
            self.orders += 1
        self.state = engine.submit(self.state, rows_of(requests))
        self.model.submit(requests)

    def run(self, clock: int = 0, ttl: int = prefix.FOREVER, refill: int = 1) -> np.ndarray:
        """One step of both; what the device's state is then, as a vector."""
        policy = engine_state.policy(1, clock=clock, ttl=ttl, refill=refill)
        self.state, packed = advance(self.program, self.state, policy)
        vector = np.asarray(packed)
        if self.model.unfinished:
            self.model.step(clock, ttl, refill)
            self.steps += 1
        self.check(unpacked(vector, self.shapes))
        return vector

    def run_segment(self, steps: int, clock: int, ttl: int, refill: int) -> None:
        """Several steps in one device program are the same as one by one."""
        policy = engine_state.policy(steps, clock=clock, ttl=ttl, refill=refill)
        _, packed = advance(self.program, duplicate(self.state), policy)
        for _ in range(steps):
            vector = self.run(clock, ttl, refill)
        np.testing.assert_array_equal(np.asarray(packed), vector)

    def cancel(self, orders: Sequence[int], clock: int, ttl: int) -> None:
        named = np.asarray([*orders, *[-1] * (SLOTS - len(orders))], np.int32)
        self.state = engine.cancel(self.program, self.state, engine_state.policy(0, clock=clock, ttl=ttl), named)
        self.model.cancel(orders, clock, ttl)
        self.check(unpacked(np.asarray(packed_view(self.state)), self.shapes))

    def collect(self) -> list[Request]:
        """Takes up to `SLOTS` requests that have ended out of both."""
        ended = sum(request.status > RUNNING for request in self.model.requests.values())
        self.state, rows = engine.collect(self.state, most=SLOTS)
        rows = jax.device_get(rows)
        found = []
        for row, order in enumerate(rows.order.tolist()):
            if order >= 0:
                request = self.model.collect(order)
                assert rows.tokens[row, : rows.known[row]].tolist() == request.tokens
                made = request.tokens[request.prompt :]
                assert made == toy.continuation(request.tokens[: request.prompt], len(made), self.layers)
                assert rows.status[row] == request.status
                if request.status == TOO_LONG:  # and not for want of another one's pages
                    assert self.model.least(request) > self.model.pages
                found.append(request)
        assert len(found) == min(ended, SLOTS)
        return found

    def finish(self, clock: int = 0, ttl: int = prefix.FOREVER, refill: int = 1) -> list[Request]:
        """Runs to the end, and takes everything out."""
        limit = self.steps + 60 * len(self.model.requests) + 10
        while self.model.unfinished:
            assert self.steps < limit, "hangs"
            self.run(clock, ttl, refill)
        ended = []
        while self.model.requests:
            ended += self.collect()
        assert all(page.owners == {INDEX} for page in self.model.index)
        assert self.model.free + len(self.model.index) == self.model.pages
        return ended

    # --- comparison -------------------------------------------------------------------------------------------
    def check(self, view: View) -> None:
        self.check_requests(view)
        self.check_pages(view)
        self.check_index(view)

    def check_requests(self, view: View) -> None:
        model = self.model
        rows = {int(view.order[row]): row for row in np.flatnonzero(view.status != EMPTY)}
        assert rows.keys() == model.requests.keys()
        for order, row in rows.items():
            request = model.requests[order]
            assert view.tokens[row, : view.known[row]].tolist() == request.tokens, order
            assert toy.VOCAB - 1 not in request.tokens  # says NaN
            found = [view.status[row], view.hit[row], view.preempted[row], view.hashed[row]]
            assert found == [request.status, request.hit, request.preempted, request.hashed], order
            for page in range(request.hashed):
                text = request.salt, tuple(request.tokens[: (page + 1) * ROWS])
                digest = tuple(view.digests[row, page].tolist())
                assert self.digests.setdefault(text, digest) == digest
        line = [int(view.order[row]) for row in view.line[: view.waiting]]
        assert line == [request.order for request in model.line]
        assert bool(view.blocked) == model.blocked
        assert int(view.step) == model.steps
        assert view.stats.tolist() == [
            *(model.computed, model.hit, model.preempted, model.evicted, model.copied, model.peak)
        ]
        running = [int(view.order[row]) if row < QUEUE else None for row in view.slots]
        assert running == [slot and slot.request.order for slot in model.slots]

    def check_pages(self, view: View) -> None:
        """Free pages, owners and tables; tells the model's pages where they lie."""
        model, count = self.model, self.model.pages
        lengths = [slot.cached if slot else 0 for slot in model.slots]
        # A page that has been in the index stays where it is; of equal new ones the model does not know which is kept.
        numbers = {page.number: page for page in model.index if page in self.indexed and page.number is not None}
        named = {page: number for number, page in numbers.items()}
        for slot in model.running:
            assert len(slot.pages) == model.pages_for(slot.cached)
            for column, page in enumerate(slot.pages):
                number = int(view.table[0, slot.number, column])
                assert numbers.setdefault(number, page) is page
                assert named.setdefault(page, number) == number
        by_digest = {
            tuple(view.digest[n]): n for n in np.flatnonzero(view.place < view.ways.size).tolist() if n not in numbers
        }
        for page in model.index:
            if page not in named:  # entered by a request that ended in the same step
                named[page] = by_digest[self.digests[page.salt, page.prefix]]
        for page, number in named.items():
            page.number = number
        self.indexed = set(model.index)
        for group in range(self.layers):
            assert view.lengths[group].tolist() == lengths
            height = int(view.height[group])
            assert height == model.free
            assert sorted(view.free[group, :height].tolist()) == np.flatnonzero(view.refs[group] == 0).tolist()
            owners = [0] * count
            for slot in model.running:
                for column in range(len(slot.pages)):
                    owners[int(view.table[group, slot.number, column])] += 1
            for page in model.index:
                assert page.number is not None
                owners[page.number if group == 0 else int(view.sisters[page.number, group - 1])] += 1
            assert view.refs[group].tolist() == owners
        for slot in model.running:
            # A page that is not full yet is written: by the one slot that goes on, or after a copy.
            for column, page in enumerate(slot.pages):
                number = int(view.table[0, slot.number, column])
                assert view.refs[0, number] == len(page.owners)
                for group in range(1, self.layers):
                    sister = int(view.table[group, slot.number, column])
                    assert view.refs[group, sister] == len(page.owners)
                    if INDEX in page.owners:
                        assert view.sisters[number, group - 1] == sister

    def check_index(self, view: View) -> None:
        model, count = self.model, self.model.pages
        places = view.ways.size
        registered = np.flatnonzero(view.place < places).tolist()
        assert registered == sorted(page.number for page in model.index if page.number is not None)
        assert len(registered) == len(model.index)
        assert sorted(view.ways[view.ways < count].tolist()) == registered
        ways = view.ways.ravel()
        for page in model.index:
            number = page.number
            assert number is not None
            assert ways[view.place[number]] == number
            found = [view.depth[number], view.live[number], view.pinned[number], view.last_use[0, number]]
            assert found == [page.depth, page.live, page.pinned, page.last_use], page.prefix
            assert view.page_tokens[number].tolist() == list(page.tokens)
            assert view.parent[number] == (count if page.parent is None else page.parent.number)
            assert tuple(view.digest[number].tolist()) == self.digests[page.salt, page.prefix]
            if page.parent is not None and page.owners == {INDEX}:
                # Whatever is done to a page is done to those before it: the order of eviction relies on that.
                parent = page.parent
                assert parent in model.index
                assert page.last_use <= parent.last_use
                assert page.live <= parent.live
                assert page.pinned <= parent.pinned


# --- random workloads -------------------------------------------------------------------------------------------
def random_request(rng: random.Random, earlier: Sequence[Request], layers: int = 1) -> Request:
    """Most begin alike: with one of three texts, cut at random or at a page's end, or exactly as one before."""
    texts = [[(7 * i + 3 * text) % 49 for i in range(CAPACITY)] for text in range(3)]
    if earlier and rng.random() < 0.3:
        before = rng.choice(earlier)
        prompt = before.tokens[: before.prompt]
        if rng.random() < 0.2:
            prompt = [*prompt[:-1], rng.randrange(49)]
        elif rng.random() < 0.2:
            prompt = before.tokens[: rng.randint(1, before.known)]  # with some of its output
    elif rng.random() < 0.15:
        prompt = [rng.randrange(49) for _ in range(rng.randint(16, CAPACITY - 1))]
    else:
        common = rng.choice([0, 4, 8, 12, 16, 20, rng.randint(0, 24)])
        own = [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 2, rng.randint(0, 8)]))]
        prompt = [*rng.choice(texts)[:common], *own] or [rng.randrange(49)]
    prompt = prompt[: CAPACITY - 1]
    room = CAPACITY - len(prompt)
    limit = len(prompt) + min(room, rng.choice([1, 1, 2, 3, 5, 8, room, rng.randint(1, room)]))
    again = rng.randint(0, limit - len(prompt) - 1) if rng.random() < 0.1 else 0
    pins = rng.choice([(0, 0)] * 4 + [(len(prompt), 0), (8, 4), (0, 8)])
    return Request(
        order=-1,
        tokens=[*prompt, *toy.continuation(prompt, again, layers)],
        prompt=len(prompt),
        limit=limit,
        salt=rng.choice(["", "", "", "a"]),
        pins=(min(pins[0], len(prompt)), min(pins[1], len(prompt))),
        stop=rng.choice([None, None, rng.randrange(49)]),
    )


TIMES = (0, 0, 1, 5, 19, 20, 21, 100, 299, 301, 3600)
"""Seconds that pass between two segments: enough to end a time to live of 20 s, and pins of 300 s and 3600 s."""


class SchedulerMachine(RuleBasedStateMachine):
    """Anything that a host may do; the engine and the model must agree after every step."""

    layers, pages = 1, ORDINARY
    steps: ClassVar[collections.Counter] = collections.Counter()

    @initialize(ttl=st.sampled_from([20, 20, prefix.FOREVER]))
    def start(self, ttl: int):
        self.pair = Pair(self.layers, self.pages)
        self.ttl, self.clock = ttl, 0

    @precondition(lambda self: len(self.pair.model.requests) < QUEUE)
    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, SLOTS))
    def submit(self, rng: random.Random, count: int):
        count = min(count, QUEUE - len(self.pair.model.requests))
        earlier = list(self.pair.model.requests.values())
        self.pair.submit([random_request(rng, earlier, self.layers) for _ in range(count)])

    @rule(steps=st.integers(1, 6), refill=st.sampled_from([1, 1, 2, 3]), seconds=st.sampled_from(TIMES))
    def run(self, steps: int, refill: int, seconds: int):
        self.pass_time(seconds)
        for _ in range(steps):
            self.pair.run(self.clock, self.ttl, refill)

    @rule(steps=st.integers(2, 9), refill=st.sampled_from([1, 2]), seconds=st.sampled_from(TIMES))
    def run_segment(self, steps: int, refill: int, seconds: int):
        self.pass_time(seconds)
        self.pair.run_segment(steps, self.clock, self.ttl, refill)

    @precondition(lambda self: self.pair.model.requests)
    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, 2))
    def cancel(self, rng: random.Random, count: int):
        orders = list(self.pair.model.requests)
        self.pair.cancel(rng.sample(orders, min(count, len(orders))), self.clock, self.ttl)

    @rule()
    def collect(self):
        self.pair.collect()

    def pass_time(self, seconds: int) -> None:
        self.clock += seconds

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.finish(self.clock, self.ttl)
            SchedulerMachine.steps[type(self).__name__] += self.pair.steps


def machine(layers: int, pages: int) -> type[SchedulerMachine]:
    return type(f"Scheduler_{layers}_{pages}", (SchedulerMachine,), {"layers": layers, "pages": pages})


def explore(machine: type[SchedulerMachine], examples: int, rules: int) -> None:
    profile = settings(
        max_examples=examples,
        stateful_step_count=rules,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)


@pytest.mark.parametrize(("layers", "pages"), [(1, ORDINARY), (2, TIGHT)])
def test_engine_equals_model(layers, pages):
    explore(machine(layers, pages), examples=8, rules=25)


@pytest.mark.slow
def test_engine_equals_model_over_many_steps():
    """Long lives of one state, and many short ones."""
    SchedulerMachine.steps.clear()
    happened: collections.Counter = collections.Counter()
    lived = sum(
        live_long(layers, pages, seed, happened)
        for layers, pages in ((1, ORDINARY), (1, TIGHT), (2, ORDINARY))
        for seed in range(3)
    )
    explore(machine(1, ORDINARY), examples=40, rules=40)
    explore(machine(2, TIGHT), examples=40, rules=40)
    assert lived + SchedulerMachine.steps.total() >= 10_000
    # All of these must have been met, or the test tests nothing.
    rare = {name: happened[name] for name in HAPPENINGS if happened[name] < 5}
    assert not rare


HAPPENINGS = (
    "stopped", "length", "too long", "cancelled", "hit", "preempted", "preempted in the prompt", "evicted", "copied",
    "expired", "unpinned", "resumed",
)  # fmt: skip


def live_long(layers: int, pages: int, seed: int, happened: collections.Counter) -> int:
    """Drives one pair for 2,000 steps and more; how many. Counts what happened."""
    rng, pair, clock = random.Random(seed), Pair(layers, pages), 0
    ttl = (20, 20, prefix.FOREVER)[seed % 3]
    ended: list[Request] = []
    while pair.steps < 2000:
        room = QUEUE - len(pair.model.requests)
        if room and rng.random() < 0.4:
            earlier = list(pair.model.requests.values())
            pair.submit([random_request(rng, earlier, layers) for _ in range(rng.randint(1, min(room, SLOTS)))])
        if not pair.model.running or rng.random() < 0.4:
            clock += rng.choice(TIMES)
        if not pair.model.unfinished and room > 1 and rng.random() < 0.3:  # together more than the cache holds
            pair.submit([ask([rng.randrange(49) for _ in range(length)], CAPACITY - length) for length in (23, 30)])
        for _ in range(rng.randint(1, 6)):
            in_prompt = {slot.request.order for slot in pair.model.running if slot.pending > 1}
            pair.run(clock, ttl, rng.choice([1, 1, 2, 3]))
            happened["preempted in the prompt"] += sum(request.order in in_prompt for request in pair.model.line)
        if pair.model.requests and rng.random() < 0.1:
            pair.cancel([rng.choice(list(pair.model.requests))], clock, ttl)
        ended += pair.collect()
    ended += pair.finish(clock, ttl)
    names = {STOPPED: "stopped", LENGTH: "length", TOO_LONG: "too long", CANCELLED: "cancelled"}
    happened.update(names[request.status] for request in ended)
    happened["resumed"] += sum(request.resumed for request in ended)
    model = pair.model
    for name in ("hit", "preempted", "evicted", "copied", "expired", "unpinned"):
        happened[name] += getattr(model, name)
    return pair.steps


# --- sharing, case by case ----------------------------------------------------------------------------------------
def ask(prompt: Sequence[int], new: int = 1, **more: Any) -> Request:
    """A request for so many new tokens."""
    return Request(-1, list(prompt), len(prompt), len(prompt) + new, **more)


def text(seed: int, length: int) -> list[int]:
    """Tokens that no other text begins with."""
    return [seed, *((seed * 5 + 11 * i) % 49 for i in range(1, length))]


def served(pair: Pair, *requests: Request, clock: int = 0, ttl: int = prefix.FOREVER) -> list[Request]:
    """The requests as they ended, after they ran alone, in the order given."""
    while requests:
        now, requests = requests[:SLOTS], requests[SLOTS:]
        pair.submit(now)
    return sorted(pair.finish(clock, ttl), key=lambda request: request.order)


def hit(pair: Pair, prompt: Sequence[int], clock: int = 0, ttl: int = prefix.FOREVER, **more: Any) -> int:
    """Tokens of the prompt that need not be computed."""
    (request,) = served(pair, ask(prompt, **more), clock=clock, ttl=ttl)
    return request.hit


def prefixes(pair: Pair) -> set[tuple[int, ...]]:
    """Of the pages in the index, which `Pair.check` has compared with the device's."""
    return {page.prefix for page in pair.model.index}


def test_a_hit_within_its_time_renews_a_prefix_and_later_misses():
    prompt = text(1, 9)
    pair = Pair()
    assert hit(pair, prompt, clock=0, ttl=20) == 0
    assert hit(pair, prompt, clock=19, ttl=20) == 8
    assert hit(pair, prompt, clock=38, ttl=20) == 8  # renewed at 19
    assert hit(pair, prompt, clock=59, ttl=20) == 0  # 21 after the last hit
    assert hit(pair, prompt, clock=78, ttl=20) == 8  # it was computed again
    assert hit(pair, prompt, clock=98, ttl=20) == 0  # at 20 its time is over


def test_a_prefix_in_use_lives():
    prompt = text(1, 9)
    pair = Pair()
    pair.submit([ask(prompt, 15)])
    pair.run(0, 20)
    pair.submit([ask(prompt)])
    pair.run(1000, 20)
    assert pair.model.requests[1].hit == 8


def pressure(pair: Pair, clock: int, first: int, waves: int = 3) -> None:
    """Two requests of five pages at a time."""
    for wave in range(waves):
        served(pair, ask(text(first + 2 * wave, 20)), ask(text(first + 2 * wave + 1, 20)), clock=clock)


@pytest.mark.parametrize(
    ("pins", "seconds"), [((9, 0), 300), ((0, 9), 3600), ((9, 9), 3600)], ids=["5 minutes", "1 hour", "both"]
)
def test_a_pin_holds_under_pressure_for_its_time(pins, seconds):
    prompt = text(1, 9)
    for late, found in ((seconds - 1, 8), (seconds + 1, 0)):
        pair = Pair()
        assert hit(pair, prompt, pins=pins) == 0
        pressure(pair, late, first=10)
        assert pair.model.evicted > 0
        assert hit(pair, prompt, clock=late) == found
    pair = Pair()
    assert hit(pair, prompt) == 0
    pressure(pair, 0, first=10)
    assert hit(pair, prompt) == 0  # without a pin


def test_a_hit_renews_a_pin():
    prompt = text(1, 9)
    pair = Pair()
    hit(pair, prompt, pins=(9, 0))
    assert hit(pair, prompt, clock=200, pins=(9, 0)) == 8
    pressure(pair, 499, first=10)
    assert hit(pair, prompt, clock=499) == 8
    pressure(pair, 501, first=20)
    assert hit(pair, prompt, clock=501) == 0


def test_a_pin_gives_way_to_a_request_that_runs_alone():
    pair = Pair(layers=2, pages=TIGHT)
    hit(pair, text(1, 9), pins=(9, 9))
    (request,) = served(pair, ask(text(2, 20)))
    assert request.status == LENGTH
    assert (*text(1, 9)[:4],) in prefixes(pair) and (*text(1, 9)[:8],) not in prefixes(pair)  # five pages were wanted


def test_the_least_recently_used_goes_first_and_leaves_before_parents():
    pair = Pair()
    a, b, c = text(1, 8), text(2, 8), text(3, 8)
    for prompt in (a, b, c):
        hit(pair, prompt)
    assert hit(pair, a) == 7
    served(pair, ask(text(4, 28)))  # 7 pages, and 1 of 14 is free
    order: list[tuple[int, ...]] = []
    for number in range(7):
        before = prefixes(pair)
        served(pair, ask(text(10 + number, 4)))
        order += before - prefixes(pair)
    assert order == [tuple(x) for x in (b, b[:4], c, c[:4], a, a[:4])]


def test_different_salts_never_share():
    prompt = text(1, 9)
    pair = Pair()
    assert [hit(pair, prompt, salt=salt) for salt in ("", "a", "b", "a", "", "b")] == [0, 0, 0, 8, 8, 8]
    pair = Pair()  # at once
    ended = served(pair, *(ask(prompt, 3, salt=salt) for salt in ("", "a", "b", "ab")))
    assert [request.hit for request in ended] == [0] * 4 and pair.model.copied == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_a_burst_computes_its_common_prefix_once(layers):
    common = text(1, 24)
    pair = Pair(layers, ORDINARY if layers == 1 else TIGHT)
    if layers == 2:
        common = common[:16]
    ended = served(pair, *(ask([*common, i]) for i in range(16)))
    assert int(pair.state.stats.computed) == len(common) + 16
    assert int(pair.state.stats.hit) == 15 * len(common)
    assert sorted(request.hit for request in ended) == [0] + [len(common)] * 15
    assert pair.model.preempted == 0


@pytest.mark.parametrize(("length", "count"), [(10, 2), (10, 4), (10, 8), (9, 4), (11, 4), (3, 4), (12, 4), (1, 4)])
def test_equal_prompts_copy_at_most_a_page_each(length, count):
    prompt = text(1, length)
    pair = Pair()
    ended = served(pair, *(ask(prompt, 2) for _ in range(count)))
    assert int(pair.state.stats.copied) <= count - 1
    assert [request.tokens for request in ended] == [[*prompt, *toy.continuation(prompt, 2)]] * count
    # The prompt once, its last token for each, and each one's first new token.
    alone = 0 if length <= 1 else length - 1
    assert int(pair.state.stats.computed) == alone + 2 * count


def test_a_full_hit_computes_one_token():
    for length in (8, 12, 28):
        prompt = text(1, length)
        pair = Pair()
        hit(pair, prompt)
        assert int(pair.state.stats.computed) == length
        assert hit(pair, prompt) == length - 1
        assert int(pair.state.stats.computed) == length + 1
        assert int(pair.state.stats.copied) == 1


def test_prompts_that_differ_in_the_last_token_share_the_rest():
    pair = Pair()
    prompts = [[*text(1, 10), last] for last in range(3)]
    ended = served(pair, *(ask(prompt, 3) for prompt in prompts))
    for request, prompt in zip(ended, prompts, strict=True):
        assert request.tokens == [*prompt, *toy.continuation(prompt, 3)]
    assert int(pair.state.stats.computed) == 10 + 3 + 3 * 2


# --- digests that collide -----------------------------------------------------------------------------------------
COLLIDING = 13
"""Pages of a program of its own: it must not be compiled anywhere else with true digests."""


@pytest.fixture
def colliding(monkeypatch):
    """All tokens have one digest: that of a page tells its depth alone."""

    def one_for_all(tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.array([1, 20, 300, 4000], jnp.uint32), (*tokens.shape, 4))

    monkeypatch.setattr(prefix, "token_digests", one_for_all)


class Alone:
    """The engine without the model of it, on the deep toy, where a page after the wrong one changes the output."""

    def __init__(self, pages: int):
        self.program = program_of(2, pages, deep=True)
        self.state = new_state(self.program)
        self.computed: list[list[int]] = []

    @property
    def hit(self) -> int:
        return int(self.state.stats.hit)

    def serve(self, *requests: Request, clocks: Sequence[int] = (0,), ttl: int = prefix.FOREVER) -> None:
        """Runs to the end, a step at each time and all that are left at the last; checks tokens and hits."""
        for order, request in enumerate(requests):
            request.order = order
        self.state = engine.submit(self.state, rows_of(requests))
        for i, clock in enumerate(clocks):
            steps = 1 if i + 1 < len(clocks) else 500
            policy = engine_state.policy(steps, clock=clock, ttl=ttl)
            self.state, _ = advance(self.program, self.state, policy)
        self.state, collected = engine.collect(self.state, most=SLOTS)
        rows = jax.device_get(collected)
        found = {int(order): row for row, order in enumerate(rows.order) if order >= 0}
        assert len(found) == len(requests)
        for order, request in enumerate(requests):
            row = found[order]
            want = [*request.tokens, *deep_continuation(request.tokens, request.limit - request.known)]
            assert rows.tokens[row, : rows.known[row]].tolist() == want
            others = [*self.computed, *(r.tokens for r in requests if r is not request)]
            assert rows.hit[row] <= max((common(request.tokens, other) for other in others), default=0)
            self.computed.append(want)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_colliding_digests_share_nothing_wrongly(colliding):
    rng = random.Random(0)
    alone = Alone(COLLIDING)
    for _ in range(25):
        requests = [random_request(rng, []) for _ in range(SLOTS)]
        alone.serve(*(ask(r.tokens[: r.prompt], r.limit - r.prompt) for r in requests))
    assert alone.hit > 0  # equal prefixes share still
    # Equal lengths and depths everywhere, no two of them alike; then alike from the second page on.
    alone.serve(*(ask([i] * 10, 5) for i in range(SLOTS)))
    alone.serve(*(ask([*[i] * 4, *[9] * 6], 5) for i in range(SLOTS)))


def test_colliding_digests_share_nothing_wrongly_after_a_parent_went(colliding):
    """A page whose parent went first names, as its parent, whatever lies there next."""
    alone, ttl = Alone(COLLIDING), 20
    prompt = text(1, 4)
    second = deep_continuation(prompt, 4)
    alone.serve(ask(prompt, 6), clocks=[0, *[15] * 4, 26], ttl=ttl)  # pages filled at 0 and at 15
    for i in range(COLLIDING - 2):  # one page each: all that are free
        alone.serve(ask(text(20 + i, 4)), clocks=[26], ttl=ttl)
    other = text(31, 4)
    alone.serve(ask(other), clocks=[26], ttl=ttl)  # now the first page goes, whose time is over, and is used again
    alone.serve(ask([*other, *second, 0], 3), clocks=[26], ttl=ttl)


# --- edges --------------------------------------------------------------------------------------------------------
def test_a_prefix_lives_its_time_from_the_last_use_on():
    """The end of its owner is a use of all its pages (kvjax.prefix), whenever each of them was filled."""
    prompt = text(1, 4)
    pair = Pair()
    pair.submit([ask(prompt, 5)])
    for clock in (0, 15, 15, 15, 15):  # pages filled at 0 and at 15, all given back at 15
        pair.run(clock, 20)
    (ended,) = pair.finish(15, 20)
    assert ended.status == LENGTH
    assert hit(pair, [*ended.tokens[:8], 0], clock=30, ttl=20) == 8


def test_hits_are_tokens_that_another_request_computed():
    ended = served(Pair(), ask(text(1, 23), 5), ask(text(2, 31), 1))  # 15 pages of 14, and nothing in common
    assert [request.preempted for request in ended] == [0, 1]
    assert [request.hit for request in ended] == [0, 0]


def test_a_prompt_that_fills_the_cache_is_served():
    pair = Pair(2, TIGHT)
    ended = served(pair, ask(text(1, TIGHT * ROWS - 1), 2), ask(text(2, TIGHT * ROWS), 1))  # 25 tokens, 24 computed
    assert [request.status for request in ended] == [LENGTH, LENGTH]
