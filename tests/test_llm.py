"""The façade on a tiny checkpoint: what goes in, what comes out, what is refused."""

import dataclasses
from typing import Any

import golden_models
import jax
import numpy as np
import pytest
from engines import goldens

import kvjax
from kvjax.errors import ModelError, RequestError
from kvjax.job import Report

NAME = "tiny_llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return golden_models.write_checkpoint(NAME, tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def llm(folder):
    return kvjax.load(folder, rows=8)


def test_texts_ids_and_conversations(llm):
    golden = goldens(NAME)
    ids = golden["prompt_0"]
    want = tuple(golden["greedy_0"][:12].tolist())
    fields = {"max_new_tokens": 12, "ignore_eos": True}
    for prompt in (ids, ids.tolist(), tuple(ids.tolist())):
        completion = llm.generate(prompt, **fields)
        assert completion.tokens == want and completion.prompt_tokens == tuple(ids.tolist())
        assert completion.text == llm.tokenizer.decode(want) and completion.finish_reason == "length"
    many = llm.generate([ids, golden["prompt_1"], "ab"], **fields)
    assert [c.tokens for c in many[:2]] == [want, tuple(golden["greedy_1"][:12].tolist())]
    assert many[2].prompt_tokens == tuple(llm.tokenizer.encode("ab"))
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = llm.generate(messages, **fields)
    assert one.prompt_tokens == tuple(llm.tokenizer.encode(text, add_special_tokens=False))
    assert llm.generate([messages, messages], **fields) == [one, one]
    assert llm.generate([], **fields) == []


def test_stream_equals_generate(llm):
    prompt = goldens(NAME)["prompt_2"]
    for fields in ({}, {"temperature": 0.9, "seed": 3}, {"stop": ["e", "ab"]}, {"min_new_tokens": 4, "stop": "a"}):
        fields = {"max_new_tokens": 40, **fields}
        pieces = list(llm.stream(prompt, **fields))
        assert "".join(pieces) == llm.generate(prompt, **fields).text
        assert all(pieces)


def test_stop_strings_are_cut_from_the_text(llm):
    prompt = goldens(NAME)["prompt_2"]
    text = llm.generate(prompt, max_new_tokens=40, ignore_eos=True).text
    stop = text[7:10]
    cut = llm.generate(prompt, max_new_tokens=40, ignore_eos=True, stop=[stop])
    assert cut.text == text[: text.find(stop)] and cut.finish_reason == "stop"


def test_stop_strings_match_before_a_leading_space_is_stripped(llm, monkeypatch):
    """As SentencePiece tokenizers strip it: the device matches the bytes of the tokens."""
    monkeypatch.setattr(llm.tokenizer, "strips_space", True)
    space = llm.tokenizer.encode(" ")[0]
    fields = {"max_new_tokens": 6, "ignore_eos": True, "logit_bias": {space: 1000.0}}
    assert llm.generate("a", **fields).text == " " * 5
    for stop, text in (("  ", ""), ("    ", "")):
        cut = llm.generate("a", stop=stop, **fields)
        assert (cut.text, cut.finish_reason, len(cut.tokens)) == (text, "stop", len(stop))
        assert "".join(llm.stream("a", stop=stop, **fields)) == text


def test_numpy_numbers_are_parameters(llm):
    fields = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": np.uint32(1), "ignore_eos": True}
    assert len(llm.generate(np.asarray([5, 6]), **fields).tokens) == 3


def test_samples_logprobs_and_a_seed(llm):
    prompt = goldens(NAME)["prompt_1"]
    completion = llm.generate(prompt, max_new_tokens=6, temperature=3.0, n=3, seed=5, logprobs=2)
    assert len({s.tokens for s in completion.samples}) == 3 and completion.tokens == completion.samples[0].tokens
    again = llm.generate(prompt, max_new_tokens=6, temperature=3.0, n=3, seed=5)
    assert [s.tokens for s in again.samples] == [s.tokens for s in completion.samples]
    first = completion.logprobs[0]
    raw = goldens(NAME)["last_1"].astype(np.float64)
    logprob = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
    assert first.chosen == pytest.approx(logprob[completion.tokens[0]], abs=1e-4)
    assert list(first.top) == np.argsort(-raw)[:2].tolist()
    np.testing.assert_allclose(list(first.top.values()), np.sort(logprob)[::-1][:2], atol=1e-4)


