"""GGUF files: every block format, names, the rows of q and k, config, and damage."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.checkpoints.gguf import open_gguf
from kvjax.errors import ModelError
from kvjax.models.gguf_llama import LLAMA_GGUF
from kvjax.models.positions import rope_from_hf
from kvjax.types import Family

HEADS, KV_HEADS, HEAD_DIM, WIDTH, FFW, VOCAB = 4, 2, 64, 256, 512, 32
FAMILY = Family("llama", ("LlamaForCausalLM",), None, None, None, None, None, LLAMA_GGUF)  # type: ignore[arg-type]
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def interleave(weight, heads):
    """What llama.cpp's converter does to the rows of q and k."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def hf_tensors(tied=False):
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, WIDTH),
        "model.norm.weight": normal(WIDTH),
        layer + "input_layernorm.weight": normal(WIDTH),
        layer + "post_attention_layernorm.weight": normal(WIDTH),
        layer + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, WIDTH),
        layer + "self_attn.o_proj.weight": normal(WIDTH, HEADS * HEAD_DIM),
        layer + "self_attn.q_proj.bias": normal(HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": normal(FFW, WIDTH),
        layer + "mlp.up_proj.weight": normal(FFW, WIDTH),
        layer + "mlp.down_proj.weight": normal(WIDTH, FFW),
    }
    return tensors if tied else {**tensors, "lm_head.weight": normal(VOCAB, WIDTH)}


def gguf_name(name):
    names = LLAMA_GGUF.tensors("llama", {})
    names = {value.replace("{i}", "0"): key.replace("{i}", "0") for key, value in names.items()}
    return names[name]


def stored(tensors, arch="llama"):
    """GGUF name → array, as llama.cpp's converter stores it."""
    result = {}
    for name, value in tensors.items():
        module = name.split(".")[-2]
        if arch in ("llama", "mistral3") and module in ("q_proj", "k_proj"):
            value = interleave(value, HEADS if module == "q_proj" else KV_HEADS)
        result[gguf_name(name)] = value
    return result


def write(path, arrays, arch="llama", kind=Kind.F32, extra=None, raw=None):
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFW)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, value in arrays.items():
        if value.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quants.quantize(value, kind), raw_dtype=kind)
    for name, (blocks, block_kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=block_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["llama", "mistral3", "qwen2", "qwen3"])
def test_names_rows_and_config_are_hugging_faces(tmp_path, arch):
    tensors = hf_tensors()
    path = write(tmp_path / "m.gguf", stored(tensors, arch), arch)
    with open_gguf(path, [FAMILY]) as source:
        assert source.names() == tuple(sorted(tensors))
        for name, expected in tensors.items():
            assert source.shape(name) == expected.shape
            np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        config = source.config
        assert config["num_attention_heads"] == HEADS and config["num_key_value_heads"] == KV_HEADS
        assert config["head_dim"] == HEAD_DIM and config["hidden_size"] == WIDTH and config["vocab_size"] == VOCAB
        assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 500000.0
        assert config["tie_word_embeddings"] is False and config["rope_scaling"] is None
        assert source.generation_config["eos_token_id"] == [2]
        assert source.dtype(source.names()[0]) == np.float32
        assert "F32" in source.describe()


def test_rows_of_permuted_tensors(tmp_path):
    tensors = hf_tensors(tied=True)
    with open_gguf(write(tmp_path / "m.gguf", stored(tensors)), [FAMILY]) as source:
        assert source.config["tie_word_embeddings"] is True
        for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.v_proj.weight"):
            name = f"model.layers.0.{name}"
            for start, stop in ((0, 1), (30, 70), (63, 128)):
                np.testing.assert_array_equal(source.read_rows(name, start, stop), tensors[name][start:stop])


QUANTIZED = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_block_formats(tmp_path, kind):
    tensors = hf_tensors()
    arrays = stored(tensors)
    with open_gguf(write(tmp_path / "m.gguf", arrays, kind=kind), [FAMILY]) as source:
        for name, exact in tensors.items():
            expected = exact
            if exact.ndim == 2:
                expected = quants.dequantize(quants.quantize(exact, kind), kind)
            np.testing.assert_array_equal(source.read(name), expected.astype(np.float32), err_msg=name)


