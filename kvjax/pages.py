"""The page allocator: a stack of free pages and reference counts, all vectorised, all inside jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

NOWHERE = 2**30
"""In a block table and in the prefix index, for a page that was given back; more than there are pages."""


def pages_for(rows: jax.Array, page_rows: int) -> jax.Array:
    """Pages that hold so many rows: ⌈rows / R⌉."""
    return (rows + page_rows - 1) // page_rows


class PagePool(struct.PyTreeNode):
    """Which physical pages are free.

    Attributes:
      free: (P,) int32 stack of free pages; free[:height] counts, the rest is stale.
      height: () int32 number of free pages.
      refs: (P,) int32 owners of each page, slots and the prefix index; 0 when free.
      last_use: (P,) int32 step at which each page last gained or lost an owner, for least-recently-used eviction.
      claim: (P,) int32 scratch that tells one of several entries naming the same page from the others.
    """

    free: jax.Array
    height: jax.Array
    refs: jax.Array
    last_use: jax.Array
    claim: jax.Array


def init(pages: int) -> PagePool:
    """A pool of P free pages; page 0 is taken first."""
    zeros = jnp.zeros((pages,), jnp.int32)
    free = jnp.arange(pages - 1, -1, -1, dtype=jnp.int32)
    # Distinct buffers: a donated state must not hold one array twice.
    return PagePool(free, jnp.int32(pages), zeros, zeros.copy(), zeros.copy())


def allocate(pool: PagePool, want: jax.Array, step: jax.Array) -> tuple[PagePool, jax.Array]:
    """Takes one page for each entry that wants one, in order, while pages last.

    Args:
      pool: the pool.
      want: (W,) bool.
      step: () int32, recorded as the pages' last use.

    Returns:
      The new pool, and (W,) int32 pages; P (one past the last page) where none was wanted or none was left.
    """
    P = pool.free.shape[0]
    rank = jnp.cumsum(want, dtype=jnp.int32) - 1
    got = want & (rank < pool.height)
    page = jnp.where(got, pool.free.at[pool.height - 1 - rank].get(mode="clip"), P)
    taken = jnp.minimum(rank[-1] + 1, pool.height)
    refs = pool.refs.at[page].set(1, mode="drop")
    last_use = pool.last_use.at[page].set(step, mode="drop")
    return pool.replace(height=pool.height - taken, refs=refs, last_use=last_use), page


def in_use(pool: PagePool) -> jax.Array:
    """() int32: pages that have an owner."""
    return pool.free.shape[0] - pool.height


def share(pool: PagePool, page: jax.Array, step: jax.Array) -> PagePool:
    """Adds an owner to each page of (W,) int32; P is skipped, a page named twice gains two owners."""
    refs = pool.refs.at[page].add(1, mode="drop")
    return pool.replace(refs=refs, last_use=pool.last_use.at[page].set(step, mode="drop"))


def leave(pool: PagePool, page: jax.Array) -> tuple[PagePool, jax.Array]:
    """Takes an owner from each page of (W,) int32; P is skipped, a page named twice loses two owners.

    Returns:
      The pool, where a page without owners is not stacked yet, and (W,) bool: the entry, one per page, that saw its
      page lose the last owner.
    """
    P, W = pool.free.shape[0], page.shape[0]
    refs = pool.refs.at[page].add(-1, mode="drop")
    index = jnp.arange(W, dtype=jnp.int32)
    claim = pool.claim.at[page].set(index, mode="drop")
    # Whichever duplicate wrote last holds the claim; exactly one of them sees its own index.
    last = (page < P) & (refs.at[page].get(mode="clip") == 0) & (claim.at[page].get(mode="clip") == index)
    return pool.replace(refs=refs, claim=claim), last


def release(pool: PagePool, page: jax.Array, step: jax.Array) -> PagePool:
    """Takes an owner from each page of (W,) int32 and stacks those left without; P is skipped.

    A page may stand several times (several owners end in one step): it loses as many owners, and is stacked once.
    `step` is recorded as the last use of those that have owners left.
    """
    P = pool.free.shape[0]
    pool, freed = leave(pool, page)
    place = jnp.where(freed, pool.height + jnp.cumsum(freed, dtype=jnp.int32) - 1, P)
    return pool.replace(
        free=pool.free.at[place].set(page, mode="drop"),
        height=pool.height + freed.sum(dtype=jnp.int32),
        last_use=pool.last_use.at[page].set(step, mode="drop"),
    )
