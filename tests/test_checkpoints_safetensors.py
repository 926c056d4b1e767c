"""Hugging Face folders: what is written is read, and what is damaged is refused in one sentence."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvjax.checkpoints.safetensors import open_safetensors
from kvjax.errors import ModelError

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 8).astype(ml_dtypes.bfloat16),
    "c.bias": np.arange(7, dtype=np.float16),
    "d.ids": np.arange(6, dtype=np.int64).reshape(1, 2, 3),
    "e.scalar": np.asarray(3.5, np.float32),
    "f.empty": np.zeros((0, 4), np.float32),
}


def write(folder, tensors=TENSORS, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "toy"}')
    save_file(tensors, folder / name)
    return folder / name


def check(source, tensors=TENSORS):
    assert source.names() == tuple(sorted(tensors))
    for name, expected in tensors.items():
        assert source.shape(name) == expected.shape
        found = source.read(name)
        assert found.dtype == expected.dtype == source.dtype(name)
        np.testing.assert_array_equal(found, expected)


def test_reads_what_was_written(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with open_safetensors(tmp_path) as source:
        check(source)
        assert source.config == {"model_type": "toy"}
        assert source.generation_config == {"eos_token_id": [1, 2]}
        assert "6 tensors" in source.describe()


def test_reads_rows(tmp_path):
    write(tmp_path)
    source = open_safetensors(tmp_path)
    np.testing.assert_array_equal(source.read_rows("b.weight", 1, 3), TENSORS["b.weight"][1:3])
    np.testing.assert_array_equal(source.read_rows("c.bias", 2, 5), TENSORS["c.bias"][2:5])
    source.close()


def test_reads_float8(tmp_path):
    values = np.asarray([[0.5, -1.0], [2.0, 448.0]], np.float32).astype(ml_dtypes.float8_e4m3fn)
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    (tmp_path / "config.json").write_text("{}")
    with open_safetensors(tmp_path) as source:
        check(source, {"w": values})


def sharded(folder):
    names = sorted(TENSORS)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in parts.items():
        write(folder, {name: TENSORS[name] for name in part}, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return list(parts)


def test_reads_shards_with_and_without_an_index(tmp_path):
    sharded(tmp_path)
    with open_safetensors(tmp_path) as source:
        check(source)
    (tmp_path / "model.safetensors.index.json").unlink()
    with open_safetensors(tmp_path) as source:
        check(source)


def test_a_single_file_and_an_epath(tmp_path):
    file = write(tmp_path)
    for path in (file, str(tmp_path), epath.Path(tmp_path)):
        with open_safetensors(path) as source:
            check(source)


def refused(path, *words):
    with pytest.raises(ModelError) as error, open_safetensors(path) as source:
        for name in source.names():
            source.read(name)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


def test_missing_parts_are_named(tmp_path):
    shards = sharded(tmp_path)
    (tmp_path / shards[1]).unlink()
    refused(tmp_path, shards[1], "missing")
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "config.json", "missing")
    refused(tmp_path / "nowhere.safetensors", "missing")


def test_a_bad_index_is_refused(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": {"a": "../../x.safetensors"}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        refused(tmp_path, "index.json")


def test_pickles_are_refused_with_the_way_to_convert(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, "pytorch_model.bin", "safe_serialization=True")


def test_truncated_anywhere_is_refused(tmp_path):
    file = write(tmp_path)
    whole = file.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(tmp_path, "model.safetensors", "again")
    file.write_bytes(whole + b"x")
    refused(tmp_path, "model.safetensors")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_never_do_worse_than_be_refused(tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("damaged")
    file = write(folder)
    data = bytearray(file.read_bytes())
    for position, value in damage:
        data[position % len(data)] = value
    file.write_bytes(bytes(data))
    try:
        with open_safetensors(folder) as source:
            for name in source.names():
                source.read(name)
    except ModelError as error:
        assert "\n" not in str(error)
