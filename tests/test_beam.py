"""Beam search: transformers' outputs and scores, from pages that beams share; `cache.reparent` against a dict."""

import collections
import dataclasses
import functools
import json
import re
from typing import Any

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GOLDENS, goldens, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_program import copies_as_large_as

import kvjax
from kvjax import beam, cache, pages
from kvjax.cache import CacheConfig
from kvjax.errors import RequestError
from kvjax.plans import Options
from kvjax.types import KVSpec

GOLDEN = json.loads((GOLDENS / "beam.json").read_text())
STEPS = GOLDEN["steps"]


def cases(name: str, **fields: Any) -> list[dict[str, Any]]:
    return [c for c in GOLDEN["models"][name]["cases"] if all(c[field] == value for field, value in fields.items())]


def prompts(name: str) -> list[list[int]]:
    return GOLDEN["models"][name]["prompts"]


def searched(name: str, case: dict[str, Any], **options: Any) -> list[list[beam.Hypothesis]]:
    asked = {field: case[field] for field in ("eos", "length_penalty", "early_stopping")}
    options = {"rows": 8, **options}
    return beam.run(tiny(name), prompts(name), case["width"], STEPS, Options(**options), **asked)


def assert_golden(found: list[list[beam.Hypothesis]], case: dict[str, Any]) -> None:
    for row, want in zip(found, case["outputs"], strict=True):
        assert [list(h.tokens) for h in row] == [output["tokens"] for output in want], case
        # A negative penalty multiplies the sums, and their rounding, by the length.
        atol = 1e-4 * STEPS ** max(0.0, -case["length_penalty"])
        np.testing.assert_allclose([h.score for h in row], [o["score"] for o in want], atol=atol, rtol=0)
        for h in row:
            assert h.finish_reason == ("stop" if h.tokens[-1] in case["eos"] else "length")


# --- what transformers finds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width"),
    [(name, width) for name in GOLDEN["models"] for width in (1, 3, 5) if width == 3 or name == "tiny_llama"],
)
def test_outputs_and_scores_are_those_of_transformers(name, width):
    """Length penalties of 0.5, 1 and 2 and more, early stopping or not; prompts of 21 and 9 tokens in one search."""
    assert GOLDEN["models"][name]["checksum"] == golden_models.checksum(name), "other weights: make the goldens again"
    compared = [case for case in cases(name, width=width) if len(case["eos"]) > 1]
    assert {c["length_penalty"] for c in compared} >= {0.5, 1.0, 2.0} and {True, False} <= {
        c["early_stopping"] for c in compared
    }
    ended = [o["tokens"][-1] in c["eos"] for c in compared for row in c["outputs"] for o in row]
    assert any(ended) and (width == 1 or not all(ended))
    compiled: Any = beam.search
    before = compiled._cache_size()
    for case in compared:
        assert_golden(searched(name, case), case)
    assert compiled._cache_size() - before <= 1  # penalties and rules are no part of the program


@pytest.mark.parametrize("ends", [0, 1])
def test_one_end_of_sequence_token_or_none(ends):
    (case,) = [case for case in cases("tiny_llama", width=3) if len(case["eos"]) == ends]
    assert_golden(searched("tiny_llama", case), case)


@pytest.mark.parametrize("options", [{"rows": 1, "packed": 8}, {"rows": 32, "slots": 1}], ids=str)
def test_outputs_do_not_depend_on_pages_chunks_and_company(options):
    case = cases("tiny_llama", width=3, length_penalty=0.5, early_stopping=True)[0]
    assert_golden(searched("tiny_llama", case, **options), case)


def test_a_search_in_just_enough_memory():
    """The prompts run one after the other; a page less is refused."""
    case = cases("tiny_llama", width=5, length_penalty=1.0, early_stopping=False)[0]
    model = tiny("tiny_llama")
    config = CacheConfig(model.family.kv_specs(model.config, "float32"), 5, 8, 8)
    needed = beam.pages_for(config, 21, STEPS, 5)
    assert needed == 2 + 5 * 3 + 2
    assert_golden(searched("tiny_llama", case, kv_bytes=needed * config.page_bytes), case)
    with pytest.raises(
        RequestError, match=r"5 beams of a prompt of 21 tokens and up to 20 .* raise kv_bytes, or lower"
    ):
        searched("tiny_llama", case, kv_bytes=needed * config.page_bytes - 1)


# --- pages -----------------------------------------------------------------------------------------------------------


