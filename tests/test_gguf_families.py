"""Every family from GGUF files: the tensors and the config of its Hugging Face checkpoint, and the same logits."""

import dataclasses
import math
from contextlib import closing
from typing import Any

import gguf
import golden_families
import golden_gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from test_models import paged_logits

from kvjax.checkpoints.gguf import GGUFSource, open_gguf
from kvjax.checkpoints.place import load_model
from kvjax.checkpoints.quantized import MXFP4Source
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.checkpoints.source import TensorSource, TokenizerSource
from kvjax.errors import ModelError
from kvjax.models import FAMILIES, family_of
from kvjax.models.gguf_common import share
from kvjax.models.positions import Rope, inverse_frequencies, softmax_factor
from kvjax.plans import Model


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Name of a golden model → its GGUF file."""
    folder, found = tmp_path_factory.mktemp("gguf"), {}

    def path(name):
        if name not in found:
            found[name] = golden_gguf.write(name, folder / f"{name}.gguf")
        return found[name]

    return path


def assert_tensors(source, weights):
    """The very numbers; norms that are stored with 1 added lose a bit by it."""
    assert source.names() == tuple(sorted(weights))
    for name, want in weights.items():
        assert source.shape(name) == want.shape, name
        if source.config.get("norms_hold_gains") and name.endswith("norm.weight"):
            np.testing.assert_allclose(source.read(name) - 1, want, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(source.read(name), want, err_msg=name)


@pytest.mark.parametrize("name", golden_gguf.NAMES)
def test_tensors(name, path_of):
    with open_checkpoint(path_of(name), FAMILIES) as source:
        assert_tensors(source, golden_gguf.model(name)[1])


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("smollm3", "model.layers.1.self_attn.k_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("gpt2", "transformer.h.2.attn.c_attn.weight"),
        ("neox", "gpt_neox.layers.0.attention.query_key_value.weight"),
        ("bloom", "transformer.h.1.self_attention.query_key_value.bias"),
        ("falcon_40b", "transformer.h.1.self_attention.query_key_value.weight"),
        ("deepseek_v3", "model.layers.2.self_attn.kv_b_proj.weight"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_any_rows(name, tensor, path_of):
    want = golden_gguf.model(name)[1][tensor]
    cuts = sorted({0, 1, len(want) // 3, len(want) // 2, len(want) - 1, len(want)})
    with open_checkpoint(path_of(name), FAMILIES) as source:
        for i, start in enumerate(cuts):
            for stop in cuts[i:]:
                np.testing.assert_array_equal(source.read_rows(tensor, start, stop), want[start:stop])


def assert_same_config(found, want):
    """Equal, but for how norms are stored; ropes give the same angles."""
    assert type(found) is type(want)
    for field in dataclasses.fields(want):
        a, b = getattr(found, field.name), getattr(want, field.name)
        if isinstance(b, Rope):
            (frequencies, factor), (others, other) = (inverse_frequencies(rope, want.context) for rope in (a, b))
            np.testing.assert_allclose(frequencies, others, rtol=1e-6)
            assert math.isclose(factor, other, rel_tol=1e-6), field.name
            assert math.isclose(softmax_factor(a), softmax_factor(b), rel_tol=1e-6), field.name
        elif field.name != "one_plus":
            assert a == b, field.name


@pytest.mark.parametrize("name", golden_gguf.NAMES)
def test_config(name, path_of):
    hf = golden_gguf.model(name)[0]
    with open_checkpoint(path_of(name), FAMILIES) as source:
        family = family_of(source.config)
        found = family.config(golden_gguf.with_unsaid(name, source.config), None)
        assert source.config["eos_token_id"] == hf["eos_token_id"]
    assert family is family_of(hf)
    assert_same_config(found, family.config(hf, None))
    assert found.__dict__.get("one_plus", False) is False


def model_of(path, name) -> Model:
    with open_checkpoint(path, FAMILIES) as source:
        family = family_of(source.config)
        config = family.config(golden_gguf.with_unsaid(name, source.config), None)
        params = load_model(source, family, config, dtype=jnp.float32)
    return Model(family, config, params, (), [b""] * config.vocab, "float32", "float32", False)


ONE_OF_EACH = (
    *(
        "llama_yarn",
        "smollm3",
        "mixtral",
        "phi3_long",
        "gemma2",
        "gemma3",
        "gpt2",
        "neox",
        "falcon_40b",
        "bloom",
        "mpt",
    ),
    *("deepseek_v2_lite", "deepseek_v3", "gpt_oss"),
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_logits_equal_transformers(name, path_of):
    golden = golden_families.golden(name)
    logits = paged_logits(model_of(path_of(name), name), golden["prompt_2"], 40)
    assert np.abs(logits[:, golden["columns"]] - golden["all_2"]).max() <= 1e-4 * golden["largest_2"]


def test_every_architecture_is_written():
    """But for the llamas of test_checkpoints_gguf.py."""
    known = {name for family in FAMILIES if family.gguf for name in family.gguf.architectures}
    assert known - {"mistral3", "qwen2", "qwen3"} == set(golden_gguf.ARCHITECTURES.values())
    covered = {golden_gguf.ARCHITECTURES[golden_families.CONFIGS[name][1]] for name in golden_gguf.NAMES}
    assert covered == set(golden_gguf.ARCHITECTURES.values())


# --- memory -------------------------------------------------------------------------------------------------------


class Counted:
    """A file that counts the bytes it gives."""

    def __init__(self, file: Any):
        self._file, self.bytes = file, 0

    def seek(self, *where):
        return self._file.seek(*where)

    def read(self, count):
        self.bytes += count
        return self._file.read(count)

    def close(self):
        self._file.close()


@pytest.mark.parametrize(
    "name, tensor, rows, most",
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1.weight", 96, 96 * 64 * 4),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", 1, 2 * 64 * 64 * 4),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight", 28, 28 * 24 * 4),
        ("llama_yarn", "model.layers.0.self_attn.q_proj.weight", 16, 16 * 64 * 4),
    ],
)
def test_no_more_is_read_than_needed(name, tensor, rows, most, path_of):
    """One expert of a stack, one head."""
    with closing(open_gguf(path_of(name), FAMILIES)) as source:
        source._file = counted = Counted(source._file)  # type: ignore[assignment]
        source.read_rows(tensor, 0, rows)
        assert counted.bytes == most


def test_far_rows_are_read_apart(path_of, monkeypatch):
    """q, k and v of one head, out of all of them."""
    from kvjax.checkpoints import gguf_tensors

    monkeypatch.setattr(gguf_tensors, "_NEAR", 4)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    with closing(open_gguf(path_of("neox"), FAMILIES)) as source:
        source._file = counted = Counted(source._file)  # type: ignore[assignment]
        found = source.read_rows(name, 48, 96)
        assert counted.bytes == 48 * 64 * 4
    np.testing.assert_array_equal(found, golden_families.of("neox")[name][48:96])


# --- other forms --------------------------------------------------------------------------------------------------


def rewrite(path, target, change, extra=None):
    """A GGUF file with other tensors: `change` maps {name: array} to {name: array, or (blocks, kind)}."""
    reader = gguf.GGUFReader(str(path))
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(target), arch)
    extra = {f"{arch}.{key}": value for key, value in (extra or {}).items()}
    for name, field in reader.fields.items():
        if name not in extra and name != "general.architecture" and not name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for key, value in extra.items():
        if value is not None:
            golden_gguf._add(writer, key, value)
    for name, value in change({tensor.name: np.array(tensor.data) for tensor in reader.tensors}).items():
        blocks, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_one_by_one(name, path_of, tmp_path):
    """As files before April 2024 have them."""

    def split(tensors):
        found: dict[str, np.ndarray] = {}
        for key, value in tensors.items():
            if "_exps" in key:
                found |= {key.replace("_exps", f".{e}"): part for e, part in enumerate(value)}
            else:
                found[key] = value
        return found

    with open_checkpoint(rewrite(path_of(name), tmp_path / "m.gguf", split), FAMILIES) as source:
        assert_tensors(source, golden_families.of(name))


@pytest.mark.parametrize("both", [False, True], ids=["unsplit", "both"])
def test_latent_projection_unsplit(both, path_of, tmp_path):
    """As files before April 2025 have it, with other head sizes; and files that have both forms."""
    weights, config = golden_families.of("deepseek_v2_lite"), golden_families.config("deepseek_v2_lite")

    def joined(tensors):
        kept = {
            key: value for key, value in tensors.items() if both or ("attn_k_b" not in key and "attn_v_b" not in key)
        }
        layers = range(config["num_hidden_layers"])
        return kept | {
            f"blk.{i}.attn_kv_b.weight": weights[f"model.layers.{i}.self_attn.kv_b_proj.weight"] for i in layers
        }

    plain: dict[str, Any] = {"attention.key_length_mla": None, "attention.value_length_mla": None}
    plain |= {"attention.key_length": 24, "attention.value_length": 12, "attention.head_count_kv": 4}
    path = rewrite(path_of("deepseek_v2_lite"), tmp_path / "m.gguf", joined, {} if both else plain)
    with open_checkpoint(path, FAMILIES) as source:
        assert_tensors(source, weights)
        family = family_of(config)
        assert_same_config(family.config(source.config, None), family.config(config, None))


def test_experts_in_mxfp4(path_of, tmp_path):
    """The blocks of gpt-oss's own checkpoint, as llama.cpp's converter packs them, are the same numbers."""
    rng, (E, o, g) = np.random.default_rng(0), (6, 64, 2)
    hf = {
        f"model.layers.{i}.mlp.experts.{module}_{part}": rng.integers(low, high, (E, rows, g, *width), dtype=np.uint8)
        for i in range(4)
        for module, rows in (("gate_up_proj", 2 * o), ("down_proj", o))
        for part, low, high, width in (("blocks", 0, 256, (16,)), ("scales", 118, 130, ()))
    }

    def packed(blocks, scales):
        """A byte of theirs has numbers j and j + 16 of a block, one of Hugging Face's 2j and 2j + 1."""
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
        bytes_ = numbers[..., :16] | numbers[..., 16:] << 4
        return np.concatenate([scales[..., None], bytes_], axis=-1).reshape(*scales.shape[:2], -1), Kind.MXFP4

    def quantized(tensors):
        found = dict(tensors)
        for i in range(4):
            both, down = (
                [hf[f"model.layers.{i}.mlp.experts.{module}_{part}"] for part in ("blocks", "scales")]
                for module in ("gate_up_proj", "down_proj")
            )
            found[f"blk.{i}.ffn_gate_exps.weight"] = packed(*(x[:, ::2] for x in both))
            found[f"blk.{i}.ffn_up_exps.weight"] = packed(*(x[:, 1::2] for x in both))
            found[f"blk.{i}.ffn_down_exps.weight"] = packed(*down)
        return found

    path = rewrite(path_of("gpt_oss"), tmp_path / "m.gguf", quantized)
    with open_checkpoint(path, FAMILIES) as source:
        assert "MXFP4" in source.describe()
        original = MXFP4Source(Held(hf))
        for name in original.names():
            assert source.shape(name) == original.shape(name)
            np.testing.assert_array_equal(source.read(name), original.read(name).astype(np.float32), err_msg=name)


