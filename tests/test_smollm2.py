"""The default model against Hugging Face transformers on the same weights: logits of 5 prompts, tokens of 20."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import goldens

import kvjax
from kvjax import cache, engine, plans
from kvjax.cache import CacheConfig, Placement

GOLDEN = goldens("smollm2")


@pytest.fixture(scope="module")
def llm():
    return kvjax.load(layers="scanned")  # compiles faster; the tiny models compare both forms


def all_logits(llm, ids) -> np.ndarray:
    """(T, V): the whole prompt in one step through the paged cache."""
    model, T = llm.model, len(ids)
    pages = -(-T // 64)
    config = CacheConfig(model.family.kv_specs(model.config, "float32"), 1, 64, pages, stacked=True)
    program = plans.program_of(model, config)
    now, tokens = jnp.int32(0), jnp.asarray([T], jnp.int32)
    reserved = cache.reserve(config, cache.init(config), None, tokens, now, now, jnp.bool_(False), T)
    assert not reserved.starved.any()
    starts = jnp.asarray([0, T], jnp.int32)
    placement = Placement(jnp.zeros((T,), jnp.int32), jnp.arange(T, dtype=jnp.int32), starts, T)
    _, hidden = engine.compute(program, model.params, reserved.cache, jnp.asarray(ids, jnp.int32), placement)
    return np.asarray(program.unembed(model.params, model.config, hidden))


@pytest.mark.parametrize("i", GOLDEN["logit_prompts"].tolist())
def test_logits(llm, i):
    logits = all_logits(llm, GOLDEN[f"prompt_{i}"])
    want = GOLDEN[f"columns_{i}"]
    scale = np.abs(want).max()
    assert np.abs(logits[:, GOLDEN["columns"]] - want).max() <= 1e-4 * scale
    assert (logits.argmax(axis=1) == GOLDEN[f"argmax_{i}"]).all()
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    logsumexp = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    np.testing.assert_allclose(logsumexp, GOLDEN[f"logsumexp_{i}"], rtol=1e-4)
    if f"last_{i}" in GOLDEN:
        assert np.abs(logits[-1] - GOLDEN[f"last_{i}"]).max() <= 1e-4 * np.abs(GOLDEN[f"last_{i}"]).max()


def test_greedy_tokens_of_twenty_prompts(llm):
    prompts = [GOLDEN[f"prompt_{i}"] for i in range(20)]
    completions = llm.generate(prompts, max_new_tokens=64, ignore_eos=True)
    for i, completion in enumerate(completions):
        assert completion.tokens == tuple(GOLDEN[f"greedy_{i}"].tolist()), f"prompt {i}"


@pytest.mark.slow
def test_many_prompts_with_pages_for_a_sixth_of_them():
    """Every token as transformers has it, though requests wait for pages and give way to one another."""
    batch = goldens("smollm2_batch")
    steps, greedy = batch["greedy"].shape[1] // 2, batch["greedy"][::2]
    prompts = np.split(batch["prompts"], np.cumsum(batch["lengths"])[:-1])[::2]
    lengths = batch["lengths"][::2]
    assert len(prompts) == 32 and lengths.min() < 30 and lengths.max() >= 400
    rows = 16
    wanted = int((-(-(lengths + steps) // rows)).sum())
    page_bytes = rows * 30 * 2 * 3 * 64 * 4  # 30 layers, K and V of 3 heads of 64, float32
    llm = kvjax.load(layers="scanned", rows=rows, kv_bytes=wanted // 6 * page_bytes, refill=1)
    reports: list[kvjax.job.Report] = []
    completions = llm.generate(prompts, max_new_tokens=steps, ignore_eos=True, on_report=reports.append)
    assert reports[-1].preempted > 0
    for i, completion in enumerate(completions):
        assert completion.tokens == tuple(greedy[i, :steps].tolist()), f"prompt {2 * i}"
