"""What a policy sees: the rows of one layer of one slot, and what queries told about them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


class Moments(struct.PyTreeNode):
    """Mean and spread of queries, without RoPE, of each query head; what expected attention needs to know of them.

    Attributes:
      queries: () int32 queries seen.
      mean: (N, H) float32.
      scatter: (N, H, H) float32, the sum of (q − mean)(q − mean)ᵀ.
    """

    queries: jax.Array
    mean: jax.Array
    scatter: jax.Array

    @property
    def covariance(self) -> jax.Array:
        """(N, H, H) float32, divided by the number of queries as kvpress does, not by one less."""
        return self.scatter / jnp.maximum(self.queries, 1).astype(jnp.float32)


def no_moments(heads: int, head_dim: int) -> Moments:
    """Moments of no queries, to add to: heads is N, head_dim H."""
    mean = jnp.zeros((heads, head_dim), jnp.float32)
    return Moments(jnp.int32(0), mean, jnp.zeros((heads, head_dim, head_dim), jnp.float32))


def add_queries(moments: Moments, queries: jax.Array, watched: jax.Array) -> Moments:
    """Moments with more queries; chunk by chunk the same as all at once, but for rounding (Chan et al., 1979).

    Args:
      moments: of the queries before.
      queries: (T, N, H), without RoPE; of any float dtype, may be anything where not watched.
      watched: (T,) bool which of them count.
    """
    count = jnp.sum(watched, dtype=jnp.int32)
    q = jnp.where(watched[:, None, None], queries.astype(jnp.float32), 0.0)
    mean = jnp.sum(q, axis=0) / jnp.maximum(count, 1).astype(jnp.float32)
    centered = jnp.where(watched[:, None, None], q - mean[None], 0.0)
    scatter = jnp.einsum("tni,tnj->nij", centered, centered, precision="highest")
    total = moments.queries + count
    share = count.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    apart = mean - moments.mean
    between = apart[:, :, None] * apart[:, None, :] * (share * moments.queries.astype(jnp.float32))
    return Moments(total, moments.mean + apart * share, moments.scatter + scatter + between)


class Rows(struct.PyTreeNode):
    """One layer's rows of one slot, and what the watched queries said of them. Rows behind a length may be anything.

    Attributes:
      keys: (K, S, H) as cached, RoPE applied; dequantized, of any float dtype.
      values: (K, S, Hv).
      lengths: (K,) int32 rows held by each head.
      positions: (K, S) int32 of the rows' tokens in the sequence, ascending along S.
      next: () int32 position of the next query.
      weights: (K, S) float32 attention weight that each row received: the mean over the G query heads of its kv head,
        summed over the queries that the policy watches. None where it watches none.
      seen: (K, S) int32 how many of the watched queries could see the row, or None.
      moments: of the watched queries, or None.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array
    positions: jax.Array
    next: jax.Array
    weights: jax.Array | None = None
    seen: jax.Array | None = None
    moments: Moments | None = None

    @property
    def held(self) -> jax.Array:
        """(K, S) bool: which rows are there."""
        return self.index < self.lengths[:, None]

    @property
    def index(self) -> jax.Array:
        """(K, S) int32 place of a row among those of its head."""
        return jax.lax.broadcasted_iota(jnp.int32, self.keys.shape[:2], 1)

    def cleaned(self) -> Rows:
        """The same with zeros behind the lengths, so that sums and products over all S mean the rows held."""
        held = self.held

        def clean(x: jax.Array | None) -> jax.Array | None:
            return (
                None if x is None else jnp.where(held if x.ndim == 2 else held[:, :, None], x, jnp.zeros((), x.dtype))
            )

        names = ("keys", "values", "positions", "weights", "seen")
        return self.replace(**{name: clean(getattr(self, name)) for name in names})
