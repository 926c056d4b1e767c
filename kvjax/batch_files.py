"""The files of a batch job: its input, and records that survive whatever stops the job.

out.jsonl            records in the order of their lines, only ever appended to
out.jsonl.job        what they were made from: a rerun with anything else is refused
out.jsonl.part       records that finished before an earlier line did; gone when the job is done
out.jsonl.snapshots  a folder for snapshots of the requests that have no record yet (kvjax.snapshots); gone then, too

One of several machines has files of its own, out.0-of-4.jsonl and so on, with the records of its share of the lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kvjax import processes
from kvjax.errors import UserError

PathLike = str | os.PathLike[str]

_SUFFIXES = ("", ".job", ".job.new", ".part")
"""Of the files that a job writes; the third becomes the second when it is whole."""

_SNAPSHOTS = ".snapshots"
_JOURNAL_BYTES = 1 << 20
"""A journal of this size is written anew when most of it is in the output by now."""

_BLOCK = 64
"""Neighbouring lines that one machine gets at most before the next one has its turn."""

_TURNS = 16
"""How often each machine has its turn at least, where there are lines enough."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The lines of one of the machines that divide a job: blocks of neighbours, dealt in turn.

    Neighbours may share a long beginning, which blocks leave on one machine; the input may be sorted, and dealing gives
    every machine some of everything.

    Attributes:
      number: of the machine, from 0.
      count: machines.
      block: lines of a block.
    """

    number: int = 0
    count: int = 1
    block: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def __contains__(self, line: int) -> bool:
        return line // self.block % self.count == self.number

    def after(self, line: int) -> int:
        """The first of its lines behind a line."""
        turn = (line + 1) // self.block
        return max(line + 1, (turn + (self.number - turn) % self.count) * self.block)

    def size(self, lines: int) -> int:
        """How many of so many lines are its own."""
        rounds, rest = divmod(lines, self.block * self.count)
        return rounds * self.block + min(max(rest - self.number * self.block, 0), self.block)

    def of(self, lines: int) -> Shard:
        """The shard with blocks as an input of so many lines wants them."""
        return dataclasses.replace(self, block=max(1, min(_BLOCK, lines // (_TURNS * self.count))))


WHOLE = Shard()


def parse_shard(text: str | None) -> Shard:
    """The shard that a text such as "0/4" names; the whole job for None. Raises UserError."""
    if text is None:
        return WHOLE
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text) if isinstance(text, str) else None
    if found is None or int(found[1]) >= int(found[2]):
        remedy = "give this machine's number, counted from 0, and how many there are: 0/4, 1/4, 2/4 or 3/4 of four"
        raise UserError(f"shard is {text!r}: {remedy}.")
    return Shard(int(found[1]), int(found[2]))


def shard_path(target: PathLike, text: str | None) -> str:
    """Where the records of a shard go: out.jsonl becomes out.0-of-4.jsonl. Raises UserError for what is no shard."""
    shard, path = parse_shard(text), os.fspath(target)
    if text is None or path == "-":
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.{shard.number}-of-{shard.count}{suffix}"


def check_paths(source: PathLike, target: PathLike) -> None:
    """Raises UserError for an output that cannot be one, or that would replace the input, itself or beside it."""
    from etils import epath

    ours, theirs = os.path.expanduser(os.fspath(source)), os.path.expanduser(os.fspath(target))
    for path in (ours, theirs):
        if "\0" in path:
            raise UserError(f"{path!r} contains a NUL character, which no file's name can: correct the path.")
        try:
            epath.Path(path)
        except KeyError:
            raise UserError(f"{path} is an address of a kind that is not known: give a path or gs://….") from None
    if theirs == "-":
        return
    if not theirs or theirs.endswith("/") or os.path.isdir(theirs):
        raise UserError(f"{theirs or '.'} is a folder: name a file in it.")
    read = _stat(ours)
    for suffix in _SUFFIXES:
        written = theirs + suffix if _is_remote(theirs) else f"{Path(theirs)}{suffix}"
        found = _stat(written)
        if ours == written != "-" or (read and found and os.path.samestat(read, found)):
            name = "The standard input" if ours == "-" else ours
            why = f", and a job that writes {theirs} keeps a file of that name" if suffix else " and the output"
            raise UserError(f"{name} is the input{why}: write to another file.")
        if found and not stat.S_ISREG(found.st_mode):
            remedy = "write to another one, or to - for the standard output"
            raise UserError(f"{written} is not a regular file, and cannot keep a job's records: {remedy}.")
    if not _is_remote(theirs):
        found = _stat(folder := f"{Path(theirs)}{_SNAPSHOTS}")
        if found and not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{folder} is not a folder, and cannot keep a job's snapshots: write to another file.")


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.fstat(sys.stdin.fileno()) if path == "-" else os.stat(path)
    except OSError:  # it does not exist; or the standard input is an object of Python's
        return None


def _reason(error: BaseException) -> str:
    """An exception's text for use inside a sentence."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


