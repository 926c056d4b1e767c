"""Several processes as one: what they agree on, and what becomes of the others when one of them is gone.

JAX runs one program over the devices of all processes, as long as every process starts the same programs with the same
inputs in the same order. What a host finds out alone, such as how late it is, is therefore process 0's to say.

    import kvjax
    from kvjax import processes

    with processes.initialize("10.0.0.1:9000", 4, 2):  # without arguments on a TPU pod or under SLURM
        ...

A process that dies leaves the others in a collective that never ends. So each of them says every second that it is
alive, by the coordination service that process 0 runs; process 0 listens to all, and the others to process 0.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.errors import UserError

GONE = 75
"""Exit code of a process that ends because another is gone: EX_TEMPFAIL, try again."""

TIMEOUT = 60.0
"""Seconds without a sign of life after which a process counts as gone."""

WAIT = 300.0
"""Seconds in which all processes have to come."""

_SUSPECT = 10.0  # instead, once a collective has failed: somebody is gone, and the question is who
_BEAT = 1.0
_SILENT = 2.5  # seconds without an answer of the service after which its address is tried
_LINGER = 3.0  # process 0 ends last: with it ends the service by which the others learn why
_FAILED = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION):")
"""Errors of XLA's, whatever Python makes of them: a collective whose peer is gone raises a ValueError, too."""

_ALIVE, _END, _HEARD = "kvjax/alive/", "kvjax/end", "kvjax/heard/"


def count() -> int:
    """How many processes there are; 1 without `jax.distributed`."""
    jax = sys.modules.get("jax")
    return jax.process_count() if jax is not None and jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this process, from 0."""
    return sys.modules["jax"].process_index() if count() > 1 else 0


def spans(mesh: Any) -> bool:
    """Whether a mesh, or None, has devices of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


# --- agreement: every process has to call these, in the same order ---------------------------------------------
def agree(values: Sequence[int], flags: Sequence[bool] = ()) -> tuple[list[int], tuple[bool, ...]]:
    """The integers of process 0, below 2**31, and the flags that any process has raised."""
    if count() == 1:
        return list(values), tuple(flags)
    from jax.experimental import multihost_utils

    mine = np.asarray([*values, *map(int, flags)], np.int32)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    raised = everyone[:, len(values) :] != 0
    return everyone[0, : len(values)].tolist(), tuple(bool(column.any()) for column in raised.T)


def any_of(flag: bool) -> bool:
    """Whether it is so in any process."""
    return agree((), (flag,))[1][0]


def first(make: Callable[[], Any]) -> Any:
    """What `make` returns in process 0, a JSON value; it is called nowhere else. Raises its UserError everywhere."""
    return json.loads(first_bytes(lambda: json.dumps(make()).encode()))


def first_bytes(make: Callable[[], bytes]) -> bytes:
    """The bytes that `make` returns in process 0; it is called nowhere else. Raises its UserError everywhere."""
    if count() == 1:
        return make()
    raw, error = b"", None
    if index() == 0:
        try:
            raw = make()
        except UserError as refused:
            raw, error = str(refused).encode(), ToldError(*refused.args)
    (size, failed), _ = agree((len(raw), int(error is not None)))
    raw = _broadcast(raw, size)
    if failed:
        raise ToldError(raw.decode()) from error
    return raw


class ToldError(UserError):
    """A UserError of process 0, which all have been told."""


def check_same(**values: Any) -> None:
    """Raises UserError, in all processes, unless the values, by what they are called, are the same in all."""
    if count() == 1:
        return
    mine = _flat(json.loads(json.dumps(values, default=str)))
    theirs = first(lambda: mine)
    _, differ = agree((), [mine.get(name) != theirs[name] for name in theirs] + [bool(mine.keys() - theirs.keys())])
    wrong = [name for name, flag in zip([*theirs, "An argument"], differ, strict=True) if flag]
    if wrong:
        found = f"{wrong[0]} is not the same in all processes"
        found += f": {theirs[wrong[0]]!r} in process 0" if wrong[0] in theirs else ""
        raise ToldError(f"{found}; start all with the same arguments.")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"default": {"top_k": 3}} → {"default top_k": 3}, so that each can be named."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _broadcast(raw: bytes, size: int) -> bytes:
    from jax.experimental import multihost_utils

    padded = np.zeros(1 << max(size - 1, 0).bit_length(), np.uint8)  # few lengths, so that few programs are compiled
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size].tobytes()


