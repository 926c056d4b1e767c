"""`kvjax plan`: bytes that are known, bytes that the engine itself allocates, and sentences for what cannot be."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import golden_gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from typer.testing import CliRunner

from kvjax import planner, sharding
from kvjax import state as engine_state
from kvjax.checkpoints.source import TensorSource
from kvjax.cli.app import app
from kvjax.cli.plan import model_of
from kvjax.errors import ModelError, RequestError, UserError
from kvjax.planner import CONFIGS, Axes, MemoryAccount, memory, named, report, roofline
from kvjax.planner.chips import CHIPS, parse_chips
from kvjax.planner.meshes import candidates, parse_mesh
from kvjax.planner.units import parse_tokens
from kvjax.state import Program

GIB, MIB = 2**30, 2**20
named_model = functools.cache(model_of)


def specs(name, storage="bfloat16"):
    model = named_model(name)
    return model.family.kv_specs(model.config, storage)


def job(name, chip="v5e", storage="bfloat16", **options):
    return planner.job_of(named_model(name), CHIPS[chip], storage, "bfloat16", **options)


# --- what models take ---------------------------------------------------------------------------------------
TOKENS = {
    "gpt2": 36_864, "llama-1-7b": 524_288, "llama-1-13b": 819_200, "llama-1-65b": 2_621_440, "llama-2-7b": 524_288,
    "llama-2-13b": 819_200, "llama-2-70b": 327_680, "llama-3-70b": 327_680, "gpt-3": 4_718_592, "llama-3-8b": 131_072,
    "mistral-7b-v0.1": 131_072, "mistral-7b-v0.3": 131_072, "qwen3-8b": 147_456, "llama-3.1-405b": 516_096,
    "deepseek-v3": 70_272, "deepseek-r1": 70_272, "deepseek-v2": 69_120,
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_bytes_of_a_token(name):
    assert memory.bytes_per_token(specs(name)) == TOKENS[name]


@pytest.mark.parametrize(
    ("name", "context", "batch", "gib"),
    [
        ("gpt2", 1024, 1, 37_748_736 / GIB), ("gpt2", 1024, 32, 1.125), ("llama-1-7b", 2048, 1, 1),
        ("llama-1-7b", 2048, 32, 32), ("llama-1-13b", 2048, 1, 1.5625), ("llama-1-13b", 2048, 32, 50),
        ("llama-1-65b", 2048, 1, 5), ("llama-1-65b", 2048, 32, 160), ("gpt-3", 2048, 1, 9), ("gpt-3", 2048, 32, 288),
        ("llama-2-70b", 4096, 1, 1.25), ("llama-3-70b", 2048, 1, 0.625), ("llama-3-70b", 131_072, 1, 40),
        ("llama-2-70b", 131_072, 8, 320),
        ("llama-3.1-70b", 10 << 20, 1, 3200),  # 3.4 TB at 10M tokens
    ],
)  # fmt: skip
def test_bytes_of_sequences(name, context, batch, gib):
    assert batch * memory.ideal_bytes(specs(name), context) == gib * GIB


def test_windows():
    gemma, oss = specs("gemma-3-27b"), specs("gpt-oss-120b")
    assert round(memory.ideal_bytes(gemma, 131_072) / GIB, 2) == 10.41
    assert 131_072 * memory.bytes_per_token(gemma) == 62 * GIB
    growing = [spec for spec in oss if spec.window is None]
    assert memory.bytes_per_token(growing) == 36_864
    assert memory.ideal_bytes(oss, 131_072) == 131_072 * 36_864 + 4.5 * MIB
    found = planner.plan(named_model("gemma-3-27b"), context="128k", chips="v5p:1")
    held = -(-(1024 + 63) // 64) * 64 + 64  # the window begins anywhere in its first page, and a new one is open
    assert found.rows == 64 and found.sequence_bytes == (10 * 131_072 + 52 * held) * 16 * 128 * 2 * 2
    assert round(found.sequence_bytes / GIB, 2) == 10.46
    assert round(found.ideal_sequence_bytes / GIB, 2) == 10.41
    assert sum(group.ideal for group in found.groups) == found.ideal_sequence_bytes
    text = report.table(found)
    assert "52 layers × (1 × 1,152 rows + 512 for a step's prompts) × 8,192 B" in text
    short = planner.plan(named_model("gemma-3-27b"), context=1024, chips="v5p:1")
    assert short.sequence_bytes == 62 * 1024 * 16 * 128 * 2 * 2


PARAMETERS = {
    "smollm2-135m": 134_515_008, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "llama-1-7b": 6_738_415_616, "llama-1-13b": 13_015_864_320,
    "llama-1-30b": 32_528_943_616, "llama-1-65b": 65_285_660_672, "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496, "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952, "deepseek-v2": 235_741_434_880, "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200, "deepseek-r1": 671_026_419_200, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # Published with their vision tower and projector: SigLIP's 416,866,032 and 1,152 × (D + 1).
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1_152 * 2_561,
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1_152 * 3_841,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1_152 * 5_377,
    "gpt-3": 174_604_259_328,  # 175B in its paper
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_named_models(name):
    assert memory.parameters(job(name)) == PARAMETERS[name]


def test_gpt_3_has_more_weights_than_keys():
    assert round(memory.parameters(job("gpt-3")) * 2 / GIB) == 325  # of which 288 GiB of K and V, for 32 of 2,048


# --- weights over a mesh ------------------------------------------------------------------------------------
AXES = [Axes(), Axes(model=8), Axes(seq=2, model=4), Axes(data=2, expert=4), Axes(expert=2, model=4)]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_weights_are_divided_as_the_engine_divides_them(name, axes):
    model = named_model(name)
    shape = tuple(axes.size(axis) for axis in sharding.MESH_AXES)
    mesh = Mesh(np.array(jax.devices()[: axes.devices]).reshape(shape), sharding.MESH_AXES)
    place = sharding.param_sharding(mesh)

    def size(spec):
        where = place(spec)
        assert isinstance(where, NamedSharding)
        assert where.shard_shape(spec.shape) == memory.local_shape(spec, axes)
        return 2 * math.prod(where.shard_shape(spec.shape))

    expected = sum(map(size, jax.tree.leaves(model.family.abstract(model.config))))
    assert memory.weights(job(name), axes, "gpu") == expected
    assert expected <= memory.weights(job(name), axes, "tpu") <= 1.03 * expected


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 8, 5]))
def test_all_shares_together_are_at_least_the_whole(name, model, expert):
    whole = job(name, "h100")
    assert memory.weights(whole, Axes(expert=expert, model=model), "gpu") * expert * model >= 2 * memory.parameters(
        whole
    )


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [  # what libtpu 0.0.52 says of an argument of a program for a v5e
        ((2880, 64, 64), 2, 24_117_248), ((64, 64, 2880), 2, 24_117_248), ((2, 1, 128, 4096), 2, 2_097_152),
        ((3, 12, 64, 768), 2, 3_538_944), ((1000, 2, 128), 4, 1_024_000), ((1000, 6, 128), 4, 3_072_000),
        ((1000, 1, 128), 4, 512_000), ((64, 1024, 4), 4, 1_048_576), ((8, 1000), 4, 32_768), ((3, 1000), 4, 16_384),
        ((1000, 4), 4, 16_384), ((1000, 64), 4, 262_144), ((50257, 768), 2, 77_205_504), ((1_000_003,), 4, 4_001_792),
        ((128_256,), 4, 516_096), ((8, 32_064), 4, 1_028_096),
    ],
)  # fmt: skip
def test_tiles(shape, itemsize, expected):
    assert memory.tiled(shape, itemsize) == expected


# --- K and V over a mesh ------------------------------------------------------------------------------------
def test_pages_are_rounded_up():
    llama = job("llama-3-8b")
    assert (
        llama.rows == 64
        and job("llama-3-8b", storage="int8").rows == 128
        and job("llama-3-8b", "h100", "int8").rows == 64
    )
    for context, rows in ((1, 64), (64, 64), (65, 128)):
        [group] = memory.kv_groups(llama, memory.Size(Axes(), context, 3))
        assert (group.rows, group.bytes) == (rows, 3 * rows * 131_072)
    [group] = memory.kv_groups(llama, memory.Size(Axes(seq=4), 257, 3))  # one token more than a page of 4 × 64
    assert group.rows == 128 and group.ideal == 3 * 65 * 131_072


def test_scales_and_padding():
    [group] = memory.kv_groups(job("llama-3-8b", storage="int8"), memory.Size(Axes(), 1024, 1))
    assert (group.scales, group.padding, group.row_bytes) == (64, 0, 2 * 8 * 128 + 64)  # a float32 a head's K and V
    [group] = memory.kv_groups(job("deepseek-v3"), memory.Size(Axes(), 1024, 1))
    assert (group.padding, group.row_bytes) == (128, 1280)  # 576 numbers in 640 lanes
    [group] = memory.kv_groups(job("deepseek-v3", "h100"), memory.Size(Axes(), 1024, 1))
    assert (group.padding, group.row_bytes) == (0, 1152)


@pytest.mark.parametrize(
    ("name", "model", "heads", "copies", "said"),
    [
        ("llama-3-8b", 8, 1, 1, None),
        ("llama-3-8b", 16, 1, 2, "8 kv heads over model=16: each head is held by 2 devices (2x replicated)"),
        (
            "gemma-3-1b",
            4,
            1,
            4,
            "1 kv head over model=4: there is no even share, each device holds all (4x replicated)",
        ),
        ("gpt2", 8, 12, 8, "12 kv heads over model=8: there is no even share, each device holds all (8x replicated)"),
        (
            "deepseek-v3",
            4,
            1,
            4,
            "latent rows are never divided: each of model=4 devices holds them whole (4x replicated)",
        ),
    ],
)
def test_replication_is_said(name, model, heads, copies, said):
    axes = Axes(model=model)
    for group in memory.kv_groups(job(name), memory.Size(axes, 4096, 1)):
        assert (group.heads, group.copies, memory.replicated(group, axes)) == (heads, copies, said)
    found = planner.plan(named_model(name), context=512, chips=f"v6e:{model}", mesh=f"model={model}")
    assert (said is None) == (not any("replicated" in note for note in found.notes))
    assert (said is None) == ("x replicated" not in report.table(found))


MESHES = [Axes(), Axes(model=4), Axes(seq=4, model=2), Axes(seq=2), Axes(data=2, model=16)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("batch", "context"), [(8, 8192), (4, 262_144), (200, 1000)])
def test_the_engine_allocates_as_much(name, axes, batch, context):
    """K and V to the byte, where heads lie whole on devices; and all other state to within a few percent."""
    model, size = named_model(name), memory.Size(axes, context, batch)
    what = job(name, storage="int8")
    config = dataclasses.replace(
        memory.cache(what, size), pages_per_slot=1 << (memory.pages(what, size) - 1).bit_length(),
        pages=size.slots * memory.pages(what, size),
    )  # fmt: skip
    program = Program(model.family.forward, model.family.unembed, model.config, model.config.width, "bfloat16", config)
    Q = memory.queue(size.slots, config.capacity)
    init = functools.partial(engine_state.init, program, rows=Q)
    made = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2, model.config.vocab), jnp.int8))

    def held(tree):
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    everything = [held(group.kv) for group in made.cache.groups]
    kv = [held // (axes.seq * config.parts_of(spec)) for held, spec in zip(everything, config.groups, strict=True)]
    assert kv == [group.bytes for group in memory.kv_groups(what, size)]
    assert memory.state(what, size) == pytest.approx(held(made) - sum(everything), rel=0.03)


# --- what fits ----------------------------------------------------------------------------------------------
SMALL = st.sampled_from(["gpt2", "llama-3-8b", "mistral-7b-v0.1", "gemma-3-4b", "qwen3-30b-a3b", "deepseek-v2-lite"])
SOME_AXES = st.sampled_from([Axes(), Axes(seq=2), Axes(seq=3, model=2), Axes(data=2, model=4), Axes(seq=4, expert=2)])


@settings(max_examples=100, deadline=None)
@given(SMALL, SOME_AXES, st.integers(1, 300_000), st.integers(1, 300), st.integers(1, 5000), st.integers(1, 50))
def test_more_never_takes_less(name, axes, context, batch, longer, more):
    what = job(name)
    least, *others = (
        memory.account(what, memory.Size(axes, *size)).total
        for size in ((context, batch), (context + longer, batch), (context, batch + more))
    )
    assert all(least <= other for other in others)


@settings(max_examples=40, deadline=None)
@given(SMALL, SOME_AXES, st.integers(1, 100_000), st.integers(1, 64), st.sampled_from(["v5e", "v5p"]))
@example("llama-3-8b", Axes(), 8192, 1, "v5e")  # whose weights alone are too large
@example("gpt2", Axes(), 1024, 1, "v5p")  # whose positions end before the memory does
def test_the_largest_fits_and_one_more_does_not(name, axes, context, batch, chip):
    what, size, hbm = job(name, chip), memory.Size(axes, context, batch), CHIPS[chip].hbm

    def fits(context, batch):
        return memory.account(what, memory.Size(axes, context, batch)).total <= hbm

    limit = 1024 if name == "gpt2" else 2**31 - 1
    longest = memory.largest_context(what, size, hbm, "tpu", limit)
    assert longest == 0 or fits(longest, batch)
    assert longest == limit or not fits(longest + memory.superpage(what, axes), batch)
    largest = memory.largest_batch(what, size, hbm, "tpu")
    assert largest == 0 or fits(context, largest)
    assert not fits(context, largest + axes.data)


def test_learned_positions_end_the_context():
    found = planner.plan(named_model("gpt2"), chips="v5e")
    assert found.fits and found.context == found.largest_context == 1024
    with pytest.raises(RequestError, match="learned its 1024 positions"):
        planner.plan(named_model("gpt2"), context="2k", chips="v5e")
    with pytest.raises(ModelError, match="at most 1024"):
        model_of("gpt2", 2048)


def test_what_does_not_fit_is_said():
    found = planner.plan(named_model("llama-3-70b"), chips="v5e:1")
    assert (found.fits, found.largest_context, found.largest_batch) == (False, 0, 0)
    text = report.table(found)
    assert "fits                     no" in text and "largest context          none" in text


# --- meshes and times ---------------------------------------------------------------------------------------
def test_suggestions_are_ranked():
    found = planner.plan(named_model("llama-3.1-70b"), context="1M", batch=8, storage="int8", chips="v5p:4x4x4")
    assert found.suggestions[0].axes == found.axes and found.fits
    assert len(found.suggestions) == 5
    assert all(one.axes.devices == 64 and 64 % one.axes.model == 0 for one in found.suggestions)
    kept = [one.fits for one in found.suggestions]
    assert kept == sorted(kept, reverse=True)
    asked = planner.plan(
        named_model("llama-3.1-70b"), context="1M", batch=8, storage="int8", chips="v5p:64", mesh=str(found.axes)
    )
    assert asked.memory == found.memory and asked.times == found.times and asked.suggestions == ()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 64),
    st.sampled_from([12, 32, 25]),
    st.sampled_from([0, 8, 160]),
    st.integers(1, 9),
    st.integers(1, 99),
)
def test_candidates_divide_evenly(devices, heads, experts, batch, parts):
    for axes in candidates(devices, heads=heads, experts=experts, batch=batch, parts=parts):
        assert axes.devices == devices and heads % axes.model == 0 and axes.data <= batch and axes.seq <= parts
        assert experts % axes.expert == 0 if experts else axes.expert == 1


def test_odd_head_counts_still_get_a_mesh():
    found = planner.plan(named_model("gpt2-xl"), chips="v5e:16")  # 25 heads, one sequence, 16 pages
    assert found.fits and found.axes.devices == 16


def test_decoding_reads_weights_and_keys_once():
    chip, what = CHIPS["v5e"], job("llama-3-8b")
    time = roofline.decode(what, memory.Size(Axes(), 8192, 4), chip)
    embedding = 128_256 * 4096
    assert time.reading == pytest.approx(
        (2 * (8_030_261_248 - embedding) + 4 * 8192 * 131_072) / 819e9
    )  # not the embedding
    matrices = 8_030_261_248 - embedding - 65 * 4096
    attention = 32 * 4 * 8192 * 2 * 32 * 2 * 128
    assert time.arithmetic == pytest.approx((4 * 2 * matrices + attention) / 197e12)
    assert time.exchange == 0 and time.bound == "reading" and time.total == time.reading


def test_prefill_is_arithmetic():
    chip, what = CHIPS["v5e"], job("llama-1-7b")
    layers = 6_738_415_616 - 2 * 32_000 * 4096 - 65 * 4096
    for context in (1024, 32_768):
        time = roofline.prefill(what, memory.Size(Axes(), context, 1), chip, 1)
        attention = 32 * context * (context + 1) / 2 * 2 * 32 * 2 * 128
        assert time.arithmetic == pytest.approx((context * 2 * layers + attention) / chip.flops)
        # Of a 7B model, attention is 1.9% of the work at 1K tokens, and 39% at 32K.
        share = attention / (time.arithmetic * chip.flops)
        assert share == pytest.approx({1024: 0.019, 32_768: 0.39}[context], rel=0.07)


def test_division_saves_time_and_costs_exchange():
    chip, what = CHIPS["v5p"], job("llama-3-70b", "v5p")
    one, four = (roofline.decode(what, memory.Size(axes, 131_072, 8), chip) for axes in (Axes(), Axes(model=4)))
    assert four.reading == pytest.approx(one.reading / 4, rel=1e-3) and four.exchange > 0 == one.exchange
    dealt = roofline.prefill(what, memory.Size(Axes(seq=8), 1 << 20, 1), chip, 1)
    assert dealt.arithmetic == pytest.approx(
        roofline.prefill(what, memory.Size(Axes(), 1 << 20, 1), chip, 1).arithmetic / 8
    )
    assert dealt.exchange > 0


def test_experts_are_read_as_tokens_choose_them():
    chip, what = CHIPS["v5p"], job("qwen3-30b-a3b", "v5p")
    few, many = (roofline.decode(what, memory.Size(Axes(), 1024, batch), chip).reading for batch in (1, 256))
    active = 3.35e9 * 2  # "A3B", with the embedding that is not read
    assert active * 0.8 < few * chip.bandwidth < active * 1.1 and many > 8 * few


# --- what users write ---------------------------------------------------------------------------------------
def test_tokens():
    sizes: dict[str | int, int] = {
        "131072": 131_072, "131,072": 131_072, "128k": 131_072, "128K": 131_072, "1M": 1_048_576, "10m": 10_485_760,
        "0.5M": 524_288, 4096: 4096,
    }  # fmt: skip
    for text, expected in sizes.items():
        assert parse_tokens(text) == expected
    for wrong in ("", "k", "-1", "0", "1.5", "1G", "one", "1e6", "9" * 400, "3000M", "nan"):
        with pytest.raises(RequestError, match="context is"):
            parse_tokens(wrong)


def test_chips():
    for text, devices in {
        "v5e": 1, "v5e:16": 16, "v5e:4x4": 16, "v5p:4x4x4": 64, "7x:2x2x1": 8, "tpu7x:4": 8, "H100:8": 8, "v4:2x2x1": 4,
    }.items():  # fmt: skip
        assert parse_chips(text).devices == devices
    for text in ("", "v9", "v5e:0", "v5e:4x", "v5e:2x2x2", "v5p:4x4", "h100:2x4", "h100:9", "v5e:1024", "v5e:-1"):
        with pytest.raises(RequestError, match="chips is"):
            parse_chips(text)


def test_meshes():
    assert parse_mesh("seq=16, model=4", 64) == Axes(seq=16, model=4)
    assert str(Axes(seq=16, model=4)) == "seq=16,model=4" and str(Axes()) == "model=1"
    for text in ("", "seq", "seq=", "seq=0", "seq=2,seq=2", "tensor=4", "seq=1.5", "model=²"):
        with pytest.raises(RequestError, match="give each of the axes data, seq, expert, model at most once"):
            parse_mesh(text, 4)
    with pytest.raises(RequestError, match="2 × 4 = 8, but there are 16 devices"):
        parse_mesh("seq=2,model=4", 16)


def test_names():
    for text, expected in {
        "Llama-3.1-70B-Instruct": "llama-3.1-70b", "llama3_8b": "llama-3-8b", "GPT-2": "gpt2", "gpt2-small": "gpt2",
        "gpt3": "gpt-3", "Mistral-7B-v0.1": "mistral-7b-v0.1", "mistral-7b": "mistral-7b-v0.3",
        "llama-7b": "llama-1-7b", "Qwen3-8B": "qwen3-8b", "qwen-3-8b": "qwen3-8b", "gemma3-27b-it": "gemma-3-27b",
        "gpt-oss-120b": "gpt-oss-120b", "DeepSeek-R1": "deepseek-r1", "llama-33b": "llama-1-30b",
        "Meta-Llama-3-8B": "llama-3-8b", "llama-9": None,
    }.items():  # fmt: skip
        assert named.known_as(text) == expected, text
    assert all(named.known_as(name) == name for name in CONFIGS)
    assert named._ALIASES.keys().isdisjoint(CONFIGS) and set(named._ALIASES.values()) <= CONFIGS.keys()


def test_models_by_path(tmp_path, monkeypatch):
    monkeypatch.setattr(TensorSource, "read", None)  # no weight is read
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.2-1b"]))
    for path in (tmp_path, tmp_path / "config.json"):
        found = planner.plan(model_of(str(path)), chips="v5e")
        assert found.parameters == PARAMETERS["llama-3.2-1b"]


def test_models_in_gguf_files(tmp_path):
    path = golden_gguf.write("gemma3", tmp_path / "m.gguf")
    model = model_of(str(path))
    found = planner.plan(model, chips="v5e")
    assert model.family.name == "gemma" and found.fits and len(found.groups) == 2


# --- the command --------------------------------------------------------------------------------------------
def invoke(*args):
    result = CliRunner().invoke(app, ["plan", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_command():
    words = ("llama-3.1-70b", "--context", "1M", "--batch", 8, "--kv", "int8", "--chips", "v5p:4x4x4")
    text = invoke(*words).stdout
    for expected in ("70.6B parameters", "weights", "temporaries", "not measured", "largest context", "seq=8,model=8"):
        assert expected in text
    assert max(map(len, text.splitlines())) < 160
    facts = json.loads(invoke(*words, "--mesh", "seq=16,model=4", "--json").stdout)
    assert facts["mesh"] == {"data": 1, "seq": 16, "expert": 1, "model": 4}
    assert facts["kv"]["bytes_per_token"] == 80 * 8 * (2 * 128 + 8)
    assert facts["per_device"]["kv"] == 80 * 8 * 65_536 * 2 * 264
    assert facts["per_device"]["total"] == sum(v for k, v in facts["per_device"].items() if k != "total")
    assert facts["fits"] and facts["compiled_per_device"] is None and facts["suggestions"] == []
    assert facts["largest_context"] % (16 * 128) == 0 and facts["largest_batch"] >= 8


def test_the_compilers_account_stands_beside_ours():
    found = planner.plan(named_model("gemma-3-1b"), chips="v5e")
    theirs = MemoryAccount(weights=GIB, kv=2 * GIB, state=MIB, temporaries=3 * MIB)
    head, *lines = report.table(found, theirs).split("\n\n")[1].splitlines()
    assert head.split()[-2:] == ["computed", "compiler"]
    assert next(line for line in lines if "2.00 GiB" in line).startswith("K and V together")
    assert report.as_dict(found, theirs)["compiled_per_device"]["total"] == theirs.total


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["llama-3.1-7b", "--chips", "v5e"], "There is no model 'llama-3.1-7b': names like it are llama-3.1-70b"),
        (["qqq", "--chips", "v5e"], "known names are smollm2-135m"),
        (["./nowhere", "--chips", "v5e"], "There is no model './nowhere'"),
        (["nobody/nothing", "--chips", "v5e"], "nobody/nothing"),
        (["x/llama-3-8b", "--chips", "v5e"], "llama-3-8b is known without it"),
        (["gpt2", "--chips", "v9:4"], "chips is 'v9:4'"),
        (["gpt2"], "chips"),
        (["gpt2", "--chips", "v5e:4", "--mesh", "model=8"], "8, but there are 4 devices"),
        (["gpt2", "--chips", "v5e", "--context", "many"], "context is 'many'"),
        (["gpt2", "--chips", "v5e", "--context", "1M"], "at most 1024"),
        (["gpt2", "--chips", "v5e", "--batch", "0"], "batch"),
        (["gpt2", "--chips", "v5e", "--kv", "int3"], "int3"),
        (["gpt2", "--chips", "h100:8", "--compile"], "asks the TPU's compiler"),
    ],
)
def test_bad_input_gets_one_sentence(args, said):
    result = invoke(*args)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("error:") == 1 and said in result.stderr and "Traceback" not in result.stderr


def test_arguments_of_the_api():
    model = named_model("gpt2")
    for wrong, said in (
        ({"batch": 0}, "batch is 0"), ({"rows": 0}, "rows is 0"), ({"packed": 0}, "packed is 0"),
        ({"batch": 1 << 21}, "at most 1048576"), ({"storage": "int3"}, "cannot be stored as 'int3'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            planner.plan(model, **wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planner.plan(model).batch = 2  # type: ignore[misc]


def test_the_examples_in_the_docs_are_what_the_command_prints():
    text = (pathlib.Path(__file__).parent.parent / "docs" / "scale.md").read_text()
    examples = re.findall(r"```console\n\$ kvjax plan (.*?)\n(.*?)\n```", text, re.S)
    assert len(examples) == 4
    for words, shown in examples:
        assert invoke(*words.split()).stdout.rstrip() == shown, f"docs/scale.md is not what kvjax plan {words} prints"


def test_the_api_example_in_the_docs(capsys):
    text = (pathlib.Path(__file__).parent.parent / "docs" / "scale.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], {})
    assert re.fullmatch(r"(True|False) seq=\d+,model=\d+ \d+ \d+ \d\.\d+\n", capsys.readouterr().out)


def test_packed_codes_with_their_newest_rows_in_full_precision():
    """Llama 3.1 70B in KIVI's 4 bits: 320 bytes a row of two heads on a chip, and a window of 128 rows in bfloat16."""
    found = planner.plan(model_of("llama-3.1-70b"), context="128k", chips="v5p:4", storage="kivi4")
    codes, recent = found.groups
    assert found.axes.seq == 1 and found.axes.model == 4
    assert (codes.row_bytes, codes.scales, codes.layers, codes.rows) == (2 * 2 * (64 + 16), 2 * 2 * 16, 80, 131072)
    assert (recent.row_bytes, recent.spec.window, recent.rows) == (2 * 2 * 128 * 2, 128, 384)
    assert found.bytes_per_token == 80 * 8 * 2 * (64 + 16)
    dealt = planner.plan(
        model_of("llama-3.1-70b"), context="128k", chips="v5p:4", mesh="seq=2,model=2", storage="kivi4"
    )
    codes, recent = dealt.groups  # twice the heads, half of the rows
    assert (codes.row_bytes, codes.rows, recent.row_bytes) == (4 * 2 * (64 + 16), 65536, 4 * 2 * 128 * 2)
    for what, how, said in (
        ("deepseek-v3", {"storage": "int4"}, "latent pages have no packed codes"),
        ("llama-3.1-70b", {"storage": "kivi4", "rows": 16}, "do not hold whole groups of 32 rows"),
        ("llama-3.1-70b", {"storage": "kivi3"}, "'kivi3' is not one of"),
    ):
        with pytest.raises(UserError, match=said):
            planner.plan(model_of(what), context="128k", chips="v5p:4", **how)
