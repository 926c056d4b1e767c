"""The cache: groups of layers, each with its pages, its free pages and its block table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from kvjax import coded, evicting, prefix, spread
from kvjax import pages as page_pool
from kvjax.control import for_each_page, when
from kvjax.evicting import HeadCache
from kvjax.eviction_rule import Eviction
from kvjax.pages import NOWHERE, PagePool, pages_for
from kvjax.pallas_kernels import (
    AttentionSpec,
    Lanes,
    axes_of,
    init_pages,
    page_ops,
    paged_attention,
    write_rows,
)
from kvjax.pallas_kernels.quantize import quantize_kv
from kvjax.pallas_kernels.ring_attention import ring_attention
from kvjax.prefix import PrefixIndex
from kvjax.sharding import MODEL, SEQ, divided_here, every_engine, heads_and_rows, on_each
from kvjax.types import KVSpec

LEDGER = KVSpec(0, 0, 0, storage="float32")
"""The first group of a cache none of whose layers keeps every row: no K and V, but pages and tables that count all
tokens, and that the prefix index names its entries by."""

RING = 256
"""Tokens of a prompt step on each chip from which on K and V go round the ring, where nothing was computed before."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The static shape of a cache.

    Attributes:
      specs: one KVSpec per layer; equal specs form a group.
      slots: B.
      rows: rows a page, on all parts of a sequence together: R · seq.
      pages_per_slot: M.
      pages: P of the groups that keep every row, or None for slots × pages_per_slot, which can never run out.
      window_pages: P of each of the others, in the order of `groups`; None for as many. See `frees`.
      eviction: what is evicted of the layers that would keep every row; None for nothing. Their heads have pages each.
      head_pages: P of each of their groups, in the order of `by_head`; None for what can never run out.
      stacked: the layers of a group share one array of L·P pages, as a scan over layers needs.
      layout: of the pages, one of `kvjax.pallas_kernels.LAYOUTS`.
      seq: chips that a sequence's rows are dealt over (`kvjax.pallas_kernels.dealt`); it divides `rows`.
      model: chips that heads are divided over.
      query_heads: N, where `model` is more than 1.
    """

    specs: tuple[KVSpec, ...]
    slots: int
    rows: int
    pages_per_slot: int
    pages: int | None = None
    stacked: bool = False
    layout: str = "head_major"
    seq: int = 1
    model: int = 1
    query_heads: int = 0
    window_pages: tuple[int, ...] | None = None
    eviction: Eviction | None = None
    head_pages: tuple[int, ...] | None = None

    @functools.cached_property
    def groups(self) -> tuple[KVSpec, ...]:
        """The distinct specs: those that keep every row first, or the LEDGER where there are none. Layers that keep
        their newest rows in full precision besides codes are of two groups."""
        owners = [spec for spec in self.specs if spec.shares is None]
        specs = tuple(dict.fromkeys((*owners, *(spec.recent for spec in owners if spec.recent is not None))))
        whole = tuple(spec for spec in specs if not self.frees(spec) and not self.evicts(spec))
        return (whole or (LEDGER,)) + tuple(spec for spec in specs if self.frees(spec))

    @functools.cached_property
    def by_head(self) -> tuple[KVSpec, ...]:
        """The distinct specs of layers whose rows are evicted, each head's for itself."""
        return tuple(spec for spec in dict.fromkeys(self.specs) if self.evicts(spec))

    def evicts(self, spec: KVSpec) -> bool:
        """Whether a layer's rows are evicted: those that no window bounds."""
        return self.eviction is not None and not self.frees(spec)

    @property
    def pool_pages(self) -> int:
        """P of the groups that keep every row, the first one among them."""
        return self.pages if self.pages is not None else self.slots * self.pages_per_slot

    def pool_of(self, group: int) -> int:
        """P of a group."""
        if self.window_pages is None or not self.frees(self.groups[group]):
            return self.pool_pages
        freeing = [spec for spec in self.groups if self.frees(spec)]
        return self.window_pages[freeing.index(self.groups[group])]

    def frees(self, spec: KVSpec) -> bool:
        """Whether a layer gives back the pages behind its window: if a slot can hold a page that is."""
        return spec.window is not None and int(self.first_column(spec, self.capacity)) > 0

    def first_column(self, spec: KVSpec, length: Any) -> Any:
        """The first column of a block table that a slot with `length` rows still needs: its next token sees rows from
        length − W + 1 on. An int, or (B,) int32."""
        if spec.window is None:
            return length * 0
        behind = length - spec.window + 1
        return (max(behind, 0) if isinstance(behind, int) else jnp.maximum(behind, 0)) // self.rows

    def prompt_pages(self, packed: int) -> int:
        """Most pages that a step's tokens open, but for one a slot, which is part of its `span`."""
        return -(-packed // self.rows)

    def span(self, spec: KVSpec) -> int:
        """Most pages that a slot holds between steps, and one that a step's first new token opens."""
        if not self.frees(spec):
            return self.pages_per_slot
        assert spec.window is not None
        return min(self.pages_per_slot, -(-(spec.window + self.rows - 1) // self.rows) + 1)

    @property
    def capacity(self) -> int:
        """Tokens that one slot can hold."""
        return self.rows * self.pages_per_slot

    def layers_of(self, group: int) -> tuple[int, ...]:
        return self.layers_with(self.groups[group])

    def layers_with(self, spec: KVSpec) -> tuple[int, ...]:
        """The layers that have a spec."""
        return tuple(i for i, s in enumerate(self.specs) if spec in (s, s.recent))

    def places_of(self, layer: int) -> tuple[tuple[int, int], ...]:
        """(group, index within the group) of a layer, or of that whose rows it reads; and of the newest rows in full
        precision, where there are any."""
        spec = self.specs[layer]
        if spec.shares is not None:
            return self.places_of(spec.shares)
        groups = [self.groups.index(s) for s in (spec, spec.recent) if s is not None]
        return tuple((group, self.layers_of(group).index(layer)) for group in groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id in every layer of every group, on each chip."""
        return sum(self.bytes_of(group) for group in range(len(self.groups)))

    def bytes_of(self, group: int) -> int:
        """Bytes of one page id in every layer of a group, on each chip."""
        spec, layers = self.groups[group], len(self.layers_of(group))
        if layers and spec.stored.codes is not None:
            return layers * coded.page_bytes(self, self.on_chip(spec))
        return layers and layers * (self.rows // self.seq) * self.stored_row_bytes(self.on_chip(spec))

    @property
    def group_bytes(self) -> int:
        """Bytes of all K and V of the groups, on each chip."""
        return sum(self.pool_of(group) * self.bytes_of(group) for group in range(len(self.groups)))

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V, on each chip; where rows are evicted, with what is noted of each."""
        each = (evicting.pool_pages(self, spec) * evicting.page_bytes(self, spec) for spec in self.by_head)
        return sum(each) + sum(evicting.moments_bytes(self, spec) for spec in self.by_head) + self.group_bytes

    def stored_row_bytes(self, spec: KVSpec) -> int:
        """Bytes of one token in a layer, as the layout stores it."""
        lanes = self.lanes_of(spec)
        if lanes is None:
            return spec.row_bytes
        return lanes.row * spec.stored.dtype.itemsize + 4 * spec.scales

    def lanes_of(self, spec: KVSpec) -> Lanes | None:
        """Where heads lie in a layer's rows on a chip (`on_chip`), in the joined layout."""
        if self.layout != "joined":
            return None
        return Lanes(spec.kv_heads, spec.key_dim, spec.value_dim, spec.latent)

    def on_chip(self, spec: KVSpec) -> KVSpec:
        """The spec with the kv heads that each chip holds: K / model; one, held by several chips, if there are fewer
        heads than chips; all where they do not divide evenly, and of latent rows, which all heads share."""
        K, model = spec.kv_heads, self.model
        if spec.latent or (K % model and (model % K or self.query_heads % model)):
            return spec
        return dataclasses.replace(spec, kv_heads=max(1, K // model))

    def parts_of(self, spec: KVSpec) -> int:
        """Over how many chips a layer's kv heads are divided, with those that hold the same one: `model` or 1."""
        return self.model if self.on_chip(spec).kv_heads < spec.kv_heads else 1


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
      v: the same for values; empty where they lie in the same array (the joined layout, or `KVSpec.latent`).
      scales: (P, 2·K, R) float32, what codes of 8 bits are multiplied with, the heads of K first; (P, K, R) of latent
        ones; of packed codes a pair, as `kvjax.pallas_kernels.packed` has them; empty where rows are not codes.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    scales: tuple[Any, ...] = ()


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
      by_head: of the layers whose rows are evicted, one per distinct KVSpec; see `kvjax.evicting`.
    """

    groups: tuple[GroupCache, ...]
    by_head: tuple[HeadCache, ...] = ()


def init(config: CacheConfig) -> Cache:
    """An empty cache."""
    groups = tuple(_init_group(config, group) for group in range(len(config.groups)))
    return Cache(groups, tuple(evicting.init(config, spec) for spec in config.by_head))


def _init_group(config: CacheConfig, group: int) -> GroupCache:
    spec, layers = config.groups[group], len(config.layers_of(group))
    pool = config.pool_of(group)
    arrays, pages = (min(layers, 1), layers * pool) if config.stacked else (layers, pool)
    dtype, parts = spec.stored.dtype, config.parts_of(spec)
    held = config.on_chip(spec)
    lanes = Lanes(held.kv_heads, spec.key_dim, spec.value_dim, spec.latent)
    table = BlockTable(
        jnp.zeros((config.slots, config.pages_per_slot), jnp.int32), jnp.zeros((config.slots,), jnp.int32)
    )
    if spec.stored.codes is not None:
        packed = [coded.init(config, held, pages, config.rows, parts) for _ in range(arrays)]
        codes = KVPages(
            tuple(x.k for x in packed),
            tuple(x.v for x in packed if x.v is not None),
            tuple((x.k_scales, x.v_scales) for x in packed),
        )
        return GroupCache(codes, page_pool.init(pool), table)
    kv = [init_pages(pages, config.rows, lanes, dtype, config.layout, parts) for _ in range(arrays)]
    return GroupCache(
        KVPages(
            tuple(k for k, _ in kv),
            tuple(v for _, v in kv if v is not None),
            tuple(jnp.zeros((pages, parts * held.scales, config.rows)) for _ in range(arrays if spec.scales else 0)),
        ),
        page_pool.init(pool),
        table,
    )


class Copies(struct.PyTreeNode):
    """Pages of one group to copy before a step writes, at most one a slot.

    Attributes:
      source: (B,) int32; those to copy stand first.
      target: (B,) int32.
      count: () int32 how many there are.
    """

    source: jax.Array
    target: jax.Array
    count: jax.Array


class Reserved(struct.PyTreeNode):
    """What `reserve` found.

    Attributes:
      cache: the new cache; `copy_pages` has to follow before anything is written.
      index: the prefix index without the pages that were evicted.
      copies: per group.
      starved: (B,) bool slots for which too few pages were left, with the first that does not fit all behind it that
        need a page. Their length and table are as before; the others are served.
      evicted: () int32 pages of group 0 taken from the index.
    """

    cache: Cache
    index: PrefixIndex | None
    copies: tuple[Copies, ...]
    starved: jax.Array
    evicted: jax.Array


def reserve(
    config: CacheConfig,
    cache: Cache,
    index: PrefixIndex | None,
    tokens: jax.Array,
    step: jax.Array,
    clock: jax.Array,
    pinned_too: jax.Array,
    most: int,
) -> Reserved:
    """Lengthens each slot by its tokens of this step and takes the pages that needs.

    A slot that would write into a page with other owners gets a page of its own to copy it to. Pages that only the
    prefix index owns are evicted where too few are free.

    Args:
      config: the cache's static shape.
      cache: the cache.
      index: the prefix index, or None where nothing is shared.
      tokens: (B,) int32 tokens each slot is about to write.
      step: () int32 number of this step.
      clock: () int32 seconds of the job's clock.
      pinned_too: () bool whether pinned pages may be evicted as well.
      most: static bound on tokens.sum().
    """
    evicted = jnp.int32(0)
    if index is not None:
        width, lack = _most_pages(config, most), jnp.int32(0)
        lacks = [_need(config, group, tokens).sum(dtype=jnp.int32) - group.pool.height for group in cache.groups]
        for spec, own in zip(config.groups, lacks, strict=True):
            lack = lack if config.frees(spec) else jnp.maximum(lack, own)
        cache, index, evicted = _evict(config, cache, index, lack, step, clock, pinned_too, width)
        for g, (spec, own) in enumerate(zip(config.groups, lacks, strict=True)):
            if config.frees(spec):
                cache, index = _evict_windows(cache, index, g, own, step, clock, width)
    starved = jnp.zeros((config.slots,), bool)
    for group in cache.groups:  # a slot is served in every group or in none
        need = _need(config, group, tokens)
        starved |= (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > group.pool.height)
    tokens = jnp.where(starved, 0, tokens)
    served = [_reserve_group(config, group, tokens, step, most) for group in cache.groups]
    by_head = tuple(
        evicting.reserve(config, spec, group, tokens, step, most)
        for spec, group in zip(config.by_head, cache.by_head, strict=True)
    )
    groups = tuple(group for group, _ in served)
    return Reserved(
        cache.replace(groups=groups, by_head=by_head), index, tuple(copies for _, copies in served), starved, evicted
    )


def _most_pages(config: CacheConfig, most: int) -> int:
    """Static bound on the pages that a step needs: opened by its tokens, and copied."""
    # Each new page holds at least one new token, and a slot's tokens open at most one page more than they fill.
    return min(most, most // config.rows + config.slots) + config.slots


def _new_pages(config: CacheConfig, table: BlockTable, tokens: jax.Array) -> jax.Array:
    """(B,) int32: pages each slot lacks to hold so many more tokens."""
    return pages_for(table.lengths + tokens, config.rows) - pages_for(table.lengths, config.rows)


def _unfilled(config: CacheConfig, group: GroupCache, tokens: jax.Array) -> jax.Array:
    """(B,) int32: the page that each slot with tokens goes on to fill, if others own it too; else NOWHERE."""
    lengths = group.table.lengths
    column = jnp.minimum(lengths // config.rows, config.pages_per_slot - 1)
    page = jnp.take_along_axis(group.table.pages, column[:, None], axis=1)[:, 0]
    shared = (tokens > 0) & (lengths % config.rows > 0) & (group.pool.refs.at[page].get(mode="clip") > 1)
    return jnp.where(shared, page, NOWHERE)


def _need(config: CacheConfig, group: GroupCache, tokens: jax.Array) -> jax.Array:
    """(B,) int32: pages that each slot may need. Of several owners of a page that all go on, one needs no copy."""
    shared = _unfilled(config, group, tokens) < NOWHERE
    return _new_pages(config, group.table, tokens) + shared.astype(jnp.int32)


def _evict(
    config: CacheConfig,
    cache: Cache,
    index: PrefixIndex,
    lack: jax.Array,
    step: jax.Array,
    clock: jax.Array,
    pinned_too: jax.Array,
    width: int,
) -> tuple[Cache, PrefixIndex, jax.Array]:
    """Frees up to `lack` () int32 pages of the groups that keep every row, and with each its pages in the others: pages
    that only the index owns. No pass over the pages where none are lacking."""
    pools = [group.pool for group in cache.groups]

    def evict(held: tuple[list[PagePool], PrefixIndex, jax.Array]) -> tuple[list[PagePool], PrefixIndex, jax.Array]:
        pools, index, _ = held
        candidates = prefix.evictable(index, pools[0].refs, clock, pinned_too)
        page = prefix.oldest(index, candidates, pools[0].last_use, clock, lack, width)
        pools = [page_pool.release(pool, p, step) for pool, p in zip(pools, _in_groups(index, page), strict=True)]
        return pools, prefix.remove(index, page), (page < index.size).sum(dtype=jnp.int32)

    pools, index, evicted = when(lack > 0, evict, (pools, index, jnp.int32(0)))
    groups = tuple(group.replace(pool=pool) for group, pool in zip(cache.groups, pools, strict=True))
    return cache.replace(groups=groups), index, evicted


def _evict_windows(
    cache: Cache, index: PrefixIndex, group: int, lack: jax.Array, step: jax.Array, clock: jax.Array, width: int
) -> tuple[Cache, PrefixIndex]:
    """Frees up to `lack` () int32 pages of a group that gives back what is behind its window, which only the index
    owns. Their entries stay, without a page in this group. Pinned ones go last, but go."""

    def evict(held: tuple[PagePool, PrefixIndex]) -> tuple[PagePool, PrefixIndex]:
        pool, index = held
        sister = index.sisters[:, group - 1]
        alone = pool.refs.at[sister].get(mode="fill", fill_value=0) == 1
        age = pool.last_use.at[sister].get(mode="clip")
        page = prefix.oldest(index, prefix.entered(index) & alone, age, clock, lack, width, deepest=False)
        pool = page_pool.release(pool, sister.at[page].get(mode="fill", fill_value=NOWHERE), step)
        return pool, index.replace(sisters=index.sisters.at[page, group - 1].set(NOWHERE, mode="drop"))

    old = cache.groups[group]
    pool, index = when(lack > 0, evict, (old.pool, index))
    return cache.replace(groups=_replaced(cache.groups, group, old.replace(pool=pool))), index


def _in_groups(index: PrefixIndex, page: jax.Array) -> list[jax.Array]:
    """The pages (W,) int32 of every group that belong to those of group 0; NOWHERE where there is none."""
    sisters = index.sisters.at[page].get(mode="fill", fill_value=NOWHERE)
    return [page, *(sisters[:, g] for g in range(sisters.shape[1]))]


def _reserve_group(
    config: CacheConfig, group: GroupCache, tokens: jax.Array, step: jax.Array, most: int
) -> tuple[GroupCache, Copies]:
    B, M, R, P = config.slots, config.pages_per_slot, config.rows, group.pool.free.shape[0]
    lengths, table = group.table.lengths, group.table.pages
    new = _new_pages(config, group.table, tokens)
    source = _unfilled(config, group, tokens)

    # Of the owners that write into a page now, one may keep it if there are no others.
    pool, keeps = page_pool.leave(group.pool, source)
    pool = pool.replace(refs=pool.refs.at[jnp.where(keeps, source, P)].set(1, mode="drop"))
    pool, target = page_pool.allocate(pool, (source < P) & ~keeps, step)
    row = jnp.arange(B, dtype=jnp.int32)
    table = table.at[row, jnp.where(target < P, lengths // R, M)].set(target, mode="drop")

    ends = jnp.cumsum(new, dtype=jnp.int32)
    wanted = jnp.arange(min(most, most // R + B), dtype=jnp.int32)
    slot = jnp.searchsorted(ends, wanted, side="right", method="compare_all").astype(jnp.int32)
    safe = jnp.minimum(slot, B - 1)
    column = pages_for(lengths, R)[safe] + wanted - (ends - new)[safe]
    pool, page = page_pool.allocate(pool, slot < B, step)
    table = table.at[slot, jnp.where(slot < B, column, M)].set(page, mode="drop")
    group = group.replace(pool=pool, table=BlockTable(table, lengths + tokens))
    return group, _copies(source, target, target < P)


def _copies(source: jax.Array, target: jax.Array, wanted: jax.Array) -> Copies:
    place = jnp.where(wanted, jnp.cumsum(wanted, dtype=jnp.int32) - 1, wanted.shape[0])
    zeros = jnp.zeros_like(source)
    return Copies(
        zeros.at[place].set(source, mode="drop"),
        zeros.at[place].set(target, mode="drop"),
        wanted.sum(dtype=jnp.int32),
    )


def copy_pages(
    config: CacheConfig, kv: tuple[KVPages, ...], copies: tuple[Copies, ...], backend: str = "xla"
) -> tuple[KVPages, ...]:
    """Copies K and V of whole pages in every layer, in place; no work where there is nothing to copy.

    backend: of the attention: its kernels copy the pages that they read.
    """
    if not divided_here():
        return _copy_pages(config, kv, copies, backend)
    specs = tuple(shardings(config, pages, group, MODEL) for group, pages in enumerate(kv))
    copy = functools.partial(_copy_pages, config, backend=backend)
    return on_each(copy, in_specs=(specs, PartitionSpec()), out_specs=specs)(kv, copies)


def shardings(config: CacheConfig, kv: KVPages, group: int, *over: str) -> KVPages:
    """The PartitionSpec of each array of a group's K and V: heads over `model`, rows over `seq`, if `over` has them."""
    group_spec = config.groups[group]
    model = MODEL if MODEL in over and config.parts_of(group_spec) > 1 else None
    seq = SEQ if SEQ in over and config.seq > 1 else None
    if group_spec.stored.codes is not None:
        k_pages, v_pages, *of_scales = coded.shardings(config, group_spec, model, seq)
        packed: Any = ((k_pages,) * len(kv.k), (v_pages,) * len(kv.v), (tuple(of_scales),) * len(kv.scales))
        return KVPages(*packed)

    def spec(heads: int, rows: int) -> PartitionSpec:
        return heads_and_rows(heads, rows, model, seq)

    k, v = axes_of(config.layout)
    specs: Any = ((spec(*k),) * len(kv.k), (spec(*v),) * len(kv.v), (spec(1, 2),) * len(kv.scales))
    return KVPages(*specs)


def with_shardings(config: CacheConfig, cache: Cache, where: Cache, *over: str) -> Cache:
    """`where`, a cache of PartitionSpec, with those of K and V divided over the axes `over`, too, behind their own."""

    def behind(own: Any, inner: Any) -> Any:
        return jax.tree.map(lambda a, b: PartitionSpec(*a, *b), own, inner)

    groups = [
        specs.replace(kv=behind(specs.kv, shardings(config, group.kv, g, *over)))
        for g, (group, specs) in enumerate(zip(cache.groups, where.groups, strict=True))
    ]
    by_head = [
        behind(specs, evicting.shardings(config, spec, group, *over))
        for spec, group, specs in zip(config.by_head, cache.by_head, where.by_head, strict=True)
    ]
    return Cache(tuple(groups), tuple(by_head))


def _copy_pages(
    config: CacheConfig, kv: tuple[KVPages, ...], copies: tuple[Copies, ...], backend: str
) -> tuple[KVPages, ...]:
    def copied(group: int, pages: KVPages, what: Copies) -> KVPages:
        # Stacked layers: the page of layer l is l·P further on.
        if not pages.k:
            return pages
        layers = len(config.layers_of(group)) if config.stacked else 1
        offset = jnp.arange(layers, dtype=jnp.int32) * config.pool_of(group)
        if backend.startswith("tpu"):
            source, target = ((page[:, None] + offset[None, :]).reshape(-1) for page in (what.source, what.target))
            copy = functools.partial(
                page_ops.copy_pages, source=source, target=target, count=what.count * layers, backend=backend
            )
            scales = KVPages((), (), pages.scales)  # a page's scales are no whole tiles
            return pages.replace(k=tuple(map(copy, pages.k)), scales=copy_all(scales, what, offset).scales)
        return copy_all(pages, what, offset)

    def copy_all(pages: KVPages, what: Copies, offset: jax.Array) -> KVPages:
        def copy_one(i: jax.Array, pages: KVPages) -> KVPages:
            source, target = what.source[i] + offset, what.target[i] + offset
            return jax.tree.map(lambda x: x.at[target].set(x[source]), pages)

        return jax.lax.fori_loop(0, what.count, copy_one, pages) if jax.tree.leaves(pages) else pages

    groups = tuple(copied(group, *both) for group, both in enumerate(zip(kv, copies, strict=False)))
    return groups + kv[len(groups) :]


def adopt(
    config: CacheConfig,
    cache: Cache,
    index: PrefixIndex,
    first: jax.Array,
    last: jax.Array,
    lengths: jax.Array,
    step: jax.Array,
) -> Cache:
    """Makes slots owners of the indexed pages of group 0 that stand in columns [first, last) of their block tables.

    Args:
      config: the cache's static shape.
      cache: the cache; the tables of the other groups are filled in.
      index: the prefix index.
      first: (B,) int32.
      last: (B,) int32.
      lengths: (B,) int32 rows that the slots then hold, not less than before.
      step: () int32.
    """
    before = cache.groups[0].table.lengths

    def visit(groups: Sequence[GroupCache], slot: jax.Array, column: jax.Array) -> Sequence[GroupCache]:
        page = groups[0].table.pages.at[slot, column].get(mode="fill", fill_value=NOWHERE)
        taken = []
        for spec, group, own in zip(config.groups, groups, _in_groups(index, page), strict=True):
            needed = column >= config.first_column(spec, lengths).at[slot].get(mode="clip")
            own = jnp.where(needed, own, NOWHERE)
            pool = page_pool.share(group.pool, own, step)
            table = group.table.pages.at[slot, column].set(own, mode="drop")
            taken.append(group.replace(pool=pool, table=group.table.replace(pages=table)))
        return taken

    bare: Sequence[GroupCache] = [group.replace(kv=None) for group in cache.groups]
    cache = cache.replace(groups=_with_kv(for_each_page(first, last, visit, bare), cache))
    return trim(config, _with_lengths(cache, lengths), before, step)


def _with_lengths(cache: Cache, lengths: jax.Array) -> Cache:
    groups = (group.replace(table=group.table.replace(lengths=lengths)) for group in cache.groups)
    return cache.replace(groups=tuple(groups))


def trim(config: CacheConfig, cache: Cache, before: jax.Array, step: jax.Array) -> Cache:
    """Gives back the pages that fell behind the window since the slots' lengths were `before` (B,) int32.

    Not before the step that lengthened the slots has been computed: its first token sees further back than its last.
    """
    groups = []
    for spec, group in zip(config.groups, cache.groups, strict=True):
        if config.frees(spec):
            held, table = pages_for(group.table.lengths, config.rows), group.table
            first, last = (config.first_column(spec, length) for length in (before, table.lengths))
            last = jnp.clip(last, first, jnp.maximum(held, first))

            def visit(carry: tuple[PagePool, jax.Array], slot: jax.Array, column: jax.Array):
                pool, pages = carry
                page = pages.at[slot, column].get(mode="fill", fill_value=NOWHERE)
                return page_pool.release(pool, page, step), pages.at[slot, column].set(NOWHERE, mode="drop")

            pool, pages = for_each_page(first, last, visit, (group.pool, table.pages), width=config.slots)
            group = group.replace(pool=pool, table=table.replace(pages=pages))
        groups.append(group)
    return cache.replace(groups=tuple(groups))


def fork(config: CacheConfig, cache: Cache, source: jax.Array, lengths: jax.Array, step: jax.Array) -> Cache:
    """Lets slots hold what others hold, by reference, from their own last page on.

    Args:
      config: the cache's static shape.
      cache: the cache.
      source: (B,) int32 slot whose pages each slot takes, not itself one that takes; B leaves a slot as it is.
      lengths: (B,) int32 rows that it then holds; at least what it holds, and at most what the source holds. What it
        holds already are whole pages that are the source's, too, and the source has not given back what it needs.
      step: () int32.
    """
    groups = []
    takes = source < config.slots
    origin = jnp.minimum(source, config.slots - 1)
    before = cache.groups[0].table.lengths
    for spec, group in zip(config.groups, cache.groups, strict=True):
        least = config.first_column(spec, lengths)
        first = jnp.where(takes, pages_for(group.table.lengths, config.rows), 0)
        last = jnp.where(takes, pages_for(lengths, config.rows), 0)

        def visit(held: tuple[PagePool, jax.Array], slot: jax.Array, column: jax.Array, least: jax.Array = least):
            pool, table = held
            page = table.at[origin.at[slot].get(mode="clip"), column].get(mode="clip")
            page = jnp.where((slot < config.slots) & (column >= least.at[slot].get(mode="clip")), page, NOWHERE)
            return page_pool.share(pool, page, step), table.at[slot, column].set(page, mode="drop")

        pool, table = for_each_page(first, last, visit, (group.pool, group.table.pages))
        groups.append(group.replace(pool=pool, table=BlockTable(table, jnp.where(takes, lengths, group.table.lengths))))
    return trim(config, cache.replace(groups=tuple(groups)), before, step)


def reparent(config: CacheConfig, cache: Cache, source: jax.Array, step: jax.Array) -> Cache:
    """Every slot holds what slot source[b] held before, by reference, all of them at once.

    Pages that lose their last owner are free. Only references move: the counting follows the pages in which a slot
    differs from its source, so a beginning that beams share costs nothing, and no page's K or V is touched. Pages that
    the prefix index owns as well stay its own; their last use there is not renewed.

    Args:
      config: the cache's static shape.
      cache: the cache.
      source: (B,) int32 slots, in any order and as often as one likes; a slot that names itself stays as it is.
      step: () int32, recorded as the last use of the pages that gain or lose an owner.
    """
    column = jnp.arange(config.pages_per_slot, dtype=jnp.int32)
    held = pages_for(cache.groups[0].table.lengths, config.rows)
    wanted = held[source]
    old = [group.table.pages for group in cache.groups]
    new = [pages[source] for pages in old]
    # From the first column on that differs in any group. Where it does not, a reference comes and goes again.
    equal = column[None, :] < jnp.minimum(held, wanted)[:, None]
    for before, after in zip(old, new, strict=True):
        equal &= before == after
    first = jnp.cumprod(equal, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

    def count(update: Callable[[PagePool, jax.Array, jax.Array], PagePool], tables: list[jax.Array]) -> Callable:
        def visit(pools: list[PagePool], slot: jax.Array, column: jax.Array) -> list[PagePool]:
            pages = [table.at[slot, column].get(mode="fill", fill_value=NOWHERE) for table in tables]
            return [update(pool, page, step) for pool, page in zip(pools, pages, strict=True)]

        return visit

    # Every reference is taken before one is given back: no page is free in between.
    pools = for_each_page(first, wanted, count(page_pool.share, new), [group.pool for group in cache.groups])
    pools = for_each_page(first, held, count(page_pool.release, old), pools)
    groups = [
        group.replace(pool=pool, table=BlockTable(pages, group.table.lengths[source]))
        for group, pool, pages in zip(cache.groups, pools, new, strict=True)
    ]
    return cache.replace(groups=tuple(groups))


def swap(
    config: CacheConfig, cache: Cache, index: PrefixIndex, column: jax.Array, twin: jax.Array, step: jax.Array
) -> tuple[Cache, PrefixIndex]:
    """Puts indexed pages in place of slots' own pages with the same tokens, which are given back.

    An entry that has lost its page in a group gets the slot's.

    Args:
      config: the cache's static shape.
      cache: the cache.
      index: the prefix index.
      column: (B,) int32 of the block tables.
      twin: (B,) int32 page of group 0; P leaves a slot as it is.
      step: () int32.
    """
    row = jnp.arange(config.slots, dtype=jnp.int32)
    wanted = twin < config.pool_pages

    def swapped(held: tuple[Sequence[GroupCache], PrefixIndex]) -> tuple[Sequence[GroupCache], PrefixIndex]:
        groups, index = held
        result = []
        for g, (group, page) in enumerate(zip(groups, _in_groups(index, twin), strict=True)):
            own = jnp.where(wanted, group.table.pages[row, column], NOWHERE)
            lost = wanted & (page >= group.pool.free.shape[0])
            if g:  # of several slots with such a page the last one gives its own
                sisters = index.sisters.at[jnp.where(lost, twin, NOWHERE), g - 1].set(own, mode="drop")
                index = index.replace(sisters=sisters)
                page = _in_groups(index, twin)[g]
            pool = page_pool.share(group.pool, page, step)
            if g:
                given = lost & (page == own)
                pool = page_pool.share(pool, jnp.where(given, own, NOWHERE), step)
            pool = page_pool.release(pool, own, step)
            place = jnp.where(wanted, column, config.pages_per_slot)
            table = group.table.pages.at[row, place].set(page, mode="drop")
            result.append(group.replace(pool=pool, table=group.table.replace(pages=table)))
        return result, index

    bare: Sequence[GroupCache] = [group.replace(kv=None) for group in cache.groups]
    groups, index = when(wanted.any(), swapped, (bare, index))
    return cache.replace(groups=_with_kv(groups, cache)), index


def sisters(cache: Cache, row: jax.Array, column: jax.Array) -> jax.Array:
    """(W, G - 1) int32: the pages of all groups but the first at these places of their block tables."""
    pages = [group.table.pages.at[row, column].get(mode="clip") for group in cache.groups[1:]]
    return jnp.stack(pages, axis=1) if pages else jnp.zeros((row.shape[0], 0), jnp.int32)


def own(cache: Cache, page: jax.Array, sister_pages: jax.Array, step: jax.Array) -> Cache:
    """Adds the index as an owner of pages (W,) int32 of group 0, P skipped, and of their sisters (W, G - 1)."""
    first, *others = cache.groups
    groups = [first.replace(pool=page_pool.share(first.pool, page, step))]
    for g, group in enumerate(others):
        entered = jnp.where(page < first.pool.free.shape[0], sister_pages[:, g], NOWHERE)
        groups.append(group.replace(pool=page_pool.share(group.pool, entered, step)))
    return cache.replace(groups=tuple(groups))


def release(
    config: CacheConfig,
    cache: Cache,
    index: PrefixIndex | None,
    ended: jax.Array,
    step: jax.Array,
    live: jax.Array,
    pinned: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[Cache, PrefixIndex | None]:
    """Gives back every page of the slots in (B,) bool `ended` and sets their lengths to 0.

    Pages that the prefix index owns stay. The work follows the number of pages given back; no page's K or V is
    touched.

    Args:
      config: the cache's static shape.
      cache: the cache.
      index: the prefix index, or None where nothing is shared.
      ended: (B,) bool.
      step: () int32, the last use of the pages that stay.
      live: () int32 second until which they live.
      pinned: slot (W,), column (W,) → (W,) int32 second up to which that page is pinned.
    """
    table = cache.groups[0].table
    held = jnp.where(ended, pages_for(table.lengths, config.rows), 0)

    def visit(carry: tuple, slot: jax.Array, column: jax.Array) -> tuple:
        pools, index = carry
        pages = [group.table.pages.at[slot, column].get(mode="fill", fill_value=NOWHERE) for group in cache.groups]
        pools = [page_pool.release(pool, page, step) for pool, page in zip(pools, pages, strict=True)]
        if index is not None:
            index = prefix.touch(index, pages[0], jnp.broadcast_to(live, slot.shape), pinned(slot, column))
        return pools, index

    pools, index = for_each_page(jnp.zeros_like(held), held, visit, ([group.pool for group in cache.groups], index))
    lengths = jnp.where(ended, 0, table.lengths)
    groups = [
        group.replace(pool=pool, table=group.table.replace(lengths=lengths))
        for group, pool in zip(cache.groups, pools, strict=True)
    ]
    by_head = tuple(
        evicting.free(config, spec, group, ended, step)
        for spec, group in zip(config.by_head, cache.by_head, strict=True)
    )
    return cache.replace(groups=tuple(groups), by_head=by_head), index


def evict(config: CacheConfig, cache: Cache, due: jax.Array, computed: jax.Array, step: jax.Array) -> Cache:
    """Lets the slots in (B,) bool `due`, of `computed` (B,) int32 tokens, keep no more rows than their budget."""
    pairs = zip(config.by_head, cache.by_head, strict=True)
    by_head = tuple(evicting.evict(config, spec, group, due, computed, step) for spec, group in pairs)
    return cache.replace(by_head=by_head)


def _with_kv(groups: Sequence[GroupCache], cache: Cache) -> tuple[GroupCache, ...]:
    return tuple(bare.replace(kv=group.kv) for bare, group in zip(groups, cache.groups, strict=True))


def pages_of(cache: Cache) -> tuple[Any, ...]:
    """The K and V of every group, of those by head behind the others: what a step's computation changes."""
    return (*(group.kv for group in cache.groups), *(group.kv for group in cache.by_head))


def with_pages(cache: Cache, kv: Sequence[Any]) -> Cache:
    """The cache with other K and V."""
    groups, by_head = kv[: len(cache.groups)], kv[len(cache.groups) :]
    return cache.replace(
        groups=tuple(group.replace(kv=pages) for group, pages in zip(cache.groups, groups, strict=True)),
        by_head=tuple(group.replace(kv=pages) for group, pages in zip(cache.by_head, by_head, strict=True)),
    )


def without_pages(cache: Cache) -> Cache:
    """The cache with None for K and V, where only tables and pools are at work."""
    return with_pages(cache, [None] * len(pages_of(cache)))


class Placement(struct.PyTreeNode):
    """Where a step's packed tokens belong; computed once, used by every layer.

    Attributes:
      slots: (T,) int32 slot of each token, B for padding.
      positions: (T,) int32 position of each token in its sequence.
      row_starts: (B + 1,) int32 first packed token of each slot.
      cuts: (B,) int32 tokens after which rows are evicted next, where they are.
      context: (B,) int32 tokens of the prompts, up to where rows are evicted first; None: all of them.
      max_query: static; most tokens a slot has.
      divided: static; whether each chip of the mesh axis `seq` has q, k and v of its part of the tokens alone, equal
        parts in the order of the tokens.
    """

    slots: jax.Array
    positions: jax.Array
    row_starts: jax.Array
    max_query: int = struct.field(pytree_node=False)
    cuts: jax.Array | None = None
    context: jax.Array | None = None
    divided: bool = struct.field(pytree_node=False, default=False)

    def places(
        self, config: CacheConfig, table: BlockTable, offset: jax.Array, total: int
    ) -> tuple[jax.Array, jax.Array, int]:
        """Where each token's row lies on this chip.

        Returns:
          (T,) int32 pages, `offset` further on than the table says, `total` for padding and for rows of other chips;
          (T,) int32 rows there; and in how many runs of consecutive rows they come, at most.
        """
        slots, position, n = jnp.minimum(self.slots, config.slots - 1), self.positions, config.seq
        page = table.pages[slots, jnp.minimum(position // config.rows, config.pages_per_slot - 1)]
        page = jnp.where(self.slots < config.slots, page + offset, total)
        deal, R = spread.deal(n), config.rows // n
        if deal is None:
            return page, position % R, config.slots
        page = jnp.where(deal.owns(position, R), page, total)
        return page, deal.rows_before(position, R) % R, config.slots + position.shape[0] // R


def attend(
    config: CacheConfig,
    placement: Placement,
    cache: Cache,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    scale: float,
    *,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    up: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[Cache, jax.Array]:
    """Writes K and V of the step's tokens into their pages, then attends over the pages.

    A layer that shares another's rows (`KVSpec.shares`) writes nothing: that layer has, before it in the same step.

    Args:
      config: the cache's static shape.
      placement: where the tokens belong; `reserve` has already made room for them.
      cache: the cache.
      layer: Python int; a traced int32 only when the cache is stacked and all layers have one spec.
      q: (T, N, H).
      k: (T, K, H), position already encoded; None where the layer shares another's rows.
      v: (T, K, Hv); None there, and where the layer's spec is latent.
      scale: multiplies q·k.
      soft_cap: as in AttentionSpec.
      sinks: (N,) float32, as in `paged_attention`.
      slopes: (N,) float32, as in `paged_attention`.
      up: (N, h + Hv, C) of latents, as in `paged_attention`; then q is (T, N, h + r).
      backend: attention backend.

    Returns:
      The new cache and out (T, N, Hv).
    """
    if not config.stacked and (k is None) != (config.specs[int(layer)].shares is not None):
        raise ValueError(
            f"layer {layer} has no k, or a spec that shares another layer's rows: it needs both or neither"
        )
    if config.eviction is not None and (config.stacked or config.evicts(config.specs[int(layer)])):
        assert k is not None  # shared rows are not evicted (`kvjax.plans`)
        h = 0 if config.stacked else config.by_head.index(config.specs[int(layer)])
        heads, out = evicting.attend(
            config, config.by_head[h], placement, cache.by_head[h], layer, q, k, v, scale,
            soft_cap=soft_cap, sinks=sinks, slopes=slopes, up=up, backend=backend,
        )  # fmt: skip
        return cache.replace(by_head=_replaced(cache.by_head, h, heads)), out
    places = config.places_of(0 if config.stacked else int(layer))
    arrays = [0 if config.stacked else index for _, index in places]
    if config.stacked:
        offsets = tuple(jnp.asarray(layer, jnp.int32) * config.pool_of(g) for g, _ in places)
    else:
        offsets = (jnp.int32(0),) * len(places)
    groups, spec = [cache.groups[g] for g, _ in places], config.groups[places[0][0]]
    pages = tuple(_of_array(group.kv, array) for group, array in zip(groups, arrays, strict=True))
    tables = tuple(group.table for group in groups)
    held = config.on_chip(spec)
    what = AttentionSpec(
        scale, spec.window, soft_cap, spec.value_dim if spec.latent else None, config.layout, config.lanes_of(held)
    )
    features = {"sinks": sinks, "slopes": slopes, "up": up}
    attend_one = _attend if spec.stored.codes is None else coded.attend
    one = functools.partial(attend_one, config, held, what, backend)
    if not divided_here():
        new, out = one(placement, pages, q, k, v, tables, offsets, features)
    else:
        parts, N = config.parts_of(spec), q.shape[1]
        repeats = parts * held.kv_heads // spec.kv_heads  # a kv head lies on as many chips
        if repeats > 1:
            k, v = (None if x is None else jnp.repeat(x, repeats, axis=1) for x in (k, v))
        by_heads = MODEL if N % config.model == 0 and (parts > 1 or held.kv_heads == 1) else None
        where = tuple(shardings(config, x, g, MODEL) for x, (g, _) in zip(pages, places, strict=True))
        of_kv = PartitionSpec(None, MODEL if parts > 1 else None)
        of_features = {name: None if x is None else PartitionSpec(by_heads) for name, x in features.items()}
        everywhere = PartitionSpec()
        new, out = on_each(
            one,
            in_specs=(everywhere, where, PartitionSpec(None, by_heads), None if k is None else of_kv,
                      None if v is None else of_kv, everywhere, everywhere, of_features),
            out_specs=(where, PartitionSpec(None, by_heads)),
        )(placement, pages, q, k, v, tables, offsets, features)  # fmt: skip
    changed = cache.groups
    for (g, _), group, array, kv in zip(places, groups, arrays, new, strict=True):
        changed = _replaced(changed, g, group.replace(kv=_with_array(group.kv, array, kv)))
    return cache.replace(groups=changed), out


def _of_array(kv: KVPages, array: int) -> KVPages:
    """The pages of one array of a group."""
    return KVPages(*(x[array : array + 1] for x in (kv.k, kv.v, kv.scales)))


def _with_array(kv: KVPages, array: int, new: KVPages) -> KVPages:
    parts = zip((kv.k, kv.v, kv.scales), (new.k, new.v, new.scales), strict=True)
    return KVPages(*(_replaced(old, array, x[0]) if x else () for old, x in parts))


def _attend(
    config: CacheConfig,
    spec: KVSpec,
    what: AttentionSpec,
    backend: str,
    placement: Placement,
    of_arrays: tuple[KVPages, ...],
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    tables: tuple[BlockTable, ...],
    offsets: tuple[jax.Array, ...],
    features: dict[str, jax.Array | None],
) -> tuple[tuple[KVPages, ...], jax.Array]:
    """`attend` on one chip, with what it holds of q, k, v and of the pages of one array of the group."""
    (pages,), (table,), (offset,), n = of_arrays, tables, offsets, config.seq
    deal, position = spread.deal(n), placement.positions
    page, row, runs = placement.places(config, table, offset, pages.k[0].shape[0])
    of_rows = None
    if k is not None and spec.scales:
        k, v, of_rows = quantize_kv(k, v, spec.storage)
    new = k, v, of_rows
    if placement.divided:  # every chip writes those of its own pages
        k, v, of_rows = (None if x is None else spread.whole(x, n) for x in (k, v, of_rows))
    scales = pages.scales[0] if pages.scales else None
    k_pages, v_pages = pages.k[0], pages.v[0] if pages.v else None
    if k is not None:
        if of_rows is not None:
            scales = pages.scales[0].at[page, :, row].set(of_rows, mode="drop")
        k_pages, v_pages = write_rows(
            k_pages, v_pages, k, v, page, row, config.layout,
            slots=runs, max_query=placement.max_query, backend=backend,
        )  # fmt: skip
    kept = KVPages((k_pages,), () if v_pages is None else (v_pages,), () if scales is None else (scales,))

    def over_pages(q: jax.Array) -> jax.Array:
        """Queries go to every chip, and what its rows give comes back (pass-Q, 2411.01783)."""
        if placement.divided:
            q = spread.whole(q, n)
        sinks = features["sinks"] if deal is None else None  # of dealt rows, they join the denominator of the whole
        out, lse = paged_attention(
            q, k_pages, v_pages, table.pages + offset, table.lengths, placement.row_starts, what,
            sinks=sinks, slopes=features["slopes"], up=features["up"], scales=scales, deal=deal,
            max_query=placement.max_query, with_lse=deal is not None, backend=backend,
        )  # fmt: skip
        if lse is None:
            return out
        return spread.merged(out, lse, features["sinks"], placement.divided, n)[0].astype(out.dtype)

    def around_the_ring(q: jax.Array) -> jax.Array:
        """Keys and values of the step go round (pass-KV); there are no others."""
        where, whose = spread.own(position, n), spread.own(placement.slots, n)
        whose = jnp.where(whose < config.slots, whose, -1)
        k, v, of_rows = new
        assert k is not None and v is not None
        if of_rows is None:
            k, v = (x.astype(spec.storage).astype(q.dtype) for x in (k, v))
        return ring_attention(
            q, k, v, jnp.maximum(where, 0), jnp.maximum(where, 0), what, axis=SEQ, q_segments=whose, kv_segments=whose,
            scales=of_rows, sinks=features["sinks"], backend=backend,
        )[0]  # fmt: skip

    if not (placement.divided and k is not None and _goes_round(q, spec, what, features)):
        return (kept,), over_pages(q)
    tokens = placement.row_starts[1:] - placement.row_starts[:-1]
    alone = ((tokens == 0) | (table.lengths == tokens)).all()  # nobody has rows of an earlier step
    return (kept,), jax.lax.cond(every_engine(alone), around_the_ring, over_pages, q)


def _goes_round(q: jax.Array, spec: KVSpec, what: AttentionSpec, features: dict[str, jax.Array | None]) -> bool:
    """Whether prompts without earlier rows are computed by passing their K and V from chip to chip: of `RING` tokens a
    chip on, with what the ring knows."""
    known = q.dtype.name in ("float32", "bfloat16") and not spec.latent and features["slopes"] is None
    return known and q.shape[0] >= RING and what.sink_rows == 0


def _replaced(items: Sequence, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
