"""Every family against Hugging Face transformers on the same weights in float32: logits, tokens, cache, sharding."""

import dataclasses
import functools
import json
import tempfile

import golden_families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import outputs, requests, tokens
from test_models import GREEDY, paged_logits

from kvjax import sharding
from kvjax.checkpoints.place import check_stackable, load_model
from kvjax.checkpoints.resolve import open_checkpoint
from kvjax.cli.info import describe
from kvjax.errors import ModelError, RequestError
from kvjax.models import FAMILIES, family_of
from kvjax.plans import Model
from kvjax.sampling_params import SamplingParams
from kvjax.types import ParamSpec

NAMES = golden_families.NAMES


@functools.cache
def model_of(name: str, *, stacked: bool = False, mesh=None) -> Model:
    """A golden model, through the real checkpoint reader; its tokens are single bytes."""
    with tempfile.TemporaryDirectory() as folder:
        golden_families.write_checkpoint(name, folder)
        with open_checkpoint(folder, FAMILIES) as source:
            family = family_of(source.config)
            config = family.config(source.config, None)
            how = {"dtype": jnp.float32, "stacked": stacked, "sharding_of": sharding.param_sharding(mesh)}
            params = load_model(source, family, config, **how)
    token_bytes = [bytes([token % 256]) for token in range(config.vocab)]
    return Model(family, config, params, (), token_bytes, "float32", "float32", stacked, mesh and mesh.abstract_mesh)


def stackable(name: str) -> bool:
    """Whether a scan over the layers is possible: equal structure, equal caches."""
    hf = golden_families.config(name)
    family = family_of(hf)
    config = family.config(hf, None)
    try:
        check_stackable(family.abstract(config))
    except ModelError:
        return False
    return len(set(family.kv_specs(config, "float32"))) == 1


def assert_close(found: np.ndarray, want: np.ndarray, largest: float) -> None:
    """Within 1e-4 of the largest logit."""
    assert np.abs(found - want).max() <= 1e-4 * largest


@pytest.mark.parametrize("name", NAMES)
def test_prompt_logits(name):
    """40 tokens, 8 at a time through the paged cache."""
    golden = golden_families.golden(name)
    logits = paged_logits(model_of(name), golden["prompt_2"], 8)
    assert_close(logits[:, golden["columns"]], golden["all_2"], float(golden["largest_2"]))


@pytest.mark.parametrize("name", NAMES)
def test_decode_step_logits(name):
    """Token by token through the paged cache, up to 64 tokens behind the prompt."""
    golden = golden_families.golden(name)
    sequence = np.concatenate([golden["prompt_1"], golden["greedy_1"]])
    logits = paged_logits(model_of(name), sequence[:-1], 1)
    steps = len(golden["prompt_1"]) - 1 + golden["kept_steps"]
    assert_close(logits[steps][:, golden["columns"]], golden["steps_1"], float(golden["largest_1"]))


def check_greedy(model: Model, name: str, **options) -> None:
    golden = golden_families.golden(name)
    prompts = [golden[f"prompt_{i}"] for i in range(3)]
    options = {"share_prefixes": False, **options}  # compiles faster
    assert tokens(model, prompts, GREEDY, **options) == [golden[f"greedy_{i}"].tolist() for i in range(3)]


