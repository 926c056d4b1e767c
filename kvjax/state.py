"""The engine's state: one frozen pytree that holds everything a running batch is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kvjax import cache as kv_cache
from kvjax import sampling
from kvjax.cache import Cache, CacheConfig
from kvjax.sampling import Logprobs, SamplerState

IDLE, RUNNING, STOPPED, LENGTH, PREEMPTED = range(5)
"""Status of a slot. STOPPED: a stop token or stop string came. LENGTH: the token limit was reached. PREEMPTED: pages
ran out and this was the newest request; its tokens so far are kept, its pages are gone."""


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
    """

    forward: Callable[..., tuple[Any, jax.Array]]
    unembed: Callable[..., jax.Array]
    config: Any
    width: int
    dtype: str
    cache: CacheConfig
    logprobs: int | None = None
    backend: str = "xla"


class Slots(struct.PyTreeNode):
    """The rows of the running batch.

    Attributes:
      tokens: (B, S) int32 prompt, then output; S is the cache's capacity of a slot.
      known: (B,) int32 how many of them are known. Those beyond the cached length are still to be computed.
      prompt: (B,) int32 length of the prompt.
      limit: (B,) int32 value of `known` at which the request ends, at most S.
      status: (B,) int32, one of IDLE, RUNNING, STOPPED, LENGTH, PREEMPTED.
      order: (B,) int32 admission number; the largest is the newest.
      automaton: (B,) int32 which stop automaton watches the output.
      stop_state: (B,) int32 its state.
      logprobs: per position of `tokens`: chosen (B, S), top_ids and top_values (B, S, n); None when not recorded.
    """

    tokens: jax.Array
    known: jax.Array
    prompt: jax.Array
    limit: jax.Array
    status: jax.Array
    order: jax.Array
    automaton: jax.Array
    stop_state: jax.Array
    logprobs: Logprobs | None


class EngineState(struct.PyTreeNode):
    """One pytree: snapshot it, donate it, plan its memory with `jax.eval_shape`.

    Attributes:
      cache: K/V pages, free pages, block tables.
      slots: the running batch.
      sampler: sampling parameters and token counts of each slot.
      automata: (A, X, V) stop automata lifted to tokens: automaton, state, token → state.
      step: () int32 steps run so far.
      computed: () int32 tokens passed through the model so far.
    """

    cache: Cache
    slots: Slots
    sampler: SamplerState
    automata: jax.Array
    step: jax.Array
    computed: jax.Array


def init(
    program: Program, automata: jax.Array, *, biases: int = 1, stops: int = 1, penalties: int | None = None
) -> EngineState:
    """An engine with idle slots.

    Args:
      program: its static part.
      automata: (A, X, V), from `kvjax.stops`; automaton 0 never matches.
      biases: width J of the logit-bias lists.
      stops: width Z of the stop-token lists.
      penalties: the vocabulary size when some request penalises repetition, else None.
    """
    B, S = program.cache.slots, program.cache.capacity
    slots = Slots(
        tokens=jnp.zeros((B, S), jnp.int32),
        logprobs=_no_logprobs(program.logprobs, B, S),
        **{
            name: jnp.zeros((B,), jnp.int32)
            for name in ("known", "prompt", "limit", "status", "order", "automaton", "stop_state")
        },
    )
    return EngineState(
        cache=kv_cache.init(program.cache),
        slots=slots,
        sampler=sampling.init(B, biases, stops, penalties),
        automata=jnp.array(automata),  # a copy: the state is donated, the caller's table is not
        step=jnp.int32(0),
        computed=jnp.int32(0),
    )


def _no_logprobs(top: int | None, B: int, S: int) -> Logprobs | None:
    if top is None:
        return None
    return Logprobs(jnp.zeros((B, S)), jnp.zeros((B, S, top), jnp.int32), jnp.zeros((B, S, top)))


class Admission(struct.PyTreeNode):
    """Requests entering slots, A rows; a row whose slot is B or more is padding.

    Attributes:
      slots: (A,) int32 distinct slots, each not RUNNING.
      tokens: (A, S) int32 prompt, then output from before a preemption.
      known: (A,) int32.
      prompt: (A,) int32.
      limit: (A,) int32.
      order: (A,) int32.
      automaton: (A,) int32.
      stop_state: (A,) int32.
      sampler: rows as `sampling.pack` makes them.
    """

    slots: jax.Array
    tokens: jax.Array
    known: jax.Array
    prompt: jax.Array
    limit: jax.Array
    order: jax.Array
    automaton: jax.Array
    stop_state: jax.Array
    sampler: SamplerState


def admission(
    config: CacheConfig,
    tokens: Sequence[Sequence[int]],
    limits: Sequence[int],
    sampler: SamplerState,
    *,
    slots: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    automata: Sequence[int] | None = None,
    stop_states: Sequence[int] | None = None,
) -> Admission:
    """Rows for `admit`, made on the host and padded to B so that one compilation serves any number of them.

    Args:
      config: of the cache that they enter.
      tokens: what each of at least one, at most B requests holds: its prompt, then output from before a preemption.
      limits: number of tokens, prompt and output, at which each ends; at most the capacity of a slot.
      sampler: rows as `sampling.pack` makes them, one per request.
      slots: where they go; 0, 1, ... where not given.
      prompts: lengths of the prompts; all tokens where not given.
      order: admission numbers; 0, 1, ... where not given.
      automata: stop automaton of each; 0, which never matches, where not given.
      stop_states: state of each automaton; 0 where not given.
    """
    n, B = len(tokens), config.slots
    held = np.zeros((B, config.capacity), np.int32)
    for row, ids in zip(held, tokens, strict=False):
        row[: len(ids)] = ids

    def column(values: Sequence[int] | None, otherwise: Sequence[int], padding: int = 0) -> jax.Array:
        return jnp.asarray(np.asarray([*(otherwise if values is None else values), *[padding] * (B - n)], np.int32))

    lengths, zeros = [len(ids) for ids in tokens], [0] * n
    return Admission(
        slots=column(slots, range(n), padding=B),
        tokens=jnp.asarray(held),
        known=column(lengths, ()),
        prompt=column(prompts, lengths),
        limit=column(limits, ()),
        order=column(order, range(n)),
        automaton=column(automata, zeros),
        stop_state=column(stop_states, zeros),
        sampler=jax.tree.map(lambda x: jnp.asarray(np.concatenate([x, np.repeat(x[:1], B - n, axis=0)])), sampler),
    )


def admit(state: EngineState, new: Admission) -> EngineState:
    """Starts requests in the slots they name."""

    def put(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[new.slots].set(value, mode="drop")

    columns = {
        name: put(getattr(state.slots, name), getattr(new, name))
        for name in ("tokens", "known", "prompt", "limit", "order", "automaton", "stop_state")
    }
    status = put(state.slots.status, jnp.full(new.slots.shape, RUNNING, jnp.int32))
    history = sampling.History(new.tokens, new.prompt, new.known)
    return state.replace(
        slots=state.slots.replace(status=status, **columns),
        sampler=sampling.admit(state.sampler, new.slots, new.sampler, history),
    )
