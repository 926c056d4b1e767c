"""Jobs of several real processes on one machine: the records of one, whatever happens to one of them."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import golden_models
import jaxlib
import pytest
import typer.testing

import kvjax
from kvjax import batch, batch_files, processes
from kvjax.cli import app as cli
from kvjax.errors import UserError

PATIENCE = 240  # seconds: these machines may have two cores for everything
DEFAULTS = {"max_new_tokens": 10, "ignore_eos": True}


def lines(count, longest=None):
    """Greedy and sampled lines with shared beginnings; some are bad, some have several samples, stop strings, salts."""
    found = []
    for i in range(count):
        line: dict[str, Any] = {"prompt": "ba" * (5 + i % 3) + "lo" * (i % 4), "custom_id": f"é-{i}"}
        if i % 3 == 1:
            line |= {"temperature": 0.9, "top_k": 50}
        if i % 4 == 2:
            line |= {"n": 2, "temperature": 1.0}
        if i % 5 == 3:
            line |= {"stop": ["zq", "#"], "cache_salt": "x"}
        if longest:
            line |= {"max_tokens": longest - 7 * (i % 3)}
        found.append("{broken" if i == 1 else json.dumps(line, ensure_ascii=False))
    return "\n".join(found) + "\n"


LONG = lines(16, longest=160)


@dataclasses.dataclass
class Run:
    """Processes of one job, those with an end and those without."""

    started: list[subprocess.Popen]

    def wait(self, seconds=PATIENCE):
        """[(exit code, what it said)]; none is left behind."""
        until = time.monotonic() + seconds
        try:
            said = [one.communicate(timeout=max(1, until - time.monotonic()))[1].decode() for one in self.started]
        finally:
            self.end()
        return list(zip([one.returncode for one in self.started], said, strict=True))

    def end(self):
        for one in self.started:
            if one.poll() is None:
                one.kill()
            one.wait()
            for pipe in (one.stdout, one.stderr):
                if pipe is not None:
                    pipe.close()


class Job:
    def __init__(self, places: Any, folder: Any, text: str):
        model, cache = places
        self.model, self.cache, self.folder, self.target = model, cache, folder, folder / "out.jsonl"
        self.snapshots = folder / "out.jsonl.snapshots"
        folder.mkdir(exist_ok=True)
        (folder / "in.jsonl").write_text(text)

    def start(self, count, devices, *options, each=lambda i: ()):
        env = {**os.environ, "KVJAX_CACHE": str(self.cache), "KVJAX_NO_COMPILE_CACHE": "", "JAX_PLATFORMS": "cpu"}
        env |= {"PYTHONPATH": str(Path(kvjax.__file__).parents[1]), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        if jaxlib.__version__.startswith("0.10."):  # as in conftest.py: compilation is most of the time
            flags.append("--xla_cpu_use_fusion_emitters=false")
        env["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
        words = [sys.executable, "-m", "kvjax", "batch", self.folder / "in.jsonl", self.target, "-m", self.model]
        words += ["--slots", 2, "--max-new-tokens", DEFAULTS["max_new_tokens"], "--ignore-eos", *options]
        words += ["--layers", "scanned"]  # compiles faster
        port = free_port()
        run = Run([])
        for i in range(count):
            more = ["--coordinator", f"localhost:{port}", "--processes", count, "--process", i] if count > 1 else []
            command = [str(word) for word in (*words, *more, *each(i))]
            run.started.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=PIPE, stderr=PIPE))
        return run

    def run(self, *how, **more):
        for code, said in self.start(*how, **more).wait():
            assert code == 0, said
        return self.records()

    def records(self):
        return self.target.read_bytes() if self.target.exists() else b""

    def progress(self):
        sizes = [path.stat().st_size for path in self.folder.glob("out.jsonl*") if path.suffix in (".jsonl", ".part")]
        return sizes, sorted(path.name for path in self.snapshots.glob("[0-9]*") if path.name.isdecimal())

    def until(self, run, condition):
        """Waits until condition(), or until a process ends."""
        end = time.monotonic() + PATIENCE
        while all(one.poll() is None for one in run.started) and not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def generating(self, run):
        """Waits for a record or a snapshot."""
        before = self.progress()
        self.until(run, lambda: self.progress() != before and (self.records() or self.snapshots.exists()))


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return golden_models.write_checkpoint("tiny_llama_mha", folder / "model"), folder / "cache"


@pytest.fixture(scope="module")
def llm(places):
    return kvjax.load(places[0], slots=2)


def alone(llm, folder, text):
    """The records of one process without a mesh."""
    folder.mkdir()
    (folder / "in.jsonl").write_text(text)
    batch.run(llm, folder / "in.jsonl", folder / "out.jsonl", defaults=DEFAULTS)
    return (folder / "out.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_write_the_records_of_one(places, llm, tmp_path):
    text = lines(6)
    expected = alone(llm, tmp_path / "alone", text)
    job = Job(places, tmp_path / "job", text)
    leader, other = job.start(2, 1, "--mesh", "model=2").wait()
    assert (leader[0], other[0]) == (0, 0), leader[1] + other[1]
    assert "6 records, 1 of them errors" in leader[1].splitlines()[-1]
    assert other[1] == ""
    assert job.records() == expected
    assert sorted(path.name for path in job.folder.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, devices, mesh",
    [(2, 2, "data=2,model=2"), (4, 1, "seq=2,model=2")],
)
def test_meshes(places, llm, tmp_path, count, devices, mesh):
    text = lines(9)
    expected = alone(llm, tmp_path / "alone", text)
    job = Job(places, tmp_path / "job", text)
    assert job.run(count, devices, *(("--mesh", mesh) if mesh else ())) == expected


@pytest.fixture(scope="module")
def long(llm, tmp_path_factory):
    """The records of LONG."""
    return alone(llm, tmp_path_factory.mktemp("long") / "alone", LONG)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_a_rerun_goes_on(places, long, tmp_path, victim):
    expected, job = long, Job(places, tmp_path / "job", LONG)
    options = ("--mesh", "data=2", "--process-timeout", 8, "--snapshot-every", 0.5)
    run = job.start(2, 1, *options)
    job.generating(run)
    run.started[victim].kill()
    began = time.monotonic()
    ends = run.wait(40)
    assert time.monotonic() - began < 30
    code, said = ends[1 - victim]
    assert code == processes.GONE, said
    errors = [line for line in said.splitlines() if "lines, " not in line]
    assert errors == [
        f"error: Process {victim} of 2 is gone (no sign of life): this run ends here; run the same command again, in "
        "all processes, to go on from what is finished."
    ]
    assert expected.startswith(job.records()[: job.records().rfind(b"\n") + 1])
    assert job.records() != expected
    assert job.run(2, 1, *options) == expected
    assert not job.snapshots.exists()


@pytest.mark.slow
def test_sigterm_to_any_process_saves_what_any_number_of_them_resumes(places, long, tmp_path):
    expected, job = long, Job(places, tmp_path / "job", LONG)
    mesh = ("--mesh", "seq=2")
    run = job.start(2, 1, *mesh)
    job.generating(run)
    run.started[1].send_signal(signal.SIGTERM)
    leader, other = run.wait()
    assert (leader[0], other[0], other[1]) == (0, 0, ""), leader[1]
    assert leader[1].splitlines()[-1].startswith("Stopped: what is finished is in")
    assert len(list(job.snapshots.glob("[0-9]"))) == 2  # without K and V, and then with them
    assert job.records() != expected
    for number, how in enumerate([(1, 1), (2, 1, *mesh), (4, 1, "--mesh", "seq=2,data=2"), (1, 2, *mesh)]):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(job.folder, folder)
        copy = Job(places, folder, LONG)
        assert copy.run(*how) == expected
        assert not copy.snapshots.exists()


@pytest.mark.slow
def test_what_one_process_cannot_do_ends_all(places, tmp_path):
    job = Job(places, tmp_path / "job", lines(6))
    ends = job.start(2, 1, "--mesh", "model=2", each=lambda i: ("--temperature", 0.1 + i)).wait()
    assert [code for code, _ in ends] == [2, 2]
    said = "error: defaults temperature is not the same in all processes: 0.1 in process 0; start all with the same "
    assert [text for _, text in ends] == [said + "arguments.\n", ""]
    ends = job.start(2, 1, "--mesh", "model=3").wait()
    assert [code for code, _ in ends] == [2, 2]
    assert "3 devices" in ends[0][1]
    job.run(2, 1, "--mesh", "model=2")
    (code, said), (other, silent) = job.start(2, 1, "--mesh", "model=2", "--seed", 3).wait()
    assert (code, other, silent) == (2, 2, "")
    assert "was begun with seed 0, not 3" in said
    assert not any("Traceback" in text for _, text in ends)


@pytest.mark.slow
def test_ctrl_c_in_one_process_ends_all(places, tmp_path):
    job = Job(places, tmp_path / "job", LONG)
    run = job.start(2, 1, "--mesh", "data=2")
    job.generating(run)
    run.started[1].send_signal(signal.SIGINT)
    began = time.monotonic()
    (code, said), (other, own) = run.wait(60)
    assert time.monotonic() - began < 30
    assert other == 130, own
    assert code == 130, said
    assert "Process 1 of 2 was stopped: what is finished is in" in said
    assert not any("Traceback" in text for text in (said, own))


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_gone(places, tmp_path):
    job = Job(places, tmp_path / "job", LONG)
    for victim in (0, 1):
        run = job.start(2, 1, "--mesh", "data=2", "--process-timeout", 6, "--overwrite")
        job.generating(run)
        run.started[victim].send_signal(signal.SIGSTOP)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.started[1 - victim].wait(40)
            code = run.started[1 - victim].poll()
        finally:
            run.started[victim].kill()
            ends = run.wait(10)
        assert code == processes.GONE, ends[1 - victim][1]
        assert ends[1 - victim][1].splitlines()[-1].startswith(f"error: Process {victim} of 2 is gone")


# --- in this process alone -------------------------------------------------------------------------------------
def test_one_process_agrees_with_itself():
    assert (processes.count(), processes.index()) == (1, 0)
    assert processes.agree((3, 4), (True, False)) == ([3, 4], (True, False))
    assert processes.first(lambda: {"a": [1]}) == {"a": [1]}
    processes.check_same(a=1)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (("localhost:9000",), "go together"),
        (("localhost", 2, 0), "HOST:PORT"),
        (("localhost:99999", 2, 0), "HOST:PORT"),
        (("localhost:9000", 2, 2), "count them from 0"),
    ],
)
def test_impossible_arguments(arguments, reason):
    with pytest.raises(UserError, match=reason):
        processes.initialize(*arguments)


def test_a_port_in_use():
    with socket.create_server(("", 0)) as server, pytest.raises(UserError, match="give another"):
        processes.initialize(f"localhost:{server.getsockname()[1]}", 2, 0)


@pytest.mark.parametrize(
    "mesh, reason",
    [
        ("seq", "--mesh is"),
        ("x=2", "--mesh is"),
        ("seq=0", "--mesh is"),
        ("seq=2,seq=2", "--mesh is"),
        ("seq=-1", "is"),
    ],
)
def test_a_bad_mesh_is_refused_before_anything_is_loaded(mesh, reason, tmp_path):
    done = typer.testing.CliRunner().invoke(cli.app, ["generate", "x", "-m", str(tmp_path), "--mesh", mesh])
    assert done.exit_code == 2
    assert reason in done.output
    assert "seq=4,model=2" in done.output


def test_a_mesh_of_more_devices_than_there_are(places):
    done = typer.testing.CliRunner().invoke(cli.app, ["generate", "x", "-m", str(places[0]), "--mesh", "seq=16"])
    assert done.exit_code == 2
    assert "16 devices, and there are 8" in done.output


def test_a_mesh_of_some_devices(places, llm):
    arguments = ["generate", "balo", "--raw", "-m", str(places[0]), "--max-new-tokens", "5", "--mesh", "model=2"]
    done = typer.testing.CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert llm.generate("balo", max_new_tokens=5).text in done.output


def test_followed_records_are_as_far_as_the_written_ones(tmp_path):
    shard = batch_files.Shard(1, 2, 3)
    with (tmp_path / "out").open("wb") as file:
        records = batch_files.Records(file, shard)
        records.add(9, b"early")
        follower = batch_files.Followed(json.loads(json.dumps(records.known())), shard)
        for index in (4, 3, 5, 10):
            records.add(index, b"x")
            follower.add(index, b"x")
            records.flush()
            follower.flush()
            assert (follower.next, follower.done) == (records.next, records.done)
            assert follower.waiting.keys() == records.waiting.keys()
