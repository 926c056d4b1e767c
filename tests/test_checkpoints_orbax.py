"""Orbax checkpoints: what goes in comes out, whole or not at all, and plain Orbax reads it too."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.checkpoints import orbax
from kvjax.checkpoints.orbax import OrbaxSource, save
from kvjax.checkpoints.safetensors import open_safetensors
from kvjax.errors import ModelError

TENSORS = {
    "model.embed_tokens.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "model.layers.0.w": np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 8).astype(ml_dtypes.bfloat16),
    "model.norm.weight": np.arange(7, dtype=np.float16),
}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    (folder / "tokenizer.json").write_text('{"some": "tokenizer ▁"}')
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file(TENSORS, folder / "model.safetensors")
    with open_safetensors(folder) as opened:
        yield opened


def test_round_trip(source, tmp_path):
    folder = tmp_path / "saved" / "100% of it #1"
    save(source, folder)
    with OrbaxSource(folder) as saved:
        assert saved.names() == source.names()
        assert saved.config == source.config and saved.generation_config == source.generation_config
        for name, expected in TENSORS.items():
            assert saved.shape(name) == expected.shape and saved.dtype(name) == expected.dtype
            assert saved.read(name).dtype == expected.dtype
            np.testing.assert_array_equal(saved.read(name), expected)
            np.testing.assert_array_equal(saved.read_rows(name, 2, 4), expected[2:4])
        assert "3 tensors" in saved.describe()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_text() == (tmp_path / "hf" / name).read_text()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_plain_orbax_reads_it(source, tmp_path):
    import orbax.checkpoint as ocp

    save(source, tmp_path / "saved")
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "saved" / "params")
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(tree[name], expected)


def test_tensors_are_read_one_batch_after_the_other(source, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_BATCH_BYTES", 100)
    save(source, tmp_path / "saved")
    with OrbaxSource(tmp_path / "saved") as saved:
        for name, expected in TENSORS.items():
            np.testing.assert_array_equal(saved.read(name), expected)
    sizes = [60, 30, 20, 500, 10, 10]
    assert [sizes[batch] for batch in orbax._batches(sizes)] == [[60, 30], [20], [500], [10, 10]]


def test_nothing_is_left_of_a_failed_save(source, tmp_path, monkeypatch):
    def fail(*_):
        raise ModelError("The disk is full.")

    monkeypatch.setattr(type(source), "read", fail)
    with pytest.raises(ModelError, match="disk is full"):
        save(source, tmp_path / "saved")
    assert not list(tmp_path.glob("saved*"))


def test_an_existing_folder_is_left_alone(source, tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        save(source, tmp_path)


def refused(folder, *words):
    with pytest.raises(ModelError) as error, OrbaxSource(folder) as source:
        for name in source.names():
            source.read(name)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_damage_is_refused(source, tmp_path):
    good = tmp_path / "good"
    save(source, good)
    marker = json.loads((good / "kvjax.json").read_text())

    def spoil(change):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad)
        return bad

    refused(tmp_path / "nowhere", "kvjax.json", "missing")
    refused(spoil(lambda bad: (bad / "kvjax.json").write_text("{")), "kvjax.json")
    refused(spoil(lambda bad: (bad / "kvjax.json").write_text('{"format": 99}')), "99")
    refused(spoil(lambda bad: (bad / "kvjax.json").write_text('{"format": 1, "tensors": {"a": 1}}')), "kvjax.json")
    refused(spoil(lambda bad: (bad / "config.json").unlink()), "config.json")
    refused(spoil(lambda bad: shutil.rmtree(bad / "params")), "model.embed_tokens.weight")
    extra = {**marker, "tensors": {**marker["tensors"], "zz": [[2], "float32"]}}
    refused(spoil(lambda bad: (bad / "kvjax.json").write_text(json.dumps(extra))), "zz")
    other = {**marker, "tensors": {"model.norm.weight": [[8], "float16"]}}
    refused(spoil(lambda bad: (bad / "kvjax.json").write_text(json.dumps(other))), "model.norm.weight")

    def truncate_data(bad):
        for file in (bad / "params").rglob("d/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    refused(spoil(truncate_data), "no readable tensor")

    def remove_data(bad):
        for file in (bad / "params").rglob("d/*"):
            file.unlink()

    refused(spoil(remove_data), "no readable tensor")
