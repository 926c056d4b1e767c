"""The engines of a job: one, or as many as the mesh axis `data` has, independent of each other, in one program.

The state of several is the state of one with a leading axis (E, …) over `data` on every array but the table of stop
automata, which they share. Each has its own requests, slots and pages; they step together, and the program ends when
all are done. What the host reads comes out whole on every process of a mesh that has several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import engine, sharding
from kvjax import requests as table
from kvjax.requests import Rows
from kvjax.sharding import DATA, SEQ
from kvjax.state import EngineState, Policy, Program, engine_count, specs
from kvjax.state import policy as engine_policy
from kvjax.types import Params

EVERYWHERE = PartitionSpec()


def _on_each(
    program: Program, f: Callable, state: EngineState, *args: Any, in_specs: tuple = (), out: Any = (), over: tuple = ()
) -> Any:
    """f(one engine's state, *args) → (state, *outputs), for each engine.

    in_specs: of the arguments, PartitionSpec() for what all engines get and PartitionSpec("data") for (E, …).
    out: a pytree prefix of the outputs, which come from all engines as (E, …), everywhere.
    over: mesh axes that `f` divides K and V over by itself.
    """
    several = engine_count(program) > 1
    over = tuple(axis for axis in over if sharding.sizes(program.mesh)[axis] > 1)
    if not several and not over:
        with sharding.within(program.mesh):
            new, *outputs = f(state, *args)
            return new, *(jax.lax.with_sharding_constraint(outputs, EVERYWHERE) if program.mesh else outputs)
    where = specs(program, state, *over)
    given = jax.tree.map(lambda spec, arg: jax.tree.map(lambda _: spec, arg), in_specs, args, is_leaf=_is_spec)

    def one(state: EngineState, *args: Any) -> Any:
        if not several:
            return f(state, *args)
        first = jax.tree.map(lambda spec, x: x[0] if _by_engine(spec) else x, where, state, is_leaf=_is_spec)
        mine = jax.tree.map(lambda spec, x: x[0] if _by_engine(spec) else x, given, args, is_leaf=_is_spec)
        new, *outputs = f(first, *mine)
        new = jax.tree.map(lambda spec, x: x[None] if _by_engine(spec) else x, where, new, is_leaf=_is_spec)
        return new, *jax.tree.map(lambda x: jax.lax.all_gather(x, DATA), outputs)

    axes = {DATA, *over} if several else {*over}
    outputs = jax.tree.map(lambda _: EVERYWHERE, out)
    return sharding.manual(program.mesh, axes, one, (where, *given), (where, *outputs))(state, *args)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _by_engine(spec: PartitionSpec) -> bool:
    """Whether an array has a leading axis (E, …)."""
    return bool(spec) and spec[0] == DATA


@functools.partial(jax.jit, static_argnames=("program", "packed"), donate_argnames=("state",))
def run(program: Program, params: Params, state: EngineState, policy: Policy, *, packed: int) -> EngineState:
    """`kvjax.engine.run` for each engine; of several, `policy.low` is (E,) int32."""
    each = _policy_specs(program)

    def one(state: EngineState, params: Params, policy: Policy) -> tuple[EngineState]:
        return (engine.run(program, params, state, policy, packed=packed),)

    (state,) = _on_each(program, one, state, params, policy, in_specs=(EVERYWHERE, each), over=(SEQ,))
    return state


def _policy_specs(program: Program) -> Policy:
    each = jax.tree.map(lambda _: EVERYWHERE, engine_policy(0))
    return each.replace(low=PartitionSpec(DATA)) if engine_count(program) > 1 else each


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def submit(program: Program, state: EngineState, new: Rows) -> EngineState:
    """Requests enter each engine; `new` is (E, …) of several engines."""
    (state,) = _on_each(program, lambda s, n: (engine.submit(s, n),), state, new, in_specs=(PartitionSpec(DATA),))
    return state


@functools.partial(jax.jit, static_argnames=("program", "most"), donate_argnames=("state",))
def collect(program: Program, state: EngineState, *, most: int) -> tuple[EngineState, Rows]:
    """Takes up to `most` requests that have ended out of each engine; the order of the others is -1."""
    state, rows = _on_each(program, lambda s: engine.collect(s, most=most), state, out=(0,))
    return state, _flat(program, rows)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def cancel(program: Program, state: EngineState, policy: Policy, order: jax.Array) -> EngineState:
    """`kvjax.engine.cancel` in each engine."""
    each = _policy_specs(program)
    (state,) = _on_each(
        program,
        lambda s, policy, order: (engine.cancel(program, s, policy, order),),
        state, policy, order, in_specs=(each, EVERYWHERE),
    )  # fmt: skip
    return state


@functools.partial(jax.jit, static_argnames=("program", "every"))
def view(program: Program, state: EngineState, *, every: bool = False) -> Rows:
    """Copies of the requests that run, one a slot, or of every row; the order of idle ones is -1."""

    def one(state: EngineState) -> tuple[EngineState, Rows]:
        Q = state.requests.status.shape[0]
        rows = jnp.arange(Q, dtype=jnp.int32) if every else state.slots.request
        return state.replace(cache=None), table.look(state.requests, rows)

    _, rows = _on_each(program, one, state.replace(cache=None), out=(0,))
    return _flat(program, rows)


@functools.partial(jax.jit, static_argnames=("program",))
def glance(program: Program, state: EngineState) -> dict[str, jax.Array]:
    """What the host has to know after each segment, (E,) int32 each: steps, requests that wait, the statistics; and
    the orders (E, Q) of the requests in the table."""

    def one(state: EngineState) -> tuple[EngineState, dict[str, jax.Array]]:
        stats = {name: getattr(state.stats, name) for name in state.stats.__dataclass_fields__}
        return state, {"step": state.step, "waiting": state.line.count, "order": state.requests.order, **stats}

    _, seen = _on_each(program, one, state.replace(cache=None), out=(0,))
    return seen if engine_count(program) > 1 else jax.tree.map(lambda x: x[None], seen)


def _flat(program: Program, rows: Rows) -> Rows:
    """(E, W, …) → (E·W, …)."""
    return rows if engine_count(program) == 1 else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
