"""The page allocator and block tables against a plain Python model."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvjax import cache, pages
from kvjax.cache import CacheConfig
from kvjax.types import KVSpec

P, W = 7, 5
allocate, share, release = jax.jit(pages.allocate), jax.jit(pages.share), jax.jit(pages.release)


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share and give back pages; the pool must agree with a Counter of owners."""

    @initialize()
    def start(self):
        self.pool = pages.init(P)
        self.owners = [0] * P
        self.step = 0

    @rule(want=st.lists(st.booleans(), min_size=W, max_size=W))
    def take(self, want):
        self.step += 1
        free = self.owners.count(0)
        self.pool, got = allocate(self.pool, jnp.asarray(want), jnp.int32(self.step))
        got = np.asarray(got).tolist()
        served = [page for page in got if page < P]
        # In order of asking, as many as there are; nobody else gets anything.
        asked = [i for i, wanted in enumerate(want) if wanted]
        assert [i for i, page in enumerate(got) if page < P] == asked[:free]
        assert len(set(served)) == len(served)
        for page in served:
            assert self.owners[page] == 0
            self.owners[page] = 1
            assert int(self.pool.last_use[page]) == self.step

    @rule(data=st.data())
    def add_owners(self, data):
        owned = [page for page in range(P) if self.owners[page]]
        named = data.draw(st.lists(st.sampled_from([*owned, P]), min_size=W, max_size=W))
        self.step += 1
        self.pool = share(self.pool, jnp.asarray(named, jnp.int32), jnp.int32(self.step))
        for page in named:
            if page < P:
                self.owners[page] += 1

    @rule(data=st.data())
    def give_back(self, data):
        tickets = [page for page in range(P) for _ in range(self.owners[page])] + [P] * W
        named = data.draw(st.permutations(tickets))[:W]
        self.pool = release(self.pool, jnp.asarray(named, jnp.int32), jnp.int32(0))
        for page in named:
            if page < P:
                self.owners[page] -= 1

    @invariant()
    def conserves_pages(self):
        height = int(self.pool.height)
        free = np.asarray(self.pool.free)[:height].tolist()
        assert sorted(free) == [page for page in range(P) if self.owners[page] == 0]
        assert np.asarray(self.pool.refs).tolist() == self.owners


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase

CONFIG = CacheConfig(
    specs=(KVSpec(1, 2, 2, storage="float32"), KVSpec(1, 2, 2, window=4, storage="float32")),
    slots=3, rows=2, pages_per_slot=4, pages=6,
)  # fmt: skip
MOST = 8


@jax.jit
def reserve(c, tokens, step):
    reserved = cache.reserve(CONFIG, c, None, tokens, step, step, jnp.bool_(False), MOST)
    return reserved.cache, reserved.starved


@jax.jit
def end(c, ended):
    zero = jnp.int32(0)
    return cache.release(CONFIG, c, None, ended, zero, zero, lambda slot, column: slot)[0]


class TableMachine(RuleBasedStateMachine):
    """Slots grow and end; every group's table must hold exactly the pages that a Python model says."""

    @initialize()
    def start(self):
        self.cache = cache.init(CONFIG)
        self.lengths = [0] * CONFIG.slots
        self.step = 0

    @rule(tokens=st.lists(st.integers(0, 4), min_size=CONFIG.slots, max_size=CONFIG.slots))
    def grow(self, tokens):
        tokens = [min(t, CONFIG.capacity - length) for t, length in zip(tokens, self.lengths, strict=True)]
        while sum(tokens) > MOST:
            tokens[tokens.index(max(tokens))] -= 1
        free = CONFIG.pool_pages - sum(-(-length // CONFIG.rows) for length in self.lengths)
        want_starved, needed = [], 0
        for t, length in zip(tokens, self.lengths, strict=True):
            need = -(-(length + t) // CONFIG.rows) - -(-length // CONFIG.rows)
            needed += need
            want_starved.append(need > 0 and needed > free)
        before = [np.asarray(g.table.pages).copy() for g in self.cache.groups]
        self.step += 1
        self.cache, starved = reserve(self.cache, jnp.asarray(tokens, jnp.int32), jnp.int32(self.step))
        assert np.asarray(starved).tolist() == want_starved
        for slot, (t, short) in enumerate(zip(tokens, want_starved, strict=True)):
            held = -(-self.lengths[slot] // CONFIG.rows)
            for old, group in zip(before, self.cache.groups, strict=True):  # what a slot holds never moves
                np.testing.assert_array_equal(np.asarray(group.table.pages)[slot, :held], old[slot, :held])
            self.lengths[slot] += 0 if short else t

    @rule(ended=st.lists(st.booleans(), min_size=CONFIG.slots, max_size=CONFIG.slots))
    def finish(self, ended):
        self.cache = end(self.cache, jnp.asarray(ended))
        self.lengths = [0 if gone else length for gone, length in zip(ended, self.lengths, strict=True)]

    @invariant()
    def owns_its_pages_alone(self):
        for group in self.cache.groups:
            assert np.asarray(group.table.lengths).tolist() == self.lengths
            held = [
                page
                for slot, length in enumerate(self.lengths)
                for page in np.asarray(group.table.pages)[slot, : -(-length // CONFIG.rows)].tolist()
            ]
            assert len(set(held)) == len(held)
            free = np.asarray(group.pool.free)[: int(group.pool.height)].tolist()
            assert sorted(held + free) == list(range(CONFIG.pool_pages))


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTables = TableMachine.TestCase


def test_groups_follow_the_specs():
    local, wide = KVSpec(2, 64, 64, window=128), KVSpec(2, 64, 64)
    config = CacheConfig((local, local, wide, local), slots=1, rows=16, pages_per_slot=1)
    assert config.groups == (local, wide)
    assert config.layers_of(0) == (0, 1, 3) and config.layers_of(1) == (2,)
    assert config.places_of(3) == ((0, 2),) and config.places_of(2) == ((1, 0),)
    assert config.page_bytes == 4 * 16 * (2 * 2 * 64 * 2)
