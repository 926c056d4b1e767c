"""One step, and the loop of it: pure functions from state to state.

admit     waiting requests enter slots; slots take over pages computed before      (kvjax.scheduler)
schedule  who computes how many tokens in this step
compute   hidden states of the packed tokens; K and V written on the way
commit    next tokens sampled, requests ended, pages registered and freed
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax import cache as kv_cache
from kvjax import requests as table
from kvjax import sampling, scheduler, spread, stops
from kvjax.cache import Cache, KVPages, Placement
from kvjax.control import when
from kvjax.requests import CANCELLED, LENGTH, RUNNING, STOPPED, WAITING, Rows
from kvjax.sharding import any_engine, every_engine, of_first, whole
from kvjax.state import EngineState, Policy, Program, cached, of_slots, pages_in_use, running
from kvjax.types import Params


def place(state: EngineState, tokens: jax.Array, packed: int, max_query: int) -> tuple[jax.Array, Placement]:
    """Packs the step's tokens slot after slot: (T,) int32 token ids and where they belong.

    `tokens` (B,) counts each slot's; the cache's lengths already include them.
    """
    ends = jnp.cumsum(tokens, dtype=jnp.int32)
    row_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    index = jnp.arange(packed, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    safe = jnp.minimum(slot, tokens.shape[0] - 1)
    position = cached(state)[safe] - ends[safe] + index
    ids = state.requests.tokens.at[state.requests.place(state.slots.request[safe], position)].get(mode="clip")
    return ids, Placement(slot, position, row_starts, max_query)


def compute(
    program: Program,
    params: Params,
    cache: Cache,
    ids: jax.Array,
    placement: Placement,
    positions: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Runs the model over the packed tokens, which stand at the placement's positions: (cache, hidden (T, D))."""

    def attend(cache, layer, q, k, v, scale, **features):
        return kv_cache.attend(
            program.cache, placement, cache, layer, q, k, v, scale, backend=program.backend, **features
        )

    positions = placement.positions if positions is None else positions
    return program.forward(params, program.config, ids, positions, cache, attend)


def compute_last(
    program: Program, params: Params, cache: Cache, ids: jax.Array, placement: Placement
) -> tuple[Cache, jax.Array]:
    """Runs the model over the packed tokens: the cache, and hidden (B, D) at each slot's last token.

    Where sequences are dealt over chips, those divide the tokens of prompts, too, in parts of T / n; those of a decode
    step are few, and every chip computes them all.
    """
    n, last = program.cache.seq, placement.row_starts[1:] - 1
    if placement.max_query == 1 or not spread.divides(ids.shape[0], n):
        cache, hidden = compute(program, params, cache, ids, placement)
        return cache, hidden.at[last].get(mode="clip")
    ids, positions = spread.own(ids, n), spread.own(placement.positions, n)
    cache, hidden = compute(program, params, cache, ids, placement.replace(divided=True), positions)
    return cache, spread.rows(hidden, last, n)