VARIANTS = {
    "deepseek_v2_lite", "mixtral_window", "gemma3_new", "qwen3_moe_step", "smollm3_window", "neox_sequential",
    "falcon_sequential", "falcon_40b", "bloom_normed", "opt_plain", "gpt2_flags", "mpt_flags", "llama_linear",
    "phi3_long", "mistral_nemo", "deepseek_v2",
}  # fmt: skip
"""Other options of a family: their logits are compared in a quick run, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in NAMES]
)
def test_greedy_tokens(name):
    """64 tokens of three prompts of mixed lengths, through the one program."""
    check_greedy(model_of(name), name)


@pytest.mark.parametrize("name", ["smollm3", "mixtral", "gpt2_flags", "xglm"])
def test_scanned_layers(name):
    """Where a traced layer number matters, and experts within a scan."""
    check_greedy(model_of(name, stacked=True), name)


@pytest.mark.parametrize("name", [name for name in NAMES if not stackable(name)])
def test_layers_that_differ_are_not_stacked(name):
    """Loading says so, instead of mixing up parameters."""
    differ = name in ("qwen3_moe", "qwen3_moe_step") or name.startswith("deepseek")
    if differ:
        with pytest.raises(ModelError, match="has other parameters than layer 0, so layers cannot be scanned"):
            model_of(name, stacked=True)
    else:  # equal parameters, different caches: refused when a job is planned
        with pytest.raises(RequestError, match="Layers with different caches cannot be scanned"):
            tokens(model_of(name, stacked=True), [[1, 2]], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gpt_oss", "mpt", "phi3_long"])
def test_pages_run_out(name):
    """Preemption and recomputation, with the pages of about one and a half requests."""
    model, golden = model_of(name), golden_families.golden(name)
    prompts = [golden[f"prompt_{i}"] for i in range(3)]
    page_bytes = 8 * sum(spec.row_bytes for spec in model.family.kv_specs(model.config, "float32"))
    asked = requests(prompts, GREEDY)
    found = outputs(model, asked, kv_bytes=20 * page_bytes)
    assert [list(o.tokens) for o in found] == [golden[f"greedy_{i}"].tolist() for i in range(3)]
    assert sum(o.preempted for o in found) > 0


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v2", "gpt_oss", "bloom"])
def test_prefixes_are_shared(name):
    """A second prompt with the first one's beginning finds its pages, and its tokens stay the same."""
    model, golden = model_of(name), golden_families.golden(name)
    prompt = golden["prompt_2"]
    first, second = outputs(model, requests([prompt, prompt], SamplingParams(max_new_tokens=24)), slots=1)
    assert first.tokens == second.tokens == tuple(golden["greedy_2"][:24].tolist())
    assert (first.cached_tokens, second.cached_tokens) == (0, 39)


# --- what a family has to declare ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [name for family in FAMILIES for name in family.architectures])
def test_every_architecture_has_a_golden(architecture):
    covered = {fields[1] for fields in golden_families.CONFIGS.values()}
    earlier = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # test_models.py
    same = {"MPTForCausalLM": "MptForCausalLM"}  # the hub's older spelling
    assert same.get(architecture, architecture) in covered | earlier


@pytest.mark.parametrize("name", NAMES)
def test_info_counts_the_bytes_that_the_cache_has(name, tmp_path):
    """`kvjax info` against the arrays that a cache of one page consists of."""
    from kvjax import cache
    from kvjax.cache import CacheConfig

    golden_families.write_checkpoint(name, tmp_path)
    model = model_of(name)
    facts = describe(str(tmp_path))
    state = cache.init(CacheConfig(model.family.kv_specs(model.config, "float32"), 1, 8, 1))
    held = sum(x.nbytes for group in state.groups for x in jax.tree.leaves(group.kv))
    assert facts["kv"]["float32"]["bytes_per_token"] * 8 == held
    assert facts["layers"] == len(model.family.kv_specs(model.config, "float32"))


@pytest.mark.parametrize("name", NAMES)
def test_every_large_parameter_has_an_axis_to_be_sharded_over(name):
    """Logical axes are as many as dimensions; matrices of layers are divided over a mesh by heads, ffw or experts."""
    hf = golden_families.config(name)
    family = family_of(hf)
    specs = family.abstract(family.config(hf, None))
    known = {*sharding.RULES, "width", None}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, ParamSpec)):
        assert len(spec.axes) == len(spec.shape), path
        assert set(spec.axes) <= known, path
        small = len(spec.shape) == 1 or any(part in str(path) for part in ("router", "latent", "positions"))
        assert small or set(spec.axes) & set(sharding.RULES), f"{path} would be replicated: {spec.axes}"


