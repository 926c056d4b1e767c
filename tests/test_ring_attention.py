"""Ring attention: every backend against a dense float64 softmax; the kernel's races, planted bugs, four chips."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.pallas_kernels.ring_attention import (
    AttentionSpec,
    balance,
    permute,
    plain,
    ring_attention,
    striped,
    tpu,
    work,
    zigzag,
)

GOLDENS = Path(__file__).parent / "goldens" / "ring_attention.npz"


def mixed(n: int, T: int) -> np.ndarray:
    """Positions in no order at all."""
    return np.random.default_rng(5).permutation(n * T).astype(np.int32).reshape(n, T)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call on n ranks; all sizes are a rank's."""

    n: int = 4
    T: int = 24
    S: int | None = None
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    order: Callable[[int, int], np.ndarray] = zigzag
    spec: AttentionSpec = dataclasses.field(default_factory=lambda: AttentionSpec(0.3))
    dtype: str = "float32"
    storage: str | None = None
    segments: int = 0
    """Sequences packed one behind the other, and padding at the end of it all."""
    sinks: bool = False
    model: int = 1
    """Of a second mesh axis, over which the heads are spread."""
    blocks: tuple[int, int] = (8, 8)


def build(case: Case) -> dict[str, np.ndarray]:
    """Global arrays, in the order in which ranks hold them."""
    rng, n, S = np.random.default_rng(0), case.n, case.S or case.T

    def numbers(tokens: int, heads: int, dim: int) -> np.ndarray:
        return rng.standard_normal((n * tokens, heads, dim)).astype(np.float32)

    arrays = {
        "q": numbers(case.T, case.heads, case.dim),
        "k": numbers(S, case.kv_heads, case.dim),
        "v": numbers(S, case.kv_heads, case.value_dim),
        # With more keys than queries the queries are the last of the sequence.
        "q_positions": case.order(n, case.T).reshape(-1) + n * (S - case.T),
        "kv_positions": case.order(n, S).reshape(-1),
    }
    if case.storage is not None:
        top = {"int8": 127.0}.get(case.storage, 200.0)
        size = np.concatenate([np.abs(arrays[name]).max(axis=-1) for name in ("k", "v")], axis=1) / top
        arrays["scales"] = size.astype(np.float32)
        for name, scale in (("k", size[:, : case.kv_heads]), ("v", size[:, case.kv_heads :])):
            codes = arrays[name] / scale[..., None]
            codes = np.round(codes) if case.storage == "int8" else codes
            arrays[name] = codes.astype(jnp.dtype(case.storage))
    elif case.dtype != "float32":
        arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("k", "v")}
    arrays["q"] = arrays["q"].astype(jnp.dtype(case.dtype))
    if case.segments:
        ends = np.linspace(0, n * S, case.segments + 2).astype(np.int32)[1:-1]
        for name in ("q", "kv"):
            segment = np.searchsorted(ends, arrays[f"{name}_positions"], side="right").astype(np.int32)
            arrays[f"{name}_segments"] = np.where(segment == case.segments, -1, segment).astype(np.int32)
        hidden = arrays["kv_segments"] < 0
        for name in ("k", "v") if case.storage != "int8" else ():
            arrays[name][hidden] = np.nan  # padding must not come through as 0 × NaN
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.heads).astype(np.float32)
    return arrays


