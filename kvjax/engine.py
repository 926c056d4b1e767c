"""One step, and the loop of it: pure functions from state to state.

schedule(state)  who computes how many tokens in this step
advance(...)     hidden states of the packed tokens; K and V written on the way
commit(...)      next tokens sampled, requests ended, pages freed
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from kvjax import cache as kv_cache
from kvjax import sampling, stops
from kvjax import state as engine_state
from kvjax.cache import Cache, KVPages, Placement
from kvjax.state import LENGTH, PREEMPTED, RUNNING, STOPPED, Admission, EngineState, Program, Slots
from kvjax.types import Params


class Plan(struct.PyTreeNode):
    """What a step computes.

    Attributes:
      tokens: (B,) int32 tokens of each slot that enter the model.
    """

    tokens: jax.Array


def cached(state: EngineState) -> jax.Array:
    """(B,) int32: tokens of each slot whose K and V are in the cache."""
    return state.cache.groups[0].table.lengths


def pending(state: EngineState) -> jax.Array:
    """(B,) int32: known tokens of each running slot that are not in the cache yet. 1 means it decodes."""
    return jnp.where(state.slots.status == RUNNING, state.slots.known - cached(state), 0)


def schedule(state: EngineState, budget: int) -> Plan:
    """Decode rows first, then prompts in slot order, up to `budget` ≥ B tokens."""
    waiting = pending(state)
    decode = waiting == 1
    prompt = jnp.where(decode, 0, waiting)
    left = budget - decode.sum(dtype=jnp.int32) - (jnp.cumsum(prompt, dtype=jnp.int32) - prompt)
    return Plan(jnp.where(decode, 1, jnp.clip(left, 0, prompt)))


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
    ids = state.slots.tokens.at[safe, position].get(mode="clip")
    return ids, Placement(slot, position, row_starts, max_query)


def compute(
    program: Program, params: Params, cache: Cache, ids: jax.Array, placement: Placement
) -> tuple[Cache, jax.Array]:
    """Runs the model over the packed tokens: (cache, hidden (T, D))."""

    def attend(cache, layer, q, k, v, scale, *, soft_cap=None):
        return kv_cache.attend(
            program.cache, placement, cache, layer, q, k, v, scale, soft_cap=soft_cap, backend=program.backend
        )

    return program.forward(params, program.config, ids, placement.positions, cache, attend)


def step(program: Program, params: Params, state: EngineState, packed: int) -> EngineState:
    """One step: a decode step of one token a slot, or, while any prompt is pending, a mixed one of `packed` tokens."""
    B = program.cache.slots
    plan = schedule(state, packed)
    mixed = (pending(state) > 1).any()
    cache, starved = kv_cache.reserve(program.cache, state.cache, plan.tokens, state.step, packed)
    tokens = jnp.where(starved, 0, plan.tokens)
    state = state.replace(cache=cache)

    def computed(T: int, max_query: int, kv: tuple[KVPages, ...]) -> tuple[tuple[KVPages, ...], jax.Array]:
        """K and V of the step's tokens written into pages, and hidden (B, D) at each slot's last token."""
        ids, placement = place(state, tokens, T, max_query)
        cache, hidden = compute(program, params, kv_cache.with_pages(state.cache, kv), ids, placement)
        return kv_cache.pages_of(cache), hidden.at[placement.row_starts[1:] - 1].get(mode="clip")

    kv = kv_cache.pages_of(state.cache)
    if packed == B:
        kv, last = computed(B, 1, kv)
    else:
        last = jnp.zeros((B, program.width), program.dtype)
        kv, last = _if(mixed, functools.partial(computed, packed, packed), kv, last)
        kv, last = _if(~mixed, functools.partial(computed, B, 1), kv, last)
    state = state.replace(
        cache=kv_cache.with_pages(state.cache, kv),
        step=state.step + 1,
        computed=state.computed + tokens.sum(dtype=jnp.int32),
    )
    return commit(program, state, program.unembed(params, program.config, last), tokens, starved)


def _if(
    flag: jax.Array,
    compute: Callable[[tuple[KVPages, ...]], tuple[tuple[KVPages, ...], jax.Array]],
    kv: tuple[KVPages, ...],
    otherwise: jax.Array,
) -> tuple[tuple[KVPages, ...], jax.Array]:
    """`compute(kv)` if the () bool flag is set, else (kv, otherwise): a conditional as a loop of one round or none.

    XLA updates a loop's carry in place on every platform. Through `lax.cond` the CPU backend copies all pages, at
    the entry of one branch and the exit of the other (docs/decisions.md, "No conditional around the pages").
    """
    _, kv, result = jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.bool_(False), *compute(carry[1])), (flag, kv, otherwise)
    )
    return kv, result


def commit(
    program: Program, state: EngineState, logits: jax.Array, tokens: jax.Array, starved: jax.Array
) -> EngineState:
    """Samples for the rows whose last known token was computed, ends requests, frees their pages.

    Args:
      program: the static part.
      state: with the step's K and V in the cache.
      logits: (B, V) float32 at the last computed token of each slot.
      tokens: (B,) int32 tokens computed for each slot.
      starved: (B,) bool slots that got no page.
    """
    slots = state.slots
    drawn = (tokens > 0) & (cached(state) == slots.known)
    generated = slots.known - slots.prompt
    token, logprobs = sampling.sample(logits, state.sampler, generated, drawn, program.logprobs)
    sampler = sampling.observe(state.sampler, token, drawn)
    stop_state, matched = stops.advance(state.automata, slots.automaton, slots.stop_state, token)
    watched = drawn & (generated >= state.sampler.min_new)  # below its minimum length no output stops
    column = jnp.where(drawn, slots.known, slots.tokens.shape[1])
    row = jnp.arange(column.shape[0], dtype=jnp.int32)
    slots = slots.replace(
        tokens=slots.tokens.at[row, column].set(token, mode="drop"),
        known=slots.known + drawn.astype(jnp.int32),
        stop_state=jnp.where(watched, stop_state, slots.stop_state),
        logprobs=jax.tree.map(lambda old, new: old.at[row, column].set(new, mode="drop"), slots.logprobs, logprobs),
    )
    status = jnp.where(drawn & (slots.known >= slots.limit), LENGTH, slots.status)
    status = jnp.where(watched & (matched | sampling.stopped(token, state.sampler)), STOPPED, status)
    status = jnp.where(_newest(slots) & starved.any(), PREEMPTED, status)
    ended = (slots.status == RUNNING) & (status != RUNNING)
    cache = kv_cache.release(program.cache, state.cache, ended)
    return state.replace(cache=cache, slots=slots.replace(status=status), sampler=sampler)


def _newest(slots: Slots) -> jax.Array:
    """(B,) bool: the running slot admitted last, which gives way when pages run out."""
    order = jnp.where(slots.status == RUNNING, slots.order, -1)
    return (order == order.max()) & (slots.status == RUNNING)


def running(state: EngineState) -> jax.Array:
    """() int32: slots that still compute."""
    return (state.slots.status == RUNNING).sum(dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("program", "packed"), donate_argnames=("state",))
def run(
    program: Program, params: Params, state: EngineState, steps: jax.Array, leave: jax.Array, *, packed: int
) -> EngineState:
    """Runs up to `steps` steps in one device program, the state donated and updated in place.

    Args:
      program: the static part.
      params: the model's parameters.
      state: the engine's state.
      steps: () int32 most steps to run.
      leave: () int32; ends early once no more than this many slots run. 0 runs all to their end.
      packed: static; tokens of a step that computes prompts, at least B; B compiles a loop that only decodes.

    Returns:
      The new state.
    """
    last = state.step + steps
    return jax.lax.while_loop(
        lambda state: (running(state) > leave) & (state.step < last),
        lambda state: step(program, params, state, packed),
        state,
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def admit(state: EngineState, new: Admission) -> EngineState:
    """`state.admit`, compiled, the state donated."""
    return engine_state.admit(state, new)
