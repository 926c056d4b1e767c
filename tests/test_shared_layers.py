"""Layers that read another layer's rows: a Llama of which every second layer has none of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import outputs, requests, tiny, tokens
from test_coded import PROMPTS, assert_greedy
from test_mesh import mesh_of, over

from kvjax import cache as kv_cache
from kvjax import plans, storages
from kvjax.cache import CacheConfig
from kvjax.embedding import dense_attend
from kvjax.errors import RequestError
from kvjax.eviction import Budget, named
from kvjax.eviction_rule import Eviction
from kvjax.planner import memory
from kvjax.planner.memory import Job
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams
from kvjax.types import KVSpec

GREEDY = SamplingParams(max_new_tokens=16)
SHARES = {1: 0}
"""Of the three layers of tiny_llama."""


def sharing(storage: str = "float32") -> Model:
    """tiny_llama, whose second layer reads the first one's rows."""
    model = tiny("tiny_llama")

    def kv_specs(config, storage):
        specs = model.family.kv_specs(config, storage)
        return tuple(dataclasses.replace(spec, shares=SHARES.get(i)) for i, spec in enumerate(specs))

    def forward(params, config, ids, positions, cache, attend):
        def shared(cache, layer, q, k, v, scale, **features):
            k, v = (None, None) if layer in SHARES else (k, v)
            return attend(cache, layer, q, k, v, scale, **features)

        return model.family.forward(params, config, ids, positions, cache, shared)

    family = model.family._replace(kv_specs=kv_specs, forward=forward)
    return dataclasses.replace(model, family=family, storage=storages.resolve(storage, "float32"))


def test_bytes_are_those_of_the_layers_that_have_rows():
    specs = sharing().family.kv_specs(sharing().config, "float32")
    config = CacheConfig(specs, 2, 16, 4)
    assert [config.places_of(layer) for layer in range(3)] == [((0, 0),), ((0, 0),), ((0, 1),)]
    cache = jax.eval_shape(lambda: kv_cache.init(config))
    assert len(cache.groups[0].kv.k) == 2 and specs[1].row_bytes == 0
    assert sum(x.size * 4 for x in jax.tree.leaves(cache.groups[0].kv)) == config.kv_bytes
    job = Job(specs, (), sharing().config, "float32", 16, "token_major", 64)
    assert memory.bytes_per_token(specs) == 2 * specs[0].row_bytes
    assert job.groups == {specs[0]: 2} and job.readers == {specs[0]: 3}


@pytest.mark.parametrize(
    "storage", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "kivi4/int4:recent=32"))]
)
def test_tokens_are_those_of_plain_arrays(storage):
    model = sharing(storage)
    found = tokens(model, PROMPTS, GREEDY, packed=16, slots=2, rows=32)
    if storage != "int8":  # which the plain arrays do not know
        assert_greedy(model, PROMPTS, found)
    assert [list(outputs(model, [request], rows=32)[0].tokens) for request in requests(PROMPTS, GREEDY)] == found
    assert found != tokens(tiny("tiny_llama"), PROMPTS, GREEDY, rows=32)


@pytest.mark.slow
def test_over_chips():
    model = sharing()
    want = tokens(model, PROMPTS, GREEDY, packed=64)
    assert tokens(over(model, mesh_of(seq=2, model=2)), PROMPTS, GREEDY, packed=64) == want


def test_without_a_cache():
    """The forward pass of embeddings, which has no pages, sees the same rows."""
    model, ids = sharing(), jnp.asarray(PROMPTS[1][:16], jnp.int32)
    specs, positions = model.family.kv_specs(model.config, "float32"), jnp.arange(16, dtype=jnp.int32)
    attend = dense_attend(specs, jnp.asarray([16], jnp.int32), 16, causal=True)
    _, hidden = model.family.forward(model.params, model.config, ids, positions, None, attend)
    logits = model.family.unembed(model.params, model.config, hidden)
    [[first]] = tokens(model, [PROMPTS[1][:16]], SamplingParams(max_new_tokens=1))
    assert int(np.asarray(logits)[-1].argmax()) == first


def test_what_does_not_go_is_said():
    model = dataclasses.replace(sharing(), eviction=Eviction(named("knorm"), Budget(rows=8)))
    with pytest.raises(RequestError, match="Rows that several layers share are not evicted so far"):
        plans.cache_config(model, 1, 32, Options(), 16)
    config = CacheConfig((KVSpec(1, 4, 4, storage="float32"), KVSpec(1, 4, 4, storage="float32", shares=0)), 1, 4, 1)
    x = jnp.zeros((1, 1, 4))
    with pytest.raises(ValueError, match="layer 0 has no k, or a spec that shares"):
        kv_cache.attend(config, None, None, 0, x, None, None, 1.0)  # type: ignore[arg-type]
