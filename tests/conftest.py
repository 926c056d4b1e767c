"""Strict numerics and eight simulated devices, for every test."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is compilation: less optimised code halves it, and means the same.
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=1")
)
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu only compiles here: no metadata server to wait for
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor for another test run that compiles with it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def _release_programs():
    """Frees what a file compiled: thousands of programs in one process exhaust its memory maps, and XLA crashes."""
    yield
    jax.clear_caches()
    gc.collect()
