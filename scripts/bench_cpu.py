"""Compares kvjax with Hugging Face transformers and llama.cpp on this machine's CPU, in one run.

    python scripts/bench_cpu.py                                     # the whole comparison; needs kvjax[peers]
    python scripts/bench_cpu.py --batches 1 8 --rounds 1            # a quick look
    python scripts/bench_cpu.py --engines hf hf-static hf-eager     # which variant of a peer is fastest here

Workload: prompts of random tokens, greedy decoding, end-of-sequence tokens ignored; every engine has the same
weights, prompts and threads. Engines take turns in rounds, each time in a fresh process; the numbers printed are
medians over rounds and repeats. docs/benchmarks.md says what exactly is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import bench_peers
import numpy as np
from bench_peers import Prompts, Run, Session, Timing

WARM_UP_TOKENS = 5
OTHER_LOAD = 0.05
"""Share of the CPUs that other processes may take before a measurement counts as disturbed."""


# --- kvjax --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kvjax(model: str | None) -> Iterator[Session]:
    """kvjax's functional level, as `LLM.generate` uses it, split where the prompts are done; and `LLM.generate`."""
    import kvjax as api

    llm = api.load(model)

    @contextlib.contextmanager
    def session(prompts: Prompts, most: int) -> Iterator[Run]:
        yield kvjax_run(llm, prompts, most)

    yield session


def kvjax_run(llm: Any, prompts: Prompts, most: int) -> Run:
    """Compiles, and gives the run of a batch."""
    import jax

    from kvjax import SamplingParams, engine, plans, requests, sampling, state, stops

    model, options = llm.model, dataclasses.replace(llm.options, slots=max(llm.options.slots, len(prompts)))
    params = SamplingParams(max_new_tokens=most, ignore_eos=True)
    asked = [llm.requests(prompt, params, index)[0] for index, prompt in enumerate(prompts)]
    shapes = plans.plan(model, asked, options)
    automata = stops.AutomatonBank(model.token_bytes).table()
    B, lengths = shapes.cache.slots, [len(prompt) for prompt in prompts]

    def start(new_tokens: int) -> tuple[Any, state.EngineState]:
        """An engine with every prompt waiting and none computed."""
        program, empty = plans.start(model, shapes, automata)
        rows = sampling.pack(
            [params] * len(prompts),
            eos=model.eos,
            seed=0,
            requests=range(len(prompts)),
            shape=(shapes.biases, shapes.stops),
        )
        items = [requests.Item(i, prompt, len(prompt), len(prompt) + new_tokens) for i, prompt in enumerate(prompts)]
        new = requests.pack(items, rows, B, shapes.cache.capacity, shapes.logprobs)
        return program, jax.block_until_ready(engine.submit(empty, new))

    def advance(program: Any, now: state.EngineState, steps: int) -> tuple[state.EngineState, float]:
        """The state after so many steps, and the seconds they took."""
        began = time.perf_counter()
        now = engine.run(program, model.params, now, state.policy(steps), packed=shapes.packed)
        return jax.block_until_ready(now), time.perf_counter() - began

    def prefill(program: Any, now: state.EngineState) -> tuple[state.EngineState, float]:
        """The state when every prompt is computed."""
        seconds = 0.0
        while int(now.line.count) or int(state.pending(now).max()) > 1:
            now, took = advance(program, now, 1)
            seconds += took
        return now, seconds

    def generate() -> tuple[list[list[int]], float]:
        began = time.perf_counter()
        completions = llm.generate([list(prompt) for prompt in prompts], params)
        return [list(completion.tokens) for completion in completions], time.perf_counter() - began

    llm.options = options
    _, compile_s = advance(*start(most), 0)
    warm: list[float] = []

    def run(new_tokens: int) -> Timing:
        program, now = start(new_tokens)
        now, prefill_s = prefill(program, now)
        # Rows whose prompts came first already decode while the last prompts are computed, and end first.
        generated = (np.array(now.requests.known) - np.array(now.requests.prompt))[: len(prompts)]
        full = max(0, new_tokens - int(generated.max()))
        now, decode_s = advance(program, now, full)
        now, rest_s = advance(program, now, new_tokens)
        rows = np.array(now.requests.tokens).reshape(-1, shapes.cache.capacity)
        tokens = [rows[i, n : n + new_tokens].tolist() for i, n in enumerate(lengths)]
        del now  # its cache, before `generate` makes another
        extra = {"compile_s": compile_s}
        if not warm:  # compiles what little `generate` has of its own
            warm.append(generate()[1])
        elif new_tokens == most:
            same, extra["generate_s"] = generate()
            if same != tokens:
                raise RuntimeError("LLM.generate and the functional level gave different tokens.")
        return Timing(prefill_s, decode_s, full * len(prompts), prefill_s + decode_s + rest_s, tokens, extra)

    return run