K_BLOCKS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", K_BLOCKS, ids=lambda kind: kind.name)
def test_k_blocks(tmp_path, kind):
    """gguf-py cannot make K-blocks: any bytes are a valid one, as long as its float16 scales are finite."""
    arrays = stored(hf_tensors(tied=True))
    del arrays["token_embd.weight"]
    row_bytes = gguf.GGML_QUANT_SIZES[kind][1] * (WIDTH // 256)
    blocks = RNG.integers(0, 0x7B, (VOCAB * 70, row_bytes), dtype=np.uint8)
    path = write(tmp_path / "m.gguf", arrays, raw={"token_embd.weight": (blocks, kind)})
    with open_gguf(path, [FAMILY]) as source:
        expected = quants.dequantize(blocks, kind)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), expected)
        rows = source.read_rows("model.embed_tokens.weight", 3, 9)
        np.testing.assert_array_equal(rows, expected[3:9])


def test_rotary_factors_become_config(tmp_path):
    arrays = {**stored(hf_tensors()), "rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)}
    with open_gguf(write(tmp_path / "m.gguf", arrays), [FAMILY]) as source:
        scaling = source.config["rope_scaling"]
        assert scaling["rope_type"] == "factors"
        np.testing.assert_array_equal(np.float32(scaling["divisors"]), arrays["rope_freqs.weight"])
        assert rope_from_hf(source.config, HEAD_DIM).divisors == tuple(scaling["divisors"])
        assert "rope_freqs.weight" not in source.names()


def test_yarn_linear_and_long_rope():
    base = {
        "tensor_shapes": {"token_embd.weight": (VOCAB, WIDTH)},
        "llama.attention.head_count": HEADS,
        "llama.embedding_length": WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": FFW,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
    }

    def scaling(**extra):
        extra = {f"llama.rope.scaling.{key}": value for key, value in extra.items()}
        return LLAMA_GGUF.config({**base, **extra}, "llama")["rope_scaling"]

    assert scaling() is None
    assert scaling(type="linear", factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert scaling(type="yarn", factor=4.0, original_context_length=32) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(ModelError, match="strange"):
        scaling(type="strange", factor=2.0)
    factors = {"rope_factors_long.weight": [2.0], "rope_factors_short.weight": [1.0]}
    assert LLAMA_GGUF.config({**base, **factors}, "llama")["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [2.0],
        "short_factor": [1.0],
    }


def refused(path, *words):
    with pytest.raises(ModelError) as error, open_gguf(path, [FAMILY]) as source:
        for name in source.names():
            source.read(name)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    arrays = stored(hf_tensors())
    refused(tmp_path / "nowhere.gguf", "missing")
    (tmp_path / "other.gguf").write_bytes(b"not a model at all, but long enough")
    refused(tmp_path / "other.gguf", "no usable GGUF")
    refused(write(tmp_path / "a.gguf", arrays, "rwkv6"), "rwkv6", "llama, mistral3, phi3, qwen2, qwen3")
    refused(write(tmp_path / "b.gguf", arrays, extra={"llama.logit_scale": 2.0}), "logit_scale")
    bad = {**arrays, "blk.0.attn_q.weight": normal(3 * HEADS, WIDTH)}
    refused(write(tmp_path / "c.gguf", bad), "attn_q")


def test_truncated_anywhere_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", stored(hf_tensors()))
    whole = path.read_bytes()
    for size in (0, 3, 4, 20, 30, 200, 700, 1500, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        refused(path, "m.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    tensors = {name: value for name, value in stored(hf_tensors()).items() if value.ndim == 1}
    tensors["token_embd.weight"] = normal(2, WIDTH)
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", tensors)


@settings(max_examples=120, deadline=None)
@given(damage=st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_never_do_worse_than_be_refused(small_file, damage):
    data = bytearray(small_file.read_bytes())
    for position, value in damage:
        data[position % len(data)] = value
    path = small_file.with_name("damaged.gguf")
    path.write_bytes(bytes(data))
    try:
        with open_gguf(path, [FAMILY]) as source:
            for name in source.names():
                source.read(name)
    except ModelError as error:
        assert "\n" not in str(error)
