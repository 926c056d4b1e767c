"""Embeddings against Hugging Face transformers, and the dense attention that decoders' embeddings come from."""

import io
import json
import pathlib
import re
import shutil
import sys
from typing import Any

import golden_embeddings
import golden_families
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import goldens, tiny
from golden_embeddings import POSITIONS, TEXTS, write_checkpoint
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import load_file, save_file
from test_families import model_of
from typer.testing import CliRunner

import kvjax
from kvjax import cache, embedding, engine, plans
from kvjax.cache import CacheConfig, Placement
from kvjax.checkpoints import resolve
from kvjax.cli.app import app
from kvjax.errors import ModelError, RequestError, UserError
from kvjax.types import KVSpec

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = goldens("embeddings")
BERT, ROBERTA = golden_embeddings.NAMES


def load(what, **options) -> kvjax.Embedder:
    loaded: Any = kvjax.load(what, **options)
    assert isinstance(loaded, kvjax.Embedder)
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(BERT, tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def bert(folder):
    return load(folder)


@pytest.fixture(scope="module")
def minilm():
    return load("minilm")


def close(found, want, atol=1e-5):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=0, atol=atol)


# against transformers


@pytest.mark.parametrize("mode", golden_embeddings.MODES)
@pytest.mark.parametrize("name", golden_embeddings.NAMES)
def test_tiny_encoders_equal_transformers(name, mode, tmp_path):
    assert golden_embeddings.checksum(name) == GOLDEN[f"{name}_checksum"]
    encoder = load(write_checkpoint(name, tmp_path, mode))
    assert encoder.max_length == POSITIONS and encoder.width == 48
    close(encoder.embed(list(TEXTS)), GOLDEN[f"{name}_{mode}"])


def test_minilm_equals_transformers(minilm):
    found = minilm.embed(golden_embeddings.SENTENCES)
    close(found[:, : GOLDEN["minilm_first"].shape[1]], GOLDEN["minilm_first"])
    close(found @ found.T, GOLDEN["minilm_cosine"])
    assert minilm.max_length == 256 and minilm.width == 384 and repr(minilm).startswith("Embedder(")
    ids = minilm._token_ids(list(golden_embeddings.SENTENCES))
    assert [len(text) for text in ids] == GOLDEN["minilm_tokens"].tolist()


@pytest.mark.parametrize("pooling, normalize", [("mean", True), ("cls+mean", False), (None, False)])
def test_pooling_is_what_the_files_say(tmp_path, pooling, normalize):
    encoder = load(write_checkpoint(BERT, tmp_path, pooling, normalize=normalize))
    want = np.concatenate([GOLDEN[f"{BERT}_{mode}"] for mode in (pooling or "mean").split("+")], axis=1)
    unit = want / np.linalg.norm(want, axis=1, keepdims=True)
    close(encoder.embed(TEXTS), unit if normalize else want)
    close(encoder.embed(TEXTS, normalize=True), unit)
    close(encoder.embed(TEXTS, normalize=False), want)


# texts and batches


def test_order_and_batches_change_nothing(bert):
    want = bert.embed(TEXTS)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    for batch in (1, 3, 64):
        close(bert.embed([TEXTS[i] for i in order], batch=batch), want[order], 2e-6)
    one = bert.embed(TEXTS[2])
    assert one.shape == (48,)
    close(one, want[2], 2e-6)
    close(bert.embed(TEXTS[i] for i in order), want[order], 2e-6)  # a generator
    close(bert.embed(np.asarray(TEXTS)), want, 2e-6)
    many = bert.embed(["a b", "c"] * 600)  # more than the tokenizer is given at once, and than a batch holds
    close(many, np.tile(bert.embed(["a b", "c"]), (600, 1)), 2e-6)


def test_few_programs_are_compiled(bert, monkeypatch):
    shapes = set()

    def compute(program, params, tokens, lengths):
        assert (lengths[: np.count_nonzero(lengths)] > 0).all() and tokens.shape[0] == len(lengths)
        shapes.add(tokens.shape)
        return np.zeros((len(tokens), 48), np.float32)

    monkeypatch.setattr(embedding, "compute", compute)
    monkeypatch.setattr(embedding, "_TOKENS", 128)
    bert.embed(["a " * n for n in range(1, 36)], batch=8)
    assert shapes == {(2, 64), (4, 32), (8, 16)}


