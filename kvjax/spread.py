"""The tokens of a prompt step over the chips of the mesh axis `seq`, in zigzag order: of 2n equal pieces chip r has
pieces r and 2n − 1 − r, so that all have equally much before them. Called where `seq` is a manual axis of n chips.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.pallas_kernels import Deal, merge
from kvjax.sharding import SEQ


def deal(n: int) -> Deal | None:
    """Which rows are this chip's, of sequences that are dealt over n of them; None of one."""
    return Deal(jax.lax.axis_index(SEQ), n) if n > 1 else None


def divides(tokens: int, n: int) -> bool:
    """Whether so many tokens come in 2n equal pieces."""
    return n > 1 and tokens % (2 * n) == 0


def own(x: jax.Array, n: int) -> jax.Array:
    """This chip's (T / n, …) of (T, …)."""
    rank = jax.lax.axis_index(SEQ)
    pieces = x.reshape(2 * n, -1, *x.shape[1:])
    mine = [jax.lax.dynamic_index_in_dim(pieces, i, keepdims=False) for i in (rank, 2 * n - 1 - rank)]
    return jnp.concatenate(mine)


def whole(x: jax.Array, n: int) -> jax.Array:
    """(T, …) of every chip's (T / n, …)."""
    parts = jax.lax.all_gather(x, SEQ).reshape(n, 2, -1, *x.shape[1:])
    return jnp.concatenate([parts[:, 0], parts[::-1, 1]]).reshape(-1, *x.shape[1:])


def back(x: jax.Array, n: int) -> jax.Array:
    """(n, T / n, …): what each of n chips has for this chip's tokens; each has its own (T, …)."""
    pieces = x.reshape(2 * n, -1, *x.shape[1:])
    for_each = jnp.stack([pieces[:n], pieces[: n - 1 : -1]], axis=1).reshape(n, -1, *x.shape[1:])
    return jax.lax.all_to_all(for_each, SEQ, 0, 0)


def merged(
    out: jax.Array, lse: jax.Array, sinks: jax.Array | None, divided: bool, n: int
) -> tuple[jax.Array, jax.Array]:
    """What all n chips' rows give, by one collective: for this chip's tokens if they are divided, else for all.

    Args:
      out: (T, N, Hv) of this chip's rows.
      lse: (T, N).
      sinks: (N,) that join the denominator of the whole, or None.
      divided: static; whether each chip wants those of its own tokens alone.
      n: chips.
    """
    both = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)  # (T, N, Hv + 1)
    both = back(both, n) if divided else jax.lax.all_gather(both, SEQ)
    return merge(both[..., :-1], both[..., -1], sinks)


def rows(x: jax.Array, index: jax.Array, n: int) -> jax.Array:
    """(B, …) rows `index` (B,) int32 of the whole (T, …), on every chip, of this chip's (T / n, …).

    Rows of other chips are zeros here, and a sum over chips is exact.
    """
    size = x.shape[0] // 2
    piece, place = index // size, index % size
    second = piece >= n
    mine = jnp.where(second, 2 * n - 1 - piece, piece) == jax.lax.axis_index(SEQ)
    found = x.at[place + jnp.where(second, size, 0)].get(mode="clip")
    return jax.lax.psum(jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), found, jnp.zeros((), x.dtype)), SEQ)
