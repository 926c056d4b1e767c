"""Layers whose rows are evicted: every kv head of every layer has its own pages, block table and length.

A step appends the rows of its tokens to every head; a policy (`kvjax.eviction`) then says which rows of a head stay.
They are moved together, and whole pages go back to the pool, all inside the loop. Rows keep the order of their tokens,
so attention is causal by the order of the rows, and RoPE is in the keys already. What a step reads of the rows is
`kvjax.reading`'s: where positions are places in the cache, queries are turned for it; Quest reads a few pages.
When rows are evicted is `kvjax.eviction_rule`'s.

Over the mesh axis `model` each chip has a pool for the heads that it holds. What is done to a cache is done on every
chip to its own, by page numbers of its own, and no chip waits for another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from kvjax import pages as page_pool
from kvjax import reading
from kvjax.control import for_each_page, when
from kvjax.errors import UserError
from kvjax.eviction import (
    Moments,
    Policy,
    Rows,
    adakv,
    add_queries,
    gather,
    no_moments,
    pyramid,
    select,
)
from kvjax.eviction.quest import add_keys, no_bounds
from kvjax.eviction_rule import NEVER, Eviction
from kvjax.pages import NOWHERE, PagePool, pages_for
from kvjax.pallas_kernels import (
    AttentionSpec,
    Lanes,
    add_row_weights,
    init_pages,
    paged_attention,
    read_pages,
    write_pages,
    write_rows,
)
from kvjax.pallas_kernels.paged_attention.xla import BLOCK, query_blocks
from kvjax.pallas_kernels.quantize import dequantize, quantize_kv
from kvjax.sharding import MODEL, divided_here, on_each
from kvjax.types import KVSpec, Rotation

if TYPE_CHECKING:
    from kvjax.cache import CacheConfig, Placement


class HeadPages(struct.PyTreeNode):
    """Rows of pages of one head, of all layers and heads.

    Attributes:
      k: one array, P pages in its first axis, as the store lays out pages of one head.
      v: the same for values; empty where they lie in the same array.
      scales: one array (P, 2, R) float32 where rows are codes, (P, 1, R) of latents; else empty.
      positions: (P, R) int32 of the rows' tokens.
      weights: (P, R) float32 and
      seen: (P, R) int32, as `kvjax.eviction.Rows` has them; None where the policy watches no query.
      moments: of the queries of each layer and slot, (L, B, …), each times √H of the softmax's scale, so that H^−½ is
        the scale; None where the policy asks for none.
      bounds: (P, 2, H) least and greatest number of each channel of the keys; None where all pages are read.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]
    positions: jax.Array
    weights: jax.Array | None
    seen: jax.Array | None
    moments: Moments | None = None
    bounds: jax.Array | None = None


class HeadTable(struct.PyTreeNode):
    """Where the rows of each head lie.

    Attributes:
      pages: (L, B, K, M) int32; entries behind the length are stale.
      lengths: (L, B, K) int32 rows held.
    """

    pages: jax.Array
    lengths: jax.Array


class HeadCache(struct.PyTreeNode):
    """The layers that share a spec whose rows are evicted.

    Where their heads are divided over the C chips of the axis `model` (`CacheConfig.parts_of`), axes P are the pools of
    all chips in turn, C·P, axes K the heads that they hold, and `pool.height` is (C,).

    Attributes:
      kv: their rows.
      pool: which pages are free.
      table: whose pages are whose.
    """

    kv: HeadPages
    pool: PagePool
    table: HeadTable


# --- the static shape ---------------------------------------------------------------------------------------
def _lanes(spec: KVSpec) -> Lanes:
    return Lanes(1, spec.key_dim, spec.value_dim, spec.latent)


def _heads(config: CacheConfig, spec: KVSpec) -> int:
    """Heads of all layers with this spec, of one slot, on a chip."""
    return len(config.layers_with(spec)) * config.on_chip(spec).kv_heads


