"""Families against Hugging Face transformers, on the same weights in float32: logits, then greedy tokens."""

import math
from typing import Any

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import goldens, tiny, tokens

from kvjax import cache, engine
from kvjax.cache import CacheConfig, Placement
from kvjax.checkpoints.fill import aligned_empty
from kvjax.errors import ModelError
from kvjax.models import family_of
from kvjax.models.llama import config_from_hf
from kvjax.sampling_params import SamplingParams
from kvjax.state import Program

GREEDY = SamplingParams(max_new_tokens=64)


def program_of(model, slots=1, rows=8, pages=16) -> Program:
    family = model.family
    config = CacheConfig(
        family.kv_specs(model.config, "float32"), slots, rows, pages, stacked=model.stacked
    )  # fmt: skip
    return Program(family.forward, family.unembed, model.config, model.config.width, "float32", config)


def paged_logits(model, ids, chunk: int) -> np.ndarray:
    """(T, V) logits of a prompt computed `chunk` tokens at a time through the paged cache."""
    program = program_of(model)

    @jax.jit
    def run(params, state, tokens, placement):
        now, new = jnp.int32(0), jnp.asarray([chunk], jnp.int32)
        grown = cache.reserve(program.cache, state, None, new, now, now, jnp.bool_(False), chunk).cache
        grown, hidden = engine.compute(program, params, grown, tokens, placement)
        return grown, program.unembed(params, model.config, hidden)

    state, out = cache.init(program.cache), []
    for start in range(0, len(ids), chunk):
        slots, positions = jnp.zeros((chunk,), jnp.int32), jnp.arange(start, start + chunk, dtype=jnp.int32)
        placement = Placement(slots, positions, jnp.asarray([0, chunk], jnp.int32), chunk)
        state, logits = run(model.params, state, jnp.asarray(ids[start : start + chunk], jnp.int32), placement)
        out.append(np.asarray(logits))
    return np.concatenate(out)


