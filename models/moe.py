"""Mixture of experts, dropless: a router chooses C of E experts for every token, and tokens are computed expert by
expert as one grouped product. T tokens, A = T·C assignments, D model, F ffw of an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax.models.layers import full_precision
from kvjax.types import Params, ParamSpec

AXIS = "expert"
"""The mesh axis over which experts are divided, as `kvjax.sharding.RULES` has it."""
BLOCK = 64  # most rows of one expert that the loop of `_by_blocks` multiplies at once


@dataclasses.dataclass(frozen=True)
class Routing:
    """How scores become weights.

    Attributes:
      experts: E.
      chosen: C, experts a token.
      score: "softmax" over all experts (Mixtral, Qwen3, DeepSeek-V2), "softmax of chosen" (gpt-oss) or "sigmoid"
        (DeepSeek-V3).
      normalize: whether the weights of the chosen experts are divided by their sum.
      scale: of the weights.
      groups: of consecutive experts, from the best of which experts are chosen.
      kept_groups: how many groups those are.
      group_score: "max" of the group's scores (DeepSeek-V2), or "top 2", their sum (DeepSeek-V3).
    """

    experts: int
    chosen: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"


def route(logits: jax.Array, routing: Routing, correction: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Chooses experts.

    Args:
      logits: (T, E) float32.
      routing: how.
      correction: (E,) float32, added to the scores for the choice, not to the weights (DeepSeek-V3).

    Returns:
      weights (T, C) float32 and experts (T, C) int32, the best first.
    """
    if routing.score == "softmax of chosen":
        best, expert = jax.lax.top_k(logits, routing.chosen)
        return jax.nn.softmax(best, axis=-1) * routing.scale, expert
    scores = jax.nn.sigmoid(logits) if routing.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    merit = scores if correction is None else scores + correction[None].astype(jnp.float32)
    if routing.groups > 1:
        merit = jnp.where(_kept(merit, routing), merit, -jnp.inf)
    _, expert = jax.lax.top_k(merit, routing.chosen)
    weights = jnp.take_along_axis(scores, expert, axis=-1)
    if routing.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * routing.scale, expert


