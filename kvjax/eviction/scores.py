"""The score functions of the literature: Rows → (K, S) float32, higher stays. Rows behind the lengths hold zeros."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.errors import UserError
from kvjax.eviction.policy import is_count
from kvjax.eviction.rotation import Frequencies, mean_rotation, rotate
from kvjax.eviction.rows import Rows


def newest(rows: Rows) -> jax.Array:
    """The place of the row: later is higher."""
    return rows.index.astype(jnp.float32)


def oldest(rows: Rows) -> jax.Array:
    """Earlier is higher."""
    return -newest(rows)


def weights(rows: Rows) -> jax.Array:
    """The attention weight that the row received; of all queries: H2O (2306.14048), of the last: TOVA (2401.06104)."""
    assert rows.weights is not None
    return rows.weights


def mean_weights(rows: Rows) -> jax.Array:
    """The same, divided by the number of queries that could see the row: kvpress' ObservedAttentionPress.

    Raises:
      ValueError: `rows.seen` is None.
    """
    if rows.seen is None:
        raise ValueError("The policy reads Rows.seen, which is None.")
    return weights(rows) / jnp.maximum(rows.seen, 1).astype(jnp.float32)


def short_keys(rows: Rows) -> jax.Array:
    """−‖k‖: rows with short keys receive much attention (2406.11430)."""
    return -_norm(rows.keys)


def different_keys(rows: Rows) -> jax.Array:
    """−cos(k, the mean of all k/‖k‖): what is unlike the rest stays (KeyDiff, 2504.15364; kvpress' KeyDiffPress)."""
    unit = rows.keys.astype(jnp.float32) / jnp.maximum(_norm(rows.keys), 1e-12)[:, :, None]
    # The mean over the rows held has the direction of the sum, since the others are zeros.
    middle = jnp.sum(unit, axis=1)
    middle = middle / jnp.maximum(_norm(middle), 1e-12)[:, None]
    return -jnp.einsum("ksh,kh->ks", unit, middle, precision="highest")


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


@dataclasses.dataclass(frozen=True)
class PooledWeights:
    """Weights from the last queries of the prompt, pooled over neighbours (SnapKV, 2404.14469; as kvpress).

    The last `window` rows, those of the watched queries, stay anyway; they are not pooled into the rows before them.

    Attributes:
      window: queries that are watched, and last rows that they are.
      kernel: neighbours pooled, the row itself in the middle; odd. Behind the ends are zeros.
      pool: "avg" as kvpress, or "max" as the paper's code.

    Raises:
      UserError: kernel or pool is not one of those.
    """

    window: int = 64
    kernel: int = 5
    pool: str = "avg"

    def __post_init__(self) -> None:
        if not is_count(self.kernel, 1) or self.kernel % 2 == 0:
            raise UserError(f"SnapKV pools over an odd number of rows, but kernel is {self.kernel!r}.")
        if self.pool not in ("avg", "max"):
            raise UserError(f"SnapKV pools by 'avg' or 'max', but pool is {self.pool!r}.")

    def __call__(self, rows: Rows) -> jax.Array:
        before = rows.index < rows.lengths[:, None] - self.window
        found = jnp.where(before, weights(rows), 0.0)
        reduce = jax.lax.add if self.pool == "avg" else jax.lax.max
        return jax.lax.reduce_window(found, jnp.float32(0), reduce, (1, self.kernel), (1, 1), "SAME")


@dataclasses.dataclass(frozen=True)
class ExpectedAttention:
    """Attention that queries to come will pay, were they normal with the moments of those seen (2510.00636; kvpress).

    z = μ·k·scale + ½ kᵀΣk·scale², with μ and Σ under the mean rotation of the next positions; softmax over the rows
    but the sinks, which stay anyway; the mean over the query heads of the group; times ‖v‖.

    Attributes:
      frequencies: RoPE's, see `kvjax.eviction.rotation`; None for those of the model that the engine runs.
      factor: RoPE's factor on cos and sin.
      interleaved: whether RoPE's pairs are (2i, 2i + 1).
      sinks: first rows left out.
      future: positions ahead of `Rows.next` that are averaged over.
      covariance: whether Σ counts.
      value_norm: whether the result is multiplied by ‖v‖.
      epsilon: added before that.
      scale: of the softmax; None is H^−½.

    Raises:
      UserError: frequencies are empty, or future is not a number of positions.
    """

    frequencies: Frequencies | None = None
    factor: float = 1.0
    interleaved: bool = False
    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.frequencies == ():
            raise UserError("Expected attention needs the frequencies of the model's RoPE.")
        if not is_count(self.future, 1):
            raise UserError(f"Expected attention looks at future={self.future!r} positions, but at least 1 is needed.")

    def __call__(self, rows: Rows) -> jax.Array:
        K, _, H = rows.keys.shape
        scale = jnp.float32(H**-0.5 if self.scale is None else self.scale)
        keys = rows.keys.astype(jnp.float32)
        mean, covariance = self._ahead(rows)
        z = jnp.einsum("kgh,ksh->gks", mean.reshape(K, -1, H), keys, precision="highest") * scale
        if self.covariance:
            grouped = covariance.reshape(K, -1, H, H).swapaxes(0, 1)
            # One query head of each group at a time: all at once would take N·S·H floats.
            spread = jax.lax.map(
                lambda c: jnp.sum(jnp.einsum("ksh,khj->ksj", keys, c, precision="highest") * keys, -1), grouped
            )
            z += spread * (scale * scale * 0.5)
        counted = rows.held & (rows.index >= self.sinks)
        share = jax.nn.softmax(jnp.where(counted[None], z, -1e30), axis=-1)
        expected = jnp.mean(share, axis=0)
        return (expected + self.epsilon) * _norm(rows.values) if self.value_norm else expected

    def _ahead(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Mean (N, H) and covariance (N, H, H) of the queries, turned as the positions to come will turn them."""
        assert rows.moments is not None
        if self.frequencies is None:
            raise ValueError("Expected attention has no frequencies: outside of the engine, give those of the model.")
        cos, sin = (x * self.factor for x in mean_rotation(self.frequencies, rows.next, self.future))

        def turn(x: jax.Array) -> jax.Array:
            shape = (*x.shape[:-1], cos.shape[-1])
            return rotate(x, jnp.broadcast_to(cos, shape), jnp.broadcast_to(sin, shape), self.interleaved)

        covariance = turn(turn(rows.moments.covariance).swapaxes(1, 2)).swapaxes(1, 2)
        return turn(rows.moments.mean), covariance
