"""The prefix index: pages of K and V that hold tokens computed before, found by a chained hash.

A full page of R tokens is found by the digest of all tokens up to its end. On a hit the page before it and the R
tokens are compared, so a collision of digests can cost a hit and never shows a request another one's tokens. The index
owns its pages as a slot does, by a reference: a page that nobody else owns stays, and can be evicted.

Order of eviction. Whoever owns a page owns its parents, and when an owner ends, its last use, and the times until which
it lives or is pinned, are set for all of its pages at once. So among pages that only the index owns none is used more
recently, or lives longer, than its parent, and taking them by (last use, deepest first) is taking the least recently
used leaf again and again, without a record of children.

Pages of several groups of layers that belong together form one entry, named by the page of group 0.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

WAYS = 8
"""Entries of a bucket. An entry goes to the emptier of two buckets, and there are 4 places for each page: by the power
of two choices (Mitzenmacher, 2001) no bucket of 8 fills up in practice. Where both are full a page is not shared."""

FOREVER = 2**31 - 1
"""Of a job's clock, in seconds: a time to live without end."""

_LANES = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
_PINNED = 2**30  # added to the last use of pinned pages: they go last


class PrefixIndex(struct.PyTreeNode):
    """Which full pages can be shared. X buckets, P pages, R rows a page, G groups.

    Attributes:
      ways: (X, 8) int32 pages by digest; P where empty.
      place: (P,) int32 where each page stands in `ways`, flattened; 8·X where it does not.
      digest: (P, 4) uint32 digest of all tokens up to the end of the page.
      tokens: (P, R) int32 its tokens.
      parent: (P,) int32 the page before it, P for first pages.
      depth: (P,) int32 how many pages are before it.
      live: (P,) int32 second of the job's clock at which it no longer counts; set when its last owner ends.
      pinned: (P,) int32 second of the job's clock up to which it is not evicted for others; likewise.
      sisters: (P, G - 1) int32 its pages in the other groups; a number that no page has where it has been given up,
        as only groups do that give back what is behind a window.
      claim: (X,) int32 scratch, which of several newcomers gets its bucket's next place.
    """

    ways: jax.Array
    place: jax.Array
    digest: jax.Array
    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    live: jax.Array
    pinned: jax.Array
    sisters: jax.Array
    claim: jax.Array

    @property
    def size(self) -> int:
        """P."""
        return self.place.shape[0]


class Entry(struct.PyTreeNode):
    """Pages to enter, one per row of W.

    Attributes:
      page: (W,) int32 of group 0.
      digest: (W, 4) uint32.
      tokens: (W, R) int32.
      parent: (W,) int32, P for first pages.
      depth: (W,) int32.
      sisters: (W, G - 1) int32.
    """

    page: jax.Array
    digest: jax.Array
    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    sisters: jax.Array


