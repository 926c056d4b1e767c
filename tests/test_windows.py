"""Layers with a sliding window give back the pages behind it, and nothing else changes."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvjax import engine, plans, sampling
from kvjax import requests as table
from kvjax import state as engine_state
from kvjax.cache import LEDGER, NOWHERE, CacheConfig
from kvjax.errors import RequestError
from kvjax.plans import Options
from kvjax.requests import CANCELLED, LENGTH, Item
from kvjax.sampling_params import SamplingParams
from kvjax.state import EngineState, Policy, Program
from kvjax.stops import no_stops
from kvjax.types import KVSpec

SLOTS, ROWS, COLUMNS, QUEUE, PACKED = 3, 4, 10, 12, 16
CAPACITY = ROWS * COLUMNS
HYBRID, WINDOWS, SHORT = (None, 6), (6, 9), (3, None, 3)
"""Windows of the layers: pages of the first group are never given back, all are, and windows of less than a page."""


@functools.cache
def program_of(windows: tuple[int | None, ...], pages: int | None, spare: int, share: bool) -> Program:
    """`spare`: pages of a window's pool beyond what one request and a step's tokens take."""
    model = toy.model(windows=windows)
    config = CacheConfig(model.family.kv_specs(model.config, "float32"), SLOTS, ROWS, COLUMNS, pages=pages)
    least = [config.span(spec) + config.prompt_pages(PACKED) for spec in config.groups if config.frees(spec)]
    config = dataclasses.replace(config, window_pages=tuple(pages + spare for pages in least))
    return plans.program_of(model, config, share=share)


def poisoned(state: EngineState) -> EngineState:
    """NaN in every row of K and V that nobody owns."""

    def spoil(group):
        free = group.pool.refs == 0
        kv = jax.tree.map(lambda x: jnp.where(free[:, None, None, None], jnp.float32(jnp.nan), x), group.kv)
        return group.replace(kv=kv)

    return state.replace(cache=state.cache.replace(groups=tuple(spoil(group) for group in state.cache.groups)))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def advance(program: Program, state: EngineState, policy: Policy) -> EngineState:
    return engine.run(program, {}, poisoned(state), policy, packed=PACKED)


class Windowed:
    """The engine, step by step, and what every request was given."""

    def __init__(self, windows: tuple[int | None, ...], pages: int | None = None, spare: int = 4, share: bool = True):
        self.windows, self.program = windows, program_of(windows, pages, spare, share)
        self.config = self.program.cache
        self.state = engine_state.init(self.program, jnp.asarray(no_stops(toy.VOCAB)), rows=QUEUE)
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.orders = self.steps = self.hit = 0

    def submit(self, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> None:
        counts = [new] * len(prompts) if isinstance(new, int) else new
        params = [SamplingParams(max_new_tokens=CAPACITY)] * len(prompts)
        orders = range(self.orders, self.orders + len(prompts))
        sampler = sampling.pack(params, eos=(), seed=0, requests=list(orders), shape=(1, 1))
        items = []
        for order, prompt, count in zip(orders, prompts, counts, strict=True):
            self.asked[order] = list(prompt), count
            items.append(Item(order, list(prompt), len(prompt), len(prompt) + count))
        self.state = engine.submit(self.state, table.pack(items, sampler, SLOTS, CAPACITY))
        self.orders += len(prompts)

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.state = advance(self.program, self.state, engine_state.policy(1))
            self.steps += 1
            self.check()

    def collect(self) -> None:
        self.state, rows = engine.collect(self.state, most=SLOTS)
        rows = jax.device_get(rows)
        for row in np.flatnonzero(rows.order >= 0):
            prompt, count = self.asked.pop(int(rows.order[row]))
            found = rows.tokens[row, len(prompt) : rows.known[row]].tolist()
            assert rows.status[row] in (LENGTH, CANCELLED)
            assert rows.status[row] == CANCELLED or len(found) == count
            assert found == toy.continuation(prompt, len(found), windows=self.windows)
            self.hit += int(rows.hit[row])

    def finish(self) -> None:
        limit = self.steps + 80 * len(self.asked) + 10
        while self.asked:
            assert self.steps < limit, "hangs"
            self.run()
            self.collect()

    # --- what holds after every step ------------------------------------------------------------------------------
    def check(self) -> None:
        state: Any = jax.device_get(self.state)
        running = state.slots.request < QUEUE
        first = state.cache.groups[0]
        entries = np.zeros(0, int)
        if state.index is not None:
            entries = np.flatnonzero(state.index.place < state.index.ways.size)
        for g, (spec, group) in enumerate(zip(self.config.groups, state.cache.groups, strict=True)):
            pages, P = group.table.pages, self.config.pool_of(g)
            assert group.table.lengths.tolist() == first.table.lengths.tolist()
            owners = np.zeros(P, int)
            for slot in np.flatnonzero(running):
                length = int(group.table.lengths[slot])
                least, held = self.config.first_column(spec, length), -(-length // ROWS)
                assert held - least <= self.config.span(spec)
                if self.config.frees(spec):
                    assert (pages[slot, :least] == NOWHERE).all()
                    assert least == max(0, length - (spec.window or 0) + 1) // ROWS
                for column in range(least, held):
                    page = pages[slot, column]
                    owners[page] += 1
                    rows = range(column * ROWS, min(length, (column + 1) * ROWS))
                    self.check_rows(g, group, page, state.requests, state.slots.request[slot], rows)
            for entry in entries:
                page = entry if g == 0 else state.index.sisters[entry, g - 1]
                if page < P:
                    owners[page] += 1
                    self.check_entry(g, group, page, state.index, entry)
                else:
                    assert self.config.frees(spec)
            assert group.pool.refs.tolist() == owners.tolist()
            free = group.pool.free[: group.pool.height]
            assert sorted(free.tolist()) == np.flatnonzero(owners == 0).tolist()

    def check_rows(self, g: int, group, page: int, requests, request: int, positions: range) -> None:
        tokens = requests.tokens.reshape(QUEUE, CAPACITY)[request]
        for v in group.kv.v:
            assert v[page, 0, : len(positions)].tolist() == [[tokens[i], tokens[i] * (i + 1) % 97] for i in positions]

    def check_entry(self, g: int, group, page: int, index, entry: int) -> None:
        first = int(index.depth[entry]) * ROWS
        rows = [[token, token * (first + i + 1) % 97] for i, token in enumerate(index.tokens[entry].tolist())]
        for v in group.kv.v:
            assert v[page, 0].tolist() == rows


def text(seed: int, count: int) -> list[int]:
    return [(7 * i + 3 * seed + i * i) % 49 for i in range(count)]


# --- the static shape -------------------------------------------------------------------------------------------
def test_groups_that_keep_every_row_come_first():
    wide, narrow, never = (KVSpec(1, 2, 2, window=w) for w in (None, 6, CAPACITY))
    config = CacheConfig((narrow, wide, never, narrow), SLOTS, ROWS, COLUMNS)
    assert config.groups == (wide, never, narrow)
    assert [config.frees(spec) for spec in config.groups] == [False, False, True]
    assert config.places_of(0) == ((2, 0),) and config.places_of(3) == ((2, 1),) and config.layers_of(1) == (2,)
    assert CacheConfig((narrow,), SLOTS, ROWS, COLUMNS).groups == (LEDGER, narrow)
    assert CacheConfig((narrow,), SLOTS, ROWS, 1).groups == (narrow,)  # a slot cannot outgrow the window


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 17])
def test_a_column_is_behind_once_no_later_token_sees_it(window):
    spec = KVSpec(1, 2, 2, window=window)
    config = CacheConfig((spec,), 1, ROWS, 64)
    for length in range(120):
        seen = range(max(0, length - window + 1), length)  # by the token at position `length`, besides itself
        first = config.first_column(spec, length)
        assert first == min((row // ROWS for row in seen), default=length // ROWS)
        assert -(-length // ROWS) - first + 1 <= config.span(spec)


def test_pages_are_shared_out_in_the_proportion_in_which_requests_take_them():
    model = toy.model(windows=HYBRID)

    def sizes(kv_bytes: int) -> CacheConfig:
        return plans.cache_config(model, 4, 64 * 16, Options(rows=16, kv_bytes=kv_bytes), 32)

    page = 16 * 2 * 2 * 4  # bytes: rows, K and V, numbers of 4 bytes
    full = sizes(1 << 30)
    assert (full.pages, full.window_pages, full.span(full.groups[1])) == (None, (4 * 3 + 2,), 3)
    assert full.kv_bytes == (4 * 64 + 14) * page
    half = sizes(full.kv_bytes // 2)
    assert (half.pages, half.window_pages) == (128, (5 + 2,)) and half.kv_bytes == full.kv_bytes // 2
    assert sizes(6 * page).pool_of(0) == 1
    with pytest.raises(
        RequestError, match=r"^kv_bytes is 1535, and a page of 16 tokens needs 256 bytes of K and V, the"
    ):
        sizes(6 * page - 1)


def test_little_memory_gives_the_same_tokens():
    model, prompts = toy.model(windows=(5, None, 9)), [text(seed, 10 + seed) for seed in range(6)]
    found = engines.tokens(model, prompts, SamplingParams(max_new_tokens=30), rows=4, slots=4, packed=16, kv_bytes=2900)
    assert found == [toy.continuation(prompt, 30, windows=(5, None, 9)) for prompt in prompts]


# --- step by step -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("windows", [HYBRID, WINDOWS, SHORT])
def test_long_outputs_in_the_pages_of_their_windows(windows, share):
    """Each group holds what its window spans, whatever the length: pages for three windows serve three long outputs."""
    served = Windowed(windows, spare=2 * 5, share=share)
    served.submit([text(seed, 3 + 8 * seed) for seed in range(3)], 20)
    served.run(1)
    served.finish()
    assert int(served.state.stats.preempted) == 0
    assert served.steps < 30


def test_a_prefix_is_found_while_its_window_is_held():
    served = Windowed(WINDOWS, spare=12)
    prompt = text(0, 21)
    served.submit([prompt], 2)
    served.finish()
    served.submit([[*prompt[:17], 1]], 2)  # of the pages of 16 tokens only the last three are in the longer window
    served.finish()
    assert served.hit == 16


def test_a_prefix_whose_window_was_given_up_is_computed_again_and_found_again():
    served = Windowed(HYBRID, spare=0)
    prompt = text(0, 21)
    for seed in range(4):  # others take the window's few pages
        served.submit([prompt if seed == 0 else text(seed, 17)], 3)
        served.finish()
    assert served.state.index is not None
    sisters = jax.device_get(served.state.index.sisters)[:, 0]
    assert (sisters == NOWHERE).sum() >= 3
    before = served.hit
    served.submit([prompt], 1)
    served.finish()
    assert served.hit == before, "the window of no page of it is there"
    served.submit([prompt], 1)
    served.finish()
    assert served.hit == before + 20


def test_a_twin_whose_window_has_moved_on_gives_no_tail():
    """The first prompt's unfilled page is behind its window before the second one with the same tokens comes."""
    served = Windowed(SHORT, spare=8)
    prompt = text(0, 6)
    served.submit([prompt], 12)
    served.run(9)
    served.submit([prompt], 12)
    served.finish()
    assert served.hit in (0, 4)


