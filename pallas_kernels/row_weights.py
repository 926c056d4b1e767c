"""How much attention rows get: the weights that attention computes and throws away, summed over queries.

Eviction policies rank rows by them (H2O, 2306.14048; SnapKV, 2404.14469). Kernels give the log-sum-exp of each query,
and exp(q·k − lse) is the weight again: so this is a pass of its own over the keys, for the queries that are watched.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels.joined import Lanes
from kvjax.pallas_kernels.kv_store import read_pages
from kvjax.pallas_kernels.paged_attention.spec import AttentionSpec
from kvjax.pallas_kernels.paged_attention.xla import BLOCK, TILE, query_blocks


def add_row_weights(
    weights: jax.Array,
    seen: jax.Array,
    q: jax.Array,
    lse: jax.Array,
    watched: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    row_starts: jax.Array,
    spec: AttentionSpec,
    lanes: Lanes,
    *,
    scales: jax.Array | None = None,
    max_query: int,
) -> tuple[jax.Array, jax.Array]:
    """Adds to each row what the watched queries' softmax gives it, the mean over the query heads of its kv head.

    Args:
      weights: (P, R) float32, of the rows of pages of one head.
      seen: (P, R) int32 how many watched queries could see a row.
      q: (T, N, H).
      lse: (T, N) float32 of the attention over the same pages, as `paged_attention` returns it.
      watched: (T,) bool.
      k_pages: pages of one head.
      v_pages: the same; only their layout counts.
      table: (B, K, M) int32.
      lengths: (B, K) int32, the tokens of this step included.
      row_starts: (B + 1,) int32.
      spec: scale, soft cap, layout; without a window.
      lanes: of a page's one head.
      scales: (P, 2, R) float32 of codes, K's first; (P, 1, R) of latents.
      max_query: static; most tokens of a slot.

    Returns:
      The new weights and seen.
    """
    T, B = q.shape[0], table.shape[0]
    # A slot's tokens are cut into blocks, and blocks without a watched query left out.
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(watched, dtype=jnp.int32)])
    wanted = before[row_starts[1:]] > before[row_starts[:-1]]
    C = 1 if max_query == 1 else min(BLOCK, 1 << (max_query - 1).bit_length())
    most = min(T, B) if C == 1 else min(T, T // C + B)
    tile = min(TILE, most)
    blocks = query_blocks(row_starts, lengths.max(axis=1), wanted, C, -(-most // tile) * tile)
    K, R, (N, H) = table.shape[1], weights.shape[1], q.shape[1:]
    grouped = q.reshape(T, K, N // K, H) * jnp.asarray(spec.scale, q.dtype)
    of_query = lse.reshape(T, K, N // K)
    tokens = row_starts[1:] - row_starts[:-1]

    def add_tile(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot, first, size = (jax.lax.dynamic_slice_in_dim(x, i * tile, tile) for x in blocks[:3])
        step = jnp.arange(C, dtype=jnp.int32)[None, :]
        token = first[:, None] + step  # (tile, C)
        live = (step < size[:, None]) & watched.at[token].get(mode="fill", fill_value=False)
        queries, sums = (x.at[token].get(mode="clip") for x in (grouped, of_query))
        # The row of each query in each head: heads may hold different numbers of rows.
        row = (lengths[slot] - tokens[slot][:, None])[:, None, :] + (token - row_starts[slot][:, None])[:, :, None]
        row = jnp.where(live[:, :, None], row, -1)  # (tile, C, K)

        def add_page(page: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, seen = carry
            physical = jax.lax.dynamic_index_in_dim(table[slot], page, axis=2, keepdims=False)  # (tile, K)
            k, _ = read_pages(k_pages, v_pages, physical, lanes, spec.layout)
            keys = k[:, :, :, 0].astype(q.dtype)  # (tile, K, R, H)
            precision = "highest" if q.dtype == jnp.float32 else None
            s = jnp.einsum("bckgh,bkrh->bckgr", queries, keys, precision=precision, preferred_element_type=jnp.float32)
            if scales is not None:
                s = s * scales.at[physical, 0].get(mode="clip")[:, None, :, None]
            if spec.soft_cap is not None:
                s = jnp.float32(spec.soft_cap) * jnp.tanh(s / jnp.float32(spec.soft_cap))
            key = page * R + jnp.arange(R, dtype=jnp.int32)
            visible = key[None, None, None, :] <= row[..., None]  # (tile, C, K, R)
            mean = jnp.exp(jnp.where(visible[:, :, :, None], s - sums[..., None], -jnp.inf)).mean(axis=3)
            place = jnp.where(visible.any(axis=(1, 3)), physical, weights.shape[0])
            weights = weights.at[place].add(mean.sum(axis=1), mode="drop")
            return weights, seen.at[place].add(visible.sum(axis=1, dtype=jnp.int32), mode="drop")

        return jax.lax.fori_loop(0, row.max() // R + 1, add_page, carry)

    return jax.lax.fori_loop(0, (blocks.used + tile - 1) // tile, add_tile, (weights, seen))