# --- experts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_over_a_mesh(name):
    """Parameters over `expert` and `model`, two devices each; tokens as on one."""
    mesh = sharding.automatic(jax.make_mesh((2, 2), ("expert", "model")))
    model = model_of(name, mesh=mesh)
    placed = [x.sharding.spec for x in jax.tree.leaves(model.params)]
    assert any("expert" in spec for spec in placed) and any("model" in spec for spec in placed)
    check_greedy(model, name)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True .encoder-decoder. is not implemented"),
        ("gpt2", {"activation_function": "mish"}, "activation_function 'mish' is not implemented for GPT2LMHeadModel"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24 .*OPT-350m"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False, only true"),
        ("falcon_7b", {"alibi": True}, "alibi True .*is not implemented for FalconForCausalLM"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True is not implemented for MptForCausalLM"),
        ("mpt", {"no_bias": False}, "no_bias is False, only true"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not implemented"),
        ("deepseek_v2", {"topk_method": "random"}, "topk_method 'random' is not implemented"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3, it has to divide 8 experts"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True .an encoder."),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, at most 6"),
        ("qwen3_moe", {"num_experts": "6"}, "num_experts is '6', a positive whole number"),
        ("xglm", {"pad_token_id": 3}, "pad_token_id is 3, XGLM needs one below 2"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .1., a list of at least 4"),
        ("gemma2", {"architectures": ["Gemma3ForConditionalGeneration"]}, "vision tower is not implemented"),
        ("gemma2", {"architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
    ],
)
def test_config_refuses(name, changes, message):
    hf = golden_families.config(name) | changes
    with pytest.raises(ModelError, match=message) as refusal:
        family_of(hf).config(hf, None)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_learned_positions_end():
    hf = golden_families.config("gpt2")
    family_of(hf).config(hf, 128)
    with pytest.raises(ModelError, match="has learned its 128 positions one by one: give a context of at most 128"):
        family_of(hf).config(hf, 129)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "deepseek_v3"])
def test_names_without_the_transformers_prefix(name, tmp_path):
    """Checkpoints saved from the bare transformer leave its prefix out, as the hub's GPT-2 and BLOOM do."""
    family = family_of(golden_families.config(name))
    weights = {key.removeprefix(family.prefix): value for key, value in golden_families.of(name).items()}
    assert not any(key.startswith(family.prefix) for key in weights)
    golden_families.write_checkpoint(name, tmp_path, weights)
    with open_checkpoint(str(tmp_path), FAMILIES) as source:
        config = family.config(source.config, None)
        params = load_model(source, family, config, dtype=jnp.float32)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, model_of(name).params)
    assert all(jax.tree.leaves(same))


def test_missing_and_left_over_tensors_are_named(tmp_path):
    weights = golden_families.of("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    kept = {key: value for key, value in weights.items() if key != name}
    golden_families.write_checkpoint("mixtral", tmp_path / "a", kept)
    golden_families.write_checkpoint(
        "mixtral", tmp_path / "b", weights | {"model.extra.weight": np.zeros(3, np.float32)}
    )
    family = family_of(golden_families.config("mixtral"))
    for folder, message in (("a", f"Tensor {name} missing"), ("b", "does not use .model.extra.weight.")):
        with open_checkpoint(str(tmp_path / folder), FAMILIES) as source, pytest.raises(ModelError, match=message):
            load_model(source, family, family.config(source.config, None), dtype=jnp.float32)


def test_integers_are_no_weights(tmp_path):
    weights = dict(golden_families.of("gpt2"))
    name = "transformer.h.1.mlp.c_fc.weight"
    weights[name] = np.ones(weights[name].shape, np.int8)
    golden_families.write_checkpoint("gpt2", tmp_path, weights)
    family = family_of(golden_families.config("gpt2"))
    with (
        open_checkpoint(str(tmp_path), FAMILIES) as source,
        pytest.raises(ModelError, match=rf"Tensor {name} .*holds integers \(int8\)"),
    ):
        load_model(source, family, family.config(source.config, None), dtype=jnp.float32)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_bfloat16(name):
    """Parameters, activations and cache of 16 bits: logits near those of 32, through the compiled loop."""
    model = model_of(name)
    narrow = dataclasses.replace(
        model, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params), dtype="bfloat16", storage="bfloat16"
    )
    asked = requests([golden_families.golden(name)["prompt_1"]], SamplingParams(max_new_tokens=4, logprobs=0))
    wide, found = (outputs(m, asked, share_prefixes=False)[0] for m in (model, narrow))
    first = [o.logprobs[0].chosen for o in (wide, found) if o.logprobs]
    assert wide.tokens[0] == found.tokens[0] and abs(first[0] - first[1]) < 0.3


def test_deepseeks_layer_for_a_second_token_is_left_out(tmp_path):
    weights = golden_families.of("deepseek_v3")
    extra = {key.replace("layers.2.", "layers.3."): value for key, value in weights.items() if "layers.2." in key}
    golden_families.write_checkpoint("deepseek_v3", tmp_path, weights | extra)
    family = family_of(golden_families.config("deepseek_v3"))
    with open_checkpoint(str(tmp_path), FAMILIES) as source:
        load_model(source, family, family.config(source.config, None), dtype=jnp.float32)


def test_goldens_are_of_these_configs():
    for name in NAMES:
        assert json.loads(str(golden_families.golden(name)["config"])) == golden_families.config(name)


def test_configs_are_hashable_and_small():
    """They are static arguments of compiled programs."""
    for name in NAMES:
        hf = golden_families.config(name)
        config = family_of(hf).config(hf, None)
        assert hash(config) == hash(dataclasses.replace(config))
