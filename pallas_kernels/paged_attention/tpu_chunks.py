"""Paged flash attention of prompt chunks for TPUs: many query tokens of a slot on all the rows before them.

Everything is transposed: keys stand in sublanes and queries in lanes.

    Sᵀ (tokens, queries)  = K (tokens, H) · Qᵀ          the MXU holds Qᵀ and K flows through
    Oᵀ (H, queries)      += Vᵀ (H, tokens) · Pᵀ         the MXU holds Pᵀ and Vᵀ flows through

So the maximum and the sum over tokens are plain operations between vector registers, their results are one row per
query instead of a column, the second product fills an MXU of 256 × 256 although H is 128, and Vᵀ and the final
transposition of Oᵀ are the only work of the XLU.

A query block is C tokens of one slot in all heads: N·C queries in order of heads, cut into chunks of W. It walks its KV
blocks of S tokens; a KV block walks its chunks. A step computes the scores of one chunk, and the softmax and values of
the chunk two steps before it: they do not depend on each other and stand in one basic block, which is all that the
compiler needs to overlap the MXU with the rest. The last chunks of a KV block are finished in the next one.

Latent pages with `up` (MLA): heads are walked in groups of 8, every query block once for each group, whose part of `up`
lies in VMEM. Each head's keys and values are made of a KV block's latents when they are needed, beside the steps.
"""

from __future__ import annotations

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.joined import LANES, Lanes, Unit
from kvjax.pallas_kernels.paged_attention import tpu_planes, tpu_sizes
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

NAME = "kvjax_attend_chunks"
LOG2E = math.log2(math.e)
MASKED = -1e30  # a score that is not seen
FLOOR = -1e20  # where the running maximum begins: exp2(MASKED - FLOOR) is 0 even when a query has seen nothing yet
PIECE = 256  # tokens of one product: the depth of the largest MXU
UNROLL = 4  # of the loops over heads at both ends of a query block, where each trip waits for the XLU
BUFFERS = 4  # of scores
LAG = 2  # steps between a chunk's scores and their softmax
WIDTH = 256  # W of a chunk, where it divides: the width of the largest MXU
EXPANDED = 1024  # C at most where latents are expanded, once for each query block: docs/performance.md has other sizes
BUDGET = 32 << 20  # bytes of VMEM for what grows with C
SCALES = ("scales", "key_scales", "value_scales")  # operands that may hold scales: of K and V together, or of each
VMEM = 56 << 20  # bytes, of 64 MiB of a core of a TPU7x
KV_BUDGET = 16 << 20  # and for the two KV blocks
HEADS = 8  # of a group that shares expanded latents: a tile of sublanes, so that a DMA can take it out of q

# What the kernel knows of a query block; see _worklist.
FIELDS = (
    "slot", "base", "skip", "size", "position", "last", "tree_start", "visits", "sink_visits", "start", "first_page",
    "group", "floor", "from_row",
)  # fmt: skip