def test_reports_count_the_job(llm):
    reports: list[Report] = []
    llm.generate([[5, 6, 7]] * 3, max_new_tokens=5, ignore_eos=True, on_report=reports.append)
    assert sum(len(r.finished) for r in reports) == 3
    assert reports[-1].computed + reports[-1].hit == 3 * (3 + 5 - 1)  # the last token is sampled, not computed
    assert reports[-1].waiting == 0 and reports[-1].preempted == 0


@pytest.mark.parametrize(("shape", "layers"), [((2,), "unrolled"), ((8,), "scanned")], ids=str)
def test_parameters_over_a_mesh_give_the_same_tokens(folder, llm, layers, shape):
    """kv heads (2), heads (6), ffw (160) and vocabulary (320): what 8 does not divide is replicated."""
    mesh = jax.make_mesh(shape, ("model",))
    sharded = kvjax.load(folder, mesh=mesh, rows=8, layers=layers)
    embed = sharded.model.params["embed"]
    assert embed.sharding.shard_shape(embed.shape) == (320 // shape[0], 96)
    prompts = [goldens(NAME)[f"prompt_{i}"] for i in range(3)]
    want = [c.tokens for c in llm.generate(prompts, max_new_tokens=24)]
    assert [c.tokens for c in sharded.generate(prompts, max_new_tokens=24)] == want


def test_bfloat16_parameters_and_pages(folder):
    llm = kvjax.load(folder, dtype="bfloat16", rows=8)
    assert llm.model.storage == "bfloat16" and llm.model.params["embed"].dtype == jax.numpy.bfloat16
    prompt, raw = goldens(NAME)["prompt_1"], goldens(NAME)["last_1"].astype(np.float64)
    found = llm.generate(prompt, max_new_tokens=1, logprobs=0, ignore_eos=True)
    logprob = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
    assert found.logprobs[0].chosen == pytest.approx(logprob[found.tokens[0]], abs=0.15)  # 8-bit mantissas


@pytest.mark.parametrize(
    "prompt, fields, message",
    [
        ("", {}, "The prompt is empty"),
        ([], {}, None),
        ([5, 999], {}, "token id 999: the model's vocabulary has 0 to 319"),
        ([5, -1], {}, "token id -1"),
        ([[5.5]], {}, "A prompt of type list cannot be read"),
        ([None], {}, "A prompt of type NoneType cannot be read"),
        ([{"content": "x"}], {}, "role"),
        ([5] * 250, {"max_new_tokens": 10}, "250 tokens and max_new_tokens 10 exceed the context of 256"),
        ([5], {"temprature": 1.0}, "did you mean temperature"),
        ([5], {"top_p": 2.0}, "top_p is 2.0"),
        ([5], {"stop": ""}, "empty string"),
        ([5], {"n": 10**9}, "n is 1000000000"),
        ([5], {"temperature": 10**400}, "temperature is 1"),
        ([5], {"temperature": 1e39}, "temperature is 1e[+]39"),
        ([5], {"stop": "\ufffd"}, "U[+]FFFD"),
        ([5], {"seed": -1}, "seed is -1: give a whole number from 0"),
        ([5], {"seed": "a"}, "seed is 'a'"),
        (b"abc", {}, "Prompts of type bytes cannot be read"),
        (5, {}, "Prompts of type int cannot be read"),
        (None, {}, "Prompts of type NoneType cannot be read"),
        ({"role": "user", "content": "x"}, {}, "Prompts of type dict cannot be read"),
        (np.int32(5), {}, "Prompts of type int32 cannot be read"),
        ({5, 6}, {}, "Prompts of type set cannot be read"),
        ([[True, False]], {}, "A prompt of type list cannot be read"),
        ([b"abc"], {}, "A prompt of type bytes cannot be read"),
    ],
)
def test_refuses_requests(llm, prompt, fields, message):
    if message is None:
        assert llm.generate(prompt) == []
        return
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, **fields)


