"""Strict numerics and eight simulated devices, for every test."""

import atexit
import gc
import hashlib
import importlib.metadata
import math
import os
import shutil
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is compilation: less optimised code, and XLA's older way to make it where there is still a
# choice, takes a quarter of it, and means the same.
flags = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
)
# Eight devices on two cores wait for each other: each needs a thread of its own, and its time.
os.environ.setdefault("NPROC", "16")
os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=600"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu only compiles here: no metadata server to wait for
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor for another test run that compiles with it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if "KVJAX_TEST_PROGRAMS" not in os.environ:  # what one process compiles, the others of this run need not
    os.environ["KVJAX_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="kvjax-programs-")
    atexit.register(shutil.rmtree, os.environ["KVJAX_TEST_PROGRAMS"], ignore_errors=True)

import jax
import pytest

jax.devices()  # reads the flags; libtpu, which reads them later, does not know the last one, and ends the process
os.environ["XLA_FLAGS"] = flags
jax.config.update("jax_compilation_cache_dir", os.environ["KVJAX_TEST_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def _release_programs():
    """Frees what a file compiled: thousands of programs in one process exhaust its memory maps, and XLA crashes."""
    yield
    jax.clear_caches()
    gc.collect()


LONG = (
    "test_engine", "test_evicting", "test_paged_attention", "test_llm", "test_tpu_kernels", "test_families",
    "test_beam", "test_models", "test_cli", "test_program", "test_windows", "test_coded", "test_evaluation",
    "test_mesh", "test_smollm2", "test_shared_layers", "test_scheduler", "test_docs",
)  # fmt: skip
"""Files that take minutes: whoever gets one last keeps the other processes waiting."""

SLOW_SECONDS = 60 * float(os.environ.get("KVJAX_SLOW_MINUTES", "inf"))
"""Once so much time has passed, slow tests are skipped, and say so: CI has a limit. Whose turn comes first changes with
KVJAX_TEST_TURN, the commit in CI, so that over a few commits all of them run."""

_began = time.monotonic()


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))
    if math.inf > SLOW_SECONDS:
        turn = os.environ.get("KVJAX_TEST_TURN", "")
        items.sort(key=lambda item: hashlib.sha256(f"{turn} {item.path.stem}".encode()).digest())


def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and time.monotonic() - _began > SLOW_SECONDS:
        pytest.skip(f"the {SLOW_SECONDS / 60:g} minutes for slow tests are over (KVJAX_SLOW_MINUTES)")
