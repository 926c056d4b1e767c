"""Ragged paged attention: decode rows and prompt chunks in one call, returning the log-sum-exp."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.joined import Lanes
from kvjax.pallas_kernels.packed import Codes
from kvjax.pallas_kernels.paged_attention import latent, reference, tpu, xla
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec

NO_CODES = "packed codes on the GPU's kernels, which read whole numbers: take the backend 'xla'"
BACKENDS = ("reference", "xla", "tpu", "tpu_interpret", "gpu", "gpu_interpret")


def default_backend() -> str:
    """The backend that suits the default platform, on one device."""
    platform = jax.default_backend()
    return _gpu_backend() if platform == "gpu" else "tpu" if platform == "tpu" else "xla"


@functools.cache
def _gpu_backend() -> str:
    """The kernels on Hopper; XLA on other GPUs, which is said once."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if capability.startswith("9."):
        return "gpu"
    logging.getLogger(__name__).warning(
        "%s (compute capability %s): attention runs as plain XLA; the kernels are for Hopper, 9.0",
        device.device_kind,
        capability or "unknown",
    )
    return "xla"


def check(
    backend: str,
    layout: str,
    rows: int,
    storage: str,
    lanes: Lanes | None = None,
    queries: str = "bfloat16",
    codes: Codes | None = None,
) -> None:
    """Raises NotImplementedError, with the reason, for a cache that a backend cannot read.

    Args:
      backend: one of BACKENDS.
      layout: of the pages.
      rows: R.
      storage: name of the pages' dtype.
      lanes: the heads of a row, whatever the layout; not checked where None.
      queries: name of the dtype of q.
      codes: what packed pages hold; `storage` is then "uint8".

    Raises:
      ValueError: for heads or pages that the codes do not fit.
    """
    dtype = jnp.dtype(storage)
    if codes is not None and lanes is not None:
        codes.check(rows, lanes, layout)
    if backend.startswith("tpu"):
        tpu.check(layout, rows, dtype, scaled=dtype.itemsize == 1, codes=codes)
    if backend.startswith("gpu"):
        if codes is not None:
            raise NotImplementedError(NO_CODES)
        from kvjax.pallas_kernels.paged_attention import gpu

        gpu.check(layout, rows, dtype)
        if lanes is not None:
            gpu.check_heads(lanes.key_dim, lanes.value_dim, lanes.latent, dtype, jnp.dtype(queries))


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
    tree: jax.Array | None = None,
    scales: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    up: jax.Array | None = None,
    deal: Deal | None = None,
    first: jax.Array | None = None,
    ahead: jax.Array | None = None,
    max_query: int,
    with_lse: bool = True,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of T packed query tokens over the pages of their slots.

    The tokens of slot b are q[row_starts[b]:row_starts[b + 1]]; they are the last of its lengths[b] rows, all of
    which have been written. If it has fewer rows than tokens, the first tokens see nothing. So with lengths less by w,
    each token sees the rows from w before it on: all but the newest w. Accumulation is in float32.

    Args:
      q: (T, N, H) queries; tokens behind row_starts[B] are padding.
      k_pages: (P, K, H, R), or (P, R, K, H) in the token-major layout; N is a multiple of K. In the joined layout
        both K and V, (P, C, R, 128) (`kvjax.pallas_kernels.joined`).
      v_pages: (P, K, R, Hv), or (P, R, K, Hv); None where `spec.latent` is set, and in the joined layout.
      table: (B, M) int32 physical pages of each slot; entries behind its length may be anything. (B, K, M) where each
        kv head of a slot has its own, of pages of one head.
      lengths: (B,) int32 rows of each slot, those of this step included; (B, K) with a table for each head, as `first`
        and `ahead` are then.
      row_starts: (B + 1,) int32, not decreasing, from 0.
      spec: scale, window, soft cap, latent values, layout.
      sinks: (N,) float32 logits that join each head's softmax denominator and no more (gpt-oss).
      slopes: (N,) float32, m of ALiBi (2108.12409): m times the distance to a key is taken off its scaled logit.
      tree: (T, W) int32 or None. What a token sees of the c new rows of its slot, instead of those up to its own: row
        length − c + i only if bit i mod 32 of word i div 32 is set. Nothing is hidden of what came before.
      scales: float32 or None: what codes are multiplied with, the heads of K first, then V's: (P, 2·K, R) for each
        row, or (P, 2·K) for each page. Latent pages have K of them. With `spec.codes`, a pair: those of K and of V,
        as `kvjax.pallas_kernels.packed` has them.
      up: (N, h + Hv, C) or None: of latent pages of C numbers and a rotated key of r, what makes a head's keys without
        position, and its values, of a latent (2405.04434). Then q is (T, N, h + r) and out (T, N, Hv), and a backend
        chooses its form: absorbed into q and out, or the latents expanded (`latent.py`).
      deal: which rows the pages hold where a sequence's are dealt over chips (`kvjax.pallas_kernels.dealt`), all
        numbers but the pages' being those of the whole sequence. The result is what these rows give, to be merged
        with the other chips' (`merge.py`); None: they are all here.
      first: (B,) int32 or None: a slot's rows before it are not seen, but for `spec.sink_rows`, and what the table says
        of pages wholly before it may be anything, as of those behind a window that were freed.
      ahead: (B,) int32 or None: how many rows of the slot come after those held here, up to its last query's own. Its
        queries are the last of lengths[b] + ahead[b] rows, so with `ahead` ≥ c, c new tokens see all rows of these
        pages. For what is elsewhere, as rows that are not quantized yet, there is another call, and `merge.py`.
      max_query: static; no slot has more tokens than this. 1 for a decode step.
      with_lse: static; a kernel has less to write without.
      backend: "xla"; "tpu"; "gpu" (docs/gpu.md); "tpu_interpret" and "gpu_interpret" for these kernels interpreted on
        a CPU; "reference" for the oracle. None: "tpu" for joined pages on a TPU, "gpu" for token-major ones on Hopper,
        else "xla".

    Returns:
      out (T, N, Hv) in q's dtype, and lse (T, N) float32, the natural log of the softmax denominator, everything
      applied, sinks included, or None without `with_lse`. Padding and tokens that see nothing get 0 and −inf.

    Raises:
      NotImplementedError: for a backend that does not exist, or what one cannot do, with the reason.
      ValueError: when N is not a multiple of K, V is missing, `up` does not fit q and the latents, or the scales do not
        fit the codes.
    """
    if (spec.codes is not None) != isinstance(scales, tuple):
        raise ValueError("packed pages have a pair of scales, K's and V's, and spec.codes: give both or neither")
    if table.ndim == 3:
        if sinks is not None or slopes is not None or up is not None:
            raise NotImplementedError("a table for each head with sinks, slopes or up, which each has its own of, too")
        return _by_head(
            q, k_pages, v_pages, table, lengths, row_starts, spec,
            tree=tree, first=first, ahead=ahead, scales=scales, max_query=max_query, with_lse=with_lse, backend=backend,
        )  # fmt: skip
    if spec.lanes is not None:
        kv_heads = spec.lanes.kv_heads
        if v_pages is not None or spec.lanes.latent != (spec.latent is not None):
            raise ValueError("in the joined layout V is in the rows of K, and spec.lanes knows what is latent")
    else:
        kv_heads = k_pages.shape[1 if spec.layout == "head_major" else 2]
        if (v_pages is None) != (spec.latent is not None):
            raise ValueError("V has pages of its own, or spec.latent says how much of K it is: give one of them")
    if tree is not None and (spec.window is not None or slopes is not None):
        raise NotImplementedError("a tree with a window or ALiBi: the order of a tree's tokens is not their distance")
    if deal is not None and (tree is not None or sinks is not None):
        raise NotImplementedError("dealt pages with a tree, or with sinks: those join what all chips' rows give")
    if deal is not None and (first is not None or ahead is not None):
        raise NotImplementedError("dealt pages with rows that are elsewhere (`first`, `ahead`)")
    if tree is not None and ahead is not None:
        raise NotImplementedError("a tree whose rows are not in these pages (`ahead`): it sees all of them, so no tree")
    if spec.codes is not None and spec.latent is not None:
        raise NotImplementedError("latent pages have no packed codes: their values are part of their keys")
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {kv_heads} kv heads")
    if backend is None:
        backend = default_backend()
        if spec.layout != {"tpu": "joined", "gpu": "token_major"}.get(backend):
            backend = "xla"
    h = 0
    if up is not None:
        if spec.latent is None:
            raise ValueError("up makes keys and values of latents: spec.latent says how many numbers a latent has")
        key_dim = k_pages.shape[2 if spec.layout == "head_major" else 3] if spec.lanes is None else spec.lanes.key_dim
        h = latent.check(q, up, key_dim, spec.latent)
    if backend in ("tpu", "tpu_interpret"):
        return tpu.paged_attention(
            q, k_pages, table, lengths, row_starts, spec, max_query, sinks, slopes, tree, scales, up, deal,
            first=first, ahead=ahead, with_lse=with_lse, interpret=backend == "tpu_interpret",
        )  # fmt: skip
    if up is not None and backend != "reference":
        q = latent.absorbed(q, up, h)
    if backend in ("gpu", "gpu_interpret"):
        from kvjax.pallas_kernels.paged_attention import gpu  # only here: it needs Mosaic GPU

        if deal is not None:
            raise NotImplementedError("dealt pages on the GPU's kernels: take the backend 'xla'")
        if first is not None or ahead is not None:
            raise NotImplementedError("rows elsewhere (`first`, `ahead`) on the GPU's kernels: take the backend 'xla'")
        if isinstance(scales, tuple):
            raise NotImplementedError(NO_CODES)
        out, lse = gpu.paged_attention(
            q, k_pages, v_pages, table, lengths, row_starts, spec, max_query, sinks, slopes, tree, scales,
            interpret=backend == "gpu_interpret",
        )  # fmt: skip
    elif backend == "xla":
        out, lse = xla.paged_attention(
            q, k_pages, v_pages, table, lengths, row_starts, spec, max_query, sinks, slopes, tree, scales, deal,
            first, ahead,
        )  # fmt: skip
    elif backend == "reference":
        out, lse = reference.paged_attention(
            q, k_pages, v_pages, table, lengths, row_starts, spec, sinks, slopes, tree, scales, up, deal, first, ahead
        )
    else:
        raise NotImplementedError(f"attention backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    if up is not None and backend != "reference":
        out = latent.values(out, up, h)
    return out, lse if with_lse else None


def _by_head(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    *,
    tree: jax.Array | None,
    first: jax.Array | None,
    ahead: jax.Array | None,
    **how: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Each kv head of a slot becomes a slot of its own: of K times as many tokens, head by head."""
    (B, K, _), (T, N, H) = table.shape, q.shape
    by_head = q.reshape(T, K, N // K, H).swapaxes(0, 1).reshape(K * T, N // K, H)
    # Behind the slots of a head stands one more, empty, whose tokens are the padding.
    tables = jnp.pad(table.swapaxes(0, 1), ((0, 0), (0, 1), (0, 0))).reshape(K * (B + 1), -1)

    def of_heads(x: jax.Array) -> jax.Array:
        return jnp.pad(x.swapaxes(0, 1), ((0, 0), (0, 1))).reshape(-1)

    rows = of_heads(lengths)
    first, ahead = (None if x is None else of_heads(x) for x in (first, ahead))
    starts = (jnp.arange(K, dtype=jnp.int32)[:, None] * T + row_starts[None, :]).reshape(-1)
    starts = jnp.append(starts, jnp.int32(K * T))
    trees = None if tree is None else jnp.tile(tree, (K, 1))
    out, lse = paged_attention(
        by_head, k_pages, v_pages, tables, rows, starts, spec, tree=trees, first=first, ahead=ahead, **how
    )
    used = jnp.arange(T, dtype=jnp.int32)[:, None] < row_starts[-1]
    out = jnp.where(used[..., None], out.reshape(K, T, N // K, -1).swapaxes(0, 1).reshape(T, N, -1), 0)
    if lse is None:
        return out, None
    return out, jnp.where(used, lse.reshape(K, T, N // K).swapaxes(0, 1).reshape(T, N), -jnp.inf)


__all__ = ["BACKENDS", "AttentionSpec", "check", "default_backend", "paged_attention"]