def test_long_texts_are_cut_and_keep_their_end(bert, folder):
    letters = golden_embeddings.LETTERS * 3
    text, cut = " ".join(letters), " ".join(letters[: POSITIONS - 2])
    (ids,) = bert._token_ids([text])
    assert len(ids) == POSITIONS and ids[0] == 0 and ids[-1] == 2  # [CLS] … [SEP]
    close(bert.embed(text), bert.embed(cut), 2e-6)
    short = load(folder, context=10)
    assert short.max_length == 10
    close(short.embed(text), bert.embed(" ".join(letters[:8])), 2e-6)


def test_sentence_bert_config(bert, tmp_path):
    (tmp_path / "a").mkdir()
    encoder = load(write_checkpoint(BERT, tmp_path / "a", max_seq_length=6, do_lower_case=True))
    assert encoder.max_length == 6
    close(encoder.embed("A B C D E F"), bert.embed("a b c d"), 2e-6)
    assert load(tmp_path / "a", context=POSITIONS).max_length == POSITIONS
    encoder = load(write_checkpoint(BERT, tmp_path / "b", max_seq_length=512))
    assert encoder.max_length == POSITIONS


def test_a_default_prompt_is_put_before_texts(bert, tmp_path):
    write_checkpoint(BERT, tmp_path)
    fields = {"prompts": {"query": "the cat "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(fields))
    close(load(tmp_path).embed("sat"), bert.embed("the cat sat"), 2e-6)


def test_empty(bert):
    assert bert.embed([]).shape == (0, 48) and bert.embed([]).dtype == np.float32
    assert np.isfinite(bert.embed("")).all() and np.isfinite(bert.embed([""])).all()


@pytest.mark.parametrize(
    "texts, options, said",
    [
        (3, {}, "type int cannot be read"),
        (None, {}, "type NoneType cannot be read"),
        (b"ab", {}, "type bytes cannot be read"),
        ({"a": 1}, {}, "type dict cannot be read"),
        (["a", 3], {}, "Text 1 is of type int"),
        ([[1, 2]], {}, "Text 0 is of type list"),
        ("\ud800", {}, "valid Unicode"),
        ("a", {"batch": 0}, "batch is 0"),
        ("a", {"batch": True}, "batch is True"),
        ("a", {"normalize": 1}, "normalize is 1"),
    ],
)
def test_wrong_input(bert, texts, options, said):
    with pytest.raises(RequestError, match=said) as error:
        bert.embed(texts, **options)
    assert "give" in str(error.value) and "\n" not in str(error.value)


def test_it_does_not_generate(bert):
    for call in (
        lambda: bert.generate("a"),
        lambda: bert.stream("a"),
        lambda: bert.completions(["a"]),
        lambda: bert.beam_search("a"),
        lambda: kvjax.AsyncLLM(bert),
    ):
        with pytest.raises(RequestError, match="embedding model"):
            call()
    with pytest.raises(AttributeError):
        bert.nothing  # noqa: B018


# checkpoints


def test_scanned_and_sharded(bert, folder):
    want = bert.embed(TEXTS)
    close(load(folder, layers="scanned").embed(TEXTS), want, 2e-6)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    sharded = load(folder, mesh=mesh)
    assert len(sharded.params["layers"][0]["up"].sharding.device_set) == 2
    close(sharded.embed(TEXTS), want, 2e-6)


def test_bfloat16(bert, folder):
    want, found = bert.embed(TEXTS, normalize=True), load(folder, dtype="bfloat16").embed(TEXTS, normalize=True)
    assert found.dtype == np.float32 and ((want * found).sum(axis=1) > 0.995).all()


def edited(folder, target, **changes):
    shutil.copytree(folder, target)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, **changes}))
    return target