def test_refuses_mismatched_parameters(llm):
    with pytest.raises(RequestError, match="2 prompts and 1 sampling parameters"):
        llm.generate([[5], [6]], [kvjax.SamplingParams()])
    with pytest.raises(RequestError, match="give a SamplingParams, or a list of one for each prompt"):
        llm.generate([[5], [6]], [{"n": 1}, None])
    with pytest.raises(RequestError, match="given twice"):
        llm.generate([5], kvjax.SamplingParams(), top_k=3)
    with pytest.raises(RequestError, match="n is 2, and a stream has one sample"):
        llm.stream([5], n=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": "folded"}, "layers is 'folded'"),
        ({"dtype": "int99"}, "dtype 'int99' is not implemented"),
        ({"kv_dtype": "int3"}, "cannot be stored as 'int3'"),
        ({"context": -1}, "context is -1"),
        ({"slotz": 3}, "load does not take slotz"),
        ({"slots": 0}, "slots is 0"),
        ({"rows": "many"}, "rows is 'many'"),
        ({"backend": "cuda"}, "backend is 'cuda': give one of None, reference, xla, tpu, tpu_interpret"),
        ({"layout": "flat"}, "layout is 'flat': give one of None, head_major, token_major, joined"),
        ({"segment_seconds": -1}, "segment_seconds is -1"),
        ({"mesh": 5}, "mesh is 5: give a jax.sharding.Mesh"),
    ],
)
def test_load_refuses_options(folder, options, message):
    with pytest.raises(ModelError, match=message):
        kvjax.load(folder, **options)


def test_a_smaller_context_is_kept(folder):
    llm = kvjax.load(folder, context=20)
    assert llm.context == 20
    with pytest.raises(RequestError, match="exceed the context of 20 tokens"):
        llm.generate([5] * 15, max_new_tokens=6)
    assert len(dataclasses.astuple(llm.generate([5] * 15, max_new_tokens=5, ignore_eos=True).samples[0])[1]) == 5


def test_equal_beginnings_are_computed_once_and_salts_keep_apart(llm):
    shared = goldens(NAME)["prompt_0"].tolist()
    shared = (shared * 40)[:40]
    prompts = [[*shared, 5 + i] for i in range(6)]
    alone = [llm.generate(prompt, max_new_tokens=6) for prompt in prompts]
    together = llm.generate(prompts, max_new_tokens=6)
    assert together == alone
    assert [c.samples[0].cached_tokens for c in together] == [0, 40, 40, 40, 40, 40]
    assert [c.samples[0].cached_tokens for c in alone] == [0] * 6
    salted = [llm.requests(prompt, kvjax.SamplingParams(max_new_tokens=6), i, salt=str(i % 2))[0]
              for i, prompt in enumerate(prompts)]  # fmt: skip
    found = {o.request.index: o for report in llm.run(salted) for o in report.finished}
    assert [found[i].cached_tokens for i in range(6)] == [0, 0, 40, 40, 40, 40]
    assert [found[i].tokens for i in range(6)] == [c.tokens for c in alone]


def test_samples_of_a_prompt_fork_it(llm):
    prompt = goldens(NAME)["prompt_1"].tolist()[:21]
    params: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    forked = llm.generate(prompt, n=4, **params)
    assert [s.cached_tokens for s in forked.samples] == [0, *[len(prompt) - 1] * 3]  # all but the last token
    assert len({s.tokens for s in forked.samples}) == 4
    apart = kvjax.LLM(llm.model, llm.tokenizer, dataclasses.replace(llm.options, share_prefixes=False))
    assert apart.generate(prompt, n=4, **params) == forked


def test_completions_of_a_generator_in_order_or_as_they_finish(llm):
    lengths = [30, 3, 12, 5]
    prompts = [[10 + i] * 7 for i in range(4)]
    want = [llm.generate(prompt, max_new_tokens=9, ignore_eos=True) for prompt in prompts]
    found = list(llm.completions(iter(prompts), max_new_tokens=9, ignore_eos=True))
    assert found == list(enumerate(want))
    params = [kvjax.SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
    narrow = kvjax.LLM(llm.model, llm.tokenizer, dataclasses.replace(llm.options, slots=2, segment_seconds=1e-6))
    groups = [narrow.requests(prompt, p, i) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    order = [i for i, _ in narrow._completions(groups, 0, False, None)]
    assert sorted(order) == [0, 1, 2, 3] and order.index(1) < order.index(0)
    with pytest.raises(RequestError, match="token id 9999"):
        list(llm.completions(iter([[5], [9999]]), max_new_tokens=2))