def _split(units: tuple[Unit, ...], group: int, C: int) -> tuple[int, int] | None:
    """(W, units that one round of the loop over them takes), or None where C is too small.

    A round's chunks are a multiple of the score buffers, so that each one's buffer is known to the compiler, and a unit
    has LAG chunks or more, so that the former unit's values are done with when its own are needed.
    """
    for W in (256, 128):
        counts = [(unit.heads[1] - unit.heads[0]) * group * C // W for unit in units]
        whole = all((unit.heads[1] - unit.heads[0]) * group * C % W == 0 for unit in units)
        if W > WIDTH or not whole or min(counts) < LAG:
            continue
        for taken in (1, 2, 4) if _uniform(units) else (len(units),):
            if sum(counts[:taken]) % BUFFERS == 0 and len(units) % taken == 0:
                return W, taken
    return None


def _uniform(units: tuple[Unit, ...]) -> bool:
    """Whether unit u is unit 0 moved by u equal steps, so that a loop can walk them."""

    numbers = [(*unit.heads, *unit.key, *unit.value) for unit in units]
    steps = {tuple(y - x for x, y in zip(a, b, strict=True)) for a, b in itertools.pairwise(numbers)}
    return len(steps) <= 1 and all((s[0], s[2], s[4]) == (s[1], s[3], s[5]) for s in steps)


def _worklist(
    lengths: jax.Array,
    row_starts: jax.Array,
    wanted: jax.Array,
    spec: AttentionSpec,
    tree: bool,
    T: int,
    C: int,
    S: int,
    R: int,
    M: int,
    groups: int,
    deal: Deal | None,
    from_row: jax.Array | None,
    ahead: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Cuts the tokens of wanted slots into query blocks: (J, len(FIELDS)) int32 and their number () int32.

    All of them come once for each group of heads, group after group.

    A query block reads C packed tokens from `base` on; the `size` from `skip` on are its own. Its first query read has
    the position `position`, and rows up to `last` are seen. It visits KV blocks 0 … sink_visits - 1, then `start` …
    Rows from `floor` on are in every query's window; none before `from_row` is seen, but for sink rows.
    Where pages are dealt, rows are those on this chip, and the first
    query's `position` is the last row that it sees, −1 for none.
    """
    B = lengths.shape[0]
    J = min(T, T // C + B) * groups
    tokens = jnp.where(wanted, row_starts[1:] - row_starts[:-1], 0)
    per_slot = (tokens + C - 1) // C
    ends = jnp.cumsum(per_slot, dtype=jnp.int32)
    index = jnp.arange(J, dtype=jnp.int32)
    per_group = jnp.maximum(ends[-1], 1)
    group, index = jax.lax.div(index, per_group), jax.lax.rem(index, per_group)
    slot = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32), B - 1)
    offset = (index - (ends - per_slot)[slot]) * C
    size = jnp.clip(tokens[slot] - offset, 0, C)
    first = row_starts[slot] + offset
    base = jnp.clip(first, 0, max(T - C, 0))
    rows = lengths if ahead is None else lengths + ahead
    before = rows[slot] - tokens[slot]  # rows of earlier steps
    nearest = before + offset  # position of the block's first query
    last = lengths[slot] - 1 if tree else nearest + size - 1
    first_row, sink_rows, floor = jnp.zeros_like(first), 0, jnp.zeros_like(first)
    if spec.window is not None:
        first_row = jnp.maximum(nearest - (spec.window - 1), 0)
        floor = jnp.maximum(nearest + size - spec.window, 0)
        sink_rows = spec.sink_rows
    from_rows = jnp.zeros_like(first)
    if from_row is not None:
        from_rows = from_row[slot]
        first_row, floor = jnp.maximum(first_row, from_rows), jnp.maximum(floor, from_rows)
        sink_rows = spec.sink_rows
    if ahead is not None:
        last = jnp.minimum(last, lengths[slot] - 1)
    if deal is not None:
        first_row, floor = (deal.rows_before(x, R) for x in (first_row, floor))
        last, nearest = (deal.rows_before(jnp.maximum(x, -1) + 1, R) - 1 for x in (last, nearest))
    last = jnp.clip(last, -1, M * R - 1)  # none of them, where a slot has fewer rows than new tokens
    sink_visits = jnp.minimum(-(-sink_rows // S), last // S + 1)
    start = jnp.maximum(jnp.minimum(first_row // S, jnp.maximum(last, 0) // S), sink_visits)
    visits = jnp.maximum(sink_visits + jnp.maximum(last // S + 1 - start, 0), 1)
    values = {
        "slot": slot,
        "base": base,
        "skip": first - base,
        "size": size,
        "position": nearest - (first - base),
        "last": last,
        "tree_start": before,
        "visits": visits,
        "sink_visits": sink_visits,
        "start": start,
        "first_page": first_row // R,
        "group": group,
        "floor": floor,
        "from_row": from_rows,
    }
    return jnp.stack([values[name].astype(jnp.int32) for name in FIELDS], axis=1), ends[-1] * groups


def _dealt_bounds(
    lengths: jax.Array,
    row_starts: jax.Array,
    slot: jax.Array,
    token: jax.Array,
    spec: AttentionSpec,
    deal: Deal,
    R: int,
) -> jax.Array:
    """(J, 2, C) int32: the last row here that each packed token (J, C) of a slot (J,) sees, and its window's first."""
    # Before 0 are tokens of other slots, and of a slot with fewer rows than new tokens: they see none.
    position = jnp.maximum((lengths - row_starts[1:])[slot][:, None] + token, -1)
    first = jnp.zeros_like(position)
    if spec.window is not None:
        first = deal.rows_before(jnp.maximum(position - (spec.window - 1), 0), R)
    return jnp.stack([deal.rows_before(position + 1, R) - 1, first], axis=1)


def _wide(x: jax.Array, lanes: int) -> jax.Array:
    """The last axis, filled up with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])


def _tall(x: jax.Array, rows: int) -> jax.Array:
    """The axis before the last, filled up with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, 0)])


