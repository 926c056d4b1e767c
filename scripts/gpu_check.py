"""Checks and times the GPU's attention kernels on a GPU, with nothing installed but JAX (0.11 or newer) and numpy.

    python scripts/gpu_check.py [--out docs/gpu_check.md] [--minutes 8] [--interpret]

First the suite: features, storages and shapes against the plain-jnp reference, on random pages whose unused rows are
NaN and whose unused numbers lead nowhere. Then decode and prompts against the machine's own copy bandwidth and matrix
product, against `jax.nn.dot_product_attention` (cuDNN's, else XLA's) and torch's where it is installed: the shapes of
the goals first, then others until the time is used up. --interpret runs the suite on a CPU (JAX 0.12), without times.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from kvjax.pallas_kernels import AttentionSpec, paged_attention
from kvjax.pallas_kernels.quantize import quantize_rows

STARTED = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch and its attention; `by` says what codes have scales for: "row" or "page"."""

    name: str
    lengths: tuple[int, ...] = (1, 63, 64, 65, 0, 700, 300, 130)
    queries: tuple[int, ...] = (1, 1, 1, 1, 0, 1, 140, 9)
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    value_dim: int = 128
    rows: int = 64
    storage: str = "bfloat16"
    by: str = "row"
    spec: AttentionSpec = dataclasses.field(default_factory=lambda: AttentionSpec(0.09, layout="token_major"))
    sinks: bool = False
    slopes: bool = False
    tree: bool = False


def spec(**how: Any) -> AttentionSpec:
    return AttentionSpec(0.09, layout="token_major", **how)


MLA: dict[str, Any] = {"heads": 16, "kv_heads": 1, "dim": 576, "value_dim": 512}
CASES = [
    Case("plain"),
    Case("decode alone", (1, 64, 65, 5000), (1, 1, 1, 1)),
    Case("float16", storage="float16"),
    Case("pages of 8", rows=8, dim=64, value_dim=64),
    Case("pages of 16", rows=16),
    Case("pages of 256", rows=256),
    Case("heads of 80", dim=80, value_dim=80, rows=16),
    Case("heads of 96", dim=96, value_dim=96),
    Case("heads of 192 and 128", dim=192, heads=4, kv_heads=4),
    Case("heads of 256", dim=256, value_dim=256),
    Case("one head a kv head", heads=2),
    Case("9 heads, 3 kv heads", heads=9, kv_heads=3),
    Case("80 heads, 1 kv head", heads=80, kv_heads=1),
    Case("window", spec=spec(window=100)),
    Case("window and first rows", spec=spec(window=70, sink_rows=5)),
    Case("soft cap", spec=spec(soft_cap=2.0)),
    Case("sinks", sinks=True),
    Case("slopes", slopes=True),
    Case("all of these", spec=spec(window=70, sink_rows=5, soft_cap=2.0), sinks=True, slopes=True),
    Case("tree", tree=True),
    Case("int8", storage="int8"),
    Case("int8 by page", storage="int8", by="page"),
    Case("int8 by page of 16", storage="int8", by="page", rows=16),
    Case("float8_e4m3fn", storage="float8_e4m3fn"),
    Case("float8_e5m2", storage="float8_e5m2"),
    Case("int4", storage="int4"),
    Case("int8, window, soft cap, sinks", storage="int8", spec=spec(window=70, soft_cap=2.0), sinks=True),
    Case("latent", spec=spec(latent=512), **MLA),
    Case("latent int8", spec=spec(latent=512), storage="int8", **MLA),
]  # fmt: skip


