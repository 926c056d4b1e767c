"""The cache: groups of layers, each with its pages, its free pages and its block table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from kvjax import pages as page_pool
from kvjax.pages import PagePool
from kvjax.pallas_kernels import AttentionSpec, init_pages, paged_attention, write_rows
from kvjax.types import KVSpec


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The static shape of a cache.

    Attributes:
      specs: one KVSpec per layer; equal specs form a group.
      slots: B.
      rows: R, rows a page.
      pages_per_slot: M.
      pages: P of every group, or None for slots × pages_per_slot, which can never run out.
      stacked: the layers of a group share one array of L·P pages, as a scan over layers needs.
      layout: of the pages, one of `kvjax.pallas_kernels.LAYOUTS`.
    """

    specs: tuple[KVSpec, ...]
    slots: int
    rows: int
    pages_per_slot: int
    pages: int | None = None
    stacked: bool = False
    layout: str = "head_major"

    @property
    def groups(self) -> tuple[KVSpec, ...]:
        """The distinct specs, in order of first appearance."""
        return tuple(dict.fromkeys(self.specs))

    @property
    def pool_pages(self) -> int:
        return self.pages if self.pages is not None else self.slots * self.pages_per_slot

    @property
    def capacity(self) -> int:
        """Tokens that one slot can hold."""
        return self.rows * self.pages_per_slot

    def layers_of(self, group: int) -> tuple[int, ...]:
        spec = self.groups[group]
        return tuple(i for i, s in enumerate(self.specs) if s == spec)

    def place_of(self, layer: int) -> tuple[int, int]:
        """(group, index within the group) of a layer."""
        group = self.groups.index(self.specs[layer])
        return group, self.layers_of(group).index(layer)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id in every layer of every group."""
        return sum(self.rows * spec.row_bytes for spec in self.specs)


class BlockTable(struct.PyTreeNode):
    """Where each slot's tokens lie.

    Attributes:
      pages: (B, M) int32 physical pages in order; entries behind the length are stale.
      lengths: (B,) int32 rows held.
    """

    pages: jax.Array
    lengths: jax.Array


class KVPages(struct.PyTreeNode):
    """K and V rows of every page, per layer of a group; the layout is the store's.

    Attributes:
      k: an array per layer, P pages in its first axis; or one array of L·P pages, layer l's page p at l·P + p.
      v: the same for values.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


class GroupCache(struct.PyTreeNode):
    """One group's share of the cache.

    Attributes:
      kv: K and V.
      pool: which pages are free.
      table: which pages belong to which slot.
    """

    kv: KVPages
    pool: PagePool
    table: BlockTable


class Cache(struct.PyTreeNode):
    """Everything that is remembered of the tokens computed so far.

    Attributes:
      groups: one per distinct KVSpec.
    """

    groups: tuple[GroupCache, ...]


def init(config: CacheConfig) -> Cache:
    """An empty cache."""
    return Cache(tuple(_init_group(config, group) for group in range(len(config.groups))))


def _init_group(config: CacheConfig, group: int) -> GroupCache:
    spec, layers = config.groups[group], len(config.layers_of(group))
    arrays, pages = (1, layers * config.pool_pages) if config.stacked else (layers, config.pool_pages)
    dtype = jnp.dtype(spec.storage)
    kv = [
        init_pages(pages, config.rows, spec.kv_heads, spec.key_dim, spec.value_dim, dtype, config.layout)
        for _ in range(arrays)
    ]
    table = BlockTable(
        jnp.zeros((config.slots, config.pages_per_slot), jnp.int32), jnp.zeros((config.slots,), jnp.int32)
    )
    return GroupCache(
        KVPages(tuple(k for k, _ in kv), tuple(v for _, v in kv)), page_pool.init(config.pool_pages), table
    )


def pages_for(rows: jax.Array, page_rows: int) -> jax.Array:
    """Pages that hold so many rows: ⌈rows / R⌉."""
    return (rows + page_rows - 1) // page_rows


def reserve(
    config: CacheConfig, cache: Cache, tokens: jax.Array, step: jax.Array, most: int
) -> tuple[Cache, jax.Array]:
    """Lengthens each slot by its tokens of this step and takes the pages that needs.

    Args:
      config: the cache's static shape.
      cache: the cache.
      tokens: (B,) int32 tokens each slot is about to write.
      step: () int32 number of this step.
      most: static bound on tokens.sum().

    Returns:
      The new cache, and (B,) bool: slots for which too few pages were left, with the first that does not fit all
      behind it that need a page. Their length and table are as before; the others are served.
    """
    starved = jnp.zeros((config.slots,), bool)
    for group in cache.groups:  # a slot is served in every group or in none
        starved |= _starved(config, group, tokens)
    tokens = jnp.where(starved, 0, tokens)
    return Cache(tuple(_reserve_group(config, group, tokens, step, most) for group in cache.groups)), starved


def _new_pages(config: CacheConfig, table: BlockTable, tokens: jax.Array) -> jax.Array:
    """(B,) int32: pages each slot lacks to hold so many more tokens."""
    return pages_for(table.lengths + tokens, config.rows) - pages_for(table.lengths, config.rows)


