"""The engine's state: one frozen pytree that holds everything a running batch is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvjax import cache as kv_cache
from kvjax import evicting, prefix
from kvjax import pages as page_pool
from kvjax import requests as table
from kvjax.cache import Cache, CacheConfig
from kvjax.prefix import PrefixIndex
from kvjax.requests import Line, Requests
from kvjax.sampling import Counts, no_counts
from kvjax.sharding import DATA, MODEL, SEQ, sizes


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything static about a compiled loop; equal programs share one compilation.

    Attributes:
      forward: the family's forward function.
      unembed: the family's unembed function.
      config: the family's config.
      width: D of the hidden states that `forward` returns.
      dtype: dtype name of the hidden states.
      cache: the cache's static shape.
      logprobs: None, or how many top log-probabilities are recorded beside the chosen token's.
      backend: attention backend.
      share: whether prefixes are shared between requests.
      mesh: the shape of the mesh that the parameters are on, or None.
    """

    forward: Callable[..., tuple[Any, jax.Array]]
    unembed: Callable[..., jax.Array]
    config: Any
    width: int
    dtype: str
    cache: CacheConfig
    logprobs: int | None = None
    backend: str = "xla"
    share: bool = True
    mesh: AbstractMesh | None = None


class Slots(struct.PyTreeNode):
    """The rows of the running batch.

    Attributes:
      request: (B,) int32 row of each slot's request in the table; Q where the slot is idle.
      counts: of the tokens that each has generated and seen; None when no request penalises repetition.
    """

    request: jax.Array
    counts: Counts | None


class Statistics(struct.PyTreeNode):
    """What has happened so far; () int32 each, but for the last.

    Attributes:
      computed: tokens passed through the model.
      hit: tokens that were not, because another request had computed them.
      preempted: how often a request had to give way because pages ran out.
      evicted: pages of group 0 that the prefix index gave up.
      copied: pages of group 0 that were copied before a write.
      peak: (G,) int32 most pages in use at once, of each group and then of each that has pages by head; a page that
        only the prefix index owns is in use.
    """

    computed: jax.Array
    hit: jax.Array
    preempted: jax.Array
    evicted: jax.Array
    copied: jax.Array
    peak: jax.Array


class Policy(struct.PyTreeNode):
    """What the host asks of a segment; () int32 each. None of it changes a token of an output.

    Attributes:
      steps: most steps to run.
      low: end early once fewer requests wait: the host has more. 0 where it has none.
      refill: slots that have to be idle before waiting requests enter, so that prompts share steps; fewer suffice
        where fewer wait, and where nothing runs.
      clock: seconds since the job began.
      ttl: seconds for which a prefix lives after its last use; `prefix.FOREVER` for no end.
    """

    steps: jax.Array
    low: jax.Array
    refill: jax.Array
    clock: jax.Array
    ttl: jax.Array


def policy(steps: int, *, low: int = 0, refill: int = 1, clock: int = 0, ttl: int = prefix.FOREVER) -> Policy:
    """A Policy of Python integers."""
    return Policy(*(jnp.int32(value) for value in (steps, low, refill, clock, ttl)))


class EngineState(struct.PyTreeNode):
    """One pytree: snapshot it, donate it, plan its memory with `jax.eval_shape`.

    Attributes:
      cache: K/V pages, free pages, block tables.
      index: which pages can be shared; None where nothing is.
      requests: all requests between submission and collection.
      line: those that wait.
      slots: those that run.
      automata: (A, X, V) stop automata lifted to tokens: automaton, state, token → state.
      blocked: () bool whether the first in the line did not fit, and nothing was given back since.
      step: () int32 steps run so far.
      stats: counters.
    """

    cache: Cache
    index: PrefixIndex | None
    requests: Requests
    line: Line
    slots: Slots
    automata: jax.Array
    blocked: jax.Array
    step: jax.Array
    stats: Statistics


