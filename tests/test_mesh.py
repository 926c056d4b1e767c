"""The whole loop over a mesh against the loop on one device: the same tokens, on eight simulated devices."""

import dataclasses
import tempfile
from typing import Any

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import outputs, requests, tiny, tokens
from test_families import model_of, stackable

import kvjax
from kvjax import cache as kv_cache
from kvjax import job, plans, sharding, snapshots
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.checkpoints.place import shapes
from kvjax.pallas_kernels.ring_attention import ring_attention
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams
from kvjax.types import KVSpec, ParamSpec


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(axes.values())))
    return sharding.automatic(jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count]))


def over(model: Model, mesh: jax.sharding.Mesh) -> Model:
    """The same model with its parameters on a mesh."""
    how: Any = {"dtype": model.dtype, "sharding_of": sharding.param_sharding(mesh), "stacked": model.stacked}
    forms = shapes(model.family.abstract(model.config), **how)
    params = jax.tree.map(lambda form, x: jax.device_put(x, form.sharding), forms, model.params)
    return dataclasses.replace(model, params=params, mesh=mesh.abstract_mesh)


def prompts(*lengths: int, seed: int = 0, vocab: int = 250) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, length).tolist() for length in lengths]


def llama() -> Model:
    """Scanned: on eight devices most of the time is compilation."""
    return tiny("tiny_llama", stacked=True)


GREEDY = SamplingParams(max_new_tokens=8)
ASKED = prompts(5, 61, 17, 100, 1)


def assert_same(model: Model, mesh: jax.sharding.Mesh, **options) -> None:
    want = tokens(model, ASKED, GREEDY, packed=64, **options)
    assert tokens(over(model, mesh), ASKED, GREEDY, packed=64, **options) == want


def test_sequences_dealt_over_chips_and_heads_divided():
    assert_same(llama(), mesh_of(seq=2, model=2))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"seq": 8}, {"seq": 4, "model": 2}, {"data": 2, "seq": 2, "model": 2}], ids=str)
def test_meshes_of_eight(axes):
    assert_same(llama(), mesh_of(**axes))


@pytest.mark.slow
def test_prompts_go_round_the_ring(monkeypatch):
    """The first step's prompts pass K and V on, later ones their queries; of codes, too."""
    monkeypatch.setattr(kv_cache, "RING", 8)
    calls = []

    def counted(*args, **features):
        calls.append(args[0].shape)
        return ring_attention(*args, **features)

    monkeypatch.setattr(kv_cache, "ring_attention", counted)
    assert_same(llama(), mesh_of(seq=4), slots=4)
    assert_same(dataclasses.replace(llama(), storage="int8"), mesh_of(seq=2, model=2), slots=4)
    assert {shape[0] for shape in calls} == {16, 32}


