"""Which rows stay: against kvpress and the authors' own classes (scripts/make_eviction_goldens.py), and as properties."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import eviction
from kvjax.errors import UserError
from kvjax.eviction import Budget, Policy, Rows, rotation
from kvjax.models.positions import Rope, apply_rope, cos_sin, inverse_frequencies, rope_table

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = np.load(ROOT / "tests" / "goldens" / "eviction.npz")
LAYERS, N, K, S, H, WINDOW = 3, 4, 2, 72, 16, 8
RATIOS = (0.3, 0.5, 0.75)
ROPE = Rope("default", 10_000.0, H)
FREQUENCIES = tuple(inverse_frequencies(ROPE, S)[0].tolist())


# --- the rows of the golden model -----------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@functools.cache
def attention(layer: int) -> np.ndarray:
    """Causal weights (N, S, S) of the golden model's queries, in float64."""
    positions = jnp.arange(S)
    q = apply_rope(jnp.asarray(GOLDEN["queries"][layer]).swapaxes(0, 1), *cos_sin(rope_table(ROPE, S), positions))
    keys = np.repeat(GOLDEN["keys"][layer], N // K, axis=0).astype(np.float64)
    z = np.einsum("tnh,nsh->nts", np.asarray(q, np.float64), keys) * H**-0.5
    return softmax(np.where(np.tri(S, dtype=bool), z, -np.inf))


def golden_rows(policy: Policy, layer: int) -> Rows:
    watched = {"none": S, "all": 0, "last": S - 1}.get(
        policy.watch, S - int(str(policy.watch)) if isinstance(policy.watch, int) else 0
    )
    weights = attention(layer)[:, watched:].sum(1).reshape(K, N // K, S).mean(1)
    seen = np.tri(S, dtype=np.int32)[watched:].sum(0)
    queries = jnp.asarray(GOLDEN["queries"][layer]).swapaxes(0, 1)
    moments = eviction.no_moments(N, H)
    for chunk in (slice(0, 30), slice(30, S)):
        moments = eviction.add_queries(moments, queries[chunk], jnp.arange(S)[chunk] >= policy.sinks)
    return Rows(
        keys=jnp.asarray(GOLDEN["keys"][layer]),
        values=jnp.asarray(GOLDEN["values"][layer]),
        lengths=jnp.full(K, S, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(S), (K, S)),
        next=jnp.int32(S),
        weights=jnp.asarray(weights, jnp.float32),
        seen=jnp.broadcast_to(jnp.asarray(seen), (K, S)),
        moments=moments,
    )


POLICIES = {
    "streaming": eviction.named("streaming"),
    "tova": eviction.named("tova"),
    "snapkv": eviction.named("snapkv", window=WINDOW),
    "observed": eviction.named("observed"),
    "knorm": eviction.named("knorm"),
    "keydiff": eviction.named("keydiff"),
    "expected_attention": eviction.named("expected_attention", frequencies=FREQUENCIES),
    "expected_attention_mean": eviction.named(
        "expected_attention", frequencies=FREQUENCIES, future=64, sinks=2, covariance=False, value_norm=False
    ),
}


@functools.cache
def compiled(most: int | None = None):
    return jax.jit(eviction.select, static_argnums=(0,), static_argnames=("most",))


@pytest.mark.parametrize("name", POLICIES)
def test_kept_rows_are_those_of_kvpress(name):
    policy = POLICIES[name]
    for layer in range(LAYERS):
        rows = golden_rows(policy, layer)
        for ratio in RATIOS:
            kept, counts = compiled()(policy, rows, Budget(share=1 - ratio).count(S))
            expected = GOLDEN[f"{name}/{ratio}/{layer}"]
            assert counts.tolist() == [expected.shape[1]] * K
            np.testing.assert_array_equal(kept[:, : expected.shape[1]], expected, err_msg=f"{ratio} {layer}")
            assert np.all(kept[:, expected.shape[1] :] == S)


def test_pyramid_keeps_the_rows_of_kvpress():
    policy = POLICIES["snapkv"]
    for ratio in RATIOS:
        counts = eviction.pyramid(Budget(share=1 - ratio), S, LAYERS, window=WINDOW)
        for layer in range(LAYERS):
            kept, _ = compiled()(policy, golden_rows(policy, layer), counts[layer])
            expected = GOLDEN[f"pyramid/{ratio}/{layer}"]
            np.testing.assert_array_equal(kept[:, : int(counts[layer])], expected)


def test_pyramid_counts_are_those_of_kvpress():
    for (n, ratio, layers, window, beta), expected in zip(
        GOLDEN["pyramid_cases"], GOLDEN["pyramid_counts"], strict=True
    ):
        counts = eviction.pyramid(Budget(share=1 - ratio), int(n), int(layers), int(window), int(beta))
        np.testing.assert_array_equal(counts, expected[: int(layers)], err_msg=f"{n} {ratio} {layers} {window} {beta}")


@pytest.mark.parametrize("name", ["snapkv", "knorm", "expected_attention"])
def test_adakv_keeps_the_rows_of_kvpress(name):
    policy = POLICIES[name]
    for layer in range(LAYERS):
        rows = golden_rows(policy, layer)
        for ratio in RATIOS:
            count = Budget(share=1 - ratio).count(S)
            counts = jax.jit(eviction.adakv, static_argnums=0)(policy, rows, count)
            mask = eviction.kept_mask(policy, rows, counts)
            expected = np.unpackbits(GOLDEN[f"adakv_{name}/{ratio}/{layer}"], axis=1)[:, :S]
            assert int(counts.sum()) == K * int(count)
            np.testing.assert_array_equal(mask, expected.astype(bool), err_msg=f"{ratio} {layer}")