@functools.cache
def long_search(poison: bool = False) -> tuple[beam.Plan, beam.Search, list[list[beam.Hypothesis]]]:
    """8 beams of prompts of 160 and 43 tokens; with `poison`, every page that nothing is written to holds NaN."""
    model, rng = tiny("tiny_mistral"), np.random.default_rng(3)
    asked = [rng.integers(4, 320, length).tolist() for length in (160, 43)]
    shapes = beam.plan(model, asked, 8, 16, Options(rows=8))
    program, state = beam.begin(model, shapes, asked, beam.rules(16, (), 1.0))
    if poison:
        kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.pages_of(state.cache))
        state = state.replace(cache=cache.with_pages(state.cache, kv))
    state = beam.search(program, model.params, state, packed=shapes.packed)
    return shapes, state, beam.finished(state, ())


def test_prompts_are_computed_and_stored_once():
    shapes, state, found = long_search()
    assert not state.starved and all(len(row) == 8 for row in found)
    # All 15 tokens that a beam of 16 passes on; each prompt once, not 8 times.
    assert int(state.stats.computed) == 160 + 43 + 2 * 8 * 15
    rows = shapes.cache.rows
    dense = sum(8 * -(-(prompt + 15) // rows) for prompt in (160, 43))
    peak = int(state.stats.peak)
    assert dense == 240
    assert 20 + 6 <= peak <= sum(beam.pages_for(shapes.cache, prompt, 16, 8) for prompt in (160, 43))
    assert peak <= 58  # 20 + 5 full pages of the prompts, and at most 2 a beam of what follows


def test_all_pages_are_free_after_a_search():
    shapes, state, _ = long_search()
    for group in state.cache.groups:
        assert int(group.pool.height) == shapes.cache.pool_pages
        assert sorted(group.pool.free.tolist()) == list(range(shapes.cache.pool_pages))
        assert not group.pool.refs.any() and not group.table.lengths.any()


def test_at_most_one_page_is_copied_a_fork():
    _, state, _ = long_search()
    assert 0 < int(state.stats.copied) <= int(state.stats.forks)


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    model = tiny("tiny_mistral")
    shapes = beam.plan(model, [[5] * 16], 8, 16, Options(rows=1))
    program, state = beam.begin(model, shapes, [[5] * 16], beam.rules(16, (), 1.0))
    state = beam.search(program, model.params, state, packed=shapes.packed)
    assert int(state.stats.forks) > 7 and int(state.stats.copied) == 0


def test_nan_in_free_pages_reaches_no_score():
    """Nor do the rows behind a beam's end, which are copied with its page."""
    _, _, clean = long_search()
    _, _, poisoned = long_search(poison=True)
    assert poisoned == clean and np.isfinite([h.score for row in clean for h in row]).all()


def test_too_few_pages_end_a_search():
    """Only a Plan written by hand has too few; the state says so, and the pages are free."""
    model = tiny("tiny_mistral")
    shapes = beam.plan(model, [[5] * 31], 8, 16, Options(rows=1))
    shapes = dataclasses.replace(shapes, cache=dataclasses.replace(shapes.cache, pages=30))
    for length in (16, 31):  # while beams go on, and while the prompt is computed
        program, state = beam.begin(model, shapes, [[5] * length], beam.rules(16, (), 1.0))
        state = beam.search(program, model.params, state, packed=shapes.packed)
        assert state.starved and int(state.cache.groups[0].pool.height) == 30


def test_the_loop_copies_no_cache():
    model = tiny("tiny_llama")
    shapes = beam.plan(model, [[5] * 16], 4, 16, Options(rows=16))
    shapes = dataclasses.replace(shapes, cache=dataclasses.replace(shapes.cache, pages=1024))
    program, state = beam.begin(model, shapes, [[5] * 16], beam.rules(16, (), 1.0))
    compiled = beam.search.lower(program, model.params, state, packed=shapes.packed).compile()
    kv = jax.tree.leaves(cache.pages_of(state.cache))
    assert copies_as_large_as(compiled.as_text() or "", min(x.size for x in kv)) == []
    memory: Any = compiled.memory_analysis()
    held = sum(x.size * 4 for x in kv)
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 4


W, ROWS, COLUMNS = 4, 3, 8
SPECS = (KVSpec(1, 2, 2, storage="float32"), KVSpec(1, 2, 2, window=4, storage="float32"))
BEAMS = CacheConfig(SPECS[:1], W, ROWS, COLUMNS, pages=64)


@jax.jit
def begun(prompt, height):
    """A prompt of so many tokens in slot 0, forked to all slots, and `height` pages in all."""
    c = cache.init(BEAMS)
    (group,) = c.groups
    c = cache.Cache((group.replace(pool=group.pool.replace(height=height)),))
    zero = jnp.int32(0)
    first = jnp.where(jnp.arange(W) == 0, prompt, 0)
    reserved = cache.reserve(BEAMS, c, None, first, zero, zero, zero > 0, ROWS * COLUMNS)
    return cache.reparent(BEAMS, reserved.cache, jnp.zeros((W,), jnp.int32), zero), reserved.starved.any()


@jax.jit
def went_on(c, source):
    zero = jnp.int32(0)
    c = cache.reparent(BEAMS, c, source, zero)
    reserved = cache.reserve(BEAMS, c, None, jnp.ones((W,), jnp.int32), zero, zero, zero > 0, W)
    return reserved.cache, reserved.starved.any()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 11),
    st.lists(st.lists(st.integers(0, W - 1), min_size=W, max_size=W), min_size=1, max_size=12),
)
def test_pages_for_is_enough_whatever_the_beams_do(prompt, choices):
    most = beam.pages_for(BEAMS, prompt, len(choices) + 1, W)
    c, starved = begun(jnp.int32(prompt), jnp.int32(most))
    assert not starved
    for source in choices:
        c, starved = went_on(c, jnp.asarray(source, jnp.int32))
        assert not starved