def oracle(arrays: dict[str, np.ndarray], spec: AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
    """Dense, in float64, on all tokens at once."""
    q, k, v = (np.asarray(arrays[name], np.float64) for name in ("q", "k", "v"))
    K, group = k.shape[1], q.shape[1] // k.shape[1]
    if "scales" in arrays:
        k, v = k * arrays["scales"][:, :K, None], v * arrays["scales"][:, K:, None]
    query, key = arrays["q_positions"][:, None], arrays["kv_positions"][None, :]
    seen = key <= query
    if spec.window is not None:
        seen &= (key > query - spec.window) | (key < spec.sink_rows)
    if "q_segments" in arrays:
        mine, theirs = arrays["q_segments"][:, None], arrays["kv_segments"][None, :]
        seen &= (mine == theirs) & (mine >= 0)
        k, v = (np.where(arrays["kv_segments"][:, None, None] >= 0, x, 0.0) for x in (k, v))
    s = np.einsum("tnh,snh->tns", q, np.repeat(k, group, axis=1)) * spec.scale
    if spec.soft_cap is not None:
        s = spec.soft_cap * np.tanh(s / spec.soft_cap)
    s = np.where(seen[:, None], s, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-1e30)
    total = np.exp(s - top).sum(axis=-1, keepdims=True)
    out = np.einsum("tns,snh->tnh", np.exp(s - top), np.repeat(v, group, axis=1))
    nothing = total == 0.0
    if "sinks" in arrays:
        total = total + np.exp(arrays["sinks"][None, :, None] - np.where(nothing, 0.0, top))
    total = np.where(nothing, 1.0, total)
    return np.where(nothing, 0.0, out / total), np.where(nothing, -np.inf, top + np.log(total))[..., 0]


def sharded(case: Case, backend: str, names: tuple[str, ...], mesh: Mesh, **how: Any):
    """The op over a mesh of axes "seq" and "model": a function of a dict of global arrays."""
    specs = {name: P("seq", "model") if name in ("q", "k", "v", "scales") else P("seq") for name in names}
    if "sinks" in specs:
        specs["sinks"] = P("model")

    def attend(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        named: dict[str, Any] = arrays
        return ring_attention(
            **named, spec=case.spec, axis="seq", backend=backend, q_block=case.blocks[0], kv_block=case.blocks[1]
        )

    vma = {"check_vma": False} if backend.startswith("tpu") else {}
    return jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=(P("seq", "model"),) * 2, **(how or vma))


def run(case: Case, backend: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[: case.n * case.model]).reshape(case.n, case.model), ("seq", "model"))
    if case.model > 1 and "scales" in arrays:  # K's heads of a rank, then V's
        K, each = case.kv_heads, case.kv_heads // case.model
        order = [half * K + m * each + i for m in range(case.model) for half in range(2) for i in range(each)]
        arrays = arrays | {"scales": arrays["scales"][:, order]}
    done = jax.jit(sharded(case, backend, tuple(arrays), mesh))({name: jnp.asarray(x) for name, x in arrays.items()})
    out, lse = (np.asarray(x.astype(jnp.float32)) for x in done)
    return out, lse


def check(case: Case, backend: str, tolerance: float | None = None) -> None:
    arrays = build(case)
    out, lse = run(case, backend, arrays)
    want, want_lse = oracle(arrays, case.spec)
    exact = case.dtype == "float32" and (case.storage is None or not backend.startswith("tpu"))
    tolerance = tolerance or (1e-5 if exact else 3e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance)


