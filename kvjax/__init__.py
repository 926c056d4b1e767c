"""kvjax: a functional LLM inference engine in JAX, built around a paged KV cache.

import kvjax
llm = kvjax.load()
print(llm.generate("The capital of France is", max_new_tokens=8).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.errors import ModelError, RequestError, UserError
from kvjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvjax.async_llm import AsyncLLM
    from kvjax.embedding import Embedder
    from kvjax.llm import LLM, Completion, Sample, load
    from kvjax.pallas_kernels import paged_attention as attention

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Embedder",
    "ModelError",
    "RequestError",
    "Sample",
    "SamplingParams",
    "UserError",
    "attention",
    "load",
]

_FACADE = {
    "AsyncLLM": "async_llm",
    "Completion": "llm",
    "Embedder": "embedding",
    "LLM": "llm",
    "Sample": "llm",
    "load": "llm",
}


def __getattr__(name: str) -> Any:
    # The façade imports the families, which import the engine: importing it here at once would turn the arrows of
    # docs/design around, and make `import kvjax.cache` load every family.
    if name in _FACADE:
        return getattr(importlib.import_module(f"kvjax.{_FACADE[name]}"), name)
    if name == "attention":
        return importlib.import_module("kvjax.pallas_kernels").paged_attention
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
