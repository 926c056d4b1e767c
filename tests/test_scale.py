"""Contexts that no single chip holds: compiled for the slices that do, and computed on eight simulated devices."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from kvjax import engines, planner
from kvjax.cli.plan import model_of
from kvjax.errors import RequestError
from kvjax.planner import compiled

ROOT = pathlib.Path(__file__).parents[1]

SLICES: list[tuple[str, dict[str, Any]]] = [
    # A prompt step of 2,048 tokens a chip: the ring.
    ("llama-3-8b", {"context": "1M", "chips": "v5e:4x4", "mesh": "seq=4,model=4", "packed": 8192}),
    ("llama-3-8b", {"context": "1M", "chips": "v5e:2x4", "mesh": "seq=4,model=2", "storage": "kivi4"}),
    ("llama-3-70b", {"context": "1M", "chips": "v5p:4x4x4", "mesh": "seq=8,model=8"}),
    ("llama-3-8b", {"context": "10M", "chips": "v5p:2x2x4", "mesh": "seq=8,model=2"}),
    ("llama-3-70b", {"context": "10M", "chips": "v5p:4x4x4", "mesh": "seq=8,model=8"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"), SLICES, ids=[f"{name} {what['context']} {what.get('storage', '')}" for name, what in SLICES]
)
def test_the_loop_fits_by_the_compilers_account(name, what):
    plan = planner.plan(model_of(name), **what)
    program, arguments = compiled.job_of(plan, compiled.mesh_of(plan.slice, plan.axes))
    program_text = engines.run.lower(program, *arguments, packed=plan.packed).compile()
    theirs = compiled.account_of(program_text, arguments)
    assert theirs.total <= plan.slice.chip.hbm
    assert abs(theirs.total - plan.memory.total) <= 0.05 * plan.memory.total
    assert abs(theirs.weights - plan.memory.weights) <= 0.01 * plan.memory.weights
    assert theirs.kv == plan.memory.kv
    if plan.slice.chip.name != "v5e":
        return  # libtpu compiles these, but does not print every one of them
    hlo = program_text.as_text() or ""
    # Nothing as large as a layer's weights travels, and no K or V of the cache.
    widest = plan.packed * plan.model.config.heads * plan.model.config.head_dim
    for size in re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", hlo):
        elements = 1
        for number in size.split(","):
            elements *= int(number)
        assert elements <= 2 * widest
    kernels = set(re.findall(r"kvjax_\w+", hlo))
    assert {"kvjax_attend_rows", "kvjax_attend_chunks"} <= kernels
    assert ("kvjax_ring_attention" in kernels) == (plan.packed >= 256 * plan.axes.seq)


@pytest.mark.slow
def test_what_does_not_fit_is_said_in_the_compilers_own_numbers():
    plan = planner.plan(model_of("llama-3.2-1b"), context="1M", batch=4, chips="v5e:4", mesh="seq=2,model=2")
    assert not plan.fits
    with pytest.raises(RequestError, match=r"does not fit on v5e:4 .* the compiler counts \d\S*G of 15.75G a device"):
        planner.compile_for(plan)


def run(*arguments: str) -> dict:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, str(ROOT / "scripts/long_context.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_needle_in_131072_tokens():
    """Every token through the engine, ring and pages."""
    assert run("131072")["found"]


@pytest.mark.slow
def test_a_needle_in_a_million_tokens():
    """K and V of all but the last step's tokens given; positions to the last bit of a float32."""
    report = run("1048576", "--seeded", "--places", "0.37")
    assert report["found"] and report["rotation_error"] < 3e-7