def _kept(merit: jax.Array, routing: Routing) -> jax.Array:
    """(T, E) bool: whether an expert's group is among the best."""
    T, E = merit.shape
    grouped = merit.reshape(T, routing.groups, -1)
    best, _ = jax.lax.top_k(grouped, 2 if routing.group_score == "top 2" else 1)
    _, group = jax.lax.top_k(best.sum(axis=-1), routing.kept_groups)
    kept = (group[:, :, None] == jnp.arange(routing.groups)[None, None, :]).any(axis=1)
    return jnp.repeat(kept, E // routing.groups, axis=1)


def mixture(
    x: jax.Array, weights: jax.Array, expert: jax.Array, experts: Params, compute: Callable[..., jax.Array]
) -> jax.Array:
    """The weighted sum of what its experts make of each token.

    Within an abstract mesh whose axis `expert` divides E, each of its parts computes the tokens of its own experts, and
    the parts are added up; otherwise a compiler would gather all experts' weights on every chip.

    Args:
      x: (T, D).
      weights: (T, C) float32.
      expert: (T, C) int32.
      experts: their parameters, each with a leading axis E.
      compute: (experts, rows (A, D) ordered by expert, `dot`, `pick`) → (A, D), where `dot(rows (A, i), weight
        (E, i, o))` → (A, o) multiplies each row by its expert's matrix, and `pick(bias (E, o))` → (A, o) gives it its
        expert's bias.

    Returns:
      (T, D) in x's dtype. A row's arithmetic does not depend on the rows around it.
    """
    mesh, E = jax.sharding.get_abstract_mesh(), jax.tree.leaves(experts)[0].shape[0]
    parts = mesh.shape.get(AXIS, 1)
    if parts == 1 or E % parts:
        return _of_experts(x, weights, expert, experts, compute).astype(x.dtype)

    def part(x: jax.Array, weights: jax.Array, expert: jax.Array, experts: Params) -> jax.Array:
        first = jax.lax.axis_index(AXIS) * (E // parts)
        return jax.lax.psum(_of_experts(x, weights, expert - first, experts, compute), AXIS)

    everywhere = PartitionSpec()
    divided = jax.shard_map(
        part,
        mesh=mesh,
        axis_names={AXIS},
        in_specs=(everywhere, everywhere, everywhere, PartitionSpec(AXIS)),
        out_specs=everywhere,
        check_vma=False,
    )
    return divided(x, weights, expert, experts).astype(x.dtype)


def _of_experts(
    x: jax.Array, weights: jax.Array, expert: jax.Array, experts: Params, compute: Callable[..., jax.Array]
) -> jax.Array:
    """(T, D) float32: the sum over those of the chosen experts that are among `experts`, numbered from 0."""
    (T, C), count = expert.shape, jax.tree.leaves(experts)[0].shape[0]
    flat = expert.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)  # those of others stand last, in no group
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros((count,), jnp.int32).at[flat].add(1, mode="drop")
    of_row = flat[order]
    ours = jnp.minimum(of_row, count - 1)
    out = compute(experts, x[order // C], lambda rows, w: grouped_dot(rows, w, sizes), lambda bias: bias[ours])
    out = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    out = jnp.where((of_row < count)[:, None], out, 0)  # rows in no group may be anything
    return jnp.zeros_like(out).at[order].set(out).reshape(T, C, -1).sum(axis=1)


def swiglu_experts(experts: Params, rows: jax.Array, dot: Callable, pick: Callable) -> jax.Array:
    """`compute` of `mixture` for SwiGLU experts: gate and up (E, D, F), down (E, F, D)."""
    return dot(jax.nn.silu(dot(rows, experts["gate"])) * dot(rows, experts["up"]), experts["down"])


def grouped_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times the matrix of its group: x (A, i) ordered by group, weight (E, i, o), sizes (E,) int32 → (A, o).

    `jax.lax.ragged_dot`, but on CPU, where JAX expands it to E times the work, a loop over blocks of rows.
    """
    return jax.lax.platform_dependent(x, weight, sizes, cpu=_by_blocks, default=_ragged)


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    y = jax.lax.ragged_dot(x, weight, sizes, precision=full_precision(x), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _by_blocks(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """One product a block of up to `BLOCK` rows of one group, in order.

    A block's rows beyond its group are the first of the next ones, which overwrite them.
    """
    A, E = x.shape[0], weight.shape[0]
    rows = min(BLOCK, max(1, 1 << (A // E).bit_length()))
    blocks = (sizes + rows - 1) // rows
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    padded = jnp.concatenate([x, jnp.zeros((rows, x.shape[1]), x.dtype)])

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(ends, i, side="right", method="compare_all").astype(jnp.int32)
        start = starts[group] + (i - (ends - blocks)[group]) * rows
        part = jax.lax.dynamic_slice_in_dim(padded, start, rows)
        own = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        y = jnp.matmul(part, own, precision=full_precision(x), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(x.dtype), start, 0)

    out = jnp.zeros((A + rows, weight.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, ends[-1], body, out)[:A]


def expert_specs(experts: int, width: int, ffw: int, name: str, gate: str, up: str, down: str) -> dict[str, ParamSpec]:
    """Parameters of SwiGLU experts that a checkpoint holds one by one.

    Args:
      experts: E.
      width: D.
      ffw: F of an expert.
      name: of an expert's module, "{e}" standing for its number.
      gate: name of its gate projection.
      up: of its up projection.
      down: of its down projection.
    """

    def spec(module: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        names = tuple(f"{name.format(e=e)}.{module}.weight" for e in range(experts))
        return ParamSpec((experts, *shape), ("experts", *axes), names, transpose=True)

    return {
        "gate": spec(gate, (width, ffw), ("width", "ffw")),
        "up": spec(up, (width, ffw), ("width", "ffw")),
        "down": spec(down, (ffw, width), ("ffw", "width")),
    }
