"""A whole batch job on this machine's CPU: kvjax, Hugging Face transformers and llama.cpp, in one run.

    python scripts/bench_batch.py                                      # 128 requests; needs kvjax[peers]
    python scripts/bench_batch.py --prompts 32 --rounds 1              # a quick look
    python scripts/bench_batch.py --engines hf-prompt hf-new hf-total  # which variant of a peer is fastest here
    python scripts/bench_batch.py --shared-prefix                      # time to first token, system prompt shared

Workload: requests of many lengths, 20 to 400 prompt tokens and 16 to 128 new ones, known from the start. Random
ordinary tokens (no two prompts share a beginning), greedy, end-of-sequence tokens ignored, so that every engine
generates exactly what was asked for. All have the same weights in float32, K and V in float32, and as many threads.

- hf: `generate` over static batches of the sorted requests, padded on the left; a batch runs until its longest
  request is done. Its order knows every length beforehand, which a job with stop tokens does not.
- llama.cpp: continuous batching through the low-level API; when a sequence ends, the next prompt takes its slot.
- kvjax: `LLM.generate` with the default options, text included.

Engines take turns in rounds, each time in a fresh process; printed are medians over the rounds. Loading and warming up
are in no measured time: kvjax runs the whole job once before, so that everything is compiled; the peers, which compile
nothing, run the first requests for two tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
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

import bench_cpu
import bench_peers
import numpy as np
from bench_cpu import OTHER_LOAD, table

PROMPT_TOKENS = (20, 400)
NEW_TOKENS = (16, 128)
SYSTEM_TOKENS, OWN_TOKENS, SHARERS = 1000, 50, 16


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests: prompts as token ids, and how many tokens each generates."""

    prompts: list[list[int]]
    new_tokens: list[int]

    def take(self, indices: Sequence[int]) -> Workload:
        return Workload([self.prompts[i] for i in indices], [self.new_tokens[i] for i in indices])


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is told.

    Attributes:
      engine: a name in ENGINES or PROBES.
      model: what kvjax and transformers load; None for the default model.
      gguf: the file that llama.cpp loads, the same model in float32.
      workload: the requests.
      slots: requests that a peer runs at once.
      threads: CPU threads.
      seed: of random prompts that the worker makes itself.
    """

    engine: str
    model: str | None
    gguf: str
    workload: Workload
    slots: int
    threads: int
    seed: int


Serve = Callable[[Workload], list[list[int]]]
"""Requests → the new tokens of each."""


def make_workload(ordinary: np.ndarray, requests: int, seed: int) -> Workload:
    """Drawn request by request, so that fewer requests are the first of more."""
    rng = np.random.default_rng(seed)
    workload = Workload([], [])
    for _ in range(requests):
        length, new = (int(rng.integers(low, high + 1)) for low, high in (PROMPT_TOKENS, NEW_TOKENS))
        workload.prompts.append(rng.choice(ordinary, length).tolist())
        workload.new_tokens.append(new)
    return workload


# --- the engines --------------------------------------------------------------------------------------------------

HF_ORDERS: dict[str, Callable[[int, int], int]] = {
    "prompt": lambda prompt, new: prompt,
    "new": lambda prompt, new: new,
    "total": lambda prompt, new: prompt + new,
}


@contextlib.contextmanager
def hf(job: Job, order: str) -> Iterator[Serve]:
    """Transformers' `generate`: sorted by `order`, so that a batch pads and waits little."""
    import torch

    net = bench_peers.hf_model(job.model, job.threads)
    net.generation_config.eos_token_id = None  # min_new_tokens would forbid the token, which changes the output

    def batch(part: Workload) -> list[list[int]]:
        width = max(map(len, part.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part.prompts])
        most = max(part.new_tokens)
        with torch.inference_mode():
            rows = net.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0
            )
        return [row[width : width + new].tolist() for row, new in zip(rows, part.new_tokens, strict=True)]

    def serve(workload: Workload) -> list[list[int]]:
        lengths = list(zip(map(len, workload.prompts), workload.new_tokens, strict=True))
        indices = sorted(range(len(lengths)), key=lambda i: HF_ORDERS[order](*lengths[i]), reverse=True)
        tokens: dict[int, list[int]] = {}
        for start in range(0, len(indices), job.slots):
            part = indices[start : start + job.slots]
            tokens |= dict(zip(part, batch(workload.take(part)), strict=True))
        return [tokens[i] for i in range(len(indices))]

    yield serve


