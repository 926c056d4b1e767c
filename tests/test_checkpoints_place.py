"""Parameters from checkpoints: form, place, memory, and what is refused."""

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.checkpoints import place
from kvjax.checkpoints.place import init_params, load_params
from kvjax.checkpoints.source import TensorSource
from kvjax.errors import ModelError
from kvjax.types import ParamSpec

ROOT = Path(__file__).parent.parent
D, N, K, H, F, V, L, E = 8, 4, 2, 4, 12, 16, 3, 2


class DictSource(TensorSource):
    """A checkpoint in memory."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return tuple(sorted(self.tensors))

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read_rows(self, name, start, stop):
        return self.tensors[name][start:stop]

    def close(self):
        pass

    def describe(self):
        return "a toy"


def layer_specs(i):
    name = f"model.layers.{i}."
    qkv = tuple(f"{name}{part}.weight" for part in "qkv")
    experts = tuple(f"{name}experts.{e}.weight" for e in range(E))
    return {
        "norm": ParamSpec((D,), (None,), (name + "norm.weight",), init_scale=None),
        "bias": ParamSpec((N, H), ("heads", None), (name + "q.bias",), init_scale=0),
        "qkv": ParamSpec((D, N + 2 * K, H), (None, "heads", None), qkv, transpose=True, concat_axis=1),
        "out": ParamSpec((N, H, D), ("heads", None, None), (name + "o.weight",), transpose=True),
        "up": ParamSpec((2, D, F), (None, None, "ffw"), (name + "gate.weight", name + "up.weight"), transpose=True),
        "experts": ParamSpec((E, D, F), ("experts", None, "ffw"), experts, transpose=True),
    }


def model_specs(tied=False):
    specs = {
        "embed": ParamSpec((V, D), ("vocab", None), ("model.embed_tokens.weight",)),
        "layers": [layer_specs(i) for i in range(L)],
    }
    head = ParamSpec((D, V), (None, "vocab"), ("lm_head.weight",), transpose=True)
    return specs if tied else {**specs, "head": head}


def checkpoint(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    for i in range(L):
        name = f"model.layers.{i}."
        shapes |= {name + "norm.weight": (D,), name + "q.bias": (N * H,), name + "o.weight": (D, N * H)}
        shapes |= {name + "q.weight": (N * H, D), name + "k.weight": (K * H, D), name + "v.weight": (K * H, D)}
        shapes |= {name + f"{part}.weight": (F, D) for part in ("gate", "up", "experts.0", "experts.1")}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def check(params, tensors, stacked=False):
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"].T)
    for i in range(L):
        layer = jax.tree.map(lambda leaf: leaf[i], params["layers"]) if stacked else params["layers"][i]  # noqa: B023
        weights = {name.removeprefix(f"model.layers.{i}."): value for name, value in tensors.items()}
        np.testing.assert_array_equal(layer["norm"], weights["norm.weight"])
        np.testing.assert_array_equal(layer["bias"], weights["q.bias"].reshape(N, H))
        parts = [weights[f"{part}.weight"].T.reshape(D, -1, H) for part in "qkv"]
        np.testing.assert_array_equal(layer["qkv"], np.concatenate(parts, 1))
        np.testing.assert_array_equal(layer["out"], weights["o.weight"].T.reshape(N, H, D))
        np.testing.assert_array_equal(layer["up"], np.stack([weights["gate.weight"].T, weights["up.weight"].T]))
        both = [weights[f"experts.{e}.weight"].T for e in range(E)]
        np.testing.assert_array_equal(layer["experts"], np.stack(both))


@pytest.mark.parametrize("stacked", [False, True])
def test_every_form_of_parameter(stacked, monkeypatch):
    tensors = checkpoint()
    for limit in (1 << 20, 100):  # all rows at once, and few at a time
        monkeypatch.setattr("kvjax.checkpoints.source.CHUNK_BYTES", limit)
        monkeypatch.setattr("kvjax.checkpoints.source.row_chunks.__defaults__", (limit,))
        params = load_params(DictSource(tensors), model_specs(), dtype=np.float32, stacked=stacked)
        check(params, tensors, stacked)


def shard(spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    names = {"heads": "data", "ffw": "model", "vocab": "model"}
    return NamedSharding(mesh, PartitionSpec(*[names.get(axis) for axis in spec.axes]))


@pytest.mark.parametrize("stacked", [False, True])
def test_shards_go_to_their_devices(stacked):
    tensors = checkpoint()
    params = load_params(DictSource(tensors), model_specs(), dtype=np.float32, sharding_of=shard, stacked=stacked)
    check(jax.tree.map(np.asarray, params), tensors, stacked)
    up = params["layers"]["up"] if stacked else params["layers"][0]["up"]
    assert {piece.data.shape[-1] for piece in up.addressable_shards} == {F // 4}
    assert len(up.sharding.device_set) == 8


@pytest.mark.parametrize("sharding_of", [place.default_device, shard])
def test_stacking_on_an_accelerator_gives_the_same(monkeypatch, sharding_of):
    monkeypatch.setattr(place, "_on_host", lambda sharding: False)
    tensors = checkpoint()
    source = DictSource(tensors)
    params = load_params(source, model_specs(), dtype=np.float32, sharding_of=sharding_of, stacked=True)
    check(jax.tree.map(np.asarray, params), tensors, stacked=True)
    if sharding_of is shard:
        assert {piece.data.shape[-1] for piece in params["layers"]["up"].addressable_shards} == {F // 4}


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_casts(stored):
    tensors = checkpoint(stored)
    params = load_params(DictSource(tensors), model_specs(), dtype="bfloat16")
    assert all(leaf.dtype == jax.numpy.bfloat16 for leaf in jax.tree.leaves(params))
    check(params, {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()})


def refused(tensors, specs, *words):
    with pytest.raises(ModelError) as error:
        load_params(DictSource(tensors), specs, dtype=np.float32)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_missing_and_leftover_tensors_are_named():
    tensors = checkpoint()
    del tensors["model.layers.1.o.weight"]
    refused(tensors, model_specs(), "model.layers.1.o.weight", "missing")
    tensors = {**checkpoint(), "extra.a": np.zeros(1), "extra.b": np.zeros(1)}
    refused(tensors, model_specs(), "extra.a, extra.b")
    ignored = {**checkpoint(), "model.layers.0.rotary_emb.inv_freq": np.zeros(1)}
    load_params(DictSource(ignored), model_specs(), dtype=np.float32)


def test_tied_embeddings():
    tensors = checkpoint()
    assert "head" not in load_params(DictSource(tensors), model_specs(tied=True), dtype=np.float32)
    del tensors["lm_head.weight"]
    load_params(DictSource(tensors), model_specs(tied=True), dtype=np.float32)
    refused(tensors, model_specs(), "lm_head.weight")


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("model.embed_tokens.weight", (V, D + 1), (V, D)),
        ("model.embed_tokens.weight", (V,), (V, D)),
        ("model.embed_tokens.weight", (D, V), (V, D)),
        ("lm_head.weight", (V + 1, D), (V, D)),
        ("lm_head.weight", (V,), (V, D)),
        ("model.layers.1.o.weight", (2 * D, N * H // 2), (D, N * H)),
        ("model.layers.1.norm.weight", (D + 1,), (D,)),
        ("model.layers.1.k.weight", (K * H, D + 1), "join to"),
        ("model.layers.1.v.weight", (2 * K * H, D), "join to"),
        ("model.layers.1.v.weight", (K * H // 2, D), "join to"),
        ("model.layers.1.up.weight", (F,), "join to"),
        ("model.layers.1.up.weight", (F, D, 1), "join to"),
    ],
)
def test_wrong_shapes_are_named(name, shape, expected):
    tensors = checkpoint()
    tensors[name] = np.zeros(shape, np.float32)
    refused(tensors, model_specs(), name, str(shape), str(expected))


def test_random_parameters():
    key = jax.random.key(0)
    params = init_params(key, model_specs(), dtype=np.float32)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda spec: spec.shape, model_specs())
    first, second = params["layers"][:2]
    assert (first["norm"] == 1).all() and (first["bias"] == 0).all()
    assert 0.01 < float(first["qkv"].std()) < 0.03
    assert not (first["qkv"] == second["qkv"]).any()
    stacked = init_params(key, model_specs(), dtype=np.float32, stacked=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf: leaf[1], stacked["layers"]), second)
    other = init_params(jax.random.key(1), model_specs(), dtype=np.float32)
    assert not (other["embed"] == params["embed"]).any()
    sharded = init_params(key, model_specs(), dtype="bfloat16", sharding_of=shard, stacked=True)
    assert {piece.data.shape[-1] for piece in sharded["layers"]["up"].addressable_shards} == {F // 4}


def test_random_parameters_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(place, "_on_host", lambda sharding: False)
    norm = ParamSpec((D,), (None,), ("norm",), init_scale=None)
    weight = ParamSpec((D, F), (None, "ffw"), ("w",))
    specs = {"embed": norm, "layers": [{"w": weight}, {"w": weight}]}
    params = init_params(jax.random.key(0), specs, dtype="bfloat16", sharding_of=shard)
    stacked = init_params(jax.random.key(0), specs, dtype="bfloat16", stacked=True)
    assert (params["embed"] == 1).all() and params["embed"].dtype == jax.numpy.bfloat16
    assert 0.01 < float(params["layers"][0]["w"].astype(np.float32).std()) < 0.03
    for i, layer in enumerate(params["layers"]):
        np.testing.assert_array_equal(stacked["layers"]["w"][i], layer["w"])


PEAK = """
import os, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np, psutil
from kvjax.checkpoints.place import load_params
from kvjax.checkpoints.safetensors import open_safetensors
from kvjax.types import ParamSpec
folder, dtype, stacked = sys.argv[1], sys.argv[2], sys.argv[3] == "stacked"
transpose = [ParamSpec((1024, 2048), (None, None), (f"model.layers.{i}.w",), transpose=True) for i in range(24)]
specs = {"embed": ParamSpec((25000, 1024), (None, None), ("embed",)), "layers": [{"w": s} for s in transpose]}
specs["head"] = ParamSpec((1024, 25000), (None, None), ("head",), transpose=True)
jax.device_put(np.zeros(8)).block_until_ready()
process = psutil.Process()
base = peak = process.memory_info().rss
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
params = jax.block_until_ready(load_params(open_safetensors(folder), specs, dtype=dtype, stacked=stacked))
done = True
watcher.join()
leaves = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(peak - base, sum(leaves), max(leaves))
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """400 MB of float32."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text("{}")
    matrix = np.ones((2048, 1024), np.float32)
    tensors = {f"model.layers.{i}.w": matrix for i in range(24)}
    wide = np.ones((25000, 1024), np.float32)
    save_file({**tensors, "embed": wide, "head": wide}, folder / "model.safetensors")
    yield folder
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("form", ["float32 apart", "bfloat16 apart", "float32 stacked"])
def test_peak_host_memory(large_checkpoint, form):
    dtype, stacked = form.split()
    command = [sys.executable, "-c", PEAK, str(large_checkpoint), dtype, stacked]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    grown, stays, largest = map(int, result.stdout.split()[-3:])
    print(f"{form}: peak {grown >> 20} MiB, stays {stays >> 20} MiB, largest {largest >> 20} MiB")
    assert grown < stays + 0.3 * largest + (24 << 20)
