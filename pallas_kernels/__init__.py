"""Attention and cache operations: each is its plain-jnp meaning, its backends, and one shared test suite."""

from kvjax.pallas_kernels.kv_store import LAYOUTS, default_layout, init_pages, write_rows
from kvjax.pallas_kernels.paged_attention import AttentionSpec, paged_attention

__all__ = ["LAYOUTS", "AttentionSpec", "default_layout", "init_pages", "paged_attention", "write_rows"]
