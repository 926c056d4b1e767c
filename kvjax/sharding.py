"""Logical axes to mesh axes: the one table that maps them, and programs over a mesh.

data     independent engines, each with its own requests and pages
seq      the tokens of a sequence: its pages are dealt over it, and the tokens of a prompt step
expert   the experts of a mixture
model    heads, ffw and vocabulary
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.types import ParamSpec

DATA, SEQ, EXPERT, MODEL = MESH_AXES = ("data", "seq", "expert", "model")

RULES: dict[str, str] = {
    "vocab": MODEL,
    "heads": MODEL,
    "kv_heads": MODEL,
    "ffw": MODEL,
    "experts": EXPERT,
}
"""Logical axis → mesh axis; a logical axis that is not here is replicated."""


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with all of MESH_AXES, those that it lacks of size 1, which leave sharding to XLA.

    The axes of `jax.make_mesh` want every operation to name its own.
    """
    devices, names = mesh.devices, list(mesh.axis_names)
    for name in MESH_AXES:
        if name not in names:
            devices, names = np.expand_dims(devices, -1), [*names, name]
    order = [names.index(name) for name in MESH_AXES]
    return Mesh(devices.transpose(order), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def param_sharding(mesh: Mesh | None) -> Callable[[ParamSpec], NamedSharding | None]:
    """A function from a parameter to its sharding on the mesh; None, the default device, without a mesh.

    A dimension that its mesh axis does not divide (fewer kv heads than chips, say) is replicated.
    """
    if mesh is None:
        return lambda spec: None

    mesh = automatic(mesh)

    def axis(name: str | None, size: int) -> str | None:
        mapped = RULES.get(name or "")
        return mapped if mapped in mesh.shape and size % mesh.shape[mapped] == 0 else None

    def sharding(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*map(axis, spec.axes, spec.shape)))

    return sharding


def sizes(mesh: Any) -> dict[str, int]:
    """The size of each of MESH_AXES in a mesh or abstract mesh, or None; 1 of those that it does not have."""
    shape = {} if mesh is None else mesh.shape
    return {name: shape.get(name, 1) for name in MESH_AXES}


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters lie on; None for one device."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def put(host: np.ndarray, where: jax.sharding.Sharding | None) -> jax.Array:
    """An array of the host's, copied to the devices: what is donated must not be memory of NumPy's."""
    if where is None or len(where.device_set) == 1:
        return jnp.array(host)
    return jax.make_array_from_callback(host.shape, where, lambda index: np.array(host[index]))


def within(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager:
    """The context in which programs over the mesh are traced; as it is, without a mesh or inside a manual one."""
    now = jax.sharding.get_abstract_mesh()
    if mesh is None or AxisType.Manual in now.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def manual(mesh: AbstractMesh | None, axes: set[str], f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each part of the mesh over `axes`, the other axes left to XLA; as it is where there are none.

    The specs name none but `axes`.
    """

    def as_it_is(*args: Any) -> Any:
        with within(mesh):
            return f(*args)

    if not axes:
        return as_it_is
    return jax.shard_map(f, mesh=mesh, axis_names=axes, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def divided_here() -> bool:
    """Whether there is something to divide among chips in this context: a free mesh axis of more than one."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(mesh.shape[name] > 1 and kind != AxisType.Manual for name, kind in kinds)


def heads_and_rows(head_axis: int, row_axis: int, heads: str | None, rows: str | None) -> PartitionSpec:
    """Of an array of pages, whose axes of heads and of rows lie over these mesh axes."""
    axes: list[str | None] = [None] * (max(head_axis, row_axis) + 1)
    axes[head_axis], axes[row_axis] = heads, rows
    return PartitionSpec(*axes)


def _manual_size(axis: str) -> int:
    """Parts of a mesh axis if it is manual in this context; else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if kinds.get(axis) == AxisType.Manual else 1


def any_engine(flag: jax.Array) -> jax.Array:
    """Whether a () bool is set in any engine of the mesh axis `data`.

    All engines take the same branches and equally many steps: a collective that XLA inserts may wait for every device,
    not only for those of one engine.
    """
    return jax.lax.pmax(flag.astype(jnp.int32), DATA) > 0 if _manual_size(DATA) > 1 else flag


def every_engine(flag: jax.Array) -> jax.Array:
    """Whether a () bool is set in all of them."""
    return jax.lax.pmin(flag.astype(jnp.int32), DATA) > 0 if _manual_size(DATA) > 1 else flag


def of_first(tree: Any) -> Any:
    """What the first chip of the axis `seq` has: for what all compute and none may see otherwise, not even by a bit."""
    if _manual_size(SEQ) == 1:
        return tree
    first = jax.lax.axis_index(SEQ) == 0
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(first, x, jnp.zeros((), x.dtype)), SEQ), tree)


def whole(tree: Any) -> Any:
    """Keeps XLA from dividing what every chip decides for itself: no collective then stands in a loop whose length
    differs from engine to engine."""
    if not divided_here():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def on_each(f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each device of the mesh in context, over all of its axes that are not manual already."""
    mesh = jax.sharding.get_abstract_mesh()
    free = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    return jax.shard_map(f, mesh=mesh, axis_names=free, in_specs=in_specs, out_specs=out_specs, check_vma=False)
