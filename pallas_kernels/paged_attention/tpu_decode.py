"""Decode on a TPU: one query token of each slot against the slot's pages, in the joined layout.

A grid step is a slot. Its pages are fetched in blocks of `block` rows into one of two buffers, one DMA a page; while a
block is computed, the next, perhaps of the next slot, is on its way. The pages' numbers come from the table in HBM,
fetched to SMEM one block further ahead, so that a table may be larger than SMEM. A block is computed in pieces of
`piece` rows by an online softmax (2205.14135).

What binds the compute is the MXU taking in K and V as weights (docs/performance.md), so everything else has to hide
behind that. Queries have few rows, so the softmax is little work but a long chain of dependent steps: the pieces of
several units run through it side by side.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.joined import LANES, Lanes, Unit
from kvjax.pallas_kernels.paged_attention import codes, tpu_planes
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.paged_attention.tpu_planes import Planes

MASKED = -1e30  # a logit that is not seen
FLOOR = -1e20  # where the running maximum begins: exp2(MASKED - FLOOR) is 0 even when a row has seen nothing yet
LOG2E = 1.4426950408889634
SCALES = ("scales", "key_scales", "value_scales")
"""Operands that may hold scales: of K and V together, or of each."""


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """How decode is cut up.

    Attributes:
      block: rows fetched together; a multiple of the page.
      pieces: (rows, ahead): rows computed together, a multiple of 128, and how many units' scores are computed before
        the softmax of the first of them. From large to small: each takes what is left as long as it is filled, the
        last takes the rest; each divides the one before, the first the block.
    """

    block: int
    pieces: tuple[tuple[int, int], ...]


class _Walk:
    """Which pages a slot's query visits, in blocks of `pages` consecutive columns of the table.

    All numbers but the static ones are traced scalars.
    """

    def __init__(self, spec: AttentionSpec, rows: int, pages: int, ref):
        self.spec, self.rows, self.pages, self.ref = spec, rows, pages, ref
        self.sink_pages = -(-spec.sink_rows // rows)
        self.bounded = spec.window is not None or hasattr(ref, "nearest")

    def nearest(self, i):
        """The first row that slot i's query sees, but for sinks, if not all are seen."""
        if hasattr(self.ref, "nearest"):
            return self.ref.nearest[i]
        return self.ref.length[i] - self.spec.window

    def _start(self, i):
        """First column of the window, and whether the pages of the sinks lie apart, before it."""
        if not self.bounded:
            return jnp.int32(0), jnp.bool_(False)
        start = jax.lax.div(jnp.maximum(self.nearest(i), 0), jnp.int32(self.rows))
        if self.sink_pages and hasattr(self.ref, "nearest"):  # which may lie behind all rows held
            start = jnp.minimum(start, self._end(i))
        if not self.sink_pages:
            return start, jnp.bool_(False)
        apart = start > self.sink_pages
        return jnp.where(apart, start, 0), apart

    def _end(self, i):
        return jax.lax.div(self.ref.length[i] + self.rows - 1, jnp.int32(self.rows))

    def blocks(self, i):
        """How many blocks slot i has."""
        start, apart = self._start(i)
        end = self._end(i)
        return jax.lax.div(end - start + self.pages - 1, jnp.int32(self.pages)) + apart.astype(jnp.int32)

    def block(self, i, j):
        """Block j of slot i: (first column, number of pages)."""
        start, apart = self._start(i)
        end = self._end(i)
        first = start + (j - apart.astype(jnp.int32)) * self.pages
        count = jnp.minimum(end - first, self.pages)
        if not self.sink_pages:
            return first, count
        of_sinks = apart & (j == 0)
        return jnp.where(of_sinks, 0, first), jnp.where(of_sinks, self.sink_pages, count)

    def seen(self, position, end, i):
        """Which rows of a block that ends before row `end` the query at the end of slot i sees."""
        seen = position < end
        if self.bounded:
            near = position >= self.nearest(i)
            seen &= (near | (position < self.spec.sink_rows)) if self.spec.sink_rows else near
        return seen


