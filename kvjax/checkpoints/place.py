"""From a checkpoint to parameters on the devices, and random parameters of the same form.

On the host there is one leaf at a time, filled a few rows at a time; a CPU device adopts its memory.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.checkpoints import fill
from kvjax.checkpoints.source import TensorSource
from kvjax.errors import ModelError
from kvjax.types import Family, Params, ParamSpec

ShardingOf = Callable[[ParamSpec], jax.sharding.Sharding | None]

IGNORED = (
    *("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias"),
    *("*.attention.rotary_emb.inv_freq", "lm_head.weight", "embed_out.weight"),
)
"""Tensors that may be left over: recomputed constants, and the output projection that a tied model shares."""


def default_device(_: ParamSpec) -> None:
    """A `sharding_of` that leaves every parameter on the default device."""


def load_params(
    source: TensorSource,
    specs: Any,
    *,
    dtype: Any,
    sharding_of: ShardingOf = default_device,
    stacked: bool = False,
    prefix: str = "",
    unused: Sequence[str] = (),
) -> Params:
    """Reads a model's parameters.

    Args:
      source: the checkpoint.
      specs: a tree of ParamSpec, as `Family.abstract` gives it.
      dtype: of all parameters.
      sharding_of: where a parameter goes; None is the default device.
      stacked: whether the list `specs["layers"]` becomes one tree whose leaves have a leading axis L.
      prefix: the beginning of names that a checkpoint of the bare transformer leaves out.
      unused: patterns of tensors that may be left over, beside `IGNORED`.

    Returns:
      The tree of `specs` with arrays of `dtype` for leaves.

    Raises:
      ModelError: a tensor is missing, has another shape, or is one that no parameter uses; or layers of different
        structure are to be stacked.
    """
    specs = _as_stored(source, specs, prefix)
    _check_names(source, specs, unused)
    if stacked:
        check_stackable(specs)
    dtype = np.dtype(dtype)
    load = functools.partial(_load_leaf, source, dtype=dtype, sharding_of=sharding_of)
    if not stacked:
        return jax.tree.map(lambda spec: load((spec,), False), specs)
    outside, layers = _split(specs)
    params = jax.tree.map(lambda spec: load((spec,), False), outside)
    return {**params, "layers": jax.tree.map(lambda *group: load(group, True), *layers)}


def init_params(
    key: jax.Array,
    specs: Any,
    *,
    dtype: Any,
    sharding_of: ShardingOf = default_device,
    stacked: bool = False,
) -> Params:
    """Random parameters: normal with each spec's `init_scale`, ones where it is None, zeros where it is 0.

    Args:
      key: random key; the same key gives the same numbers on the same kind of device, stacked or not.
      specs, dtype, sharding_of, stacked: as in `load_params`.
    """
    leaves, structure = jax.tree.flatten(specs)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    make = functools.partial(_init_leaf, key, dtype=np.dtype(dtype), sharding_of=sharding_of)
    if not stacked:
        return jax.tree.map(lambda spec, i: make((spec,), (i,), False), specs, numbers)
    outside, layers = _split(specs)
    outside_numbers, layer_numbers = _split(numbers)
    params = jax.tree.map(lambda spec, i: make((spec,), (i,), False), outside, outside_numbers)
    count = len(layers)
    stack = jax.tree.map(lambda *both: make(both[:count], both[count:], True), *layers, *layer_numbers)
    return {**params, "layers": stack}


def shapes(specs: Any, *, dtype: Any, sharding_of: ShardingOf = default_device, stacked: bool = False) -> Params:
    """The tree that `load_params` would give, of `jax.ShapeDtypeStruct`: for programs compiled ahead of time."""

    def shape(*group: ParamSpec) -> jax.ShapeDtypeStruct:
        spec = _stack_spec(group[0], len(group)) if stacked and len(group) > 1 else group[0]
        return jax.ShapeDtypeStruct(spec.shape, np.dtype(dtype), sharding=sharding_of(spec))

    if not stacked:
        return jax.tree.map(shape, specs)
    outside, layers = _split(specs)
    return {**jax.tree.map(shape, outside), "layers": jax.tree.map(shape, *layers)}


def _split(tree: Any) -> tuple[Any, list[Any]]:
    """(everything but the layers, the layers)."""
    return {key: value for key, value in tree.items() if key != "layers"}, list(tree["layers"])


def load_model(source: TensorSource, family: Family, config: Any, **how: Any) -> Params:
    """`load_params` for a family; `how` is its dtype, sharding_of and stacked."""
    return load_params(source, family.abstract(config), prefix=family.prefix, unused=family.unused(config), **how)


def check_stackable(specs: Any) -> None:
    """Raises ModelError if the layers differ in more than their names."""
    forms = [jax.tree.map(lambda spec: (spec.shape, spec.axes), layer) for layer in specs["layers"]]
    for i, form in enumerate(forms):
        if form != forms[0]:
            raise ModelError(
                f"Layer {i} has other parameters than layer 0, so layers cannot be scanned: load unrolled."
            )


def _as_stored(source: TensorSource, specs: Any, prefix: str) -> Any:
    """The specs with the names of this checkpoint: without the prefix if none of its tensors has it."""
    if not prefix or any(name.startswith(prefix) for name in source.names()):
        return specs

    def bare(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, names=tuple(name.removeprefix(prefix) for name in spec.names))

    return jax.tree.map(bare, specs)


def _check_names(source: TensorSource, specs: Any, unused: Sequence[str]) -> None:
    present = set(source.names())
    wanted = {name for spec in jax.tree.leaves(specs) for name in spec.names}
    missing = sorted(wanted - present)
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(
            f"Tensor {missing[0]}{more} missing from {source.describe()}: is it the whole checkpoint, unquantized?"
        )
    rules = (*IGNORED, *unused)
    left = [name for name in sorted(present - wanted) if not any(fnmatch.fnmatch(name, rule) for rule in rules)]
    if left:
        raise ModelError(
            f"{source.describe()} has {len(left)} tensors that this model does not use ({', '.join(left[:3])}): "
            "it is of another architecture, or quantized in a way that is not supported."
        )


def _stack_spec(spec: ParamSpec, layers: int) -> ParamSpec:
    return dataclasses.replace(spec, shape=(layers, *spec.shape), axes=(None, *spec.axes))


def _load_leaf(
    source: TensorSource, group: tuple[ParamSpec, ...], stack: bool, *, dtype: np.dtype, sharding_of: ShardingOf
) -> jax.Array:
    """One parameter; of a group of layers, stacked along a new first axis, if asked."""
    spec = _stack_spec(group[0], len(group)) if stack else group[0]
    sharding = sharding_of(spec)
    if stack and not _on_host(sharding):
        return _stack_on_device(source, group, spec, dtype, sharding)
    out = fill.aligned_empty(spec.shape, dtype)
    for layer, part in enumerate(group):
        fill.fill(source, part, out[layer] if stack else out)
    return _put(out, sharding)


def _stack_on_device(
    source: TensorSource,
    group: tuple[ParamSpec, ...],
    spec: ParamSpec,
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """Stacks on the devices: the host holds one layer, the devices one copy, updated in place."""
    stack = _zeros(spec.shape, dtype, sharding)
    for layer, part in enumerate(group):
        host = fill.aligned_empty(part.shape, dtype)
        fill.fill(source, part, host)
        stack = _set_layer(stack, _put_layer(host, sharding), np.int32(layer))
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stack, layer[None], index, 0)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


def _put_layer(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """One layer, sharded as the stack is along its other axes."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        rest = jax.sharding.PartitionSpec(*sharding.spec[1:])
        sharding = jax.sharding.NamedSharding(sharding.mesh, rest, memory_kind=sharding.memory_kind)
    return _put(host, sharding)


