#!/usr/bin/env python
"""What the scheduler costs: everything of a step but the model and the sampling, at many slots and pages.

    python scripts/bench_scheduler.py                         64, 256, 1024 slots x 1k, 10k, 100k pages
    python scripts/bench_scheduler.py --slots 64 --pages 1000

Two numbers for each size:
  cpu   measured here: microseconds a step of a model that computes nothing, in a steady job (requests of 64 to 256
        new tokens enter, share a prefix, fill pages, end and are replaced; the prefix index is full, so pages are
        evicted), and in steps in which all slots only decode.
  v5e   from the program that libtpu compiles for a v5e: the sum of XLA's own `estimated_cycles` over the operations on
        the path of a step, at 1.5 GHz. Not measured on a chip. "decode" is a step in which nothing happens but one
        token a slot; "busy" adds one admission of matching requests, one round of registering filled pages, one
        eviction and one release of pages, each of which serves all slots at once.

The share is of the HBM time of a decode step of Llama-3-8B in bfloat16 on a v5e: 8.03e9 parameters x 2 bytes /
819 GB/s = 19.6 ms, before any K/V is read (the least a step can take).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu only compiles here

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from kvjax import engine, requests, sampling
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.sampling_params import SamplingParams
from kvjax.state import EngineState, Program
from kvjax.stops import no_stops
from kvjax.types import KVSpec

VOCAB, ROWS, PER_SLOT = 8, 128, 16
STEP_SECONDS = 8.03e9 * 2 / 819e9  # of Llama-3-8B on a v5e: its weights in bfloat16, read once
CLOCK = 1.5e9


def forward(params, config, ids, positions, cache, attend):
    return cache, jnp.zeros((ids.shape[0], 1))


def unembed(params, config, hidden):
    return jnp.zeros((hidden.shape[0], VOCAB)) + hidden


def program_of(slots: int, pages: int) -> Program:
    cache = CacheConfig((KVSpec(1, 1, 1, storage="float32"),), slots, ROWS, PER_SLOT, pages=pages, layout="token_major")
    return Program(forward, unembed, None, 1, "float32", cache)


def empty(program: Program) -> EngineState:
    return engine_state.init(program, jnp.asarray(no_stops(VOCAB)), rows=4 * program.cache.slots)


# --- measured here --------------------------------------------------------------------------------------------
def arrivals(program: Program, seed: int = 0) -> Iterator[requests.Rows]:
    """Submissions of as many requests as there are slots: a prefix of two pages that many share, then their own."""
    rng, order = np.random.default_rng(seed), 0
    B, params = program.cache.slots, SamplingParams(max_new_tokens=1)
    while True:
        items = []
        for _ in range(B):
            shared = np.random.default_rng(int(rng.integers(0, 64))).integers(0, VOCAB, 2 * ROWS)
            tokens = np.concatenate([shared, rng.integers(0, VOCAB, int(rng.integers(1, 2 * ROWS)))])
            items.append(requests.Item(order, tokens.tolist(), len(tokens), len(tokens) + int(rng.integers(64, 257))))
            order += 1
        sampler = sampling.pack([params] * B, eos=(), seed=0, requests=range(B), shape=(1, 1))
        yield requests.pack(items, sampler, B, program.cache.capacity)


def measure(program: Program, seconds: float) -> tuple[float, float, dict[str, int]]:
    """(microseconds a step of a steady job, of steps that only decode, and the job's counters)."""
    B, packed = program.cache.slots, max(2 * program.cache.slots, 512)
    state, coming = empty(program), arrivals(program)
    steady: list[float] = []
    decode: list[float] = []
    waiting, began = 0, time.monotonic()
    while time.monotonic() - began < seconds or len(steady) < 5 or not decode:
        while waiting < 2 * B:
            state = engine.submit(state, next(coming))
            waiting += B
        before, start = int(state.step), time.perf_counter()
        state = engine.run(program, {}, state, engine_state.policy(64), packed=packed)
        steps = int(state.step) - before
        steady.append((time.perf_counter() - start) / steps * 1e6)
        # The same batch with nobody waiting: after the prompts are done, steps that only decode.
        if len(steady) % 4 == 0:
            decode += decode_steps(program, state, packed)
        rows = None
        while rows is None or (np.asarray(rows.order) >= 0).all():
            state, rows = engine.collect(state, most=B)
        waiting = int(state.line.count)
    stats = {name: int(getattr(state.stats, name)) for name in ("computed", "hit", "evicted", "preempted", "copied")}
    return statistics.median(steady[2:]), statistics.median(decode), stats


def decode_steps(program: Program, state: EngineState, packed: int) -> list[float]:
    """Microseconds a step, for a copy of the state whose prompts are computed first."""
    state = jax.tree.map(jnp.copy, state)
    state = state.replace(blocked=jnp.bool_(True))  # nobody enters until someone ends
    times = []
    for _ in range(6):
        busy, before, start = int(engine_state.running(state).sum()), int(state.step), time.perf_counter()
        pending = int(engine_state.pending(state).max())
        state = jax.block_until_ready(engine.run(program, {}, state, engine_state.policy(8), packed=packed))
        if pending == 1 and busy == int(engine_state.running(state).sum()):
            times.append((time.perf_counter() - start) / (int(state.step) - before) * 1e6)
    return times


# --- from the compiled program --------------------------------------------------------------------------------
def compiled_for_v5e(program: Program) -> str:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    sharding = SingleDeviceSharding(device)

    def on(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    state = on(jax.eval_shape(lambda: empty(program)))
    policy = on(jax.eval_shape(lambda: engine_state.policy(1)))
    packed = max(2 * program.cache.slots, 512)
    return engine.run.lower(program, {}, state, policy, packed=packed).compile().as_text() or ""


def computations(hlo: str) -> dict[str, list[str]]:
    """Name of each computation → its instructions."""
    found: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith((" ", "}")):
            name = header[1]
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            found[name].append(line)
    return found


def cycles(parts: dict[str, list[str]], name: str, rounds: int) -> int:
    """XLA's estimate for a computation with each loop in it run for `rounds`, and the dearest branch of each choice.

    With 0 rounds conditionals count with their cheapest branch: nothing happens.
    """
    total = 0
    for line in parts[name]:
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        total += int(estimate[1]) if estimate else 0
        loop = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
        if loop and " while(" in line:
            total += (rounds + 1) * cycles(parts, loop[1], rounds) + rounds * cycles(parts, loop[2], rounds)
        if " conditional(" in line:
            named = re.search(r"branch_computations=\{([^}]*)\}", line)
            branches = re.findall(r"[\w.\-]+", named[1]) if named else re.findall(r"_computation=%?([\w.\-]+)", line)
            costs = [cycles(parts, branch, rounds) for branch in branches]
            total += max(costs) if rounds else min(costs)
    return total


def estimate(program: Program) -> tuple[float, float]:
    """Microseconds of a step on a v5e by XLA's estimates: (nothing but decode, everything happens once)."""
    parts = computations(compiled_for_v5e(program))
    entry = next(lines for name, lines in parts.items() if name.startswith("main"))
    bodies = [m[1] for line in entry if " while(" in line and (m := re.search(r"body=%?([\w.\-]+)", line))]
    (body,) = bodies
    return cycles(parts, body, 0) / CLOCK * 1e6, cycles(parts, body, 1) / CLOCK * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--pages", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--seconds", type=float, default=20.0, help="measured for each size")
    arguments = parser.parse_args()
    print(f"Llama-3-8B, bfloat16, v5e: 8.03e9 x 2 bytes / 819 GB/s = {STEP_SECONDS * 1e3:.1f} ms a decode step\n")
    print("| slots | pages | cpu, steady us | cpu, decode us | v5e, decode us | share | v5e, busy us | share |")
    print("|---|---|---|---|---|---|---|---|")
    for slots in arguments.slots:
        for pages in arguments.pages:
            program = program_of(slots, pages)
            steady, decode, stats = measure(program, arguments.seconds)
            quiet, busy = estimate(program)
            shares = [f"{us / 1e6 / STEP_SECONDS:.2%}" for us in (quiet, busy)]
            print(
                f"| {slots} | {pages} | {steady:.0f} | {decode:.0f} | {quiet:.0f} | {shares[0]} | {busy:.0f} "
                f"| {shares[1]} |  {stats}",
                flush=True,
            )


if __name__ == "__main__":
    main()