def init(
    program: Program,
    automata: jax.Array,
    *,
    rows: int,
    biases: int = 1,
    stops: int = 1,
    penalties: int | None = None,
) -> EngineState:
    """An engine without requests.

    Args:
      program: its static part.
      automata: (A, X, V), from `kvjax.stops`; automaton 0 never matches.
      rows: Q, most requests between submission and collection, at least B.
      biases: width J of the logit-bias lists.
      stops: width Z of the stop-token lists.
      penalties: the vocabulary size when some request penalises repetition, else None.
    """
    config = program.cache
    index = prefix.init(config.pool_pages, config.rows, len(config.groups)) if program.share else None
    cache = kv_cache.init(config)
    names = "computed", "hit", "preempted", "evicted", "copied"
    counters = Statistics(**{name: jnp.int32(0) for name in names}, peak=jnp.zeros_like(pages_in_use(config, cache)))
    return EngineState(
        cache=cache,
        index=index,
        requests=table.init(rows, config.capacity, config.pages_per_slot, biases, stops, program.logprobs),
        line=table.line(rows),
        slots=Slots(jnp.full((config.slots,), rows, jnp.int32), no_counts(config.slots, penalties)),
        automata=jnp.array(automata),  # a copy: the state is donated, the caller's table is not
        blocked=jnp.bool_(False),
        step=jnp.int32(0),
        stats=counters,
    )


def pages_in_use(config: CacheConfig, cache: Cache) -> jax.Array:
    """(G,) int32: pages that have an owner on a chip, of each group and then of each that has pages by head."""
    of_heads = [
        evicting.pages_in_use(config, spec, group.pool)
        for spec, group in zip(config.by_head, cache.by_head, strict=True)
    ]
    return jnp.stack([*(page_pool.in_use(group.pool) for group in cache.groups), *of_heads])


def shardings(program: Program, state: EngineState, mesh: Mesh | None) -> EngineState | None:
    """Where the arrays of a state lie on a mesh: each engine's on its part of `data`, and there K and V divided, the
    rest everywhere; None without a mesh."""
    if mesh is None:
        return None

    def place(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, specs(program, state, SEQ, MODEL))


def engine_count(program: Program) -> int:
    """E, how many engines a program has."""
    return sizes(program.mesh)[DATA]


def several(program: Program, state: EngineState) -> EngineState:
    """The state of as many engines as the program has, of that of one; see `kvjax.engines`."""
    E = engine_count(program)
    if E == 1:
        return state
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (E, *x.shape)), state)
    return stacked.replace(automata=state.automata)


def specs(program: Program, state: EngineState, *over: str) -> EngineState:
    """The PartitionSpec of every array: that of K and V over the mesh axes `over`, of several engines all over `data`.

    `state.cache` may be None.
    """
    where = jax.tree.map(lambda _: PartitionSpec(*(DATA,) * (engine_count(program) > 1)), state)
    if state.cache is not None:
        where = where.replace(cache=kv_cache.with_shardings(program.cache, state.cache, where.cache, *over))
    return where.replace(automata=PartitionSpec())


# --- what a slot's request is --------------------------------------------------------------------------------
def of_slots(state: EngineState, column: jax.Array) -> jax.Array:
    """A column of the table, (Q, ...), for each slot: (B, ...). Idle slots get anyone's."""
    return column.at[state.slots.request].get(mode="clip")


def running(state: EngineState) -> jax.Array:
    """(B,) bool: slots that compute."""
    return state.slots.request < state.requests.status.shape[0]


def cached(state: EngineState) -> jax.Array:
    """(B,) int32: tokens of each slot whose K and V are in the cache."""
    return state.cache.groups[0].table.lengths


def known(state: EngineState) -> jax.Array:
    """(B,) int32: known tokens of each slot's request; 0 for idle slots."""
    return jnp.where(running(state), of_slots(state, state.requests.known), 0)


def pending(state: EngineState) -> jax.Array:
    """(B,) int32: known tokens of each running slot that are not in the cache yet. 1 means it decodes."""
    return jnp.where(running(state), known(state) - cached(state), 0)


def with_status(state: EngineState, slots: jax.Array, status: jax.Array) -> EngineState:
    """Gives the requests of the slots in (B,) bool the status (B,) or () int32."""
    row = jnp.where(slots, state.slots.request, state.requests.status.shape[0])
    values = jnp.broadcast_to(status, row.shape)
    return state.replace(requests=state.requests.replace(status=state.requests.status.at[row].set(values, mode="drop")))
