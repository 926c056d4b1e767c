"""kvjax.evaluation: scores against transformers' on the tiny models, tasks by what they promise, the command as run."""

import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GOLDENS, goldens, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvjax
from kvjax import RequestError, UserError
from kvjax.cli import app as app_module
from kvjax.cli import main
from kvjax.evaluation import answering, filler, perplexity, report, scoring, tasks, variants
from kvjax.eviction import named
from kvjax.eviction_options import eviction_of
from kvjax.plans import Options

GOLDEN = json.loads((GOLDENS / "perplexity.json").read_text())
PAGES = Options(rows=8)
HEAD = ["kv", "bytes/token", "perplexity", "change", "bits/byte", "needle", "512", "words", "512", "mean"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden_models.write_checkpoint("tiny_llama", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def llm(folder):
    """As the command below loads it, so that one compilation does for both."""
    return kvjax.load(str(folder), context=2048, slots=8, layers="scanned")


@pytest.fixture(autouse=True)
def _no_compile_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_NO_COMPILE_CACHE", "1")


# scoring


def whole(name: str) -> tuple[list[int], np.ndarray]:
    """A prompt of 40 tokens, and the log-probabilities of its last 39 by one pass of transformers."""
    golden = goldens(name)
    prompt, logits = golden["prompt_2"].tolist(), golden["all_2"].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return prompt, logprobs[np.arange(39), prompt[1:]]


@pytest.mark.parametrize(
    "name, chunk, slots",
    [("tiny_llama", 512, 1), ("tiny_llama", 16, 1), ("tiny_llama", 7, 3), ("tiny_mistral", 16, 3)],
)
def test_chunks_give_the_logprobs_of_one_forward_pass(name, chunk, slots):
    prompt, want = whole(name)
    texts = [prompt, prompt[:11], prompt, prompt[:23]]
    found = scoring.logprobs(tiny(name), texts, PAGES, chunk=chunk, slots=slots)
    for text, logprobs in zip(texts, found.logprobs, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, want[: len(text) - 1], rtol=0, atol=3e-5)


def test_logits_exist_for_a_block_of_tokens_at_a_time(monkeypatch):
    prompt, want = whole("tiny_llama")
    monkeypatch.setattr(scoring, "_BLOCK", 12)  # which does not divide 39
    (found,) = scoring.logprobs(tiny("tiny_llama"), [prompt], PAGES, chunk=39).logprobs
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-5)


def test_scanned_layers_score_alike():
    prompt, want = whole("tiny_llama")
    (found,) = scoring.logprobs(tiny("tiny_llama", stacked=True), [prompt], PAGES, chunk=16).logprobs
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-5)


def test_later_chunks_see_what_the_cache_stores():
    prompt, exact = whole("tiny_llama")
    model = tiny("tiny_llama", storage="int8")
    found = {chunk: scoring.logprobs(model, [prompt], PAGES, chunk=chunk).logprobs[0] for chunk in (16, 64)}
    np.testing.assert_allclose(found[16], found[64], rtol=0, atol=1e-4)
    assert 1e-3 < np.abs(found[16] - exact).max() < 0.5


def test_bytes_are_those_of_the_arrays():
    prompt, _ = whole("tiny_llama")
    row = {"float32": 3 * 2 * 2 * 16 * 4, "int8": 3 * 2 * 2 * (16 + 4)}
    for storage, size in row.items():
        model = tiny("tiny_llama", storage=storage)
        found = scoring.logprobs(model, [prompt, prompt[:11]], PAGES, chunk=16)
        assert found.peak == 40 * size and found.allocated == 64 * size  # 5 pages of 8 rows; a table of 8 columns
        assert found.bytes_per_token == size * (40 + 16) / 51
        assert scoring.bytes_per_row(model, PAGES) == size


def test_bytes_of_a_row_are_not_those_of_a_slots_queries():
    """Where rows are evicted, each head notes a position of 4 bytes for each; moments of queries are a slot's."""
    size = 3 * 2 * (2 * 16 * 4 + 4)
    for name in ("knorm", "expected_attention"):
        model = dataclasses.replace(tiny("tiny_llama"), eviction=eviction_of(name, 0.5))
        assert scoring.bytes_per_row(model, PAGES) == size


