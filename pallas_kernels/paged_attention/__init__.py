"""Ragged paged attention: decode rows and prompt chunks in one call, returning the log-sum-exp."""

from __future__ import annotations

import jax

from kvjax.pallas_kernels.paged_attention import reference, xla
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

BACKENDS = ("reference", "xla")


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    max_query: int,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of T packed query tokens over the pages of their slots.

    The tokens of slot b are q[row_starts[b]:row_starts[b + 1]]; they are the last of its lengths[b] rows, all of
    which have been written. Accumulation is in float32.

    Args:
      q: (T, N, H) queries; tokens behind row_starts[B] are padding.
      k_pages: (P, K, H, R), or (P, R, K, H) in the token-major layout; N is a multiple of K.
      v_pages: (P, K, R, Hv), or (P, R, K, Hv); None where `spec.latent` is set.
      table: (B, M) int32 physical pages of each slot; entries behind its length may be anything.
      lengths: (B,) int32 rows of each slot, those of this step included.
      row_starts: (B + 1,) int32, not decreasing, from 0.
      spec: scale, window, soft cap, latent values, layout.
      sinks: (N,) float32 logits that join each head's softmax denominator and no more (gpt-oss).
      slopes: (N,) float32, m of ALiBi (2108.12409): m times the distance to a key is taken off its scaled logit.
      max_query: static; no slot has more tokens than this. 1 for a decode step.
      backend: "xla", or "reference" for the oracle.

    Returns:
      out (T, N, Hv) in q's dtype, and lse (T, N) float32, the natural log of the softmax denominator, everything
      applied, sinks included. Padding and tokens that see nothing get 0 and −inf.

    Raises:
      NotImplementedError: for a backend that does not exist.
      ValueError: when N is not a multiple of K, or V is missing.
    """
    if (v_pages is None) != (spec.latent is not None):
        raise ValueError("V has pages of its own, or spec.latent says how much of K it is: give one of them")
    kv_heads = k_pages.shape[1 if spec.layout == "head_major" else 2]
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {kv_heads} kv heads")
    if backend == "xla":
        return xla.paged_attention(q, k_pages, v_pages, table, lengths, row_starts, spec, max_query, sinks, slopes)
    if backend == "reference":
        return reference.paged_attention(q, k_pages, v_pages, table, lengths, row_starts, spec, sinks, slopes)
    raise NotImplementedError(f"attention backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")


__all__ = ["BACKENDS", "AttentionSpec", "paged_attention"]