def build(case: Case, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and features of the op."""
    rng = np.random.default_rng(seed)
    B, R = len(case.lengths), case.rows
    M = -(-max(case.lengths) // R) + 1
    P, T = B * M + 1, sum(case.queries) + 3
    table = rng.permutation(P)[: B * M].reshape(B, M).astype(np.int32)
    held = np.zeros((P, R), bool)
    for b, length in enumerate(case.lengths):
        at = np.arange(length)
        held[table[b, at // R], at % R] = True
    used = np.arange(M)[None, :] < -(-np.asarray(case.lengths)[:, None] // R)
    table = np.where(used, table, 1 << 20).astype(np.int32)
    narrow = case.storage in ("bfloat16", "float16")
    compute = jnp.dtype(case.storage if narrow else "bfloat16")
    pages, scales = [], []
    for width in (case.dim, case.value_dim):
        x = jnp.asarray(rng.standard_normal((P, R, case.kv_heads, width)), jnp.float32)
        if not narrow:
            codes, scale = quantize_rows(x, case.storage)  # (P, R, K)
            by_row = jnp.where(held[:, :, None], scale, jnp.nan).swapaxes(1, 2)
            scales.append(scale.max(axis=1) if case.by == "page" else by_row)
            x = codes
        else:
            x = jnp.where(held[:, :, None, None], x, jnp.nan).astype(compute)
        pages.append(x)
    q = jnp.asarray(rng.standard_normal((T, case.heads, case.dim)), compute)
    starts = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    features: dict[str, Any] = {}
    if scales:
        features["scales"] = scales[0] if case.spec.latent else jnp.concatenate(scales, axis=1)
    if case.sinks:
        features["sinks"] = jnp.linspace(-1, 4, case.heads, dtype=jnp.float32)
    if case.slopes:
        features["slopes"] = jnp.linspace(0, 0.5, case.heads, dtype=jnp.float32)
    if case.tree:
        words = rng.integers(0, 1 << 32, (T, -(-max(case.queries) // 32)), dtype=np.uint32)
        words[:, 0] |= 1
        features["tree"] = jnp.asarray(words.view(np.int32))
    lengths = jnp.asarray(case.lengths, jnp.int32)
    v = None if case.spec.latent else pages[1]
    return [q, pages[0], v, jnp.asarray(table), lengths, jnp.asarray(starts)], features


def verify(case: Case, backend: str) -> str:
    """The largest errors of out and lse, or why the case fails."""
    arrays, features = build(case)
    most = max(case.queries)
    attend = jax.jit(paged_attention, static_argnames=("spec", "max_query", "backend"))
    out, lse = attend(*arrays, spec=case.spec, max_query=most, backend=backend, **features)
    q, k, v, *rest = arrays
    wide = [q.astype(jnp.float32), k.astype(jnp.float32), None if v is None else v.astype(jnp.float32), *rest]
    with jax.default_matmul_precision("highest"):
        want, want_lse = attend(*wide, spec=case.spec, max_query=most, backend="reference", **features)
    seen = np.isfinite(np.asarray(want_lse))
    error = np.abs(np.asarray(out, np.float32) - np.asarray(want)) / np.maximum(1.0, np.abs(np.asarray(want)))
    gap = np.abs(np.where(seen, np.asarray(lse), 0.0) - np.where(seen, np.asarray(want_lse), 0.0))
    allowed = 2**-9 if case.storage == "float16" else 2**-6
    right = np.array_equal(np.isneginf(np.asarray(lse)), ~seen) and error.max() <= allowed and gap.max() <= 1e-3
    return f"{'ok' if right else 'WRONG'}: out within {error.max():.1e}, lse within {gap.max():.1e}"


def suite(backend: str, left: Callable[[], float]) -> Iterator[list[str]]:
    for case in CASES:
        if left() < 60:
            yield [case.name, "not run: out of time", ""]
            continue
        began = time.monotonic()
        try:
            verdict = verify(case, backend)
        except Exception as error:  # one case that fails must not hide the others
            lines = str(error).strip().splitlines() or [""]
            verdict = f"FAILED: {type(error).__name__}: {lines[0][:160]}"
        yield [case.name, verdict, f"{time.monotonic() - began:.1f}"]


def seconds(step: Callable[..., jax.Array], x: jax.Array, *rest: Any) -> float:
    """Of one step: x → something of its shape, repeated on the device within one program, best of three."""

    # The trip count is an argument of the loop, not of the program: one compilation.
    def program(count: jax.Array, x: jax.Array, *rest: Any) -> jax.Array:
        def again(_: Any, x: jax.Array) -> jax.Array:
            return x + step(x, *rest).astype(x.dtype) * jnp.asarray(1e-3, x.dtype)

        return lax.fori_loop(0, count, again, x)

    run = jax.jit(program)

    def timed(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(count), x, *rest))
        return time.perf_counter() - began

    timed(1)
    once = timed(2) / 2
    count = max(3, min(2000, int(0.1 / once)))
    return min(timed(count) for _ in range(3)) / count


def copy_bandwidth() -> float:
    x = jnp.ones((1 << 30,), jnp.bfloat16)
    return 2 * x.nbytes / seconds(lambda x: x, x)


def matmul_rate() -> float:
    n = 8192
    x = jnp.ones((n, n), jnp.bfloat16) / n
    return 2 * n**3 / seconds(lambda x, y: x @ y, x, x)


def pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random pages, repeated: what zeros would take is less power, and a higher clock."""
    few = min(shape[0], 64)
    x = jax.random.normal(jax.random.key(0), (few, *shape[1:]), jnp.float32)
    x = quantize_rows(x, dtype)[0] if jnp.dtype(dtype).itemsize == 1 else x.astype(dtype)
    return jnp.tile(x, (-(-shape[0] // few), *(1,) * (len(shape) - 1)))[: shape[0]]


def dense(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> tuple[str, float]:
    """Name and seconds of JAX's own attention over contiguous K and V."""
    reasons = []
    for implementation in ("cudnn", "xla"):
        try:

            def step(q: jax.Array, k: jax.Array, v: jax.Array, implementation: Any = implementation) -> jax.Array:
                return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)

            return implementation, seconds(step, q, k, v)
        except Exception as error:
            reasons.append(f"{implementation}: {str(error).strip().splitlines()[0][:80]}")
    return "; ".join(reasons), float("nan")


def torch_seconds(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> float:
    """Of torch's scaled_dot_product_attention; NaN without torch."""
    try:
        import torch
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError:
        return float("nan")
    tensors = [torch.randn(x.shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for x in (q, k, v)]

    def run() -> None:
        scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=True)

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 20


N, K, H, R = 32, 8, 128, 64  # Llama-3-8B's attention


def attention_row(slots: int, context: int, queries: int, storage: str, copy: float, products: float) -> list[str]:
    """One line of the table of times; queries = 1 is decode."""
    M = context // R
    P, T, codes = slots * M, slots * queries, jnp.dtype(storage).itemsize == 1
    k, v = (pool((P, R, K, H), storage) for _ in range(2))
    table = jax.random.permutation(jax.random.key(1), jnp.arange(P, dtype=jnp.int32)).reshape(slots, M)
    lengths = jnp.full((slots,), context, jnp.int32)
    starts = jnp.arange(slots + 1, dtype=jnp.int32) * queries
    features = {"scales": jnp.full((P, 2 * K, R), 0.01, jnp.float32)} if codes else {}
    q = jax.random.normal(jax.random.key(2), (T, N, H), jnp.bfloat16)

    def step(q, k, v, table, lengths, starts, features):
        how = {"max_query": queries, "with_lse": False, "backend": "gpu", **features}
        return paged_attention(q, k, v, table, lengths, starts, spec(), **how)[0]

    took = seconds(step, q, k, v, table, lengths, starts, features)
    moved = k.nbytes + v.nbytes + sum(x.nbytes for x in features.values()) + 2 * q.nbytes
    pairs = queries * context - queries * (queries - 1) // 2
    operations = 4 * slots * N * pairs * H
    name, other, torch_took = "", float("nan"), float("nan")
    if not codes:
        # Contiguous K and V of the same bytes; a prompt is alone in its context, as JAX's causal mask has it.
        causal = queries == context
        if (queries == 1 or causal) and k.nbytes < 8 << 30:
            q4 = q.reshape(slots, queries, N, H)
            k4, v4 = (x.reshape(slots, context, K, H) for x in (k, v))
            name, other = dense(q4, k4, v4, causal)
            torch_took = torch_seconds(q4, k4, v4, causal)
    return [
        "decode" if queries == 1 else f"{queries} tokens", str(slots), f"{context:,}", storage, f"{took * 1e6:,.0f}",
        f"{moved / took / copy:.0%}", f"{operations / took / products:.0%}",
        f"{other / took:.2f} ({name})" if other == other else name or "–",
        f"{torch_took / took:.2f}" if torch_took == torch_took else "–",
    ]  # fmt: skip


FIRST = [(64, 8192, 1, "bfloat16"), (1, 8192, 8192, "bfloat16"), (64, 8192, 1, "int8"), (64, 8192, 1, "float8_e4m3fn")]
SHAPES = FIRST + [
    shape
    for shape in (
        *((8, 8192, 512, storage) for storage in ("bfloat16", "int8")),
        *((slots, context, 1, "bfloat16") for context in (8192, 1024, 65536) for slots in (1, 8, 64, 256)),
        *((slots, context, 1, storage) for storage in ("int8", "float8_e4m3fn") for context in (8192, 1024, 65536)
          for slots in (1, 8, 64, 256)),
    )
    if shape not in FIRST
]  # fmt: skip


def times(left: Callable[[], float], copy: float, products: float) -> Iterator[list[str]]:
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 64 << 30)
    for slots, context, queries, storage in SHAPES:
        needed = 2 * slots * context * K * H * jnp.dtype(storage).itemsize
        label = ["decode" if queries == 1 else f"{queries} tokens", str(slots), f"{context:,}", storage]
        if left() < 25:
            yield [*label, "not run: out of time", "", "", "", ""]
        elif needed * 1.3 > limit:
            yield [*label, "not run: does not fit in memory", "", "", "", ""]
        else:
            try:
                yield attention_row(slots, context, queries, storage, copy, products)
            except Exception as error:
                yield [*label, f"FAILED: {str(error).strip().splitlines()[0][:120]}", "", "", "", ""]


class Report:
    """Lines that are printed and, with a path, kept in a file as they come."""

    def __init__(self, path: str | None):
        self.path = path
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.path:
            pathlib.Path(self.path).write_text("\n".join(self.lines) + "\n")

    def table(self, head: list[str], rows: Iterator[list[str]]) -> list[list[str]]:
        self.add("| " + " | ".join(head) + " |")
        self.add("|" + "---|" * len(head))
        kept = []
        for row in rows:
            self.add("| " + " | ".join(row) + " |")
            kept.append(row)
        self.add("")
        return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="also write the tables to this Markdown file")
    parser.add_argument("--minutes", type=float, default=8.0, help="time in all")
    parser.add_argument("--interpret", action="store_true", help="the suite alone, interpreted on a CPU (JAX 0.12)")
    how = parser.parse_args()
    if how.interpret:  # on one device of two cores the interpreter's threads can starve the arrays they wait for
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    device = jax.devices()[0]
    if device.platform != "gpu" and not how.interpret:
        raise SystemExit(
            f"no GPU: JAX's first device is {device.platform!r}. Run this where JAX sees an NVIDIA GPU of compute "
            "capability 9.0 (Hopper), or with --interpret for the suite on a CPU."
        )
    capability = getattr(device, "compute_capability", "")
    if device.platform == "gpu" and str(capability) != "9.0":
        raise SystemExit(
            f"{device.device_kind} has compute capability {capability or 'none'}; the kernels are for 9.0."
        )
    report = Report(how.out)

    def left() -> float:
        return how.minutes * 60 - (time.monotonic() - STARTED)

    report.add(f"# {device.device_kind}, JAX {jax.__version__}, {time.strftime('%Y-%m-%d')}\n")
    backend = "gpu_interpret" if how.interpret else "gpu"
    # Correctness gets three fifths of the time at most.
    of_suite = report.table(["case", "verdict", "s"], suite(backend, lambda: left() - 0.4 * 60 * how.minutes))
    bad = [row[0] for row in of_suite if not row[1].startswith(("ok", "not run"))]
    right = sum(row[1].startswith("ok") for row in of_suite)
    report.add(f"{right} of {len(of_suite)} cases are right.{' Wrong: ' + ', '.join(bad) if bad else ''}\n")
    if not how.interpret:
        copy, products = copy_bandwidth(), matmul_rate()
        report.add(f"Copy {copy / 1e12:.2f} TB/s; matrix product {products / 1e12:.0f} TFLOP/s in bfloat16.\n")
        head = ["", "slots", "context", "storage", "µs", "of copy", "of product", "× faster than JAX's", "× torch's"]
        report.table(head, times(left, copy, products))
    report.add(f"{time.monotonic() - STARTED:.0f} s in all.")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