class Machine(RuleBasedStateMachine):
    """Whatever a host may do: pages add up after every step, and outputs are right."""

    windows, pages, spare = HYBRID, None, 2

    @initialize()
    def start(self):
        self.served = Windowed(self.windows, self.pages, self.spare)

    @precondition(lambda self: len(self.served.asked) < QUEUE)
    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, SLOTS))
    def submit(self, rng: random.Random, count: int):
        count = min(count, QUEUE - len(self.served.asked))
        prompts, new = [], []
        for _ in range(count):
            prompt = text(rng.randrange(2), rng.choice([1, 4, 7, 8, 13, 16, 25, rng.randint(1, 30)]))
            prompt += [rng.randrange(49) for _ in range(rng.choice([0, 0, 1, 3]))]
            prompts.append(prompt)
            new.append(rng.choice([1, 2, 5, rng.randint(1, CAPACITY - len(prompt))]))
        self.served.submit(prompts, new)

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int):
        self.served.run(steps)

    @precondition(lambda self: self.served.asked)
    @rule(rng=st.randoms(use_true_random=False))
    def cancel(self, rng: random.Random):
        named = np.full(SLOTS, -1, np.int32)
        named[0] = rng.choice(list(self.served.asked))
        served = self.served
        served.state = engine.cancel(served.program, served.state, engine_state.policy(0), named)
        served.check()

    @rule()
    def collect(self):
        self.served.collect()

    def teardown(self):
        if hasattr(self, "engine"):
            self.served.finish()
            running = np.asarray(self.served.state.slots.request) < QUEUE
            assert not running.any()


@pytest.mark.parametrize(
    ("windows", "pages", "spare"),
    [
        (HYBRID, 14, 1),
        pytest.param(WINDOWS, None, 3, marks=pytest.mark.slow),
        pytest.param(SHORT, 24, 0, marks=pytest.mark.slow),
    ],
)
def test_pages_add_up_whatever_happens(windows, pages, spare):
    kind = type("Windows", (Machine,), {"windows": windows, "pages": pages, "spare": spare})
    profile = settings(
        max_examples=10, stateful_step_count=20, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(kind, settings=profile)