def step(program: Program, params: Params, state: EngineState, policy: Policy, packed: int) -> EngineState:
    """One step: of one token a slot (decode), or a mixed one of `packed` tokens, or a quarter where that will do."""
    B = program.cache.slots
    bare = whole(state.replace(cache=kv_cache.without_pages(state.cache)))
    state = bare.replace(cache=kv_cache.with_pages(bare.cache, kv_cache.pages_of(state.cache)))
    state = scheduler.admit(program, state, policy, packed)
    plan = scheduler.schedule(program, state, packed)
    before, cuts, context = cached(state), None, None
    if program.cache.eviction is not None:
        context = of_slots(state, state.requests.context)
        cuts = program.cache.eviction.next_cut(context, before)
    alone = running(state).sum(dtype=jnp.int32) == 1
    reserved = kv_cache.reserve(
        program.cache, state.cache, state.index, plan.tokens, state.step, policy.clock, alone, packed
    )
    tokens = jnp.where(reserved.starved, 0, plan.tokens)
    mixed = any_engine((tokens > 1).any())
    state = state.replace(cache=reserved.cache, index=reserved.index)

    def computed(T: int, max_query: int, kv: tuple[KVPages, ...]) -> tuple[tuple[KVPages, ...], jax.Array]:
        """K and V of the step's tokens written into pages, and hidden (B, D) at each slot's last token."""
        ids, placement = place(state, tokens, T, max_query)
        placement = placement.replace(cuts=cuts, context=context)
        cache, hidden = compute_last(program, params, kv_cache.with_pages(state.cache, kv), ids, placement)
        return kv_cache.pages_of(cache), hidden

    kv = kv_cache.pages_of(state.cache)
    if program.share:
        kv = kv_cache.copy_pages(program.cache, kv, reserved.copies, program.backend)
    if packed == B:
        kv, last = computed(B, 1, kv)
    else:
        last = jnp.zeros((B, program.width), program.dtype)
        narrow = _narrow(B, packed)
        few = mixed & every_engine(tokens.sum(dtype=jnp.int32) <= narrow)
        kv, last = _computed_if(mixed & ~few, functools.partial(computed, packed, packed), kv, last)
        if narrow:
            kv, last = _computed_if(few, functools.partial(computed, narrow, narrow), kv, last)
        kv, last = _computed_if(~mixed, functools.partial(computed, B, 1), kv, last)
    stats = state.stats
    stats = stats.replace(
        computed=stats.computed + tokens.sum(dtype=jnp.int32),
        evicted=stats.evicted + reserved.evicted,
        copied=stats.copied + reserved.copies[0].count,
        peak=jnp.maximum(stats.peak, pages_in_use(program.cache, reserved.cache)),  # nothing else in a step takes pages
    )
    state = state.replace(cache=kv_cache.with_pages(state.cache, kv), step=state.step + 1, stats=stats)
    if cuts is not None:
        due = (tokens > 0) & (cached(state) == cuts)
        state = state.replace(cache=kv_cache.evict(program.cache, state.cache, due, cached(state), state.step))
    logits = program.unembed(params, program.config, last)
    return commit(program, state, policy, logits, tokens, before, reserved.starved)


def _narrow(slots: int, packed: int) -> int:
    """Tokens of a mixed step for few: what is left of a prompt whose beginning was found. 0 where there is none."""
    return packed // 4 if packed >= 256 and packed // 4 > slots else 0


def _computed_if(
    flag: jax.Array,
    compute: Callable[[tuple[KVPages, ...]], tuple[tuple[KVPages, ...], jax.Array]],
    kv: tuple[KVPages, ...],
    otherwise: jax.Array,
) -> tuple[tuple[KVPages, ...], jax.Array]:
    """`compute(kv)` if the () bool flag is set, else (kv, otherwise)."""
    return when(flag, lambda held: compute(held[0]), (kv, otherwise))


