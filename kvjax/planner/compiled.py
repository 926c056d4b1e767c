"""The compiler's own account of a plan: the engine's loop, compiled ahead of time for chips that need not be there.

The package libtpu has the compilers of all TPUs. Nothing is allocated: parameters and state are shapes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import engines, plans, sharding, storages
from kvjax import state as engine_state
from kvjax.checkpoints import place
from kvjax.errors import ModelError, RequestError
from kvjax.planner.memory import MemoryAccount, queue
from kvjax.planner.meshes import Axes
from kvjax.state import Policy

if TYPE_CHECKING:
    from kvjax.planner import Model, Plan, Slice


def compile_for(plan: Plan) -> MemoryAccount:
    """Compiles the loop of a plan for its chips and reads off what it needs on each; takes one to several minutes.

    Raises:
      RequestError: the chips are no TPUs, libtpu is not installed or does not know the slice, or the program does not
        fit; the text has the compiler's own numbers then.
    """
    mesh = mesh_of(plan.slice, plan.axes)
    program, arguments = job_of(plan, mesh)
    try:
        compiled = engines.run.lower(program, *arguments, packed=plan.packed).compile()
    except Exception as error:  # of XLA: its type says nothing
        raise RequestError(_why(plan, str(error))) from error
    return account_of(compiled, arguments)


def mesh_of(where: Slice, axes: Axes) -> Mesh:
    """A mesh of the devices of a slice that is described, not there. Raises RequestError."""
    if where.chip.platform != "tpu":
        raise RequestError(f"--compile asks the TPU's compiler, and {where} has none: leave it out.")
    if importlib.util.find_spec("libtpu") is None:
        raise RequestError("--compile needs the TPU's compiler: pip install libtpu.")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no TPU here to be asked about
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    name = {"7x": "tpu7x"}.get(where.chip.name, where.chip.name)
    shape = "x".join(map(str, where.topology or torus(where.chips, where.chip.dims)))
    more = {"chip_config_name": "megacore"} if where.chip.name == "v4" else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **more).devices
    except Exception as error:
        raise RequestError(f"The TPU's compiler does not know the slice {name}:{shape}: give a topology.") from error
    chosen: Any = np.asarray(devices[: where.devices]).reshape(axes.data, axes.seq, axes.expert, axes.model)
    return sharding.automatic(Mesh(chosen, sharding.MESH_AXES))


def torus(chips: int, dims: int) -> tuple[int, ...]:
    """The most even torus of so many chips, at least 2 × 2 of them."""
    sizes = [1] * dims
    for factor in sorted(_factors(max(chips, 4)), reverse=True):
        sizes[sizes.index(min(sizes))] *= factor
    return tuple(sorted(sizes, reverse=dims == 3)) if dims == 3 and min(sizes) == 1 else tuple(sorted(sizes))


def _factors(n: int) -> list[int]:
    for p in range(2, math.isqrt(n) + 1):
        if n % p == 0:
            return [p, *_factors(n // p)]
    return [n] if n > 1 else []


def job_of(plan: Plan, mesh: Mesh) -> tuple[Any, tuple[Any, Any, Policy]]:
    """(program, (parameters, state, policy)) of the loop, all of them shapes with their places on the mesh."""
    params, stacked = params_of(plan.model, plan.dtype, mesh)
    tokens: Any = range(plan.model.config.vocab)  # their number counts, not their bytes
    model = plans.Model(
        plan.model.family, plan.model.config, params, (0,), tokens, plan.dtype,
        storages.resolve(plan.storage, plan.dtype),
        stacked, mesh.abstract_mesh,
    )  # fmt: skip
    slots = -(-plan.batch // plan.axes.data)
    options = plans.Options(slots=slots, rows=plan.rows, kv_bytes=1 << 60, backend="tpu", layout="joined")
    cache = plans.cache_config(model, slots, plan.context, options, plan.packed)
    pages = slots * -(-plan.context // cache.rows)
    program = plans.program_of(model, dataclasses.replace(cache, pages=pages), backend="tpu")
    table = jax.ShapeDtypeStruct((1, 2, model.config.vocab), jnp.int8)
    empty = plans.starter(program, mesh, queue(slots, cache.capacity), 1, 1, None)
    state = empty.eval_shape(table)
    state = jax.tree.map(_placed, state, engine_state.shardings(program, state, mesh))
    return program, (params, state, _policy(plan.axes, mesh))


def params_of(model: Model, dtype: str, mesh: Mesh) -> tuple[Any, bool]:
    """The parameters as shapes on the mesh, and whether their layers are stacked, which compiles one for all."""
    specs = model.family.abstract(model.config)
    groups = dict.fromkeys(model.family.kv_specs(model.config, "bfloat16"))
    try:
        place.check_stackable(specs)
        stacked = len(groups) == 1
    except ModelError:
        stacked = False
    return place.shapes(specs, dtype=dtype, sharding_of=sharding.param_sharding(mesh), stacked=stacked), stacked


def _placed(shape: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)


def _policy(axes: Axes, mesh: Mesh) -> Policy:
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    policy: Any = jax.tree.map(lambda _: number, engine_state.policy(0))
    if axes.data == 1:
        return policy
    each = NamedSharding(mesh, PartitionSpec(sharding.DATA))
    return policy.replace(low=jax.ShapeDtypeStruct((axes.data,), jnp.int32, sharding=each))


def account_of(compiled: Any, arguments: tuple[Any, Any, Policy]) -> MemoryAccount:
    """What a compiled loop needs on each device, as XLA accounts it.

    XLA gives the sum of its arguments; whose it is follows from their layouts. What a donated state does not take the
    place of is counted with the temporaries.
    """
    memory = compiled.memory_analysis()
    params, state, policy = arguments
    formats = compiled.input_formats[0]
    sizes = jax.tree.map(_bytes, (params, state, policy), formats)
    weights, kv = _total(sizes[0]), _total([group.kv for group in sizes[1].cache.groups])
    return MemoryAccount(
        weights=weights,
        kv=kv,
        state=memory.argument_size_in_bytes - weights - kv,
        temporaries=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )


def _total(tree: Any) -> int:
    return sum(jax.tree.leaves(tree))


def _bytes(shape: jax.ShapeDtypeStruct, where: Any) -> int:
    """Bytes of an argument on a device, with the tiles that its layout fills up."""
    local = where.sharding.shard_shape(shape.shape)
    if not local:
        return 0
    order, tiling = where.layout.major_to_minor, where.layout.tiling
    sizes = [local[axis] for axis in order]
    tile = tiling[0] if tiling else ()
    for back, size in enumerate(reversed(tile), 1):
        if back <= len(sizes):
            sizes[-back] = -(-sizes[-back] // size) * size
    return math.prod(sizes) * jnp.dtype(shape.dtype).itemsize


def _why(plan: Plan, error: str) -> str:
    over = re.search(r"\((\S+)\) exceeds available HBM \((\S+)\)", error) or re.search(
        r"Used (\S+) of (\S+) hbm", error
    )
    if over:
        return (
            f"{plan.model} does not fit on {plan.slice} with {plan.axes}: the compiler counts {over[1]} of {over[2]} a "
            "device. Take more chips, another mesh, a shorter context or a smaller batch."
        )
    return f"The TPU's compiler refuses the loop of {plan.model} on {plan.slice}: {' '.join(error.split())[:300]}"