FAMILIES = [
    ("gemma2", {"seq": 4, "model": 2}),  # two groups, soft cap
    ("deepseek_v3", {"seq": 2, "expert": 2, "model": 2}),  # latent rows, experts
    ("gpt_oss", {"seq": 2, "expert": 2, "model": 2}),  # learned sinks
    ("bloom", {"seq": 4, "model": 2}),  # ALiBi
    ("mixtral", {"data": 2, "expert": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_families(name, axes):
    assert_same(model_of(name, stacked=stackable(name)), mesh_of(**axes))


@pytest.mark.slow
def test_fewer_kv_heads_than_chips():
    """2 kv heads over 6 chips: each is held by three, which divide its queries."""
    model, mesh = llama(), mesh_of(model=6)
    assert model.config.kv_heads == 2 and model.config.heads == 6
    config = plans.cache_config(over(model, mesh), 4, 64, Options(rows=8))
    spec = config.groups[0]
    assert (config.on_chip(spec).kv_heads, config.parts_of(spec)) == (1, 6)
    assert_same(model, mesh)


@pytest.mark.slow
def test_the_kernels_on_each_chip():
    """The TPU's, interpreted: joined rows of the heads of each chip."""
    model, options = llama(), {"backend": "tpu_interpret", "layout": "joined", "rows": 8}
    asked = prompts(5, 40)
    short = SamplingParams(max_new_tokens=3)
    want = tokens(model, asked, short, packed=32)
    assert tokens(over(model, mesh_of(seq=2, model=2)), asked, short, packed=32, **options) == want


@pytest.mark.slow
def test_sampling_prefixes_and_preemption():
    """Pages of 4 rows on each of 2 chips and little memory: shared beginnings, copies, preemption; random tokens."""
    model, mesh = llama(), mesh_of(seq=2, model=2)
    common = prompts(40, seed=3)[0]
    asked = [[*common, 9 + i] for i in range(6)] + prompts(30, 50, seed=4)
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, n=1)
    page = plans.cache_config(over(model, mesh), 1, 8, Options(rows=4)).page_bytes
    want = tokens(model, asked, sampling, rows=8)
    found = outputs(over(model, mesh), requests(asked, sampling), rows=4, slots=4, kv_bytes=13 * page)
    assert [list(output.tokens) for output in found] == want
    assert sum(output.preempted for output in found) > 0 and sum(output.cached_tokens for output in found) >= 5 * 40


@pytest.mark.slow
def test_engines_share_the_work():
    """data=2: two engines, each with its own line; requests go where least is to do, and each counts what it did."""
    model, mesh = llama(), mesh_of(data=2)
    asked = requests(prompts(*[6, 30] * 6), SamplingParams(max_new_tokens=6))
    want = {(r.index, r.sample): o.tokens for r, o in zip(asked, outputs(model, asked), strict=True)}
    running = job.Job(over(model, mesh), Options(slots=2, rows=8, queue=4, segment_seconds=0.05))
    seen = np.zeros(2, int)
    found = {}
    for report in job.drive(running, asked):
        found.update({(o.request.index, o.request.sample): o.tokens for o in report.finished})
        seen = np.maximum(seen, running._seen["computed"])
    assert found == want
    assert seen.min() > 0.6 * seen.max() > 0
    assert running.statistics()["computed"] == seen.sum() == sum(len(r.prompt) + 5 for r in asked)


def test_a_mesh_lays_k_and_v_out_as_planned():
    config = CacheConfig((KVSpec(4, 16, 16, None, "float32"),) * 2, 2, 32, 4, seq=4, model=2, query_heads=8)
    mesh = mesh_of(seq=4, model=2)
    program = dataclasses.replace(plans.program_of(llama(), config), mesh=mesh.abstract_mesh)
    form = jax.eval_shape(lambda: engine_state.init(program, jnp.zeros((1, 2, 8), jnp.int8), rows=4))
    where: Any = engine_state.shardings(program, form, mesh)
    k, v = form.cache.groups[0].kv.k[0], form.cache.groups[0].kv.v[0]
    places = where.cache.groups[0].kv
    assert (k.shape, v.shape) == ((8, 4, 16, 32), (8, 4, 32, 16))  # (P, K, H, R·4), (P, K, R·4, Hv)
    assert places.k[0].shard_shape(k.shape) == (8, 2, 16, 8)
    assert places.v[0].shard_shape(v.shape) == (8, 2, 8, 16)
    per_chip = sum(2 * x.size * 4 // 8 for x in (k, v))
    assert config.page_bytes * config.pool_pages == per_chip


@pytest.mark.slow
def test_beams_over_chips():
    """Beam search under the same sharding."""
    with tempfile.TemporaryDirectory() as folder:
        golden_models.write_checkpoint("tiny_llama", folder)
        want = kvjax.load(folder, rows=8).beam_search([5, 6, 7], 3, max_new_tokens=12)
        mesh = jax.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
        found = kvjax.load(folder, rows=8, mesh=mesh).beam_search([5, 6, 7], 3, max_new_tokens=12)
    assert [sample.tokens for sample in found.samples] == [sample.tokens for sample in want.samples]
    np.testing.assert_allclose([s.score for s in found.samples], [s.score for s in want.samples], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("after", [{"seq": 2, "model": 2}, {"data": 2, "seq": 2}], ids=str)
def test_snapshots_go_on_over_the_same_mesh_and_over_others(after, tmp_path):
    model, before = llama(), mesh_of(seq=2, model=2)
    asked = requests(prompts(20, 30, 40), SamplingParams(max_new_tokens=30, temperature=0.8))
    want = {o.request.index: o.tokens for o in outputs(model, asked)}
    options = Options(slots=4, rows=8, segment_seconds=1e-6)
    first = job.Job(over(model, before), options)
    for request in asked:
        first.add(request)
    for _ in range(3):
        first.advance()
    snapshots.save(first, tmp_path)
    computed = first.statistics()["computed"]
    second = snapshots.resume(over(model, mesh_of(**after)) if after else model, tmp_path, options)
    exact = after == {"seq": 2, "model": 2}
    assert bool(second.live) == exact and second.statistics()["computed"] == computed
    found = {}
    while second.unfinished:
        found.update({o.request.index: o.tokens for o in second.advance().finished})
    assert found == want


def test_axes_that_a_mesh_lacks_have_size_one():
    mesh = sharding.automatic(jax.make_mesh((2, 4), ("model", "data")))
    assert mesh.axis_names == sharding.MESH_AXES and sharding.sizes(mesh) == {
        "data": 4,
        "seq": 1,
        "expert": 1,
        "model": 2,
    }
    assert mesh.devices[1, 0, 0, 1] == jax.make_mesh((2, 4), ("model", "data")).devices[1, 1]
    spec = ParamSpec((6, 8), ("heads", "width"), ())
    place = sharding.param_sharding(mesh)(spec)
    assert place is not None and place.spec[0] == "model"