# --- the processes ---------------------------------------------------------------------------------------------
def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = TIMEOUT,
    wait: float = WAIT,
) -> Session:
    """Makes this process one of several, by `jax.distributed.initialize`; before JAX is asked for its devices.

    Args:
      coordinator: "host:port" of process 0, at which it will listen. Without arguments, JAX finds all three out: on
        Cloud TPU pods, under SLURM and Open MPI.
      processes: how many there are.
      process: which of them this is, from 0.
      timeout: seconds without a sign of life after which a process counts as gone. The others then end, with one
        sentence and exit code `GONE`.
      wait: seconds in which all processes have to come; they end like that otherwise.

    Returns:
      The session: a context manager, or to be closed; else it ends with the process.

    Raises:
      UserError: impossible arguments, or there is no cluster that JAX knows.
    """
    _check(coordinator, processes, process, timeout)
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with contextlib.suppress(AttributeError):  # it would take SIGTERM away from us
        jax.config.update("jax_enable_preemption_service", False)
    _delay_aborts()
    arrived = threading.Event()
    threading.Thread(target=_expect, args=(arrived, wait, coordinator, processes), daemon=True).start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            # Its own ways to end the process are a crash: they come after ours.
            initialization_timeout=round(2 * wait + 60),
            heartbeat_timeout_seconds=round(3 * timeout + 60),
        )
        jax.devices()
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "give --coordinator HOST:PORT, --processes N and --process I where no cluster says them"
        raise UserError(f"The processes cannot be joined ({reason}): {remedy}.") from error
    finally:
        arrived.set()
    session = Session(jax.process_index(), jax.process_count(), timeout)
    session.watch()
    return session


def _check(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> None:
    given = (coordinator, processes, process)
    if None in given and given != (None, None, None):
        raise UserError("The address of the coordinator, the number of processes and that of this one go together.")
    if not isinstance(timeout, int | float) or not 1 <= timeout < 1e6:
        raise UserError(f"The timeout is {timeout!r}: give a number of seconds, at least 1.")
    if coordinator is None or processes is None or process is None:
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"The coordinator is {coordinator!r}: give HOST:PORT, such as 10.0.0.1:9000.")
    if not 0 <= process < processes:
        raise UserError(f"The process is {process} of {processes}: count them from 0.")
    if process == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"Port {port} of the coordinator cannot be used ({error.strerror}): give another."
            ) from error


def _expect(arrived: threading.Event, wait: float, coordinator: str | None, processes: int | None) -> None:
    """Ends the process unless all come in time; JAX would crash it."""
    if not arrived.wait(wait):
        where = f" at {coordinator}" if coordinator else ""
        number = f" all {processes}" if processes else ""
        _die(f"Not{number} processes came together{where} within {wait:g} s: start all of them, and again.", GONE)


