"""The prefix index against a dict, and its chain of hashes against a radix tree."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvjax import prefix
from kvjax.prefix import FOREVER, WAYS, Entry, PrefixIndex

P, R, W, G = 24, 2, 8, 2
"""Pages, rows, entries a call, groups."""

enter, find, remove, touch = jax.jit(prefix.enter), jax.jit(prefix.find), jax.jit(prefix.remove), jax.jit(prefix.touch)
oldest = jax.jit(functools.partial(prefix.oldest, width=W))
evictable = jax.jit(prefix.evictable)


@dataclasses.dataclass
class Known:
    """One entry, as a dict holds it."""

    digest: tuple[int, ...]
    tokens: tuple[int, ...]
    parent: int
    depth: int
    live: int
    pinned: int
    sister: int

    @property
    def key(self):
        return self.digest, self.tokens, self.parent


def entries_of(pages: list[int], known: list[Known]) -> Entry:
    """Padded to W rows; the padding repeats nothing that is wanted."""
    padding = [Known((0,) * 4, (0,) * R, P, 0, 0, 0, P)] * (W - len(known))
    rows = [*known, *padding]

    def column(name: str, dtype=np.int32):
        return jnp.asarray(np.asarray([getattr(k, name) for k in rows], dtype))

    return Entry(
        page=jnp.asarray([*pages, *[P] * len(padding)], jnp.int32),
        digest=column("digest", np.uint32),
        tokens=column("tokens"),
        parent=column("parent"),
        depth=column("depth"),
        sisters=column("sister")[:, None],
    )


def enter_all(index: PrefixIndex, pages: list[int], known: list[Known]) -> tuple[PrefixIndex, set[int], set[int]]:
    """Calls `enter` until every page has had its turn: the index, the pages in it, and those whose buckets are full."""
    new = entries_of(pages, known)
    waiting, entered, full = set(range(len(pages))), set(), set()
    calls = 0
    while waiting:
        wanted = jnp.asarray([i in waiting for i in range(W)])
        index, won, refused = enter(index, new, wanted)
        now, gone = set(np.flatnonzero(won).tolist()), set(np.flatnonzero(refused).tolist())
        assert now | gone <= waiting and not now & gone
        assert now | gone  # somebody's turn is over
        waiting -= now | gone
        entered |= now
        full |= gone
        calls += 1
    assert calls <= max(len(pages), 1)
    return index, {pages[i] for i in entered}, {pages[i] for i in full}


DIGESTS = [(i, 7 * i, 3, i * i) for i in range(3)]
"""Few, so that buckets meet newcomers and fill up."""

entry = st.builds(
    Known,
    digest=st.sampled_from(DIGESTS),
    tokens=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    parent=st.sampled_from([0, 1, 2, P]),
    depth=st.integers(0, 5),
    live=st.just(0),  # until it is touched
    pinned=st.just(0),
    sister=st.integers(0, P - 1),
)


class IndexMachine(RuleBasedStateMachine):
    """Pages enter, are touched, found and removed; a dict by page says what must be there."""

    @initialize()
    def start(self):
        self.index = prefix.init(P, R, G)
        self.known: dict[int, Known] = {}

    @rule(data=st.data(), new=st.lists(entry, min_size=1, max_size=W))
    def enter(self, data, new):
        free = [page for page in range(P) if page not in self.known]
        there = {known.key for known in self.known.values()}
        new = list({known.key: known for known in new if known.key not in there}.values())[: len(free)]
        pages = data.draw(st.permutations(free))[: len(new)]
        self.index, entered, full = enter_all(self.index, pages, new)
        for page, known in zip(pages, new, strict=True):
            if page in entered:
                self.known[page] = known
        for page in full:
            digest = new[pages.index(page)].digest
            assert sum(known.digest == digest for known in self.known.values()) >= WAYS or self.crowded(digest)

    def crowded(self, digest) -> bool:
        """Whether both buckets of a digest are full."""
        buckets = prefix._buckets(self.index, jnp.asarray([digest], jnp.uint32))[0]
        return bool((self.index.ways[buckets] < P).all())

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=W, unique=True))
        self.index = remove(self.index, jnp.asarray([*pages, *[P] * (W - len(pages))], jnp.int32))
        for page in pages:
            del self.known[page]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), live=st.sampled_from([3, 8, 20]), pinned=st.sampled_from([0, 8, 20]))
    def touch(self, data, live, pinned):
        pages = data.draw(st.lists(st.sampled_from([*sorted(self.known), P]), min_size=W, max_size=W))
        self.index = touch(
            self.index,
            jnp.asarray(pages, jnp.int32),
            jnp.full((W,), live, jnp.int32),
            jnp.full((W,), pinned, jnp.int32),
        )
        for page in set(pages) - {P}:
            known = self.known[page]
            known.live, known.pinned = max(known.live, live), max(known.pinned, pinned)

    @rule(queries=st.lists(entry, min_size=W, max_size=W), clock=st.sampled_from([0, 4, 5, 9, 10]), data=st.data())
    def look_up(self, queries, clock, data):
        queries = [data.draw(st.sampled_from([*self.known.values(), q])) for q in queries]
        refs = data.draw(st.lists(st.integers(1, 2), min_size=P, max_size=P))
        new = entries_of([0] * W, queries)
        found = find(
            self.index, jnp.asarray(refs, jnp.int32), jnp.int32(clock), new.digest, new.tokens, new.parent
        ).tolist()
        for query, page in zip(queries, found, strict=True):
            alive = {p: k for p, k in self.known.items() if clock < k.live or refs[p] > 1}
            want = {p for p, k in alive.items() if k.key == query.key}
            if page < P:
                assert page in want
            elif want:
                # Only a digest that collides, of other tokens after the same page, may cost a hit.
                assert any(k.digest == query.digest and k.parent == query.parent and k.tokens != query.tokens
                           for k in alive.values())  # fmt: skip

    @rule(data=st.data(), clock=st.sampled_from([0, 5, 7, 10]), count=st.integers(0, W + 2), pinned_too=st.booleans())
    def evict(self, data, clock, count, pinned_too):
        refs = data.draw(st.lists(st.integers(1, 2), min_size=P, max_size=P))
        last_use = data.draw(st.lists(st.integers(0, 3), min_size=P, max_size=P))
        candidates = evictable(self.index, jnp.asarray(refs, jnp.int32), jnp.int32(clock), jnp.bool_(pinned_too))
        want = {p for p, k in self.known.items() if refs[p] == 1 and (pinned_too or k.pinned <= clock)}
        assert set(np.flatnonzero(candidates).tolist()) == want
        pages = oldest(
            self.index, candidates, jnp.asarray(last_use, jnp.int32), jnp.int32(clock), jnp.int32(count)
        ).tolist()

        def order(page):
            known = self.known[page]
            return known.pinned > clock, -1 if known.live <= clock else last_use[page], -known.depth, page

        first = sorted(want, key=order)[: min(count, W)]
        assert pages == [*sorted(first), *[P] * (W - len(first))]

    @invariant()
    def holds_what_the_dict_holds(self):
        ways, place = np.asarray(self.index.ways), np.asarray(self.index.place)
        assert sorted(ways[ways < P].tolist()) == sorted(self.known)
        assert np.flatnonzero(place < ways.size).tolist() == sorted(self.known)
        for page, known in self.known.items():
            assert ways.ravel()[place[page]] == page
            found = (tuple(self.index.digest[page].tolist()), tuple(self.index.tokens[page].tolist()))
            assert found == (known.digest, known.tokens)
            row = [int(getattr(self.index, name)[page]) for name in ("parent", "depth", "live", "pinned")]
            assert row == [known.parent, known.depth, known.live, known.pinned]
            assert self.index.sisters[page].tolist() == [known.sister]


IndexMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestIndex = IndexMachine.TestCase


def test_as_many_as_two_buckets_hold_enter_under_one_digest():
    index = prefix.init(P, R, G)
    digest = next(d for d in ((i, 0, i + 1, 1) for i in range(100)) if len(set(buckets_of(index, d))) == 2)
    entered, full = set(), set()
    for start in range(0, P, W):
        known = [Known(digest, (page, page), P, 0, 1, 0, page) for page in range(start, start + W)]
        index, won, refused = enter_all(index, list(range(start, start + W)), known)
        entered |= won
        full |= refused
    assert len(entered) == 2 * WAYS and len(full) == P - 2 * WAYS
    assert np.bincount(np.asarray(index.place)[sorted(entered)] // WAYS).max() == WAYS


def buckets_of(index: PrefixIndex, digest) -> list[int]:
    return prefix._buckets(index, jnp.asarray([digest], jnp.uint32))[0].tolist()


# --- against a radix tree -----------------------------------------------------------------------------------------
PAGES, LONGEST = 96, 6
"""Of the index that is compared with a tree: never full."""


class Radix:
    """A radix tree over pages of tokens, as in SGLang: edges hold many pages, and split where texts part."""

    def __init__(self):
        self.edges: dict[tuple[int, ...], tuple[list, Radix]] = {}

    def match(self, pages: list[tuple[int, ...]]) -> int:
        """How many of the pages are in the tree, from the first on."""
        if not pages or pages[0] not in self.edges:
            return 0
        label, child = self.edges[pages[0]]
        same = common(label, pages)
        return same if same < len(label) else same + child.match(pages[same:])

    def insert(self, pages: list[tuple[int, ...]]) -> None:
        if not pages:
            return
        if pages[0] not in self.edges:
            self.edges[pages[0]] = (pages, Radix())
            return
        label, child = self.edges[pages[0]]
        same = common(label, pages)
        if same < len(label):
            lower = Radix()
            lower.edges[label[same]] = (label[same:], child)
            self.edges[pages[0]] = (label[:same], lower)
            child = lower
        child.insert(pages[same:])


def common(a: list, b: list) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@jax.jit
def chain(index: PrefixIndex, taken: jax.Array, root: jax.Array, tokens: jax.Array, full: jax.Array):
    """Looks one text up and enters the rest of it: the index, pages taken so far, and pages found."""
    digests = prefix.page_digests(root[None], tokens[None], R)[0]
    refs = jnp.full((PAGES,), 2, jnp.int32)  # in use: alive

    def visit(held, column):
        index, taken, parent, hits = held
        there = column < full
        ids = jax.lax.dynamic_slice(tokens, (column * R,), (R,))[None]
        page = prefix.find(index, refs, jnp.int32(0), digests[column][None], ids, parent)
        hit = there & (page < PAGES)
        new = Entry(
            page=taken[None],
            digest=digests[column][None],
            tokens=ids,
            parent=parent,
            depth=column[None],
            sisters=jnp.zeros((1, 0), jnp.int32),
        )
        index, entered, _ = prefix.enter(index, new, there & ~hit)
        parent = jnp.where(hit, page, taken)
        return (index, taken + entered[0].astype(jnp.int32), parent, hits + hit[0].astype(jnp.int32)), None

    start = (index, taken, jnp.full((1,), PAGES, jnp.int32), jnp.int32(0))
    (index, taken, _, hits), _ = jax.lax.scan(visit, start, jnp.arange(LONGEST, dtype=jnp.int32))
    return index, taken, hits


texts = st.lists(
    st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), max_size=LONGEST * R)), max_size=PAGES // LONGEST
)


@settings(max_examples=60, deadline=None)
@given(texts)
def test_hash_chain_and_radix_tree_report_the_same_hits(texts):
    index, taken = prefix.init(PAGES, R, 1), jnp.int32(0)
    trees = {"": Radix(), "a": Radix()}
    for salt, tokens in texts:
        pages = [tuple(tokens[i : i + R]) for i in range(0, len(tokens) // R * R, R)]
        padded = jnp.asarray([*tokens, *[0] * (LONGEST * R - len(tokens))], jnp.int32)
        root = jnp.asarray(prefix.namespace(salt))
        index, taken, hits = chain(index, taken, root, padded, jnp.int32(len(pages)))
        assert int(hits) == trees[salt].match(pages)
        trees[salt].insert(pages)
        assert trees[salt].match(pages) == len(pages)


# --- digests ------------------------------------------------------------------------------------------------------
page_digests = jax.jit(functools.partial(prefix.page_digests, rows=R))
prefix_digest = jax.jit(prefix.prefix_digest)
token_digests = jax.jit(prefix.token_digests)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=12, max_size=12), st.sampled_from(["", "a", "b"]))
def test_a_digest_is_the_sum_over_its_tokens(tokens, salt):
    root = prefix.namespace(salt)
    terms = np.asarray(token_digests(jnp.asarray(tokens, jnp.int32), jnp.arange(12, dtype=jnp.int32)), np.uint64)
    want = (root.astype(np.uint64) + np.cumsum(terms, axis=0)) % 2**32
    held = jnp.asarray([tokens], jnp.int32)
    found = page_digests(jnp.asarray(root)[None], held)[0]
    np.testing.assert_array_equal(found, want[R - 1 :: R])
    for count in (0, 1, 5, 12):
        one = prefix_digest(jnp.asarray(root)[None], held, jnp.asarray([count], jnp.int32))[0]
        np.testing.assert_array_equal(one, want[count - 1] if count else root)


def test_digests_tell_tokens_positions_and_namespaces_apart():
    tokens = jnp.arange(4096, dtype=jnp.int32)
    by_token = np.asarray(token_digests(tokens, jnp.zeros_like(tokens)))
    by_position = np.asarray(token_digests(jnp.zeros_like(tokens), tokens))
    for digests in (by_token, by_position):
        for lane in range(4):  # each lane alone is a permutation of 32 bits
            assert len(set(digests[:, lane].tolist())) == 4096
    bits = np.unpackbits(by_token.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.005
    spaces = [prefix.namespace(*names) for names in (("",), ("a",), ("b",), ("", "a"), ("a", "b"), ("ab",), ("1:a",))]
    assert len({tuple(space.tolist()) for space in spaces}) == len(spaces)
    assert prefix.namespace("").tolist() == [0] * 4 and prefix.namespace("\udc80").dtype == np.uint32


def test_times_saturate():
    seconds = jnp.asarray([0, 20, FOREVER - 100, FOREVER - 99, FOREVER], jnp.int32)
    assert prefix.until(jnp.int32(100), seconds).tolist() == [100, 120, FOREVER, FOREVER, FOREVER]