def assert_close(found: np.ndarray, want: np.ndarray) -> None:
    """Within 1e-4 of the largest logit: small ones are differences of large terms."""
    assert np.abs(found - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("chunk", [1, 8, 40])
@pytest.mark.parametrize("name", golden_models.NAMES)
def test_prompt_logits_equal_transformers(name, chunk):
    golden = goldens(name)
    assert golden["checksum"] == golden_models.checksum(name)
    assert_close(paged_logits(tiny(name), golden["prompt_2"], chunk), golden["all_2"])


@pytest.mark.parametrize("name", golden_models.NAMES)
def test_decode_step_logits_equal_transformers(name):
    golden = goldens(name)
    sequence = np.concatenate([golden["prompt_1"], golden["greedy_1"]])
    logits = paged_logits(tiny(name), sequence[:-1], 1)
    steps = len(golden["prompt_1"]) - 1 + golden["kept_steps"]
    assert_close(logits[steps], golden["steps_1"])


def dense_attend(window):
    """Causal attention over the step's own keys, with no cache: the whole prompt must be in one step."""

    def attend(cache, layer, q, k, v, scale):
        T, N, _ = q.shape
        k, v = (jnp.repeat(x, N // k.shape[1], axis=1) for x in (k, v))
        s = jnp.einsum("tnh,snh->nts", q, k, precision="highest") * scale
        query, key = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
        seen = (key <= query) & (key > query - (window or T))
        p = jax.nn.softmax(jnp.where(seen[None], s, -jnp.inf), axis=-1)
        return cache, jnp.einsum("nts,snh->tnh", p, v, precision="highest")

    return attend


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mistral"])
def test_paged_equals_dense(name):
    """Greedy continuation by recomputing everything densely each token, and by the engine: token for token."""
    model = tiny(name)
    prompt = goldens(name)["prompt_1"].tolist()
    attend = dense_attend(model.config.windows[0])

    @jax.jit
    def dense_next(params, ids, length):
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        _, hidden = model.family.forward(params, model.config, ids, positions, None, attend)
        return model.family.unembed(params, model.config, hidden)[length - 1].argmax()

    ids = np.zeros(len(prompt) + 24, np.int32)
    ids[: len(prompt)] = prompt
    for length in range(len(prompt), len(ids)):
        ids[length] = dense_next(model.params, jnp.asarray(ids), length)
    want = ids[len(prompt) :].tolist()
    assert tokens(model, [prompt], SamplingParams(max_new_tokens=24)) == [want]


@pytest.mark.parametrize(
    ("name", "stacked"),
    [*((name, False) for name in golden_models.NAMES), ("tiny_llama", True), ("tiny_mistral", True)],
)
def test_greedy_tokens_equal_transformers(name, stacked):
    golden = goldens(name)
    prompts = [golden[f"prompt_{i}"] for i in range(3)]
    want = [golden[f"greedy_{i}"].tolist() for i in range(3)]
    assert tokens(tiny(name, stacked=stacked), prompts, GREEDY) == want


def hf(**changes):
    return {**golden_models.config("tiny_llama"), **changes}


def test_config_reads_windows():
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config_from_hf(hf(**mistral, sliding_window=8)).windows == (8, 8, 8)
    assert config_from_hf(hf(**mistral, sliding_window=None)).windows == (None,) * 3
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 2}
    assert config_from_hf(hf(**qwen, use_sliding_window=False)).windows == (None,) * 3
    assert config_from_hf(hf(**qwen, use_sliding_window=True)).windows == (None, None, 8)
    assert config_from_hf(hf(**(SLIDING | {"max_window_layers": 0}))).windows == (8, 8, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_from_hf(hf(**SLIDING, layer_types=kinds)).windows == (8, None, 8)
    assert config_from_hf(hf(**MISTRAL, sliding_window=0)).windows == (None,) * 3


MISTRAL = {"architectures": ["MistralForCausalLM"]}
SLIDING = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
NO_COUNTS = (-1, 3.5, "8", True, [8], 1e300)
NO_TYPES: tuple[Any, ...] = (5, "full_attention", ["zzz"] * 3, ["full_attention"] * 2, [["full_attention"]] * 3, [])
NO_EPS: tuple[Any, ...] = (None, [], {}, "3", math.nan, math.inf, -1, 0, True, 10**400)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["RwkvForCausalLM"]},
            "architecture RwkvForCausalLM is not supported; kvjax runs the families llama, gemma",
        ),
        ({"architectures": None}, "config.json without 'architectures' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"hidden_size": None}, "hidden_size is None, a positive whole number is needed"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', a positive whole number"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        *[({"architectures": bad}, "architectures is .*a list of names") for bad in (5, True, "LlamaForCausalLM")],
        ({"architectures": ["LlamaForCausalLM", 5]}, "architectures is .*, 5.*a list of names"),
        *[({field: 10**30}, f"{field} is 10+, at most 2147483647 is possible") for field in SIZES],
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, at most 10000"),
        ({"head_dim": 2**20}, "head_dim is 1048576, at most 65536"),
        ({"num_attention_heads": 200, "head_dim": None}, "head_dim is 0, a positive whole number"),
        *[(MISTRAL | {"sliding_window": bad}, "sliding_window is .*a whole number of at least 0") for bad in NO_COUNTS],
        *[(SLIDING | {"max_window_layers": bad}, "max_window_layers is .*a whole number") for bad in ("1", -1, 1.0)],
        (MISTRAL | {"sliding_window": 10**30}, "sliding_window is 10+, at most"),
        *[(SLIDING | {"layer_types": bad}, "layer_types is .*a list of 3 names out of full") for bad in NO_TYPES],
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is .*a list of 3 names"),
        *[({"rms_norm_eps": bad}, "rms_norm_eps is .*a finite positive number is needed") for bad in NO_EPS],
        *[({field: bad}, f"{field} is .*true or false is needed") for field in FLAGS for bad in ("false", 1, [8])],
        ({"rope_theta": math.inf}, "finite number for rope_theta, not inf"),
        ({"rope_scaling": True}, "rope_scaling is True, an object"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ModelError, match=message) as refusal:
        family_of(hf(**changes)).config(hf(**changes), None)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_null_is_the_default_of_a_flag():
    assert config_from_hf(hf(**dict.fromkeys(FLAGS))) == config_from_hf(hf(**dict.fromkeys(FLAGS, False)))


def test_the_first_known_architecture_counts():
    names = ["Another", "Qwen3ForCausalLM"]
    assert family_of(hf(architectures=names)).config(hf(architectures=names), None).qk_norm


@pytest.mark.parametrize("shape", [(2**50,), (2**31 - 1, 2**31 - 1), (2**40, 2**40)])
def test_sizes_beyond_the_memory_are_refused(shape):
    with pytest.raises(ModelError, match=r"shape \(.* does not fit .*check the sizes in config.json"):
        aligned_empty(shape, np.dtype(np.float32))
