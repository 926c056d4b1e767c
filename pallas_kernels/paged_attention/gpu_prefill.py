"""Paged attention of prompt chunks and trees for Hopper: FlashAttention (2205.14135) over pages, with wgmma.

The query tokens of a slot are cut into blocks of C tokens. The heads that share K and V are rows of one product, so a
block has C · g rows: 64 to a consumer warpgroup. One warpgroup, the producer, fetches blocks of 64 rows of K and V
(gpu_tiles.py), the consumers compute

    S (64, 64) = Q (64, H) @ K^T (H, 64)          out (64, Hv) += P (64, 64) @ V (64, Hv)

with P in registers. Values wider than 256 are shared out between the two consumers, which then have the same rows.
Blocks that no row of the query block sees are not fetched, and those that all rows see whole are not masked.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.pallas_kernels.paged_attention import gpu_tiles as tiles
from kvjax.pallas_kernels.paged_attention.gpu_decode import page_scales, scaled_logits
from kvjax.pallas_kernels.paged_attention.gpu_tiles import BLOCK, FLOOR, LOG2E, MASKED, SHARED, Blocks, Ref, Walk, plgpu
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.paged_attention.xla import query_blocks

ROWS = 64  # of a consumer: wgmma's M
CONSUMERS = 2
WIDEST = 256  # numbers of a value in one consumer: 128 registers a thread


class _Work(NamedTuple):
    """The query block of a block of threads: traced scalars.

    Attributes:
      slot: of the table.
      size: tokens, at most C.
      position: of the first token.
      length: rows of the slot.
      new: rows of the slot before those of this step.
    """

    slot: jax.Array
    size: jax.Array
    position: jax.Array
    length: jax.Array
    new: jax.Array


def _prefill_kernel(
    *refs: Ref, names: tuple[str, ...], spec: AttentionSpec, heads_per_kv: int, g: int, parts: int, interpreted: bool,
    **smem: Ref,
) -> None:  # fmt: skip
    ref = dict(zip(names, refs, strict=True))
    k_pages, v_pages, work_list, table = ref["k_pages"], ref.get("v_pages"), ref["work"], ref["table"]
    item, group, wg = (lax.axis_index(name) for name in ("item", "group", "wg"))
    head = lax.div(group, jnp.int32(heads_per_kv))
    work = _Work(*(work_list[i, item] for i in range(5)))

    end = work.position + work.size  # no row sees what is behind, but in a tree
    high = jnp.minimum(end, work.length) if "tree" not in ref else work.length
    low = jnp.int32(0) if spec.window is None else jnp.maximum(work.position - (spec.window - 1), 0)
    high = jnp.where(work.size > 0, high, 0)
    walk = Walk.over(work.length, high, low, k_pages.shape[1], spec.window, spec.sink_rows)

    # Of a thread; 504 in all three warpgroups. A producer that widens codes, and consumers of wide values, want more.
    producing, consuming = (56, 224) if ref["out"].shape[3] // parts > 128 else (88, 208)

    @pl.when(wg == CONSUMERS)
    def _producer():
        plgpu.set_max_registers(producing, action="decrease")
        blocks = Blocks(smem, table, k_pages, v_pages, ref.get("scales"), work.slot, head, walk)
        tiles.produce(blocks, jnp.int32(0), walk.steps)

    @pl.when((wg < CONSUMERS) & (work.size > 0))
    def _consumer():
        plgpu.set_max_registers(consuming, action="increase")
        _consume(ref, smem, walk, work, (item, group, head, wg), spec, g, parts, interpreted)


def _consume(
    ref: dict[str, Ref], smem: dict[str, Ref], walk: Walk, work: _Work, place: tuple[jax.Array, ...],
    spec: AttentionSpec, g: int, parts: int, interpreted: bool,
) -> None:  # fmt: skip
    layout = plgpu.Layout.WGMMA
    by_row, by_token = layout.reduce(1), layout.reduce(0)
    item, group, head, wg = place
    stages = smem["k"].shape[0]
    latent = "v_pages" not in ref
    Hv = ref["out"].shape[3]
    shape = (ROWS, BLOCK)
    rows_of = wg if parts == 1 else jnp.int32(0)  # which 64 rows of the query block
    columns = Hv // parts
    my_columns = pl.ds(0 if parts == 1 else wg * columns, columns)
    mine = pl.ds(rows_of * ROWS, ROWS)
    q_tile = smem["q"].at[wg if parts == 1 else 0]

    def load(name: str, of_row: str) -> None:
        plgpu.copy_gmem_to_smem(ref[name].at[group, mine], smem[of_row].at[wg], smem["q_full"].at[wg])

    if parts == 1:
        plgpu.copy_gmem_to_smem(ref["q"].at[item, group, mine], q_tile, smem["q_full"].at[wg])
    else:

        @pl.when(wg == 0)
        def _load_q():
            plgpu.copy_gmem_to_smem(ref["q"].at[item, group], q_tile, smem["q_shared"])

        plgpu.barrier_wait(smem["q_shared"])
    for name in ("slopes", "sinks"):
        if name in ref:
            load(name, name)
    if "tree" in ref:
        plgpu.copy_gmem_to_smem(ref["tree"].at[item, :, mine], smem["tree"].at[wg], smem["q_full"].at[wg])
    if parts == 1 or {"slopes", "sinks", "tree"} & set(ref):
        plgpu.barrier_wait(smem["q_full"].at[wg])

    def of_row(name: str) -> jax.Array:
        return plgpu.load(smem[name].at[wg], layout=by_row, optimized=False)

    row = tiles.iota((ROWS,), 0, by_row) + rows_of * ROWS
    token_of_row = lax.div(row, jnp.full_like(row, g))
    position = jnp.where(token_of_row < work.size, token_of_row + work.position, -1)  # padding sees nothing
    slopes = of_row("slopes") if "slopes" in ref else None
    first_tree_block = lax.div(work.new, BLOCK)

    def visible(block: jax.Array) -> jax.Array:
        token = tiles.iota(shape, 1, layout) + block * BLOCK
        positions = tiles.along(position, shape, 0)
        if "tree" in ref:
            word = 2 * jnp.maximum(block - first_tree_block, 0)
            words = [
                tiles.along(plgpu.load(smem["tree"].at[wg, word + i], layout=by_row, optimized=False), shape, 0)
                for i in range(2)
            ]
            column = tiles.iota(shape, 1, layout)
            bit = lax.shift_right_logical(jnp.where(column < 32, words[0], words[1]), column & 31) & 1
            return ((token < work.new) | (bit == 1)) & (positions >= 0) & (token < work.length)
        seen = token <= positions
        if spec.window is not None:
            near = token > positions - spec.window
            seen &= near | (token < spec.sink_rows) if spec.sink_rows else near
        return seen

    def some_unseen(step: jax.Array, block: jax.Array) -> jax.Array:
        end = (block + 1) * BLOCK
        if "tree" in ref:
            return end > work.new
        found = end > work.position + 1
        if spec.window is not None:
            found |= block * BLOCK <= work.position + work.size - 1 - spec.window
        return found

    def scales_of(name: str, block: jax.Array, ring: jax.Array) -> jax.Array:
        if "scales" in ref:
            tile = smem["k_scale" if latent else f"{name}_scale"].at[ring]
            value = plgpu.load(tile, layout=by_token, optimized=False)
            plgpu.commit_smem()  # before the next copy to it
            return value
        index = head if name == "k" or latent else head + ref["k_pages"].shape[2]
        return page_scales(ref["page_scales"].at[work.slot, index], block, walk, by_token)

    scaled = "scales" in ref or "page_scales" in ref

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, m, l = carry
        ring, block = lax.rem(i, stages), walk.block(i)
        early = scales_of("k", block, ring) if "page_scales" in ref else None  # loads that overlap with the wait
        late = scales_of("v", block, ring) if "page_scales" in ref else None
        plgpu.barrier_wait(smem["k_full"].at[ring])
        s = tiles.matmul(q_tile, smem["k"].at[ring].transpose((1, 0)), watch=interpreted)
        if scaled:
            k_scale = early if early is not None else scales_of("k", block, ring)
            s = tiles.times(s, k_scale, 1)
        if not latent:
            plgpu.barrier_arrive(smem["k_free"].at[ring])
        s = scaled_logits(s, spec)
        if slopes is not None:
            token = tiles.iota(shape, 1, layout) + block * BLOCK
            distance = (tiles.along(position, shape, 0) - token).astype(jnp.float32)
            s = s - tiles.along(slopes, shape, 0) * distance
        masked = some_unseen(i, block)
        s = lax.cond(masked, lambda s: jnp.where(visible(block), s, MASKED), lambda s: s, s)

        m_new = jnp.maximum(m, s.max(axis=1))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - tiles.along(m_new, shape, 0))
        l = l * alpha + p.sum(axis=1)
        acc = acc * tiles.along(alpha, acc.shape, 0)
        if not latent:
            plgpu.barrier_wait(smem["v_full"].at[ring])
        if scaled:
            v_scale = late if late is not None else scales_of("v", block, ring)
            if v_scale.ndim:
                owned = walk.owned(tiles.iota((BLOCK,), 0, by_token) + block * BLOCK)
                v_scale = jnp.where(owned, v_scale, 0.0)  # what is nobody's may be NaN
            p = tiles.times(p, v_scale, 1)
        values = smem["k"] if latent else smem["v"]
        v = values.at[ring, :, my_columns]
        acc = tiles.add_product(acc, p.astype(smem["q"].dtype), v, interpreted=interpreted)
        plgpu.barrier_arrive(smem["k_free" if latent else "v_free"].at[ring])
        return acc, m_new, l

    carry = (
        tiles.zeros((ROWS, columns), layout),
        plgpu.layout_cast(jnp.full((ROWS,), FLOOR, jnp.float32), by_row),
        tiles.zeros((ROWS,), by_row),
    )
    acc, m, l = lax.fori_loop(0, walk.steps, step, carry)
    if "sinks" in ref:
        sinks = of_row("sinks")
        top = jnp.maximum(m, sinks)
        shrink = jnp.exp2(m - top)
        l = jnp.where(l > 0.0, l * shrink + jnp.exp2(sinks - top), l)  # what sees nothing has no denominator
        m, acc = top, acc * tiles.along(shrink, acc.shape, 0)
    inverse = 1.0 / jnp.where(l == 0.0, 1.0, l)
    out = (acc * tiles.along(inverse, acc.shape, 0)).astype(ref["out"].dtype)
    if parts > 1:  # the other consumer may be reading Q still
        plgpu.barrier_arrive(smem["q_free"])
        plgpu.barrier_wait(smem["q_free"])
    smem["lse"][wg] = (m + jnp.log2(l)) * (1 / LOG2E)
    tiles.publish(q_tile.at[:, my_columns], out)
    height = ROWS if columns == q_tile.shape[1] else 8  # a copy reads one piece of memory, and tiles are of 8 rows
    for upper in range(0, ROWS, height):
        rows, piece = pl.ds(rows_of * ROWS + upper, height), q_tile.at[pl.ds(upper, height), my_columns]
        plgpu.copy_smem_to_gmem(piece, ref["out"].at[item, group, rows, my_columns])
    write_lse = True if parts == 1 else wg == 0

    @pl.when(write_lse)
    def _lse():
        plgpu.copy_smem_to_gmem(smem["lse"].at[wg], ref["lse"].at[item, group, mine])

    plgpu.wait_smem_to_gmem(0)


def block_shape(group: int, value_dim: int, codes: bool) -> tuple[int, int, int, int]:
    """(heads g of a block's rows, blocks of threads to a kv head, tokens C of a block, parts of the values)."""
    parts = 1 if value_dim <= (WIDEST // 2 if codes else WIDEST) else 2
    rows = ROWS * CONSUMERS // parts
    per_kv = -(-group // rows)
    g = -(-group // per_kv)
    return g, per_kv, rows // g, parts


def tree_words(tree: jax.Array, new: jax.Array, most: int) -> jax.Array:
    """Masks by new row → by row of the slot, from the start of the block of 64 that has the first new row.

    Args:
      tree: (J, C, W) int32, bits of new rows 0 … 32·W − 1.
      new: (J,) int32: the first new row.
      most: words of the result, an even number.

    Returns:
      (J, C, most) int32: bit i is row `new` // 64 · 64 + i.
    """
    shift = new % BLOCK
    padded = jnp.pad(tree, ((0, 0), (0, 0), (2, max(0, most - tree.shape[2])))).view(jnp.uint32)
    words, bits = (shift // 32)[:, None, None], (shift % 32).astype(jnp.uint32)[:, None, None]
    index = jnp.arange(most, dtype=jnp.int32)[None, None, :] + 2 - words
    index = jnp.broadcast_to(index, (*tree.shape[:2], most))
    this = jnp.take_along_axis(padded, index, axis=2)
    before = jnp.take_along_axis(padded, index - 1, axis=2)
    carried = jnp.where(bits > 0, before >> ((32 - bits) % 32), 0)
    return ((this << bits) | carried).view(jnp.int32)


def attend_chunks(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    wanted: jax.Array,
    spec: AttentionSpec,
    *,
    max_query: int,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    scales: jax.Array | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of all tokens of the slots in (B,) bool `wanted`.

    Args:
      q: (T, N, H), of the dtype that is multiplied: that of the pages, or bfloat16 over codes.
      k_pages: (P, R, K, H).
      v_pages: (P, R, K, Hv), or None where `spec.latent` says how much of K it is.
      table: (B, M) int32. lengths: (B,) int32. row_starts: (B + 1,) int32.
      max_query: static; no slot has more tokens.
      sinks: (N,) float32. slopes: (N,) float32. tree: (T, W) int32. scales: (P, 2·K, R) or (P, 2·K) float32.
      stages: blocks in flight; None: up to four, as many as fit.
      interpret: parameters of the interpreter, or None to compile.

    Returns:
      out (T, N, Hv) in q's dtype and lse (T, N) float32; what they hold for tokens of other slots means nothing.

    Raises:
      NotImplementedError: where shared memory does not suffice.
    """
    (T, N, H), (_, R, K, _), B = q.shape, k_pages.shape, table.shape[0]
    Hv = tiles.value_dim(v_pages, spec.latent)
    G = N // K
    raw = 2 if tiles.bits_of(k_pages.dtype) < 16 else 0
    g, per_kv, C, parts = block_shape(G, Hv, raw > 0)
    rows, groups = ROWS * CONSUMERS // parts, K * per_kv
    J = min(T, T // C + B)
    blocks = query_blocks(row_starts, lengths, wanted, C, J)
    tokens = row_starts[1:] - row_starts[:-1]
    new = (lengths - tokens)[blocks.slot]
    position = new + blocks.first - row_starts[blocks.slot]
    token = blocks.first[:, None] + jnp.arange(C, dtype=jnp.int32)[None, :]
    live = jnp.arange(C, dtype=jnp.int32)[None, :] < blocks.size[:, None]

    def to_rows(x: jax.Array) -> jax.Array:
        """(J, C, N, …) → (J, groups, rows, …), padded with zeros."""
        x = x.reshape(*x.shape[:2], K, G, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, per_kv * g - G), (0, 0)))
        x = x.reshape(*x.shape[:2], groups, g, -1).swapaxes(1, 2).reshape(x.shape[0], groups, C * g, -1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, rows - C * g), (0, 0)))

    def of_heads(x: jax.Array) -> jax.Array:
        """(N,) → (groups, rows), by powers of 2."""
        return to_rows(jnp.broadcast_to(x[None, None, :, None] * jnp.float32(LOG2E), (1, C, N, 1)))[0, ..., 0]

    inputs: dict[str, jax.Array] = {
        "work": jnp.stack([blocks.slot, blocks.size, position, lengths[blocks.slot], new]),
        "table": table,
        "q": to_rows(q.at[token].get(mode="clip")),
        "k_pages": k_pages,
    }
    if v_pages is not None:
        inputs["v_pages"] = v_pages
    for name, values in (("slopes", slopes), ("sinks", sinks)):
        if values is not None:
            inputs[name] = of_heads(values)
    words = 2 * (-(-max_query // BLOCK) + 1)
    if tree is not None:
        of_rows = tree_words(tree.at[token].get(mode="clip"), new, words).swapaxes(1, 2)  # (J, words, C)
        of_rows = jnp.repeat(of_rows, g, axis=2)
        inputs["tree"] = jnp.pad(of_rows, ((0, 0), (0, 0), (0, rows - C * g)))
    row_scales = scales is not None and scales.ndim == 3
    inputs |= tiles.scale_inputs(scales, table)

    of_row: dict[str, Any] = {
        name: plgpu.SMEM((CONSUMERS, ROWS), jnp.float32) for name in ("slopes", "sinks") if name in inputs
    }
    fixed: dict[str, Any] = {
        "q": plgpu.SMEM((CONSUMERS // parts, ROWS, H), q.dtype, transforms=tiles.tiled(H)),
        "lse": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        **of_row,
    }
    if tree is not None:
        fixed["tree"] = plgpu.SMEM((CONSUMERS, words, ROWS), jnp.int32)
    block_tiles = functools.partial(
        tiles.block_tiles, k_pages=k_pages, v_pages=v_pages, compute=q.dtype, row_scales=row_scales
    )
    if stages is None:
        stages, raw = tiles.fitting_stages(tiles.stage_bytes(fixed), block_tiles, raw, SHARED - 2048)
    arrivals = (parts == 1) + len(of_row) + (tree is not None)
    barriers: dict[str, Any] = {"q_full": plgpu.Barrier(num_arrivals=max(1, arrivals), num_barriers=CONSUMERS)}
    if parts > 1:
        barriers |= {"q_shared": plgpu.Barrier(), "q_free": plgpu.Barrier(num_arrivals=CONSUMERS)}
    kernel = functools.partial(
        _prefill_kernel,
        names=(*inputs, "out", "lse"),
        spec=spec,
        heads_per_kv=per_kv,
        g=g,
        parts=parts,
        interpreted=interpret is not None,
    )
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((J, groups, rows, Hv), q.dtype),
            jax.ShapeDtypeStruct((J, groups, rows), jnp.float32),
        ),
        scratch_types={
            **fixed,
            **block_tiles(stages, raw),
            **tiles.block_barriers(stages, raw, R, v_pages is None, row_scales, CONSUMERS),
            **barriers,
        },
        grid=(J, groups),
        grid_names=("item", "group"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="kvjax_paged_prefill",
    )(*inputs.values())

    place = jnp.where(live, token, T)
    index = jnp.arange(J * C, dtype=jnp.int32).reshape(J, C)
    where = jnp.zeros((T,), jnp.int32).at[place].set(index, mode="drop")

    def of_tokens(x: jax.Array) -> jax.Array:
        """(J, groups, rows, …) → (T, N, …)."""
        x = x[:, :, : C * g].reshape(J, K, per_kv, C, g, -1)
        x = x.transpose(0, 3, 1, 2, 4, 5).reshape(J * C, K, per_kv * g, -1)[:, :, :G]
        return x[where].reshape(T, N, -1)

    return of_tokens(out), of_tokens(lse)[..., 0]