def _on_host(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether the parameter's devices share the host's memory, so that filling it there costs no second copy."""
    devices = jax.devices()[:1] if sharding is None else sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _put(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Hands an array over. It must not be written afterwards: a CPU device may have adopted its memory.

    Waits for an accelerator to have it: transfers under way would keep their host copies, one leaf upon the other.
    """
    if sharding is None:
        array = jax.device_put(host)
    else:
        array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return array if _on_host(sharding) else array.block_until_ready()


def _init_leaf(
    key: jax.Array,
    group: tuple[ParamSpec, ...],
    numbers: tuple[int, ...],
    stack: bool,
    *,
    dtype: np.dtype,
    sharding_of: ShardingOf,
) -> jax.Array:
    spec = _stack_spec(group[0], len(group)) if stack else group[0]
    sharding = sharding_of(spec)
    if not _on_host(sharding):
        make = _initializer(group[0].shape, group[0].init_scale, dtype, stack, sharding)
        return make(key, np.asarray(numbers if stack else numbers[0], np.uint32))
    out = fill.aligned_empty(spec.shape, dtype)
    for layer, number in enumerate(numbers):
        _init_on_host(key, number, group[layer].init_scale, out[layer] if stack else out)
    return _put(out, sharding)


def _init_on_host(key: jax.Array, number: int, scale: float | None, out: np.ndarray) -> None:
    """For CPU devices, where XLA takes a second to compile a random generator for each shape."""
    if not scale:
        out[...] = 1 if scale is None else 0
        return
    seed = [*np.asarray(jax.random.key_data(key)).ravel().tolist(), number]
    sample = np.random.Generator(np.random.Philox(seed)).standard_normal(out.shape, np.float32)
    sample *= np.float32(scale)
    out[...] = sample


@functools.lru_cache(maxsize=256)
def _initializer(
    shape: tuple[int, ...],
    scale: float | None,
    dtype: np.dtype,
    stack: bool,
    sharding: jax.sharding.Sharding | None,
) -> Callable[..., jax.Array]:
    """Makes the numbers where they stay; compiled once for all layers of a model."""

    def make(key: jax.Array, number: jax.Array) -> jax.Array:
        if not scale:
            return jax.numpy.full(shape, 1 if scale is None else 0, dtype)
        sample = jax.random.normal(jax.random.fold_in(key, number), shape, jax.numpy.float32)
        return (sample * scale).astype(dtype)

    return jax.jit(jax.vmap(make, in_axes=(None, 0)) if stack else make, out_shardings=sharding)
