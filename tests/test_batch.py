"""Batch jobs from file to file: order, error records, and going on after every kind of stop."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import random
import re
import shutil
import sys
from typing import Any

import golden_models
import pytest

import kvjax
from kvjax import batch, batch_files
from kvjax.errors import UserError
from kvjax.stops import AutomatonBank

DEFAULTS = {"max_new_tokens": 6}
WORDS = ("bado", "fu", "gi le", "mi", "no so", "ra")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return kvjax.load(golden_models.write_checkpoint("tiny_llama", tmp_path_factory.mktemp("model") / "m"), slots=2)


@pytest.fixture(scope="module")
def job(llm, tmp_path_factory):
    """An input of 12 lines, some of them bad, with the output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("job")
    lines = [{"prompt": word, "custom_id": f"é-{i}", "temperature": 0.9} for i, word in enumerate(WORDS)]
    lines[1]["max_new_tokens"] = 30  # ends after the lines behind it
    lines[3]["n"] = 2
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines[:4])
    text += "{broken\n" + json.dumps({"prompt": "a" * 300}) + "\n"
    text += "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines[4:])
    (folder / "in.jsonl").write_text(text)
    batch.run(llm, folder / "in.jsonl", folder / "out.jsonl", defaults=DEFAULTS)
    return folder


def run_lines(llm, folder, lines, **options):
    raw = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    (folder / "in.jsonl").write_bytes(raw)
    summary = batch.run(llm, folder / "in.jsonl", folder / "out.jsonl", **({"defaults": DEFAULTS} | options))
    return summary, read(folder / "out.jsonl")


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def copy(job, folder, *suffixes):
    """A fresh folder with the job's input and, of its results, those asked for."""
    for name in ("in.jsonl", *(f"out.jsonl{suffix}" for suffix in suffixes)):
        (folder / name).write_bytes((job / name).read_bytes())
    return folder / "in.jsonl", folder / "out.jsonl"


def test_records_hold_what_generate_gives(llm, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "bado", "custom_id": "one", "max_tokens": 4},
        {"messages": messages, "custom_id": 2, "params": {"max_new_tokens": 3, "stop": None}},
        {"prompt": [5, 6, 7]},
    ]
    summary, records = run_lines(llm, tmp_path, lines)
    expected = [
        llm.generate("bado", max_new_tokens=4),
        llm.generate(messages, max_new_tokens=3),
        llm.generate([5, 6, 7], max_new_tokens=6),
    ]
    assert records == [
        {
            "custom_id": name,
            "index": i,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt_tokens),
            "completion_tokens": len(completion.tokens),
        }
        for i, (name, completion) in enumerate(zip(("one", 2, None), expected, strict=True))
    ]
    assert (summary.lines, summary.resumed, summary.errors) == (3, 0, 0)
    assert summary.prompt_tokens == sum(len(completion.prompt_tokens) for completion in expected)
    assert summary.completion_tokens == sum(len(completion.tokens) for completion in expected)


def test_samples_and_seeds_are_those_of_the_job(llm, tmp_path):
    line = {"prompt": "bado", "n": 2, "temperature": 1.0}
    _, records = run_lines(llm, tmp_path, [line, line, {**line, "seed": 3}], seed=5)
    params = kvjax.SamplingParams(max_new_tokens=6, n=2, temperature=1.0)
    expected = llm.generate(["bado"] * 2, params, seed=5)
    for record, completion in zip(records, expected, strict=False):
        assert [sample["text"] for sample in record["samples"]] == [sample.text for sample in completion.samples]
        assert [sample["completion_tokens"] for sample in record["samples"]] == [6, 6]
        assert record["text"] == record["samples"][0]["text"]
        assert record["completion_tokens"] == 12
    own = llm.generate("bado", max_new_tokens=6, n=2, temperature=1.0, seed=3)
    assert records[2]["text"] == own.text
    assert records[0]["text"] != records[1]["text"]