def _starved(config: CacheConfig, group: GroupCache, tokens: jax.Array) -> jax.Array:
    need = _new_pages(config, group.table, tokens)
    return (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > group.pool.height)


def _reserve_group(config: CacheConfig, group: GroupCache, tokens: jax.Array, step: jax.Array, most: int) -> GroupCache:
    B, M, R = config.slots, config.pages_per_slot, config.rows
    need = _new_pages(config, group.table, tokens)
    ends = jnp.cumsum(need, dtype=jnp.int32)
    # Each new page holds at least one new token, and a slot's tokens open at most one page more than they fill.
    wanted = jnp.arange(min(most, most // R + B), dtype=jnp.int32)
    slot = jnp.searchsorted(ends, wanted, side="right", method="compare_all").astype(jnp.int32)
    safe = jnp.minimum(slot, B - 1)
    column = pages_for(group.table.lengths, R)[safe] + wanted - (ends - need)[safe]
    pool, page = page_pool.allocate(group.pool, slot < B, step)
    table_pages = group.table.pages.at[slot, jnp.where(slot < B, column, M)].set(page, mode="drop")
    return group.replace(pool=pool, table=BlockTable(table_pages, group.table.lengths + tokens))


def release(config: CacheConfig, cache: Cache, ended: jax.Array) -> Cache:
    """Gives back every page of the slots in (B,) bool `ended` and sets their lengths to 0.

    The work is done only when a slot ends; no page's K or V is touched.
    """

    def freed(group: GroupCache) -> tuple[PagePool, BlockTable]:
        held = jnp.where(ended, pages_for(group.table.lengths, config.rows), 0)
        column = jnp.arange(config.pages_per_slot, dtype=jnp.int32)[None, :]
        page = jnp.where(column < held[:, None], group.table.pages, config.pool_pages)
        lengths = jnp.where(ended, 0, group.table.lengths)
        return page_pool.release(group.pool, page.reshape(-1)), group.table.replace(lengths=lengths)

    tables = jax.lax.cond(
        ended.any(),
        lambda groups: [freed(group) for group in groups],
        lambda groups: [(group.pool, group.table) for group in groups],
        [group.replace(kv=None) for group in cache.groups],
    )
    return Cache(
        tuple(group.replace(pool=pool, table=table) for group, (pool, table) in zip(cache.groups, tables, strict=True))
    )


def pages_of(cache: Cache) -> tuple[KVPages, ...]:
    """The K and V of every group: what a step's computation changes."""
    return tuple(group.kv for group in cache.groups)


def with_pages(cache: Cache, kv: tuple[KVPages, ...]) -> Cache:
    """The cache with other K and V."""
    return Cache(tuple(group.replace(kv=pages) for group, pages in zip(cache.groups, kv, strict=True)))


class Placement(struct.PyTreeNode):
    """Where a step's packed tokens belong; computed once, used by every layer.

    Attributes:
      slots: (T,) int32 slot of each token, B for padding.
      positions: (T,) int32 position of each token in its sequence.
      row_starts: (B + 1,) int32 first packed token of each slot.
      max_query: static; most tokens a slot has.
    """

    slots: jax.Array
    positions: jax.Array
    row_starts: jax.Array
    max_query: int = struct.field(pytree_node=False)


def attend(
    config: CacheConfig,
    placement: Placement,
    cache: Cache,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    *,
    soft_cap: float | None = None,
    backend: str = "xla",
) -> tuple[Cache, jax.Array]:
    """Writes K and V of the step's tokens into their pages, then attends over the pages.

    Args:
      config: the cache's static shape.
      placement: where the tokens belong; `reserve` has already made room for them.
      cache: the cache.
      layer: Python int; a traced int32 only when the cache is stacked and has one group.
      q: (T, N, H).
      k: (T, K, H), position already encoded.
      v: (T, K, Hv).
      scale: multiplies q·k.
      soft_cap: as in AttentionSpec.
      backend: attention backend.

    Returns:
      The new cache and out (T, N, Hv).
    """
    g, index = (0, layer) if config.stacked else config.place_of(int(layer))
    group, spec = cache.groups[g], config.groups[g]
    R, P = config.rows, config.pool_pages
    array = 0 if config.stacked else int(index)
    offset = jnp.asarray(index, jnp.int32) * P if config.stacked else jnp.int32(0)
    total = P * len(config.layers_of(g)) if config.stacked else P

    slots = jnp.minimum(placement.slots, config.slots - 1)
    page = group.table.pages[slots, jnp.minimum(placement.positions // R, config.pages_per_slot - 1)]
    page = jnp.where(placement.slots < config.slots, page + offset, total)
    k_pages, v_pages = write_rows(
        group.kv.k[array], group.kv.v[array], k, v, page, placement.positions % R, config.layout
    )
    out, _ = paged_attention(
        q, k_pages, v_pages, group.table.pages + offset, group.table.lengths, placement.row_starts,
        AttentionSpec(scale, spec.window, soft_cap, config.layout), max_query=placement.max_query, backend=backend,
    )  # fmt: skip
    kv = KVPages(_replaced(group.kv.k, array, k_pages), _replaced(group.kv.v, array, v_pages))
    return Cache(_replaced(cache.groups, g, group.replace(kv=kv))), out


def _replaced(items: Sequence, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
