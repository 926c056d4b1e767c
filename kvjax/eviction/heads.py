"""AdaKV: one budget divided among the heads of a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax.errors import UserError
from kvjax.eviction.budget import share_of
from kvjax.eviction.policy import Policy
from kvjax.eviction.rows import Rows
from kvjax.eviction.selection import highest, must_stay, scored


def adakv(policy: Policy, rows: Rows, count: jax.Array, floor: float = 0.2) -> jax.Array:
    """Rows to keep of each head: those whose scores are the highest of all heads (AdaKV, 2407.11550; as kvpress).

    Args:
      policy: scores the rows; pass it on to `select` with the counts.
      rows: of one layer and slot.
      count: () int32, the mean over the heads.
      floor: share of `count` that every head keeps, its own highest.

    Returns:
      (K,) int32; the sum is K · count, or all rows held where that is less.

    Raises:
      UserError: the policy keeps heads together or never evicts, or `floor` is not a share.
    """
    if policy.together or policy.score is None:
        reason = "never evicts" if policy.score is None else "keeps the same rows in all heads"
        raise UserError(f"AdaKV divides rows among heads, but eviction policy {policy.name!r} {reason}.")
    if not 0 <= floor <= 1:
        raise UserError(f"AdaKV has floor={floor}, but a share of the budget, from 0 to 1, is needed.")
    found = scored(policy, rows)
    each = jnp.minimum(jnp.broadcast_to(count, rows.lengths.shape), rows.lengths)
    forced = must_stay(policy, rows, each)
    # A head's floor takes in what must stay there, as in kvpress, where those rows have the highest scores.
    safe = jnp.maximum(0, jnp.minimum(share_of(count, floor), rows.lengths) - jnp.sum(forced, axis=1, dtype=jnp.int32))
    sure = forced | highest(found, rows.held & ~forced, safe)
    total = jnp.minimum(count * rows.lengths.shape[0], jnp.sum(rows.lengths, dtype=jnp.int32))
    left = total - jnp.sum(sure, dtype=jnp.int32)
    flat = highest(found.reshape(1, -1), (rows.held & ~sure).reshape(1, -1), left[None])
    return jnp.sum(sure | flat.reshape(sure.shape), axis=1, dtype=jnp.int32)