def test_logprobs(llm, tmp_path):
    _, (record, plain) = run_lines(llm, tmp_path, [{"prompt": "bado", "logprobs": 2}, {"prompt": "bado"}])
    completion = llm.generate(["bado", "bado"], max_new_tokens=6, logprobs=2)[0]
    assert "logprobs" not in plain
    assert [entry["token"] for entry in record["logprobs"]] == list(completion.tokens)
    for entry, expected in zip(record["logprobs"], completion.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(expected.chosen, abs=2e-4)
        assert {one["token"]: one["logprob"] for one in entry["top"]} == pytest.approx(expected.top, abs=2e-4)


BAD_LINES = [
    (b"{broken", "not valid JSON"),
    (b"", "it is empty"),
    (b"[1, 2]", "not a JSON object"),
    ("é".encode() * 90, "not valid JSON"),
    (b'"' + "é".encode() * 90 + b'"', "not a JSON object"),
    (b'{"prompt": "\xff"}', "not valid JSON"),
    (b"[" * 100000, "not valid JSON"),
    ({}, "neither"),
    ({"prompt": "a", "messages": []}, "both"),
    ({"prompt": 3}, "prompt must be"),
    ({"prompt": None}, "prompt must be"),
    ({"prompt": []}, "empty"),
    ({"prompt": [1, True]}, "prompt must be"),
    ({"prompt": [1, 320]}, "vocabulary"),
    ({"prompt": [10**50]}, "vocabulary"),
    ({"prompt": "\ud800"}, "Unicode"),
    ({"prompt": "a" * 300}, "exceed the context of 256"),
    ({"messages": "hi"}, "messages must be"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"prompt": "a", "custom_id": [1]}, "custom_id"),
    ({"prompt": "a", "temprature": 1}, "did you mean temperature?"),
    ({"prompt": "a", "params": {"temprature": 1}}, "did you mean temperature?"),
    ({"prompt": "a", "params": 3}, "params must be"),
    ({"prompt": "a", "top_k": 1, "params": {"top_k": 2}}, "top_k is given twice"),
    ({"prompt": "a", "max_tokens": 1, "params": {"max_new_tokens": 2}}, "given twice"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", ""),
    ({"prompt": "a", "n": 10**6}, "n is 1000000"),
    ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, ""),
    ({"prompt": "a", "stop": [""]}, "stop"),
]


def test_bad_lines_get_records_and_the_others_go_on(llm, tmp_path):
    lines = [{"prompt": "bado"}, *(line for line, _ in BAD_LINES), {"prompt": "fu", "custom_id": "last"}]
    summary, records = run_lines(llm, tmp_path, lines)
    assert summary.errors == len(BAD_LINES)
    assert [record["index"] for record in records] == list(range(len(lines)))
    for record, (line, part) in zip(records[1:-1], BAD_LINES, strict=True):
        assert part in record["error"]["message"], line
        assert "text" not in record
    assert records[0]["text"] == llm.generate("bado", max_new_tokens=6).text
    assert records[-1]["text"] == llm.generate("fu", max_new_tokens=6).text
    assert records[-1]["custom_id"] == "last"


def test_a_cache_too_small_for_one_line_stops_that_line_only(llm, tmp_path):
    small = kvjax.LLM(llm.model, llm.tokenizer, dataclasses.replace(llm.options, kv_bytes=60_000))
    long = {"max_new_tokens": 200, "ignore_eos": True}
    _, records = run_lines(small, tmp_path, [{"prompt": "bado"}, {"prompt": "a", **long}])
    assert records[0]["text"] == llm.generate("bado", max_new_tokens=6).text
    assert records[1]["finish_reason"] == "too_long"
    whole = llm.generate("a", **long)
    assert records[1]["completion_tokens"] < len(whole.tokens)
    assert whole.text.startswith(records[1]["text"])


def test_a_full_table_of_stop_strings_is_made_anew(llm, tmp_path, monkeypatch):
    """Room for the empty set and three others, with 18 to come; the longer lines run while the table changes."""
    monkeypatch.setattr(AutomatonBank.__init__, "__defaults__", (4 * 4 * 320,))
    text = llm.generate("bado", max_new_tokens=20).text
    found = [text[i : i + 3] for i in range(4, 13)]  # these end an output, the others do not
    stops = [stop for i, own in enumerate(found) for stop in (f"#{i}", own)] + ["x" * 10, "#0", []]
    lines = [{"prompt": "bado", "stop": stop, "max_new_tokens": 20} for stop in stops]
    summary, records = run_lines(llm, tmp_path, lines)
    assert records[18]["error"]["message"].startswith("stop ['xxxxxxxxxx'] would grow the table")
    assert summary.errors == 1
    expected = [text[: text.index(stop)] if stop in found else text for stop in stops]
    assert [record.get("text") for record in records] == [*expected[:18], None, text, text]
    assert [r.get("finish_reason") for r in records[:18]] == ["length", "stop"] * 9


def test_defaults_give_way_to_lines_and_null_means_default(llm, tmp_path):
    lines = [{"prompt": "bado"}, {"prompt": "bado", "max_tokens": 2}, {"prompt": "bado", "max_new_tokens": None}]
    _, records = run_lines(llm, tmp_path, lines)
    assert [record["completion_tokens"] for record in records] == [6, 2, 6]


def test_custom_ids_that_are_not_text_in_utf8_are_escaped(llm, tmp_path):
    _, records = run_lines(llm, tmp_path, [{"custom_id": "\ud800", "prompt": "a", "top_k": -1}])
    assert records[0]["custom_id"] == "\ud800"


def test_empty_input(llm, tmp_path):
    summary, records = run_lines(llm, tmp_path, [])
    assert (summary.lines, records) == (0, [])


