"""Logical axes to mesh axes: the one table that maps them."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.types import ParamSpec

MESH_AXES = ("data", "seq", "expert", "model")

RULES: dict[str, str] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffw": "model",
    "experts": "expert",
}
"""Logical axis → mesh axis; a logical axis that is not here is replicated."""


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with axes that leave sharding to XLA; those of `jax.make_mesh` want every operation to name its own."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


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