# --- reparent against a dict -----------------------------------------------------------------------------------------

CONFIG = CacheConfig(SPECS, slots=4, rows=2, pages_per_slot=4, pages=14)
MOST = 8


@jax.jit
def reparent(c, source, step):
    moved = cache.reparent(CONFIG, cache.with_pages(c, [None, None]), source, step)  # K and V are not even there
    return cache.with_pages(moved, cache.pages_of(c))


@jax.jit
def reserve(c, tokens, step):
    reserved = cache.reserve(CONFIG, c, None, tokens, step, step, jnp.bool_(False), MOST)
    return reserved.cache, reserved.starved


@jax.jit
def end(c, ended):
    zero = jnp.int32(0)
    return cache.release(CONFIG, c, None, ended, zero, zero, lambda slot, column: slot)[0]


@jax.jit
def keep(c, page, step):
    """Another owner of one page in every group, as the prefix index is."""
    return cache.Cache(
        tuple(g.replace(pool=pages.share(g.pool, p[None], step)) for g, p in zip(c.groups, page, strict=True))
    )


def tables(c: cache.Cache) -> list[dict[int, list[int]]]:
    """For every group: slot → the pages that it holds, in order."""
    return [
        {
            slot: np.asarray(group.table.pages)[slot, : -(-length // CONFIG.rows)].tolist()
            for slot, length in enumerate(group.table.lengths.tolist())
        }
        for group in c.groups
    ]


class BeamMachine(RuleBasedStateMachine):
    """Slots grow, end and take each other's pages; owners are counted in a plain Counter a group."""

    @initialize()
    def start(self):
        self.cache, self.step = cache.init(CONFIG), 0
        self.lengths = [0] * CONFIG.slots
        self.tables: list[dict[int, list[int]]] = [{slot: [] for slot in range(CONFIG.slots)} for _ in SPECS]
        self.kept: list[list[int]] = [[] for _ in SPECS]

    @rule(tokens=st.lists(st.integers(0, 3), min_size=CONFIG.slots, max_size=CONFIG.slots))
    def grow(self, tokens):
        tokens = [min(t, CONFIG.capacity - length) for t, length in zip(tokens, self.lengths, strict=True)]
        while sum(tokens) > MOST:
            tokens[tokens.index(max(tokens))] -= 1
        self.step += 1
        self.cache, starved = reserve(self.cache, jnp.asarray(tokens, jnp.int32), jnp.int32(self.step))
        full = [length // CONFIG.rows for length in self.lengths]
        self.lengths = [
            length if short else length + t
            for length, t, short in zip(self.lengths, tokens, starved.tolist(), strict=True)
        ]
        found = tables(self.cache)
        for old, new in zip(self.tables, found, strict=True):
            for slot, pages_held in new.items():
                assert pages_held[: full[slot]] == old[slot][: full[slot]]  # full pages are never copied
        self.tables = found

    @rule(source=st.lists(st.integers(0, CONFIG.slots - 1), min_size=CONFIG.slots, max_size=CONFIG.slots))
    def change_hands(self, source):
        self.step += 1
        self.cache = reparent(self.cache, jnp.asarray(source, jnp.int32), jnp.int32(self.step))
        self.lengths = [self.lengths[s] for s in source]
        self.tables = [{slot: list(table[s]) for slot, s in enumerate(source)} for table in self.tables]

    @rule(source=st.permutations(range(CONFIG.slots)))
    def swap(self, source):
        self.change_hands(source)

    @rule(ended=st.lists(st.booleans(), min_size=CONFIG.slots, max_size=CONFIG.slots))
    def finish(self, ended):
        self.cache = end(self.cache, jnp.asarray(ended))
        for slot, gone in enumerate(ended):
            if gone:
                self.lengths[slot] = 0
                for table in self.tables:
                    table[slot] = []

    @rule(slot=st.integers(0, CONFIG.slots - 1))
    def keep_first_page(self, slot):
        if self.lengths[slot] and len(self.kept[0]) < 2:
            self.step += 1
            first = [table[slot][0] for table in self.tables]
            self.cache = keep(self.cache, tuple(map(jnp.int32, first)), jnp.int32(self.step))
            for kept, page in zip(self.kept, first, strict=True):
                kept.append(page)

    @invariant()
    def agrees(self):
        assert tables(self.cache) == self.tables
        for group, table, kept in zip(self.cache.groups, self.tables, self.kept, strict=True):
            assert group.table.lengths.tolist() == self.lengths
            owners = collections.Counter(kept + [page for held in table.values() for page in held])
            assert group.pool.refs.tolist() == [owners[page] for page in range(CONFIG.pool_pages)]
            free = group.pool.free[: int(group.pool.height)].tolist()
            assert sorted(free) == [page for page in range(CONFIG.pool_pages) if not owners[page]]


BeamMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestReparent = BeamMachine.TestCase


def test_two_slots_swap_in_one_call():
    c, _ = reserve(cache.init(CONFIG), jnp.asarray([3, 1, 0, 0], jnp.int32), jnp.int32(1))
    moved = reparent(c, jnp.asarray([1, 0, 2, 3], jnp.int32), jnp.int32(2))
    for old, new in zip(tables(c), tables(moved), strict=True):
        assert (new[0], new[1]) == (old[1], old[0]) and new[2] == new[3] == []
    for old, new in zip(c.groups, moved.groups, strict=True):
        assert new.pool.refs.tolist() == old.pool.refs.tolist() and int(new.pool.height) == int(old.pool.height)


# --- the façade ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return kvjax.load(golden_models.write_checkpoint("tiny_llama", tmp_path_factory.mktemp("beam") / "m"), rows=8)


def test_width_one_is_greedy(llm):
    asked = [goldens("tiny_llama")[f"prompt_{i}"].tolist() for i in range(2)]
    greedy = llm.generate(asked, max_new_tokens=16)
    for found, want in zip(llm.beam_search(asked, 1, max_new_tokens=16), greedy, strict=True):
        assert (found.tokens, found.text, found.finish_reason) == (want.tokens, want.text, want.finish_reason)
        assert found.prompt_tokens == want.prompt_tokens


def test_n_best_of_one_prompt(llm):
    (case,) = [case for case in cases("tiny_llama", width=3) if not case["eos"]]
    prompt, want = prompts("tiny_llama")[0], case["outputs"][0]
    found = llm.beam_search(prompt, 3, n=2, max_new_tokens=STEPS, ignore_eos=True)
    assert [list(sample.tokens) for sample in found.samples] == [output["tokens"] for output in want[:2]]
    assert [sample.score for sample in found.samples] == pytest.approx([o["score"] for o in want[:2]], abs=1e-4)
    assert found.text == llm.tokenizer.decode(found.tokens) and found.finish_reason == "length"
    assert llm.generate(prompt, max_new_tokens=1).samples[0].score is None
    assert llm.beam_search([], 3) == []


def test_parameters_over_a_mesh_and_scanned_layers(llm, tmp_path):
    folder, mesh = golden_models.write_checkpoint("tiny_llama", tmp_path), jax.make_mesh((2,), ("model",))
    found = kvjax.load(folder, rows=8, mesh=mesh, layers="scanned").beam_search([5, 6, 7], 3, max_new_tokens=16)
    want = llm.beam_search([5, 6, 7], 3, max_new_tokens=16)
    assert found.tokens == want.tokens and found.samples[0].score == pytest.approx(want.samples[0].score, abs=1e-5)


@pytest.mark.slow
def test_example_of_the_docs(capsys, monkeypatch):
    text = (GOLDENS.parents[1] / "docs" / "sampling.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.setattr(kvjax, "load", functools.partial(kvjax.load, layers="scanned"))  # compiles faster
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["-0.574", "length"], ["-0.594", "length"]]
    shown = re.search(r"each with `(.*?)`", text)
    assert shown and all(shown[1] in line for line in lines)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"width": 0}, "width is 0: give a whole number of beams, at least 1"),
        ({"width": True}, "width is True"),
        ({"width": 2, "n": 3}, "n is 3, and a search of width 2 finds 2"),
        ({"n": 0}, "n is 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 9}, "length_penalty is 9: give a number from -8 to 8"),
        ({"length_penalty": "1"}, "length_penalty is '1'"),
        ({"early_stopping": "always"}, "early_stopping is 'always': give False, True or 'never'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 255}, "exceed the context of 256 tokens"),
        ({"width": 10**6}, "kv_bytes is 4294967296, and 1000000 beams of a prompt of 2 tokens"),
    ],
)
def test_refuses(llm, fields, message):
    with pytest.raises(RequestError, match=message):
        llm.beam_search([5, 6], **{"max_new_tokens": 200, **fields})