def test_lines_are_read_as_there_is_room_and_shapes_grow(llm, tmp_path, monkeypatch):
    """Planned from the first 3: a longer line, with log-probabilities, a penalty and a bias, comes later."""
    first = llm.generate("bado", max_new_tokens=4).text
    monkeypatch.setattr(kvjax.job, "AHEAD", 3)
    monkeypatch.setattr(llm, "options", dataclasses.replace(llm.options, queue=4))
    lines = [{"prompt": word, "max_new_tokens": 4} for word in WORDS * 4]
    lines[11] |= {"max_new_tokens": 90, "ignore_eos": True, "logprobs": 1, "presence_penalty": 0.5}
    lines[11] |= {"logit_bias": {"7": 1.0, "8": 1.0}}
    unread = []
    requests = llm.requests

    def spy(*args, index, **options):
        unread.append(index - max((r["index"] for r in read(tmp_path / "out.jsonl")), default=-1))
        return requests(*args, index=index, **options)

    monkeypatch.setattr(llm, "requests", spy)
    summary, records = run_lines(llm, tmp_path, lines)
    assert (summary.done, len(unread), len(records)) == (24, 24, 24)
    assert max(unread[:11]) <= 9  # the line's 4, those that the host has in hand, and those of the last segment
    assert [r["completion_tokens"] for r in records] == [90 if i == 11 else 4 for i in range(24)]
    assert records[0]["text"] == first
    assert [r["text"] for r in records[18:]] == [r["text"] for r in records[:6]]


def test_bad_lines_without_end_do_not_fill_the_memory(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "_FLUSH", 10)
    waiting = []
    fail = batch._Run._fail

    def spy(run, *args):
        fail(run, *args)
        waiting.append(len(run.records.waiting))

    monkeypatch.setattr(batch._Run, "_fail", spy)
    _, records = run_lines(llm, tmp_path, [b"no"] * 35)
    assert (len(records), max(waiting)) == (35, 9)


def test_a_finished_job_is_left_alone(job, tmp_path):
    source, target = copy(job, tmp_path, "", ".job")
    before = target.stat()

    def never():
        raise AssertionError("the model was loaded")

    settings = {key: value for key, value in read_job(tmp_path).items() if key not in ("input", "seed", "defaults")}
    summary = batch.run(never, source, target, defaults=DEFAULTS, settings=settings)
    assert summary.resumed == summary.lines == 8
    assert (target.stat().st_mtime_ns, target.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def read_job(folder):
    return json.loads((folder / "out.jsonl.job").read_text())


def test_resumes_after_a_cut_anywhere(llm, job, tmp_path):
    whole = (job / "out.jsonl").read_bytes()
    source, target = copy(job, tmp_path, "", ".job")
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, 1, ends[0] - 1, ends[0], ends[3] + 5, ends[4], ends[-2], len(whole) - 1}
    for cut in sorted(cuts):
        target.write_bytes(whole[:cut])
        summary = batch.run(llm, source, target, defaults=DEFAULTS)
        assert target.read_bytes() == whole
        assert summary.resumed == sum(end <= cut for end in ends)


def test_resumes_after_a_cut_inside_a_character(llm, job, tmp_path):
    whole = (job / "out.jsonl").read_bytes()
    source, target = copy(job, tmp_path, "", ".job")
    target.write_bytes(whole[: whole.index("é".encode()) + 1])
    batch.run(llm, source, target, defaults=DEFAULTS)
    assert target.read_bytes() == whole


@pytest.mark.parametrize("torn", [False, True])
def test_records_out_of_order_are_kept_in_the_journal(llm, job, tmp_path, torn, monkeypatch):
    records = (job / "out.jsonl").read_bytes().splitlines(keepends=True)
    source, target = copy(job, tmp_path, ".job")
    target.write_bytes(records[0])
    journal = b"".join(records[i] for i in (3, 2, 6, 7))
    (tmp_path / "out.jsonl.part").write_bytes(journal[:-4] if torn else journal)
    served = []
    requests = llm.requests

    def spy(*args, index, salt):
        served.append(index)
        return requests(*args, index=index, salt=salt)

    monkeypatch.setattr(llm, "requests", spy)
    batch.run(llm, source, target, defaults=DEFAULTS)
    assert target.read_bytes() == b"".join(records)
    assert served == ([1, 5, 7] if torn else [1, 5])  # line 4 is no JSON
    assert not (tmp_path / "out.jsonl.part").exists()


def test_interrupted_between_any_two_reports(llm, job, tmp_path):
    """Ctrl-C after one report, two, and so on: what is finished stays, out-of-order records in the journal."""
    source, target = copy(job, tmp_path)
    part = tmp_path / "out.jsonl.part"
    journaled = runs = 0
    reports = []

    def stop(progress):
        reports.append(progress)
        if len(reports) > runs:
            raise KeyboardInterrupt

    while not target.exists() or target.stat().st_size < (job / "out.jsonl").stat().st_size:
        runs += 1
        assert runs < 40
        reports.clear()
        with contextlib.suppress(KeyboardInterrupt):
            batch.run(llm, source, target, defaults=DEFAULTS, on_progress=stop)
        journaled = max(journaled, len(part.read_bytes().splitlines()) if part.exists() else 0)
        assert (job / "out.jsonl").read_bytes().startswith(target.read_bytes())
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()
    assert journaled > 0


