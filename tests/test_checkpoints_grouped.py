"""Checkpoints with fewer kv heads: the means of groups, and the logits that transformers finds in them."""

import json
import pathlib

import golden_models
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_models import paged_logits
from typer.testing import CliRunner

from kvjax.checkpoints.grouped import pooled_heads
from kvjax.checkpoints.place import load_model
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.checkpoints.safetensors import open_safetensors
from kvjax.cli import app
from kvjax.errors import ModelError
from kvjax.models import FAMILIES, family_of
from kvjax.plans import Model

GOLDEN = np.load(pathlib.Path(__file__).parent / "goldens" / "grouped_heads.npz")
DIM = 16
K_BIAS, K_PROJ, V_PROJ = (
    f"model.layers.1.self_attn.{part}" for part in ("k_proj.bias", "k_proj.weight", "v_proj.weight")
)


@pytest.fixture(scope="module")
def mha(tmp_path_factory):
    """A model of 4 heads with biases."""
    return golden_models.write_checkpoint("tiny_llama_mha", tmp_path_factory.mktemp("model") / "m")


def pooled(folder, kv_heads):
    source = open_safetensors(folder)
    return pooled_heads(source, family_of(source.config), kv_heads)


def convert(*args):
    return CliRunner().invoke(app.app, ["convert", *map(str, args)])


def test_the_same_number_changes_nothing(mha):
    with open_safetensors(mha) as source:
        assert pooled_heads(source, family_of(source.config), 4) is source


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_are_means_of_neighbours(mha, kv_heads):
    weights = golden_models.tensors("tiny_llama_mha")
    with pooled(mha, kv_heads) as source:
        assert source.config == {**golden_models.config("tiny_llama_mha"), "num_key_value_heads": kv_heads}
        assert source.names() == tuple(sorted(weights))
        for name in (K_PROJ, V_PROJ, K_BIAS):
            heads = weights[name].reshape(4, DIM, *weights[name].shape[1:])
            means = [heads[i : i + 4 // kv_heads].mean(axis=0) for i in range(0, 4, 4 // kv_heads)]
            assert source.shape(name) == (kv_heads * DIM, *weights[name].shape[1:])
            np.testing.assert_allclose(source.read(name), np.concatenate(means), rtol=1e-6)
            some = slice(3, kv_heads * DIM - 5)  # of two heads, parts of both
            np.testing.assert_array_equal(source.read_rows(name, some.start, some.stop), source.read(name)[some])
        for name in set(weights) - {n for n in weights if ".k_proj." in n or ".v_proj." in n}:
            np.testing.assert_array_equal(source.read(name), weights[name])


@pytest.mark.parametrize("name, kv_heads", [("tiny_llama_mha", 2), ("tiny_llama_mha", 1), ("tiny_qwen2", 1)])
def test_logits_of_the_converted_equal_transformers(name, kv_heads, tmp_path):
    folder = golden_models.write_checkpoint(name, tmp_path / "m")
    done = convert(folder, tmp_path / "out", "--kv-heads", kv_heads)
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == kv_heads
    with open_checkpoint(tmp_path / "out", FAMILIES) as source:
        family = family_of(source.config)
        config = family.config(source.config, None)
        params = load_model(source, family, config, dtype=jnp.float32)
    assert {spec.kv_heads for spec in family.kv_specs(config, "float32")} == {kv_heads}
    model = Model(family, config, params, (), [b""] * config.vocab, "float32", "float32", False)
    expected = GOLDEN[f"{name}/{kv_heads}"]
    found = paged_logits(model, GOLDEN["tokens"], 8)[-len(expected) :]
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_bfloat16_is_pooled_in_float32(mha, tmp_path):
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in golden_models.tensors("tiny_llama_mha").items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mha / "config.json").read_text())
    with pooled(tmp_path, 1) as source:
        mean = weights[K_PROJ].astype(np.float32).reshape(4, DIM, -1).mean(axis=0).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(source.read(K_PROJ), mean)


def test_names_without_the_prefix(mha, tmp_path):
    weights = golden_models.tensors("tiny_llama_mha")
    save_file({name.removeprefix("model."): x for name, x in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mha / "config.json").read_text())
    with pooled(tmp_path, 2) as source:
        assert source.shape(K_PROJ.removeprefix("model.")) == (2 * DIM, 64)


def test_what_cannot_be_pooled_is_named(mha, tmp_path):
    for kv_heads in (0, 3, 8):
        done = convert(mha, tmp_path / "out", "--kv-heads", kv_heads)
        assert (done.exit_code, done.stderr.count("error:")) == (2, 1)
        assert f"--kv-heads {kv_heads}: the 4 kv heads of this model can be pooled to 1, 2, 4." in " ".join(
            done.stderr.split()
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "config",
    [
        {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": 8,
            "n_head": 2,
            "n_layer": 1,
            "n_positions": 8,
            "vocab_size": 9,
        },
        golden_models.config("tiny_llama") | {"architectures": ["Phi3ForCausalLM"]},
    ],
    ids=["gpt2", "phi3"],
)
def test_families_without_projections_of_their_own(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=f"cannot convert {config['architectures'][0]} .* no projections to k and to v"
    ):
        pooled(tmp_path, 1)