NEAR = AttentionSpec(0.3, window=21, sink_rows=3, soft_cap=4.0)
PLAIN = {
    "zigzag": Case(),
    "plain, two ranks": Case(n=2, order=plain, heads=3, kv_heads=1),
    "striped, eight ranks": Case(n=8, T=16, order=striped),
    "window, sinks, cap": Case(n=8, order=plain, spec=NEAR, sinks=True),
    "segments": Case(segments=3, sinks=True, value_dim=24),
    "segments, window, more keys": Case(n=2, T=16, S=40, segments=2, spec=NEAR, blocks=(8, 16)),
    "int8": Case(storage="int8", value_dim=8),
    "float8": Case(n=2, storage="float8_e4m3fn", dtype="bfloat16", segments=2),
    "two axes": Case(order=mixed, model=2, sinks=True),
    "alone": Case(n=1, T=30, blocks=(8, 16)),
    "odd ring": Case(n=5, T=10, order=mixed, spec=AttentionSpec(0.3, window=9), blocks=(4, 4)),
}
KERNEL = (128, 128)
# Names that begin the same share nothing but what they are about; a case compiles for 3 to 10 s.
TPU = {
    "segments, sinks": Case(n=2, T=120, S=250, dim=64, segments=3, sinks=True, blocks=KERNEL),
    "window, cap": Case(n=4, T=256, heads=2, kv_heads=2, dim=80, order=plain, blocks=KERNEL, spec=NEAR),
    "zigzag": Case(n=4, T=256, dim=128, value_dim=128, blocks=KERNEL),
    "many blocks": Case(n=2, T=600, dim=32, kv_heads=4, order=mixed, blocks=KERNEL),
    "int8": Case(n=3, T=128, storage="int8", value_dim=40, order=striped, blocks=KERNEL),
    "float8": Case(n=2, T=200, storage="float8_e4m3fn", dtype="bfloat16", segments=2, dim=128, blocks=KERNEL),
    "bfloat16": Case(n=2, T=200, dtype="bfloat16", dim=192, value_dim=128, blocks=KERNEL),
    "two axes": Case(n=2, T=128, model=2, sinks=True, blocks=KERNEL),
    "alone": Case(n=1, T=300, blocks=KERNEL),
}
EIGHT = {
    "zigzag": Case(n=8, T=128, dim=32, blocks=KERNEL, segments=2),
    "two axes": Case(n=4, T=128, dim=32, model=2, order=plain, spec=NEAR, storage="int8", blocks=KERNEL),
}


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_is_dense_attention(case, backend):
    check(case, backend)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if i else []) for i, case in enumerate(TPU.values())], ids=TPU
)
def test_kernel_is_dense_attention(case):
    check(case, "tpu_interpret")


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_kernel_on_eight_devices(name):
    """In a process of its own: XLA has as many threads as devices, and needs one that does not wait for another."""
    env = os.environ | {"NPROC": "32", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def interpreted(case: Case, mode: Any) -> tuple[bool, bool]:
    """Whether there were races, and whether the result is wrong."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    params = pltpu.InterpretParams(detect_races=True, vector_clock_size=64, dma_execution_mode=mode)
    arrays = build(case)
    with mock.patch.object(tpu, "INTERPRETED", params):
        out, lse = run(case, "tpu_interpret", arrays)
    want, want_lse = oracle(arrays, case.spec)
    races = interpret_pallas_call.races
    assert races is not None
    right = np.allclose(out, want, rtol=2e-5, atol=2e-5) and np.allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
    return races.races_found, not right


RING = Case(n=6, T=128, heads=1, kv_heads=1, dim=128, value_dim=128, blocks=KERNEL)
SMALL = dataclasses.replace(RING, n=3)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(SMALL, "on_wait", id="three"),
        pytest.param(RING, "on_wait", id="six", marks=pytest.mark.slow),
        pytest.param(RING, "eager", id="six, eager", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(SMALL, n=2, T=520, heads=2), "on_wait", id="many blocks", marks=pytest.mark.slow
        ),
    ],
)
def test_no_races(case, mode):
    """A DMA moves at the wait, or at once. From six ranks on a buffer is used twice."""
    assert interpreted(case, mode) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["capacity", "arrival"])
def test_a_planted_bug_is_seen(bug):
    """Without the wait for the neighbour's buffer, or for the block that comes."""
    wait = tpu.pl.semaphore_wait
    if bug == "capacity":
        patch = mock.patch.object(
            tpu.pl, "semaphore_wait", lambda sem, value: wait(sem, value) if not hasattr(sem, "transforms") else None
        )
    else:
        make = pltpu.make_async_remote_copy

        def careless(*arguments, **how):
            made = make(*arguments, **how)
            return mock.Mock(start=made.start, wait_send=made.wait_send, wait_recv=lambda: None)

        patch = mock.patch.object(tpu.pltpu, "make_async_remote_copy", careless)
    with patch:
        assert any(interpreted(RING if bug == "capacity" else SMALL, "on_wait"))


def test_orders_hold_every_position_once():
    np.testing.assert_array_equal(zigzag(2, 4), [[0, 1, 6, 7], [2, 3, 4, 5]])
    np.testing.assert_array_equal(striped(2, 3), [[0, 2, 4], [1, 3, 5]])
    for order in (plain, zigzag, striped):
        np.testing.assert_array_equal(np.sort(order(5, 6).reshape(-1)), np.arange(30))
    with pytest.raises(ValueError, match="two chunks"):
        zigzag(2, 3)


@pytest.mark.parametrize("n", [4, 8, 16])
def test_zigzag_is_balanced_in_every_hop(n):
    done = balance(zigzag, n, 512)
    assert done.overall > 0.95 and min(done.hops) > 0.95 and done.stepped > 0.95
    slow = balance(plain, n, 512)
    assert slow.overall < 0.6 and work(plain(n, 64)).sum() == work(striped(n, 64)).sum() == n * 64 * (n * 64 + 1) // 2


def test_hops_are_no_more_than_a_window_needs():
    """Of keys in order a window of a rank's tokens needs the rank before, and nothing ever comes from the right."""
    seen = []
    moved = jax.lax.ppermute

    def count(x, axis, perm):
        jax.debug.callback(lambda to: seen.append(int(to)), jnp.int32(perm[0][1]))
        return moved(x, axis, perm)

    case = Case(n=4, T=16, order=plain, spec=AttentionSpec(0.3, window=12))
    with mock.patch.object(permute.jax.lax, "ppermute", count):
        check(case, "xla")
        jax.effects_barrier()
    assert len(seen) == 2 * case.n and set(seen) == {1}  # K and V, once on each rank, to the right


def refused(**changes: Any):
    arrays = {name: jnp.asarray(x) for name, x in build(Case(n=1)).items()}
    mesh = Mesh(np.array(jax.devices()[:1]), ("seq",))
    spec = changes.pop("spec", AttentionSpec(0.3))
    backend = changes.pop("backend", "xla")
    arrays |= changes
    return jax.shard_map(
        lambda arrays: ring_attention(**arrays, spec=spec, axis="seq", backend=backend),
        mesh=mesh, in_specs=(P(),), out_specs=P(), check_vma=False,
    )(arrays)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"backend": "gpu"}, NotImplementedError, "does not exist"),
        ({"spec": AttentionSpec(0.3, latent=8)}, NotImplementedError, "latent"),
        ({"q": jnp.zeros((24, 3, 16))}, ValueError, "do not divide"),
        ({"k": jnp.zeros((24, 2, 16), jnp.int8), "v": jnp.zeros((24, 2, 16), jnp.int8)}, ValueError, "with scales"),
        ({"q_segments": jnp.zeros(24, jnp.int32)}, ValueError, "both or neither"),
        ({"sinks": jnp.zeros(3)}, ValueError, "sinks"),
        ({"v": jnp.zeros((20, 2, 16))}, ValueError, "do not fit"),
    ],
    ids=lambda x: str(x) if isinstance(x, str) else "",
)
def test_refuses_what_does_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        refused(**changes)


