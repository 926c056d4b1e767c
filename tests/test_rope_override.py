"""Another scaling of RoPE than the checkpoint's: words, what they change, and what transformers makes of the same."""

import json

import golden_families
import numpy as np
import pytest
from engines import tokens
from test_families import model_of
from test_models import GREEDY

from kvjax import prefix
from kvjax.errors import ModelError
from kvjax.models import config_of, family_of
from kvjax.models.rope_override import override, parse

LLAMA = golden_families.config("llama_yarn") | {"rope_scaling": None}


def config(hf, rope, context=None):
    return config_of(family_of(hf), hf, context, rope)


def test_words():
    assert parse("yarn:4") == {"rope_type": "yarn", "factor": 4.0}
    assert parse("linear:2.5") == {"rope_type": "linear", "factor": 2.5}
    assert parse("default") == {"rope_type": "default"}


@pytest.mark.parametrize(
    "word",
    ["", "yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:nan", "yarn:inf", "llama3:8", "4", "default:2", "longrope"],
)
def test_other_words_are_refused(word):
    with pytest.raises(ModelError, match="give yarn:FACTOR, ntk:FACTOR"):
        parse(word)


def test_the_served_length_is_the_trained_one_times_the_factor():
    found = config(LLAMA, "yarn:4")
    assert (found.rope.kind, found.rope.factor, found.rope.original_length) == ("yarn", 4.0, 256)
    assert found.context == found.trained_context == 1024
    assert config(LLAMA, "yarn:4", context=300).context == 300
    assert config(LLAMA, "dynamic:2").rope.kind == "dynamic"


def test_the_checkpoints_own_scaling_is_replaced():
    hf = golden_families.config("llama_yarn")  # trained to 32, stretched 8 times
    found = config(hf, "linear:2")
    assert (found.rope.kind, found.rope.factor, found.trained_context) == ("linear", 2.0, 64)
    plain = config(hf, "default")
    assert (plain.rope.kind, plain.context) == ("default", 32)


def test_fields_instead_of_a_word():
    found = config(
        LLAMA, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100, "beta_fast": 16.0}
    )
    assert (found.rope.original_length, found.rope.beta_fast, found.context) == (100, 16.0, 200)


def test_fields_may_be_spelled_as_in_older_files():
    assert config(LLAMA, {"type": "yarn", "factor": 2.0}).rope.kind == "yarn"


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"factor": 4.0}, "without a rope_type: give yarn:FACTOR"),
        ({}, "without a rope_type"),
        ({"rope_type": None}, "without a rope_type"),
        ({"rope_type": "yarn"}, "yarn needs a factor of at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "linear needs a factor of at least 1"),
        ({"rope_type": "zarn", "factor": 2.0}, "RoPE type 'zarn'"),
        ("yarn:1e308", "rope stretches 256 tokens by 1e.308: at most 2147483647 positions"),
        (7, "rope is 7: give yarn:FACTOR"),
    ],
)
def test_impossible_scalings_are_refused(rope, message):
    with pytest.raises(ModelError, match=message):
        config(LLAMA, rope)


def test_longrope_from_a_file(tmp_path):
    path = tmp_path / "factors.json"
    path.write_text(json.dumps({"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}))
    found = config(LLAMA, f"longrope:{path}", context=512)
    assert found.rope.kind == "longrope" and found.rope.long_factor == (2.0,) * 8
    with pytest.raises(ModelError, match="that file cannot be read"):
        config(LLAMA, f"longrope:{tmp_path}/none.json")
    path.write_text("[]")
    with pytest.raises(ModelError, match="does not have long_factor and short_factor"):
        config(LLAMA, f"longrope:{path}")


def test_gemmas_local_layers_keep_their_positions():
    for name in ("gemma3", "gemma3_new"):
        hf = golden_families.config(name)
        before, after = config(hf, None), config(hf, "yarn:4")
        local = before.local_rope, after.local_rope
        assert [(rope.kind, rope.theta, rope.factor) for rope in local] == [
            ("default", before.local_rope.theta, 1.0)
        ] * 2
        assert (after.rope.kind, after.rope.theta, after.rope.factor) == ("yarn", before.rope.theta, 4.0)


def test_partial_rotation_stays():
    assert config(golden_families.config("phi3_long"), "yarn:2").rope.dim == 8
    assert config(golden_families.config("neox"), "yarn:2").rope.dim == 4


def test_models_without_rotary_positions_say_so():
    for name in ("gpt2", "bloom", "xglm"):
        with pytest.raises(ModelError, match="has no rotary positions to scale"):
            config(golden_families.config(name), "yarn:2")


def test_an_override_is_the_checkpoint_that_says_the_same():
    """golden llama_yarn's weights under a config without scaling, with the override: transformers' tokens."""
    import dataclasses

    model = model_of("llama_yarn")
    fields = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    overridden = config(LLAMA, fields)
    assert overridden.rope == model.config.rope
    golden = golden_families.golden("llama_yarn")
    served = dataclasses.replace(model, config=dataclasses.replace(overridden, context=model.config.context))
    found = tokens(served, [golden["prompt_2"]], GREEDY)
    assert found == [golden["greedy_2"].tolist()]


def test_the_scaling_is_part_of_the_prefix_digest():
    model = model_of("llama_yarn")
    assert "yarn" in model.positions and model_of("gpt2").positions == ""
    roots = [prefix.namespace("", positions=p) for p in ("", model.positions, model.positions + "1")]
    assert len({tuple(root.tolist()) for root in roots}) == 3
    np.testing.assert_array_equal(roots[0], 0)
    assert (prefix.namespace("a", "b") != prefix.namespace("a", positions="b")).any()
    assert override(LLAMA, "default")["max_position_embeddings"] == 256
