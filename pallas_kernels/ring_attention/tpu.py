"""Ring attention as one TPU kernel: keys and values pass by remote DMA while the block that came before is computed.

The ring. Blocks travel whole and both ways, n / 2 hops each (`permute` says why). In hop h a rank computes on the keys
of the ranks h before and behind it, and sends on what it computes on. Each direction has two buffers in HBM, blocks of
distance h go to buffer h mod 2, so a rank may be one hop ahead of the next, and not more:

    entry     barrier: signal both neighbours, wait for both: they are in this kernel, their buffers are theirs
    hop h     wait until block h has arrived; wait until the next rank's buffer h + 1 mod 2 is free, which from h = 2 on
              it says ("capacity"); send block h there; compute on it; wait until it is sent; tell the rank before that
              buffer h mod 2 is free, if that one has a block h + 2 to send
    exit      wait until both neighbours have passed their barrier: a fast one, already in the next call, would be
              counted twice in mine, and I would send to a slow one that has not begun

A wait in hop h is for what a neighbour does in hop h − 1 or before, so the rank that is furthest behind can always go
on. Every signal is waited for, so all semaphores are zero at the end.

The compute. Everything is transposed, as in `paged_attention.tpu_chunks`: keys stand in sublanes and queries in lanes,
Sᵀ = K · Qᵀ and Oᵀ += Vᵀ · Pᵀ, and a step computes the scores of one chunk of W queries and the softmax of the one two
steps before, which keeps the MXU and the vector unit busy at once. A task is a block of C = G · q_block queries of one
kv head; in a hop it visits those blocks of keys that it sees, from a list in SMEM, unmasked where all see all. Its
running softmax lies in HBM between hops and is fetched and stored beside the compute of the tasks around it. The last
two chunks of a visit are finished during the next; so K and V, and the running softmax, have three buffers in VMEM.

K travels as (K, S, H), V as (K, Hv, S): K, V, Q and out are transposed once, by XLA, before and after the kernel.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.ring_attention.permute import hops, padded
from kvjax.pallas_kernels.ring_attention.visibility import FAR, Bounds, all_see, bounds, may_see

NAME = "kvjax_ring_attention"
COLLECTIVE_ID = 11
"""Of the barrier. Other kernels with a barrier that may run beside this one need others; XLA counts its own apart."""
INTERPRETED = pltpu.InterpretParams()
"""Runs the kernel on CPUs, with semaphores and DMA between them: the plain interpreter has no remote ones."""
LANES = 128
LOG2E = math.log2(math.e)
MASKED = -1e30  # a score that is not seen
FLOOR = -1e20  # where the running maximum begins: exp2(MASKED - FLOOR) is 0 even when a query has seen nothing yet
PIECE = 256  # keys of one product
BUFFERS = 4  # of scores
LAG = 2  # steps between a chunk's scores and their softmax
WIDTH = 256  # W of a chunk: the width of the largest MXU
COLUMNS = 4096  # of a task at most
KEYS = 1024  # of a visit at most
VMEM = 56 << 20  # bytes, of 64 MiB of a core of a TPU7x
LISTS = 512 << 10  # bytes of SMEM for two lists of visits
KEY_SHIFT, QUERY_SHIFT = 4, 16  # where a visit's block of keys and block of queries begin in its word
MASK, FIRST, FRESH, SIDE = 1, 2, 4, 8  # its flags: see _visits


class Sizes(NamedTuple):
    """How the work is cut up.

    Attributes:
      queries: tokens of a task.
      keys: of a visit.
      width: W, queries of a chunk, of all the task's heads in order.
      chunks: of a task; a multiple of BUFFERS.
    """

    queries: int
    keys: int
    width: int
    chunks: int


def sizes(T: int, S: int, G: int, q_block: int | None = None, kv_block: int | None = None) -> Sizes:
    """For T queries and S keys of a rank, G query heads to a kv head.

    A task has whole rounds of BUFFERS chunks. Its tokens are a power of two: either they divide a chunk, or it them. By
    default blocks are at most half of what a rank has, which in zigzag order is a run.
    """

    def half(tokens: int) -> int:
        return 1 << max(-(-tokens // 2) - 1, 0).bit_length()

    width = WIDTH if q_block is None or q_block * G >= BUFFERS * WIDTH else LANES
    least = BUFFERS * width // math.gcd(G, BUFFERS * width)
    if q_block is None:
        most = 1 << (max(COLUMNS // G, 1).bit_length() - 1)
        q_block = min(half(T), most)
    queries = max(1 << (q_block - 1).bit_length(), least)
    keys = min(kv_block or min(KEYS, half(S)), S)
    return Sizes(queries, -(-keys // LANES) * LANES, width, queries * G // width)


def _visits(
    queries: Bounds, keys: Bounds, spec: AttentionSpec, rank: jax.Array, n: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Which blocks of keys (n, J) the blocks of queries (I,) visit in each of H = n // 2 + 1 hops.

    Returns:
      words: (H, 2, V) int32. Row 0 of a visit: flags, whether it must mask, is the first of its task in the hop, is
        the first of its task at all, is of keys that came from the right; then the blocks of keys and of queries. Row
        1: where the visits of the next task begin.
      counts: (H,) int32 visits.
      reach: (2,) int32 hops to the right and to the left, of the whole ring (before the maximum over it: this rank's).
      visited: (I,) bool, whether a block of queries sees anything.
    """
    q = jax.tree.map(lambda x: x[None, :, None], queries)
    k = jax.tree.map(lambda x: x[:, None, :], keys)
    needed, masked = may_see(q, k, spec), ~all_see(q, k, spec)  # (n, I, J)
    _, I, J = needed.shape
    hop = jnp.arange(n // 2 + 1, dtype=jnp.int32)
    source = jnp.stack([(rank - hop) % n, (rank + hop) % n], axis=1)  # (H, 2)
    there = jnp.stack([hop >= 0, (hop > 0) & (2 * hop < n)], axis=1)[..., None, None]
    flat = (needed[source] & there).swapaxes(1, 2).reshape(hop.size, -1)  # (H, I · 2 · J)
    flat_mask = masked[source].swapaxes(1, 2).reshape(hop.size, -1)
    order = jnp.argsort(~flat, axis=1, stable=True).astype(jnp.int32)
    block, side, key = order // (2 * J), order // J % 2, order % J
    per_block = flat.reshape(hop.size, I, 2 * J).sum(axis=-1, dtype=jnp.int32)
    ends = jnp.cumsum(per_block, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(per_block, axis=0, dtype=jnp.int32) - per_block
    first = jnp.concatenate([jnp.ones_like(block[:, :1], bool), block[:, 1:] != block[:, :-1]], axis=1)
    fresh = jnp.take_along_axis(before, block, axis=1) == 0
    word = (block << QUERY_SHIFT) + (key << KEY_SHIFT)
    for flag, bit in (
        (jnp.take_along_axis(flat_mask, order, axis=1), MASK),
        (first, FIRST),
        (fresh, FRESH),
        (side == 1, SIDE),
    ):
        word += flag.astype(jnp.int32) * bit
    following = jnp.take_along_axis(ends, block, axis=1)
    words = jnp.stack([word, following], axis=1)
    words = jnp.pad(words, ((0, 0), (0, 0), (0, -words.shape[2] % LANES)))
    return words, per_block.sum(axis=1, dtype=jnp.int32), needed.any(axis=(1, 2)), per_block.any(axis=0)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    spec: AttentionSpec,
    axis: str,
    scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    segmented: bool = True,
    q_block: int | None = None,
    kv_block: int | None = None,
    collective_id: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `kvjax.pallas_kernels.ring_attention.ring_attention`; segments are there.

    segmented: static; whether segments tell sequences apart. If not, only padding made here has one.

    Raises:
      NotImplementedError: when the lists of visits do not fit SMEM, or the blocks VMEM.
    """
    (T, N, H), (S, K, Hv) = q.shape, v.shape
    G, n, rank = N // K, jax.lax.axis_size(axis), jax.lax.axis_index(axis).astype(jnp.int32)
    size = sizes(T, S, G, q_block, kv_block)
    C, W, chunks = size.queries, size.width, size.chunks
    # Heads that together fill a tile of lanes travel together; others are filled up to one.
    shared = LANES // H if LANES % H == 0 and K % (LANES // H) == 0 else 1
    wide, tall = _up(shared * H, LANES), _up(Hv, 32 // k.dtype.itemsize)

    q_position, q_segment = padded(q_positions, C), padded(q_segments, C, -1)
    k_position, k_segment = padded(kv_positions, size.keys), padded(kv_segments, size.keys, -1)
    I, J = q_position.shape[0] // C, k_position.shape[0] // size.keys
    everywhere = [jax.lax.all_gather(x, axis) for x in (k_position, k_segment)]
    words, counts, needed, visited = _visits(
        bounds(q_position, q_segment, C), bounds(everywhere[0], everywhere[1], size.keys), spec, rank, n
    )
    reach = jnp.stack(hops(needed, n, rank, (axis,))) if n > 1 else jnp.zeros(2, jnp.int32)
    if words.shape[2] * 16 > LISTS or max(I, J) > 1 << (QUERY_SHIFT - KEY_SHIFT):
        raise NotImplementedError(
            f"{I} blocks of queries and {J} of keys of a rank: their list does not fit SMEM; take larger blocks"
        )

    # Padding of queries and of keys differ, so that neither sees the other; without segments padding is never reached.
    owned = everywhere[1] >= 0
    q_rows = jnp.stack([q_position, jnp.maximum(q_segment, -1)])
    k_rows = jnp.stack([jnp.where(owned, everywhere[0], FAR), jnp.where(owned, everywhere[1], -2)])
    if C < W:  # a chunk holds several heads of the same tokens
        q_rows = jnp.repeat(q_rows.reshape(2, I, 1, C), W // C, axis=2)
    q_rows = q_rows.reshape(2, I, -1, W).transpose(1, 2, 0, 3)
    k_rows = k_rows.reshape(2, n, J, size.keys).transpose(1, 2, 0, 3)
    fill = [(0, 0), (0, 0), (0, 6), (0, 0)]  # a tile of sublanes

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands: dict[str, jax.Array] = {
        "words": words,
        "q": _queries(q, spec, size, K, shared, wide),
        "q_rows": jnp.pad(q_rows, fill),
        "k_rows": jnp.pad(k_rows, fill),
        "k": _keys(k, size, shared, wide),
        "v": jnp.pad(padded(v, size.keys).transpose(1, 2, 0), ((0, 0), (0, tall - Hv), (0, 0))),
    }
    if scales is not None:
        operands["scales"] = jnp.pad(padded(scales, size.keys).T, ((0, -2 * K % 8), (0, 0)))
    travelling = [name for name in ("k", "v", "scales") if name in operands]
    results = {
        "acc": jax.ShapeDtypeStruct((K, I, chunks, tall, W), jnp.float32),
        "stats": jax.ShapeDtypeStruct((K, I, chunks, 16, W), jnp.float32),
    }
    if n > 1:
        for name in travelling:
            results[f"{name}_ring"] = jax.ShapeDtypeStruct((2, 2, *operands[name].shape), operands[name].dtype)
    scratch = _scratch(size, operands, q.dtype, K, tall)
    held = [x for x in scratch.values() if getattr(x, "memory_space", None) == pltpu.VMEM]
    needs = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in held)
    if needs > VMEM:
        raise NotImplementedError(f"blocks of {C} queries and {size.keys} keys take {needs >> 20} of {VMEM >> 20} MiB")
    names = ("counts", "reach", *operands, *results, *scratch)
    done = pl.pallas_call(
        functools.partial(
            _kernel, names=names, travelling=tuple(travelling), spec=spec, size=size, axis=axis, n=n, K=K,
            shared=shared, segmented=segmented, interpret=bool(interpret),
        ),
        name=NAME,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[hbm] * len(operands),
            out_specs=[hbm] * len(results),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(results.values()),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM,
            disable_bounds_checks=True,
            has_side_effects=True,
            collective_id=None if n == 1 else COLLECTIVE_ID if collective_id is None else collective_id,
        ),
        interpret=interpret,
    )(counts, reach, *operands.values())  # fmt: skip
    return _finished(done[0], done[1], visited, sinks, size, (T, N, Hv), q.dtype)


def _queries(q: jax.Array, spec: AttentionSpec, size: Sizes, K: int, shared: int, wide: int) -> jax.Array:
    """(T, N, H) → (K, I, chunks, wide, W): scaled, transposed, in the lanes of K that its head has, zeros elsewhere."""
    (_, N, H), C = q.shape, size.queries
    factor = spec.scale * LOG2E if spec.soft_cap is None else spec.scale / spec.soft_cap
    x = padded((q.astype(jnp.float32) * factor).astype(q.dtype), C)
    x = x.reshape(-1, C, K, N // K, H).transpose(2, 0, 3, 1, 4)  # (K, I, G, C, H)
    x = x.reshape(K, x.shape[1], size.chunks, size.width, H).swapaxes(3, 4)
    if shared == 1:
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - H), (0, 0)))
    parts = [
        jnp.pad(x[place::shared], ((0, 0), (0, 0), (0, 0), (place * H, wide - (place + 1) * H), (0, 0)))
        for place in range(shared)
    ]
    return jnp.stack(parts, axis=1).reshape(K, *parts[0].shape[1:])


def _keys(k: jax.Array, size: Sizes, shared: int, wide: int) -> jax.Array:
    """(S, K, H) → (K / shared, S, wide)."""
    k = padded(k, size.keys)
    k = k.reshape(k.shape[0], k.shape[1] // shared, -1).swapaxes(0, 1)
    return jnp.pad(k, ((0, 0), (0, 0), (0, wide - k.shape[2])))


def _scratch(size: Sizes, operands: dict[str, jax.Array], dtype: jnp.dtype, K: int, tall: int) -> dict[str, Any]:
    keys, W, chunks = size.keys, size.width, size.chunks
    wide, kept = operands["k"].shape[2], 3 * chunks + 1  # the last is where a hop's first steps write nothing
    dma = pltpu.SemaphoreType.DMA
    scratch = {
        "list": pltpu.SMEM((2, *operands["words"].shape[1:]), jnp.int32),
        "k_buf": pltpu.VMEM((3, keys, wide), operands["k"].dtype),
        "v_buf": pltpu.VMEM((3, tall, keys), operands["v"].dtype),
        "k_rows_buf": pltpu.VMEM((3, 8, keys), jnp.int32),
        "q_buf": pltpu.VMEM((2, chunks, wide, W), dtype),
        "q_rows_buf": pltpu.VMEM((2, *operands["q_rows"].shape[1:]), jnp.int32),
        "columns": pltpu.VMEM((2, keys, LANES), jnp.int32),
        "scores": pltpu.VMEM((BUFFERS, keys, W), jnp.float32),
        "acc_buf": pltpu.VMEM((kept, tall, W), jnp.float32),
        "stats_buf": pltpu.VMEM((kept, 16, W), jnp.float32),
        "shrink": pltpu.VMEM((kept, 8, W), jnp.float32),
        "list_sem": dma((2,)),
        "kv_sem": dma((3,)),
        "q_sem": dma((2,)),
        "load_sem": dma((3,)),
        "store_sem": dma((3,)),
        "send_sem": dma((2,)),
        "receive_sem": dma((2, 2)),
        "capacity": pltpu.SemaphoreType.REGULAR((2,)),
        "passed": pltpu.SemaphoreType.REGULAR,
    }
    if "scales" in operands:
        scratch["scales_buf"] = pltpu.VMEM((3, operands["scales"].shape[0], keys), jnp.float32)
        scratch["keys"] = pltpu.VMEM((keys, wide), dtype)
        scratch["values"] = pltpu.VMEM((3, tall, keys), dtype)
    return scratch


def _finished(
    acc: jax.Array,
    stats: jax.Array,
    visited: jax.Array,
    sinks: jax.Array | None,
    size: Sizes,
    shape: tuple[int, int, int],
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """The running softmax (K, I, chunks, Hv, W), in powers of 2 → out (T, N, Hv) and lse (T, N)."""
    (T, N, Hv), (K, I), C = shape, acc.shape[:2], size.queries

    def packed(x: jax.Array) -> jax.Array:
        """(K, I, chunks, W, …) → (T, N, …)."""
        x = x.reshape(K, I, N // K, C, *x.shape[4:])
        x = x.transpose(1, 3, 0, 2, *range(4, x.ndim))
        return x.reshape(I * C, N, *x.shape[4:])[:T]

    top, total = packed(stats[..., 0, :]), packed(stats[..., 8:, :].sum(axis=-2))
    # What has visited nothing was never written.
    seen = jnp.repeat(visited, C)[:T, None] & (total > 0.0)
    x = packed(acc[..., :Hv, :].swapaxes(-1, -2))
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :] * LOG2E
        higher = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - higher)
        top, total, x = higher, total * shrink + jnp.exp2(sink - higher), x * shrink[..., None]
    total = jnp.where(seen, total, 1.0)
    out = jnp.where(seen[..., None], x / total[..., None], 0.0)
    return out.astype(dtype), jnp.where(seen, (top + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)


def _kernel(
    *refs,
    names: tuple[str, ...],
    travelling: tuple[str, ...],
    spec: AttentionSpec,
    size: Sizes,
    axis: str,
    n: int,
    K: int,
    shared: int,
    segmented: bool,
    interpret: bool,
):
    """All hops. The refs are those of `ring_attention`, by their names."""
    ref = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    coded = "scales" in travelling
    keys, W, chunks = size.keys, size.width, size.chunks
    dtype, cap = ref.q_buf.dtype, spec.soft_cap
    rank = jax.lax.axis_index(axis)
    neighbour = [jax.lax.rem(rank + 1, n), jax.lax.rem(rank + n - 1, n)]  # that blocks of a direction are sent to

    def signal(semaphore, to):
        pl.semaphore_signal(semaphore, 1, device_id={axis: to})

    # ---- The ring.

    def transfers(direction, h, own):
        """The copies of block h to the next rank; `own`: h is 0."""
        copies = []
        for name in travelling:
            ring = getattr(ref, f"{name}_ring")
            mine = getattr(ref, name) if own else ring.at[direction, h & 1]
            copies.append(
                pltpu.make_async_remote_copy(
                    mine, ring.at[direction, (h + 1) & 1],
                    ref.send_sem.at[direction], ref.receive_sem.at[direction, (h + 1) & 1],
                    device_id={axis: neighbour[direction]},
                )
            )  # fmt: skip
        return copies

    def enter():
        barrier = pltpu.get_barrier_semaphore()
        for to in neighbour:
            signal(barrier, to)
        pl.semaphore_wait(barrier, 2)
        for to in neighbour:
            signal(ref.passed, to)

    def begin_hop(h):
        """Waits for block h of either direction, and sends it on."""
        for direction in range(2):
            reach = ref.reach[direction]

            @pl.when((h > 0) & (h <= reach))
            def arrive(direction=direction):
                for copy in transfers(direction, h - 1, False):
                    copy.wait_recv()

            @pl.when((h > 1) & (h < reach))
            def wait_for_capacity(direction=direction):
                pl.semaphore_wait(ref.capacity.at[direction], 1)

            for own in (True, False):

                @pl.when(((h == 0) == own) & (h < reach))
                def send(direction=direction, own=own):
                    for copy in transfers(direction, h, own):
                        copy.start()

    def end_hop(h):
        """Waits until block h is sent; then its buffer is free."""
        for direction in range(2):
            reach = ref.reach[direction]

            @pl.when(h < reach)
            def sent(direction=direction):
                for copy in transfers(direction, h, False):
                    copy.wait_send()

            @pl.when((h > 0) & (h + 2 <= reach))
            def give_capacity(direction=direction):
                signal(ref.capacity.at[direction], neighbour[1 - direction])

    # ---- Fetching. A visit is a kv head and a number y of the hop's list; all heads go through the same list.

    def third(t):
        """t mod 3, without a division; t below 32768."""
        return t - 3 * ((t * 43691) >> 17)

    def turn(into, step):
        """The buffer `step` behind one of three; 1 or −1."""
        return jnp.where(into == (2 if step > 0 else 0), 0 if step > 0 else 2, into + step)

    def word(h, y):
        return ref.list[h & 1, 0, y]

    def list_copy(h):
        return pltpu.make_async_copy(ref.words.at[h], ref.list.at[h & 1], ref.list_sem.at[h & 1])

    def block_of_keys(word):
        return (word >> KEY_SHIFT) & ((1 << (QUERY_SHIFT - KEY_SHIFT)) - 1)

    def block_of_queries(word):
        return word >> QUERY_SHIFT

    def kv_copies(h, head, y, into, own):
        """K, V and who they are of, of a visit, to a buffer; `own`: h is 0."""
        entry = word(h, y)
        side, block = jnp.where(entry & SIDE != 0, 1, 0), block_of_keys(entry)
        start = pl.multiple_of(block * keys, keys)
        source = rank + jnp.where(side == 1, h, n - h)
        source = jnp.where(source >= n, source - n, source)
        arrays = {
            name: getattr(ref, name) if own else getattr(ref, f"{name}_ring").at[side, h & 1] for name in travelling
        }
        pieces = [
            (arrays["k"].at[head >> (shared.bit_length() - 1), pl.ds(start, keys)], ref.k_buf),
            (arrays["v"].at[head, :, pl.ds(start, keys)], ref.v_buf),
            (ref.k_rows.at[source, block], ref.k_rows_buf),
        ]
        if coded:
            pieces.append((arrays["scales"].at[:, pl.ds(start, keys)], ref.scales_buf))
        return [pltpu.make_async_copy(there, here.at[into], ref.kv_sem.at[into]) for there, here in pieces]

    def fetch_kv(h, head, y, into):
        for own in (True, False) if n > 1 else (True,):

            @pl.when((h == 0) == own)
            def start(own=own):
                for copy in kv_copies(h, head, y, into, own):
                    copy.start()

    def query_copies(head, block, t):
        """The queries of the hop's task t, and where they stand."""
        into = t & 1
        pieces = [(ref.q.at[head, block], ref.q_buf), (ref.q_rows.at[block], ref.q_rows_buf)]
        return [pltpu.make_async_copy(there, here.at[into], ref.q_sem.at[into]) for there, here in pieces]

    def state_copies(head, block, t, store):
        """The running softmax of the hop's task t: fetched, or stored."""
        slot = third(t)
        here = pl.ds(slot * chunks, chunks)
        copies = []
        for inside, outside in ((ref.acc_buf, ref.acc), (ref.stats_buf, ref.stats)):
            mine, there = inside.at[here], outside.at[head, block]
            if store:
                copies.append(pltpu.make_async_copy(mine, there, ref.store_sem.at[slot]))
            else:
                copies.append(pltpu.make_async_copy(there, mine, ref.load_sem.at[slot]))
        return copies

    def fetch_task(h, head, y, t):
        """Task t, whose first visit is number y of the list."""
        entry = word(h, y)
        for copy in query_copies(head, block_of_queries(entry), t):
            copy.start()

        @pl.when(entry & FRESH == 0)
        def load():
            for copy in state_copies(head, block_of_queries(entry), t, False):
                copy.start()

    def begin_task(h, head, y, t):
        """Waits for task t, and fetches the one behind it."""
        entry, slot = word(h, y), third(t)
        for copy in query_copies(head, 0, t):
            copy.wait()

        @pl.when(entry & FRESH == 0)
        def loaded():
            for copy in state_copies(head, 0, t, False):
                copy.wait()

        @pl.when(entry & FRESH != 0)
        def clear():
            def clear_chunk(c, _):
                ref.acc_buf[slot * chunks + c] = jnp.zeros(ref.acc_buf.shape[1:], jnp.float32)
                ref.stats_buf[slot * chunks + c, :8] = jnp.full((8, W), FLOOR, jnp.float32)
                ref.stats_buf[slot * chunks + c, 8:] = jnp.zeros((8, W), jnp.float32)
                return 0

            jax.lax.fori_loop(0, chunks, clear_chunk, 0)

        @pl.when(t >= 2)
        def stored():  # task t − 2, whose place the next one takes
            for copy in state_copies(head, 0, t - 2, True):
                copy.wait()

        following = ref.list[h & 1, 1, y]
        ends = following >= ref.counts[h]

        @pl.when(jnp.logical_not(ends) | (head + 1 < K))
        def fetch_next():
            fetch_task(h, jnp.where(ends, head + 1, head), jnp.where(ends, 0, following), t + 1)

    def store_task(h, head, y, t):
        """Of a visit, the last of task t."""
        for copy in state_copies(head, block_of_queries(word(h, y)), t, True):
            copy.start()

    # ---- The compute.

    def product(x, y):
        if interpret:  # a CPU has no product of bfloat16 with a float32 result; in float32 it is the same
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def column(row):
        """(1, keys) → (keys, 128), the same in all lanes."""
        return jnp.broadcast_to(row, (LANES, keys)).T

    def widen(into, head):
        """Codes of K and V → numbers."""
        scale = column(ref.scales_buf[into, pl.ds(head, 1)])
        for start in range(0, ref.keys.shape[1], LANES):
            tile = slice(start, start + LANES)
            ref.keys[:, tile] = (ref.k_buf[into, :, tile].astype(jnp.float32) * scale).astype(dtype)
        by_key = ref.scales_buf[into, pl.ds(K + head, 1)]
        ref.values[into] = (ref.v_buf[into].astype(jnp.float32) * by_key).astype(dtype)

    def place_keys(into):
        """Positions and segments of the keys, in sublanes."""
        ref.columns[0] = column(ref.k_rows_buf[into, :1])
        if segmented:
            ref.columns[1] = column(ref.k_rows_buf[into, 1:2])

    def seen(chunk, queries, piece):
        """Which keys of a piece the queries of a chunk see."""
        rows = ref.q_rows_buf[queries, chunk & (ref.q_rows_buf.shape[1] - 1)]
        position, segment = rows[:1], rows[1:2]

        def of_keys(number):
            x = ref.columns[number, piece]
            return jnp.concatenate([x] * (W // LANES), axis=1)

        key = of_keys(0)
        visible = key <= position
        if segmented:
            visible &= of_keys(1) == segment
        if spec.window is not None:
            near = position - key < spec.window
            visible &= (near | (key < spec.sink_rows)) if spec.sink_rows else near
        return visible

    def step(new, old, buffer, *, into=0, old_into=0, queries=0, chunk=0, masked=False):
        """Scores of chunk `new` into a buffer; softmax and values of chunk `old`, which came two steps before.

        Either may be None; they are numbers among the chunks of the three tasks in VMEM. They do not depend on each
        other, and stand in one basic block, which is all that the compiler needs to overlap them.
        """
        if old is not None:
            highest, shrink = ref.stats_buf[old, :8], ref.shrink[old]
            total = ref.stats_buf[old, 8:] * shrink
            acc = ref.acc_buf[old] * shrink[:1]
        if new is not None:
            before = top = ref.stats_buf[new, :8]
            for start in range(0, keys, PIECE):
                piece = slice(start, min(start + PIECE, keys))
                k = ref.keys[piece] if coded else ref.k_buf[into, piece]
                s = product(k, ref.q_buf[queries, chunk])
                if cap is not None:
                    s = (cap * LOG2E) * jnp.tanh(s)
                if masked:
                    s = jnp.where(seen(chunk, queries, piece), s, MASKED)
                ref.scores[buffer % BUFFERS, piece] = s
                top = jnp.maximum(top, jnp.max(s.reshape(-1, 8, W), axis=0))
        if old is not None:
            for start in range(0, keys, PIECE):
                piece = slice(start, min(start + PIECE, keys))
                p = jnp.exp2(ref.scores[(buffer - LAG) % BUFFERS, piece].reshape(-1, 8, W) - highest[None])
                total = total + jnp.sum(p, axis=0)
                v = (ref.values if coded else ref.v_buf)[old_into, :, piece]
                acc = acc + product(v, p.reshape(-1, W).astype(dtype))
        if new is not None:
            top = jnp.broadcast_to(jnp.max(top, axis=0, keepdims=True), top.shape)
            ref.stats_buf[new, :8] = top
            ref.shrink[new] = jnp.exp2(before - top)
        if old is not None:
            ref.stats_buf[old, 8:] = total
            ref.acc_buf[old] = acc

    def waiting(t, k):
        """The last chunks of task t, which are finished in the visit behind theirs."""
        return third(t) * chunks + chunks - LAG + k

    def attend(into, t, before, start, masked):
        """All chunks of task t on the keys of a visit; and the last of the visit before, which was of task `before`.

        start: whether there was none before in this hop.
        """
        slot, last_into = third(t) * chunks, jnp.where(start, into, turn(into, -1))

        def attend_round(r, _):
            for c in range(BUFFERS):
                chunk = r * BUFFERS + c
                old, old_into = slot + chunk - LAG, into
                if c < LAG:
                    late = jnp.where(start, 3 * chunks, waiting(before, c))
                    old, old_into = jnp.where(r > 0, old, late), jnp.where(r > 0, into, last_into)
                step(
                    slot + chunk, old, c, into=into, old_into=old_into, queries=t & 1, chunk=chunk, masked=masked
                )  # fmt: skip
            return 0

        jax.lax.fori_loop(0, chunks // BUFFERS, attend_round, 0)

    def visit(h, carry):
        """A visit: a kv head, its number in the list, the buffer of its keys; before it the task was `before`."""
        head, y, into, before = carry
        count, entry = ref.counts[h], word(h, y)
        ends = y + 1 >= count
        next_head, next_y = jnp.where(ends, head + 1, head), jnp.where(ends, 0, y + 1)
        start, first = (head == 0) & (y == 0), entry & FIRST != 0
        t = before + first.astype(jnp.int32)

        @pl.when(next_head < K)
        def fetch_next():
            fetch_kv(h, next_head, next_y, turn(into, 1))

        @pl.when(first)
        def begin():
            begin_task(h, head, y, t)

        for copy in kv_copies(h, head, y, into, True):
            copy.wait()
        if coded:
            widen(into, head)
        masked = entry & MASK != 0

        @pl.when(masked)
        def attend_edge():
            place_keys(into)
            attend(into, t, before, start, True)

        @pl.when(jnp.logical_not(masked))
        def attend_inside():
            attend(into, t, before, start, False)

        @pl.when(first & jnp.logical_not(start))
        def store():
            store_task(h, jnp.where(y == 0, head - 1, head), jnp.where(y == 0, count, y) - 1, before)

        return next_head, next_y, turn(into, 1), t

    def compute(h):
        """Everything that is seen of the blocks of hop h."""
        count = ref.counts[h]

        @pl.when(count > 0)
        def compute_any():
            fetch_task(h, 0, 0, 0)
            fetch_kv(h, 0, 0, 0)
            carry = jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(-1)
            carry = jax.lax.fori_loop(0, K * count, lambda _, carry: visit(h, carry), carry)
            _, _, into, last = carry
            for k in range(LAG):
                step(None, waiting(last, k), k, old_into=turn(into, -1))
            store_task(h, K - 1, count - 1, last)

            @pl.when(last > 0)
            def stored():
                for copy in state_copies(0, 0, last - 1, True):
                    copy.wait()

            for copy in state_copies(0, 0, last, True):
                copy.wait()

    # ---- The walk.

    def hop(h, _):
        if n > 1:
            begin_hop(h)
        list_copy(h).wait()

        @pl.when(h + 1 < hop_count)
        def fetch_list():
            list_copy(h + 1).start()

        compute(h)
        if n > 1:
            end_hop(h)
        return 0

    hop_count = jnp.maximum(ref.reach[0], ref.reach[1]) + 1
    list_copy(0).start()
    if n > 1:
        enter()
    jax.lax.fori_loop(0, hop_count, hop, 0)
    if n > 1:
        pl.semaphore_wait(ref.passed, 2)
