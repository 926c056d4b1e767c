"""Attention and cache operations: each is its plain-jnp meaning, its backends, and one shared test suite."""

from kvjax.pallas_kernels.joined import Lanes
from kvjax.pallas_kernels.kv_store import LAYOUTS, default_layout, init_pages, write_rows
from kvjax.pallas_kernels.paged_attention import BACKENDS, AttentionSpec, check, default_backend, paged_attention

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "AttentionSpec",
    "Lanes",
    "check",
    "default_backend",
    "default_layout",
    "init_pages",
    "paged_attention",
    "write_rows",
]
