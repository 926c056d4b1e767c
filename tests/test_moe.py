"""Mixture of experts: routing by its definition, the grouped product against every expert computed for every token."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import sharding
from kvjax.models import moe
from kvjax.models.moe import Routing


def dense_oracle(x, weights, expert, gate, up, down):
    """Every expert for every token, in float64; then the chosen ones."""
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    hidden = np.einsum("td,edf->etf", x, gate)
    hidden = hidden / (1 + np.exp(-hidden)) * np.einsum("td,edf->etf", x, up)
    out = np.einsum("etf,efd->etd", hidden, down)
    return sum(weights[:, c, None] * out[expert[:, c], np.arange(len(x))] for c in range(expert.shape[1]))


def build(T, E, D=12, F=20, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (T, D), (E, D, F), (E, D, F), (E, F, D)
    return [rng.standard_normal(shape).astype(np.float32) / 3 for shape in shapes]


@pytest.mark.parametrize("T, E, C", [(1, 8, 2), (5, 3, 3), (64, 4, 1), (300, 5, 2), (7, 60, 6)])
def test_mixture_is_the_weighted_sum(T, E, C):
    x, gate, up, down = build(T, E)
    rng = np.random.default_rng(1)
    expert = np.stack([rng.permutation(E)[:C] for _ in range(T)]).astype(np.int32)
    weights = rng.random((T, C)).astype(np.float32)
    experts = {"gate": gate, "up": up, "down": down}
    mixture = jax.jit(moe.mixture, static_argnames="compute")
    got = mixture(x, weights, expert, experts, compute=moe.swiglu_experts)
    np.testing.assert_allclose(got, dense_oracle(x, weights, expert, gate, up, down), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=6, max_size=6), st.integers(0, 2**16))
def test_grouped_dot_for_any_group_sizes(sizes, seed):
    """Empty groups, one group of all, groups across blocks; both implementations."""
    sizes = np.asarray(sizes, np.int32)
    rng = np.random.default_rng(seed)
    A = 240  # one shape, one compilation; rows beyond the groups may be anything
    x, weight = rng.standard_normal((A, 9)).astype(np.float32), rng.standard_normal((6, 9, 5)).astype(np.float32)
    group = np.repeat(np.arange(6), sizes)
    want = np.einsum("ai,aio->ao", x[: len(group)].astype(np.float64), weight[group].astype(np.float64))
    for grouped in (moe.grouped_dot, moe._ragged):
        np.testing.assert_allclose(jax.jit(grouped)(x, weight, sizes)[: len(group)], want, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_around_it():
    x, gate, up, down = map(jnp.asarray, build(40, 6))
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((40, 6)), jnp.float32)

    def run(rows):
        weights, expert = moe.route(logits[rows], Routing(6, 2, normalize=True))
        return moe.mixture(x[rows], weights, expert, {"gate": gate, "up": up, "down": down}, moe.swiglu_experts)

    rows = jnp.arange(40)
    np.testing.assert_array_equal(run(rows)[17:21], run(rows[::-1])[40 - 21 : 40 - 17][::-1])


def test_routing_weights():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 0.0]], jnp.float32)
    p = np.exp([1.0, 3.0, 2.0, 0.0]) / np.exp([1.0, 3.0, 2.0, 0.0]).sum()
    cases = {
        Routing(4, 2): p[[1, 2]],
        Routing(4, 2, normalize=True): p[[1, 2]] / p[[1, 2]].sum(),
        Routing(4, 2, "softmax of chosen"): p[[1, 2]] / p[[1, 2]].sum(),
        Routing(4, 2, "sigmoid", scale=2.5): 2.5 / (1 + np.exp([-3.0, -2.0])),
    }
    for routing, want in cases.items():
        weights, expert = moe.route(logits, routing)
        assert expert.tolist() == [[1, 2]]
        np.testing.assert_allclose(weights[0], want, rtol=1e-6)


def test_routing_by_groups():
    """The best experts are those of the best groups, by their best expert or by their best two."""
    logits = jnp.asarray([[9.0, -9.0, 2.0, 2.0, 3.0, -9.0]], jnp.float32)  # groups of two
    _, by_max = moe.route(logits, Routing(6, 2, groups=3, kept_groups=1))
    assert by_max.tolist() == [[0, 1]]
    two = Routing(6, 2, "sigmoid", groups=3, kept_groups=1, group_score="top 2")
    _, by_two = moe.route(logits, two)
    assert by_two.tolist() == [[2, 3]]
    correction = jnp.asarray([0, 0, -5, -5, 0, 0], jnp.float32)
    weights, corrected = moe.route(logits, two, correction)
    assert corrected.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights[0], 1 / (1 + np.exp([-9.0, 9.0])), rtol=1e-4)  # scores without correction


def test_experts_divided_over_a_mesh():
    """Each part computes its own experts' tokens: the same sums, and no weight of an expert is gathered."""
    x, gate, up, down = map(jnp.asarray, build(40, 8))
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((40, 8)), jnp.float32)
    weights, expert = moe.route(logits, Routing(8, 3, normalize=True))
    args = (x, weights, expert, {"gate": gate, "up": up, "down": down})
    mesh = sharding.automatic(jax.make_mesh((4, 2), ("expert", "model")))

    def mixture(x, weights, expert, experts):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return moe.mixture(x, weights, expert, experts, moe.swiglu_experts)

    specs = {"gate": P("expert", None, "model"), "up": P("expert", None, "model"), "down": P("expert", "model")}
    placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), args, (P(), P(), P(), specs))
    compiled = jax.jit(mixture).lower(*placed).compile()
    np.testing.assert_allclose(compiled(*placed), moe.mixture(*args, compute=moe.swiglu_experts), atol=1e-5)
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", compiled.as_text() or "")
    assert not [shape for shape in gathered if shape.startswith("8,")]  # the leading axis of a whole set of experts