class Session:
    """This process as one of several, and its watch over the others.

    Attributes:
      index: its number.
      count: how many there are.
      timeout: seconds without a sign of life after which one counts as gone.
    """

    def __init__(self, number: int, total: int, timeout: float):
        self.index, self.count, self.timeout = number, total, timeout
        self._closing = threading.Event()
        self._suspects = self._told = False
        self._code: int | None = None
        self._answered = time.monotonic()
        self._beats: dict[int, str] = {}
        others = range(1, total) if number == 0 else (0,)
        self._silence = dict.fromkeys(others, 0.0)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    def watch(self) -> None:
        """Begins to listen to the others."""
        if self.count > 1:
            self._client, self._address = _service()
        if self.count > 1 and self._client is not None:
            self._talker = threading.Thread(target=self._talk, daemon=True)
            self._talker.start()
            threading.Thread(target=self._judge, daemon=True).start()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Waits for the others to come to their ends, too."""
        if self._closing.is_set():
            return
        import jax

        if self.count > 1 and self._client is not None:
            try:
                self._client.wait_at_barrier("kvjax/close", 24 * 3600 * 1000)
            except Exception as error:
                self.fail(error)
                raise
            self._closing.set()
            if self.leads:
                self._set(_END, "{}")  # wakes the talkers
            self._talker.join(3 * _BEAT)
        self._closing.set()
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process ends, unless one of them is the cause: then it ends here."""
        if self._closing.is_set():
            return
        if any(_FAILED.match(str(one)) for one in _chain(error)):
            self._suspects = True
            time.sleep(min(self.timeout, _SUSPECT) + 2 * _BEAT + _LINGER)  # the judge ends the process meanwhile
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        code = getattr(error, "exit_code", code)  # click's
        code = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else code
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        text = "" if isinstance(error, ToldError) else f"Process {self.index} of {self.count} ended: {reason}"
        self.tell(text, code)

    def tell(self, text: str, code: int) -> None:
        """Tells the others why this process ends; they end with the same code."""
        self._code = code
        if self._told or self._closing.is_set() or self.count == 1 or self._client is None:
            return
        self._told = True
        teller = threading.Thread(target=self._tell, args=(text, code, range(self.count)), daemon=True)
        teller.start()
        teller.join(_LINGER + 2 * _BEAT)  # the service may not answer

    # --- the watch -------------------------------------------------------------------------------------------
    def _talk(self) -> None:
        """Says that this process is alive, and hears of the others."""
        beat = 0
        while not self._closing.is_set():
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self.index}", str(beat), True)
                for key, value in self._signs():
                    self._note(int(key.removeprefix(_ALIVE)), value)
                self._answered = time.monotonic()
                said = self._client.blocking_key_value_get(_END, round(1000 * _BEAT))
            except Exception as error:
                if "timed out" not in str(error):
                    time.sleep(0.1)
                continue
            if self._closing.is_set() or self._told:
                return
            self._hear(json.loads(said))

    def _signs(self) -> Sequence[tuple[str, str]]:
        if self.leads:
            return self._client.key_value_dir_get(_ALIVE)
        with contextlib.suppress(Exception):  # process 0 has said nothing yet
            return [(f"{_ALIVE}0", self._client.key_value_try_get(f"{_ALIVE}0"))]
        return []

    def _note(self, process: int, beat: str) -> None:
        if self._beats.get(process) != beat and process in self._silence:
            self._beats[process], self._silence[process] = beat, 0.0

    def _hear(self, said: Mapping[str, Any]) -> None:
        self._set(f"{_HEARD}{self.index}", "")
        if not self._closing.is_set():
            _die(said.get("text"), said.get("code", GONE))

    def _judge(self) -> None:
        """Ends the process when another has been silent for too long."""
        before = time.monotonic()
        while not self._closing.wait(_BEAT / 2):
            now = time.monotonic()
            passed, before = min(now - before, _BEAT), now  # no more: this process may have been stopped itself
            for process in self._silence:
                self._silence[process] += passed
            limit = min(self.timeout, _SUSPECT) if self._suspects else self.timeout
            lost = [process for process, silence in self._silence.items() if silence > limit]
            if not lost and not self.leads and now - self._answered > _SILENT and _refused(self._address):
                lost = [0]
            if lost and not self._closing.is_set():
                self._lose(lost)

    def _lose(self, lost: Sequence[int]) -> None:
        who = f"Process {lost[0]}" if len(lost) == 1 else f"Processes {', '.join(map(str, lost))}"
        verb = "is" if len(lost) == 1 else "are"
        text = (
            f"{who} of {self.count} {verb} gone (no sign of life): this run ends here; run the same command again, in "
            "all processes, to go on from what is finished."
        )
        self._told = True
        if self.leads:
            self._tell(text, GONE, [process for process in range(self.count) if process not in lost])
        _die(text, GONE)

    def _tell(self, text: str, code: int, audience: Sequence[int]) -> None:
        self._set(_END, json.dumps({"text": text, "code": code}))
        until = time.monotonic() + _LINGER
        expected = {f"{_HEARD}{process}" for process in audience if process != self.index}
        while self.leads and time.monotonic() < until:
            with contextlib.suppress(Exception):
                if expected <= {key for key, _ in self._client.key_value_dir_get(_HEARD)}:
                    return
            time.sleep(0.05)

    def _set(self, key: str, value: str) -> None:
        with contextlib.suppress(Exception):  # the service is gone, or another process was first
            self._client.key_value_set(key, value)

    def _at_exit(self) -> None:
        """Before JAX's own end, which waits for the others, and crashes where they are gone."""
        uncaught = getattr(sys, "last_value", None)
        if self._code is None and uncaught is not None:
            self.fail(uncaught)
        if self._code is None:
            self.close()
        elif self.count > 1:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self._code)


