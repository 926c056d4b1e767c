"""Operations on whole pages: both backends against numpy, without races, and compiled for TPUs in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from kvjax.pallas_kernels import page_ops
from kvjax.pallas_kernels.page_ops import copy_pages, gather_pages, scatter_pages

P, W = 40, 20  # more copies than are in flight at once
RUNNING = ("xla", "tpu_interpret")
SHAPES = {"joined": (P, 2, 16, 128), "by heads": (P, 2, 8, 128)}


@pytest.fixture(autouse=True, scope="module")
def look_for_races():
    """With the few clocks that are the default, several DMAs share one, and races between them go unseen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_ops, "INTERPRET", pltpu.InterpretParams(detect_races=True, vector_clock_size=64))
        yield


def assert_no_races():
    races = interpret_pallas_call.races  # of the last call
    assert races is not None and not races.races_found


@functools.cache
def jitted(op):
    return jax.jit(op, static_argnames="backend")


def run(op, *args, backend):
    out = jitted(op)(*map(jnp.asarray, args), backend=backend)
    jax.block_until_ready(out)
    if backend == "tpu_interpret":
        assert_no_races()
    return np.asarray(out)


def filled(rng, shape, dtype=np.float32):
    x = rng.standard_normal(shape).astype(np.float32)
    x.flat[:: x.size // 7] = np.nan
    return x.astype(dtype)


cases = pytest.mark.parametrize("layout", SHAPES)
backends = pytest.mark.parametrize("backend", RUNNING)
few = settings(max_examples=4, deadline=None)
seeds = given(st.integers(0, 2**32 - 1), st.integers(0, W))


@cases
@backends
@few
@seeds
def test_copy(layout, backend, seed, count):
    rng = np.random.default_rng(seed)
    pages = filled(rng, SHAPES[layout])
    order = rng.permutation(P)
    target, source = order[:W].astype(np.int32), rng.choice(order[W:], W).astype(np.int32)
    target[count:], source[count:] = -1, 2**31 - 1  # not looked at
    wanted = pages.copy()
    wanted[target[:count]] = pages[source[:count]]
    got = run(copy_pages, pages, source, target, np.int32(count), backend=backend)
    np.testing.assert_array_equal(got, wanted)


@cases
@backends
@few
@seeds
def test_gather(layout, backend, seed, dropped):
    rng = np.random.default_rng(seed)
    pages = filled(rng, SHAPES[layout])
    index = rng.integers(0, P, W).astype(np.int32)
    index[rng.permutation(W)[:dropped]] = rng.choice([P, P + 5, 2**31 - 1], dropped)
    wanted = np.where((index < P).reshape(-1, *(1,) * (pages.ndim - 1)), pages[np.minimum(index, P - 1)], 0)
    np.testing.assert_array_equal(run(gather_pages, pages, index, backend=backend), wanted)


@cases
@backends
@few
@seeds
def test_scatter(layout, backend, seed, dropped):
    rng = np.random.default_rng(seed)
    pages, values = filled(rng, SHAPES[layout]), filled(rng, (W, *SHAPES[layout][1:]))
    index = rng.permutation(P)[:W].astype(np.int32)
    index[rng.permutation(W)[:dropped]] = rng.choice([P, P + 5, 2**31 - 1], dropped)
    wanted = pages.copy()
    wanted[index[index < P]] = values[index < P]
    np.testing.assert_array_equal(run(scatter_pages, pages, values, index, backend=backend), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@backends
def test_dtypes(dtype, backend):
    pages = (np.arange(P * 8 * 128) % 97).reshape(P, 8, 128).astype(jnp.dtype(dtype))
    index = np.asarray([3, 39, 0], np.int32)
    copied = run(copy_pages, pages, index, index + np.asarray([1, -2, 7], np.int32), np.int32(2), backend=backend)
    np.testing.assert_array_equal(copied[[4, 37, 7]], pages[[3, 39, 7]])
    np.testing.assert_array_equal(run(gather_pages, pages, index, backend=backend), pages[index])


def test_what_is_refused():
    index, count = jnp.zeros(1, jnp.int32), jnp.int32(1)
    with pytest.raises(NotImplementedError, match="does not exist"):
        copy_pages(jnp.zeros((4, 8, 128)), index, index, count, backend="gpu")
    for shape, dtype in (
        ((4, 128), "float32"),
        ((4, 8, 64), "float32"),
        ((4, 5, 128), "float32"),
        ((4, 1, 128), "int8"),
    ):
        with pytest.raises(NotImplementedError, match="whole tiles"):
            copy_pages(jnp.zeros(shape, dtype), index, index, count, backend="tpu")
        copy_pages(jnp.zeros(shape, dtype), index, index, count, backend="xla")


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize(("shape", "dtype"), [((256, 64, 2048), "bfloat16"), ((256, 16, 640), "int8")])
def test_compiled_for_a_tpu(topology, shape, dtype):
    place = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def compiled(op, *args, donate=True):
        run = jax.jit(functools.partial(op, backend="tpu"), donate_argnums=0 if donate else ())
        return run.trace(*args).lower().compile()

    pages, index, size = array(shape, dtype), array((32,)), int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    for program in (
        compiled(copy_pages, pages, index, index, array(())),
        compiled(scatter_pages, pages, array((32, *shape[1:]), dtype), index),
    ):
        assert program.memory_analysis().alias_size_in_bytes >= size
        assert program.memory_analysis().temp_size_in_bytes < 2 * size // shape[0]  # two pages
    program = compiled(gather_pages, pages, index, donate=False)
    assert program.memory_analysis().temp_size_in_bytes < 2 * size // shape[0]