def _tiles(lanes: int) -> int:
    """Lanes, made a multiple of 128."""
    return -(-lanes // LANES) * LANES


def expands(lanes: Lanes, heads: int, dtype: jnp.dtype) -> bool:
    """Whether latents can be expanded here: they fill whole tiles, and heads whole groups and words."""
    group = min(HEADS, heads)
    return lanes.value_dim % LANES == 0 and heads % group == 0 and group * dtype.itemsize % 4 == 0


def attend_chunks(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    wanted: jax.Array,
    out: jax.Array,
    lse: jax.Array | None,
    lanes: Lanes,
    spec: AttentionSpec,
    *,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    tree: jax.Array | None = None,
    up: jax.Array | None = None,
    deal: Deal | None = None,
    first: jax.Array | None = None,
    ahead: jax.Array | None = None,
    blocks: tuple[int, int] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Fills in `out` and `lse` for the tokens of the slots in `wanted`; the others' stay as they are.

    Args:
      q: (T, N, lanes.key_width) packed query tokens, spread over the lanes of their unit, not scaled.
      pages: (P, lanes.row / 128, R, 128), the joined layout; bfloat16, float32, or a narrower type,
        which is widened in VMEM. With `spec.codes`, (P, tiles of bytes, R, 128) uint8.
      table: (B, M) int32 physical pages of each slot; entries behind its length may be anything.
      lengths: (B,) int32 rows of each slot, those of this step included.
      row_starts: (B + 1,) int32, not decreasing.
      wanted: (B,) bool.
      out: (T, N, lanes.value_width), updated in place.
      lse: (T, N, 128) float32, the same number in all lanes, updated in place; or None.
      lanes: where heads lie in a row; with `spec.codes`, among the lanes that are unpacked (`Codes.lanes`).
      spec: scale, window, sink_rows, soft cap, codes.
      scales: None, or (P, 2K, R) or (P, 2K) float32, what to multiply a row's keys (first K) and values (last K) with.
        With `spec.codes`, those of K and of V (packed.py).
      sinks: (N,) float32 logits that join the softmax denominator only.
      slopes: (N,) float32 of ALiBi.
      tree: (T, W) int32: bit j of token i's words tells whether it sees its slot's new token j.
      up: (N, h + Hv, latent) of latent pages: q is then (T, N, h + r), as it comes, and out (T, N, Hv padded to a
        multiple of 128). Only where `expands`, and without sinks and slopes.
      deal: which rows the pages hold, where a sequence's are dealt over chips; without slopes, tree and sink rows.
      first: (B,) int32 or None: no row before it is seen, but for `spec.sink_rows`.
      ahead: (B,) int32 or None: rows of a slot that come after those held here, up to its last query's own.
      blocks: (C, S), to override the sizes of query and KV blocks.
      interpret: as in pallas_call.

    Returns:
      (out, lse).
    """
    _, tiles, R, _ = pages.shape
    M = table.shape[1]
    heads = lanes  # where they lie in what is multiplied
    if up is not None:
        if sinks is not None or slopes is not None:
            raise NotImplementedError("sinks or slopes with expanded latents")
        r = lanes.key_dim - lanes.value_dim
        h = q.shape[2] - r
        hp, vp, rp = _tiles(h), _tiles(up.shape[1] - h), _tiles(r)
        q = jnp.concatenate([_wide(q[..., :h], hp), _wide(q[..., h:], rp)], axis=-1)
        up = jnp.concatenate([_tall(up[:, :h], hp), _tall(up[:, h:], vp)], axis=1)
        heads = Lanes(min(HEADS, q.shape[1]), hp + rp, vp)
    T, _, KW = q.shape
    K, VW, units = heads.kv_heads, heads.value_width, heads.units
    groups = 1 if up is None else q.shape[1] // K
    N = q.shape[1] // groups  # heads of a query block
    group = N // K
    if R * pages.dtype.itemsize < 32:
        raise NotImplementedError(f"pages of {R} rows of {pages.dtype} do not fill the tiles of 32 / itemsize rows")
    if scales is not None and R % LANES:
        raise NotImplementedError(f"a page's scales fill whole tiles of 128 lanes, so R is a multiple of it; it is {R}")
    if q.dtype != jnp.float32 and N % 2:  # two heads share a word of q and out
        q32, out32 = q.astype(jnp.float32), out.astype(jnp.float32)
        done, lse = attend_chunks(
            q32,
            pages,
            table,
            lengths,
            row_starts,
            wanted,
            out32,
            lse,
            lanes,
            spec,
            scales=scales,
            sinks=sinks,
            slopes=slopes,
            tree=tree,
            deal=deal,
            first=first,
            ahead=ahead,
            blocks=blocks,
            interpret=interpret,
        )
        return done.astype(out.dtype), lse
    pair = 4 // q.dtype.itemsize  # heads that share a word
    dtype = jnp.float32 if pages.dtype == jnp.float32 else jnp.bfloat16  # of the products

    # A token's bytes in VMEM: q and out as they come, q in order of heads, the accumulator, maximum and sum, lse.
    size = q.dtype.itemsize
    token = N * ((KW + VW) * size + KW * jnp.dtype(dtype).itemsize + VW * 4 + 96 + (512 if lse is not None else 0))
    least = 16
    while _split(units, group, least) is None:
        least *= 2
    longest, S = tpu_sizes.chunk_limits(lanes, N, pages)
    longest = longest if up is None else EXPANDED
    C = max(min(longest, 1 << (max(T, 1) - 1).bit_length()), least)
    while C * token > BUDGET and least < C:
        C //= 2
    while S > LANES and 2 * S * tiles * LANES * pages.dtype.itemsize > KV_BUDGET:
        S //= 2
    if blocks is not None:
        C, S = blocks
    S = max(S, R)
    cut = _split(units, group, C)
    if cut is None:
        raise ValueError(f"query blocks of {C} tokens cannot be cut into chunks for {len(units)} units; take {least}")
    W, taken = cut
    chunks = N * C // W
    F = min(C, W)  # tokens that a chunk has of a head

    if T < C:
        q = jnp.pad(q, [(0, C - T), (0, 0), (0, 0)])
    work, used = _worklist(
        lengths, row_starts, wanted, spec, tree is not None, T, C, S, R, M, groups, deal, first, ahead
    )
    table = jnp.pad(table, [(0, 0), (0, -M % LANES)]).reshape(-1, 1, LANES)  # rows that a DMA may fetch into SMEM

    def rows_of(x: jax.Array) -> jax.Array:
        """(N,) → (chunks, 1, W): each query's own."""
        return jnp.repeat(x.astype(jnp.float32) * LOG2E, C).reshape(chunks, 1, W)

    any_, vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    operands = {"table": (table, any_), "q": (q, any_), "pages": (pages, any_)}
    scratch = {
        "table_buf": pltpu.SMEM((2, 1, LANES), jnp.int32),
        "page_buf": pltpu.VMEM((2, tiles, S, LANES), pages.dtype),
        "q_buf": pltpu.VMEM((C, N, KW), q.dtype),
        "out_buf": pltpu.VMEM((C, N, VW), out.dtype),
        "turn": pltpu.VMEM((max(KW, VW) // LANES, F * N // pair, LANES), jnp.float32 if pair == 1 else jnp.uint32),
        "queries": pltpu.VMEM((N * C, KW), dtype),
        "scores": pltpu.VMEM((BUFFERS, S, W), jnp.float32),
        "values": pltpu.VMEM((VW, S), dtype),
        "top": pltpu.VMEM((chunks + 1, 8, W), jnp.float32),
        "shrink": pltpu.VMEM((chunks + 1, 8, W), jnp.float32),
        "total": pltpu.VMEM((chunks + 1, 8, W), jnp.float32),
        "acc": pltpu.VMEM(
            (chunks + 1, VW, W), jnp.float32
        ),  # the last is where a query block's first step writes nothing
        "table_sem": pltpu.SemaphoreType.DMA((2,)),
        "page_sem": pltpu.SemaphoreType.DMA((2,)),
        "q_sem": pltpu.SemaphoreType.DMA,
        "out_sem": pltpu.SemaphoreType.DMA,
    }
    if pages.dtype != dtype or up is not None:
        scratch["keys"] = pltpu.VMEM((S, KW if up is None else KW + VW), dtype)
    if up is not None:
        operands["up"] = up.astype(dtype), any_
        scratch["up_buf"] = pltpu.VMEM((2, K, *up.shape[1:]), dtype)
        scratch["up_sem"] = pltpu.SemaphoreType.DMA((2,))
        if pages.dtype != dtype:
            scratch["latents"] = pltpu.VMEM((S, tiles * LANES), dtype)
    given = list(zip(SCALES[1:], scales, strict=True)) if isinstance(scales, tuple) else [("scales", scales)]
    for name, x in given:
        if x is None:
            continue
        if x.ndim == 2:  # of pages: scalars
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))[:, None]
            scratch[f"{name}_buf"] = pltpu.SMEM((2, S // R, *x.shape[1:]), jnp.float32)
        else:
            scratch[f"{name}_buf"] = pltpu.VMEM((2, S // R, *x.shape[1:]), x.dtype)
        operands[name] = x, any_
    if sinks is not None:
        operands["sinks"] = rows_of(sinks), vmem
    if slopes is not None:
        operands["slopes"] = rows_of(slopes), vmem
    place = jnp.arange(max(C, W), dtype=jnp.int32)[None, :] % C
    read = jnp.minimum(work[:, FIELDS.index("base")][:, None] + place, T - 1)
    if deal is not None:
        bounds = _dealt_bounds(lengths, row_starts, work[:, FIELDS.index("slot")], read, spec, deal, R)
        operands["bounds"] = bounds.reshape(-1, 2, max(C, W) // W, W).swapaxes(1, 2), any_
        scratch["bounds_buf"] = pltpu.VMEM((max(C, W) // W, 2, W), jnp.int32)
    if tree is not None:
        words = tree[read].reshape(-1, max(C, W) // W, W, tree.shape[1]).swapaxes(2, 3)
        operands["tree"] = words, any_
        scratch["tree_buf"] = pltpu.VMEM(words.shape[1:], jnp.int32)
    results = {"out": out}
    if lse is not None:
        results["lse"] = lse
        scratch["lse_buf"] = pltpu.VMEM((C, N, LANES), jnp.float32)
        scratch["lse_turn"] = pltpu.VMEM((F * N, LANES), jnp.float32)
    for name, x in results.items():
        operands[f"{name}_before"] = x, any_

    held = [x for x in scratch.values() if getattr(x, "memory_space", None) == pltpu.VMEM]
    needed = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in held)
    if needed > VMEM:
        raise NotImplementedError(
            f"prompts of {N} heads over {K} kv heads of {lanes.key_dim} and {lanes.value_dim} numbers in pages of {R} "
            f"rows of {pages.dtype}: a query block and two KV blocks take {needed >> 20} of {VMEM >> 20} MiB of VMEM"
        )
    kernel = functools.partial(
        _kernel,
        names=("used", "work", *operands, *results, *scratch),
        lanes=heads,
        spec=spec,
        dtype=dtype,
        N=N,
        C=C,
        S=S,
        R=R,
        W=W,
        M=-(-M // LANES),
        taken=taken,
        by_page=tuple(name for name, x in given if x is not None and x.ndim == 2),
        from_first=first is not None,
        to_last=ahead is not None,
        interpret=bool(interpret),
    )
    done = pl.pallas_call(
        kernel,
        name=NAME,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[where for _, where in operands.values()],
            out_specs=[any_] * len(results),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()],
        input_output_aliases={2 + len(operands) - len(results) + i: i for i in range(len(results))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM, disable_bounds_checks=True),
        interpret=interpret,
    )(used.reshape(1), work.reshape(-1), *(x for x, _ in operands.values()))
    return done[0], done[1] if lse is not None else None


def _kernel(
    *refs,
    names,
    lanes: Lanes,
    spec: AttentionSpec,
    dtype,
    N: int,
    C: int,
    S: int,
    R: int,
    W: int,
    M: int,
    taken: int,
    by_page: tuple[str, ...],
    from_first: bool,
    to_last: bool,
    interpret: bool,
):
    """All query blocks, one after the other. M counts the 128-entry rows of a slot's table."""
    ref = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    have = set(names)
    K, units = lanes.kv_heads, lanes.units
    group, chunks, F = N // K, N * C // W, min(C, W)
    per_block = S // R
    scale_names = [name for name in SCALES if name in have]
    shared = "scales" in have  # K and V have one array
    planes = None if spec.codes is None else tpu_planes.of_pages(spec.codes, lanes)
    window, sink_rows = spec.window, spec.sink_rows if spec.window is not None or from_first else 0
    cap = spec.soft_cap
    factor = spec.scale * LOG2E if cap is None else spec.scale / cap  # scores come out in powers of 2
    pair = 4 // ref.q_buf.dtype.itemsize
    used = ref.used[0]
    own_words = "tree" in have or "bounds" in have  # of each query, that come and go with the query block

    def field(j, name):
        return ref.work[j * len(FIELDS) + FIELDS.index(name)]

    def product(x, y, dimensions):
        if interpret:  # a CPU has no product of bfloat16 with a float32 result; in float32 it is the same
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        dimensions = dimensions, ((), ())
        return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)

    # ---- Fetching: table rows two KV blocks ahead, pages one ahead.

    def block_of(j, i):
        """The KV block of visit i of query block j."""
        sink_visits = field(j, "sink_visits")
        return jnp.where(i < sink_visits, i, field(j, "start") + i - sink_visits)

    def following(j, i):
        """The visit after visit i of query block j: (query block, visit, whether there is one)."""
        more = i + 1 < field(j, "visits")
        return jnp.where(more, j, j + 1), jnp.where(more, i + 1, 0), more | (j + 1 < used)

    def table_copy(j, i, into):
        row = field(j, "slot") * M + jax.lax.div(block_of(j, i) * per_block, LANES)
        return pltpu.make_async_copy(ref.table.at[row], ref.table_buf.at[into], ref.table_sem.at[into])

    def page_range(j, i):
        """The first page of the visit's block, and the pages of the slot that are seen: < sinks, or first … last."""
        last = jax.lax.shift_right_arithmetic(field(j, "last"), R.bit_length() - 1)  # −1 for none
        return block_of(j, i) * per_block, -(-sink_rows // R), field(j, "first_page"), last

    def page_copies(into, page, p):
        """The copies of physical page `page` to place p of a KV buffer."""
        place = ref.page_buf.at[into, :, pl.ds(pl.multiple_of(p * R, R), R)]
        copies = [pltpu.make_async_copy(ref.pages.at[page], place, ref.page_sem.at[into])]
        for name in scale_names:
            mine = getattr(ref, f"{name}_buf").at[into, p]
            copies += [pltpu.make_async_copy(getattr(ref, name).at[page], mine, ref.page_sem.at[into])]
        return copies

    def each_page(j, i, act):
        """act(p, its place in the fetched row of the table) for each page p of the visit's block that is seen."""
        start, sink_pages, first, last = page_range(j, i)

        def visit_page(p, _):
            page = start + p

            @pl.when(((page >= first) | (page < sink_pages)) & (page <= last))
            def act_on_page():
                act(p, jax.lax.rem(start, LANES) + p)

            return 0

        jax.lax.fori_loop(0, per_block, visit_page, 0)

    def fetch_pages(j, i, into):
        def start_page(p, entry):
            for copy in page_copies(into, ref.table_buf[into, 0, entry], p):
                copy.start()

        each_page(j, i, start_page)

    def wait_pages(j, i, into):
        def wait_page(*_):
            for copy in page_copies(into, 0, 0):
                copy.wait()

        each_page(j, i, wait_page)

    def own_heads(x, j):
        """Of an array (T, heads, …), those of the query block's group."""
        if x.shape[1] == N:
            return x
        return x.at[:, pl.ds(pl.multiple_of(field(j, "group") * N, N), N)]

    def query_copies(j):
        copies = [pltpu.make_async_copy(own_heads(ref.q, j).at[pl.ds(field(j, "base"), C)], ref.q_buf, ref.q_sem)]
        for name in ("tree", "bounds"):
            if name in have:
                copies += [pltpu.make_async_copy(getattr(ref, name).at[j], getattr(ref, f"{name}_buf"), ref.q_sem)]
        return copies

    def up_copy(j):
        into = field(j, "group") & 1
        mine = ref.up.at[pl.ds(field(j, "group") * K, K)]
        return pltpu.make_async_copy(mine, ref.up_buf.at[into], ref.up_sem.at[into])

    def first_of_group(j):
        return (j == 0) | (field(j, "group") != field(jnp.maximum(j - 1, 0), "group"))

    def start_queries(j):
        for copy in query_copies(j):
            copy.start()
        if "up" in have:

            @pl.when(first_of_group(j))
            def _():
                up_copy(j).start()

    def wait_queries(j):
        for copy in query_copies(j):
            copy.wait()
        if "up" in have:

            @pl.when(first_of_group(j))
            def _():
                up_copy(j).wait()

    def each_store(j, act):
        """Acts on the copies of a query block's own rows, in pieces of static size."""
        skip, size, base = field(j, "skip"), field(j, "size"), field(j, "base")
        T = ref.out.shape[0]

        def piece(rows):
            place = skip + (size & ~(2 * rows - 1))

            @pl.when((size & rows) != 0)
            def _():
                for name in ("out", "lse") if "lse" in have else ("out",):
                    mine = getattr(ref, f"{name}_buf").at[pl.ds(place, rows)]
                    there = own_heads(getattr(ref, name), j).at[pl.ds(base + place, rows)]
                    act(pltpu.make_async_copy(mine, there, ref.out_sem))

        for bit in range(min(C, T).bit_length()):
            piece(1 << bit)

    # ---- Queries: (C, N, KW) as packed → scaled, in order of heads.

    def halves(words):
        """Two bfloat16 in a word → two float32."""
        return [pltpu.bitcast(x, jnp.float32) for x in (words << 16, words & jnp.uint32(0xFFFF0000))]

    def load_queries():
        width = ref.q_buf.shape[-1]
        tile_lanes = [slice(start, start + LANES) for start in range(0, width, LANES)]

        def tokens(t, _):
            x = ref.q_buf[pl.ds(t * F, F)]
            if pair == 2:
                x = pltpu.bitcast(x, jnp.uint32)
            x = x.reshape(F * N // pair, width)
            for tile, lanes_ in enumerate(tile_lanes):
                ref.turn[tile] = x[:, lanes_]

            def heads(h, _):
                for tile, lanes_ in enumerate(tile_lanes):
                    x = ref.turn.at[tile][pl.ds(h, F, stride=N // pair)]
                    for k, half in enumerate(halves(x) if pair == 2 else [x]):
                        row = pl.multiple_of((h * pair + k) * C + t * F, F)
                        ref.queries[pl.ds(row, F), lanes_] = (half * factor).astype(dtype)
                return 0

            return jax.lax.fori_loop(0, N // pair, heads, 0, unroll=math.gcd(UNROLL, N // pair))

        jax.lax.fori_loop(0, C // F, tokens, 0)

    # ---- One step: the scores of chunk `new`, and softmax and values of chunk `old`.

    def seen(j, chunk, key):
        """Whether the queries of a chunk see rows `key` (tokens, W)."""
        if "bounds" in have:
            bounds = ref.bounds_buf[chunk & (max(C // W, 1) - 1)]
            visible = key <= bounds[:1]
            return visible if window is None else visible & (key >= bounds[1:])
        query = chunk * W + jax.lax.broadcasted_iota(jnp.int32, (1, W), 1)
        position = field(j, "position") + (query & (C - 1))
        if "tree" in have:
            token = key - field(j, "tree_start")  # the row's place among the new ones
            words = ref.tree_buf[chunk & (max(C // W, 1) - 1)]
            bits = jnp.zeros(key.shape, jnp.int32)
            for w in range(words.shape[0]):
                bits = jnp.where(jax.lax.shift_right_arithmetic(token, 5) == w, words[w : w + 1], bits)
            visible = (token < 0) | (jax.lax.shift_right_logical(bits, token & 31) & 1 != 0)
            visible &= key <= field(j, "last")
        else:
            visible = key <= (jnp.minimum(position, field(j, "last")) if to_last else position)
        if window is not None or from_first:
            lowest = field(j, "from_row") if window is None else position - (window - 1)
            if from_first and window is not None:
                lowest = jnp.maximum(lowest, field(j, "from_row"))
            near = key >= lowest
            visible &= (near | (key < sink_rows)) if sink_rows else near
        return visible

    def distance(j, chunk, key):
        query = chunk * W + jax.lax.broadcasted_iota(jnp.int32, (1, W), 1)
        return (field(j, "position") + (query & (C - 1)) - key).astype(jnp.float32)

    def step(new, old, buffer, *, old_width, j=0, key_start=0, read_keys=None, width=0, masked=False):
        """Scores of chunk `new` into a buffer; softmax and values of chunk `old`, which came two steps before.

        Either may be None. They do not depend on each other, and the scores come first in the order of the program:
        the compiler keeps the products in that order, and those of P wait for P.
        """
        if old is not None:
            highest, shrink = ref.top[old], ref.shrink[old]
            total = ref.total[old] * shrink
            acc = ref.acc[old, :old_width] * shrink[:1]
        if new is not None:
            queries = ref.queries[pl.ds(pl.multiple_of(new * W, W), W), :width]
            before = top = ref.top[new]
            for start in range(0, S, PIECE):
                piece = slice(start, min(start + PIECE, S))
                s = product(read_keys(piece), queries, ((1,), (1,)))
                if cap is not None:
                    s = (cap * LOG2E) * jnp.tanh(s)
                if masked or "slopes" in have:
                    key = key_start + start + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
                if "slopes" in have:
                    s = s - ref.slopes[new] * distance(j, new, key)
                if masked:
                    s = jnp.where(seen(j, new, key), s, MASKED)
                ref.scores[buffer % BUFFERS, piece] = s
                top = jnp.maximum(top, jnp.max(s.reshape(-1, 8, W), axis=0))
        if old is not None:
            for start in range(0, S, PIECE):
                piece = slice(start, min(start + PIECE, S))
                p = jnp.exp2(ref.scores[(buffer - LAG) % BUFFERS, piece].reshape(-1, 8, W) - highest[None])
                total = total + jnp.sum(p, axis=0)
                acc = acc + product(ref.values[:old_width, piece], p.reshape(-1, W).astype(dtype), ((1,), (0,)))
        if new is not None:
            top = jnp.broadcast_to(jnp.max(top, axis=0, keepdims=True), top.shape)
            ref.top[new] = top
            ref.shrink[new] = jnp.exp2(before - top)
        if old is not None:
            ref.total[old] = total
            ref.acc[old, :old_width] = acc

    def scale_row(name, into, p, head):
        """(1, R): the scales of page p of a KV block in a head, or the words of a group."""
        buf = getattr(ref, f"{name}_buf")
        if name in by_page:
            return jnp.full((1, R), buf[into, p, 0, head], jnp.float32)
        return buf[into, p, pl.ds(head, 1)]

    def scale_of(name, into, heads, dim, start, width):
        """(width, S): the scales of a unit's heads, whose `dim` lanes each begin at lane `start`."""
        per_head = [
            jnp.concatenate([scale_row(name, into, p, head) for p in range(per_block)], axis=-1) for head in heads
        ]
        parts = [jnp.broadcast_to(x, (dim, S)) for x in per_head]
        used_lanes = start + dim * len(parts)
        if start:
            parts.insert(0, jnp.ones((start, S), jnp.float32))
        if width > used_lanes:
            parts.append(jnp.ones((width - used_lanes, S), jnp.float32))
        return jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]

    def widen(x):
        return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)

    def read_latents(into, piece):
        """(tokens, latent) of the KV block."""
        count = ref.up_buf.shape[-1] // LANES
        if "latents" in have:
            return ref.latents[piece, : count * LANES]
        return jnp.concatenate([ref.page_buf[into, tile, piece] for tile in range(count)], axis=-1)

    def prepare_latents(into):
        """What all heads share: the rotated keys, and latents that were not stored as they are multiplied."""
        tiles, count = ref.page_buf.shape[1], ref.up_buf.shape[-1] // LANES
        scale = scale_of("scales", into, [0], LANES, 0, LANES).T if "scales" in have else None
        for tile in range(tiles):
            x = ref.page_buf[into, tile]
            if scale is not None:
                x = x.astype(jnp.float32) * scale
            if "latents" in have:
                ref.latents[:, tile * LANES : (tile + 1) * LANES] = x.astype(jnp.float32).astype(dtype)
            if tile >= count:
                start = ref.keys.shape[1] - (tiles - tile) * LANES
                ref.keys[:, start : start + LANES] = x.astype(jnp.float32).astype(dtype)

    def attend_unit(unit: Unit, moved, steps, j, into, block, masked):
        """All chunks of a unit, `moved` times a step, on one KV block; `steps` are (new, old, buffer, old width)."""
        size = unit.heads[1] - unit.heads[0]
        width, vw = unit.key[1] - unit.key[0], unit.value[1] - unit.value[0]
        key_tile = unit.key[0] // LANES + moved * key_step
        value_tile = unit.value[0] // LANES + moved * value_step
        head = unit.heads[0] + moved * size

        def read_tile(tile, piece, side):
            """(tokens, 128) of the KV block; side: 0 of K, 1 of V."""
            if planes is None:
                return ref.page_buf[into, tile, piece]
            return planes[side].read(lambda tile: ref.page_buf[into, tile, piece], tile)

        def read_tiles(tile, count, piece=slice(0, S)):
            """(tokens, 128 · count) of the KV block's keys."""
            parts = [read_tile(tile + k, piece, 0) for k in range(count)]
            return jnp.concatenate(parts, axis=-1) if count > 1 else parts[0]

        def scaled_keys(keys):
            """Codes (S, width) float32 → what they mean."""
            if planes is not None and planes[0].group:
                G, lane, parts = planes[0].group, pl.multiple_of(key_tile * LANES, LANES), []
                for k in range(S // G):
                    word = ref.key_scales_buf[into, k * G // R, pl.ds(k * G % R // G, 1), pl.ds(lane, width)]
                    scale, zero = tpu_planes.split_words(word)
                    parts.append(keys[k * G : (k + 1) * G] * scale + zero)
                return jnp.concatenate(parts, axis=0)
            if scale_names:
                name = "scales" if shared else "key_scales"
                keys = keys * scale_of(name, into, [head + k for k in range(size)], lanes.key_dim, 0, width).T
            return keys

        def scaled_values(v, piece):
            """Codes (vw, tokens) → what they mean, (vw, tokens)."""
            if planes is not None and planes[1].group:
                G = planes[1].group
                first = jax.lax.div(value_tile * LANES - planes[1].lane, jnp.int32(G))
                words = scale_of("value_scales", into, [first + k for k in range(vw // G)], G, 0, vw)[:, piece]
                scale, zero = tpu_planes.split_words(words)
                return (v.astype(jnp.float32) * scale + zero).astype(dtype)
            if scale_names and "up" not in have:
                inner = lanes.value_start(unit.heads[0]) - unit.value[0]
                where = K if shared and not lanes.latent else 0
                name = "scales" if shared else "value_scales"
                scale = scale_of(name, into, [where + head + k for k in range(size)], lanes.value_dim, inner, vw)
                return (v.astype(jnp.float32) * scale[:, piece]).astype(dtype)
            return v

        nope = ref.up_buf.shape[2] - vw if "up" in have else 0

        def read_keys(piece):
            if "up" in have:  # (keys without position, values, rotated keys)
                return jnp.concatenate([ref.keys[piece, :nope], ref.keys[piece, nope + vw :]], axis=1)
            return ref.keys[piece, :width] if "keys" in have else read_tiles(key_tile, width // LANES, piece)

        if "up" in have:
            # Keys and values in one product, which fills an MXU of 256 × 256; its weights are `up`'s, not the latents.
            made = product(read_latents(into, slice(0, S)), ref.up_buf[field(j, "group") & 1, head], ((1,), (1,)))
            ref.keys[:, : made.shape[1]] = made.astype(dtype)
        elif "keys" in have:
            keys = read_tiles(key_tile, width // LANES).astype(jnp.float32)
            ref.keys[:, :width] = scaled_keys(keys).astype(dtype)

        for c, (new, old, buffer, old_width) in enumerate(steps):
            step(
                new,
                old,
                buffer,
                old_width=old_width,
                j=j,
                key_start=block * S,
                read_keys=read_keys,
                width=width,
                masked=masked,
            )
            if c == LAG - 1:  # the step above was the last to use the former unit's values
                for start in range(0, S, PIECE):
                    piece = slice(start, min(start + PIECE, S))
                    if "up" in have:
                        v = ref.keys[piece, nope : nope + vw].T
                    else:
                        v = jnp.concatenate(
                            [widen(read_tile(value_tile + k, piece, 1)).T for k in range(vw // LANES)], axis=0
                        )
                    v = scaled_values(v, piece)
                    if masked:  # rows that nobody sees may hold NaN, and 0 · NaN is NaN
                        key = block * S + start + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1)
                        page = jax.lax.shift_right_arithmetic(key, R.bit_length() - 1)
                        kept = (key <= field(j, "last")) & ((page >= field(j, "first_page")) | (key < sink_rows))
                        v = jnp.where(kept, v, jnp.zeros((), dtype))
                    ref.values[:vw, piece] = v

    def lanes_of(unit):
        return unit.value[1] - unit.value[0]

    key_step, value_step = [  # tiles from a unit to the next, where they are uniform
        (after[0] - first[0]) // LANES
        for first, after in ((units[0].key, units[-1].key), (units[0].value, units[-1].value))
    ]
    key_step, value_step = [x // max(len(units) - 1, 1) for x in (key_step, value_step)]
    waiting = [chunks - LAG + k for k in range(LAG)]  # the last chunks of a KV block, finished in the next one

    def attend_block(i, j, into, block, masked):
        round_units = units[:taken]
        per_round = chunks * taken // len(units)  # chunks

        def attend_round(t, _):
            first, start = t * per_round, 0
            widths = [lanes_of(round_units[-1])] * LAG  # of the old chunks
            for unit in round_units:
                count = (unit.heads[1] - unit.heads[0]) * group * C // W
                widths += [lanes_of(unit)] * count
                steps = []
                for x in range(start, start + count):
                    old = first + x - LAG
                    if x < LAG:  # of the round before; in the first round, of the KV block before, if there is one
                        old = jnp.where(t > 0, old, jnp.where(i > 0, waiting[x], chunks))
                    steps.append((first + x, old, x, widths[x]))
                attend_unit(unit, t * taken, steps, j, into, block, masked)
                start += count
            return 0

        jax.lax.fori_loop(0, len(units) // taken, attend_round, 0)

    # ---- The end of a query block: Oᵀ / sum → (C, N, VW), lse.

    def finish(chunk):
        """(VW, W) float32 outputs of a chunk, and (1, W) log-sum-exp."""
        top, total = ref.top[chunk, :1], jnp.sum(ref.total[chunk], axis=0, keepdims=True)
        nothing = total == 0.0
        scale = jnp.ones_like(total)
        if "sinks" in have:
            sink = ref.sinks[chunk]
            higher = jnp.maximum(top, sink)
            scale = jnp.exp2(top - higher)
            top, total = higher, total * scale + jnp.exp2(sink - higher)
        x = ref.acc[chunk] * jnp.where(nothing, 0.0, scale / jnp.where(nothing, 1.0, total))
        lse = jnp.where(nothing, -jnp.inf, (top + jnp.log2(jnp.where(nothing, 1.0, total))) * (1 / LOG2E))
        return x, lse

    def store_outputs():
        width = ref.out_buf.shape[-1]
        per_head = C // F  # chunks of a head, where it has more than one

        def words(parts):
            """The outputs of the heads that share words, in float32 → the words."""
            if pair == 1:
                return parts[0]
            low, high = [pltpu.bitcast(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for x in parts]
            return (low >> 16) | high

        def store_words(w, x):
            """Words (F, VW) number w of each token."""
            for tile in range(width // LANES):
                ref.turn.at[tile][pl.ds(w, F, stride=N // pair)] = x[:, tile * LANES : (tile + 1) * LANES]

        def store_lse(h, lse):
            if "lse" in have:
                ref.lse_turn[pl.ds(h, F, stride=N)] = jnp.broadcast_to(lse, (LANES, F)).T

        def tokens(t, _):
            if C >= W:

                def heads(w, _):
                    parts = []
                    for h in range(pair):
                        x, lse = finish((w * pair + h) * per_head + t)
                        parts.append(x)
                        store_lse(w * pair + h, lse)
                    store_words(w, words(parts).T)
                    return 0

                jax.lax.fori_loop(0, N // pair, heads, 0, unroll=math.gcd(UNROLL, N // pair))
            else:

                def chunk(c, _):
                    x, lse = finish(c)
                    x = x.T
                    for h in range(0, W // C, pair):
                        mine = [slice((h + k) * C, (h + k + 1) * C) for k in range(pair)]
                        store_words(c * (W // C // pair) + h // pair, words([x[rows] for rows in mine]))
                        for k in range(pair):
                            store_lse(c * (W // C) + h + k, lse[:, mine[k]])
                    return 0

                jax.lax.fori_loop(0, chunks, chunk, 0)
            tiles = [ref.turn[tile].reshape(F, N // pair, LANES) for tile in range(width // LANES)]
            x = jnp.concatenate(tiles, axis=-1) if len(tiles) > 1 else tiles[0]
            ref.out_buf[pl.ds(t * F, F)] = pltpu.bitcast(x, ref.out_buf.dtype) if pair == 2 else x
            if "lse" in have:
                ref.lse_buf[pl.ds(t * F, F)] = ref.lse_turn[...].reshape(F, N, LANES)
            return 0

        jax.lax.fori_loop(0, C // F, tokens, 0)

    # ---- The walk.

    def query_block(j, count):
        """`count` KV blocks have been visited before."""
        wait_queries(j)
        load_queries()
        if not own_words:  # else they are still needed

            @pl.when(j + 1 < used)
            def _():
                start_queries(j + 1)

        def clear(c, _):
            ref.top[c] = jnp.full((8, W), FLOOR, jnp.float32)
            ref.total[c] = jnp.zeros((8, W), jnp.float32)
            ref.acc[c] = jnp.zeros(ref.acc.shape[1:], jnp.float32)
            return 0

        jax.lax.fori_loop(0, chunks, clear, 0)

        def visit(i, _):
            into, other = (count + i) & 1, (count + i + 1) & 1
            nj, ni, more = following(j, i)

            @pl.when(more)
            def fetch_following():
                table_copy(nj, ni, other).wait()
                fetch_pages(nj, ni, other)
                fj, fi, further = following(nj, ni)

                @pl.when(further)
                def look_up_further():
                    table_copy(fj, fi, into).start()

            wait_pages(j, i, into)
            if "up" in have:
                prepare_latents(into)
            block = block_of(j, i)
            nearest = field(j, "position") + field(j, "skip")
            if "tree" in have:
                clear_of_edges = (block + 1) * S <= field(j, "tree_start")
            else:
                clear_of_edges = (block + 1) * S - 1 <= (jnp.minimum(nearest, field(j, "last")) if to_last else nearest)
            if window is not None or from_first:
                clear_of_edges &= block * S >= field(j, "floor")

            @pl.when(clear_of_edges)
            def attend_inside():
                attend_block(i, j, into, block, False)

            @pl.when(jnp.logical_not(clear_of_edges))
            def attend_edge():
                attend_block(i, j, into, block, True)

            return 0

        visits = field(j, "visits")
        jax.lax.fori_loop(0, visits, visit, 0)
        for k in range(LAG):
            step(None, waiting[k], k, old_width=lanes_of(units[-1]))

        @pl.when(j > 0)
        def _():
            each_store(j - 1, lambda copy: copy.wait())

        store_outputs()
        each_store(j, lambda copy: copy.start())
        if own_words:

            @pl.when(j + 1 < used)
            def _():
                start_queries(j + 1)

        return count + visits

    @pl.when(used > 0)
    def _():
        start_queries(0)
        table_copy(0, 0, 0).start()
        table_copy(0, 0, 0).wait()
        fetch_pages(0, 0, 0)
        nj, ni, more = following(0, 0)

        @pl.when(more)
        def fetch_following():
            table_copy(nj, ni, 1).start()

        jax.lax.fori_loop(0, used, query_block, 0)
        each_store(used - 1, lambda copy: copy.wait())