def test_rows_that_are_held_at_the_end():
    """Of 100 tokens, of which the first 90 are evicted from; heads that keep every row count as what they are."""
    answer = answering.Answer("", 1.0, tokens=100, evicted_at=90)
    assert variants._held(None, answer, 16) == 112
    assert variants._held(eviction_of("knorm", 0.5), answer, 4) == 56  # 45 of 90, and 10
    half = eviction_of(named("duo", heads=((True, False), (False, True)), sinks=2, recent=5), None)
    assert variants._held(half, answer, 4) == (100 + 20) / 2  # 7 of 90, and 10


def drop_half(cache, lengths):
    """Forgets the newer half of the rows, and gives back the pages."""
    groups = []
    for group in cache.groups:
        kept = lengths // 2
        pages, P = group.table.pages, group.pool.free.shape[0]
        spare = (group.table.lengths + 7) // 8 - (kept + 7) // 8
        column = (kept + 7)[0] // 8 + jnp.arange(pages.shape[1], dtype=jnp.int32)
        freed = pages[0].at[column].get(mode="clip")
        place = jnp.where(jnp.arange(pages.shape[1]) < spare[0], group.pool.height + jnp.arange(pages.shape[1]), P)
        pool = group.pool.replace(
            free=group.pool.free.at[place].set(freed, mode="drop"), height=group.pool.height + spare[0]
        )
        groups.append(group.replace(pool=pool, table=group.table.replace(lengths=kept)))
    return cache.replace(groups=tuple(groups))


def test_a_policy_acts_once_at_its_place_and_later_tokens_see_what_is_left():
    prompt, want = whole("tiny_llama")
    model, calls = tiny("tiny_llama"), []

    def after(cache, lengths):
        calls.append(lengths.shape)
        return drop_half(cache, lengths)

    found = scoring.logprobs(model, [prompt], PAGES, chunk=16, after=after, compress_at=32)
    (logprobs,) = found.logprobs
    np.testing.assert_allclose(logprobs[:32], want[:32], rtol=0, atol=3e-5)
    assert calls == [(1,)]  # traced for one chunk, run for one
    # What the last 8 tokens see: the first 16 and themselves, at the positions that they have.
    np.testing.assert_allclose(logprobs[32:], without(model, prompt, 16, 32)[32:], rtol=0, atol=3e-5)
    row = 3 * 2 * 2 * 16 * 4
    assert found.peak == 32 * row and found.bytes_per_token == 24 * row / 40


@pytest.mark.parametrize(("policy", "first", "last"), [("truncate", 16, 32), ("streaming:sinks=3", 3, 19)])
def test_a_model_that_evicts_rows_is_scored_with_what_is_left(policy, first, last):
    prompt, want = whole("tiny_llama")
    model = dataclasses.replace(tiny("tiny_llama"), eviction=eviction_of(policy, 0.5))
    found = scoring.logprobs(model, [prompt], PAGES, chunk=16, compress_at=32)
    (logprobs,) = found.logprobs
    np.testing.assert_allclose(logprobs[:32], want[:32], rtol=0, atol=3e-5)
    np.testing.assert_allclose(logprobs[32:], without(model, prompt, first, last)[32:], rtol=0, atol=3e-5)
    row = 3 * 2 * (2 * 16 * 4 + 4)  # with its position
    assert found.peak == 32 * row and found.bytes_per_token == 24 * row / 40


def without(model, prompt, first, last, since=32):
    """Log-probabilities by a dense forward pass in which tokens ≥ since do not see tokens first … last − 1."""
    n = len(prompt)
    query, key = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
    seen = (key <= query) & ~((query >= since) & (key >= first) & (key < last))

    def attend(cache, layer, q, k, v, scale, **_):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        logits = jnp.einsum("tnh,snh->nts", q, k) * jnp.float32(scale)
        weights = jax.nn.softmax(jnp.where(seen[None], logits, -jnp.inf), axis=-1)
        return cache, jnp.einsum("nts,snh->tnh", weights, v)

    ids, positions = jnp.asarray(prompt, jnp.int32), jnp.arange(n, dtype=jnp.int32)
    _, hidden = model.family.forward(model.params, model.config, ids, positions, None, attend)
    logprobs = jax.nn.log_softmax(model.family.unembed(model.params, model.config, hidden))
    return np.asarray(logprobs)[np.arange(n - 1), prompt[1:]]


