"""Snapshots: a job goes on in another process as if nothing had been, or at least with the same tokens."""

import dataclasses
import shutil

import numpy as np
import pytest
from engines import tiny

from kvjax import snapshots
from kvjax.errors import UserError
from kvjax.job import Job, drive
from kvjax.plans import Options, Request
from kvjax.sampling_params import SamplingParams

MODEL = "tiny_llama"
SEGMENT = 1e-6  # seconds: the host looks after every step
OPTIONS = Options(slots=4, rows=8, packed=16, segment_seconds=SEGMENT)
MIXED = [
    SamplingParams(max_new_tokens=20, logprobs=2),
    SamplingParams(max_new_tokens=30, temperature=0.9, top_k=40, stop=("zzz", "aéb")),
    SamplingParams(max_new_tokens=12, temperature=1.0, repetition_penalty=1.2, logit_bias={7: 2.5}, n=2),
    SamplingParams(max_new_tokens=25, temperature=0.8, seed=5, logprobs=0, stop_token_ids=(9,)),
]


def asked():
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 320, n).tolist()) for n in (5, 17, 9, 30, 17, 2, 11, 8, 23, 5)]
    prompts[4] = prompts[1]  # shares its pages
    found = []
    for i, prompt in enumerate(prompts):
        params = MIXED[i % len(MIXED)]
        salt, pins = ("x", (4, 2)) if i == 7 else ("", (0, 0))
        found += [Request(i, sample, prompt, params, salt, pins) for sample in range(params.n)]
    return found


def begun(segments, options=OPTIONS, **more):
    """A job that has run so many segments, and what has ended in them."""
    job = Job(tiny(MODEL), options, seed=3, **more)
    for request in asked():
        job.add(request)
    return job, [output for _ in range(segments) for output in job.advance().finished]


def rest(job):
    """All that a job still does: outputs by request, and the last report's counters."""
    reports = list(drive(job, []))
    outputs = {(o.request.index, o.request.sample): o for report in reports for o in report.finished}
    return outputs, dataclasses.replace(reports[-1], finished=())


def tokens(outputs):
    return {key: (output.tokens, output.finish_reason) for key, output in outputs.items()}


