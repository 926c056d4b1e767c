"""From what a user names to an open checkpoint."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Sequence

from etils import epath

from kvjax.checkpoints import default_model
from kvjax.checkpoints.gguf import open_gguf
from kvjax.checkpoints.orbax import MARKER, OrbaxSource
from kvjax.checkpoints.quantized import dequantized
from kvjax.checkpoints.safetensors import open_safetensors
from kvjax.checkpoints.source import TensorSource, one_line
from kvjax.errors import ModelError
from kvjax.types import Family

DEFAULT_NAMES = ("default", "smollm2")
MINILM_NAMES = ("minilm",)
_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+\.gguf))?")
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
# The same weights again, as Meta's and Mistral's own code wants them. Of folders, only those whose names begin with a
# digit are needed: sentence-transformers' 1_Pooling.
_NOT_FILES = ["[!0-9]*/*", "*/*.safetensors", "consolidated*"]
_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(what: str | epath.PathLike | None, families: Sequence[Family]) -> TensorSource:
    """Opens a checkpoint, whatever its format and place; quantized weights appear dequantized.

    Args:
      what: None, "default" or "smollm2" for the default model; "minilm" for the default embedding model; a .gguf
        file; a folder (or `gs://` address) of safetensors or one that `kvjax.checkpoints.orbax.save` wrote; or a
        repository of the Hugging Face hub, "org/name", "org/name@revision" or "org/name:file.gguf".
      families: those that a GGUF file may be of.

    Raises:
      ModelError: nothing readable is there; the text says what to do.
    """
    if not isinstance(what, str | os.PathLike | None):
        choice = "give a repo id, a path, or None for the default model"
        raise ModelError(f"{reprlib.repr(what)} names no checkpoint: {choice}.")
    source = _open(what, families)
    try:
        return dequantized(source)
    except BaseException:
        source.close()
        raise


def _open(what: str | epath.PathLike | None, families: Sequence[Family]) -> TensorSource:
    if what is None or what in DEFAULT_NAMES:
        return open_gguf(default_model.path(), families)
    if what in MINILM_NAMES:
        return open_safetensors(default_model.minilm())
    try:
        path = epath.Path(what).expanduser()
        exists = path.exists()
    except Exception as error:  # a bucket's client raises errors of its own
        raise ModelError(f"{what} cannot be reached ({one_line(error)}).") from error
    if exists:
        return _open_path(path, families)
    repo = _REPO.fullmatch(str(what))
    if repo is None or _looks_like_path(str(what), repo["file"]):
        raise ModelError(f"There is no such file or folder: {what}.")
    return _open_repo(repo["repo"], repo["revision"], repo["file"], families)


def _open_path(path: epath.Path, families: Sequence[Family]) -> TensorSource:
    if path.is_dir():
        return OrbaxSource(path) if (path / MARKER).exists() else open_safetensors(path)
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(
            f"{path} is a pickle, which can run code when read: convert it with transformers' "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., safe_serialization=True)."
        )
    return open_gguf(path, families)


def _looks_like_path(what: str, file: str | None) -> bool:
    """Whether a name that could be a repository is more likely a mistyped path."""
    return what.startswith((".", "/", "~")) or (file is None and what.endswith(_SUFFIXES))


def _open_repo(repo: str, revision: str | None, file: str | None, families: Sequence[Family]) -> TensorSource:
    if file is not None:
        return open_gguf(_fetch(repo, revision, file), families)
    return open_safetensors(_fetch(repo, revision, None))


def _fetch(repo: str, revision: str | None, file: str | None) -> str:
    """The local path of a repository's snapshot or of one of its files, from the hub's cache or the network."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        if file is not None:
            return huggingface_hub.hf_hub_download(repo, file, revision=revision)
        return huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT_FILES
        )
    except errors.GatedRepoError as error:
        reason = "asks for access: accept its terms on its page of the Hugging Face hub and run `hf auth login`"
        raise ModelError(f"{repo} {reason}.") from error
    except errors.RepositoryNotFoundError as error:
        reason = "is no local path and no public repository of the Hugging Face hub"
        raise ModelError(f"{repo} {reason}: check the name, or run `hf auth login` if it is private.") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision}: check the name after the @.") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "is not in the local Hugging Face cache and the hub cannot be reached"
        raise ModelError(f"{repo} {reason}: unset HF_HUB_OFFLINE, or give a local folder.") from error
    except errors.EntryNotFoundError as error:
        raise ModelError(f"{repo} has no file {file}: check the name after the colon.") from error
    except Exception as error:  # whatever the HTTP client of the day raises
        raise ModelError(f"{repo} could not be fetched from the Hugging Face hub: {one_line(error)}.") from error