# --- one engine, in a process of its own --------------------------------------------------------------------------

Engine = Callable[["Job"], AbstractContextManager[Session]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is told.

    Attributes:
      engine: a name in ENGINES.
      model: what kvjax and transformers load; None for the default model.
      gguf: the file that llama.cpp loads.
      prompts: as many as the largest batch has.
      batches: batch sizes, in the order in which they run.
      new_tokens: per prompt.
      threads: CPU threads.
      repeats: measurements of each batch.
    """

    engine: str
    model: str | None
    gguf: str
    prompts: list[list[int]]
    batches: list[int]
    new_tokens: int
    threads: int
    repeats: int


ENGINES: dict[str, Engine] = {
    "hf": lambda job: bench_peers.hf(job.model, job.threads),
    "hf-static": lambda job: bench_peers.hf(job.model, job.threads, cache="static"),
    "hf-eager": lambda job: bench_peers.hf(job.model, job.threads, attention="eager"),
    "llama.cpp": lambda job: bench_peers.llama_cpp(job.gguf, job.threads),
    "llama.cpp-flash": lambda job: bench_peers.llama_cpp(job.gguf, job.threads, flash=True),
    "llama.cpp-noflash": lambda job: bench_peers.llama_cpp(job.gguf, job.threads, flash=False),
    "llama.cpp-unified": lambda job: bench_peers.llama_cpp(job.gguf, job.threads, unified=True),
    "llama.cpp-ubatch128": lambda job: bench_peers.llama_cpp(job.gguf, job.threads, ubatch=128),
    "llama.cpp-ubatch2048": lambda job: bench_peers.llama_cpp(job.gguf, job.threads, ubatch=2048),
    "kvjax": lambda job: kvjax(job.model),
}
DEFAULT_ENGINES = ("hf", "llama.cpp", "kvjax")


def work(job: Job, out: pathlib.Path) -> None:
    """Measures one engine; appends a line of JSON to `out` for every measurement."""
    if hasattr(os, "sched_setaffinity"):  # XLA sizes its thread pool by the CPUs it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    began = time.perf_counter()
    with ENGINES[job.engine](job) as session, out.open("w") as lines:
        load_s = time.perf_counter() - began
        for batch in job.batches:
            with session(job.prompts[:batch], job.new_tokens) as run:
                run(min(WARM_UP_TOKENS, job.new_tokens))
                for _ in range(job.repeats):
                    before = cpu_seconds()
                    timing = run(job.new_tokens)
                    record = dataclasses.asdict(timing) | {
                        "engine": job.engine,
                        "batch": batch,
                        "prompt_tokens": sum(map(len, job.prompts[:batch])),
                        "load_s": load_s,
                        "other_load": other_load(before, cpu_seconds()),
                        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                        * (1 if sys.platform == "darwin" else 1024),
                    }
                    print(json.dumps(record), file=lines, flush=True)


def cpu_seconds() -> tuple[float, float, float] | None:
    """(wall, CPU seconds of the whole machine, CPU seconds of this process); None where the system does not tell."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    machine = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), machine, time.process_time()


def other_load(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    """Share of the machine's CPUs that other processes had in between."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    wall, machine, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, machine - own) / wall / (os.cpu_count() or 1)


# --- rounds -------------------------------------------------------------------------------------------------------


def measure(job: Job) -> tuple[list[dict[str, Any]], str | None]:
    """Runs a worker; returns its records, and the last line it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        task, out = pathlib.Path(folder, "job.json"), pathlib.Path(folder, "records.jsonl")
        task.write_text(json.dumps(dataclasses.asdict(job)))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(job.threads),
            "JAX_PLATFORMS": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--worker", str(task), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if done.returncode == 0:
        return records, None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return records, said[-1] if said else f"ended with code {done.returncode}"


def ordinary_tokens(model: str | None) -> np.ndarray:
    """Ids of the vocabulary's ordinary tokens: neither control tokens nor bytes nor unused."""
    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES

    with open_checkpoint(model, FAMILIES) as source:
        metadata = source.tokenizer_source.metadata
    if metadata is None:
        raise SystemExit(f"{model} is no GGUF file, which llama.cpp needs.")
    return np.flatnonzero(np.asarray(metadata["tokenizer.ggml.token_type"]) == 1)


def equal_fraction(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the tokens that are the same at the same place."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the records of one engine and batch. Rates are tokens per second."""

    def median(rate: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(rate(record) for record in records)

    summary = {
        "engine": records[0]["engine"],
        "batch": records[0]["batch"],
        "measurements": len(records),
        "prefill": median(lambda r: r["prompt_tokens"] / r["prefill_s"]),
        "decode": median(lambda r: r["decode_tokens"] / r["decode_s"]) if records[0]["decode_tokens"] else None,
        "end_to_end": median(lambda r: sum(map(len, r["tokens"])) / r["total_s"]),
        "load_s": median(lambda r: r["load_s"]),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in records),
        "other_load": max((r["other_load"] for r in records if r["other_load"] is not None), default=None),
    }
    if "compile_s" in records[0]["extra"]:
        summary["compile_s"] = median(lambda r: r["extra"]["compile_s"])
        summary["generate"] = median(lambda r: sum(map(len, r["tokens"])) / r["extra"]["generate_s"])
    return summary


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    names = ("kvjax", "jax", "jaxlib", "torch", "transformers", "llama-cpp-python", "numpy")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


# --- tables -------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first two columns to the left."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def rates_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Tokens per second of every engine and batch."""
    head = ("batch", "engine", "prefill tok/s", "decode tok/s", "end to end tok/s", "peak RSS MB", "other load")
    rows = [
        (
            str(s["batch"]),
            s["engine"],
            _number(s["prefill"]),
            _number(s["decode"]),
            _number(s["end_to_end"]),
            f"{s['peak_rss_bytes'] / 1e6:.0f}",
            "–" if s["other_load"] is None else f"{s['other_load']:.0%}",
        )
        for s in summaries
    ]
    return table(head, rows)


def ratios(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """kvjax's rates over those of each other engine, by batch."""
    ours = {s["batch"]: s for s in summaries if s["engine"] == "kvjax"}
    names = ("prefill", "decode", "end_to_end")
    return [
        {"batch": s["batch"], "over": s["engine"]}
        | {n: ours[s["batch"]][n] / s[n] if s[n] and ours[s["batch"]][n] else None for n in names}
        for s in summaries
        if s["engine"] != "kvjax" and s["batch"] in ours
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def report(summaries: Sequence[dict[str, Any]], agreement: Sequence[dict[str, Any]]) -> str:
    """Everything that is printed at the end."""
    parts = [rates_table(summaries)]
    if rows := ratios(summaries):
        cells = [
            (str(r["batch"]), f"kvjax / {r['over']}", *(_times(r[n]) for n in ("prefill", "decode", "end_to_end")))
            for r in rows
        ]
        parts.append(table(("batch", "ratio", "prefill", "decode", "end to end"), cells))
    if ours := [s for s in summaries if "compile_s" in s]:
        cells = [(str(s["batch"]), s["engine"], _number(s["generate"]), f"{s['compile_s']:.1f}") for s in ours]
        parts.append(table(("batch", "engine", "LLM.generate tok/s", "compile s"), cells))
    if agreement:
        cells = [(str(a["batch"]), f"{a['engine']} and {a['with']}", f"{a['equal']:.4f}") for a in agreement]
        parts.append(table(("batch", "engines", "equal tokens"), cells))
    disturbed = [s for s in summaries if (s["other_load"] or 0) > OTHER_LOAD]
    if disturbed:
        parts.append(
            f"Other processes took over {OTHER_LOAD:.0%} of the CPUs in {len(disturbed)} of {len(summaries)} rows: "
            "repeat on a quiet machine."
        )
    return "\n\n".join(parts)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N", help="batch sizes")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every engine (default 3)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="measurements in a turn (default 1)")
    parser.add_argument(
        "--engines", nargs="+", default=list(DEFAULT_ENGINES), choices=sorted(ENGINES), metavar="NAME",
        help=f"in this order, of: {', '.join(ENGINES)} (default {' '.join(DEFAULT_ENGINES)})",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads of each engine (default 2)")
    parser.add_argument("--prompt-tokens", type=int, default=100, metavar="N", help="of each prompt (default 100)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="for each prompt (default 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts")
    parser.add_argument("--model", metavar="GGUF", help="a .gguf file (default: SmolLM2-135M-Instruct, Q4_1)")
    parser.add_argument("--llama-model", metavar="GGUF", help="another file for llama.cpp, of the same model")
    parser.add_argument("--json", metavar="FILE", help="write every measurement and the medians here")
    parser.add_argument("--worker", nargs=2, metavar=("JOB", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("rounds", "repeats", "threads", "prompt_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.new_tokens < 2 or min(args.batches) < 1:
        parser.error("--new-tokens must be at least 2, and --batches at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 when an engine failed."""
    args = arguments(argv)
    if args.worker:
        task, out = map(pathlib.Path, args.worker)
        work(Job(**json.loads(task.read_text())), out)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that subprocess.run ends the worker too
    from kvjax.checkpoints import default_model

    gguf = args.llama_model or args.model or str(default_model.path())
    shape = (max(args.batches), args.prompt_tokens)
    prompts = np.random.default_rng(args.seed).choice(ordinary_tokens(args.model), shape).tolist()
    records, failed = [], []
    for turn in range(args.rounds):
        for engine in args.engines:
            job = Job(engine, args.model, gguf, prompts, args.batches, args.new_tokens, args.threads, args.repeats)
            began = time.monotonic()
            found, error = measure(job)
            records += found
            said = error or f"{time.monotonic() - began:.0f} s"
            print(f"round {turn + 1}/{args.rounds}  {engine}: {said}", file=sys.stderr, flush=True)
            if error:
                failed.append(f"{engine}: {error}")
    by_place: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for record in records:
        by_place.setdefault((record["batch"], record["engine"]), []).append(record)
    order = [(batch, engine) for batch in args.batches for engine in args.engines if (batch, engine) in by_place]
    summaries = [summarise(by_place[place]) for place in order]
    reference = next((engine for engine in args.engines if engine.startswith("hf")), None)
    agreement = [
        {
            "batch": batch,
            "engine": engine,
            "with": reference,
            "equal": equal_fraction(by_place[batch, engine][0]["tokens"], by_place[batch, reference][0]["tokens"]),
        }
        for batch, engine in order
        if reference and engine != reference and (batch, reference) in by_place
    ]
    about = machine() | {key: value for key, value in vars(args).items() if key not in ("worker", "json", "model")}
    print(", ".join([f"{about['cpus']} × {about['cpu']}", *(f"{k} {v}" for k, v in about["versions"].items())]))
    print(f"{args.prompt_tokens} + {args.new_tokens} tokens, {args.threads} threads, ", end="")
    print(f"rounds: {args.rounds}, repeats: {args.repeats}\n", flush=True)
    print(report(summaries, agreement))
    if args.json:
        result = {
            "about": about, "medians": summaries, "ratios": ratios(summaries), "agreement": agreement,
            "measurements": records, "failed": failed,
        }  # fmt: skip
        pathlib.Path(args.json).write_text(json.dumps(result) + "\n")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