def test_after_every_chunk_without_a_place():
    seen = []

    def after(cache, lengths):
        jax.debug.callback(lambda n: seen.append(n.tolist()), lengths)
        return cache

    prompt, _ = whole("tiny_llama")
    scoring.logprobs(tiny("tiny_llama"), [prompt, prompt[:11]], PAGES, chunk=16, slots=2, after=after)
    jax.effects_barrier()
    assert seen == [[16, 11], [32, 11], [40, 11]]


def test_what_cannot_be_scored():
    model = tiny("tiny_llama")
    cases: list[tuple[list[list[int]], dict[str, Any], str]] = [
        ([[5]], {}, "Text 0 has 1 tokens"),
        ([[5] * 257], {}, "context's 256"),
        ([[5] * 9], {"chunk": 0}, "chunk is 0"),
        ([[5] * 9], {"options": Options(rows=8, kv_bytes=7000)}, "raise kv_bytes"),
        ([[5] * 9], {"compress_at": 0}, "compress_at is 0"),
        ([[5] * 9, [5] * 8], {"compress_at": 10}, "no text has so many"),
    ]
    for texts, how, word in cases:
        with pytest.raises(RequestError, match=word):
            scoring.logprobs(model, texts, **{"options": PAGES, **how})
    assert scoring.logprobs(model, []).logprobs == ()


# perplexity


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mistral"])
def test_perplexity_is_that_of_transformers(name):
    ids, model = GOLDEN[name]["ids"], tiny(name)
    for row in GOLDEN[name]["found"][: 3 if name == "tiny_llama" else 2]:
        window, stride = row["window"], row["stride"]
        found = perplexity.perplexity(model, ids, PAGES, window=window, stride=stride, chunk=32, slots=2)
        assert found.tokens == row["tokens"]
        assert found.nats == pytest.approx(row["nats"], rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(row["nats"]), rel=1e-4)
        # A token of this model is one byte.
        assert found.text_bytes == found.tokens
        assert found.bits_per_byte == pytest.approx(row["nats"] / math.log(2), rel=1e-5)


@pytest.mark.slow
def test_the_default_model_on_the_shipped_text():
    golden = GOLDEN["smollm2"]
    loaded, (row,) = kvjax.load(layers="scanned"), golden["found"]
    ids = loaded.tokenizer.encode((pathlib.Path(scoring.__file__).parent / "prose.txt").read_text(encoding="utf-8"))
    assert len(ids) == golden["tokens"]
    found = perplexity.perplexity(loaded.model, ids, window=row["window"], stride=row["stride"])
    assert found.tokens == row["tokens"] and found.nats == pytest.approx(row["nats"], rel=2e-5)


@given(st.integers(2, 300), st.integers(2, 64), st.data())
@settings(deadline=None)
def test_windows_count_each_token_once_with_enough_before_it(tokens, window, data):
    stride = data.draw(st.integers(1, window - 1))
    counted: list[int] = []
    for begin, end, first in perplexity.windows(tokens, window, stride):
        assert 0 < end - begin <= window
        counted += range(first, end)
        assert begin == 0 or first - begin >= window - stride
    assert counted == list(range(1, tokens))


def test_windows_side_by_side_leave_out_their_first_tokens():
    assert list(perplexity.windows(10, 4, 4)) == [(0, 4, 1), (4, 8, 5), (8, 10, 9)]


def test_what_has_no_perplexity():
    model = tiny("tiny_llama")
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        ([1], {"window": 8}, "1 tokens"),
        ([1, 2], {"window": 300}, "2 to 256"),
        ([1, 2], {"window": 8, "stride": 9}, "1 to 8"),
    ]
    for ids, span, word in cases:
        with pytest.raises(RequestError, match=word):
            perplexity.perplexity(model, ids, **{"stride": 4, **span})


# tasks


def count_by(llm, chat=False):
    return lambda task: len(answering.prompt(llm, task, chat=chat).ids)


@pytest.mark.parametrize("kind", tasks.KINDS)
@pytest.mark.parametrize("length, chat", [(1024, False), (4096, True)])
def test_tasks_have_the_length_asked_for_and_the_answers_inside(llm, kind, length, chat):
    count = count_by(llm, chat)
    made = [tasks.make(kind, length, count, sample=i, seed=5) for i in range(3)]
    assert made == [tasks.make(kind, length, count, sample=i, seed=5) for i in range(3)]
    assert len({task.context for task in made}) == len({task.answers for task in made}) == 3
    assert made[0] != tasks.make(kind, length, count, seed=6)
    for task in made:
        assert 0.98 * length <= count(task) <= length
        assert all(answer in task.context for answer in task.answers)
        assert not any(answer in task.start + task.question for answer in task.answers)
        assert task.kind == kind and task.room == tasks.room(kind)