def test_names_of_other_checkpoints(bert, folder, tmp_path):
    """BertForMaskedLM's prefix, its head, the norms' old names, and a constant."""
    target = edited(folder, tmp_path / "m", architectures=["BertForMaskedLM"])
    tensors = load_file(folder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, array in tensors.items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[f"bert.{name}"] = array
    renamed["bert.embeddings.position_ids"] = np.arange(POSITIONS)[None]
    renamed["cls.predictions.bias"] = np.zeros(96, np.float32)
    save_file(renamed, target / "model.safetensors")
    close(load(target).embed(TEXTS), bert.embed(TEXTS), 2e-6)


@pytest.mark.parametrize(
    "changes, options, said",
    [
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, {}, "is_decoder True"),
        ({"add_cross_attention": True}, {}, "add_cross_attention True"),
        ({"hidden_act": "mish"}, {}, "hidden_act 'mish'"),
        ({"num_attention_heads": 5}, {}, "does not divide into 5 heads"),
        ({"vocab_size": 64}, {}, "vocabulary of 64"),
        ({}, {"context": 41}, "learned its 40 positions"),
        ({}, {"rope": "linear:2"}, "rope is 'linear:2'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(folder, tmp_path, changes, options, said):
    with pytest.raises(ModelError, match=said):
        load(edited(folder, tmp_path / "m", **changes), **options)


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("modules.json", "[", "cannot be read"),
        ("modules.json", '{"a": 1}', "cannot be read"),
        ("modules.json", '[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]', "module Dense"),
        ("1_Pooling/config.json", '{"pooling_mode_lasttoken": true}', "pooling by lasttoken is not implemented"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": false}', "no pooling is named"),
        ("1_Pooling/config.json", "", "is not valid JSON"),
        ("sentence_bert_config.json", '{"max_seq_length": "long"}', "max_seq_length is 'long'"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', "default_prompt_name is 'query'"),
    ],
)
def test_damaged_or_unknown_pooling(folder, tmp_path, file, content, said):
    target = edited(folder, tmp_path / "m")
    (target / file).write_text(content)
    with pytest.raises(ModelError, match=said):
        load(target)


def test_a_missing_pooling_file_is_no_mean(folder, tmp_path):
    target = edited(folder, tmp_path / "m")
    (target / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json is missing"):
        load(target)


def test_what_is_fetched_of_a_repository():
    wanted = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "tokenizer.json"]
    others = [
        "2_Dense/model.safetensors",
        "onnx/config.json",
        "original/params.json",
        "consolidated.safetensors",
        "a.bin",
    ]
    kept = filter_repo_objects([*wanted, *others], allow_patterns=resolve._FILES, ignore_patterns=resolve._NOT_FILES)
    assert list(kept) == wanted


def test_pooling_named_by_a_word(bert, folder, tmp_path):
    target = edited(folder, tmp_path / "m")
    (target / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 48, "pooling_mode": "mean"}')
    close(load(target).embed(TEXTS), bert.embed(TEXTS), 2e-6)


# decoders


def paged_hidden(model: plans.Model, ids) -> np.ndarray:
    """(T, D) hidden states of a prompt, by the engine's paged cache."""
    T = len(ids)
    config = CacheConfig(model.family.kv_specs(model.config, "float32"), 1, 8, -(-T // 8), stacked=model.stacked)
    program = plans.program_of(model, config)
    now, new = jnp.int32(0), jnp.asarray([T], jnp.int32)

    @jax.jit
    def run(params, state, tokens):
        grown = cache.reserve(config, state, None, new, now, now, jnp.bool_(False), T).cache
        starts, slots = jnp.asarray([0, T], jnp.int32), jnp.zeros((T,), jnp.int32)
        placement = Placement(slots, jnp.arange(T, dtype=jnp.int32), starts, T)
        return engine.compute(program, params, grown, tokens, placement)[1]

    return np.asarray(run(model.params, cache.init(config), jnp.asarray(ids, jnp.int32)))


def assert_mean_of_paged(model: plans.Model, prompts) -> None:
    want = np.stack([paged_hidden(model, prompt).mean(axis=0) for prompt in prompts])
    found = embedding.of_decoder(model, prompts)
    assert np.abs(found - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mistral"])
def test_a_decoder_gives_the_mean_of_its_hidden_states(name, stacked):
    assert_mean_of_paged(tiny(name, stacked=stacked), [goldens(name)[f"prompt_{i}"].tolist() for i in range(3)])


@pytest.mark.parametrize("name", ["bloom", "gemma2", "gpt_oss", "deepseek_v3"])
def test_families_whose_attention_differs(name):
    """ALiBi; a soft cap and windows in every second layer; sinks; latent keys."""
    made = golden_families.golden(name)
    assert_mean_of_paged(model_of(name), [made[f"prompt_{i}"].tolist() for i in (0, 2)])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return kvjax.load(golden_models.write_checkpoint("tiny_llama", tmp_path_factory.mktemp("model") / "llama"))


def test_llm_embed(llm):
    ids = llm.encode("bado fu")
    want = paged_hidden(llm.model, ids).mean(axis=0)
    for prompt in ("bado fu", ids, np.asarray(ids)):
        found = llm.embed(prompt)
        assert found.shape == want.shape
        close(found, want)
    messages = [{"role": "user", "content": "hi"}]
    many = llm.embed(["bado fu", ids, messages], normalize=True)
    close(many[:2], np.stack([want / np.linalg.norm(want)] * 2))
    assert many.shape == (3, 96) and llm.embed([]).shape == (0, 96)
    for prompt, said in (("", "empty"), ([1] * 300, "300 tokens"), (3, "cannot be read"), ([[9999]], "token id 9999")):
        with pytest.raises(UserError, match=said):
            llm.embed(prompt)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 5), (False, None)])
def test_dense_attend(monkeypatch, causal, window, latent):
    """Against the definition, one query at a time; with a block of queries that is shorter than the text."""
    monkeypatch.setattr(embedding, "_QUERIES", 8)
    B, S, N, K, H, Hv, scale, cap = 3, 32, 4, 2, 6, 4, 0.7, 3.0
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B * S, *shape)).astype(np.float32) for shape in ((N, H), (K, H), (K, Hv)))
    sinks, slopes = (rng.normal(size=N).astype(np.float32) for _ in range(2))
    lengths, spec = np.array([32, 7, 0], np.int32), KVSpec(K, H, Hv, window, "float32", latent)
    attend = embedding.dense_attend([KVSpec(K, H, Hv), spec], jnp.asarray(lengths), S, causal=causal)
    features: dict[str, Any] = {"soft_cap": cap, "sinks": jnp.asarray(sinks)}
    features |= {"slopes": jnp.asarray(slopes)} if causal else {}
    _, out = jax.jit(lambda layer: attend(None, layer, q, k, None if latent else v, scale, **features))(jnp.int32(1))
    assert out.shape == (B * S, N, Hv) and np.isfinite(out).all()
    values = k[..., :Hv] if latent else v
    for row, query, head in ((0, 0, 0), (0, 31, 3), (0, 12, 1), (1, 6, 2), (1, 3, 0)):
        last = query + 1 if causal else lengths[row]
        first = max(0, query + 1 - window) if window else 0
        keys = slice(row * S + first, row * S + last)
        logits = k[keys, head // 2] @ q[row * S + query, head] * scale
        logits = cap * np.tanh(logits / cap)
        if causal:
            logits = logits - slopes[head] * (query - np.arange(first, last))
        weights = np.exp(logits) / (np.exp(logits).sum() + np.exp(sinks[head]))
        np.testing.assert_allclose(out[row * S + query, head], weights @ values[keys, head // 2], atol=1e-5)


# the command line


def invoke(*args, text: str | None = None):
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def _no_compile_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_NO_COMPILE_CACHE", "1")


def test_embed_command(bert, folder):
    texts = ["the cat", "", "b"]
    for result in (invoke("embed", *texts, "-m", folder), invoke("embed", "-m", folder, text="the cat\n\nb")):
        records = [json.loads(line) for line in result.stdout.splitlines()]
        assert result.exit_code == 0 and [record["text"] for record in records] == texts
        close(np.asarray([record["embedding"] for record in records], np.float32), bert.embed(texts), 2e-6)
    (line,) = invoke("embed", "b", "-m", folder, "--normalize", "--context", 8).stdout.splitlines()
    assert abs(np.linalg.norm(json.loads(line)["embedding"]) - 1) < 1e-6 and len(line) < 48 * 16
    result = invoke("embed", "b", "-m", folder, "--context", 99)
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1)


def test_embed_command_reads_text_only(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    from kvjax.cli.embed import _lines

    with pytest.raises(RequestError, match="UTF-8"):
        list(_lines())


def test_other_commands_of_an_encoder(folder):
    result = invoke("info", folder)
    assert result.exit_code == 0, result.stderr
    for row in (r"kind +encoder", r"layers +3", r"width +48", r"pooling +mean", r"parameters +\d\d,\d\d\d"):
        assert re.search(row, result.stdout), row
    facts = json.loads(invoke("info", folder, "--json").stdout)
    assert facts["family"] == "bert" and facts["context"] == POSITIONS and facts["normalized"] is False
    for command in (("generate", "hi"), ("chat",)):
        result = invoke(*command, "-m", folder)
        assert (result.exit_code, result.stderr.count("error:")) == (2, 1)
        assert "embedding model" in result.stderr


def test_the_guide(capsys):
    text = (ROOT / "docs" / "embedding.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), {})
    assert capsys.readouterr().out.splitlines() == ["(384,)", "[1.   0.72 0.02]", "I forgot my password."]