@contextlib.contextmanager
def llama_cpp(job: Job, **options: Any) -> Iterator[Serve]:
    """llama.cpp; `options` as `bench_peers.LlamaModel.context` takes them."""
    longest = max(map(len, job.workload.prompts)) + max(job.workload.new_tokens)
    with (
        bench_peers.llama_model(job.gguf) as model,
        model.context(job.slots, longest, job.threads, float32=True, **options) as context,
    ):
        context.clear()
        yield lambda workload: continuous_batching(context, workload, job.slots)


def continuous_batching(context: bench_peers.LlamaContext, workload: Workload, slots: int) -> list[list[int]]:
    """A call takes one token of every sequence that decodes, and prompt tokens up to the context's chunk."""
    prompts, tokens = workload.prompts, [[] for _ in workload.prompts]  # type: tuple[list[list[int]], list[list[int]]]
    fed = [0] * len(prompts)
    waiting, free = collections.deque(range(len(prompts))), list(range(slots))
    running: dict[int, int] = {}  # sequence → request
    while waiting or running:
        while waiting and free:
            running[free.pop()] = waiting.popleft()
        entries = [
            (s, len(prompts[r]) + len(tokens[r]) - 1, tokens[r][-1], True) for s, r in running.items() if tokens[r]
        ]
        for s, r in running.items():
            start, stop = fed[r], min(len(prompts[r]), fed[r] + context.chunk - len(entries))
            entries += [(s, i, prompts[r][i], i == len(prompts[r]) - 1) for i in range(start, stop)]
            fed[r] = max(start, stop)
        for s, token in context.decode(entries).items():
            r = running[s]
            tokens[r].append(token)
            if len(tokens[r]) == workload.new_tokens[r]:
                context.forget(s)
                free.append(s)
                del running[s]
    return tokens


@contextlib.contextmanager
def kvjax(job: Job, **options: Any) -> Iterator[Serve]:
    """kvjax's façade; `options` as `kvjax.load` takes them, its defaults otherwise."""
    import kvjax as api

    llm = api.load(job.model, **options)

    def serve(workload: Workload) -> list[list[int]]:
        params = [api.SamplingParams(max_new_tokens=new, ignore_eos=True) for new in workload.new_tokens]
        return [list(completion.tokens) for completion in llm.generate(workload.prompts, params)]

    yield serve


ENGINES: dict[str, Callable[[Job], AbstractContextManager[Serve]]] = {
    "hf": lambda job: hf(job, "new"),
    "hf-prompt": lambda job: hf(job, "prompt"),
    "hf-new": lambda job: hf(job, "new"),
    "hf-total": lambda job: hf(job, "total"),
    "llama.cpp": lambda job: llama_cpp(job, flash=False),
    "llama.cpp-flash": lambda job: llama_cpp(job, flash=True),
    "llama.cpp-unified": lambda job: llama_cpp(job, flash=False, unified=True),
    "llama.cpp-unified-flash": lambda job: llama_cpp(job, flash=True, unified=True),
    "kvjax": kvjax,
    "kvjax-128": lambda job: kvjax(job, slots=128),
}
DEFAULT_ENGINES = ("hf", "llama.cpp", "kvjax")


def serve_job(job: Job) -> dict[str, Any]:
    """Measures an engine: the whole job, after a warm-up."""
    began = time.perf_counter()
    with ENGINES[job.engine](job) as serve, compilations() as compiled:
        load_s = time.perf_counter() - began
        few = job.workload.take(range(min(job.slots, len(job.workload.prompts))))
        warm_up = job.workload if job.engine.startswith("kvjax") else Workload(few.prompts, [2] * len(few.prompts))
        _, warm_up_s = timed(serve, warm_up)
        compile_s = sum(compiled)
        before = bench_cpu.cpu_seconds()
        cpu_s = time.process_time()
        tokens, seconds = timed(serve, job.workload)
        cpu_s = time.process_time() - cpu_s
        load = bench_cpu.other_load(before, bench_cpu.cpu_seconds())
    if list(map(len, tokens)) != job.workload.new_tokens:
        raise RuntimeError(f"{job.engine} did not generate as many tokens as were asked for.")
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "tokens": tokens,
        "load_s": load_s,
        "warm_up_s": warm_up_s,
        "compile_s": compile_s,
        "compile_measured_s": sum(compiled) - compile_s,
        "other_load": load,
    }


