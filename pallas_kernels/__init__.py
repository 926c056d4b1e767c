"""Attention and cache operations: each is its plain-jnp meaning, its backends, and one shared test suite."""

from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.joined import Lanes
from kvjax.pallas_kernels.kv_store import (
    LAYOUTS,
    axes_of,
    default_layout,
    init_pages,
    read_pages,
    write_pages,
    write_rows,
)
from kvjax.pallas_kernels.merge import merge
from kvjax.pallas_kernels.packed import CodePages, Codes, init_code_pages, write_code_rows
from kvjax.pallas_kernels.paged_attention import BACKENDS, AttentionSpec, check, default_backend, paged_attention
from kvjax.pallas_kernels.rotation import rotate, rotate_back
from kvjax.pallas_kernels.row_weights import add_row_weights

__all__ = [
    "BACKENDS",
    "LAYOUTS",
    "AttentionSpec",
    "CodePages",
    "Codes",
    "Deal",
    "Lanes",
    "add_row_weights",
    "axes_of",
    "check",
    "default_backend",
    "default_layout",
    "init_code_pages",
    "init_pages",
    "merge",
    "paged_attention",
    "read_pages",
    "rotate",
    "rotate_back",
    "write_code_rows",
    "write_pages",
    "write_rows",
]
