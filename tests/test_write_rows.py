"""New rows written into joined pages on a TPU: interpreted against numpy, and compiled in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from kvjax.pallas_kernels import write_rows_tpu
from kvjax.pallas_kernels.write_rows_tpu import work_items, write_rows

LATE = pltpu.InterpretParams(detect_races=True, vector_clock_size=64)
"""A DMA moves nothing before it is waited for: what is not waited for is missing."""
EARLY = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode="eager")
"""A DMA is done when it is started: a buffer reused too early is a race. With fewer clocks, DMAs share them."""
jitted = jax.jit(write_rows, static_argnames=("one_per_stripe", "slots", "interpret"))
C, B, M = 2, 6, 3


def assert_no_races():
    races = interpret_pallas_call.races  # of the last call
    assert races is not None and not races.races_found


def bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def rows_of(rng, shape, dtype):
    """Any bits but those of NaN, which copies in XLA may change."""
    x = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]
    return np.where(np.isnan(x.astype(np.float32)), x.dtype.type(0), x)


def places(rng, counts, positions, rows, dropped):
    """Page and row of tokens packed slot after slot, then of dropped ones; pages P, in random order."""
    P = B * M + 2
    table = rng.permutation(P)[: B * M].reshape(B, M)
    page, row = [], []
    for b, (count, position) in enumerate(zip(counts, positions, strict=True)):
        for at in range(position, position + count):
            page.append(table[b, at // rows])
            row.append(at % rows)
    page += list(rng.integers(P, 2**30, dropped))
    row += [0] * dropped
    return P, np.asarray(page, np.int32), np.asarray(row, np.int32)


def check(rng, dtype, rows, place, interpret=LATE, **how):
    P, page, row = place
    pages, new = rows_of(rng, (P, C, rows, 128), dtype), rows_of(rng, (len(page), C * 128), dtype)
    wanted = bits(pages).copy()
    wanted[page[page < P], :, row[page < P]] = bits(new).reshape(len(page), C, 128)[page < P]
    got = jitted(*map(jnp.asarray, (pages, new, page, row)), interpret=interpret, **how)
    np.testing.assert_array_equal(bits(np.asarray(got)), wanted)
    assert_no_races()


CASES = [("float32", 16), ("bfloat16", 16), ("int8", 16), ("float8_e4m3fn", 32)]
T = 40
"""More items than buffers in the ring."""


@pytest.mark.parametrize(("dtype", "rows"), CASES)
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_decode(dtype, rows, seed):
    """A token of each slot at most, anywhere, some dropped in between."""
    rng = np.random.default_rng(seed)
    P = T + 3
    page = rng.permutation(P)[:T].astype(np.int32)
    page[rng.permutation(T)[: rng.integers(0, T)]] = P + rng.integers(0, 9)
    check(rng, dtype, rows, (P, page, rng.integers(0, rows, T).astype(np.int32)), one_per_stripe=True, slots=T)


@pytest.mark.parametrize("live", [0, 1, 7, 8, 9, 16, 17, 25])
@pytest.mark.parametrize("interpret", [LATE, EARLY], ids=["late", "early"])
def test_ring_fills_and_drains(live, interpret):
    rng = np.random.default_rng(live)
    page = np.where(np.arange(T) < live, np.arange(T), T + 3).astype(np.int32)
    place = (T + 3, rng.permutation(page), rng.integers(0, 16, T).astype(np.int32))
    check(rng, "bfloat16", 16, place, interpret, one_per_stripe=True, slots=T)


@st.composite
def ragged(draw):
    """Cuts of T tokens: how many are dropped at the end, and how many each slot has."""
    cuts = sorted(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    return [int(n) for n in np.diff([0, *cuts])], draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize(("dtype", "rows"), CASES)
@settings(max_examples=3, deadline=None)
@given(ragged())
@example(([0] * B, 0))
@example(([1, 1, 1, 1, 1, 1], 1))
@example(([0, T, 0, 0, 0, 0], 2))
def test_chunks(dtype, rows, batch):
    counts, seed = batch
    rng = np.random.default_rng(seed)
    positions = [rng.integers(0, M * rows - count + 1) if count <= M * rows else 0 for count in counts]
    place = places(rng, counts, positions, rows, T - sum(counts))
    check(rng, dtype, rows, place, one_per_stripe=False, slots=B)


def test_chunks_reuse_no_buffer_early():
    """More stripes than buffers, partial and whole ones."""
    rng = np.random.default_rng(0)
    place = places(rng, [3, 40, 1, 42, 20, 46], [0, 5, 15, 2, 7, 1], 16, 3)
    check(rng, "float32", 16, place, EARLY, one_per_stripe=False, slots=B)


@pytest.mark.parametrize("tokens", [1, 33])
def test_few_tokens_and_unknown_slots(tokens):
    rng = np.random.default_rng(tokens)
    place = places(rng, [tokens] + [0] * (B - 1), [5] * B, 16, 0)
    check(rng, "bfloat16", 16, place, one_per_stripe=False)


def test_decode_rows_beyond_vmem(monkeypatch):
    monkeypatch.setattr(write_rows_tpu, "WHOLE_ROWS_BYTES", 0)
    rng = np.random.default_rng(0)
    page = np.asarray([3, 99, 1, 4, 2], np.int32)
    check(rng, "bfloat16", 16, (6, page, np.asarray([0, 3, 15, 8, 7], np.int32)), one_per_stripe=True)


counted = jax.jit(work_items, static_argnums=(2, 3, 4, 5))


@pytest.mark.parametrize("stripe", [8, 16, 32])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 31)), min_size=B, max_size=B))
@example([(40, 31)] * B)
@example([(2, 31), (2, 31), (2, 15), (2, 7), (26, 7), (34, 31)])
@settings(max_examples=10, deadline=None)
def test_items_are_the_stripes_and_fit_their_bound(stripe, runs):
    rows, total = 32, 40 * B
    page, row = [], []
    for b, (count, start) in enumerate(runs):
        page += [4 * b + at // rows for at in range(start, start + count)]
        row += [at % rows for at in range(start, start + count)]
    wanted = len(set(zip(page, (r // stripe for r in row), strict=True)))
    live = len(page)
    assert wanted <= (live - 2 * B) // stripe + 2 * B  # what the bound would be without padding
    pad = [0] * (total - live)
    arrays = jnp.asarray(page + [1000 + n for n in pad], jnp.int32), jnp.asarray(row + pad, jnp.int32)
    count, first, seen, _ = counted(*arrays, 1000, rows, stripe, B)
    assert count[0] == wanted < first.shape[0] and seen[-1] == live
    assert (np.diff(first[: wanted + 1]) > 0).all() and (first[wanted:] == total).all()


def test_what_is_refused():
    token = jnp.zeros(1, jnp.int32)
    for shape, dtype in (
        ((4, 1, 16, 64), "float32"),
        ((4, 1, 20, 128), "float32"),
        ((4, 1, 24, 128), "int8"),
        ((4, 1, 64, 128), "int4"),
    ):
        with pytest.raises(NotImplementedError):
            write_rows(jnp.zeros(shape, dtype), jnp.zeros((1, shape[3]), dtype), token, token, one_per_stripe=True)


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("one_per_stripe", [True, False])
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 16), ("bfloat16", 128), ("float8_e4m3fn", 16)])
def test_compiled_for_a_tpu(topology, one_per_stripe, dtype, rows):
    place = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    tokens, width = (64, 2048) if one_per_stripe else (512, 640)
    write = functools.partial(write_rows, one_per_stripe=one_per_stripe, slots=64)
    pages = array((1024, width // 128, rows, 128), dtype)
    new = array((tokens, width), dtype)
    program = jax.jit(write, donate_argnums=0).trace(pages, new, array((tokens,)), array((tokens,))).lower().compile()
    size = pages.size * pages.dtype.itemsize
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < max(size // 16, 1 << 20)
    assert f"[1024,{width // 128},{rows},128]" not in "".join(
        line for line in program.as_text().split("\n") if " copy(" in line
    )