def test_the_example_runs(capsys):
    text = (Path(__file__).parents[1] / "docs" / "ring.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], {})  # type: ignore[index]
    assert capsys.readouterr().out == "(256, 8, 64) (256, 8) True\n"


# ---- Against another implementation, made by scripts/make_ring_goldens.py.


@pytest.mark.parametrize("backend", ["reference", "xla", pytest.param("tpu_interpret", marks=pytest.mark.slow)])
def test_matches_another_ring(backend):
    if not GOLDENS.exists():
        pytest.fail(f"{GOLDENS.name} is missing: scripts/make_ring_goldens.py makes it")
    golden = np.load(GOLDENS)
    n, T = int(golden["ranks"]), golden["q"].shape[0] // int(golden["ranks"])
    q, k, v = (golden[name] for name in ("q", "k", "v"))
    case = Case(
        n=n, T=T, heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[2], value_dim=v.shape[2], order=plain,
        spec=AttentionSpec(float(q.shape[2]) ** -0.5), blocks=KERNEL if backend.startswith("tpu") else (8, 8),
    )  # fmt: skip
    positions = plain(n, T).reshape(-1)
    arrays = {"q": q, "k": k, "v": v, "q_positions": positions, "kv_positions": positions}
    if "segments" in golden:
        arrays |= {"q_segments": golden["segments"], "kv_segments": golden["segments"]}
    out, _ = run(case, backend, arrays)
    np.testing.assert_allclose(out, golden["out"], rtol=2e-5, atol=2e-5)


# ---- Compiled ahead of time.

SLICES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "7x": "tpu7x:2x2x2"}
LLAMA = Case(T=2048, heads=32, kv_heads=8, dim=128, value_dim=128, dtype="bfloat16", spec=AttentionSpec(0.09))
EVERYTHING = AttentionSpec(0.09, window=3000, sink_rows=4, soft_cap=30.0)
COMPILED = {
    "llama 3": LLAMA,
    "8192": dataclasses.replace(LLAMA, T=8192),
    "everything": dataclasses.replace(LLAMA, spec=EVERYTHING, segments=2, sinks=True, model=2),
    "int8": dataclasses.replace(LLAMA, storage="int8"),
    "float8": dataclasses.replace(LLAMA, storage="float8_e4m3fn", T=8192),
    "float32": dataclasses.replace(LLAMA, dtype="float32", heads=8),
    "64": dataclasses.replace(LLAMA, dim=64, value_dim=64),
    "80": dataclasses.replace(LLAMA, dim=80, value_dim=80, heads=8),
    "mha of 192 and 128": dataclasses.replace(LLAMA, dim=192, value_dim=128, kv_heads=32),
}
CALLS = [
    pytest.param(
        case, chip, id=f"{label}-{chip}", marks=[] if (label, chip) == ("llama 3", "v5e") else pytest.mark.slow
    )
    for label, case in COMPILED.items()
    for chip in SLICES
    if label == "llama 3"
    or chip == ("7x" if label in ("8192", "float8") else "v5e")
    or (label, chip) == ("everything", "7x")
]