class Held(TensorSource):
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors
        self.config, self.generation_config, self.tokenizer_source = {}, {}, TokenizerSource()

    def names(self):
        return tuple(self._tensors)

    def shape(self, name):
        return self._tensors[name].shape

    def dtype(self, name):
        return self._tensors[name].dtype

    def read_rows(self, name, start, stop):
        return self._tensors[name][start:stop]

    def describe(self):
        return "held"

    def close(self):
        pass


# --- what a file may leave out ------------------------------------------------------------------------------------


def config_of(name, **changes):
    """The config.json that is read, with keys changed, or left out where None. "layers" stands for block_count."""
    hf, weights = golden_gguf.model(name)
    arch = golden_gguf.ARCHITECTURES[hf["architectures"][0]]
    keys = golden_gguf._KEYS[arch](hf) | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    stored = golden_gguf.stored(arch, hf, weights)
    metadata["tensor_shapes"] = {key: value.shape for key, value in stored.items()}
    metadata |= {key: value.tolist() for key, value in stored.items() if key.startswith("rope_factors")}
    names = next(family.gguf for family in FAMILIES if family.gguf and arch in family.gguf.architectures)
    return names.config(metadata, arch)


def test_scale_of_the_softmax_of_gemmas_27b():
    assert config_of("gemma2")["query_pre_attn_scalar"] == 24
    assert config_of("gemma2", block_count=46)["query_pre_attn_scalar"] == 64 // 4
    assert config_of("gemma3", block_count=62)["query_pre_attn_scalar"] == 64 // 4


