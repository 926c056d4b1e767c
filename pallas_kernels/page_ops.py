"""Operations on whole pages: copy within the pages, gather into a new array, scatter from one.

`pages` are (P, …) of any layout: one array of K, of V, of joined rows, of scales. Each operation is its plain-jnp
meaning ("xla") and a TPU kernel of DMAs from HBM to HBM, several of them in flight: no page passes through VMEM. The
compiler makes loops over pages of the plain form of `copy_pages`, too, but each page waits for the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BACKENDS = ("xla", "tpu", "tpu_interpret")

INTERPRET: bool | pltpu.InterpretParams = True
"""How "tpu_interpret" interprets; the tests look for races."""

FLIGHT = 16
"""DMAs in flight at once. A page of 128 rows of Llama 3 8B has 512 KiB: few of them fill the memory's queues."""


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array, count: jax.Array, *, backend: str) -> jax.Array:
    """Copies page source[i] to page target[i] for each i < count, in place when `pages` are donated.

    The work follows `count`. The copies have no order among each other: no target may be a source or another target of
    the same call.

    Args:
      pages: (P, …).
      source: (W,) int32 in [0, P); entries from `count` on may be anything.
      target: (W,) int32, the same.
      count: () int32, at most W.
      backend: one of BACKENDS.

    Returns:
      The new pages.

    Raises:
      NotImplementedError: for a backend that does not exist, or pages that the kernel cannot take apart.
    """
    if not _kernel_runs(backend, pages):

        def copy_one(i: jax.Array, pages: jax.Array) -> jax.Array:
            return pages.at[target[i]].set(pages[source[i]])

        return jax.lax.fori_loop(0, count, copy_one, pages)

    def kvjax_copy_pages(source_ref, target_ref, count_ref, _, pages_ref, sem):
        def copy(i):
            return pltpu.make_async_copy(pages_ref.at[source_ref[i]], pages_ref.at[target_ref[i]], sem)

        _stream(count_ref[0], lambda i: copy(i).start(), lambda _: copy(0).wait())

    scalars = (source, target, count.reshape(1))
    return _call(kvjax_copy_pages, scalars, (pages,), pages, alias=True, backend=backend)


def gather_pages(pages: jax.Array, index: jax.Array, *, backend: str) -> jax.Array:
    """Pages in a new, contiguous array, for offload and defragmentation.

    Args:
      pages: (P, …).
      index: (W,) int32, not negative, as often as one likes; P or more gives zeros, never what lay there before.
      backend: one of BACKENDS.

    Returns:
      (W, …).

    Raises:
      NotImplementedError: as `copy_pages`.
    """
    P = pages.shape[0]
    if not _kernel_runs(backend, pages):
        return pages.at[index].get(mode="fill", fill_value=0)

    def kvjax_gather_pages(index_ref, pages_ref, zeros_ref, out_ref, sem):
        def start(i):
            def fetch():
                pltpu.make_async_copy(pages_ref.at[index_ref[i]], out_ref.at[i], sem).start()

            def clear():
                pltpu.make_async_copy(zeros_ref.at[0], out_ref.at[i], sem).start()

            jax.lax.cond(index_ref[i] < P, fetch, clear)

        _stream(index.shape[0], start, lambda i: pltpu.make_async_copy(out_ref.at[i], out_ref.at[i], sem).wait())

    zeros = jnp.zeros((1, *pages.shape[1:]), pages.dtype)
    out = jax.ShapeDtypeStruct((index.shape[0], *pages.shape[1:]), pages.dtype)
    return _call(kvjax_gather_pages, (index,), (pages, zeros), out, alias=False, backend=backend)


def scatter_pages(pages: jax.Array, values: jax.Array, index: jax.Array, *, backend: str) -> jax.Array:
    """Writes values[i] into page index[i], in place when `pages` are donated.

    Args:
      pages: (P, …).
      values: (W, …) in the pages' dtype.
      index: (W,) int32, not negative, no page twice; P or more drops the value.
      backend: one of BACKENDS.

    Returns:
      The new pages.

    Raises:
      NotImplementedError: as `copy_pages`.
    """
    P = pages.shape[0]
    if not _kernel_runs(backend, pages):
        return pages.at[index].set(values, mode="drop")

    def kvjax_scatter_pages(index_ref, values_ref, _, pages_ref, sem):
        def start(i):
            @pl.when(index_ref[i] < P)
            def put():
                pltpu.make_async_copy(values_ref.at[i], pages_ref.at[index_ref[i]], sem).start()

        def wait(i):
            @pl.when(index_ref[i] < P)
            def arrive():
                pltpu.make_async_copy(values_ref.at[i], values_ref.at[i], sem).wait()

        _stream(index.shape[0], start, wait)

    return _call(kvjax_scatter_pages, (index,), (values, pages), pages, alias=True, backend=backend)


def _stream(count: jax.Array | int, start: Callable, wait: Callable) -> None:
    """Starts `count` copies of equal size on one semaphore, with at most FLIGHT of them in flight.

    The semaphore counts what has arrived, so `wait` takes off one copy's worth, whichever copy it was.
    """

    def step(i, carry):
        @pl.when(i >= FLIGHT)
        def make_room():
            wait(i - FLIGHT)

        start(i)
        return carry

    def drain(i, carry):
        wait(i)
        return carry

    jax.lax.fori_loop(0, count, step, 0)
    jax.lax.fori_loop(jnp.maximum(count - FLIGHT, 0), count, drain, 0)


def _call(
    kernel: Callable,
    scalars: tuple[jax.Array, ...],
    arrays: tuple[jax.Array, ...],
    out: jax.Array | jax.ShapeDtypeStruct,
    *,
    alias: bool,
    backend: str,
) -> jax.Array:
    """A kernel over `scalars` in SMEM and `arrays` in HBM; with `alias`, the last array becomes the result."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name=kernel.__name__,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[anywhere] * len(arrays),
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(scalars) + len(arrays) - 1: 0} if alias else {},
        interpret=INTERPRET if backend == "tpu_interpret" else False,
    )(*scalars, *arrays)


def _kernel_runs(backend: str, pages: jax.Array) -> bool:
    """Whether the backend is the kernel; raises where it cannot be."""
    if backend not in BACKENDS:
        raise NotImplementedError(f"page backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    if backend == "xla":
        return False
    # The last two axes are tiled. Where they are not whole tiles, XLA lays other axes innermost, and around the kernel
    # it would copy all the pages, twice; a page that is part of a tile cannot be copied by itself at all.
    rows, lanes = pages.shape[-2:]
    tiled = lanes % 128 == 0 and (rows % 8 == 0 or (rows in (1, 2, 4) and rows * _bits(pages.dtype) >= 32))
    if pages.ndim < 3 or not tiled:
        raise NotImplementedError(f"pages of shape {pages.shape} and {pages.dtype} are not whole tiles of HBM")
    return True


def _bits(dtype: jnp.dtype) -> int:
    return 4 if dtype in (jnp.int4, jnp.uint4) else dtype.itemsize * 8