@pytest.mark.parametrize("kind", tasks.PLACED)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_facts_stand_at_their_depth(llm, kind, depth):
    task = tasks.make(kind, 4096, count_by(llm), depth=depth)
    body = task.context.split("\n\n", 1)[1]
    assert body.count(task.answers[0]) == 1
    at = body.index(task.answers[0]) / len(body)
    assert abs(at - depth) < 0.06  # a sentence of 80, or a document of 140 characters, of 3,400


def test_variables_point_to_one_another(llm):
    task = tasks.make("variables", 2048, count_by(llm))
    first, second, third = task.answers
    number = task.question.split("value ")[1].split(",")[0]
    places = [
        task.context.index(f"VAR {name} = {value}.")
        for name, value in ((first, number), (second, f"VAR {first}"), (third, f"VAR {second}"))
    ]
    assert places == sorted(places)


def test_common_words_are_the_most_common(llm):
    for length in (512, 4096):
        task = tasks.make("words", length, count_by(llm))
        listed = task.context.split("\n\n")[1].split(", ")
        often = sorted(set(listed), key=lambda word: -listed.count(word))
        assert set(often[:3]) == set(task.answers)
        assert listed.count(often[2]) >= 2 * listed.count(often[3]) >= 2


def test_the_score_is_the_share_of_answers_in_the_text():
    assert tasks.recall(" 1234567.", ["1234567"]) == 1
    assert tasks.recall("The towns are OSLO and Rome", ["Oslo", "Bergen"]) == 0.5
    assert tasks.recall("12345 67", ["1234567"]) == 0
    assert tasks.recall("", ["a", "b", "c", "d"]) == 0


def test_context_and_question_are_apart(llm):
    task = tasks.make("needle", 512, count_by(llm), depth=0.5)
    for chat in (False, True):
        made = answering.prompt(llm, task, chat=chat)
        text = llm.tokenizer.decode(made.ids, skip_special_tokens=False)
        head = llm.tokenizer.decode(made.ids[: made.context], skip_special_tokens=False)
        assert head.endswith(task.context) and text.endswith(task.start) and task.question in text[len(head) :]
        assert made.compress_at(aware=True) == len(made.ids) and made.compress_at(aware=False) == made.context
    assert text.startswith("<|im_start|>user\n") and "<|im_start|>assistant\n" in text[len(head) :]


def test_names_and_words_differ():
    for words in (filler.WORDS, filler.FIRST_NAMES, filler.LAST_NAMES, filler.TOWNS, filler.TRADES):
        assert len(set(words)) == len(words)
    assert filler.sentences(3, "a") == filler.sentences(5, "a")[:3] != filler.sentences(3, "b")
    assert filler.Dice(1).sample(range(9), 9) == filler.Dice(1).sample(range(9), 9)
    assert sorted(filler.Dice(2).sample(range(9), 9)) == list(range(9))


def test_tasks_that_there_cannot_be(llm):
    for wrong, word in (
        ({"kind": "haystack"}, "no task 'haystack'"),
        ({"length": 40}, "greater length"),
        ({"depth": 1.5}, "depth is 1.5"),
    ):
        with pytest.raises(RequestError, match=word):
            tasks.make(**{"kind": "needle", "length": 512, "count": count_by(llm), **wrong})


# variants


def test_answers_are_those_of_generate(llm):
    made = [tasks.make(kind, 512, count_by(llm)) for kind in ("needle", "middle", "words")]
    found = answering.answers(llm, made)
    params = [kvjax.SamplingParams(max_new_tokens=task.room) for task in made]
    for answer, done in zip(found, llm.generate([answering.prompt(llm, t).ids for t in made], params), strict=True):
        assert answer.text == done.text and answer.tokens == len(done.prompt_tokens) + len(done.tokens)
    # A model that knows: what it says is the answer to one, and not to another.
    told = [
        dataclasses.replace(task, answers=(answer.text, "nobody says this"))
        for task, answer in zip(made, found, strict=True)
    ]
    assert [answer.score for answer in answering.answers(llm, told)] == [0.5, 0.5, 0.5]