def pool_pages(config: CacheConfig, spec: KVSpec) -> int:
    """P, on a chip."""
    if config.head_pages is None:
        return config.slots * config.pages_per_slot * _heads(config, spec)
    return config.head_pages[config.by_head.index(spec)]


def page_bytes(config: CacheConfig, spec: KVSpec) -> int:
    """Bytes of a page, with what is noted of its rows."""
    assert config.eviction is not None
    one = dataclasses.replace(spec, kv_heads=1)
    noted = 4 if config.eviction.policy.watch == "none" else 12
    bounds = 0 if config.eviction.policy.reads is None else 2 * spec.key_dim * _bounds_dtype(spec).itemsize
    return config.rows * (config.stored_row_bytes(one) + noted) + bounds


def _bounds_dtype(spec: KVSpec) -> jnp.dtype:
    """Of keys before they become codes."""
    return jnp.dtype("float32" if spec.scales else spec.storage)


def moments_bytes(config: CacheConfig, spec: KVSpec) -> int:
    """Bytes of what is known of the queries of the layers with this spec, on a chip."""
    assert config.eviction is not None
    if not config.eviction.policy.moments:
        return 0
    heads = config.query_heads // config.parts_of(spec)
    each = 4 + 4 * heads * spec.key_dim * (spec.key_dim + 1)
    return len(config.layers_with(spec)) * config.slots * each


def init(config: CacheConfig, spec: KVSpec) -> HeadCache:
    """An empty cache of the layers with this spec."""
    assert config.eviction is not None
    parts, each = config.parts_of(spec), pool_pages(config, spec)
    L, B, K, M = len(config.layers_with(spec)), config.slots, config.on_chip(spec).kv_heads, config.pages_per_slot
    P, R, dtype = parts * each, config.rows, jnp.dtype(spec.storage)
    k, v = init_pages(P, R, _lanes(spec), dtype, config.layout)
    scales = (jnp.zeros((P, 1 if spec.latent else 2, R)),) if spec.scales else ()
    watches, moments = config.eviction.policy.watch != "none", None
    if config.eviction.policy.moments:
        one = no_moments(config.query_heads, spec.key_dim)
        moments = jax.tree.map(lambda x: jnp.zeros((L, B, *x.shape), x.dtype), one)
    kv = HeadPages(
        k=(k,),
        v=() if v is None else (v,),
        scales=scales,
        positions=jnp.zeros((P, R), jnp.int32),
        weights=jnp.zeros((P, R)) if watches else None,
        seen=jnp.zeros((P, R), jnp.int32) if watches else None,
        moments=moments,
        bounds=None if config.eviction.policy.reads is None else no_bounds(P, spec.key_dim, _bounds_dtype(spec)),
    )
    table = HeadTable(jnp.zeros((L, B, parts * K, M), jnp.int32), jnp.zeros((L, B, parts * K), jnp.int32))
    pool = page_pool.init(each)
    if parts > 1:
        pool = jax.tree.map(lambda x: jnp.tile(x, parts), pool)  # a height is one number of each
    return HeadCache(kv, pool, table)


def pages_in_use(config: CacheConfig, spec: KVSpec, pool: PagePool) -> jax.Array:
    """() int32: pages that have an owner, on the chip that has most of them."""
    return pool_pages(config, spec) - pool.height.min()


def shardings(config: CacheConfig, spec: KVSpec, cache: HeadCache, *over: str) -> HeadCache:
    """The PartitionSpec of each array: heads, and the pools of those that hold them, over `model`, if `over` has it."""
    own = by_head = PartitionSpec()
    if MODEL in over and config.parts_of(spec) > 1:
        own, by_head = PartitionSpec(MODEL), PartitionSpec(None, None, MODEL)
    moments: Any = (PartitionSpec(), by_head, by_head)
    kv = jax.tree.map(lambda _: own, cache.kv.replace(moments=None))
    if cache.kv.moments is not None:
        kv = kv.replace(moments=Moments(*moments))
    return HeadCache(kv, jax.tree.map(lambda _: own, cache.pool), jax.tree.map(lambda _: by_head, cache.table))


