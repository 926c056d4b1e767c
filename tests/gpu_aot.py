"""Kernels compiled ahead of time for GPUs that this machine does not have, and ptxas's account of them.

    compiled = compile_for("h200", fn, x, y)     x, y: arrays or ShapeDtypeStructs
    compiled.kernels[0].registers

Needs the compiler alone, no device: the wheels jax-cuda13-plugin (without its extra) and nvidia-cuda-nvcc, or ptxas of
a CUDA toolkit. The device is described by numbers, below: those of NVIDIA's data sheets that XLA asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Mosaic GPU reads these whenever it compiles.
DUMP = pathlib.Path(os.environ.setdefault("MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp(prefix="kvjax-mosaic-gpu-")))
os.environ.setdefault("MOSAIC_GPU_DUMP_PTXAS", "1")

SHARED = 227 * 1024
"""Bytes of shared memory that a block may use, on Hopper and on data-center Blackwell."""

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major}  feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10  patch: 0 }}
device_description_str: "{name}"
"""
TARGETS = {
    "h200": _TARGET.format(
        cores=132, bandwidth=4_800_000_000_000, l2=52_428_800, clock=1.98, memory=151_397_597_184, major=9,
        name="NVIDIA H200 141GB HBM3e",
    ),
    "b200": _TARGET.format(
        cores=148, bandwidth=8_000_000_000_000, l2=132_120_576, clock=1.965, memory=193_273_528_320, major=10,
        name="NVIDIA B200",
    ),
}  # fmt: skip


def missing() -> str | None:
    """Why nothing can be compiled for a GPU here; None where it can."""
    plugins = ("jax-cuda13-plugin", "jax-cuda12-plugin")
    if not any(_installed(name) for name in plugins):
        return "no CUDA plugin of JAX: pip install jax-cuda13-plugin nvidia-cuda-nvcc"
    if not _ptxas_on_path():
        return "no ptxas: pip install nvidia-cuda-nvcc, or put a CUDA toolkit's on PATH"
    return None


def _installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def _ptxas_on_path() -> bool:
    """Puts the wheel's ptxas on PATH where there is one: it is the newer."""
    for root in sys.path:
        for bins in pathlib.Path(root).glob("nvidia/*/bin"):
            if (bins / "ptxas").exists() and str(bins) not in os.environ["PATH"].split(os.pathsep):
                os.environ["PATH"] = f"{bins}{os.pathsep}{os.environ['PATH']}"
    return shutil.which("ptxas") is not None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one Mosaic kernel.

    Attributes:
      name: as the kernel is called.
      registers: of a thread, at its entry.
      spilled: bytes of registers spilled to memory, stores and loads.
      shared: bytes of shared memory, barriers aside.
      text: the whole account.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    text: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """
    Attributes:
      kernels: those that were compiled now: one that this process has compiled before is not compiled again.
      executable: of XLA.
    """

    kernels: tuple[Kernel, ...]
    executable: Any


@functools.cache
def mesh(chip: str) -> Mesh:
    topology = topologies.get_topology_desc(chip, "cuda", target_config=TARGETS[chip], topology="1x1x1")
    return Mesh(np.array(topology.devices[:1]), ("x",))


def compile_for(chip: str, fn: Callable, *args: Any) -> Compiled:
    """Compiles fn for arguments shaped like args, None allowed."""
    everywhere = NamedSharding(mesh(chip), PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), args)
    with jax.set_mesh(mesh(chip)), _accounts() as accounts:  # the mesh tells Pallas which GPU to lower for
        executable = jax.jit(fn).trace(*shapes).lower().compile()
    return Compiled(tuple(accounts), executable)


@contextlib.contextmanager
def _accounts() -> Iterator[list[Kernel]]:
    files = set(DUMP.iterdir())
    kernels: list[Kernel] = []
    yield kernels
    for file in sorted(file for file in set(DUMP.iterdir()) - files if file.suffix == ".ptxas"):
        text = file.read_text(errors="replace")
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        used = re.search(r"Used (\d+) registers", text)
        assert spills and used, text
        name = file.stem.rpartition("_")[0]  # what follows is a number of the dump's own
        [account] = set(DUMP.glob(f"{name}_*.resources.txt")) - files
        resources = re.search(r"smem_scratch_bytes=(\d+)", account.read_text())
        assert resources
        kernels.append(Kernel(name, int(used[1]), int(spills[1]) + int(spills[2]), int(resources[1]), text))
    for file in set(DUMP.iterdir()) - files:
        file.unlink()