def _kernel(
    *refs, names: tuple[str, ...], lanes: Lanes, spec: AttentionSpec, blocks: DecodeBlocks, rows: int, group: int,
    table_rows: int, interpret: bool,
):  # fmt: skip
    """One slot; `names` are those of the refs, see `attend_rows`."""
    ref = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    has_codes, has_lse = ("codes" in names), ("lse" in names)
    scale_names = [name for name in SCALES if name in names]
    pages = blocks.block // rows
    walk = _Walk(spec, rows, pages, ref)
    some = min(pages, 8)  # pages of a block that is not full are fetched so many a round, while there are as many
    i, number = pl.program_id(0), ref.number[0]

    def table_copy(i, j, parity):
        first, _ = walk.block(i, j)
        row = ref.slot[i] * table_rows + jax.lax.div(first, jnp.int32(LANES))
        return pltpu.make_async_copy(
            ref.table.at[pl.ds(row, ref.columns.shape[1])], ref.columns.at[parity], ref.table_sems.at[parity]
        )

    def scale_place(name, parity, k, count):
        """Where the scales of pages k … k + count of a block are, and their semaphore."""
        buffer, semaphores = getattr(ref, f"{name}_buffer"), getattr(ref, f"{name}_sems")
        if len(buffer.shape) == 3:  # rows in lanes
            return buffer.at[parity, :, pl.ds(pl.multiple_of(k * rows, rows), count * rows)], semaphores.at[parity]
        return buffer.at[parity, pl.ds(k, count)], semaphores.at[parity]

    def page_copies(page, parity, k):
        place = pl.ds(pl.multiple_of(k * rows, rows), rows)
        yield pltpu.make_async_copy(ref.pages.at[page], ref.buffer.at[parity, :, place], ref.page_sems.at[parity])
        for name in scale_names:
            target, semaphore = scale_place(name, parity, k, 1)
            source = getattr(ref, name)
            source = source.at[page] if len(target.shape) == 2 else source.at[pl.ds(page, 1)]
            yield pltpu.make_async_copy(source, target, semaphore)

    def fetch(i, j, parity):
        first, count = walk.block(i, j)
        offset = first & (LANES - 1)

        def fetch_page(k):
            at = offset + k
            page = ref.columns[parity, at >> 7, 0, at & (LANES - 1)]
            for copy in page_copies(page, parity, k):
                copy.start()

        def several(number, k, _):
            for u in range(number):
                fetch_page(k * number + u)

        @pl.when(count == pages)
        def fetch_full():
            unroll = min(pages, 16)
            jax.lax.fori_loop(0, pages // unroll, functools.partial(several, unroll), None)

        @pl.when(count < pages)
        def fetch_some():
            whole = jax.lax.div(count, jnp.int32(some))
            jax.lax.fori_loop(0, whole, functools.partial(several, some), None)
            jax.lax.fori_loop(whole * some, count, lambda k, _: fetch_page(k), None)

    def arrive(count, parity):
        def wait(number):
            """For a number of pages, whichever they are: a semaphore counts bytes."""
            place = pl.ds(0, number * rows)
            buffers = [(ref.buffer.at[parity, :, place], ref.page_sems.at[parity])]
            buffers += [scale_place(name, parity, 0, number) for name in scale_names]
            for buffer, semaphore in buffers:
                pltpu.make_async_copy(buffer, buffer, semaphore).wait()

        @pl.when(count == pages)
        def wait_full():
            wait(pages)

        @pl.when(count < pages)
        def wait_some():
            whole = jax.lax.div(count, jnp.int32(some))
            jax.lax.fori_loop(0, whole, lambda k, _: wait(some), None)
            jax.lax.fori_loop(whole * some, count, lambda k, _: wait(1), None)

    def after(i, j):
        """The block after block j of slot i; slot `number` where there is none."""
        within = j + 1 < walk.blocks(i)
        return jnp.where(within, i, i + 1), jnp.where(within, j + 1, 0)

    def clipped(i):
        return jnp.minimum(i, jnp.maximum(number - 1, 0))

    @pl.when((i == 0) & (number > 0))
    def begin():
        ref.done[0] = 0
        first = table_copy(0, 0, 0)
        first.start()
        first.wait()
        fetch(0, 0, 0)
        next_i, next_j = after(0, 0)

        @pl.when(next_i < number)
        def look_up_second():
            table_copy(next_i, next_j, 1).start()

    @pl.when((i >= number) & (number == 0))
    def show_nothing():
        ref.out[...] = jnp.zeros_like(ref.out)
        if has_lse:
            ref.lse[...] = jnp.full_like(ref.lse, -jnp.inf)

    @pl.when(i < number)
    def attend_slot():
        length = ref.length[i]
        ref.top[...] = jnp.full_like(ref.top, FLOOR)
        ref.total[...] = jnp.zeros_like(ref.total)
        ref.acc[...] = jnp.zeros_like(ref.acc)
        if "zeros" in names:
            ref.zeros[...] = jnp.zeros_like(ref.zeros)
        if has_codes:
            for u in range(len(lanes.units)):
                queries = ref.q[0, u].astype(jnp.float32)
                norm = jnp.maximum(jnp.max(jnp.abs(queries), axis=1, keepdims=True), 1e-30)
                ref.codes[u] = codes.split(queries / norm, _planes(ref, spec, lanes)[0].dtype)
                ref.norm[u] = jnp.broadcast_to(norm, ref.norm.shape[1:])

        def attend_block(j, _):
            parity = ref.done[0] & 1
            next_i, next_j = after(i, j)

            @pl.when(next_i < number)
            def fetch_next():
                table_copy(next_i, next_j, 1 - parity).wait()
                fetch(next_i, next_j, 1 - parity)
                later_i, later_j = after(clipped(next_i), next_j)

                @pl.when(later_i < number)
                def look_up_later():
                    table_copy(later_i, later_j, parity).start()

            first, count = walk.block(i, j)
            arrive(count, parity)
            base = first * rows
            held = jnp.minimum(length - base, count * rows)
            _attend(ref, parity, base, held, i, walk, lanes, spec, blocks, group, interpret)
            ref.done[0] += 1

        jax.lax.fori_loop(0, walk.blocks(i), attend_block, None)
        for u in range(len(lanes.units)):
            total = jnp.sum(ref.total[u], axis=1, keepdims=True)
            top = ref.top[u][:, :1]
            acc = ref.acc[u]
            if "zeros" in names:
                acc = acc + _of_groups([jnp.sum(zero, axis=1, keepdims=True) for zero in ref.zeros[u]], acc.shape[1])
            if "sinks" in names:
                sink = ref.sinks[u][:, :1] * LOG2E
                new_top = jnp.maximum(top, sink)
                total = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
                acc = acc * jnp.exp2(top - new_top)
                top = new_top
            ref.out[0, u] = (acc / total).astype(ref.out.dtype)
            if has_lse:
                ref.lse[0, u] = jnp.broadcast_to(top / LOG2E + jnp.log(total), ref.lse.shape[2:])


class _Scales:
    """The scales of a block: (heads, block) in VMEM, one for each row; or (pages, 1, heads) in SMEM, for each page."""

    def __init__(self, ref, page_rows: int):
        self.ref, self.page_rows = ref, page_rows

    def of_head(self, head: int, place) -> jax.Array:
        """(1, piece)."""
        if len(self.ref.shape) == 2:
            return self.ref[head : head + 1, place]
        first = jax.lax.div(place.start, jnp.int32(self.page_rows))
        pages = place.size // self.page_rows
        parts = [jnp.full((1, self.page_rows), self.ref[first + k, 0, head], jnp.float32) for k in range(pages)]
        return jnp.concatenate(parts, axis=1) if pages > 1 else parts[0]

    def of_unit(self, first: int, unit: Unit, place, rows: int, group: int) -> jax.Array:
        """Those of a unit's heads for every query row: (rows, piece), or (1, piece) of one head."""
        heads = range(*unit.heads)
        if len(heads) == 1:
            return self.of_head(first + heads[0], place)
        parts = [jnp.broadcast_to(self.of_head(first + h, place), (group, place.size)) for h in heads]
        filled = rows - group * len(heads)
        if filled:
            parts.append(jnp.ones((filled, place.size), jnp.float32))
        return jnp.concatenate(parts, axis=0)


def _planes(ref, spec: AttentionSpec, lanes: Lanes) -> tuple[Planes, Planes]:
    """How K and V lie in the pages; those that do not share bytes as planes of all their bits."""
    if spec.codes is not None:
        return tpu_planes.of_pages(spec.codes, lanes)
    plain = Planes(0, lanes.row // LANES, 0, 0, ref.buffer.dtype, False, 0)
    return plain, plain


def _keys_of_groups(ref, parity, unit: Unit, keys, place, group: int) -> jax.Array:
    """Codes (piece, width) of a unit's keys → float32, with the scales and zeros of groups of rows."""
    words = ref.key_scales_buffer
    per_page = words.shape[2]
    first = jax.lax.div(place.start, jnp.int32(group))
    lanes, parts = pl.ds(unit.key[0], unit.key[1] - unit.key[0]), []
    codes_ = keys.astype(jnp.float32)
    for k in range(place.size // group):
        page, within = jax.lax.div(first + k, jnp.int32(per_page)), jax.lax.rem(first + k, jnp.int32(per_page))
        if (place.size // group) % per_page == 0:  # then a piece begins with a page
            within = k % per_page
        scale, zero = tpu_planes.split_words(words[parity, page, pl.ds(within, 1), lanes])
        parts.append(codes_[k * group : (k + 1) * group] * scale + zero)
    return jnp.concatenate(parts, axis=0)


def _of_groups(parts: list[jax.Array], width: int) -> jax.Array:
    """(rows, width) or (rows, 1) for each group of lanes → (rows, width): each group's lanes from its own."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    joined = jnp.broadcast_to(parts[0], (parts[0].shape[0], width))
    for number, part in enumerate(parts[1:], 1):
        joined = jnp.where(lane < number * (width // len(parts)), joined, part)
    return joined


def _attend(ref, parity, base, held, i, walk, lanes, spec, blocks, group, interpret):
    """Adds a block's `held` rows, the first of them at position `base`, to the running softmax of every unit."""
    native, has_slopes = hasattr(ref, "codes"), hasattr(ref, "slopes")
    key, value = _planes(ref, spec, lanes)
    kv_ref, queries = ref.buffer.at[parity], ref.codes if native else ref.q.at[0]
    page_rows, in_bytes = ref.pages.shape[2], spec.codes is not None
    scales: list[_Scales | None] = [None, None]
    first_value = 0
    if hasattr(ref, "scales"):
        scales = [_Scales(ref.scales_buffer.at[parity], page_rows)] * 2
        first_value = 0 if lanes.latent else lanes.kv_heads
    elif in_bytes:
        scales = [_Scales(getattr(ref, f"{name}_buffer").at[parity], page_rows) for name in SCALES[1:]]
    rows = ref.top.shape[1]
    smallest = blocks.pieces[-1][0]
    end = jax.lax.div(held + smallest - 1, jnp.int32(smallest)) * smallest
    _clear_tail(kv_ref, held, end, lanes, value if in_bytes else None)
    wide = (jnp.float32, jnp.bfloat16)
    compute = key.dtype if native or key.dtype in wide else jnp.dtype(jnp.bfloat16)  # of keys
    native_values = value.dtype.name in codes.PARTS
    compute_values = value.dtype if native_values or value.dtype in wide else jnp.dtype(jnp.bfloat16)

    def dot(x, y, dimensions):
        exact = y.dtype == jnp.float32  # said for the others, too: a user's default may be one that the MXU refuses
        precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
        total = jnp.int32 if y.dtype == jnp.int8 else jnp.float32
        if interpret and y.dtype == jnp.bfloat16:  # a CPU has no such product; of the same numbers in float32 it has
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jax.lax.dot_general(x, y, (dimensions, ((), ())), precision=precision, preferred_element_type=total)

    def read(planes, lanes, place):
        """Lanes (start, stop) of some rows: (rows, stop - start)."""
        numbers = range(lanes[0] // LANES, lanes[1] // LANES)
        if in_bytes:
            tiles = [planes.read(lambda tile: kv_ref[tile, place], number) for number in numbers]
        else:
            tiles = [kv_ref[number, place] for number in numbers]
        return jnp.concatenate(tiles, axis=1) if len(tiles) > 1 else tiles[0]

    def attend_piece(start, piece, ahead):
        place = pl.ds(start, piece)
        position = base + start + jax.lax.broadcasted_iota(jnp.int32, (1, piece), 1)
        seen = walk.seen(position, base + held, i)

        def scores(u):
            unit = lanes.units[u]
            k = read(key, unit.key, place)
            if key.group:
                k = _keys_of_groups(ref, parity, unit, k, place, key.group)
            k = k.astype(compute)
            s = dot(queries[u, :, : k.shape[1]], k, ((1,), (1,)))
            if native:
                s = codes.combine(s, rows, key.dtype) * ref.norm[u][:, :1]
            s = s * spec.scale
            if scales[0] is not None and not key.group:
                s = s * scales[0].of_unit(0, unit, place, rows, group)
            if spec.soft_cap is not None:
                s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
            if has_slopes:
                last = ref.length[i] - 1 + (ref.ahead[i] if hasattr(ref, "ahead") else 0)
                s = s - ref.slopes[u][:, :1] * (last - position).astype(jnp.float32)
            return jnp.where(seen, s * LOG2E, MASKED)

        def values_of_groups(u, p, shrink, v):
            """Weights (rows, piece) · values of groups of lanes → (rows, width); adds up what their zeros give."""
            unit, words = lanes.units[u], ref.value_scales_buffer
            first, count = (unit.value[0] - value.lane) // value.group, v.shape[1] // value.group
            # All groups of the unit at once: a group alone fills one of a register's eight sublanes.
            scale, zero = tpu_planes.split_words(words[parity, first : first + count, place])
            scale, zero = (jnp.where(seen, x, 0.0) for x in (scale, zero))  # may be NaN
            norm = jnp.maximum(jnp.max(scale, axis=1, keepdims=True), 1e-30)
            scale = scale / norm
            weights = []
            for g in range(count):
                weights.append(p * scale[g : g + 1])
                parts = p * zero[g : g + 1]
                folded = sum(parts[:, k : k + LANES] for k in range(0, piece, LANES))
                ref.zeros[u, g] = ref.zeros[u, g] * shrink + folded
            stacked = codes.split(jnp.concatenate(weights, axis=0), value.dtype)
            out = codes.combine(dot(stacked, v, ((1,), (0,))), rows * count, value.dtype)
            return _of_groups([out[g * rows : (g + 1) * rows] * norm[g : g + 1] for g in range(count)], v.shape[1])

        def values(u, p):
            unit, norm = lanes.units[u], None
            v = read(value, unit.value, place).astype(compute_values)
            if scales[1] is not None:
                by_row = jnp.where(seen, scales[1].of_unit(first_value, unit, place, rows, group), 0.0)  # may be NaN
                if native_values:
                    norm = jnp.maximum(jnp.max(by_row, axis=1, keepdims=True), 1e-30)
                    by_row = by_row / norm
                p = p * by_row
            out = dot(codes.split(p, value.dtype) if native_values else p.astype(compute_values), v, ((1,), (0,)))
            if native_values:
                out = codes.combine(out, rows, value.dtype)
            return out if norm is None else out * norm

        def absorb(u, s):
            m = ref.top[u]
            m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp2(s - m_new[:, :1])
            shrink = jnp.exp2(m - m_new)
            ref.top[u] = m_new
            ref.total[u] = ref.total[u] * shrink + sum(p[:, k : k + LANES] for k in range(0, piece, LANES))
            if value.group:
                out = values_of_groups(u, p, shrink, read(value, lanes.units[u].value, place))
            else:
                out = values(u, p)
            width = out.shape[1]
            ref.acc[u, :, :width] = ref.acc[u, :, :width] * shrink[:, :1] + out

        units, waiting = len(lanes.units), []
        for u in range(units + ahead):
            if u < units:
                waiting.append(scores(u))
            if u >= ahead:
                absorb(u - ahead, waiting.pop(0))

    start = jnp.int32(0)
    for piece, ahead in blocks.pieces:

        def attend_next(k, _, piece=piece, ahead=ahead, start=start):
            attend_piece(pl.multiple_of(start + k * piece, piece), piece, ahead)

        count = jax.lax.div(end - start, jnp.int32(piece))
        jax.lax.fori_loop(0, count, attend_next, None)
        start += count * piece


def _clear_tail(kv_ref, held, end, lanes, planes):
    """Zeroes the values of rows held … end: they belong to nobody and may be NaN, which 0 does not cancel.

    planes: those of V in pages of bytes, else None.
    """
    if not jnp.issubdtype(kv_ref.dtype if planes is None else planes.dtype, jnp.floating):
        return
    stripe = 32 // kv_ref.dtype.itemsize
    first_tile = min(unit.value[0] for unit in lanes.units) // LANES
    tiles = range(first_tile, max(unit.value[1] for unit in lanes.units) // LANES)
    wide = jnp.float32 if planes is None else jnp.int32
    if planes is not None:
        tiles = range(planes.first, planes.first + planes.tiles)
    edge = jax.lax.div(held, jnp.int32(stripe))

    @pl.when(edge * stripe < held)
    def clear_edge():
        place = pl.ds(pl.multiple_of(edge * stripe, stripe), stripe)
        row = edge * stripe + jax.lax.broadcasted_iota(jnp.int32, (stripe, LANES), 0)
        for c in tiles:
            kept = kv_ref[c, place].astype(wide)
            kv_ref[c, place] = jnp.where(row < held, kept, jnp.zeros((), wide)).astype(kv_ref.dtype)

    def clear(k, _):
        place = pl.ds(pl.multiple_of(k * stripe, stripe), stripe)
        for c in tiles:
            kv_ref[c, place] = jnp.zeros((stripe, LANES), kv_ref.dtype)

    first, last = (jax.lax.div(row, jnp.int32(stripe)) for row in (held + stripe - 1, end))
    jax.lax.fori_loop(first, last, clear, None)


def attend_rows(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    wanted: jax.Array,
    lanes: Lanes,
    spec: AttentionSpec,
    *,
    blocks: DecodeBlocks,
    nearest: jax.Array | None = None,
    ahead: jax.Array | None = None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    with_lse: bool = True,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention of the slots that have one token.

    Args:
      q: (T, N, lanes.key_width) as `joined.spread` makes it, not scaled.
      pages: (P, lanes.row / 128, R, 128); with `spec.codes`, (P, tiles of bytes, R, 128) uint8.
      table: (B, M) int32.
      lengths: (B,) int32, at least 1 where wanted.
      row_starts: (B + 1,) int32; the token of slot b is row_starts[b].
      wanted: (B,) bool slots to compute.
      lanes: where heads lie; with `spec.codes`, among the lanes that are unpacked (`Codes.lanes`).
      spec: scale, window, sink rows, soft cap, codes.
      blocks: how the work is cut up.
      nearest: (B,) int32 first row that each slot's query sees, where it is not `spec.window` before its length: of
        dealt pages, of which lengths and rows are those on this chip, or with rows that are elsewhere.
      ahead: (B,) int32 rows between the last one held and the query's own, that included; None: the last is its own.
      scales: (P, 2·K, R) or (P, 2·K) float32 of quantized rows or pages, K's heads first; None where there are none.
        With `spec.codes`, those of K and of V (packed.py).
      sinks: (N,) float32 or None.
      slopes: (N,) float32 or None.
      with_lse: whether to compute it.
      interpret: as `pl.pallas_call` takes it.

    Returns:
      out (T, N, lanes.value_width) in q's dtype and lse (T, N) float32, or None. Rows of other tokens are undefined.
    """
    (T, N, _), (B, M) = q.shape, table.shape
    _, C, R, _ = pages.shape
    units = len(lanes.units)
    group = N // lanes.kv_heads
    unit_rows = max(unit.heads[1] - unit.heads[0] for unit in lanes.units) * group
    padded_rows = -(-unit_rows // 8) * 8

    def by_unit(x: jax.Array, axis: int) -> jax.Array:
        """(…, N, …) → (…, units, padded_rows, …): the rows of each unit, padded to whole tiles."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, units * unit_rows - N)
        x = jnp.pad(x, pad)
        x = x.reshape(*x.shape[:axis], units, unit_rows, *x.shape[axis + 1 :])
        pad = [(0, 0)] * x.ndim
        pad[axis + 1] = (0, padded_rows - unit_rows)
        return jnp.pad(x, pad)

    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)
    number = wanted.sum(dtype=jnp.int32)
    # Steps behind the last slot in use show its blocks again, so that nothing is fetched or written for them.
    used = order[jnp.minimum(jnp.arange(B, dtype=jnp.int32), jnp.maximum(number - 1, 0))]
    token = jnp.minimum(row_starts[used], T - 1)

    table_rows = -(-M // LANES)
    fetched = -(-(blocks.block // R) // LANES) + 1
    flat = jnp.pad(table, ((0, 0), (0, table_rows * LANES - M))).reshape(B * table_rows, 1, LANES)
    flat = jnp.pad(flat, ((0, fetched), (0, 0), (0, 0)))

    def of_token(i, number, slot, token, *_):
        del number, slot
        return token[i], 0, 0, 0

    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    running = (units, padded_rows, LANES)
    names = ["number", "slot", "token", "length"]
    scalars: tuple[jax.Array, ...] = (number[None], used, token, lengths[used])
    if nearest is not None:
        names.append("nearest")
        scalars = (*scalars, nearest[used])
    if ahead is not None:
        names.append("ahead")
        scalars = (*scalars, ahead[used])
    inputs = {
        "q": (by_unit(q, 1), pl.BlockSpec((1, units, padded_rows, q.shape[2]), of_token)),
        "table": (flat, everywhere),
        "pages": (pages, everywhere),
    }
    scratch = {
        "buffer": pltpu.VMEM((2, C, blocks.block, LANES), pages.dtype),
        "columns": pltpu.SMEM((2, fetched, 1, LANES), jnp.int32),
        "done": pltpu.SMEM((1,), jnp.int32),
        "top": pltpu.VMEM(running, jnp.float32),
        "total": pltpu.VMEM(running, jnp.float32),
        "acc": pltpu.VMEM((units, padded_rows, lanes.value_width), jnp.float32),
        "page_sems": pltpu.SemaphoreType.DMA((2,)),
        "table_sems": pltpu.SemaphoreType.DMA((2,)),
    }
    given = zip(SCALES[1:], scales, strict=True) if isinstance(scales, tuple) else [("scales", scales)]
    for name, x in given:
        if x is None:
            continue
        if x.ndim == 2:  # of pages: scalars
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))[:, None]
            scratch[f"{name}_buffer"] = pltpu.SMEM((2, blocks.block // R, *x.shape[1:]), jnp.float32)
        elif name == "key_scales" and x.dtype == jnp.uint32:  # of groups of rows
            scratch[f"{name}_buffer"] = pltpu.VMEM((2, blocks.block // R, *x.shape[1:]), x.dtype)
        else:
            scratch[f"{name}_buffer"] = pltpu.VMEM((2, x.shape[1], blocks.block), x.dtype)
        inputs[name] = x, everywhere
        scratch[f"{name}_sems"] = pltpu.SemaphoreType.DMA((2,))
    for name, feature in (("sinks", sinks), ("slopes", slopes)):
        if feature is not None:
            wide = by_unit(jnp.broadcast_to(feature.astype(jnp.float32)[:, None], (N, LANES)), 0)
            inputs[name] = wide, pl.BlockSpec(wide.shape, lambda *_: (0, 0, 0))
    key, value = Planes(0, 0, 0, 0, pages.dtype, False, 0), None
    if spec.codes is not None:
        key, value = tpu_planes.of_pages(spec.codes, lanes)
    if value is not None and value.group:
        scratch["zeros"] = pltpu.VMEM((units, lanes.value_width // value.group, padded_rows, LANES), jnp.float32)
    if key.dtype.name in codes.PARTS and not key.group:
        code_rows, code_dtype = codes.rows(padded_rows, key.dtype), codes.PARTS[key.dtype.name].dtype
        scratch["codes"] = pltpu.VMEM((units, code_rows, q.shape[2]), code_dtype)
        scratch["norm"] = pltpu.VMEM(running, jnp.float32)
    outputs = {"out": jax.ShapeDtypeStruct((T, units, padded_rows, lanes.value_width), q.dtype)}
    if with_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((T, units, padded_rows, LANES), jnp.float32)
    names += [*inputs, *outputs, *scratch]
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(names), lanes=lanes, spec=spec, blocks=blocks, rows=R, group=group,
            table_rows=table_rows, interpret=bool(interpret),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B,),
            in_specs=[where for _, where in inputs.values()],
            out_specs=[pl.BlockSpec((1, *shape.shape[1:]), of_token) for shape in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(outputs.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=56 << 20, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="kvjax_attend_rows",
    )(*scalars, *(x for x, _ in inputs.values()))  # fmt: skip
    out = results[0][:, :, :unit_rows].reshape(T, units * unit_rows, -1)[:, :N]
    if not with_lse:
        return out, None
    return out, results[1][:, :, :unit_rows, 0].reshape(T, units * unit_rows)[:, :N]