def _by_chip(
    config: CacheConfig, spec: KVSpec, change: Callable[..., HeadCache], cache: HeadCache, *args: Any
) -> HeadCache:
    """change(cache, *args) on each chip, with what it holds of the cache, and all of the arguments."""
    if not divided_here():
        return change(cache, *args)
    parts, where = config.parts_of(spec), shardings(config, spec, cache, MODEL)

    def with_height(cache: HeadCache, shape: tuple[int, ...]) -> HeadCache:
        if parts == 1:
            return cache
        return cache.replace(pool=cache.pool.replace(height=cache.pool.height.reshape(shape)))

    def one(cache: HeadCache, *args: Any) -> HeadCache:
        return with_height(change(with_height(cache, ()), *args), (1,))

    return on_each(one, in_specs=(where, *(PartitionSpec(),) * len(args)), out_specs=where)(cache, *args)


# --- pages --------------------------------------------------------------------------------------------------
def claims(config: CacheConfig, spec: KVSpec, prompt: jax.Array, limit: jax.Array, computed: jax.Array) -> jax.Array:
    """(B,) int32: pages that requests may come to hold, from `computed` tokens on to `limit`, on any chip."""
    assert config.eviction is not None
    most, all_rows = config.eviction.most_rows(prompt, limit, computed), pages_for(limit - 1, config.rows)
    heads = config.eviction.whole_heads(config.layers_with(spec))
    parts = config.parts_of(spec) if heads.shape[1] > 1 else 1
    whole = int(heads.reshape(len(heads), parts, -1).sum((0, 2)).max())
    # Heads and layers share a budget in parts that each round up.
    some = jnp.minimum(pages_for(most, config.rows) + 1, all_rows)
    return (_heads(config, spec) - whole) * some + whole * all_rows


def reserve(
    config: CacheConfig, spec: KVSpec, cache: HeadCache, tokens: jax.Array, step: jax.Array, most: int
) -> HeadCache:
    """Lengthens every head of the slots by their tokens (B,) int32 and takes the pages that needs; `most` bounds their
    sum. Pages suffice: requests enter only where their `claims` can be met."""
    return _by_chip(config, spec, functools.partial(_reserve, config, most), cache, tokens, step)