def near(found, expected):
    """The same tokens, and log-probabilities but for rounding."""
    assert tokens(found) == tokens(expected)
    for key, output in expected.items():
        assert (output.logprobs is None) == (found[key].logprobs is None)
        for a, b in zip(output.logprobs or (), found[key].logprobs or (), strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
            assert list(a.top) == list(b.top)


@pytest.fixture(scope="module")
def whole():
    return rest(begun(0)[0])[0]


@pytest.mark.parametrize("segments", [0, 1, 2, 7, 19, 40])
def test_goes_on_bit_for_bit(tmp_path, segments):
    job, _ = begun(segments)
    snapshots.save(job, tmp_path / "s")
    resumed = snapshots.resume(tiny(MODEL), tmp_path / "s", OPTIONS)
    assert (resumed.state is None, resumed.unfinished) == (segments == 0, job.unfinished)
    assert rest(resumed) == rest(job)  # log-probabilities, tokens from the prefix index and counters, too


@pytest.mark.parametrize("segments", [1, 7, 19, 40])
def test_without_pages_the_tokens_are_the_same(tmp_path, whole, segments):
    job, ended = begun(segments)
    snapshots.save(job, tmp_path / "s", pages=False)
    resumed = snapshots.resume(tiny(MODEL), tmp_path / "s", OPTIONS)
    assert (resumed.state, resumed.plan) == (None, job.plan)
    outputs, last = rest(resumed)
    near(outputs | {(o.request.index, o.request.sample): o for o in ended}, whole)
    assert last.computed > rest(job)[1].computed  # what had run was computed again
    assert not (tmp_path / "s" / "0" / "state").exists()


@pytest.mark.parametrize("change", [{"slots": 2, "share_prefixes": False}, {"kv_bytes": 80_000}], ids=str)
def test_other_options_go_through_the_withdrawn_form(tmp_path, whole, change):
    job, ended = begun(19)
    snapshots.save(job, tmp_path)
    options = dataclasses.replace(OPTIONS, **change)
    resumed = snapshots.resume(tiny(MODEL), tmp_path, options)
    assert (resumed.state, resumed.plan, resumed.unfinished) == (None, None, job.unfinished)
    outputs, _ = rest(resumed)
    near(outputs | {(o.request.index, o.request.sample): o for o in ended}, whole)


def test_another_plan_and_options_that_do_not_matter(tmp_path):
    job, _ = begun(7)
    snapshots.save(job, tmp_path)
    plan = dataclasses.replace(job.plan, queue=2 * job.plan.queue)
    other = snapshots.resume(tiny(MODEL), tmp_path, OPTIONS, plan=plan)
    assert (other.state, other.plan) == (None, plan)
    options = dataclasses.replace(OPTIONS, segment_seconds=9.0, refill=1)
    assert snapshots.resume(tiny(MODEL), tmp_path, options, plan=job.plan).state is not None


def test_numbers_clock_and_ended_requests_go_on(tmp_path):
    time = iter(range(100, 10**6, 100))
    job, _ = begun(3, clock=lambda: next(time))
    cancelled = [0, max(job.live)]
    job.cancel(cancelled)
    seconds, unfinished = job.seconds, job.unfinished
    snapshots.save(job, tmp_path)
    resumed = snapshots.resume(tiny(MODEL), tmp_path, OPTIONS, clock=lambda: 7.0)
    assert (resumed.seconds, resumed.unfinished) == (seconds + 100, unfinished)
    assert resumed.add(asked()[0]) == len(asked())
    finished = resumed.advance().finished
    orders = [asked().index(output.request) for output in finished if output.finish_reason == "cancelled"]
    assert sorted(orders) == cancelled
    assert finished == job.advance().finished
    first = next(output for output in finished if output.request == asked()[0])
    assert len(first.tokens) == len(first.logprobs or ()) > 0
    assert all(len(entry.top) == 2 for entry in first.logprobs or ())


CHANGES = {
    "context 256, not 128": lambda m: dataclasses.replace(m, config=dataclasses.replace(m.config, context=128)),
    "dtype 'float32', not 'bfloat16'": lambda m: dataclasses.replace(m, dtype="bfloat16"),
    "kv_dtype 'float32', not 'float16'": lambda m: dataclasses.replace(m, storage="float16"),
    "config '": lambda m: dataclasses.replace(m, config=dataclasses.replace(m.config, norm_eps=1.0)),
    "parameters '": lambda m: dataclasses.replace(m, params={"embed": m.params["embed"]}),
    "family 'llama', not 'toy'": lambda m: dataclasses.replace(m, family=m.family._replace(name="toy")),
}


def test_another_model_is_refused(tmp_path):
    job, _ = begun(0)
    snapshots.save(job, tmp_path)
    for part, change in CHANGES.items():
        with pytest.raises(UserError, match=r"^The snapshot \S+ is of another model \(.*load the one it was") as caught:
            snapshots.resume(change(tiny(MODEL)), tmp_path, OPTIONS)
        assert part in str(caught.value)
    assert snapshots.fingerprint(tiny(MODEL, stacked=True)) == snapshots.fingerprint(tiny(MODEL))


def numbers(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_complete_snapshot_counts(tmp_path):
    job, _ = begun(0)
    for number in range(4):
        job.seed = number
        snapshots.save(job, tmp_path, note={"number": number})
    assert numbers(tmp_path) == ["2", "3"]
    shutil.copytree(tmp_path / "3", tmp_path / "7.orbax-checkpoint-tmp-123")  # a process was killed here
    shutil.copytree(tmp_path / "3", tmp_path / "notes")

    def seed(**options):
        return snapshots.resume(tiny(MODEL), tmp_path, OPTIONS, **options).seed

    assert (seed(), seed(note={"number": 2})) == (3, 2)
    assert numbers(tmp_path) == ["2", "3", "notes"]
    for damaged in (tmp_path / "3" / "rows" / "manifest.ocdbt", tmp_path / "3" / "host" / "metadata"):
        damaged.write_bytes(damaged.read_bytes()[:20])
        assert seed() == 2
    with pytest.raises(snapshots.NoSnapshot, match=r"^There is no complete snapshot of this job in \S+ \(3 cannot be"):
        seed(note={"number": 5})
    snapshots.save(job, tmp_path)
    assert numbers(tmp_path) == ["3", "4", "notes"]
    (tmp_path / "5").mkdir()  # bare
    assert seed() == 3
    snapshots.remove(tmp_path)
    assert numbers(tmp_path) == ["notes"]
    with pytest.raises(snapshots.NoSnapshot, match=r"^There is no complete snapshot in \S+\.$"):
        seed()
    with pytest.raises(snapshots.NoSnapshot):
        snapshots.resume(tiny(MODEL), tmp_path / "none", OPTIONS)


def test_the_running_job_does_not_touch_what_was_saved(tmp_path):
    """The state is donated to the next segment, and on a CPU Orbax would see its memory."""
    job, _ = begun(7)
    snapshots.save(job, tmp_path / "a")
    before = snapshots.resume(tiny(MODEL), tmp_path / "a", OPTIONS)
    outputs = rest(job)
    assert rest(before) == outputs
    again = snapshots.resume(tiny(MODEL), tmp_path / "a", OPTIONS)
    snapshots.save(again, tmp_path / "b")
    assert rest(again) == outputs
    assert rest(snapshots.resume(tiny(MODEL), tmp_path / "b", OPTIONS)) == outputs


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"^A snapshot cannot be written to \S+file \("):
        snapshots.save(begun(0)[0], tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