def test_windows_of_gemma_and_gpt_oss():
    slide, full = "sliding_attention", "full_attention"
    pattern = {"attention__sliding_window_pattern": None}
    assert config_of("gemma2", attention__sliding_window=None)["sliding_window"] == 4096
    assert config_of("gemma3", **pattern, block_count=7)["layer_types"] == [slide] * 5 + [full, slide]
    assert config_of("gemma3")["layer_types"] == [slide, slide, full, slide]
    assert config_of("gpt_oss")["layer_types"] == [slide, full, slide, full]
    without = config_of("gemma3", attention__sliding_window=None)
    assert family_of(without).config(without, None).windows == (None,) * 4


def test_rope_of_gpt_oss_without_scaling():
    """No rope_scaling in config.json means that of the released models."""
    plain = config_of("gpt_oss", rope__scaling__factor=None, rope__scaling__type=None)
    assert family_of(plain).config(plain, None).rope.kind == "default"


def test_groups_of_deepseek_that_are_not_said():
    old = config_of("deepseek_v3", expert_group_count=None, expert_group_used_count=None)
    assert family_of(old).config(old, None).routing.groups == 1


def test_longropes_factor():
    """It is left out where it follows from the lengths, and kept where not."""
    assert "attention_factor" not in config_of("phi3_long")["rope_scaling"]
    assert config_of("phi3_long", rope__scaling__attn_factor=1.25)["rope_scaling"]["attention_factor"] == 1.25


