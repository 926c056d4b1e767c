"""Writes new rows into joined pages (joined.py) on a TPU, in place.

A TPU moves whole tiles, and a row of 16-bit or 8-bit numbers shares even its 32-bit words with others. So a kernel
fetches the stripe of rows around a new one, puts the new bits among the old, and writes the stripe back. Stripes are a
ring of buffers with several reads and writes in flight, since each takes the latency of HBM and only a few cycles of
work. Everything is bits of uint32 words, of which `pack` rows lie in one: no number is converted, NaN stays NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.joined import LANES

RING = 16
"""Buffers: half of them read ahead, the other half written behind."""

WHOLE_ROWS_BYTES = 16 << 20
"""A decode step's rows lie in VMEM as a whole up to here, as 32-bit words."""


def write_rows(
    pages: jax.Array,
    rows: jax.Array,
    page: jax.Array,
    row: jax.Array,
    *,
    one_per_stripe: bool,
    slots: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Writes T rows into their places, in place when `pages` are donated.

    No row is written twice. Without `one_per_stripe`, tokens that follow each other in a page follow each other in
    `rows`, too, with no dropped one between them: the tokens of a slot are packed in order, and no page is written by
    two slots.

    Args:
      pages: (P, C, R, 128).
      rows: (T, 128·C) in the pages' dtype.
      page: (T,) int32 physical page of each token, not negative; an index of P or more drops the token.
      row: (T,) int32 row within the page, 0 ≤ row < R.
      one_per_stripe: static; no two tokens share a stripe, as when each slot has one token at most (decode).
      slots: B, static; at most that many runs of tokens with consecutive rows. It bounds the size of the tables that
        a prompt chunk needs; the work follows what is there.
      interpret: as `pallas_call` takes it.

    Returns:
      The new pages.

    Raises:
      NotImplementedError: for pages that have no whole tiles.
    """
    bits = _check(pages)
    if rows.shape[0] == 0:
        return pages
    if one_per_stripe and rows.size * 4 <= WHOLE_ROWS_BYTES:
        return _write_single(pages, rows, page, row, bits, interpret)
    return _write_runs(pages, rows, page, row, bits, slots, interpret)


def _check(pages: jax.Array) -> int:
    """Bits of a number; raises where the kernel cannot write."""
    _, _, R, lanes = pages.shape
    if pages.dtype.name not in ("float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"):
        raise NotImplementedError(f"rows of {pages.dtype} are not written by this kernel")
    bits = pages.dtype.itemsize * 8
    if lanes != LANES or (R % _group(bits) and R not in (8, 16)):
        raise NotImplementedError(f"pages of {R} rows of {lanes} {pages.dtype} are not made of whole tiles")
    return bits


def _group(bits: int) -> int:
    """Rows of a register: 8 words."""
    return 8 * 32 // bits


# ---- One token a stripe


def _write_single(
    pages: jax.Array,
    rows: jax.Array,
    page: jax.Array,
    row: jax.Array,
    bits: int,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    C, R = pages.shape[1:3]
    T = rows.shape[0]
    # A tile has 8 rows, of numbers of 8 bits 32 where a page has as many.
    S = 32 if bits == 8 and R % 32 == 0 else 8
    words = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    return pl.pallas_call(
        functools.partial(_single_kernel, bits=bits),
        name="kvjax_write_single",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.SMEM((T + 1,), jnp.int32),
                pltpu.VMEM((RING, C, S, LANES), pages.dtype),
                pltpu.SemaphoreType.DMA((2, RING)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={3: 0},
        compiler_params=_params(words.size * 4 + RING * C * S * LANES * bits // 8),
        interpret=interpret,
    )(page, row, words, pages)


def _single_kernel(
    page_ref,  # (T,)
    row_ref,  # (T,)
    words_ref,  # (T, 128·C) uint32: a number in the low bits of each
    _,
    pages_ref,  # (P, C, R, 128)
    live_ref,  # (T + 1,): the tokens that are not dropped
    stripes_ref,  # (RING, C, S, 128)
    sems,  # (2, RING): read, written
    *,
    bits: int,
):
    T, (C, S) = page_ref.shape[0], stripes_ref.shape[1:3]
    pages, pack = pages_ref.shape[0], 32 // bits

    def list_token(t, count):
        live_ref[count] = t
        return count + (page_ref[t] < pages).astype(jnp.int32)

    count = jax.lax.fori_loop(0, T, list_token, jnp.int32(0))

    def stripe(w):
        t = live_ref[w]
        return pages_ref.at[page_ref[t], :, pl.ds(pl.multiple_of(row_ref[t] & -S, S), S)]

    def merge(w, slot):
        t = live_ref[w]
        row = row_ref[t] & (S - 1)
        shift = ((row & (pack - 1)) * bits).astype(jnp.uint32)
        kept = ~(jnp.uint32((1 << bits) - 1) << shift)
        here = jax.lax.broadcasted_iota(jnp.int32, (S // pack, LANES), 0) == row >> pack.bit_length() - 1
        new = words_ref[pl.ds(t, 1), :] << shift
        for c in range(C):
            mine = new[:, c * LANES : (c + 1) * LANES]
            old = pltpu.bitcast(stripes_ref[slot, c], jnp.uint32)
            stripes_ref[slot, c] = pltpu.bitcast(jnp.where(here, old & kept | mine, old), stripes_ref.dtype)

    def start(w, slot):
        pltpu.make_async_copy(stripe(w), stripes_ref.at[slot], sems.at[0, slot]).start()

    def wait(w, slot):
        pltpu.make_async_copy(stripes_ref.at[slot], stripes_ref.at[slot], sems.at[0, slot]).wait()

    _pass_through(count, start, wait, merge, stripe, stripes_ref, sems)


# ---- Runs of tokens


def work_items(
    page: jax.Array, row: jax.Array, pages: int, rows: int, stripe: int, slots: int | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The stripes that a batch writes, each taking consecutive tokens.

    A run of c ≥ 1 consecutive rows touches at most (c − 2) // S + 2 stripes, so B runs of T rows touch at most
    (T − 2B) // S + 2B, and never more than T: that is W.

    Args:
      page: (T,) int32, as `write_rows`.
      row: (T,) int32, as `write_rows`.
      pages: P.
      rows: R.
      stripe: S, rows a stripe.
      slots: B, or None.

    Returns:
      count (1,) int32 stripes to write; first (W + 1,) int32 first token of each, T from the last on; seen (T,) int32
      tokens that are not dropped, up to each one; place (T,) int32 stripe of each token among all P · R / S.
    """
    T = page.shape[0]
    B = T if slots is None else min(slots, T)
    most = min(T, (T - 2 * B) // stripe + 2 * B)
    live = page < pages
    place = page * (rows // stripe) + row // stripe
    begins = live & jnp.concatenate([jnp.ones(1, bool), ~live[:-1] | (place[1:] != place[:-1])])
    begun = jnp.cumsum(begins, dtype=jnp.int32)
    first = jnp.searchsorted(begun, jnp.arange(1, most + 2, dtype=jnp.int32), method="compare_all")
    return begun[-1:], first.astype(jnp.int32), jnp.cumsum(live, dtype=jnp.int32), place


def _write_runs(
    pages: jax.Array,
    rows: jax.Array,
    page: jax.Array,
    row: jax.Array,
    bits: int,
    slots: int | None,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    P, C, R, _ = pages.shape
    T, L = rows.shape
    G = _group(bits)
    S = min(R, G)
    scalars = (*work_items(page, row, P, R, S, slots), row)
    rows = jnp.pad(rows, ((0, max(-T % G, 2 * G - T)), (0, 0)))
    return pl.pallas_call(
        functools.partial(_runs_kernel, bits=bits),
        name="kvjax_write_runs",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((RING, 2 * G, L), pages.dtype),
                pltpu.VMEM((RING, C, S, LANES), pages.dtype),
                pltpu.SemaphoreType.DMA((2, RING)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=_params(RING * (2 * G + S) * L * bits // 8),
        interpret=interpret,
    )(*scalars, rows, pages)


def _runs_kernel(
    count_ref,  # (1,)
    first_ref,  # (W + 1,)
    seen_ref,  # (T,)
    place_ref,  # (T,)
    row_ref,  # (T,)
    rows_ref,  # (at least T, 128·C), whole groups, two at least
    _,
    pages_ref,  # (P, C, R, 128)
    windows_ref,  # (RING, 2G, 128·C): the two groups of `rows` that hold an item's tokens
    stripes_ref,  # (RING, C, S, 128)
    sems,  # (2, RING): read, written
    *,
    bits: int,
):
    (C, S), pack, G = stripes_ref.shape[1:3], 32 // bits, windows_ref.shape[1] // 2
    last = rows_ref.shape[0] - 2 * G

    def tokens(w):
        first = first_ref[w]
        return first, seen_ref[first_ref[w + 1] - 1] - seen_ref[first] + 1

    def window(first):
        return pl.multiple_of(jnp.minimum(first & -G, last), G)

    def stripe(w):
        place, per_page = place_ref[first_ref[w]], pages_ref.shape[2] // S
        page = jax.lax.div(place, jnp.int32(per_page))
        return pages_ref.at[page, :, pl.ds(pl.multiple_of((place - page * per_page) * S, S), S)]

    def start(w, slot):
        first, count = tokens(w)
        pltpu.make_async_copy(rows_ref.at[pl.ds(window(first), 2 * G)], windows_ref.at[slot], sems.at[0, slot]).start()

        @pl.when(count < S)
        def _():
            pltpu.make_async_copy(stripe(w), stripes_ref.at[slot], sems.at[0, slot]).start()

    def wait(w, slot):
        pltpu.make_async_copy(windows_ref.at[slot], windows_ref.at[slot], sems.at[0, slot]).wait()

        @pl.when(tokens(w)[1] < S)
        def _():
            pltpu.make_async_copy(stripes_ref.at[slot], stripes_ref.at[slot], sems.at[0, slot]).wait()

    def merge(w, slot):
        first, count = tokens(w)
        begin = row_ref[first] & (S - 1)
        # Row j of the stripe is row j + offset of the window: `whole` words and `part` of a word further on.
        offset = first - begin - window(first)
        whole, part = offset >> pack.bit_length() - 1, offset & (pack - 1)
        words = 2 * G // pack
        new = pltpu.bitcast(windows_ref[slot], jnp.uint32)
        low = pltpu.roll(new, -whole & (words - 1), 0)[: S // pack]
        if pack > 1:
            high = pltpu.roll(new, (-whole - 1) & (words - 1), 0)[: S // pack]
            shift = (part * bits).astype(jnp.uint32)
            low = low >> shift | high << 1 << 31 - shift
        written = jnp.zeros((S // pack, 128), jnp.uint32)
        word = jax.lax.broadcasted_iota(jnp.int32, written.shape, 0) * pack
        for k in range(pack):
            mine = (word + k >= begin) & (word + k < begin + count)
            written |= jnp.where(mine, jnp.uint32(((1 << bits) - 1) << k * bits), jnp.uint32(0))
        for c in range(C):
            old = pltpu.bitcast(stripes_ref[slot, c], jnp.uint32)
            mine = low[:, c * LANES : (c + 1) * LANES] & written
            stripes_ref[slot, c] = pltpu.bitcast(old & ~written | mine, stripes_ref.dtype)

    _pass_through(count_ref[0], start, wait, merge, stripe, stripes_ref, sems)


# ---- Both


def _pass_through(
    count: jax.Array, start: Callable, wait: Callable, merge: Callable, stripe: Callable, stripes_ref, sems
) -> None:
    """Reads, merges and writes stripes 0 … count − 1 through the ring; no two are the same."""
    ahead = RING // 2

    def written(slot):
        return pltpu.make_async_copy(stripes_ref.at[slot], stripes_ref.at[slot], sems.at[1, slot])

    def begin(w, _):
        start(w, w)
        return 0

    def step(w, _, reads, waits):
        slot, later = w & (RING - 1), (w + ahead) & (RING - 1)
        if waits:  # the buffer of item w + ahead was that of item w − ahead
            written(later).wait()
        if reads:
            start(w + ahead, later)
        wait(w, slot)
        merge(w, slot)
        pltpu.make_async_copy(stripes_ref.at[slot], stripe(w), sems.at[1, slot]).start()
        return 0

    def end(w, _):
        written(w & (RING - 1)).wait()
        return 0

    # Each phase is a loop of its own: without branches, the compiler overlaps what a step does.
    alone = jnp.maximum(count - ahead, 0)
    jax.lax.fori_loop(0, jnp.minimum(count, ahead), begin, 0)
    jax.lax.fori_loop(0, jnp.minimum(alone, ahead), functools.partial(step, reads=True, waits=False), 0)
    jax.lax.fori_loop(ahead, alone, functools.partial(step, reads=True, waits=True), 0)
    jax.lax.fori_loop(alone, count, functools.partial(step, reads=False, waits=False), 0)
    jax.lax.fori_loop(jnp.maximum(count - RING, 0), count, end, 0)


def _params(buffers: int) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(vmem_limit_bytes=buffers + (8 << 20), disable_bounds_checks=True)