def test_random_cuts_of_file_and_journal(llm, job, tmp_path):
    whole = (job / "out.jsonl").read_bytes()
    records = whole.splitlines(keepends=True)
    source, target = copy(job, tmp_path, ".job")
    rng = random.Random(0)
    for _ in range(8):
        cut = rng.randrange(len(whole))
        done = whole[:cut].count(b"\n")
        later = [record for record in records[done:] if rng.random() < 0.5]
        rng.shuffle(later)
        target.write_bytes(whole[:cut])
        (tmp_path / "out.jsonl.part").write_bytes(b"".join(later)[: rng.randrange(2000)])
        batch.run(llm, source, target, defaults=DEFAULTS)
        assert target.read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [b'{"a": 1}\n', b'{"index": "x"}\n', b'{"index": true}\n', b"[" * 100000 + b"\n", b"\xff\n"]
)
def test_a_damaged_journal_is_read_up_to_the_damage(llm, job, tmp_path, damage):
    records = (job / "out.jsonl").read_bytes().splitlines(keepends=True)
    source, target = copy(job, tmp_path, ".job")
    target.write_bytes(records[0])
    (tmp_path / "out.jsonl.part").write_bytes(records[3] + damage + records[2])
    assert batch.run(llm, source, target, defaults=DEFAULTS).resumed == 2
    assert target.read_bytes() == b"".join(records)


@pytest.mark.parametrize(
    ("change", "options", "part"),
    [
        ("", {"defaults": {"max_new_tokens": 7}}, "default max_new_tokens 6, not 7"),
        ("", {"seed": 1}, "seed 0, not 1"),
        ("", {"settings": {"model": "other"}}, "with model '"),
        ("input", {}, "records of another input"),
        ("job", {}, "out.jsonl.job is not there"),
        ("record", {}, "Line 2 of"),
        ("nested", {}, "Line 2 of"),
        ("custom_id", {}, "Line 1 of"),
        ("more", {}, "Line 9 of"),
    ],
)
def test_refuses_records_of_another_job(llm, job, tmp_path, change, options, part):
    source, target = copy(job, tmp_path, "", ".job")
    records = target.read_bytes().splitlines(keepends=True)
    if change == "input":
        source.write_bytes(source.read_bytes().replace(b"bado", b"bada"))
    elif change == "job":
        (tmp_path / "out.jsonl.job").unlink()
    elif change == "record":
        target.write_bytes(b"".join([records[0], b"{}\n", *records[2:]]))
    elif change == "nested":
        target.write_bytes(b"".join([records[0], b"[" * 100000 + b"\n", *records[2:]]))
    elif change == "custom_id":
        target.write_bytes(b"".join([records[0].replace("é-0".encode(), b"x"), *records[1:]]))
    elif change == "more":
        target.write_bytes(b"".join([*records, records[-1]]))
    before = target.read_bytes()
    with pytest.raises(UserError, match="begin anew with --overwrite") as caught:
        batch.run(llm, source, target, **({"defaults": DEFAULTS} | options))
    assert part in str(caught.value)
    assert target.read_bytes() == before
    assert not (tmp_path / "out.jsonl.part").exists()