def test_yarns_own_factor():
    assert config_of("llama_yarn", rope__scaling__yarn_attn_factor=1.5)["rope_scaling"]["attention_factor"] == 1.5


def test_share_of_a_head():
    for head_dim in range(2, 257, 2):
        for rotated in range(2, head_dim + 1, 2):
            assert int(head_dim * share(rotated, head_dim)) == rotated


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("smollm3", {"expert_count": 4}, "is a mixture of experts .'smollm3'., which is not supported"),
        ("mixtral", {"attention__value_length": 8}, "keys and values of different sizes"),
        ("gemma2", {"attention__scale": 0.1}, "sets gemma2.attention.scale, which is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "sets gemma3.final_logit_softcapping, which is not supported"),
        ("mpt", {"attention__head_count_kv": 2}, "has fewer key heads than query heads .mpt., which is not supported"),
        ("mpt", {"attention__max_alibi_bias": None}, "alibi is False, only true is implemented for MPT"),
        ("deepseek_v3", {"expert_gating_func": 3}, "sets deepseek2.expert_gating_func to another than softmax or sig"),
        ("deepseek_v3", {"attention__temperature_scale": 0.1}, "temperature_scale, which is not supported"),
        ("deepseek_v2", {"expert_weights_norm": True}, "norm_topk_prob True is not implemented"),
        ("llama_yarn", {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier, which is not supported"),
        ("gpt_oss", {"rope__scaling__type": "longrope"}, "scales its rotary embedding by 'longrope', which is not"),
    ],
)
def test_variants_are_refused(name, changes, message):
    with pytest.raises(ModelError, match=message) as refusal:
        hf = config_of(name, **changes)
        family_of(hf).config(hf, None)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "name, change, words",
    [
        (
            "deepseek_v3",
            lambda t: {**t, "blk.1.attn_v_b.weight": t["blk.1.attn_v_b.weight"][:3]},
            "blk.1.attn_v_b.weight",
        ),
        ("gpt_oss", lambda t: {**t, "blk.0.ffn_up_exps.bias": t["blk.0.ffn_up_exps.bias"][:, :8]}, "they differ"),
        ("mixtral", lambda t: {**t, "blk.0.ffn_up_exps.weight": t["output_norm.weight"]}, "no stack of experts"),
        (
            "falcon_40b",
            lambda t: {**t, "blk.0.attn_qkv.weight": t["blk.0.attn_qkv.weight"][:60]},
            "60 rows do not split",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, change, words, path_of, tmp_path):
    with pytest.raises(ModelError, match=words) as refusal:
        open_gguf(rewrite(path_of(name), tmp_path / "m.gguf", change), FAMILIES)
    assert "\n" not in str(refusal.value) and "m.gguf has metadata that make no" in str(refusal.value)


def test_half_of_a_pair_is_reported(path_of, tmp_path):
    def half(tensors):
        return {key: value for key, value in tensors.items() if key != "blk.1.attn_k_b.weight"}

    with open_checkpoint(rewrite(path_of("deepseek_v3"), tmp_path / "m.gguf", half), FAMILIES) as source:
        family = family_of(source.config)
        with pytest.raises(ModelError, match=r"Tensor model.layers.1.self_attn.kv_b_proj.weight missing"):
            load_model(source, family, family.config(source.config, None), dtype=jnp.float32)


def test_sources_are_closed(path_of):
    source = open_checkpoint(path_of("gpt2"), FAMILIES)
    assert isinstance(source, GGUFSource)
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read(source.names()[0])
