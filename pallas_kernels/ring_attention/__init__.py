"""Ring attention: the prefill of a sequence whose tokens are spread over the chips of one mesh axis (2310.01889).

Called inside `jax.shard_map`. Every rank keeps its queries; keys and values travel around the ring while the block
that came before is computed, so that no chip ever holds more than a few blocks of them. docs/ring.md has an example.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.ring_attention import permute, reference
from kvjax.pallas_kernels.ring_attention.order import Balance, balance, plain, striped, work, zigzag

BACKENDS = ("reference", "xla", "tpu", "tpu_interpret")
CODES = ("int8", "float8_e4m3fn", "float8_e5m2")


def default_backend() -> str:
    """The backend that suits the default platform."""
    return "tpu" if jax.default_backend() == "tpu" else "xla"


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    spec: AttentionSpec,
    *,
    axis: str,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    q_block: int | None = None,
    kv_block: int | None = None,
    collective_id: int | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of the rank's queries over the keys of all ranks of a mesh axis, inside `jax.shard_map`.

    A query sees the keys of its own segment up to its own position; with a window W only the last W of them, and those
    of the positions below `spec.sink_rows`. Positions may be in any order; where they are runs (`zigzag`), blocks that
    nobody sees are neither computed nor, if they lie behind all windows, sent. Accumulation is in float32. All sizes
    are the rank's own and the same on all ranks.

    Args:
      q: (T, N, H) float32 or bfloat16 queries, rotated by their global positions.
      k: (S, K, H) keys of the dtype of q, or codes; N is a multiple of K.
      v: (S, K, Hv) values, of the dtype of k.
      q_positions: (T,) int32, not negative, in the whole sequence.
      kv_positions: (S,) int32, not negative.
      spec: scale, window, soft cap, sink rows. The layout of pages means nothing here; `latent` must be None.
      axis: name of the mesh axis that the sequence lies on.
      q_segments: (T,) int32: which of several packed sequences a token is of; negative: padding. None: all are of one.
      kv_segments: (S,) int32; give both or neither.
      scales: (S, 2·K) float32 where k and v are codes (int8, float8), which is how they travel: what the heads of k,
        then of v, are multiplied with.
      sinks: (N,) float32 logits that join each head's softmax denominator once and no more (gpt-oss).
      q_block: static; queries computed together at most. None: the backend's choice.
      kv_block: static; keys computed together at most.
      collective_id: static; which barrier semaphore "tpu" uses. None: its own. Two rings that may run at the same time
        (different axes, no dependence) need different ones.
      backend: static; "reference", gathers all keys; "xla", which permutes them (CPU, GPU; the oracle at length);
        "tpu", one kernel that moves them by remote DMA, in a `shard_map` with check_vma=False; "tpu_interpret", that
        kernel on a CPU, which needs fewer ranks than XLA has threads (environment variable NPROC). None: "tpu" on a
        TPU, else "xla".

    Returns:
      out (T, N, Hv) in q's dtype, and lse (T, N) float32, the natural log of the softmax denominator, sinks included.
      Padding, and tokens that see nothing, get 0 and −inf.

    Raises:
      ValueError: when shapes or dtypes do not fit each other, or codes come without scales.
      NotImplementedError: for a backend that does not exist, or what one cannot do, with the reason.
    """
    _check(q, k, v, q_positions, kv_positions, q_segments, kv_segments, scales, sinks, spec)
    backend = backend or default_backend()
    if backend not in BACKENDS:
        raise NotImplementedError(f"ring attention backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    segmented = q_segments is not None
    if q_segments is None or kv_segments is None:
        q_segments, kv_segments = jnp.zeros_like(q_positions), jnp.zeros_like(kv_positions)
    else:
        # Padding belongs to nobody and may hold NaN, which 0 does not cancel.
        owned = kv_segments[:, None] >= 0
        k, v = (jnp.where(owned[..., None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        scales = None if scales is None else jnp.where(owned, scales, 0.0)
    arrays = q, k, v, q_positions, kv_positions, q_segments, kv_segments
    if backend == "reference":
        return reference.ring_attention(*arrays, spec, axis, scales, sinks)
    if backend == "xla":
        blocks = q_block or permute.BLOCK, kv_block or permute.BLOCK
        return permute.ring_attention(*arrays, spec, axis, scales, sinks, q_block=blocks[0], kv_block=blocks[1])
    from kvjax.pallas_kernels.ring_attention import tpu  # only here: it needs Mosaic

    return tpu.ring_attention(
        *arrays, spec, axis, scales, sinks, segmented=segmented, q_block=q_block, kv_block=kv_block,
        collective_id=collective_id, interpret=tpu.INTERPRETED if backend == "tpu_interpret" else False,
    )  # fmt: skip


def _check(q, k, v, q_positions, kv_positions, q_segments, kv_segments, scales, sinks, spec) -> None:
    (T, N, H), (S, K, _) = q.shape, k.shape
    if spec.latent is not None:
        raise NotImplementedError("latent keys in a ring: expand them first, or give them as K and V of one head")
    if q.dtype.name not in ("float32", "bfloat16"):
        raise ValueError(f"queries are float32 or bfloat16; these are {q.dtype}")
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} kv heads")
    if k.shape[2] != H or v.shape[:2] != (S, K) or v.dtype != k.dtype:
        raise ValueError(f"q {q.shape}, k {k.dtype}{k.shape} and v {v.dtype}{v.shape} do not fit each other")
    if q_positions.shape != (T,) or kv_positions.shape != (S,):
        raise ValueError(f"positions {q_positions.shape} and {kv_positions.shape} of {T} queries and {S} keys")
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("segments are of queries and of keys: give both or neither")
    if q_segments is not None and (q_segments.shape != (T,) or kv_segments.shape != (S,)):
        raise ValueError(f"segments {q_segments.shape} and {kv_segments.shape} of {T} queries and {S} keys")
    coded = k.dtype.name in CODES
    if coded != (scales is not None) or (not coded and k.dtype != q.dtype):
        raise ValueError(f"k and v are of q's dtype, {q.dtype}, or {', '.join(CODES)} with scales; they are {k.dtype}")
    if scales is not None and scales.shape != (S, 2 * K):
        raise ValueError(f"scales {scales.shape} of {S} keys of {K} heads: they are (S, 2·K)")
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(f"sinks {sinks.shape} of {N} heads")


__all__ = [
    "BACKENDS",
    "AttentionSpec",
    "Balance",
    "balance",
    "default_backend",
    "plain",
    "ring_attention",
    "striped",
    "work",
    "zigzag",
]
