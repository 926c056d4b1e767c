"""Names of checkpoints: paths, repositories of the hub in its cache, and what is said of wrong ones."""

import json

import gguf
import numpy as np
import pytest
from huggingface_hub import constants, errors
from safetensors.numpy import save_file

from kvjax.checkpoints import default_model, open_checkpoint
from kvjax.checkpoints.gguf import GGUFSource
from kvjax.checkpoints.orbax import OrbaxSource, save
from kvjax.checkpoints.safetensors import SafetensorsSource
from kvjax.errors import ModelError
from kvjax.types import Family, GGUFNames

NAMES = GGUFNames(
    ("toy",),
    tensors=lambda arch, config: {"token_embd.weight": "embed"},
    config=lambda metadata, arch: {},
    rows=lambda arch, config: {},
    made={},
)
FAMILIES = [Family("toy", (), None, None, None, None, None, NAMES)]  # type: ignore[arg-type]


def write_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}))
    save_file({"w": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def write_gguf(path):
    writer = gguf.GGUFWriter(str(path), "toy")
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with org/name, laid out as huggingface_hub does, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = write_folder(repo / "snapshots" / ("a" * 40))
    write_gguf(snapshot / "model.Q8.gguf")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "refs" / "v2").write_text("a" * 40)
    return repo


def opened(what):
    with open_checkpoint(what, FAMILIES) as source:
        return type(source)


def test_paths(tmp_path):
    folder = write_folder(tmp_path / "hf")
    assert opened(folder) is SafetensorsSource
    assert opened(str(folder / "model.safetensors")) is SafetensorsSource
    assert opened(write_gguf(tmp_path / "m.gguf")) is GGUFSource
    with open_checkpoint(folder, FAMILIES) as source:
        save(source, tmp_path / "orbax")
    assert opened(tmp_path / "orbax") is OrbaxSource


def test_the_default_model(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(default_model, "path", lambda: path)
    for what in (None, "default", "smollm2"):
        assert opened(what) is GGUFSource


def test_repositories_in_the_cache(hub):
    for what in ("org/name", "org/name@v2", "org/name@" + "a" * 40):
        assert opened(what) is SafetensorsSource
    for what in ("org/name:model.Q8.gguf", "org/name@v2:model.Q8.gguf"):
        assert opened(what) is GGUFSource


def refused(what, *words):
    with pytest.raises(ModelError) as error:
        open_checkpoint(what, FAMILIES)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_what_the_cache_has_not(hub):
    refused("org/other", "org/other", "cache")
    refused("org/name@v3", "org/name", "cache")
    refused("org/name:other.gguf", "org/name", "cache")


@pytest.mark.parametrize("what", ["./m", "/no/such", "~/no-such", "m.gguf", "dir/m.gguf", "a/b/c", "name", "x y"])
def test_what_looks_like_a_path(what, hub):
    refused(what, "no such file")


@pytest.mark.parametrize("what", [5, [], b"x", True, {}, ["org/name"], 1.5])
def test_what_is_no_name(what):
    refused(what, repr(what), "give a repo id, a path, or None")


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"\x80")
    refused(tmp_path / "m.pt", "pickle", "safe_serialization")
    refused(tmp_path, "m.pt", "safe_serialization")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no .safetensors")
    write_gguf(tmp_path / "empty" / "m.gguf")
    refused(tmp_path / "empty", "m.gguf")
    (tmp_path / "text.txt").write_text("hello")
    refused(tmp_path / "text.txt", "GGUF")


@pytest.mark.parametrize(
    "name, words",
    [
        ("GatedRepoError", ["access", "hf auth login"]),
        ("RepositoryNotFoundError", ["check the name"]),
        ("RevisionNotFoundError", ["revision v9"]),
        ("LocalEntryNotFoundError", ["cannot be reached"]),
        ("EntryNotFoundError", ["no file"]),
        ("OfflineModeIsEnabled", ["could not be fetched"]),
    ],
)
def test_what_the_hub_says(monkeypatch, name, words):
    import huggingface_hub

    kind = getattr(errors, name)

    def fail(*_, **__):
        error = kind.__new__(kind)
        Exception.__init__(error, "something\nlong")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("org/name@v9", "org/name", *words)