def _reserve(config: CacheConfig, most: int, cache: HeadCache, tokens: jax.Array, step: jax.Array) -> HeadCache:
    L, B, K, M = cache.table.pages.shape
    old = cache.table.lengths
    lengths = old + tokens[None, :, None]
    new = (pages_for(lengths, config.rows) - pages_for(old, config.rows)).reshape(-1)
    width = L * K * min(most, most // config.rows + B)

    def take(held: tuple[PagePool, jax.Array]) -> tuple[PagePool, jax.Array]:
        pool, table = held
        ends = jnp.cumsum(new, dtype=jnp.int32)
        wanted = jnp.arange(width, dtype=jnp.int32)
        head = jnp.searchsorted(ends, wanted, side="right", method="scan").astype(jnp.int32)
        safe = jnp.minimum(head, L * B * K - 1)
        column = pages_for(old, config.rows).reshape(-1)[safe] + wanted - (ends - new)[safe]
        there = head < L * B * K
        pool, page = page_pool.allocate(pool, there, step)
        place = jnp.where(there, column, M)
        return pool, table.reshape(-1, M).at[head, place].set(page, mode="drop").reshape(table.shape)

    pool, table = when((new > 0).any(), take, (cache.pool, cache.table.pages))
    return cache.replace(pool=pool, table=HeadTable(table, lengths))


def free(config: CacheConfig, spec: KVSpec, cache: HeadCache, ended: jax.Array, step: jax.Array) -> HeadCache:
    """Takes all rows from the slots in (B,) bool `ended`, and gives back their pages."""

    def freed(cache: HeadCache, ended: jax.Array, step: jax.Array) -> HeadCache:
        return _release(config, cache, jnp.where(ended[None, :, None], 0, cache.table.lengths), step)

    return _by_chip(config, spec, freed, cache, ended, step)


def _release(config: CacheConfig, cache: HeadCache, lengths: jax.Array, step: jax.Array) -> HeadCache:
    """Shortens heads to (L, B, K) int32 rows, no more than they hold, and gives back the pages that leaves empty."""
    pages = cache.table.pages.reshape(-1, cache.table.pages.shape[-1])
    first, last = (pages_for(x, config.rows).reshape(-1) for x in (lengths, cache.table.lengths))

    def visit(pool: PagePool, head: jax.Array, column: jax.Array) -> PagePool:
        return page_pool.release(pool, pages.at[head, column].get(mode="fill", fill_value=NOWHERE), step)

    def freed(pool: PagePool) -> PagePool:
        return for_each_page(first, last, visit, pool)

    pool = when((first < last).any(), freed, cache.pool)
    return cache.replace(pool=pool, table=cache.table.replace(lengths=lengths))


# --- attention ----------------------------------------------------------------------------------------------
def attend(
    config: CacheConfig,
    spec: KVSpec,
    placement: Placement,
    cache: HeadCache,
    layer: int | jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    scale: float,
    *,
    soft_cap: float | None,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    up: jax.Array | None,
    backend: str,
) -> tuple[HeadCache, jax.Array]:
    """As `kvjax.cache.attend`; every token's row is appended to each of its layer's heads."""
    if slopes is not None:
        raise UserError("Rows cannot be evicted under ALiBi, whose biases count the rows between two tokens.")
    l = layer if config.stacked else config.layers_with(spec).index(int(layer))
    pages, lengths = (
        jax.lax.dynamic_index_in_dim(x, l, keepdims=False) for x in (cache.table.pages, cache.table.lengths)
    )
    one = functools.partial(_attend, config, spec, scale, soft_cap, backend, None if config.stacked else int(layer))
    given = placement, cache.kv, pages, lengths, jnp.asarray(layer, jnp.int32), jnp.asarray(l, jnp.int32)
    features = {"sinks": sinks, "up": up}
    if not divided_here():
        kv, out = one(*given, q, k, v, features)
    else:
        parts, N = config.parts_of(spec), q.shape[1]
        repeats = parts * config.on_chip(spec).kv_heads // spec.kv_heads  # a kv head lies on as many chips
        if repeats > 1:
            k, v = jnp.repeat(k, repeats, axis=1), None if v is None else jnp.repeat(v, repeats, axis=1)
        queries = MODEL if N % config.model == 0 and (parts > 1 or spec.kv_heads == 1) else None
        rows = MODEL if parts > 1 else None
        everywhere, by_head = PartitionSpec(), PartitionSpec(None, rows)
        where = shardings(config, spec, cache, MODEL).kv
        of_features = {name: None if x is None else PartitionSpec(queries) for name, x in features.items()}
        kv, out = on_each(
            one,
            in_specs=(everywhere, where, by_head, by_head, everywhere, everywhere, PartitionSpec(None, queries),
                      by_head, None if v is None else by_head, of_features),
            out_specs=(where, PartitionSpec(None, queries)),
        )(*given, q, k, v, features)  # fmt: skip
    return cache.replace(kv=kv), out


def _attend(
    config: CacheConfig,
    spec: KVSpec,
    scale: float,
    soft_cap: float | None,
    backend: str,
    static_layer: int | None,
    placement: Placement,
    kv: HeadPages,
    pages: jax.Array,
    lengths: jax.Array,
    layer: int | jax.Array,
    l: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    features: dict[str, jax.Array | None],
) -> tuple[HeadPages, jax.Array]:
    """`attend` on one chip, with what it holds of the pages and of q, k and v: pages (B, K, M), lengths (B, K)."""
    assert config.eviction is not None
    layer = layer if static_layer is None else static_layer
    sinks, up = features["sinks"], features["up"]
    kv = _written(config, spec, placement, kv, pages, lengths, k, v, backend)
    latent = spec.value_dim if spec.latent else None
    lanes = _lanes(spec) if config.layout == "joined" else None
    what = AttentionSpec(scale, None, soft_cap, latent, config.layout, lanes)
    watched = _watched(config.eviction, placement)
    if (watched is not None or kv.moments is not None or kv.bounds is not None) and up is not None:
        name = config.eviction.policy.name
        raise UserError(
            f"Eviction policy {name!r} watches queries, which meet expanded latents: take knorm or streaming."
        )
    turned = _turned(config, layer)
    if kv.moments is not None:
        gathered = _gathered(config.eviction.policy, placement, kv.moments, l, q, scale, turned, lengths)
        kv = kv.replace(moments=gathered)
    over_rows = functools.partial(
        paged_attention, k_pages=kv.k[0], v_pages=kv.v[0] if kv.v else None, spec=what, up=up,
        scales=kv.scales[0] if kv.scales else None, backend=backend,
    )  # fmt: skip
    where, lse = (placement, over_rows, q, pages, lengths, sinks), None
    if kv.bounds is not None:
        out = reading.by_pages(config.eviction, *where, kv.bounds, layer, config.rows)
    elif config.eviction.policy.positions == "slot" and config.eviction.policy.sinks and turned is not None:
        out = reading.by_place(config.eviction, *where, *turned)
    else:
        out, lse = reading.over_all(
            over_rows, q, pages, sinks, watched is not None, lengths=lengths, row_starts=placement.row_starts,
            max_query=placement.max_query,
        )  # fmt: skip
    if watched is not None:
        assert lse is not None and kv.weights is not None and kv.seen is not None
        weights, seen = add_row_weights(
            kv.weights, kv.seen, q, lse, watched, kv.k[0], kv.v[0] if kv.v else None, pages, lengths,
            placement.row_starts, what, _lanes(spec), scales=kv.scales[0] if kv.scales else None,
            max_query=placement.max_query,
        )  # fmt: skip
        kv = kv.replace(weights=weights, seen=seen)
        # The next layer writes into the pages that this pass reads. It waits for `out`, so `out` waits for the pass:
        # else the CPU's compiler copies all pages, in every layer. A barrier it drops; that counts are never negative
        # it cannot know.
        out = jnp.where(seen[0, 0] >= 0, out, jnp.zeros_like(out))
    return kv, out


def _turned(config: CacheConfig, layer: int | jax.Array) -> tuple[Rotation, jax.Array] | None:
    """How a layer turns queries, and () bool whether it does. None: it does not, or the policy does not ask."""
    assert config.eviction is not None
    all_layers = config.eviction.rotations
    if not all_layers:
        return None
    if not config.stacked:
        one = all_layers[int(layer)]
        return None if one is None else (one, jnp.bool_(True))
    several = {one for one in all_layers if one is not None}
    if len(several) > 1:
        raise UserError("Layers that turn queries differently cannot be scanned: load with layers='unrolled'.")
    turns = jnp.asarray([one is not None for one in all_layers])
    return (several.pop(), turns[layer]) if several else None


def _gathered(
    policy: Policy,
    placement: Placement,
    moments: Moments,
    l: int | jax.Array,
    q: jax.Array,
    scale: float,
    turned: tuple[Rotation, jax.Array] | None,
    lengths: jax.Array,
) -> Moments:
    """Moments with the queries of the step's prompts, from position `sinks` on, RoPE taken off; decoding adds none.

    Args:
      policy: what asks for them.
      placement: of the step's tokens.
      moments: (L, B, …) of the tokens before.
      l: the layer, among those with its spec.
      q: (T, N, H), position encoded.
      scale: of the softmax.
      turned: how, of `_turned`.
      lengths: (B, K) int32 rows of each slot.
    """
    (T, _, H), B = q.shape, lengths.shape[0]
    starts, positions = placement.row_starts, placement.positions
    context = jnp.full((B,), NEVER, jnp.int32) if placement.context is None else placement.context
    first = positions.at[starts[:-1]].get(mode="clip")
    begins = (starts[1:] > starts[:-1]) & (first == 0)
    moments = moments.replace(queries=moments.queries.at[l].set(jnp.where(begins, 0, moments.queries[l])))
    C = 1 if placement.max_query == 1 else min(BLOCK, 1 << (placement.max_query - 1).bit_length())
    blocks = query_blocks(starts, lengths[:, 0], first < context, C, min(T, B) if C == 1 else min(T, T // C + B))

    def add(i: jax.Array, moments: Moments) -> Moments:
        slot, step = blocks.slot[i], jnp.arange(C, dtype=jnp.int32)
        token = blocks.first[i] + step
        own = positions.at[token].get(mode="clip")
        x = q.at[token].get(mode="clip").astype(jnp.float32) * jnp.float32(scale * H**0.5)
        if turned is not None:
            rotation, turns = turned
            x = reading.turn(x, rotation, jnp.where(turns, -own, 0), jnp.where(turns, 1 / rotation.factor, 1.0))
        watched = (step < blocks.size[i]) & (own >= policy.sinks) & (own < context[slot])
        old = jax.tree.map(lambda x: x[l, slot], moments)
        known = old.queries > 0  # else what is there is of another request
        old = jax.tree.map(lambda x: jnp.where(known, x, jnp.zeros_like(x)), old)
        return jax.tree.map(lambda x, new: x.at[l, slot].set(new), moments, add_queries(old, x, watched))

    return jax.lax.fori_loop(0, blocks.used, add, moments)


def _watched(eviction: Eviction, placement: Placement) -> jax.Array | None:
    """(T,) bool: the tokens whose attention the policy sums up; None if it watches none."""
    watch = eviction.policy.watch
    if watch == "none":
        return None
    assert placement.cuts is not None
    B = placement.cuts.shape[0]
    here = placement.slots < B
    if watch == "all":
        return here
    last = 1 if watch == "last" else int(watch)
    cut = placement.cuts[jnp.minimum(placement.slots, B - 1)]
    return here & (placement.positions >= cut - last) & (placement.positions < cut)


def _written(
    config: CacheConfig,
    spec: KVSpec,
    placement: Placement,
    kv: HeadPages,
    pages: jax.Array,
    lengths: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    backend: str,
) -> HeadPages:
    """The rows of the step's tokens in the pages of a layer's heads: pages (B, K, M), lengths (B, K)."""
    B, K, M = pages.shape
    T, P, R = k.shape[0], kv.positions.shape[0], config.rows
    slot = jnp.minimum(placement.slots, B - 1)
    back = placement.row_starts[slot + 1] - jnp.arange(T, dtype=jnp.int32)  # of the slot's tokens, from the last on
    place = lengths[slot] - back[:, None]  # (T, K)
    column = jnp.clip(place // R, 0, M - 1)
    page = pages[slot[:, None], jnp.arange(K, dtype=jnp.int32)[None, :], column]
    page = jnp.where((placement.slots < B)[:, None], page, P)

    def by_head(x: jax.Array) -> jax.Array:
        """(T, K, …) → (K·T, …): the tokens of the first head, of the second, …"""
        return x.swapaxes(0, 1).reshape(K * T, *x.shape[2:])

    page, row = by_head(page), by_head(place % R)
    scales, bounds = kv.scales, kv.bounds
    if bounds is not None:
        bounds = add_keys(bounds, by_head(k), page, row)
    if spec.scales:
        k, v, of_rows = quantize_kv(k, v, spec.storage)
        both = jnp.stack(jnp.split(of_rows, of_rows.shape[1] // K, axis=1), axis=2)  # (T, K, 2)
        scales = (kv.scales[0].at[page, :, row].set(by_head(both), mode="drop"),)
    new_k, new_v = write_rows(
        kv.k[0], kv.v[0] if kv.v else None, by_head(k)[:, None], None if v is None else by_head(v)[:, None], page, row,
        config.layout, slots=K * B, max_query=placement.max_query, backend=backend,
    )  # fmt: skip
    # What is noted of rows is written by whole pages, which XLA does in place on a TPU, too; row by row it would copy
    # all of it. So of a slot's tokens in one page the first writes for all that follow, and those to come.
    place_in_page, position = row[:, None], jnp.tile(placement.positions, K)[:, None]
    step = jnp.arange(R, dtype=jnp.int32)[None, :] - place_in_page
    opens = (row == 0) | jnp.tile(placement.row_starts[slot] == jnp.arange(T, dtype=jnp.int32), K)
    target = jnp.where(opens, page, P)

    def begun(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[target].set(jnp.where(step >= 0, new, x.at[page].get(mode="clip")), mode="drop")

    noted: dict[str, Any] = {"positions": begun(kv.positions, position + step)}
    if kv.weights is not None and kv.seen is not None:  # a row begins anew
        noted |= {"weights": begun(kv.weights, jnp.float32(0)), "seen": begun(kv.seen, jnp.int32(0))}
    values = () if new_v is None else (new_v,)
    return kv.replace(k=(new_k,), v=values, scales=scales, bounds=bounds, **noted)


# --- eviction -----------------------------------------------------------------------------------------------
def evict(
    config: CacheConfig, spec: KVSpec, cache: HeadCache, due: jax.Array, computed: jax.Array, step: jax.Array
) -> HeadCache:
    """Lets the slots in (B,) bool `due` keep no more rows than their budget, and gives back whole pages.

    Args:
      config: the cache's static shape.
      spec: of the layers.
      cache: with the rows of `computed` tokens, but for those that were evicted before.
      due: (B,) bool.
      computed: (B,) int32.
      step: () int32.
    """
    if config.eviction is not None and config.eviction.policy.score is None:
        return cache
    return _by_chip(config, spec, functools.partial(_evict, config, spec), cache, due, computed, step)


def _evict(
    config: CacheConfig, spec: KVSpec, cache: HeadCache, due: jax.Array, computed: jax.Array, step: jax.Array
) -> HeadCache:
    def evicted(cache: HeadCache) -> HeadCache:
        order = jnp.argsort(~due, stable=True).astype(jnp.int32)
        count = due.sum(dtype=jnp.int32)
        of_slot = functools.partial(_evict_slot, config, spec, pages=cache.table.pages, old=cache.table.lengths)

        def visit(i: jax.Array, held: tuple[HeadPages, jax.Array]) -> tuple[HeadPages, jax.Array]:
            return of_slot(order[i], computed[order[i]], held)

        kv, lengths = jax.lax.fori_loop(0, count, visit, (cache.kv, cache.table.lengths))
        return _release(config, cache.replace(kv=kv), lengths, step)

    return when(due.any(), evicted, cache)


def _evict_slot(
    config: CacheConfig,
    spec: KVSpec,
    slot: jax.Array,
    computed: jax.Array,
    held: tuple[HeadPages, jax.Array],
    *,
    pages: jax.Array,
    old: jax.Array,
) -> tuple[HeadPages, jax.Array]:
    eviction = config.eviction
    assert eviction is not None
    L = pages.shape[0]
    whole = jnp.asarray(eviction.whole_heads(config.layers_with(spec)))
    if eviction.policy.whole and whole.shape[1] > old.shape[2]:  # those that this chip holds
        whole = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(MODEL) * old.shape[2], old.shape[2], axis=1)
    policies = [eviction.policy_of(layer) for layer in config.layers_with(spec)]
    distinct = tuple(dict.fromkeys(policies))
    which = jnp.asarray([distinct.index(policy) for policy in policies], jnp.int32)
    ways = [functools.partial(_chosen, eviction, policy) for policy in distinct]
    budget = jnp.broadcast_to(eviction.kept(computed), (L,))
    if eviction.layers == "pyramid":
        budget = pyramid(eviction.budget, computed, L, max(eviction.policy.recent, eviction.least, 1))
        budget = eviction.at_least(budget, computed)

    def of_layer(l: jax.Array, held: tuple[HeadPages, jax.Array]) -> tuple[HeadPages, jax.Array]:
        kv, lengths = held
        rows = _rows(config, spec, kv, pages[l, slot], old[l, slot], computed)
        if kv.moments is not None:
            rows = rows.replace(moments=jax.tree.map(lambda x: x[l, slot], kv.moments))
        count = jnp.where(whole[l], rows.lengths, budget[l]) if eviction.policy.whole else budget[l]
        kept, counts = jax.lax.switch(which[l], ways, rows, count)
        kv = _compacted(config, spec, kv, pages[l, slot], kept, counts, rows.lengths)
        return kv, lengths.at[l, slot].set(counts)

    return jax.lax.fori_loop(0, L, of_layer, held)


def _chosen(eviction: Eviction, policy: Policy, rows: Rows, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a layer of a slot, as `select` gives them: rows that stay (K, S), and how many (K,)."""
    return select(policy, rows, adakv(policy, rows, count) if eviction.heads == "adakv" else count)


def _rows(
    config: CacheConfig, spec: KVSpec, kv: HeadPages, pages: jax.Array, lengths: jax.Array, computed: jax.Array
) -> Rows:
    """What a policy sees of a layer of a slot: pages (K, M), lengths (K,)."""
    k, v = _flat(config, spec, kv, pages)
    if kv.scales:
        scales = _noted(jnp.moveaxis(kv.scales[0], 1, -1), pages)
        k, v = dequantize(k, scales[..., 0]), dequantize(v, scales[..., -1])
    weights, seen = (None if x is None else _noted(x, pages) for x in (kv.weights, kv.seen))
    return Rows(k, v, lengths, _noted(kv.positions, pages), computed, weights, seen)


def _flat(config: CacheConfig, spec: KVSpec, kv: HeadPages, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K (K, S, H) and V (K, S, Hv) as stored."""
    both = read_pages(kv.k[0], kv.v[0] if kv.v else None, pages, _lanes(spec), config.layout)  # (K, M, R, 1, H)
    k, v = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in both)
    return k, v


def _noted(x: jax.Array, pages: jax.Array) -> jax.Array:
    """(P, R, …) → (K, S, …)."""
    found = x.at[pages].get(mode="clip")
    return found.reshape(pages.shape[0], -1, *x.shape[2:])


def _compacted(
    config: CacheConfig,
    spec: KVSpec,
    kv: HeadPages,
    pages: jax.Array,
    kept: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
) -> HeadPages:
    """The rows `kept` (K, S), of (K,) lengths, moved to the front of a layer's pages (K, M); codes stay the codes that
    they are. Heads that keep every row have nothing to move."""
    K, M = pages.shape
    R, P = config.rows, kv.positions.shape[0]
    used = jnp.arange(M, dtype=jnp.int32)[None, :] < pages_for(counts, R)[:, None]
    place = jnp.where(used & (counts < lengths)[:, None], pages, P)

    def moved(x: jax.Array) -> jax.Array:
        """(K, S, …) → (K, M, R, …)."""
        return gather(x, kept).reshape(K, M, R, *x.shape[2:])

    def moved_note(x: jax.Array) -> jax.Array:
        return x.at[place].set(moved(_noted(x, pages)), mode="drop")

    k, v = (moved(x)[..., None, :] for x in _flat(config, spec, kv, pages))
    new_k, new_v = write_pages(kv.k[0], kv.v[0] if kv.v else None, k, v, place, _lanes(spec), config.layout)
    scales = tuple(
        x.at[place].set(jnp.moveaxis(moved(_noted(jnp.moveaxis(x, 1, -1), pages)), -1, -2), mode="drop")
        for x in kv.scales
    )
    noted: dict[str, Any] = {}
    if kv.weights is not None and kv.seen is not None:
        keeps = config.eviction is not None and config.eviction.policy.watch == "all"
        for name in ("weights", "seen"):
            x = getattr(kv, name)
            cleared = x.at[jnp.where(used, pages, P)].set(jnp.zeros((), x.dtype), mode="drop")
            noted[name] = moved_note(x) if keeps else cleared
    return kv.replace(
        k=(new_k,), v=() if new_v is None else (new_v,), scales=scales, positions=moved_note(kv.positions), **noted
    )