def timed(serve: Serve, workload: Workload) -> tuple[list[list[int]], float]:
    began = time.perf_counter()
    return serve(workload), time.perf_counter() - began


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Gathers the seconds of every XLA compilation of this process; nothing without JAX."""
    seconds: list[float] = []
    if "jax" in sys.modules:
        import jax

        def note(event: str, duration_secs: float, **_: str | int) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                seconds.append(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(note)
    yield seconds


# --- roofline -----------------------------------------------------------------------------------------------------


def matmul(job: Job) -> dict[str, Any]:
    """GFLOP/s of a float32 product of two square matrices, the best of several: the most the machine gives."""
    import jax
    import jax.numpy as jnp
    import torch

    torch.set_num_threads(job.threads)
    n = 2048
    x = np.random.default_rng(0).standard_normal((n, n), np.float32)
    ours, theirs, multiply = jnp.asarray(x), torch.from_numpy(x), jax.jit(jnp.matmul)
    calls: dict[str, Callable[[], Any]] = {
        "jax": lambda: jax.block_until_ready(multiply(ours, ours)),
        "torch": lambda: theirs @ theirs,
    }

    def rate(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        return 2e-9 * n**3 / (time.perf_counter() - began)

    return {name: max(rate(call) for _ in range(12)) for name, call in calls.items()}


def flops(model: str | None, workload: Workload) -> tuple[float, float]:
    """Floating-point operations that the job needs: (matrix products with weights, attention).

    Every token but a request's last goes through the layers, new tokens come from the unembedding, and a token attends
    to itself and those before it. No padding, nothing computed twice.
    """
    from kvjax.checkpoints.resolve import open_checkpoint
    from kvjax.models import FAMILIES

    with open_checkpoint(model, FAMILIES) as source:
        shapes = {name: source.shape(name) for name in source.names()}
        layers = int(source.config["num_hidden_layers"])
    in_layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    unembedding = math.prod(shapes["model.embed_tokens.weight"])
    heads = shapes["model.layers.0.self_attn.o_proj.weight"][1]  # N · H
    weights = attention = 0.0
    for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True):
        tokens = len(prompt) + new - 1
        weights += 2 * (in_layers * tokens + unembedding * new)
        attention += 4 * layers * heads * tokens * (tokens + 1) / 2
    return weights, attention


# --- time to first token, system prompt shared --------------------------------------------------------------------


async def first_tokens(llm: Any, ordinary: np.ndarray, seed: int) -> list[float]:
    """Seconds until the first token of `SHARERS` requests, one after the other, that begin with one system prompt.

    From the call to the piece of text, through `AsyncLLM`. The first two requests, of another system prompt, compile.
    """
    import kvjax as api

    rng = np.random.default_rng(seed)

    def requests(count: int) -> list[list[int]]:
        beginning = rng.choice(ordinary, SYSTEM_TOKENS).tolist()
        return [beginning + rng.choice(ordinary, OWN_TOKENS).tolist() for _ in range(count)]

    async with api.AsyncLLM(llm, max_length=2048, segment_seconds=0.02) as engine:
        times = []
        for prompt in requests(2) + requests(SHARERS):
            began = time.perf_counter()
            await engine.generate(prompt, max_new_tokens=1, ignore_eos=True)
            times.append(time.perf_counter() - began)
    return times[2:]


def sharing(job: Job, **options: Any) -> dict[str, Any]:
    """`first_tokens` of kvjax loaded with these options; K and V bounded, so that the memory is no matter."""
    import kvjax as api

    before = bench_cpu.cpu_seconds()
    llm = api.load(job.model, slots=8, kv_bytes=1 << 30, **options)
    first, *later = asyncio.run(first_tokens(llm, bench_cpu.ordinary_tokens(job.model), job.seed))
    load = bench_cpu.other_load(before, bench_cpu.cpu_seconds())
    return {"first_s": first, "later_s": statistics.median(later), "other_load": load}


def sharing_report(records: Sequence[dict[str, Any]]) -> str:
    rows = []
    for engine in SHARING:
        if found := [record for record in records if record["engine"] == engine]:
            first, later = (statistics.median(r[key] for r in found) for key in ("first_s", "later_s"))
            rows.append((engine, f"{first:.3f}", f"{later:.3f}", f"{1 - later / first:.0%}"))
    said = f"{SYSTEM_TOKENS} tokens of system prompt, {OWN_TOKENS} of each request's own; {SHARERS} requests in turn."
    head = ("prefixes", "first request, s to first token", "later requests (median)", "cut by")
    return "\n\n".join([said, table(head, rows)])


SHARING = ("shared", "unshared")
PROBES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "matmul": matmul,
    "shared": sharing,
    "unshared": lambda job: sharing(job, share_prefixes=False),
}


# --- workers ------------------------------------------------------------------------------------------------------


def work(job: Job) -> dict[str, Any]:
    """What a worker measures: one engine or probe, in a process of its own."""
    if hasattr(os, "sched_setaffinity"):  # XLA sizes its thread pool by the CPUs it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    found = PROBES[job.engine](job) if job.engine in PROBES else serve_job(job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"engine": job.engine, **found, "peak_rss_bytes": peak}


def measure(job: Job) -> tuple[dict[str, Any] | None, str | None]:
    """Runs a worker; returns its record, or the last line it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        task, out = pathlib.Path(folder, "job.json"), pathlib.Path(folder, "record.json")
        task.write_text(json.dumps(dataclasses.asdict(job)))
        environment = os.environ | {
            "OMP_NUM_THREADS": str(job.threads),
            "JAX_PLATFORMS": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--worker", str(task), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return json.loads(out.read_text()), None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return None, said[-1] if said else f"ended with code {done.returncode}"


def run_rounds(jobs: Sequence[Job], rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Every job in turn, again and again; returns the records and what failed."""
    records: list[dict[str, Any]] = []
    failed: list[str] = []
    for turn in range(rounds):
        for job in jobs:
            began = time.monotonic()
            record, error = measure(job)
            if record:
                records.append(record)
            said = error or f"{time.monotonic() - began:.0f} s"
            print(f"round {turn + 1}/{rounds}  {job.engine}: {said}", file=sys.stderr, flush=True)
            if error:
                failed.append(f"{job.engine}: {error}")
    return records, failed


# --- tables -------------------------------------------------------------------------------------------------------


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one engine."""
    names = ("seconds", "cpu_s", "load_s", "warm_up_s", "compile_s", "compile_measured_s")
    return {
        "engine": records[0]["engine"],
        "measurements": len(records),
        **{name: statistics.median(record[name] for record in records) for name in names},
        "tokens": records[0]["tokens"],
        "peak_rss_bytes": max(record["peak_rss_bytes"] for record in records),
        "other_load": max((r["other_load"] for r in records if r["other_load"] is not None), default=None),
    }


def job_table(summaries: Sequence[dict[str, Any]], roofline_s: float | None, new: int, how: dict[str, str]) -> str:
    """Seconds and rates. The better peer is the fastest engine that is not kvjax."""
    peers = [s["seconds"] for s in summaries if not s["engine"].startswith("kvjax")]

    def row(name: str, means: str, seconds: float, *rest: str) -> tuple[str, ...]:
        return (
            name,
            means,
            f"{seconds:.1f}",
            f"{new / seconds:.1f}",
            f"{min(peers) / seconds:.2f}×" if peers else "–",
            *rest,
        )

    rows = [
        row(
            s["engine"],
            how.get(s["engine"]) or how[s["engine"].split("-")[0]],
            s["seconds"],
            f"{s['cpu_s']:.1f}",
            f"{s['warm_up_s']:.1f}",
            f"{s['peak_rss_bytes'] / 1e6:.0f}",
            "–" if s["other_load"] is None else f"{s['other_load']:.0%}",
        )
        for s in summaries
    ]
    if roofline_s:
        rows.append(row("roofline", "float32 matrix products", roofline_s, "–", "–", "–", "–"))
    head = ("engine", "how", "job s", "new tok/s", "over the better peer", "CPU s", "warm-up s", "RSS MB", "other load")
    return table(head, rows)


def agreement(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every engine, how many requests have the tokens that transformers gives, and where the others part."""
    reference = next((s for s in summaries if s["engine"].startswith("hf")), None)
    found = []
    for s in summaries:
        if reference is None or s is reference:
            continue
        parts = [
            next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            for ours, theirs in zip(s["tokens"], reference["tokens"], strict=True)
            if ours != theirs
        ]
        equal = len(s["tokens"]) - len(parts)
        found.append({"engine": s["engine"], "with": reference["engine"], "equal": equal, "first_difference": parts})
    return found


def agreement_table(found: Sequence[dict[str, Any]], requests: int) -> str:
    rows = [
        (
            f"{a['engine']} and {a['with']}",
            ", ".join(map(str, sorted(a["first_difference"]))) or "–",
            f"{a['equal']}/{requests}",
        )
        for a in found
    ]
    return table(("engines", "other requests part at token", "equal requests"), rows)


def report(
    args: argparse.Namespace, workload: Workload, records: Sequence[dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Everything that is printed at the end, and the numbers for --json."""
    groups = {e: [r for r in records if r["engine"] == e] for e in args.engines}
    summaries = [summarise(found) for found in groups.values() if found]
    weights, attention = flops(args.model, workload)
    probes = [r for r in records if r["engine"] == "matmul"]
    rates = {name: max(r[name] for r in probes) for name in ("jax", "torch") if probes}
    roofline_s = (weights + attention) / max(rates.values()) / 1e9 if rates else None
    prompt, new = sum(map(len, workload.prompts)), sum(workload.new_tokens)
    how = {
        "hf": f"static batches of {args.slots}",
        "llama.cpp": f"continuous, {args.slots} slots",
        "kvjax": "default options",
        "kvjax-128": "128 slots",
    }
    parts = [
        f"{len(workload.prompts)} requests, {prompt} prompt tokens and {new} new ones: "
        f"{(weights + attention) / 1e12:.2f} TFLOP, {attention / (weights + attention):.1%} of them attention; "
        + ", ".join(f"{name} multiplies at {rate:.0f} GFLOP/s" for name, rate in rates.items()),
        job_table(summaries, roofline_s, new, how),
    ]
    parts += [
        f"{s['engine']}: its warm-up, the same job, took {s['warm_up_s']:.1f} s, {s['compile_s']:.1f} of them XLA's "
        f"compiler; {s['compile_measured_s']:.1f} s of the compiler are in the measured job."
        for s in summaries
        if s["engine"].startswith("kvjax")
    ]
    found = agreement(summaries)
    if found:
        parts.append(agreement_table(found, len(workload.prompts)))
    if disturbed := [s["engine"] for s in summaries if (s["other_load"] or 0) > OTHER_LOAD]:
        parts.append(f"Other processes took over {OTHER_LOAD:.0%} of the CPUs from {', '.join(disturbed)}: repeat.")
    numbers = {"medians": summaries, "matmul_gflops": rates, "roofline_s": roofline_s, "agreement": found}
    return "\n\n".join(parts), numbers


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, metavar="N", help="the first N requests (default 128)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of every engine (default 3)")
    parser.add_argument(
        "--engines", nargs="+", default=list(DEFAULT_ENGINES), choices=sorted(ENGINES), metavar="NAME",
        help=f"in this order, of: {', '.join(ENGINES)} (default {' '.join(DEFAULT_ENGINES)})",
    )  # fmt: skip
    parser.add_argument("--slots", type=int, default=32, metavar="N", help="requests a peer runs at once (default 32)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads of each engine (default 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")
    parser.add_argument("--model", metavar="GGUF", help="a .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--shared-prefix", action="store_true", help="measure time to first token with sharing instead")
    parser.add_argument("--json", metavar="FILE", help="write every measurement and the medians here")
    parser.add_argument("--worker", nargs=2, metavar=("JOB", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("prompts", "rounds", "slots", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 when an engine failed."""
    args = arguments(argv)
    if args.worker:
        task, out = map(pathlib.Path, args.worker)
        fields = json.loads(task.read_text())
        out.write_text(json.dumps(work(Job(**fields | {"workload": Workload(**fields["workload"])}))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that subprocess.run ends the worker too
    from kvjax.checkpoints import default_model

    workload = make_workload(bench_cpu.ordinary_tokens(args.model), args.prompts, args.seed)
    engines = SHARING if args.shared_prefix else ("matmul", *args.engines)
    with tempfile.TemporaryDirectory() as folder:
        gguf = str(pathlib.Path(folder, "float32.gguf"))
        if any(engine.startswith("llama.cpp") for engine in engines):
            bench_peers.write_float32_gguf(args.model or str(default_model.path()), gguf)
        jobs = [Job(e, args.model, gguf, workload, args.slots, args.threads, args.seed) for e in engines]
        records, failed = run_rounds(jobs, args.rounds)
    about = bench_cpu.machine() | {k: v for k, v in vars(args).items() if k not in ("worker", "json", "model")}
    print(", ".join([f"{about['cpus']} × {about['cpu']}", *(f"{k} {v}" for k, v in about["versions"].items())]))
    print(f"{args.threads} threads, rounds: {args.rounds}\n", flush=True)
    said, numbers = (sharing_report(records), {}) if args.shared_prefix else report(args, workload, records)
    print(said)
    if args.json:
        result = {"about": about, **numbers, "measurements": records, "failed": failed}
        pathlib.Path(args.json).write_text(json.dumps(result) + "\n")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
