"""`kvjax batch` as a process that is killed and terminated at random moments: the output is the same to the byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import golden_models
import pytest

import kvjax

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("KVJAX_TEST_SEED", "0"))
LINES = 360
OPTIONS = ("--slots", 4, "--ignore-eos", "--max-new-tokens", 60)


def lines(count):
    """Greedy and sampled lines, with several samples, shared beginnings, salts and stop strings; some are bad."""
    rng = random.Random(1)
    prefix = [rng.randrange(4, 320) for _ in range(70)]
    found = []
    for i in range(count):
        # Any four of them have 65 to 128 tokens: the job's shapes, and so the program, are the same after a kill.
        prompt = [*prefix, i + 4] if i % 4 == 0 else "ba" * (17 + i % 3)
        line: dict[str, Any] = {"prompt": prompt, "custom_id": f"é-{i}"}
        if i % 3 == 1:
            line |= {"temperature": 0.9, "top_k": 50}
        if i % 9 == 2 and i % 4:
            line |= {"n": 3, "temperature": 1.0}
        if i % 10 == 3:
            line |= {"max_tokens": 150}  # ends after many behind it
        if i % 10 == 4:
            line |= {"stop": ["zq", "#"], "cache_salt": "x"}
        found.append("{broken" if i % 22 == 5 else json.dumps(line, ensure_ascii=False))
    found[10] = json.dumps({"prompt": "a" * 300})  # too long for the context
    return "\n".join(found) + "\n"


class Job:
    """A job in a folder of its own, run by processes that share a cache of compiled programs."""

    def __init__(self, places, folder, count=LINES):
        (self.model, self.cache), self.folder = places, folder
        self.target, self.snapshots = folder / "out.jsonl", folder / "out.jsonl.snapshots"
        folder.mkdir(exist_ok=True)
        (folder / "in.jsonl").write_text(lines(count))

    def start(self, *options):
        env = {**os.environ, "KVJAX_CACHE": str(self.cache), "KVJAX_NO_COMPILE_CACHE": ""}
        env |= {"PYTHONPATH": str(Path(kvjax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        words = ["batch", self.folder / "in.jsonl", self.target, "-m", self.model, *OPTIONS, *options]
        command = [sys.executable, "-m", "kvjax", *map(str, words)]
        return subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE)

    def run(self, *options):
        process = self.start(*options)
        out, err = process.communicate(timeout=200)
        assert (process.returncode, out) == (0, b""), err.decode()
        return err.decode()

    def records(self):
        return self.target.read_bytes() if self.target.exists() else b""

    def running(self, process):
        """Waits until the process handles SIGTERM: before, it dies of it as others do."""
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            caught = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
            if caught and int(caught[0], 16) >> (signal.SIGTERM - 1) & 1:
                return
            time.sleep(0.01)

    def generating(self, process):
        """Waits until the process has written a record or a snapshot."""

        def there():
            return self.records(), sorted(self.snapshots.glob("*"))

        before = there()
        while process.poll() is None and there() == before:
            time.sleep(0.01)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survival")
    return golden_models.write_checkpoint("tiny_llama", folder / "model"), folder / "cache"


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory):
    """The output of an undisturbed run; what it compiled is there for the others. A line's record depends on nothing
    else, so the output of its first lines alone is that of a job of them."""
    job = Job(places, tmp_path_factory.mktemp("whole") / "job")
    said = job.run()
    records = [json.loads(line) for line in job.records().splitlines()]
    assert [record["index"] for record in records] == list(range(LINES))
    bad = sum("error" in record for record in records)
    assert f"{LINES} records, {bad} of them errors" in said
    assert bad > 10
    assert sum("samples" in record for record in records) > 20
    assert len({record.get("text") for record in records}) > 150
    return job.records()


def first(whole, count):
    return b"".join(whole.splitlines(keepends=True)[:count])


SOME_SNAPSHOTS = [("--snapshot-every", 0.1), (), ("--snapshot-every", 0.3, "--no-snapshot-kv"), ("--snapshot-every", 1)]


def test_killed_at_random_moments(places, whole, tmp_path):
    """20 times and more, from the import of JAX to the last record, with snapshots and without, until it is done."""
    job, rng = Job(places, tmp_path / "job"), random.Random(SEED)
    kills = kept = 0
    while job.records() != whole:
        process = job.start(*SOME_SNAPSHOTS[kills % len(SOME_SNAPSHOTS)])
        delay = rng.uniform(0, 4)
        if kills % 5 > 2:  # the others mostly while it is loaded
            job.generating(process)
            delay = rng.uniform(0, 0.5)
        try:
            process.communicate(timeout=delay if kills < 22 else 200)
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            kept += job.snapshots.exists()
            records = job.records()
            assert whole.startswith(records[: records.rfind(b"\n") + 1])
            if kills % 5 == 0 and job.snapshots.exists():  # what a process leaves that is killed while it writes
                for name in ("99.orbax-checkpoint-tmp", "98"):
                    (job.snapshots / name / "host").mkdir(parents=True, exist_ok=True)
    assert kills >= 20
    assert kept > 2
    assert sorted(path.name for path in job.folder.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def test_terminated_again_and_again(places, whole, tmp_path):
    """SIGTERM, with and without periodic snapshots: code 0, one line, nothing lost that had been reported."""
    count = 150
    whole = first(whole, count)
    job, rng = Job(places, tmp_path / "job", count), random.Random(SEED + 1)
    stopped = kept = 0
    for turn in range(40):
        before = job.records()
        process = job.start(*(("--snapshot-every", 0.2) if turn % 3 == 1 else ()))
        job.running(process)
        if turn % 3:
            job.generating(process)
        time.sleep(rng.uniform(0, 0.5 if turn % 3 else 4))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, b""), err.decode()
        assert whole.startswith(job.records())
        assert job.records().startswith(before)
        if job.records() == whole and not job.snapshots.exists():
            break
        said = err.decode().splitlines()
        assert said[-1].startswith(f"Stopped: what is finished is in {job.target}"), said
        assert said[-1].endswith("run the same command again to go on from there.")
        assert not any("Traceback" in line for line in said)
        stopped += 1
        kept += job.snapshots.exists()
    assert job.records() == whole
    assert stopped >= 4
    assert kept >= 2


def test_a_second_sigterm_and_ctrl_c_end_at_once(places, whole, tmp_path):
    job = Job(places, tmp_path / "job")
    for signals, code in (((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT,), 130)):
        process = job.start()
        records = job.records()
        while process.poll() is None and job.records() == records:
            time.sleep(0.01)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.003)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert err.decode().splitlines()[-1].startswith("Stopped: what is finished is in")
        assert whole.startswith(job.records())


def test_sigterm_within_a_compilation(places, whole, tmp_path):
    """XLA gives Python no turn for many seconds, and a machine that is taken away does not wait for it."""
    model, _ = places
    job = Job((model, tmp_path / "empty"), tmp_path / "job", 20)
    process = job.start("--snapshot-every", 5)
    job.running(process)
    time.sleep(3)  # the model is small: this is within the first segment's compilation
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode().count("Stopped: what is finished is in")) == (0, 1)
    assert time.monotonic() - began < 3
    assert not job.records()
    other = Job(places, job.folder, 20)
    other.run()
    assert other.records() == first(whole, 20)


def test_a_snapshot_that_is_torn_leaves_the_older_one(places, whole, tmp_path):
    """A process that dies while it writes: the next goes on from the snapshot before, and cleans up."""
    count = 100
    job = Job(places, tmp_path / "job", count)
    process = job.start("--snapshot-every", 0.05)
    while process.poll() is None and len(list(job.snapshots.glob("[0-9]"))) < 2:
        time.sleep(0.005)
    while process.poll() is None and not list(job.snapshots.glob("*orbax-checkpoint-tmp*")):
        pass  # the moment in which it writes one
    process.kill()
    process.communicate()
    torn = [path.name for path in job.snapshots.iterdir() if not path.name.isdecimal()]
    assert torn
    assert [path for path in job.snapshots.iterdir() if path.name.isdecimal()]
    process = job.start("--slots", 2)  # goes through the withdrawn form
    while process.poll() is None and (job.snapshots / torn[0]).exists():
        time.sleep(0.01)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err.decode()
    assert job.records() == first(whole, count)
    assert not job.snapshots.exists()
