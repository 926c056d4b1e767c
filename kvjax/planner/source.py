"""From what a user names to a config.json. No weight is read, and none is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etils import epath

from kvjax.checkpoints import resolve
from kvjax.checkpoints.orbax import MARKER
from kvjax.checkpoints.source import one_line, read_json
from kvjax.errors import ModelError
from kvjax.planner import named
from kvjax.types import Family


def config_json(what: str, families: Sequence[Family]) -> dict[str, Any]:
    """The fields of config.json of a model.

    Args:
      what: a folder with a config.json, a config.json, a .gguf file, an Orbax checkpoint, a name of
        `kvjax.planner.named`, or a repository of the Hugging Face hub, of which config.json alone is fetched.
      families: those that a GGUF file may be of.

    Raises:
      ModelError: it is none of these; the text names the nearest.
    """
    try:
        path = epath.Path(what).expanduser()
        exists = path.exists()
    except Exception as error:  # a bucket's client raises errors of its own
        raise ModelError(f"{what} cannot be reached ({one_line(error)}).") from error
    if exists:
        return _of_path(path, families)
    name = named.known_as(what)
    if name is not None:
        return named.CONFIGS[name]
    repo = resolve._REPO.fullmatch(what)
    if repo is None or resolve._looks_like_path(what, repo["file"]):
        raise _unknown(what)
    if repo["file"] is not None:
        with resolve.open_checkpoint(what, families) as source:
            return source.config
    return _of_repo(what, repo["repo"], repo["revision"])


def _of_path(path: epath.Path, families: Sequence[Family]) -> dict[str, Any]:
    if path.suffix == ".json" and not path.is_dir():
        return read_json(path, required=True)
    if path.suffix == ".safetensors" and not path.is_dir():
        return read_json(path.parent / "config.json", required=True)
    if path.is_dir() and not (path / MARKER).exists():
        return read_json(path / "config.json", required=True)
    with resolve.open_checkpoint(path, families) as source:
        return source.config


def _of_repo(what: str, repo: str, revision: str | None) -> dict[str, Any]:
    try:
        found = resolve._fetch(repo, revision, "config.json")
    except ModelError as error:
        name = named.known_as(repo.rpartition("/")[2])
        if name is None:
            raise
        raise ModelError(f"{str(error).removesuffix('.')}; {name} is known without it.") from error
    return read_json(epath.Path(found), required=True)


def _unknown(what: str) -> ModelError:
    near = named.nearest(what)
    names = f"names like it are {', '.join(near)}" if near else f"known names are {', '.join(named.CONFIGS)}"
    return ModelError(
        f"There is no model {what!r}: {names}; or give a folder with a config.json, a .gguf file, or a repo id."
    )