def compiled(case: Case, chip: str, looped: bool = False):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[chip]).devices
    n = len(devices) // case.model
    mesh = Mesh(np.array(devices).reshape(n, case.model), ("seq", "model"))
    storage = case.storage or case.dtype
    shapes: dict[str, tuple[tuple[int, ...], str, P]] = {
        "q": ((n * case.T, case.heads, case.dim), case.dtype, P("seq", "model")),
        "k": ((n * case.T, case.kv_heads, case.dim), storage, P("seq", "model")),
        "v": ((n * case.T, case.kv_heads, case.value_dim), storage, P("seq", "model")),
        "q_positions": ((n * case.T,), "int32", P("seq")),
        "kv_positions": ((n * case.T,), "int32", P("seq")),
    }
    if case.storage:
        shapes["scales"] = (n * case.T, 2 * case.kv_heads), "float32", P("seq", "model")
    if case.segments:
        shapes |= {f"{name}_segments": ((n * case.T,), "int32", P("seq")) for name in ("q", "kv")}
    if case.sinks:
        shapes["sinks"] = (case.heads,), "float32", P("model")
    arrays = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, where))
        for name, (shape, dtype, where) in shapes.items()
    }
    case = dataclasses.replace(case, blocks=(None, None))  # type: ignore[arg-type]
    attend = sharded(case, "tpu", tuple(arrays), mesh)

    def layers(arrays: dict[str, jax.Array]) -> jax.Array:
        def layer(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, q = carry
            return i + 1, attend(arrays | {"q": q})[0]

        return jax.lax.while_loop(lambda carry: carry[0] < 3, layer, (jnp.int32(0), arrays["q"]))[1]

    return jax.jit(layers if looped else attend).lower(arrays).compile()


@pytest.mark.parametrize(("case", "chip"), CALLS)
def test_compiles(case, chip):
    compiled(case, chip)


@pytest.mark.slow
def test_compiles_in_a_loop():
    """As in the engine: one program, in which a loop calls the kernel, on a mesh with another axis."""
    assert "kvjax_ring_attention" in compiled(dataclasses.replace(LLAMA, model=2), "v5e", looped=True).as_text()


if __name__ == "__main__":
    import conftest  # noqa: F401 — its numerics

    check(EIGHT[sys.argv[1]], "tpu_interpret")
