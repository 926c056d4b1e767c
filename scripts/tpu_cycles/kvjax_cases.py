"""kvjax's own kernels, as scripts/tpu_roofline.py measures them: called as the engine calls them, through the ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tpu_cycles.cases import CHUNK, CONTEXT, HEADS, SEQUENCES, Case, chip_of

LANES = 128
PACKED = ("int4", "kivi4", "kivi2")
"""Storages whose codes share bytes, K's and V's."""


class _Captured(Exception):
    """The operands of a kernel, before it would run."""


def _operands(call: Any, kernel_file: Any) -> dict[int, Sequence[int]]:
    """The int32 operands that `call` hands to the pallas_call of a module, by number."""
    import jax.numpy as jnp
    import numpy as np

    def stop(*operands):
        raise _Captured(operands)

    with mock.patch.object(kernel_file.pl, "pallas_call", lambda *_, **__: stop):
        try:
            call()
        except _Captured as found:
            (operands,) = found.args
            return {number: np.asarray(x).ravel().tolist() for number, x in enumerate(operands) if x.dtype == jnp.int32}
    raise AssertionError("the kernel was not called")


def attention(
    kernel: str, tokens: int, context: int, page: int, storage: str = "bfloat16", kv_heads: int = 8,
    key_dim: int = 128, value_dim: int | None = None, heads: int = HEADS, latent: bool = False, sequences: int = 1,
    up: tuple[int, int] | None = None,
) -> Case:  # fmt: skip
    """The last `tokens` of `context` rows of each sequence, through `paged_attention`.

    up: of latents, a head's key numbers without position and its values: the call gets the projection that makes them.
    """
    value_dim, width = value_dim or key_dim, -(-context // page)

    def attend(backend: str = "tpu"):
        import jax
        import jax.numpy as jnp

        from kvjax.pallas_kernels import AttentionSpec, Lanes, paged_attention
        from kvjax.pallas_kernels.packed import Codes, init_code_pages

        lanes, count = Lanes(kv_heads, key_dim, value_dim, latent), sequences * width
        spec = AttentionSpec(key_dim**-0.5, latent=value_dim if latent else None, layout="joined", lanes=lanes)
        v_scales: Any = None, None
        if storage in PACKED:
            codes = Codes(storage, storage)
            spec = dataclasses.replace(spec, codes=codes)
            made = jax.eval_shape(lambda: init_code_pages(count, page, lanes, codes, "joined"))
            pages, scales, v_scales = ((x.shape, x.dtype) for x in (made.k, made.k_scales, made.v_scales))
        else:
            dtype = jnp.dtype(storage)
            pages = (count, lanes.row // LANES, page, LANES), dtype
            by_row = (count, kv_heads * (1 if latent else 2), page) if dtype.itemsize == 1 else None
            scales = by_row, jnp.dtype(jnp.float32)
        own = key_dim if up is None else up[0] + key_dim - value_dim
        shapes = [
            ((sequences * tokens, heads, own), jnp.float32 if storage == "float32" else jnp.bfloat16),
            pages,
            ((sequences, width), jnp.int32),
            ((sequences,), jnp.int32),
            ((sequences + 1,), jnp.int32),
            scales,
            (None if up is None else (heads, sum(up), value_dim), jnp.bfloat16),
            v_scales,
        ]

        def run(q, pages, table, lengths, starts, scales, up, v_scales):
            scales = scales if v_scales is None else (scales, v_scales)
            return paged_attention(
                q, pages, None, table, lengths, starts, spec, scales=scales, up=up, max_query=tokens, with_lse=False,
                backend=backend,
            )  # fmt: skip

        return jax.jit(run) if backend == "tpu" else run, shapes

    def compile(chip: str) -> None:
        run, shapes = attend()
        with chip_of(chip) as spec:
            arrays = [None if shape is None else spec(*shape, dtype=dtype) for shape, dtype in shapes]
            run.trace(*arrays).lower().compile()

    def operands() -> dict[int, Sequence[int]]:
        import jax.numpy as jnp

        from kvjax.pallas_kernels import Lanes
        from kvjax.pallas_kernels.paged_attention import tpu_chunks, tpu_decode

        run, shapes = attend("tpu_interpret")
        arrays: list[Any] = [None if shape is None else jnp.zeros(shape, dtype) for shape, dtype in shapes]
        arrays[2] = jnp.arange(sequences * width, dtype=jnp.int32).reshape(sequences, width)
        arrays[3] = jnp.full((sequences,), context, jnp.int32)
        arrays[4] = jnp.arange(sequences + 1, dtype=jnp.int32) * tokens
        if tokens == 1:
            return _operands(lambda: run(*arrays), tpu_decode)
        lanes = Lanes(kv_heads, key_dim, value_dim, latent)
        out = jnp.zeros((sequences * tokens if up is None else sequences, heads, lanes.value_width)), None
        with mock.patch("kvjax.pallas_kernels.paged_attention.tpu.attend_rows", lambda *_, **__: out):
            return _operands(lambda: run(*arrays), tpu_chunks)

    pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    numbers = key_dim + value_dim if up is None else up[0] + key_dim - value_dim + up[1]
    length = f"decode {context}" if tokens == 1 else f"prefill {tokens} on {context - tokens}"
    return Case(
        kernel if up is None else f"{kernel}_expanded",
        f"{heads}/{kv_heads} x {key_dim} {length}",
        storage,
        page,
        "kvjax_attend_rows" if tokens == 1 else "kvjax_attend_chunks",
        compile,
        operands,
        sequences * 2 * heads * numbers * pairs,
        sequences,
        note="" if not latent else "latent" if up is None else "latent, expanded",
    )


def kvjax_cases() -> Iterator[Case]:
    """The shapes of docs/performance.md."""

    def decode(page: int, storage: str = "bfloat16", context: int = CONTEXT, **shape: Any) -> Case:
        return attention("kvjax_decode", 1, context, page, storage, sequences=SEQUENCES, **shape)

    def prefill(page: int, storage: str = "bfloat16", tokens: int = CHUNK, **shape: Any) -> Case:
        return attention("kvjax_prefill", tokens, CONTEXT + tokens, page, storage, **shape)

    mla: dict[str, Any] = {"kv_heads": 1, "key_dim": 576, "value_dim": 512, "latent": True}
    for page in (16, 32, 64, 128, 256):
        yield decode(page)
    for storage in ("int8", "float8_e4m3fn", "float8_e5m2", "float32", *PACKED):
        yield decode(128, storage)
    for page in (16, 128):
        yield decode(page, key_dim=64)
    for key_dim, kv_heads in ((80, 8), (96, 8), (192, 4), (256, 4)):
        yield decode(128, key_dim=key_dim, kv_heads=kv_heads)
    for heads in (16, 128):
        yield decode(128, heads=heads, **mla)
    for context in (500, 3900):
        yield decode(128, context=context)
    for page in (16, 128):
        yield prefill(page)
    for storage in ("int8", "float8_e4m3fn"):
        yield prefill(128, storage)
    yield prefill(128, key_dim=64)
    for heads in (16, 128):
        yield prefill(128, heads=heads, **mla)
        yield prefill(128, heads=heads, up=(128, 128), **mla)
    yield prefill(128, tokens=2048, heads=16, **mla)
    yield prefill(128, tokens=2048, heads=16, up=(128, 128), **mla)