def _service() -> tuple[Any, str]:
    """JAX's client of the coordination service, which has no public name, or None; and the service's address."""
    try:
        from jax._src.distributed import global_state

        return global_state.client, global_state.coordinator_address or ""
    except (ImportError, AttributeError):
        return None, ""


def _refused(address: str) -> bool:
    """Whether nobody listens at an address: the process that did is gone, not only slow."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _BEAT).close()
    except TimeoutError:
        return False
    except (OSError, ValueError):
        return True
    return False


def _delay_aborts() -> None:
    """JAX crashes a process at once whose coordinator is gone: a few seconds later the watch has said what happened.

    C's `sleep` as the handler of SIGABRT, signal 6, sleeps for 6 seconds in the thread that aborts; the others go on.
    """
    with contextlib.suppress(Exception):  # no such library: the crash is ugly, and nothing else is lost
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _die(text: str | None, code: int) -> None:
    """Ends the process from whatever thread, also while another waits for a collective that never ends."""
    if text:
        show(f"error: {text}")
    os._exit(code)


def show(text: str) -> None:
    """A last line on the standard error, whatever Python is doing."""
    try:
        where = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        where = 2
    cursor = "\x1b[?25h" if os.isatty(where) else ""  # a bar hides it
    os.write(where, f"{cursor}{text}\n".encode())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what C++ says of the others' end, and of their beginning, off the standard error and output.

    `sys.stdout` and `sys.stderr` are as before; what libraries write to the descriptors 1 and 2 goes to the standard
    error, without the lines that the sentence of `Session` says better.
    """
    streams = sys.stdout, sys.stderr
    try:
        out, err = (os.dup(stream.fileno()) for stream in streams)
    except (AttributeError, OSError, ValueError):  # they are objects of Python's
        yield
        return
    for stream in streams:
        stream.flush()
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    sys.stdout, sys.stderr = _reopened(out, streams[0]), _reopened(err, streams[1])
    pump = threading.Thread(target=_pump, args=(read, err), daemon=True)
    pump.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)  # the last writers of the pipe are gone, and the pump ends
        sys.stdout, sys.stderr = streams
        pump.join(1)


def _reopened(descriptor: int, like: Any) -> Any:
    return open(descriptor, "w", buffering=1, encoding=like.encoding, errors="replace", closefd=False)


_NOISE = re.compile(rb"\[Gloo\]|peer ranks|Polled an error from coordination service")  # Gloo writes a line by pieces
_CRASH = b"Terminating process because the JAX distributed service detected fatal errors"


def _pump(read: int, err: int) -> None:
    with open(read, "rb") as lines:
        for line in iter(lines.readline, b""):
            if _CRASH in line:
                time.sleep(5)  # the watch ends the process meanwhile, or it was something else
            if not _NOISE.search(line):
                with contextlib.suppress(OSError):
                    os.write(err, line)