def test_a_variant_is_another_storage_of_the_same_model(llm):
    text = GOLDEN["tiny_llama"]["ids"]
    grid = variants.Grid(("needle", "words"), (512,), depths=2, samples=1)
    kinds = [variants.Variant(kv) for kv in ("float32", "int8")]
    exact, coded = variants.measure(llm, kinds, text=text, window=64, stride=24, grid=grid)
    assert exact.perplexity is not None and coded.perplexity is not None
    assert exact.perplexity.nats == pytest.approx(GOLDEN["tiny_llama"]["found"][0]["nats"], rel=1e-5)
    assert 0 < abs(coded.perplexity.nats - exact.perplexity.nats) < 0.02
    assert (exact.row_bytes, coded.row_bytes) == (768, 240)
    assert [(c.kind, c.length, c.depth, c.samples) for c in exact.cells] == [
        ("needle", 512, 0.0, 1), ("needle", 512, 1.0, 1), ("words", 512, None, 1)
    ]  # fmt: skip
    # About 512 tokens of prompt and up to 24 of the answer, in pages of 64 rows
    assert all(768 * 576 / 536 <= c.bytes_per_token < 768 * 576 / 513 for c in exact.cells)
    assert 768 <= exact.bytes_per_token < 768 * 1.1
    # Three tasks at once, each in 9 pages of 64 rows when it ends.
    assert exact.usage is not None and coded.usage is not None
    assert (exact.usage.peak_pages, exact.usage.peak_bytes) == (27, 27 * 64 * 768)
    assert (coded.usage.peak_pages, coded.usage.peak_bytes) == (27, 27 * 64 * 240)
    stored = [report.from_dict(json.loads(json.dumps(one))) for one in report.as_dict([exact, coded])]
    assert report.as_dict(stored) == report.as_dict([exact, coded])
    lines = report.table([exact, coded]).splitlines()
    assert lines[0].split() == HEAD
    assert lines[1].split()[:1] + lines[1].split()[3:4] == ["float32", "+0.00%"] and lines[2].startswith("int8")


def test_the_mean_of_scores_weighs_tasks_alike():
    cells = tuple(
        variants.Cell(kind, 512, None, score, count, (), 1.0) for kind, score, count in (("a", 1.0, 3), ("b", 0.2, 1))
    )
    result = variants.Result(variants.Variant("int8"), None, cells, 1.0)
    assert result.score() == pytest.approx(0.8) and result.score("b") == 0.2 and result.score("c") is None


def test_policies_that_need_no_share_are_compared_once():
    names = [v.name for v in variants.compared(["float32", "int8"], ["knorm", "quest:pages=4"], [0.5, 0.25])]
    assert names == [
        "float32", "int8", "float32 knorm 0.5", "float32 knorm 0.25", "float32 quest:pages=4 1", "int8 knorm 0.5",
        "int8 knorm 0.25", "int8 quest:pages=4 1",
    ]  # fmt: skip


def test_quest_reads_few_pages_behind_the_place(llm):
    """All pages that there are change nothing; three of 8 rows do, and only behind the tokens before the place."""
    text = [(7 * i * i + 3) % 200 + 3 for i in range(96)]

    def found(kv: variants.Variant) -> np.ndarray:
        return scoring.logprobs(kv.of(llm).model, [text], Options(rows=8), chunk=32, compress_at=64).logprobs[0]

    exact, all_pages, few = (
        found(v) for v in (variants.Variant("float32"), *(variants.Variant("float32", p) for p in QUESTS))
    )
    np.testing.assert_allclose(all_pages, exact, atol=1e-4)
    np.testing.assert_allclose(few[:64], exact[:64], atol=1e-4)
    assert np.abs(few[64:] - exact[64:]).max() > 1e-2


QUESTS = "quest:pages=12,dense=0", "quest:pages=3,dense=0"


def test_variants_that_there_are_not(llm):
    for variant, word in (
        (variants.Variant("int3"), "cannot be stored as 'int3'"),
        (variants.Variant("int8", "magic", 0.5), "Eviction policy 'magic' is not one of none, truncate"),
        (variants.Variant("int8", "h2o", 1.5), "share=1.5, but a number above 0 and up to 1"),
        (variants.Variant("int8", "none", 0.5), "Nothing is evicted, and the budget is 0.5"),
    ):
        with pytest.raises(UserError, match=word):
            variants.measure(llm, [variant], text=[1, 2, 3])
    with pytest.raises(RequestError, match="nothing to measure"):
        variants.measure(llm, [variants.Variant("int8")])
    with pytest.raises(RequestError, match="no variants"):
        variants.measure(llm, [], text=[1, 2, 3])
    with pytest.raises(RequestError, match="exceed the context of 2048"):
        variants.measure(llm, [variants.Variant("int8")], grid=variants.Grid(("needle",), (2048,)))


