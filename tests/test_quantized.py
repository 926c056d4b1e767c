"""Quantized checkpoints appear dequantized: MXFP4 and tiles of float8, against their definitions."""

import json

import golden_families
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.errors import ModelError
from kvjax.models import FAMILIES

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def write(folder, tensors, quantization):
    """safetensors by hand where numpy lacks the type; `tensors` are numpy arrays."""
    folder.mkdir(exist_ok=True)
    config = golden_families.config("gpt_oss") | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    header, blobs, offset = {}, [], 0
    names = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
    for name, value in tensors.items():
        blob = value.tobytes()
        header[name] = {
            "dtype": names[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return str(folder)


def test_mxfp4(tmp_path):
    """Code by code: sign, magnitude, the lower half first, the scale a power of two around 127."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, 10, 2, 32))
    scales = rng.integers(110, 140, (3, 10, 2)).astype(np.uint8)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    bias = rng.standard_normal((3, 10)).astype(np.float32)
    tensors = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales, "e.gate_up_proj_bias": bias}
    want = np.empty((3, 64, 10))
    for e, o, g, i in np.ndindex(codes.shape):
        code = codes[e, o, g, i]
        want[e, g * 32 + i, o] = FP4[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[e, o, g]) - 127)
    with open_checkpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"}), FAMILIES) as source:
        assert source.names() == ("e.gate_up_proj", "e.gate_up_proj_bias")
        assert source.shape("e.gate_up_proj") == (3, 64, 10)
        np.testing.assert_array_equal(source.read("e.gate_up_proj").astype(np.float64), want)
        np.testing.assert_array_equal(source.read_rows("e.gate_up_proj", 1, 2)[0].astype(np.float64), want[1])
        np.testing.assert_array_equal(source.read("e.gate_up_proj_bias"), bias)
        assert "quantization_config" not in source.config


def test_fp8_tiles(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((10, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((3, 2)).astype(np.float32)
    want = values.astype(np.float32) * scales[np.arange(10)[:, None] // 4, np.arange(7)[None] // 5]
    tensors = {"x.weight": values, "x.weight_scale_inv": scales, "norm.weight": np.ones(3, np.float32)}
    folder = write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [4, 5]})
    with open_checkpoint(folder, FAMILIES) as source:
        assert source.names() == ("norm.weight", "x.weight")
        for start, stop in ((0, 10), (0, 4), (3, 9), (8, 10)):
            np.testing.assert_array_equal(source.read_rows("x.weight", start, stop), want[start:stop])
        np.testing.assert_array_equal(source.read("norm.weight"), np.ones(3))
        assert source.dtype("x.weight") == np.float32 and "quantized" in source.describe()


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "gptq"}, "is quantized by 'gptq', which cannot be read: use the unquantized"),
        ({"quant_method": "fp8"}, "weight_block_size None: only tiles of two sizes"),
        ("int4", "is quantized by 'int4'"),
        ("fp8", "is quantized by 'fp8'"),
        ({"quant_method": "mxfp4"}, "is quantized by 'mxfp4'"),
    ],
)
def test_other_forms_are_refused(tmp_path, quantization, message):
    folder = write(tmp_path, {"x.weight": np.ones((2, 2), np.float32)}, quantization)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(folder, FAMILIES)


def test_incomplete_pairs_are_named(tmp_path):
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    folder = write(tmp_path, {"e.down_proj_blocks": blocks}, {"quant_method": "mxfp4"})
    with (
        open_checkpoint(folder, FAMILIES) as source,
        pytest.raises(ModelError, match=r"Tensor e\.down_proj_scales is missing"),
    ):
        source.shape("e.down_proj")
    tensors = {"x.weight": np.zeros((9, 9), ml_dtypes.float8_e4m3fn), "x.weight_scale_inv": np.ones((2, 3), np.float32)}
    folder = write(tmp_path / "b", tensors, {"quant_method": "fp8", "weight_block_size": [8, 8]})
    with (
        open_checkpoint(folder, FAMILIES) as source,
        pytest.raises(ModelError, match="which does not fit tiles of 8 × 8"),
    ):
        source.read("x.weight")


def test_gpt_oss_from_mxfp4_is_the_model_of_its_dequantized_weights(tmp_path):
    """The whole path: experts quantized as the hub has them, loaded, and every parameter as computed here."""
    import jax.numpy as jnp

    from kvjax.checkpoints.place import load_model
    from kvjax.models import family_of

    rng = np.random.default_rng(0)
    stored, plain = {}, {}
    for name, value in golden_families.of("gpt_oss").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = value
            continue
        experts, inner, out = value.shape
        codes, scales = rng.integers(0, 16, (experts, out, inner // 32, 32)), np.full((experts, out, inner // 32), 122)
        stored[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
        stored[f"{name}_scales"] = scales.astype(np.uint8)
        table = np.array([*FP4, *(-x for x in FP4)], np.float32)
        plain[name] = (table[codes] / 32).reshape(experts, out, inner).swapaxes(1, 2)
    quantized = write(tmp_path / "q", stored, {"quant_method": "mxfp4"})
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text(json.dumps(golden_families.config("gpt_oss")))
    save_file(
        {name: np.ascontiguousarray(value) for name, value in plain.items()}, tmp_path / "p" / "model.safetensors"
    )
    found = []
    for folder in (quantized, str(tmp_path / "p")):
        with open_checkpoint(folder, FAMILIES) as source:
            family = family_of(source.config)
            config = family.config(source.config, None)
            found.append(load_model(source, family, config, dtype=jnp.float32))
    import jax

    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), *found)))