class Input:
    """A shard's lines of a seekable file, which is hashed and counted in one pass; one iteration at a time.

    Attributes:
      shard: which lines they are.
      total: how many they are.
      end: how many the file has.
      digest: SHA-256 of the whole file.
    """

    def __init__(self, file: BinaryIO, shard: Shard = WHOLE):
        self._file = file
        digest = hashlib.sha256()
        self.end = 0
        for raw in file:
            digest.update(raw)
            self.end += 1
        self.digest = digest.hexdigest()
        self.shard = shard.of(self.end)
        self.total = self.shard.size(self.end)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Lines with their numbers in the file."""
        self._file.seek(0)
        lines = enumerate(iter(self._file.readline, b""))  # not of the file: an iteration given up would close it
        yield from ((index, raw) for index, raw in lines if index in self.shard)


@contextlib.contextmanager
def opened_input(source: PathLike, shard: Shard = WHOLE) -> Iterator[Input]:
    """A shard's lines of a file, a pipe, an object in a bucket, or for "-" the standard input. Raises UserError."""
    from etils import epath

    with contextlib.ExitStack() as stack:
        try:
            if os.fspath(source) == "-":
                file: Any = sys.stdin.buffer
            else:
                file = stack.enter_context(epath.Path(source).expanduser().open("rb"))
            if os.fspath(source) == "-" or not file.seekable():
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, copy)
                copy.seek(0)
                file = copy
            lines = Input(file, shard)
        except FileNotFoundError:
            raise UserError(f"There is no such file: {os.fspath(source)}.") from None
        except Exception as error:  # a bucket's client raises errors of its own
            raise UserError(f"{os.fspath(source)} cannot be read ({_reason(error)}).") from error
        yield lines


class Records:
    """Puts records into the order of their lines, and writes them as soon as none before is missing.

    Attributes:
      next: the line whose record is written next.
      waiting: records of later lines.
      snapshots: the folder for snapshots of the job, or None where it cannot be resumed.
    """

    snapshots: str | None = None

    def __init__(self, file: BinaryIO, shard: Shard = WHOLE):
        self._file, self._shard = file, shard
        self._written, self.next = 0, shard.after(-1)
        self.waiting: dict[int, bytes] = {}

    @property
    def done(self) -> int:
        """How many records there are."""
        return self._written + len(self.waiting)

    def add(self, index: int, record: bytes) -> None:
        self.waiting[index] = record

    def flush(self) -> None:
        """Writes what can be written."""
        while self.next in self.waiting:
            self._file.write(self.waiting.pop(self.next))
            self._written, self.next = self._written + 1, self._shard.after(self.next)
        self._file.flush()

    def publish(self) -> None:
        """Brings what is flushed to where it survives this machine. Raises UserError."""

    def known(self) -> dict[str, Any]:
        """What the other processes of the job have to know, as a JSON value; see `Followed`."""
        known = {"written": self._written, "next": self.next, "waiting": sorted(self.waiting)}
        return known | {"snapshots": self.snapshots}


class Followed(Records):
    """What process 0 has of records, in another process of the same job: all but the records."""

    def __init__(self, known: Mapping[str, Any], shard: Shard):
        """`known`: from process 0's `Records.known`."""
        self._shard, self._written, self.next = shard, known["written"], known["next"]
        self.waiting, self.snapshots = dict.fromkeys(known["waiting"], b""), known["snapshots"]

    def add(self, index: int, record: bytes) -> None:
        self.waiting[index] = b""

    def flush(self) -> None:
        while self.next in self.waiting:
            del self.waiting[self.next]
            self._written, self.next = self._written + 1, self._shard.after(self.next)