def commit(
    program: Program,
    state: EngineState,
    policy: Policy,
    logits: jax.Array,
    tokens: jax.Array,
    before: jax.Array,
    starved: jax.Array,
) -> EngineState:
    """Samples for the rows whose last known token was computed, ends requests, registers and frees their pages.

    Args:
      program: the static part.
      state: with the step's K and V in the cache.
      policy: of the segment.
      logits: (B, V) float32 at the last computed token of each slot.
      tokens: (B,) int32 tokens computed for each slot.
      before: (B,) int32 cached tokens of each slot before the step.
      starved: (B,) bool slots that got no page.
    """
    requests, slots = state.requests, state.slots
    Q = requests.status.shape[0]
    known, prompt = of_slots(state, requests.known), of_slots(state, requests.prompt)
    sampler = sampling.take(requests.sampler, slots.request, slots.counts)
    drawn = (tokens > 0) & (cached(state) == known)
    generated = known - prompt
    token, logprobs = of_first(sampling.sample(logits, sampler, generated, drawn, program.logprobs))
    automaton, old_state = of_slots(state, requests.automaton), of_slots(state, requests.stop_state)
    stop_state, matched = stops.advance(state.automata, automaton, old_state, token)
    watched = drawn & (generated >= sampler.min_new)  # below its minimum length no output stops
    row = jnp.where(drawn, slots.request, Q)
    spot = requests.place(row, known)
    known = known + 1
    ended = drawn & (known >= of_slots(state, requests.limit))
    stopped = watched & (matched | sampling.stopped(token, sampler))
    status = jnp.where(stopped, STOPPED, jnp.where(ended, LENGTH, RUNNING))
    requests = requests.replace(
        tokens=requests.tokens.at[spot].set(token, mode="drop"),
        known=requests.known.at[row].set(known, mode="drop"),
        stop_state=requests.stop_state.at[jnp.where(watched, slots.request, Q)].set(stop_state, mode="drop"),
        status=requests.status.at[row].set(status, mode="drop"),
        logprobs=jax.tree.map(lambda old, new: old.at[spot].set(new, mode="drop"), requests.logprobs, logprobs),
    )
    state = state.replace(requests=requests, slots=slots.replace(counts=sampling.observe(slots.counts, token, drawn)))
    state = scheduler.register(program, state, policy, before)
    state = state.replace(cache=kv_cache.trim(program.cache, state.cache, before, state.step))
    gone = drawn & (status != RUNNING)
    state, displaced = scheduler.preempt(state, starved, gone)
    return scheduler.vacate(program, state, policy, gone | displaced)


def unfinished(state: EngineState) -> jax.Array:
    """() bool: whether a request runs or waits."""
    return running(state).any() | (state.line.count > 0)


@functools.partial(jax.jit, static_argnames=("program", "packed"), donate_argnames=("state",))
def run(program: Program, params: Params, state: EngineState, policy: Policy, *, packed: int) -> EngineState:
    """Runs a segment in one device program, the state donated and updated in place.

    It ends when every request has, after `policy.steps` steps, or when fewer than `policy.low` requests wait. Of
    several engines none ends before all would.

    Args:
      program: the static part.
      params: the model's parameters.
      state: the engine's state.
      policy: of this segment.
      packed: static; tokens of a step that computes prompts, at least B; B compiles a loop that only decodes.

    Returns:
      The new state.
    """
    last = state.step + policy.steps
    return jax.lax.while_loop(
        lambda state: any_engine(unfinished(state) & (state.step < last) & (state.line.count >= policy.low)),
        lambda state: step(program, params, state, policy, packed),
        state,
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def submit(state: EngineState, new: Rows) -> EngineState:
    """Requests enter the table and the line; there must be empty rows for all of them (`requests.pack`)."""
    requests, waiting = table.submit(state.requests, state.line, new)
    return state.replace(requests=requests, line=waiting, blocked=jnp.bool_(False))


@functools.partial(jax.jit, static_argnames=("most",), donate_argnames=("state",))
def collect(state: EngineState, *, most: int) -> tuple[EngineState, Rows]:
    """Takes up to `most` requests that have ended out of the table; the order of the others is -1."""
    requests, rows = table.collect(state.requests, most)
    return state.replace(requests=requests), rows


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def cancel(program: Program, state: EngineState, policy: Policy, order: jax.Array) -> EngineState:
    """Ends the unfinished requests of the submission numbers (A,) int32, -1 for padding, as CANCELLED.

    Their pages are free, and prefixes of them stay in the index.
    """
    requests = state.requests
    named = (requests.order[:, None] == jnp.where(order >= 0, order, -2)[None, :]).any(axis=1)
    waits, runs = named & (requests.status == WAITING), named & (requests.status == RUNNING)
    gone = running(state) & of_slots(state, runs)
    status = jnp.where(waits | runs, CANCELLED, requests.status)
    state = state.replace(
        requests=requests.replace(status=status), line=table.leave_line(state.line, waits), blocked=jnp.bool_(False)
    )
    return scheduler.vacate(program, state, policy, gone)


@jax.jit
def view(state: EngineState) -> Rows:
    """Copies of the requests that run, one a slot; the order of idle ones is -1."""
    return table.look(state.requests, state.slots.request)