def test_overwrite_begins_anew(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    target.write_text("something else\n")
    summary = batch.run(llm, source, target, defaults=DEFAULTS, overwrite=True)
    assert summary.resumed == 0
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()


def test_paths_that_cannot_work(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    with pytest.raises(UserError, match="no such file"):
        batch.run(llm, tmp_path / "none.jsonl", target)
    with pytest.raises(UserError, match="cannot be read"):
        batch.run(llm, tmp_path, target)
    with pytest.raises(UserError, match="cannot be written"):
        batch.run(llm, source, tmp_path / "none" / "out.jsonl")
    with pytest.raises(UserError, match="is the input and the output"):
        batch.run(llm, source, source, overwrite=True)
    assert source.read_bytes() == (job / "in.jsonl").read_bytes()


@pytest.mark.parametrize("suffix", ["", ".job", ".job.new", ".part"])
@pytest.mark.parametrize("given", [str, lambda path: f"~/{path.name}"])
def test_the_input_is_not_replaced(llm, job, tmp_path, monkeypatch, suffix, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tmp_path / f"out.jsonl{suffix}"
    source.write_bytes((job / "in.jsonl").read_bytes())
    for ours, theirs in ((given(source), tmp_path / "out.jsonl"), (source, given(tmp_path / "out.jsonl"))):
        for overwrite in (False, True):
            with pytest.raises(UserError, match=r"is the input.*: write to another file\.$"):
                batch.run(llm, ours, theirs, defaults=DEFAULTS, overwrite=overwrite)
    with source.open() as stdin, pytest.raises(UserError, match="The standard input is the input"):
        monkeypatch.setattr(sys, "stdin", stdin)
        batch.run(llm, "-", tmp_path / "out.jsonl", defaults=DEFAULTS)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    assert source.read_bytes() == (job / "in.jsonl").read_bytes()


@pytest.mark.parametrize("text", ["my notes", '{"input": "a"}', ""])
def test_an_unrelated_note_is_not_replaced(llm, job, tmp_path, text):
    source, target = copy(job, tmp_path)
    note = tmp_path / "out.jsonl.job"
    note.write_text(text)
    with pytest.raises(UserError, match=r"out\.jsonl\.job is not what a job writes there.*--overwrite"):
        batch.run(llm, source, target, defaults=DEFAULTS)
    assert note.read_text() == text
    assert not target.exists()
    batch.run(llm, source, target, defaults=DEFAULTS, overwrite=True)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()


def test_an_unrelated_journal_is_not_replaced(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    (tmp_path / "out.jsonl.part").write_text("mine")
    with pytest.raises(UserError, match=r"out\.jsonl\.part exists, and out\.jsonl\.job is not there"):
        batch.run(llm, source, target, defaults=DEFAULTS)
    assert (tmp_path / "out.jsonl.part").read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("", r"^\. is a folder: name a file in it\.$"),
        (".", r"^\. is a folder"),
        ("folder", "^folder is a folder"),
        ("none/", "^none/ is a folder"),
        ("gs://bucket/", "^gs://bucket/ is a folder"),
        ("/dev/null", "^/dev/null is not a regular file.*- for the standard output"),
        ("/dev/zero", "^/dev/zero is not a regular file"),
        ("pipe", "^pipe is not a regular file"),
        ("a", r"^a\.part is not a regular file"),
        ("b\0b", r"^'b\\x00b' contains a NUL character"),
        ("http://x/y", "^http://x/y is an address of a kind that is not known"),
        ("gs://x/y", "^gs://x/y cannot be reached.*gcsfs"),
    ],
)
def test_outputs_that_cannot_be_written(llm, job, tmp_path, monkeypatch, target, part):
    copy(job, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # not installed
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "a.part"):
        os.mkfifo(name)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=part):
            batch.run(llm, "in.jsonl", target, defaults=DEFAULTS, overwrite=overwrite)
    assert sorted(os.listdir()) == ["a.part", "folder", "in.jsonl", "pipe"]


def test_inputs_that_cannot_be_read(llm, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    inputs = {"a\0b": "NUL character", "http://x/y": "not known", "gs://x/y": r"gs://x/y cannot be read \(.*gcsfs"}
    for source, part in inputs.items():
        with pytest.raises(UserError, match=part):
            batch.run(llm, source, tmp_path / "out.jsonl")
    assert not list(tmp_path.iterdir())


def test_an_input_that_cannot_be_read_twice(llm, job, tmp_path):
    _, target = copy(job, tmp_path, ".job")
    for resumed in (0, 8):
        read, write = os.pipe()
        os.write(write, (job / "in.jsonl").read_bytes())
        os.close(write)
        assert batch.run(llm, f"/dev/fd/{read}", target, defaults=DEFAULTS).resumed == resumed
        os.close(read)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()


def test_impossible_defaults_are_refused_before_anything_is_written(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    for options in ({"defaults": {"top_p": 2}}, {"defaults": {"topp": 0.5}}, {"seed": -1}):
        with pytest.raises(UserError):
            batch.run(llm, source, target, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"stop_token_ids": [99999]}, "stop_token_ids contains 99999: give token ids from 0 to 319"),
        ({"logit_bias": {-1: 1}}, "logit_bias contains -1: give token ids from 0 to 319"),
        ({"max_tokens": 256}, "max_new_tokens is 256, and the context of 256 tokens has to hold the prompts as well"),
        ({"stop": ["x" * 10**5]}, "would grow the table"),
    ],
)
def test_defaults_that_the_model_cannot_serve_are_refused_before_any_record(llm, job, tmp_path, wrong, part):
    source, target = copy(job, tmp_path)
    settings = batch.identity(llm)
    for model, known in ((llm, None), (lambda: llm, settings)):
        with pytest.raises(UserError, match=part):
            batch.run(model, source, target, defaults=wrong, settings=known)
    assert target.read_bytes() == b""
    batch.run(lambda: llm, source, target, defaults=DEFAULTS, settings=settings)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()