# the command


def invoke(*args):
    result = CliRunner().invoke(app_module.app, ["eval", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_compares_storages(folder, llm, tmp_path):
    out, lines, text = tmp_path / "out.json", tmp_path / "lines.jsonl", tmp_path / "text.txt"
    text.write_text("bado fuga " * 20)
    what = ("--text", text, "--window", 64, "--lengths", "512", "--depths", 2, "--samples", 1, "--kv", "float32,int8")
    how = (folder, "--context", 2048, "--layers", "scanned", "--tasks", "perplexity,needle,words", *what)
    result = invoke(*how, "--json", out, "--lines", lines)
    assert result.exit_code == 0
    # Once more: everything is in the file already.
    written = lines.read_text()
    again = invoke(*how, "--lines", lines)
    assert (again.stdout, again.stderr.count("tasks"), lines.read_text()) == (result.stdout, 0, written)
    assert [json.loads(line)["kv"] for line in written.splitlines()] == ["float32", "int8"]
    head, exact, coded = result.stdout.splitlines()
    assert head.split() == HEAD
    found = json.loads(out.read_text())
    assert found["dtype"] == "float32" and [v["kv"] for v in found["variants"]] == ["float32", "int8"]
    want = perplexity.perplexity(llm.model, llm.tokenizer.encode("bado fuga " * 20), window=64, stride=32)
    assert found["variants"][0]["perplexity"]["nats"] == pytest.approx(want.nats, rel=1e-5)
    assert exact.split()[2] == f"{want.perplexity:.4f}" and coded.split()[0] == "int8"
    assert [(t["task"], t["length"], t["depth"]) for t in found["variants"][1]["tasks"]] == [
        ("needle", 512, 0.0), ("needle", 512, 1.0), ("words", 512, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "args, word",
    [
        (("--tasks", "needles"), "--tasks has 'needles'"),
        (("--kv", "int8,int3"), "cannot be stored as 'int3'"),
        (("--lengths", "1k"), "--lengths has '1k'"),
        (("--text", "/no/such/file"), "/no/such/file cannot be read"),
        (("--json", "/no/such/folder/out.json"), "cannot be written"),
        (("--heatmap", "x.png", "--tasks", "perplexity"), "add needle"),
        (("--lengths", "300"), "exceed the context of 256"),
        (("--window", "300", "--tasks", "perplexity"), "give 2 to 256"),
        (("--window", "16", "--stride", "17", "--tasks", "perplexity"), "give 1 to 16"),
        (("--samples", "0"), "samples"),
    ],
)
def test_bad_input_is_one_sentence(folder, args, word):
    result = invoke(folder, *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and word in result.stderr


def test_texts_that_are_none(folder, tmp_path):
    path = tmp_path / "text"
    for data, word in ((b"\xff\xfe\xfa", "give UTF-8"), (b" \n", "is empty")):
        path.write_bytes(data)
        result = invoke(folder, "--text", path)
        assert result.exit_code == 2 and word in result.stderr


def test_lines_of_another_file(folder, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"settings": 1}\n{"a": 2}\n')
    result = invoke(folder, "--tasks", "perplexity", "--window", 16, "--lines", path)
    assert result.exit_code == 2 and f"Line 2 of {path} is no result of kvjax eval" in result.stderr


def test_plots_need_matplotlib(folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke(folder, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 2 and "pip install 'kvjax[plot]'" in result.stderr


def test_plots(tmp_path):
    results = []
    for kv, size in (("float32", 768.0), ("int8", 240.0)):
        cells = tuple(
            variants.Cell("needle", length, depth, depth / 2, 2, ("", ""), size)
            for length in (512, 1024)
            for depth in (0.0, 1.0)
        )
        results.append(variants.Result(variants.Variant(kv), None, cells, size))
    for draw in (report.plot, report.heat_map):
        path = tmp_path / "plot.png"
        draw(results, path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    with pytest.raises(RequestError, match="no middle tasks"):
        report.heat_map(results, path, "middle")


def test_interrupted(folder, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(variants, "measure", interrupt)
    assert main(["eval", str(folder), "--tasks", "perplexity"]) == 130
