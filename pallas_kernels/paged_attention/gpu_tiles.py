"""What the GPU's attention kernels share: tile products, the walk over a slot's blocks, and the producer of blocks.

Mosaic GPU (`jax.experimental.pallas.mosaic_gpu`), for Hopper: wgmma multiplies tiles in shared memory, TMA copies pages
there. Both kernels are warp-specialised: one warpgroup, the producer, follows the block table and hands over blocks of
64 rows of K and V that are of 16 bits and finite; the others, the consumers, do attention and nothing else.

Two rules keep a kernel both interpretable on a CPU and compilable: an operand of wgmma is a ref in shared memory, and
an accumulator is born zero in a `pl.run_scoped` of its own. `add_product` breaks both and `add_matmul` the second, for
registers, so they have a second body for the interpreter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # of JAX 0.11 and newer; in 0.10 some names are missing and others take other arguments

BLOCK = 64  # rows of K and V in a step: what wgmma's smallest M, and one tile of 128 swizzled bytes, want
LOG2E = math.log2(math.e)
MASKED = -1e30  # a logit that is not seen
FLOOR = -1e20  # where the running maximum begins: exp2(MASKED - FLOOR) is 0 even when a row has seen nothing yet
SHARED = 227 * 1024  # bytes of shared memory that a block may use, on Hopper

Ref = Any


def interpret_params() -> Any:
    """How the interpreter runs the kernels: it looks for races, and each copy in flight has a clock of its own.

    Copies that share a clock hide a missing wait; the default is 5 clocks.
    """
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=256)


def swizzle(width: int, bits: int) -> int | None:
    """Bytes of the widest swizzle that rows of `width` numbers divide into; None where there is none."""
    return next((size for size in (128, 64, 32) if width * bits % (8 * size) == 0), None)


def raw_swizzle(width: int, bits: int) -> int | None:
    """The swizzle of codes: of 64 of them at most, since as many are widened at once, in registers."""
    widest = 64 * bits // 8
    return next((size for size in (128, 64, 32) if size <= widest and width * bits % (8 * size) == 0), None)


def tiled(width: int, bits: int = 16, size: int | None = None) -> tuple[Any, ...]:
    """The transforms of a tile with rows of `width` numbers, as wgmma wants them of 16-bit operands."""
    size = size or swizzle(width, bits)
    if size is None:
        return ()
    return plgpu.TilingTransform((8, 8 * size // bits)), plgpu.SwizzleTransform(size)


def zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """(n,) spread over a matrix whose `axis` it is."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def times(x: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """x times a scale: one number, or (n,) along `axis`."""
    return x * (along(scale, x.shape, axis) if scale.ndim else scale)


def matmul(a: Ref, b: Ref, *, watch: bool) -> jax.Array:
    """a @ b in float32 on the tensor cores; a and b are refs in shared memory.

    The interpreter computes wgmma but does not see what it reads. With `watch` (only when interpreting) the operands
    are read plainly too, so that a missing wait, or a slot filled again too early, is reported. The commit stands for
    wgmma reading through the async proxy, which needs no fence before the next copy.
    """
    if watch:
        a[...], b[...]
        plgpu.commit_smem()

    def product(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Array, b: Ref, *, interpreted: bool) -> jax.Array:
    """acc + a @ b on the tensor cores, acc and a in registers, b a ref in shared memory."""
    if interpreted:
        out = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return out
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def add_matmul(acc: jax.Array, a: Ref, b: Ref, *, interpreted: bool) -> jax.Array:
    """acc + a @ b on the tensor cores, acc in registers, a and b refs in shared memory."""
    if interpreted:
        return acc + matmul(a, b, watch=True)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def publish(ref: Ref, value: jax.Array) -> None:
    """Stores an operand of wgmma or of a copy. The interpreter does not miss the commit before a wgmma; a GPU does."""
    ref[...] = value
    plgpu.commit_smem()


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap · tanh(logits / cap), by exp2: off by less than 1e-6 · cap; the hardware's tanh is off by 5e-4 · cap."""
    return cap - (2 * cap) / (1.0 + jnp.exp2(logits * (2 * LOG2E / cap)))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The blocks of a slot that are fetched: those of the first rows that stay visible, then from the window on.

    All but `rows`, `sink_rows` and `windowed` are traced scalars.

    Attributes:
      length: rows of the slot; what lies behind them is nobody's.
      low: first row of the window; 0 without one.
      first: block of `low`.
      sink_blocks: blocks before `first` that hold first rows.
      steps: blocks in all.
      rows: R of a page.
      sink_rows: rows visible in front of the window.
      windowed: whether there is a window.
    """

    length: jax.Array
    low: jax.Array
    first: jax.Array
    sink_blocks: jax.Array
    steps: jax.Array
    rows: int
    sink_rows: int
    windowed: bool

    @classmethod
    def over(
        cls, length: jax.Array, high: jax.Array, low: jax.Array, rows: int, window: int | None, sink_rows: int
    ) -> Walk:
        """The blocks of rows low … high − 1, and of the first rows behind the window."""
        windowed = window is not None
        sink_rows = sink_rows if windowed else 0
        first = lax.div(low, BLOCK) if windowed else jnp.int32(0)
        sink_blocks = jnp.minimum(jnp.int32(-(-sink_rows // BLOCK)), first)
        steps = jnp.maximum(pl.cdiv(high, BLOCK) - first, 0) + sink_blocks
        return cls(length, low, first, sink_blocks, jnp.where(high > 0, steps, 0), rows, sink_rows, windowed)

    def block(self, step: jax.Array) -> jax.Array:
        """Which 64 rows of the slot are read in a step."""
        if not self.windowed:
            return step
        return jnp.where(step < self.sink_blocks, step, step - self.sink_blocks + self.first)

    def page(self, page: jax.Array) -> jax.Array:
        """The page to fetch for a page of the block: itself, or the slot's last one where no row of it is needed.

        A page behind the length, or behind the window, may be nobody's or another's: its number is not followed.
        """
        last = lax.div(self.length - 1, self.rows)
        needed = page <= last
        if self.windowed:
            needed &= (page >= lax.div(self.low, self.rows)) | (page * self.rows < self.sink_rows)
        return jnp.where(needed, page, last)

    def dirty(self, block: jax.Array) -> jax.Array:
        """Whether some row of the block is nobody's, and may hold NaN."""
        start = block * BLOCK
        found = start + BLOCK > self.length
        if self.windowed:
            of_sinks = -(-self.sink_rows // self.rows) * self.rows
            found |= (start < lax.div(self.low, self.rows) * self.rows) & (start + BLOCK > of_sinks)
        return found

    def owned(self, token: jax.Array) -> jax.Array:
        """Of rows (…) of a block: which hold what the slot wrote."""
        owned = token < self.length
        if self.windowed:
            of_sinks = -(-self.sink_rows // self.rows) * self.rows
            owned &= (token >= lax.div(self.low, self.rows) * self.rows) | (token < of_sinks)
        return owned


def scale_inputs(scales: jax.Array | None, table: jax.Array) -> dict[str, jax.Array]:
    """What a kernel reads of scales: rows' where they lie; pages', which are few, gathered: (B, 2·K, M)."""
    if scales is None:
        return {}
    if scales.ndim == 3:
        return {"scales": scales}
    return {"page_scales": scales.at[table].get(mode="clip").swapaxes(1, 2)}


def value_dim(v_pages: Any, latent: int | None) -> int:
    """Hv."""
    return latent if latent is not None else v_pages.shape[-1]


def copies(rows: int) -> int:
    """Copies that fill a block, from pages of `rows` rows."""
    return max(1, BLOCK // rows)


def stage_bytes(tiles: dict[str, Any]) -> int:
    """Bytes of shared memory of the refs in `tiles`, each of which begins at a multiple of 1,024."""
    return sum(-(-math.prod(ref.shape) * bits_of(ref.dtype) // 8 // 1024) * 1024 for ref in tiles.values())


def bits_of(dtype: Any) -> int:
    return 4 if jnp.dtype(dtype).name == "int4" else 8 * jnp.dtype(dtype).itemsize


def block_tiles(stages: int, raw: int, k_pages: Any, v_pages: Any, compute: Any, row_scales: bool) -> dict[str, Any]:
    """Shared memory of blocks: `stages` of them handed over, `raw` of them as codes."""
    tiles: dict[str, Any] = {}
    for name, pages in (("k", k_pages), ("v", v_pages)):
        if pages is not None:
            width = pages.shape[-1]
            tiles[name] = plgpu.SMEM((stages, BLOCK, width), compute, transforms=tiled(width))
            if raw:
                bits = bits_of(pages.dtype)
                size = raw_swizzle(width, bits)
                transforms = tiled(width, bits, size) if size else ()
                tiles[f"{name}_raw"] = plgpu.SMEM((raw, BLOCK, width), pages.dtype, transforms=transforms)
            if row_scales:
                tiles[f"{name}_scale"] = plgpu.SMEM((stages, BLOCK), jnp.float32)
    return tiles


def block_barriers(stages: int, raw: int, rows: int, latent: bool, row_scales: bool, consumers: int) -> dict[str, Any]:
    """The barriers of `block_tiles`: full, free, and of what only the producer awaits.

    Copies arrive at `full` themselves. Codes arrive at `raw`; when they are widened the producer arrives at `full`, as
    do the copies of their scales.
    """
    n = copies(rows)
    arrivals = (1 + (n if row_scales else 0)) if raw else n
    barriers: dict[str, Any] = {}
    for name in ("k",) if latent else ("k", "v"):
        barriers[f"{name}_full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        barriers[f"{name}_free"] = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
        if raw:
            barriers[f"{name}_landed"] = plgpu.Barrier(num_arrivals=n, num_barriers=raw)
    if not raw:
        barriers["edge"] = plgpu.Barrier(num_arrivals=n)
    return barriers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the producer finds a slot's blocks and where it puts them.

    Attributes:
      smem: refs and barriers of `block_tiles` and `block_barriers`, by name.
      table: (B, M) int32 in global memory.
      k_pages: (P, R, K, H) in global memory.
      v_pages: (P, R, K, Hv), or None where the values are in the keys.
      scales: (P, 2·K or K, R) float32 for each row, or None.
      slot: of the table.
      head: kv head.
      walk: the blocks to fetch.
    """

    smem: dict[str, Ref]
    table: Ref
    k_pages: Ref
    v_pages: Ref | None
    scales: Ref | None
    slot: jax.Array
    head: jax.Array
    walk: Walk

    @property
    def sources(self) -> tuple[tuple[str, Ref], ...]:
        if self.v_pages is None:
            return (("k", self.k_pages),)
        return (("k", self.k_pages), ("v", self.v_pages))

    def pages(self, block: jax.Array) -> list[tuple[jax.Array, Any, Any]]:
        """(physical page, rows of it, rows of the block) of each copy that fills the block."""
        R = self.walk.rows
        if R >= BLOCK:
            page = lax.div(block * BLOCK, R)
            offset = block * BLOCK - page * R
            return [(self.table[self.slot, self.walk.page(page)], pl.ds(offset, BLOCK), pl.ds(0, BLOCK))]
        count = BLOCK // R
        # All numbers first, then the copies: the loads then wait for memory together.
        numbers = [self.table[self.slot, self.walk.page(block * count + j)] for j in range(count)]
        return [(number, pl.ds(0, R), pl.ds(j * R, R)) for j, number in enumerate(numbers)]

    def copy(self, pages: list[tuple[jax.Array, Any, Any]], source: Ref, tile: Ref, barrier: Ref) -> None:
        for number, rows, place in pages:
            plgpu.copy_gmem_to_smem(source.at[number, rows, self.head], tile.at[place], barrier)

    def copy_scales(self, pages: list[tuple[jax.Array, Any, Any]], name: str, slot: jax.Array, barrier: Ref) -> None:
        scales = self.scales
        assert scales is not None
        head = self.head if name == "k" else self.head + scales.shape[1] - self.k_pages.shape[2]
        for number, rows, place in pages:
            plgpu.copy_gmem_to_smem(scales.at[number, head, rows], self.smem[f"{name}_scale"].at[slot, place], barrier)


def produce(blocks: Blocks, first: jax.Array, last: jax.Array) -> None:
    """The producer's work: steps first … last − 1 of the walk, through the ring of slots that consumers free."""
    if "k_raw" in blocks.smem:
        _produce_widened(blocks, first, last)
    else:
        _produce_copied(blocks, first, last)


def _produce_copied(blocks: Blocks, first: jax.Array, last: jax.Array) -> None:
    """Pages of 16 bits are copied to where consumers read them.

    V's rows that are nobody's are multiplied by weights of 0, and 0 · NaN is NaN: in a block that has some, which is
    the last of a slot or the first of a window, the producer waits for the copy, writes zeros over them and only then
    hands the block over.
    """
    smem, walk = blocks.smem, blocks.walk
    stages = smem["k"].shape[0]

    def step(i: jax.Array, _: None) -> None:
        slot, block = lax.rem(i - first, stages), walk.block(i)
        pages = blocks.pages(block)
        for name, source in blocks.sources:
            tile, full = smem[name].at[slot], smem[f"{name}_full"].at[slot]

            @pl.when(i - first >= stages)
            def _wait(name=name, slot=slot):
                plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

            if name == "k" and blocks.v_pages is not None:
                blocks.copy(pages, source, tile, full)  # scores of rows that are nobody's are not looked at
                continue
            dirty = walk.dirty(block)

            @pl.when(jnp.logical_not(dirty))
            def _copy(source=source, tile=tile, full=full):
                blocks.copy(pages, source, tile, full)

            @pl.when(dirty)
            def _copy_and_clean(source=source, tile=tile, full=full):
                blocks.copy(pages, source, tile, smem["edge"])
                plgpu.barrier_wait(smem["edge"])
                _clean(tile, block, walk)
                for _ in pages:
                    plgpu.barrier_arrive(full)

    lax.fori_loop(first, last, step, None)


def _columns(width: int) -> list[Any]:
    """Slices of whole swizzle tiles, of few registers each."""
    size = 8 * (swizzle(width, 16) or 0) // 16
    return [pl.ds(start, size) for start in range(0, width, size)]


def _clean(tile: Ref, block: jax.Array, walk: Walk) -> None:
    layout = plgpu.Layout.WGMMA
    for columns in _columns(tile.shape[1]):
        part = tile.at[:, columns]
        value = plgpu.load(part, layout=layout)
        token = iota(value.shape, 0, layout) + block * BLOCK
        part[...] = jnp.where(walk.owned(token), value, jnp.zeros((), value.dtype))
    plgpu.commit_smem()


def _produce_widened(blocks: Blocks, first: jax.Array, last: jax.Array) -> None:
    """Codes are copied to a ring of their own, widened in registers, which is exact, and stored for the consumers."""
    smem, walk = blocks.smem, blocks.walk
    stages, raw = smem["k"].shape[0], smem["k_raw"].shape[0]

    def fetch(i: jax.Array, slot: jax.Array) -> None:
        pages = blocks.pages(walk.block(i))
        for name, source in blocks.sources:
            blocks.copy(pages, source, smem[f"{name}_raw"].at[slot], smem[f"{name}_landed"].at[slot])

    for i in range(raw):

        @pl.when(first + i < last)
        def _prologue(i=i):
            fetch(first + i, jnp.int32(i))

    def step(i: jax.Array, _: None) -> None:
        slot, raw_slot, block = lax.rem(i - first, stages), lax.rem(i - first, raw), walk.block(i)
        for name, _source in blocks.sources:
            full = smem[f"{name}_full"].at[slot]

            @pl.when(i - first >= stages)
            def _wait(name=name):
                plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

            if blocks.scales is not None:
                blocks.copy_scales(blocks.pages(block), name, slot, full)
            plgpu.barrier_wait(smem[f"{name}_landed"].at[raw_slot])
            _widen(smem[f"{name}_raw"].at[raw_slot], smem[name].at[slot], block, walk)
            plgpu.barrier_arrive(full)

        @pl.when(i + raw < last)
        def _refill():
            fetch(i + raw, raw_slot)

    lax.fori_loop(first, last, step, None)


def _widen(codes: Ref, tile: Ref, block: jax.Array, walk: Walk) -> None:
    """Codes as numbers of 16 bits. What is nobody's is zero: codes of float8 can be NaN."""
    name = jnp.dtype(codes.dtype).name
    layout = plgpu.Layout.WGMMA_UPCAST_4X if name == "int4" else plgpu.Layout.WGMMA_UPCAST_2X
    for columns in _widened_columns(codes.shape[1], bits_of(codes.dtype)):
        value = plgpu.load(codes.at[:, columns], layout=layout, optimized=False)
        if name.startswith("float8"):  # Hopper converts them to float16 only, which holds all of both kinds
            value = value.astype(jnp.float16).astype(jnp.float32).astype(tile.dtype)
            token = iota(value.shape, 0, layout) + block * BLOCK
            value = jnp.where(walk.owned(token), value, jnp.zeros((), value.dtype))
        else:
            value = value.astype(tile.dtype)
        tile.at[:, columns][...] = value
    plgpu.commit_smem()


def _widened_columns(width: int, bits: int) -> list[Any]:
    """Slices that are whole swizzle tiles of the codes and of what they become."""
    size = 8 * (raw_swizzle(width, bits) or width * bits // 8) // bits
    return [pl.ds(start, size) for start in range(0, width, size)]


def fitting_stages(fixed: int, block_tiles: Any, raw: int, wanted: int) -> tuple[int, int]:
    """(stages, raw stages): two to four within `wanted` bytes, or what fits at all, at least one of each.

    fixed: bytes besides the blocks'.

    Raises:
      NotImplementedError: where one block does not fit.
    """
    choices = [(4, raw), (3, raw), (2, raw)]
    for limit, options in ((wanted, choices), (SHARED - 2048, [(2, raw), (1, raw), (1, min(raw, 1))])):
        for stages, deep in options:
            if fixed + stage_bytes(block_tiles(stages, deep)) <= limit:
                return stages, deep
    raise NotImplementedError(f"blocks of {BLOCK} rows with heads this wide do not fit in {SHARED >> 10} KiB")