def test_two_jobs_do_not_write_one_file(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    with (tmp_path / "out.jsonl.part").open("ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another job is writing"):
            batch.run(llm, source, target, defaults=DEFAULTS)


def test_a_bucket_is_written_at_the_end_and_resumed(llm, job, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "_is_remote", lambda target: True)
    source, target = copy(job, tmp_path)

    def stop(progress):
        if progress.done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.run(llm, source, target, defaults=DEFAULTS, on_progress=stop)
    assert (job / "out.jsonl").read_bytes().startswith(target.read_bytes())
    summary = batch.run(llm, source, target, defaults=DEFAULTS)
    assert summary.resumed > 3
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def test_records_stay_when_the_bucket_does_not_take_them(llm, job, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "_is_remote", lambda target: True)
    source, _ = copy(job, tmp_path)
    with pytest.raises(UserError, match=r"cannot be written \(No such file.*is kept in") as caught:
        batch.run(llm, source, tmp_path / "none" / "out.jsonl", defaults=DEFAULTS)
    kept = pathlib.Path(re.findall(r"kept in (\S+),", str(caught.value))[0])
    assert (kept / "out.jsonl").read_bytes() == (job / "out.jsonl").read_bytes()
    shutil.rmtree(kept)


@pytest.fixture
def steps(llm, monkeypatch):
    """The host looks after every step."""
    monkeypatch.setattr(llm, "options", dataclasses.replace(llm.options, segment_seconds=1e-6))


def run_in_pieces(llm, source, target, reports, **options):
    """Runs a job, asked to stop after so many reports, until it is done: all summaries, and the tokens computed."""
    summaries: list[batch.Summary] = []
    computed = 0
    while not summaries or summaries[-1].done < summaries[-1].lines:
        seen: list[batch.Progress] = []
        summary = batch.run(
            llm,
            source,
            target,
            defaults=DEFAULTS,
            on_progress=seen.append,
            stop=lambda seen=seen: len(seen) > reports,  # type: ignore[misc]
            **options,
        )
        summaries.append(summary)
        computed += seen[-1].tokens
        assert len(summaries) < 60
        assert pathlib.Path(f"{target}.snapshots").exists() == (summary.done < summary.lines)
    return summaries, computed


def test_stopped_when_asked_and_resumed_from_the_snapshot(llm, job, steps, tmp_path):
    source, target = copy(job, tmp_path)
    _, whole = run_in_pieces(llm, source, target, 1000)
    target.unlink()
    summaries, computed = run_in_pieces(llm, source, target, 3)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()
    assert len(summaries) > 4
    # Nothing is computed twice but the samples of line 3 that had ended before the other had.
    assert whole <= computed <= whole + len(summaries) * 6
    assert [s.resumed for s in summaries] == [0, *(s.done for s in summaries[:-1])]
    assert sum(s.errors for s in summaries) == 2
    assert sum(s.completion_tokens for s in summaries) == sum(r.get("completion_tokens", 0) for r in read(target))
    target.unlink()
    summaries, computed = run_in_pieces(llm, source, target, 3, snapshot_kv=False)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()
    assert computed > whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def test_interrupted_between_snapshots(llm, job, steps, tmp_path):
    """Records are newer than the snapshot, or were lost with part of the file: each line gets its own, once."""
    source, target = copy(job, tmp_path)
    whole = (job / "out.jsonl").read_bytes()
    options: dict[str, Any] = {"defaults": DEFAULTS, "snapshot_every": 0.05}
    kept = 0
    for reports in (6, 10, 14, 3, 8):

        def stop(progress, seen=[], reports=reports):  # noqa: B006
            seen.append(progress)
            if len(seen) > reports:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            batch.run(llm, source, target, on_progress=stop, **options)
        kept += (tmp_path / "out.jsonl.snapshots").exists()
        assert whole.startswith(target.read_bytes())
        os.truncate(target, target.stat().st_size // 2)
    batch.run(llm, source, target, **options)
    assert target.read_bytes() == whole
    assert kept > 0
    assert not (tmp_path / "out.jsonl.snapshots").exists()


def test_snapshots_of_another_job_and_overwrite(llm, job, steps, tmp_path):
    source, target = copy(job, tmp_path)
    folder = tmp_path / "out.jsonl.snapshots"
    batch.run(llm, source, target, defaults=DEFAULTS, seed=7, stop=lambda: True)
    # The first is small, should there be no time for K and V.
    assert [(path.name, (path / "state").exists()) for path in sorted(folder.iterdir())] == [("0", False), ("1", True)]
    (folder / "notes").write_text("mine")
    target.unlink()
    (tmp_path / "out.jsonl.part").unlink(missing_ok=True)
    batch.run(llm, source, target, defaults=DEFAULTS, stop=lambda: True)  # with another seed
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "notes"]
    batch.run(llm, source, target, defaults=DEFAULTS)
    assert target.read_bytes() == (job / "out.jsonl").read_bytes()
    assert [path.name for path in folder.iterdir()] == ["notes"]
    (folder / "3").mkdir()
    batch.run(llm, source, target, defaults=DEFAULTS, overwrite=True, stop=lambda: True)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "notes"]