def init(pages: int, rows: int, groups: int) -> PrefixIndex:
    """An empty index over P pages of R rows."""
    buckets = 1 << max(4 * pages // WAYS - 1, 0).bit_length()
    column = jnp.zeros((pages,), jnp.int32)
    return PrefixIndex(
        ways=jnp.full((buckets, WAYS), pages, jnp.int32),
        place=jnp.full((pages,), buckets * WAYS, jnp.int32),
        digest=jnp.zeros((pages, 4), jnp.uint32),
        tokens=jnp.zeros((pages, rows), jnp.int32),
        parent=column,
        depth=column.copy(),
        live=column.copy(),
        pinned=column.copy(),
        sisters=jnp.zeros((pages, groups - 1), jnp.int32),
        claim=jnp.zeros((buckets,), jnp.int32),
    )


# --- digests ------------------------------------------------------------------------------------------------
def namespace(salt: str, adapter: str = "", positions: str = "") -> np.ndarray:
    """(4,) uint32 from which a request's digests begin: only requests that agree in all three share pages.

    Args:
      salt: of the request.
      adapter: name of the weights added to the model's.
      positions: how the model's positions are scaled; cached keys are rotated already.
    """
    if not salt and not adapter and not positions:
        return np.zeros(4, np.uint32)
    parts = f"{len(salt)}:{salt}{adapter}" + (f"\0{positions}" if positions else "")
    text = parts.encode("utf-8", "surrogatepass")
    return np.frombuffer(hashlib.sha256(text).digest()[:16], np.uint32).copy()


def _mixed(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every bit of a uint32 depends on every other."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def token_digests(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """(...) int32 tokens at (...) int32 positions → (..., 4) uint32; a sum of them is the digest of a sequence.

    A sum of mixed terms (Bellare and Micciancio, "A new paradigm for collision-free hashing", 1997) chains, and is
    computed in parallel over a whole prompt. Positions are in it: K of the same tokens elsewhere is another K.
    """
    key = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    key = _mixed(key) + positions.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F)
    return jnp.stack([_mixed(key ^ jnp.uint32(lane)) for lane in _LANES], axis=-1)


def page_digests(root: jax.Array, tokens: jax.Array, rows: int) -> jax.Array:
    """Digests of the first 1, 2, ... M pages: root (A, 4) uint32, tokens (A, M·R) int32 → (A, M, 4) uint32."""
    A, S = tokens.shape
    position = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (A, S))
    pages = token_digests(tokens, position).reshape(A, S // rows, rows, 4).sum(axis=2, dtype=jnp.uint32)
    return root[:, None, :] + jnp.cumsum(pages, axis=1, dtype=jnp.uint32)


def prefix_digest(root: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """Digest of the first `count` (A,) int32 tokens of (A, S): (A, 4) uint32."""
    A, S = tokens.shape
    position = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (A, S))
    terms = jnp.where((position < count[:, None])[..., None], token_digests(tokens, position), jnp.uint32(0))
    return root + terms.sum(axis=1, dtype=jnp.uint32)


def _buckets(index: PrefixIndex, digest: jax.Array) -> jax.Array:
    """(W, 4) uint32 → (W, 2) int32."""
    mask = jnp.uint32(index.claim.shape[0] - 1)
    first = _mixed(digest[:, 0] + digest[:, 1] * jnp.uint32(5))
    second = _mixed(digest[:, 2] + digest[:, 3] * jnp.uint32(5))
    return jnp.stack([first & mask, second & mask], axis=1).astype(jnp.int32)


# --- looking up, entering, leaving ----------------------------------------------------------------------------
def registered(index: PrefixIndex, page: jax.Array) -> jax.Array:
    """(W,) bool: which pages of group 0, (W,) int32, are in the index. P is not."""
    return (page < index.size) & (index.place.at[page].get(mode="clip") < index.ways.size)


def find(
    index: PrefixIndex, refs: jax.Array, clock: jax.Array, digest: jax.Array, tokens: jax.Array, parent: jax.Array
) -> jax.Array:
    """The pages that hold these tokens.

    Args:
      index: the index.
      refs: (P,) int32 owners of the pages of group 0: a page in use lives.
      clock: () int32 seconds.
      digest: (W, 4) uint32 of all tokens up to the end of the page.
      tokens: (W, R) int32 of the page.
      parent: (W,) int32 the page before, P for first pages.

    Returns:
      (W,) int32 pages of group 0; P where there is none.
    """
    W, P = parent.shape[0], index.size
    there = index.ways[_buckets(index, digest)].reshape(W, 2 * WAYS)
    safe = jnp.minimum(there, P - 1)
    same = (there < P) & (index.parent[safe] == parent[:, None])
    same &= (index.digest[safe] == digest[:, None, :]).all(axis=-1)
    same &= (clock < index.live[safe]) | (refs[safe] > 1)
    page = jnp.take_along_axis(safe, same.argmax(axis=1)[:, None], axis=1)[:, 0]
    return jnp.where(same.any(axis=1) & (index.tokens[page] == tokens).all(axis=1), page, P)


def enter(index: PrefixIndex, new: Entry, wanted: jax.Array) -> tuple[PrefixIndex, jax.Array, jax.Array]:
    """Enters pages, one per bucket and call.

    Args:
      index: the index.
      new: the pages, none of them found in the index.
      wanted: (W,) bool.

    Returns:
      The index, (W,) bool: those that are in it now, and (W,) bool: those whose buckets are full. The others met a
      newcomer in their bucket and may try again.
    """
    W, P = wanted.shape[0], index.size
    buckets = _buckets(index, new.digest)
    room = (index.ways[buckets] == P).sum(axis=-1, dtype=jnp.int32)  # (W, 2)
    choice = jnp.argmax(room, axis=1)
    bucket = jnp.take_along_axis(buckets, choice[:, None], axis=1)[:, 0]
    full = wanted & (room.max(axis=1) == 0)
    number = jnp.arange(W, dtype=jnp.int32)
    trying = wanted & ~full
    claim = index.claim.at[jnp.where(trying, bucket, index.claim.shape[0])].set(number, mode="drop")
    won = trying & (claim[bucket] == number)
    way = jnp.argmax(index.ways[bucket] == P, axis=1).astype(jnp.int32)
    page = jnp.where(won, new.page, P)

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[page].set(value, mode="drop")

    place = bucket * WAYS + way
    ways = index.ways.reshape(-1).at[jnp.where(won, place, index.ways.size)].set(new.page, mode="drop")
    columns = {name: put(getattr(index, name), getattr(new, name)) for name in _COLUMNS}
    columns |= {name: put(getattr(index, name), jnp.zeros_like(page)) for name in ("live", "pinned")}
    index = index.replace(ways=ways.reshape(index.ways.shape), place=put(index.place, place), claim=claim, **columns)
    return index, won, full


_COLUMNS = ("digest", "tokens", "parent", "depth", "sisters")


def remove(index: PrefixIndex, page: jax.Array) -> PrefixIndex:
    """Takes pages (W,) int32 of group 0 out of the index; P is skipped."""
    place = jnp.where(page < index.size, index.place.at[page].get(mode="clip"), index.ways.size)
    ways = index.ways.reshape(-1).at[place].set(index.size, mode="drop").reshape(index.ways.shape)
    return index.replace(ways=ways, place=index.place.at[page].set(index.ways.size, mode="drop"))


def touch(index: PrefixIndex, page: jax.Array, live: jax.Array, pinned: jax.Array) -> PrefixIndex:
    """Lets pages (W,) int32 of group 0 live and stay pinned until (W,) int32, if not longer already; P is skipped."""
    return index.replace(
        live=index.live.at[page].max(live, mode="drop"), pinned=index.pinned.at[page].max(pinned, mode="drop")
    )


def until(clock: jax.Array, seconds: jax.Array) -> jax.Array:
    """clock + seconds in int32; FOREVER where that is FOREVER or more."""
    return jnp.where(seconds >= FOREVER - clock, FOREVER, clock + seconds)


# --- eviction ---------------------------------------------------------------------------------------------------
def entered(index: PrefixIndex) -> jax.Array:
    """(P,) bool: pages of group 0 that are in the index."""
    return index.place < index.ways.size


def evictable(index: PrefixIndex, refs: jax.Array, clock: jax.Array, pinned_too: jax.Array) -> jax.Array:
    """(P,) bool: pages of group 0 that only the index owns, and that are not pinned."""
    return entered(index) & (refs == 1) & ((index.pinned <= clock) | pinned_too)


def oldest(
    index: PrefixIndex,
    candidates: jax.Array,
    last_use: jax.Array,
    clock: jax.Array,
    count: jax.Array,
    width: int,
    *,
    deepest: bool = True,
) -> jax.Array:
    """The `count` entries to evict first: those past their time, then by last use, deepest first; pinned ones last.

    Args:
      index: the index.
      candidates: (P,) bool.
      last_use: (P,) int32 step, at least 0.
      clock: () int32 seconds.
      count: () int32, at most `width` are returned.
      width: W, static.
      deepest: static; False for those nearest to the beginning first.

    Returns:
      (W,) int32 distinct pages of group 0; P behind the last one.
    """
    P = index.size
    count = jnp.minimum(jnp.minimum(count, width), candidates.sum(dtype=jnp.int32))
    age = jnp.where(index.live <= clock, -1, last_use) + jnp.where(index.pinned > clock, _PINNED, 0)
    below, among = _smallest(age, candidates, count)
    depth = -index.depth if deepest else index.depth
    by_depth, rest = _smallest(depth, among, count - below.sum(dtype=jnp.int32))
    chosen = below | by_depth
    left = count - chosen.sum(dtype=jnp.int32)
    chosen |= rest & (jnp.cumsum(rest, dtype=jnp.int32) <= left)
    rank = jnp.arange(width, dtype=jnp.int32)
    page = jnp.searchsorted(jnp.cumsum(chosen, dtype=jnp.int32), rank + 1, method="scan").astype(jnp.int32)
    return jnp.where(rank < count, page, P)


def _smallest(key: jax.Array, among: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits off the `count` smallest: (P,) bool those below the limit value, and those that have the limit value.

    The limit is found by bisection, in as many passes as the range of the keys has bits, rather than by a sort.
    """
    big = jnp.int32(2**31 - 1)
    low = jnp.where(among, key, big).min()
    high = jnp.where(among, key, -big).max()

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = (among & (key <= middle)).sum(dtype=jnp.int32) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    limit, _ = jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))
    return among & (key < limit), among & (key == limit)
