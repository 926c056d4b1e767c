"""Eviction over a mesh against eviction on one device: the same tokens, and on each chip its own heads' pages."""

import dataclasses
from typing import Any

import pytest
from engines import requests, tiny, tokens
from test_evicting import CASES, PROMPTS, READING, SOME, R
from test_families import model_of
from test_mesh import mesh_of, over

from kvjax import job, plans, snapshots
from kvjax.errors import UserError
from kvjax.eviction import Budget, Policy, named
from kvjax.eviction_rule import Eviction
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {"rows": R, "slots": 2, "packed": 16}


def evicting(policy: Policy, model: Model | None = None, **options) -> Model:
    """Scanned, unless a model is given: on several devices most of the time is compilation."""
    budget = Budget(**{key: options.pop(key) for key in ("rows", "share") if key in options})
    model = tiny("tiny_llama", stacked=True) if model is None else model
    return dataclasses.replace(model, eviction=Eviction(policy, budget, **options))


def assert_same(evicts: Model, **axes: int) -> None:
    want = tokens(evicts, PROMPTS, SOME, **OPTIONS)
    assert tokens(over(evicts, mesh_of(**axes)), PROMPTS, SOME, **OPTIONS) == want
    assert tokens(dataclasses.replace(evicts, eviction=None), PROMPTS, SOME, **OPTIONS) != want


def test_engines_that_evict_with_heads_divided():
    policy, options = CASES["h2o, pyramid"]
    assert_same(evicting(policy, **options), data=2, model=2)


ALL = CASES | READING
SLOW = [
    ("by slot", {"model": 2}),
    ("expected", {"model": 2, "expert": 2}),
    ("duo", {"model": 2}),  # heads that keep every row on one chip, not on the other
    ("share, from layer 1 on", {"data": 2, "model": 2}),
    ("observed", {"data": 4}),
    ("tova", {"data": 2}),
    ("snapkv, adakv", {"data": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), SLOW, ids=[name for name, _ in SLOW])
def test_policies(name, axes):
    policy, options = ALL[name]
    assert_same(evicting(policy, **options), **axes)


@pytest.mark.slow
def test_fewer_kv_heads_than_chips():
    """2 kv heads over 6 chips: each is held by three, which evict alike."""
    assert_same(evicting(named("knorm", sinks=1, recent=2), share=0.4, every=5), model=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "gpt_oss"])
def test_families(name):
    """Latents, which every chip holds; learned sinks, beside layers with a window."""
    assert_same(evicting(named("knorm"), model_of(name), rows=9, every=4), model=2)


@pytest.mark.slow
def test_codes_and_the_kernels_on_each_chip():
    """int8 rows with their scales; and the TPU's kernels, interpreted."""
    codes = dataclasses.replace(tiny("tiny_llama", stacked=True), storage="int8")
    assert_same(evicting(named("knorm"), codes, rows=9, every=4), model=2)
    model, asked = evicting(named("knorm"), rows=9, every=4), PROMPTS[:2]
    short = SamplingParams(max_new_tokens=3)
    want = tokens(model, asked, short, packed=16, rows=8)
    options = {"backend": "tpu_interpret", "layout": "joined", "rows": 8}
    assert tokens(over(model, mesh_of(model=2)), asked, short, packed=16, **options) == want


@pytest.mark.slow
def test_memory_is_counted_on_each_chip():
    """Half of the heads' pages on each of two chips; what a job reports at its peak is one chip's."""
    model = evicting(named("h2o"), rows=10, every=4)
    divided = over(model, mesh_of(model=2))
    one, two = (plans.cache_config(m, 2, 64, Options(rows=R, slots=2), 16) for m in (model, divided))
    assert one.kv_bytes == 2 * two.kv_bytes
    peaks = []
    for m in (model, divided):
        reports = list(job.run(m, requests(PROMPTS, SOME), Options(**OPTIONS)))
        peaks.append((reports[-1].peak_pages, reports[-1].peak_bytes))
    # Besides heads' pages there are the tables' own, which count tokens and have no bytes.
    assert peaks[0][1] == 2 * peaks[1][1] > 0

    assert one.head_pages is not None
    page = one.kv_bytes // one.head_pages[0]
    heads = sum(spec.kv_heads for spec in one.specs)
    little = {**OPTIONS, "kv_bytes": page * 9 * heads // 2}
    assert tokens(divided, PROMPTS, SOME, **little) == tokens(model, PROMPTS, SOME, **OPTIONS)


@pytest.mark.slow
def test_a_snapshot_goes_on_over_a_mesh(tmp_path):
    policy, budget = CASES["h2o, pyramid"]
    model = over(evicting(policy, **budget), mesh_of(data=2, model=2))
    options = Options(**OPTIONS, segment_seconds=1e-6)
    running = job.Job(model, options)
    for request in requests(PROMPTS, SOME):
        running.add(request)
    ended = [output for _ in range(5) for output in running.advance().finished]
    snapshots.save(running, tmp_path)
    resumed = snapshots.resume(model, tmp_path, options)
    assert resumed.state is not None
    while resumed.unfinished:
        ended += resumed.advance().finished
    found = {output.request.index: list(output.tokens) for output in ended}
    assert [found[i] for i in range(len(PROMPTS))] == tokens(model, PROMPTS, SOME, **OPTIONS)


def test_says_what_it_cannot_do():
    def refused(policy: Policy, said: str, mesh: dict[str, int], **options) -> None:
        model = over(evicting(policy, rows=9, **options), mesh_of(**mesh))
        with pytest.raises(UserError, match=said):
            plans.cache_config(model, 2, 64, Options(rows=R), 16)

    refused(named("tova"), "'tova' compares heads, which lie on 2 chips", {"model": 2})
    refused(named("knorm"), "AdaKV compares heads, which lie on 2 chips", {"model": 2}, heads="adakv")
    refused(named("h2o"), "'h2o' wants each kv head whole on one chip, and 2 heads lie on 6 chips", {"model": 6})
    refused(named("knorm"), r"dealt over chips \(mesh axis seq\) are not evicted", {"seq": 2})
