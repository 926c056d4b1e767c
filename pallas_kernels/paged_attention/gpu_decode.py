"""Paged decode attention for Hopper: split-KV flash decoding (FlashAttention 2205.14135, split over keys as in
Flash-Decoding), one block of threads per (slot, heads that share K and V, split).

wgmma wants 64 rows and a decode step has few query heads per kv head, so the products are turned around: rows of K and
V are the rows of wgmma, the n query heads, padded to 8, 16, 32 or 64, its columns.

    scores^T (64, n) = K (64, H) @ Q^T (H, n)          out^T (Hv, n) += V^T (Hv, 64) @ P^T (64, n)

Every query head of a group is a column, so that a page is fetched once for all of them. The accumulator is Hv·n / 128
registers a thread.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.pallas_kernels.paged_attention import gpu_tiles as tiles
from kvjax.pallas_kernels.paged_attention.gpu_tiles import BLOCK, FLOOR, LOG2E, MASKED, Blocks, Ref, Walk, plgpu
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

COLUMNS = (8, 16, 32, 64)  # query heads a block of threads takes; wgmma's N
ACCUMULATOR = 16384  # numbers of out^T: 128 registers of 128 threads
TWO_PER_SM = 100 * 1024  # bytes of shared memory that leave room for a second block of threads


def _chunks(width: int) -> list[tuple[int, int, int]]:
    """(start, rows, rows not seen before) of the products that make out^T: wgmma's rows come by 64.

    The last 64 of a value that is no multiple of 64 overlap those before it: 80 → (0, 64, 64), (16, 64, 16).
    """
    whole = [(start, BLOCK, BLOCK) for start in range(0, width - BLOCK + 1, BLOCK)]
    rest = width % BLOCK
    return [*whole, (width - BLOCK, BLOCK, rest)] if rest else whole


def _decode_kernel(
    *refs: Ref, names: tuple[str, ...], spec: AttentionSpec, heads_per_kv: int, splits: int, interpreted: bool,
    **smem: Ref,
) -> None:  # fmt: skip
    ref = dict(zip(names, refs, strict=True))
    k_pages, out, lse = ref["k_pages"], ref["out"], ref["lse"]
    v_pages, lengths, table = ref.get("v_pages"), ref["lengths"], ref["table"]
    slot, group, split, wg = (lax.axis_index(name) for name in ("slot", "group", "split", "wg"))
    head = lax.div(group, jnp.int32(heads_per_kv))

    length = lengths[slot]
    low = jnp.int32(0) if spec.window is None else jnp.maximum(length - spec.window, 0)
    walk = Walk.over(length, length, low, k_pages.shape[1], spec.window, spec.sink_rows)
    per_split = pl.cdiv(walk.steps, splits)
    first = split * per_split
    last = jnp.minimum(first + per_split, walk.steps)  # may be ≤ first: then this split is empty

    @pl.when(wg == 1)
    def _producer():
        tiles.produce(Blocks(smem, table, k_pages, v_pages, ref.get("scales"), slot, head, walk), first, last)

    @pl.when(wg == 0)
    def _consumer():
        state = _attend(ref, smem, walk, first, last, (slot, group, head), spec, interpreted)
        _finish(state, smem, out.at[slot, group, split], lse.at[slot, group, split])


def _attend(
    ref: dict[str, Ref], smem: dict[str, Ref], walk: Walk, first: jax.Array, last: jax.Array,
    place: tuple[jax.Array, jax.Array, jax.Array], spec: AttentionSpec, interpreted: bool,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:  # fmt: skip
    """The online softmax over steps first … last − 1: out^T in chunks (64, n), and m and l (n,), m by powers of 2."""
    layout = plgpu.Layout.WGMMA
    by_head, by_token = layout.reduce(0), layout.reduce(1)
    slot, group, head = place
    n = smem["q"].shape[0]
    stages = smem["k"].shape[0]
    latent = "v_pages" not in ref
    chunks = _chunks(ref["out"].shape[3])
    position = walk.length - 1

    plgpu.copy_gmem_to_smem(ref["q"].at[slot, group], smem["q"], smem["q_full"])
    if "slopes" in ref:
        plgpu.copy_gmem_to_smem(ref["slopes"].at[group], smem["slopes"], smem["q_full"])
    plgpu.barrier_wait(smem["q_full"])
    slopes = None
    if "slopes" in ref:
        slopes = plgpu.load(smem["slopes"], layout=by_head, optimized=False)

    def scales_of(name: str, block: jax.Array, ring: jax.Array) -> jax.Array:
        """(64,) by token; to be awaited with the block where each row has one."""
        if "scales" in ref:
            row = smem["k_scale" if latent else f"{name}_scale"].at[ring]
            value = plgpu.load(row, layout=by_token, optimized=False)
            plgpu.commit_smem()  # before the next copy to it
            return value
        kv_heads = ref["k_pages"].shape[2]
        index = head if name == "k" or latent else head + kv_heads
        return page_scales(ref["page_scales"].at[slot, index], block, walk, by_token)

    scaled = "scales" in ref or "page_scales" in ref

    def step(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        *acc, m, l = carry
        ring, block = lax.rem(i - first, stages), walk.block(i)
        shape = (BLOCK, n)

        early = scales_of("k", block, ring) if "page_scales" in ref else None  # loads that overlap with the wait
        late = scales_of("v", block, ring) if "page_scales" in ref else None
        plgpu.barrier_wait(smem["k_full"].at[ring])
        s = tiles.matmul(smem["k"].at[ring], smem["q"].transpose((1, 0)), watch=interpreted)
        if scaled:
            k_scale = early if early is not None else scales_of("k", block, ring)
            s = tiles.times(s, k_scale, 0)
        if not latent:
            plgpu.barrier_arrive(smem["k_free"].at[ring])

        token = tiles.iota(shape, 0, layout) + block * BLOCK
        s = scaled_logits(s, spec)
        if slopes is not None:
            s = s - tiles.along(slopes, shape, 1) * (position - token).astype(jnp.float32)
        seen = token < walk.length
        if spec.window is not None:
            near = token >= walk.low
            seen &= near | (token < spec.sink_rows) if spec.sink_rows else near
        s = jnp.where(seen, s, MASKED)

        m_new = jnp.maximum(m, s.max(axis=0))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - tiles.along(m_new, shape, 1))
        l = l * alpha + p.sum(axis=0)
        if not latent:
            plgpu.barrier_wait(smem["v_full"].at[ring])
        if scaled:
            v_scale = late if late is not None else scales_of("v", block, ring)
            p = jnp.where(seen, tiles.times(p, v_scale, 0), 0.0)  # a scale that is nobody's may be NaN
        tiles.publish(smem["p"].transpose((1, 0)), p.astype(smem["p"].dtype))

        values = smem["k"] if latent else smem["v"]
        for c, (start, rows, _) in enumerate(chunks):
            v = values.at[ring, :, pl.ds(start, rows)].transpose((1, 0))
            shrunk = acc[c] * tiles.along(alpha, acc[c].shape, 1)
            acc[c] = tiles.add_matmul(shrunk, v, smem["p"].transpose((1, 0)), interpreted=interpreted)
        plgpu.barrier_arrive(smem["k_free" if latent else "v_free"].at[ring])
        return (*acc, m_new, l)

    carry = (
        *(tiles.zeros((rows, n), layout) for _, rows, _ in chunks),
        plgpu.layout_cast(jnp.full((n,), FLOOR, jnp.float32), by_head),
        tiles.zeros((n,), by_head),
    )
    *acc, m, l = lax.fori_loop(first, last, step, carry)
    return acc, m, l


def scaled_logits(s: jax.Array, spec: AttentionSpec) -> jax.Array:
    """q·k → the logit times log2 e, for exp2."""
    if spec.soft_cap is None:
        return s * (spec.scale * LOG2E)
    return tiles.capped(s * spec.scale, spec.soft_cap) * LOG2E


def page_scales(scales: Ref, block: jax.Array, walk: Walk, layout: Any) -> jax.Array:
    """Scales of a block's rows, from those of the slot's pages, (M,) in global memory: (64,), or () of one page."""
    R = walk.rows
    count = tiles.copies(R)
    first = lax.div(block * BLOCK, R)
    last = scales.shape[0] - 1
    if count == 1:
        return scales[jnp.minimum(first, last)]
    row = tiles.iota((BLOCK,), 0, layout)
    out = jnp.where(row < R, scales[jnp.minimum(first, last)], 0.0)  # a plain splat has no layout
    for j in range(1, count):
        out = jnp.where(row < j * R, out, scales[jnp.minimum(first + j, last)])
    return out


def _finish(state: tuple[list[jax.Array], jax.Array, jax.Array], smem: dict[str, Ref], out: Ref, lse: Ref) -> None:
    """Writes out^T (Hv, n) and lse (n,), chunk after chunk through shared memory."""
    acc, m, l = state
    inverse = 1.0 / jnp.where(l == 0.0, 1.0, l)
    smem["lse"][...] = (m + jnp.log2(l)) * (1 / LOG2E)
    for (start, rows, new), part in zip(_chunks(out.shape[0]), acc, strict=True):
        plgpu.wait_smem_to_gmem(0)
        tiles.publish(smem["out"], part * tiles.along(inverse, part.shape, 1))
        fresh = pl.ds(rows - new, new)
        plgpu.copy_smem_to_gmem(smem["out"].at[fresh], out.at[pl.ds(start + rows - new, new)])
    plgpu.copy_smem_to_gmem(smem["lse"], lse)
    plgpu.wait_smem_to_gmem(0)


def columns(group: int, value_dim: int) -> int:
    """Query heads of a block of threads, for `group` that share K and V: as many as there are, or as registers hold."""
    most = max(n for n in COLUMNS if n * -(-value_dim // BLOCK) * BLOCK <= ACCUMULATOR)
    return next((n for n in COLUMNS if group <= n <= most), most)


def split_count(blocks_of_threads: int, context_blocks: int, cores: int = 132) -> int:
    """Splits of each context, so that there are two blocks of threads a core, each with four or more blocks of rows.

    blocks_of_threads: without splits. context_blocks: blocks of rows that the longest slot can have.
    """
    return max(1, min(-(-2 * cores // blocks_of_threads), context_blocks // 4, 64))


def attend_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    spec: AttentionSpec,
    *,
    slopes: jax.Array | None = None,
    scales: jax.Array | None = None,
    splits: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the last token of each slot.

    Args:
      q: (B, N, H), of the dtype that is multiplied: that of the pages, or bfloat16 over codes.
      k_pages: (P, R, K, H).
      v_pages: (P, R, K, Hv), or None where `spec.latent` says how much of K it is.
      table: (B, M) int32.
      lengths: (B,) int32 rows of each slot, its own included; 0: nothing is read, out is 0 and lse −inf.
      spec: what is computed.
      slopes: (N,) float32, of ALiBi.
      scales: (P, 2·K, R) or (P, 2·K) float32; K of them where latent.
      splits: of each context; None: `split_count`.
      stages: blocks in flight; None: as many, up to four, as leave room for a second block of threads.
      interpret: parameters of the interpreter, or None to compile.

    Returns:
      out (B, N, Hv) and lse (B, N), natural, both float32.

    Raises:
      NotImplementedError: where shared memory does not suffice.
    """
    (B, N, H), (_, R, K, _) = q.shape, k_pages.shape
    Hv = tiles.value_dim(v_pages, spec.latent)
    G = N // K
    n = columns(G, Hv)
    per_kv = -(-G // n)  # blocks of threads that share a kv head
    g = -(-G // per_kv)
    raw = 2 if tiles.bits_of(k_pages.dtype) < 16 else 0

    def grouped(x: jax.Array) -> jax.Array:
        """(…, N, H) → (…, K · per_kv, n, H), heads padded with zeros."""
        lead = x.shape[: x.ndim - 2]
        pad = [(0, 0)] * len(lead)
        x = jnp.pad(x.reshape(*lead, K, G, -1), (*pad, (0, 0), (0, per_kv * g - G), (0, 0)))
        x = x.reshape(*lead, K * per_kv, g, -1)
        return jnp.pad(x, (*pad, (0, 0), (0, n - g), (0, 0)))

    inputs: dict[str, jax.Array] = {"lengths": lengths, "table": table, "q": grouped(q), "k_pages": k_pages}
    if v_pages is not None:
        inputs["v_pages"] = v_pages
    if slopes is not None:
        inputs["slopes"] = grouped(slopes[:, None])[..., 0] * jnp.float32(LOG2E)
    row_scales = scales is not None and scales.ndim == 3
    inputs |= tiles.scale_inputs(scales, table)

    v_tile = k_pages if v_pages is None else v_pages
    v_swizzle = tiles.swizzle(v_tile.shape[-1], 16)
    fixed = {
        "q": plgpu.SMEM((n, H), q.dtype, transforms=tiles.tiled(H)),
        "p": plgpu.SMEM((n, BLOCK), q.dtype, transforms=tiles.tiled(BLOCK, size=v_swizzle)),
        "out": plgpu.SMEM((BLOCK, n), jnp.float32, transforms=tiles.tiled(n, 32)),
        "lse": plgpu.SMEM((n,), jnp.float32),
    }
    if slopes is not None:
        fixed["slopes"] = plgpu.SMEM((n,), jnp.float32)
    block_tiles = functools.partial(
        tiles.block_tiles, k_pages=k_pages, v_pages=v_pages, compute=q.dtype, row_scales=row_scales
    )
    if stages is None:
        stages, raw = tiles.fitting_stages(tiles.stage_bytes(fixed), block_tiles, raw, TWO_PER_SM)
    context = table.shape[1] * R
    if spec.window is not None:
        context = min(context, spec.window + spec.sink_rows + 2 * BLOCK)
    if splits is None:
        splits = split_count(B * K * per_kv, -(-context // BLOCK))
    kernel = functools.partial(
        _decode_kernel,
        names=(*inputs, "out", "lse"),
        spec=spec,
        heads_per_kv=per_kv,
        splits=splits,
        interpreted=interpret is not None,
    )
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, K * per_kv, splits, Hv, n), jnp.float32),
            jax.ShapeDtypeStruct((B, K * per_kv, splits, n), jnp.float32),
        ),
        scratch_types={
            **fixed,
            **block_tiles(stages, raw),
            **tiles.block_barriers(stages, raw, R, v_pages is None, row_scales, 1),
            "q_full": plgpu.Barrier(num_arrivals=1 if slopes is None else 2),
        },
        grid=(B, K * per_kv, splits),
        grid_names=("slot", "group", "split"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="kvjax_paged_decode",
    )(*inputs.values())
    out, lse = merge_splits(out, lse)
    out = out.reshape(B, K, per_kv, n, Hv)[:, :, :, :g].reshape(B, K, per_kv * g, Hv)[:, :, :G]
    lse = lse.reshape(B, K, per_kv, n)[:, :, :, :g].reshape(B, K, per_kv * g)[:, :, :G]
    return out.reshape(B, N, Hv), lse.reshape(B, N)


def merge_splits(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(B, K', splits, Hv, n) and (B, K', splits, n), each split's own softmax → (B, K', n, Hv) and (B, K', n)."""
    if out.shape[2] == 1:
        return out[:, :, 0].swapaxes(2, 3), lse[:, :, 0]
    total = jax.scipy.special.logsumexp(lse, axis=2)
    seen = jnp.logical_not(jnp.isneginf(lse))
    weight = jnp.where(seen, jnp.exp(lse - jnp.where(jnp.isneginf(total), 0.0, total)[:, :, None]), 0.0)
    return (out * weight[:, :, :, None]).sum(axis=2).swapaxes(2, 3), total