def test_snapshots_that_cannot_be(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    wrong: list[Any] = [0, -1, float("nan"), True, "1"]
    for every in wrong:
        with pytest.raises(UserError, match=r"^snapshot_every is .*: give a number of seconds over 0\.$"):
            batch.run(llm, source, target, snapshot_every=every)
    with pytest.raises(UserError, match=r"^A job that writes to the standard output cannot be resumed"):
        batch.run(llm, source, "-", snapshot_every=1)
    (tmp_path / "out.jsonl.snapshots").write_text("mine")
    with pytest.raises(UserError, match=r"out\.jsonl\.snapshots is not a folder"):
        batch.run(llm, source, target, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.snapshots"]


def test_records_reach_the_bucket_with_each_snapshot(llm, job, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "_is_remote", lambda target: True)
    source, target = copy(job, tmp_path)
    seen = []

    class Killed(BaseException):
        pass

    def look(progress):
        if progress.done > 4 and (tmp_path / "out.jsonl.snapshots").exists():
            seen.append([path.read_bytes() for path in (target, tmp_path / "out.jsonl.part") if path.exists()])
            if b"\n" in b"".join(seen[-1]):
                shutil.copytree(tmp_path, tmp_path.with_name("there"))
                raise Killed

    with pytest.raises(Killed):
        batch.run(llm, source, target, defaults=DEFAULTS, on_progress=look, snapshot_every=0.01)
    monkeypatch.undo()
    there = tmp_path.with_name("there")  # what a virtual machine that is gone has left in the bucket
    summary = batch.run(llm, there / "in.jsonl", there / "out.jsonl", defaults=DEFAULTS)
    assert summary.resumed == sum(raw.count(b"\n") for raw in seen[-1]) > 0
    assert (there / "out.jsonl").read_bytes() == (job / "out.jsonl").read_bytes()
    shutil.rmtree(there)


def test_only_lines_of_one_salt_share_their_beginnings(llm, tmp_path):
    prompt = list(range(4, 204))
    salted = [{"prompt": prompt, "cache_salt": salt} for salt in ("a", "b", None, "a", "b", "", "c")]
    summary, records = run_lines(llm, tmp_path, [*salted, {"prompt": prompt, "cache_salt": 3}])
    assert records[7]["error"]["message"] == "cache_salt is 3: give a text."
    assert len({record.get("text") for record in records[:7]}) == 1
    assert 3 * 128 <= summary.hit <= 3 * 200  # the second of each salt but "c" finds whole pages of 64
    assert summary.preempted == 0


def test_a_journal_of_what_is_written_by_now_is_made_anew(tmp_path, monkeypatch):
    """Where a line is never the last to end, the journal would grow as large as the output."""
    monkeypatch.setattr(batch_files, "_JOURNAL_BYTES", 1000)
    record = [json.dumps({"custom_id": None, "index": i, "text": "x" * 50}).encode() + b"\n" for i in range(200)]
    job = {"input": "a", "defaults": {}}
    target, sizes = tmp_path / "out.jsonl", []
    with batch_files.opened_records(target, job, iter([None] * 200), 200, False) as records:
        records.add(1, record[1])
        for i in range(0, 198, 2):
            records.add(i, record[i])
            records.add(i + 3, record[i + 3])
            records.flush()
            sizes.append((tmp_path / "out.jsonl.part").stat().st_size)
    assert max(sizes) < 1300
    with batch_files.opened_records(target, job, iter([None] * 200), 200, False) as records:
        assert (records.next, list(records.waiting)) == (198, [199])
    assert target.read_bytes() == b"".join(record[:198])


def test_progress_adds_up(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    seen: list[batch.Progress] = []
    summary = batch.run(llm, source, target, defaults=DEFAULTS, on_progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert (seen[0].done, seen[0].tokens, seen[0].seconds_left) == (0, 0, None)
    assert (seen[-1].done, seen[-1].total, seen[-1].seconds_left) == (8, 8, 0)
    # Every token but each sample's last one passes through the model.
    assert seen[-1].tokens >= summary.prompt_tokens + summary.completion_tokens - 7
    assert seen[-1].tokens_per_second > 0


# shards


def shards_of(count):
    return [f"{number}/{count}" for number in range(count)]


@pytest.mark.parametrize(("count", "turns"), [(1, 16), (2, 16), (2, 1), (3, 1), (11, 16)])
def test_shards_together_are_the_whole_job(llm, job, tmp_path, monkeypatch, count, turns):
    """Of 8 lines, some of them bad, in blocks of 1, 4 and 2; with 11 shards three have none."""
    monkeypatch.setattr(batch_files, "_TURNS", turns)
    source, target = copy(job, tmp_path)
    records, lines = [], []
    for shard in shards_of(count):
        summary = batch.run(llm, source, target, defaults=DEFAULTS, shard=shard)
        path = pathlib.Path(batch.shard_path(target, shard))
        found = path.read_bytes().splitlines(keepends=True)
        assert (summary.lines, summary.done, summary.resumed) == (len(found), len(found), 0)
        indices = [record["index"] for record in read(path)]
        assert indices == sorted(indices)
        records += found
        lines += indices
    whole = (job / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert sorted(lines) == list(range(8))
    assert [record for _, record in sorted(zip(lines, records, strict=True))] == whole
    assert not target.exists()
    assert len(list(tmp_path.glob(f"out.*-of-{count}.jsonl"))) == count


@pytest.mark.parametrize(
    ("number", "count", "lines"), [(0, 1, 0), (0, 1, 7), (2, 3, 1), (1, 3, 500), (2, 4, 9999), (0, 9, 1200)]
)
def test_what_a_shard_counts_is_what_it_has(number, count, lines):
    shard = batch_files.Shard(number, count).of(lines)
    own = [line for line in range(lines) if line in shard]
    assert shard.size(lines) == len(own)
    following = shard.after(-1)
    for line in own:
        assert following == line
        following = shard.after(line)
    assert following >= lines
    assert [shard.after(line) for line in range(lines)] == [
        next(other for other in range(line + 1, line + 99999) if other in shard) for line in range(lines)
    ]


@pytest.mark.parametrize("lines", [5, 100, 3000, 100_000])
def test_shards_divide_all_lines_evenly(lines):
    shards = [batch_files.parse_shard(shard).of(lines) for shard in shards_of(4)]
    assert [sum(line in shard for shard in shards) for line in range(lines)] == [1] * lines
    sizes = [shard.size(lines) for shard in shards]
    assert max(sizes) - min(sizes) <= shards[0].block == max(1, min(64, lines // 64))


def test_a_shard_resumes_from_its_records_and_its_journal(llm, job, tmp_path, monkeypatch):
    source, target = copy(job, tmp_path)
    options: dict[str, Any] = {"defaults": DEFAULTS, "shard": "1/2"}  # lines 1, 3, 5, 7
    batch.run(llm, source, target, **options)
    own = tmp_path / "out.1-of-2.jsonl"
    whole = own.read_bytes()
    records = whole.splitlines(keepends=True)
    other = (job / "out.jsonl").read_bytes().splitlines(keepends=True)[4]
    served = []
    requests = llm.requests

    def spy(*args, index, salt):
        served.append(index)
        return requests(*args, index=index, salt=salt)

    monkeypatch.setattr(llm, "requests", spy)
    own.write_bytes(records[0] + records[1][:9])
    (tmp_path / "out.1-of-2.jsonl.part").write_bytes(records[3] + other)  # and one that is not its own
    summary = batch.run(llm, source, target, **options)
    assert (summary.lines, summary.done, summary.resumed, served) == (4, 4, 2, [3, 5])
    assert own.read_bytes() == whole
    assert batch.run(llm, source, target, **options).resumed == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", own.name, f"{own.name}.job"]


def test_a_shard_goes_on_from_its_snapshot(llm, job, steps, tmp_path):
    source, target = copy(job, tmp_path)
    own = tmp_path / "out.0-of-2.jsonl"
    summary = batch.run(llm, source, target, defaults=DEFAULTS, shard="0/2", stop=lambda: True)
    assert summary.done < summary.lines == 4
    assert pathlib.Path(f"{own}.snapshots").exists()
    summary = batch.run(llm, source, target, defaults=DEFAULTS, shard="0/2")
    assert summary.done == 4
    assert own.read_bytes() == b"".join((job / "out.jsonl").read_bytes().splitlines(keepends=True)[::2])
    assert not pathlib.Path(f"{own}.snapshots").exists()


def test_refuses_records_of_another_shard(llm, job, tmp_path):
    source, target = copy(job, tmp_path, "", ".job")
    batch.run(llm, source, target, defaults=DEFAULTS, shard="0/2")
    for theirs, ours, part in (
        ("0-of-2", "1/2", "shard '0/2', not '1/2'"),
        ("0-of-2", "0/3", "shard '0/2', not '0/3'"),
        (None, "1/2", "shard None, not '1/2'"),
        ("0-of-2", None, "shard '0/2', not None"),
    ):
        found = tmp_path / (f"out.{theirs}.jsonl" if theirs else "out.jsonl")
        wanted = tmp_path / "renamed.jsonl"
        for suffix in ("", ".job"):
            shutil.copy(f"{found}{suffix}", f"{batch.shard_path(wanted, ours)}{suffix}")
        with pytest.raises(UserError, match="begin anew with --overwrite") as caught:
            batch.run(llm, source, wanted, defaults=DEFAULTS, shard=ours)
        assert part in str(caught.value)
        assert pathlib.Path(batch.shard_path(wanted, ours)).read_bytes() == found.read_bytes()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("out.jsonl", "out.3-of-4.jsonl"),
        ("a.b/out", "a.b/out.3-of-4"),
        ("gs://bucket/a.b/out.x.jsonl", "gs://bucket/a.b/out.x.3-of-4.jsonl"),
        ("-", "-"),
    ],
)
def test_a_shard_has_a_file_of_its_own(target, path):
    assert batch.shard_path(target, "3/4") == path
    assert batch.shard_path(pathlib.PurePosixPath("out.jsonl"), None) == "out.jsonl"


@pytest.mark.parametrize("shard", ["3/2", "2/2", "0/0", "-1/4", "a/b", "1", "", "1/2/3", " 1/2", "1_0/20", "²/4", 1])
def test_shards_that_cannot_be(llm, job, tmp_path, shard):
    source, target = copy(job, tmp_path)
    with pytest.raises(UserError, match=r"^shard is .*: give this machine's number, counted from 0, .*\.$"):
        batch.run(llm, source, target, shard=shard)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_outputs_that_a_shard_cannot_write(llm, job, tmp_path):
    source, target = copy(job, tmp_path)
    (tmp_path / "folder").mkdir()
    for where, part in ((tmp_path / "folder", "is a folder"), ("/dev/null", "not a regular file"), ("", "is a folder")):
        with pytest.raises(UserError, match=part):
            batch.run(llm, source, where, shard="0/2")
    source.rename(tmp_path / "out.0-of-2.jsonl")
    with pytest.raises(UserError, match="is the input and the output"):
        batch.run(llm, tmp_path / "out.0-of-2.jsonl", target, shard="0/2", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.0-of-2.jsonl"]