class _Durable(Records):
    """Records in a file, those out of order in a journal beside it; on the disk when `flush` returns."""

    def __init__(
        self,
        path: Path,
        journal: BinaryIO,
        custom_ids: Iterator[Any],
        end: int,
        publish: Callable[[], None],
        shard: Shard,
    ):
        """Goes on from what is there. Raises UserError if that is not what this job wrote."""
        written, following = _recover(path, custom_ids, shard)
        super().__init__(path.open("ab"), shard)
        self._path, self._journal, self._publish = path, journal, publish
        self._written, self.next = written, following
        self.waiting = _recover_journal(_beside(path, ".part"), following, end, shard)
        self._journaled = set(self.waiting)

    def flush(self) -> None:
        try:
            super().flush()
            os.fsync(self._file.fileno())
            self._flush_journal()
        except OSError as error:
            reason = f"{self._path} cannot be written ({_reason(error)})"
            raise UserError(f"{reason}: what is in it stays, and a rerun goes on from there.") from error

    def publish(self) -> None:
        self._publish()

    def close(self) -> None:
        self._file.close()

    def _flush_journal(self) -> None:
        if not self.waiting or self._stale():  # what is not in `waiting` is in the file, and on the disk
            self._journal.truncate(0)
            self._journaled = set()
        self._journal.write(b"".join(self.waiting[index] for index in self.waiting.keys() - self._journaled))
        self._journaled = set(self.waiting)
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _stale(self) -> bool:
        """Whether the journal is large, and mostly of records that are in the file."""
        size = os.fstat(self._journal.fileno()).st_size
        return size > _JOURNAL_BYTES and size > 2 * sum(map(len, self.waiting.values()))


@contextlib.contextmanager
def opened_records(
    target: PathLike,
    job: Mapping[str, Any],
    custom_ids: Iterator[Any],
    end: int,
    overwrite: bool,
    shard: Shard = WHOLE,
) -> Iterator[Records]:
    """The records of a job, with those of an earlier run.

    Args:
      target: a path; `gs://…`, where nothing can be appended, is worked on in a local copy and written at the end,
        also when an exception or Ctrl-C ends it, and by `Records.publish`; "-" is the standard output, which knows no
        earlier run.
      job: what the records are made from.
      custom_ids: of the shard's lines, in order.
      end: number of lines of the whole input.
      overwrite: whether to delete the records and snapshots of an earlier run first.
      shard: the lines that get records.

    Raises:
      UserError: the target belongs to another job, or cannot be written.
    """
    if os.fspath(target) == "-":
        yield Records(sys.stdout.buffer, shard)
        return
    with _working_copy(os.fspath(target)) as (path, publish), _locked_journal(path) as journal:
        try:
            folder = os.path.expanduser(os.fspath(target)) + _SNAPSHOTS
            if overwrite:
                _discard(path, journal)
                remove_snapshots(folder)
            _claim(path, job)
            records = _Durable(path, journal, custom_ids, end, publish, shard)
            records.snapshots = folder
        except OSError as error:
            raise UserError(f"{path} cannot be written ({_reason(error)}).") from error
        try:
            yield records
        finally:
            try:
                records.flush()
            finally:
                records.close()
                publish()


@contextlib.contextmanager
def shared_records(
    open_them: Callable[[], contextlib.AbstractContextManager[Records]], shard: Shard
) -> Iterator[Records]:
    """The records of a job that several processes run: process 0 opens and writes them, the others follow.

    Raises:
      UserError: process 0's.
    """
    with contextlib.ExitStack() as stack:
        opened: list[Records] = []

        def known() -> dict[str, Any]:
            opened.append(stack.enter_context(open_them()))
            return opened[0].known()

        found = processes.first(known)
        yield opened[0] if opened else Followed(found, shard)


def remove_snapshots(folder: str) -> None:
    """Deletes a job's snapshots, if there are any. Raises UserError."""
    from etils import epath

    if epath.Path(folder).is_dir():  # most jobs have none, and JAX need not be imported
        from kvjax import snapshots

        snapshots.remove(folder)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _locked_journal(path: Path) -> Iterator[BinaryIO]:
    """Two jobs in one file would tear each other's records apart; the lock ends with the process, however it ends."""
    name = _beside(path, ".part")
    try:
        journal = name.open("ab")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({_reason(error)}).") from error
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another job is writing {path}: wait for it, or write to another file.") from None
        try:
            yield journal
        finally:
            journal.flush()
            if not name.stat().st_size:
                name.unlink()


def _discard(path: Path, journal: BinaryIO) -> None:
    # The note first: records without one are refused, so that a crash in between cannot mix two jobs.
    _beside(path, ".job").unlink(missing_ok=True)
    journal.truncate(0)
    path.unlink(missing_ok=True)


def _claim(path: Path, job: Mapping[str, Any]) -> None:
    """Notes what the records are made from; refuses a file with records of anything else."""
    note = _beside(path, ".job")
    before = (_read_object(note.read_bytes()) or {}) if note.exists() else None
    if before is not None and not before.keys() >= {"input", "defaults"}:
        _refuse(f"{note} is not what a job writes there, and would be replaced")
    filled = [file for file in (path, _beside(path, ".part")) if file.exists() and file.stat().st_size]
    if filled:
        if before is None:
            _refuse(f"{filled[0]} exists, and {note.name} is not there to say what its records were made from")
        _refuse_other(path, before, json.loads(json.dumps(job)))
        return
    part = _beside(note, ".new")
    with part.open("w") as file:
        json.dump(job, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, note)


def _refuse_other(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    before, now = _flat(before), _flat(now)
    if before.get("input") != now["input"]:
        _refuse(f"{path} has records of another input")
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            _refuse(f"{path} was begun with {key} {before.get(key)!r}, not {now.get(key)!r}")


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    """{"defaults": {"top_k": 3}} → {"default top_k": 3}, so that each can be named."""
    flat = {}
    for key, value in job.items():
        inner = {f"default {name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
        flat.update(inner)
    return flat


def _refuse(reason: str) -> NoReturn:
    raise UserError(f"{reason}: write to another file, or begin anew with --overwrite (overwrite=True in Python).")


def _recover(path: Path, custom_ids: Iterator[Any], shard: Shard) -> tuple[int, int]:
    """Cuts off a record that is not whole; returns how many remain, all fit for the input, and the next one's line."""
    count, following, whole = 0, shard.after(-1), 0
    if not path.exists():
        return count, following
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            record = _read_object(raw)
            # StopIteration's stand-in is equal to nothing: a record too many is refused, too.
            expected = (following, next(custom_ids, object()))
            if record is None or (record.get("index"), record.get("custom_id")) != expected:
                _refuse(f"Line {count + 1} of {path} is not what this job wrote there")
            count, following = count + 1, shard.after(following)
            whole += len(raw)
    _cut(path, whole)
    return count, following


def _recover_journal(path: Path, start: int, end: int, shard: Shard) -> dict[int, bytes]:
    """Records of lines from `start` on. Cuts off a record that is not whole."""
    found = {}
    whole = 0
    with path.open("rb") as file:
        for raw in file:
            record = _read_object(raw) if raw.endswith(b"\n") else None
            index = record.get("index") if record is not None else None
            if type(index) is not int:
                break
            whole += len(raw)
            if start <= index < end and index in shard:
                found[index] = raw
    _cut(path, whole)
    return found


def _cut(path: Path, size: int) -> None:
    if path.stat().st_size > size:  # a finished file keeps its time
        os.truncate(path, size)


def _read_object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def _working_copy(target: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A local path to work on, and what brings it to its place."""
    if not _is_remote(target):
        yield Path(os.path.expanduser(target)), lambda: None
        return
    from etils import epath

    with contextlib.ExitStack() as cleanup:
        folder = tempfile.mkdtemp(prefix="kvjax-")
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        here = Path(folder) / target.rsplit("/", 1)[-1]
        pairs = [(epath.Path(target + suffix), _beside(here, suffix)) for suffix in (".job", ".part", "")]
        try:
            for remote, local in pairs:
                if remote.exists():
                    local.write_bytes(remote.read_bytes())
        except Exception as error:  # a bucket's client raises errors of its own
            raise UserError(f"{target} cannot be reached ({_reason(error)}).") from error

        written: dict[Path, tuple[int, int]] = {}

        def publish() -> None:
            try:
                for remote, local in pairs:
                    if local.exists() and (local.stat().st_size or not local.name.endswith(".part")):
                        state = local.stat().st_mtime_ns, local.stat().st_size
                        if written.get(local) != state:
                            remote.write_bytes(local.read_bytes())
                            written[local] = state
                    elif remote.exists():
                        remote.unlink()
                        written.pop(local, None)
            except BaseException as error:  # a second Ctrl-C, too, must not cost the records
                cleanup.pop_all()
                remedy = f"what should be there is kept in {folder}, from where it can be copied"
                raise UserError(f"{target} cannot be written ({_reason(error)}): {remedy}.") from error

        yield here, publish


def _is_remote(target: str) -> bool:
    return "://" in target
