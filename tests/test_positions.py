"""RoPE: frequencies against transformers and against the papers' formulas, angles against float64, rotation."""

import json
import math
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from kvjax.errors import ModelError
from kvjax.models.positions import (
    Rope,
    alibi_slopes,
    apply_rope,
    cos_sin,
    inverse_frequencies,
    rope_from_hf,
    rope_table,
    sinusoids,
    softmax_factor,
)

CASES = json.loads((pathlib.Path(__file__).parent / "goldens" / "rope.json").read_text())["cases"]
POSITIONS = [0, 1, 255, 256, 65_535, 65_536, 1_000_003, 9_999_991, 16_777_215]
LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}


def case_rope(name: str) -> tuple[Rope, int]:
    case = CASES[name]
    return rope_from_hf(case["config"], case["head_dim"]), case["length"]


# --- frequencies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str) -> None:
    rope, length = case_rope(name)
    frequencies, factor = inverse_frequencies(rope, length)
    assert rope.kind == CASES[name]["kind"]
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, CASES[name]["inv_freq"], rtol=1e-6)  # theirs are rounded to float32
    assert factor == pytest.approx(CASES[name]["attention_factor"], rel=1e-12)


def geometric(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def test_interpolation_formulas() -> None:
    """2306.15595. NTK-aware: the slowest pair is interpolated by s, the fastest untouched. Dynamic: by length."""
    plain = geometric(10000.0, 64)
    np.testing.assert_allclose(inverse_frequencies(Rope("default", 1e4, 64), 1)[0], plain, rtol=1e-14)
    np.testing.assert_allclose(
        inverse_frequencies(Rope("linear", 1e4, 64, factor=4.0), 1)[0], np.array(plain) / 4, rtol=1e-14
    )
    ntk, _ = inverse_frequencies(Rope("ntk", 1e4, 64, factor=8.0), 1)
    np.testing.assert_allclose(ntk[[0, -1]], [1.0, plain[-1] / 8], rtol=1e-13)
    dynamic = Rope("dynamic", 1e4, 64, factor=2.0, original_length=4096)
    np.testing.assert_allclose(inverse_frequencies(dynamic, 4096)[0], plain, rtol=1e-14)
    grown = geometric(1e4 * (2.0 * 20000 / 4096 - 1) ** (64 / 62), 64)
    np.testing.assert_allclose(inverse_frequencies(dynamic, 20000)[0], grown, rtol=1e-13)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_formula(truncate: bool) -> None:
    """2309.00071 eqs. 17–23, pair by pair; §3.4's temperature."""
    dim, theta, original, s = 64, 150000.0, 4096, 32.0
    rope = Rope("yarn", theta, dim, factor=s, original_length=original, truncate=truncate)

    def turning(turns: float) -> float:  # the pair that makes `turns` turns within the original length
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(32), turning(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, f in enumerate(geometric(theta, dim)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append((1 - ramp) * f + ramp * f / s)
    frequencies, factor = inverse_frequencies(rope, 131072)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-13)
    assert factor == pytest.approx(0.1 * math.log(32) + 1)


def test_llama3_formula() -> None:
    expected = []
    for f in geometric(500000.0, 128):
        wavelength = 2 * math.pi / f
        blend = (8192 / wavelength - 1) / 3
        middle = (1 - blend) * f / 8 + blend * f
        expected.append(f if wavelength < 8192 / 4 else f / 8 if wavelength > 8192 else middle)
    rope = rope_from_hf({"rope_theta": 500000.0, "rope_scaling": LLAMA_31}, 128)
    np.testing.assert_allclose(inverse_frequencies(rope, 131072)[0], expected, rtol=1e-13)


def test_longrope_formula_and_llama_cpp_divisors() -> None:
    """2402.13753: one list of divisors for every position, chosen by the length to serve; √(1 + ln s / ln L0)."""
    rope, _ = case_rope("phi3_long")
    plain = np.array(geometric(10000.0, 96))
    for length, divisors in ((4096, rope.short_factor), (4097, rope.long_factor)):
        frequencies, factor = inverse_frequencies(rope, length)
        np.testing.assert_allclose(frequencies, plain / divisors, rtol=1e-13)
        assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    explicit = rope_from_hf({"rope_scaling": {"rope_type": "factors", "divisors": list(rope.long_factor)}}, 96)
    np.testing.assert_array_equal(inverse_frequencies(explicit, 1)[0], inverse_frequencies(rope, 4097)[0])


# --- config.json --------------------------------------------------------------------------------------------------


def test_old_and_new_config_forms_agree() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": LLAMA_31, "partial_rotary_factor": 0.5}
    inner = LLAMA_31 | {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    new = {"rope_parameters": inner}
    nested = {"rope_parameters": {"full_attention": inner, "sliding_attention": {"rope_theta": 1e4}}}
    rope = rope_from_hf(old, 128)
    assert rope.dim == 64
    assert rope == rope_from_hf(new, 128) == rope_from_hf(nested, 128, "full_attention")
    assert hash(rope) == hash(rope_from_hf(new, 128))
    assert rope_from_hf(nested, 128, "sliding_attention") == rope_from_hf({}, 128)
    legacy = {key: value for key, value in LLAMA_31.items() if key != "rope_type"} | {"type": "llama3"}
    assert rope_from_hf(old | {"rope_scaling": legacy}, 128) == rope


def test_original_length_falls_back_to_max_position_embeddings() -> None:
    config = {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert rope_from_hf(config, 64).original_length == 4096


@pytest.mark.parametrize(
    ("scaling", "names"),
    [
        ({"rope_type": "mystery"}, "'mystery'"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "'mrope'"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": "4"}, "factor"),
        ({"type": "linear", "factor": 0.0}, "factor"),
        ({"type": "dynamic", "factor": 2.0}, "original_max_position_embeddings"),
        ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        (LLAMA_31 | {"low_freq_factor": None}, "low_freq_factor"),
        ({"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8}, "short_factor"),
        ({"rope_type": "factors", "divisors": [1.0, 2.0]}, "divisors"),
        ({"type": "longrope", "long_mscale": 1.2}, "long_mscale"),
        ({"full_attention": {"rope_theta": 1e4}}, "None"),
        *[(bad, "rope_scaling is") for bad in ("linear", 2.0, True, [1], [], False)],
        ({"rope_type": ["a"]}, "['a']"),
        ({"rope_type": 1}, "RoPE type 1 "),
        *[({"type": "linear", "factor": bad}, "factor") for bad in (math.inf, math.nan, True, 10**400)],
        *[({"rope_theta": bad}, "rope_theta") for bad in (math.inf, math.nan, "1e4", 0)],
        *[({"partial_rotary_factor": bad}, "partial_rotary_factor") for bad in (math.inf, math.nan, 1e300, 2, -1, 0)],
        *[
            (YARN | {"original_max_position_embeddings": bad}, "original_max")
            for bad in (math.inf, math.nan, 1e300, 0.5)
        ],
        (YARN | {"truncate": "no"}, "truncate"),
        (YARN | {"beta_slow": 0}, "beta_slow 0"),
        (YARN | {"rope_theta": 1}, "rope_theta 1"),
        ({"type": "ntk", "factor": 1e300}, "factor 1e+300"),
        ({"rope_type": "factors", "divisors": [0] * 32}, "divisors [0"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_field(scaling: dict, names: str) -> None:
    with pytest.raises(ModelError) as refusal:
        rope_from_hf({"rope_scaling": scaling}, 64)
    text = str(refusal.value)
    assert names in text
    assert text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, True, "1", [1]])
def test_fields_beside_the_scaling_are_refused_too(name: str, bad: object) -> None:
    with pytest.raises(ModelError, match=f"finite number for {name}"):
        rope_from_hf({name: bad}, 64)
    with pytest.raises(ModelError, match="rope_parameters is"):
        rope_from_hf({"rope_parameters": bad}, 64)


def test_odd_rotary_dim_is_refused() -> None:
    with pytest.raises(ModelError, match="5 dims"):
        rope_from_hf({"partial_rotary_factor": 0.34}, 16)


# --- angles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2", "llama3.1", "gpt_oss", "phi3_long", "dynamic_long"])
def test_angles_are_exact_at_any_position(name: str) -> None:
    rope, length = case_rope(name)
    frequencies, factor = inverse_frequencies(rope, length)
    cos, sin = jax.jit(cos_sin)(rope_table(rope, length), jnp.array(POSITIONS, jnp.int32))
    angles = np.array(POSITIONS, np.float64)[:, None] * frequencies
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, factor * np.cos(angles), atol=2e-6, rtol=0)
    np.testing.assert_allclose(sin, factor * np.sin(angles), atol=2e-6, rtol=0)


def test_a_float32_product_would_not_do() -> None:
    """Why the digits: the plain formula is wrong by more than 0.1 at ten million."""
    frequencies = np.array(geometric(10000.0, 128))
    product = np.float32(9_999_991) * frequencies.astype(np.float32)
    assert np.abs(np.cos(product) - np.cos(9_999_991 * frequencies)).max() > 0.1


def test_a_fourth_digit_beyond_sixteen_million() -> None:
    rope = Rope("default", 1e4, 32)
    table = rope_table(rope, 2**31 - 1)
    assert table.shape == (4, 2, 256, 16) and rope_table(rope, 2**24).shape == (3, 2, 256, 16)
    positions = np.array([2**24, 1_000_000_007, 2**31 - 1])
    cos, _ = cos_sin(table, jnp.array(positions, jnp.int32))
    np.testing.assert_allclose(cos, np.cos(positions[:, None] * inverse_frequencies(rope, 1)[0]), atol=2e-6)


def test_positions_out_of_range_clamp() -> None:
    table = rope_table(Rope("default", 1e4, 32), 1)
    cos, sin = cos_sin(table, jnp.array([-5, 0, 2**24 - 1, 2**24, 2**31 - 1], jnp.int32))
    np.testing.assert_array_equal(cos[0], cos[1])
    np.testing.assert_array_equal(sin[2], sin[3])
    np.testing.assert_array_equal(sin[2], sin[4])


def test_table_is_shared_and_read_only() -> None:
    table = rope_table(Rope("default", 1e4, 32), 1)
    assert table is rope_table(Rope("default", 1e4, 32), 1)
    with pytest.raises(ValueError):
        table[0] = 0


# --- rotation -----------------------------------------------------------------------------------------------------


def rotate(x: np.ndarray, positions: np.ndarray, rope: Rope, interleaved: bool) -> np.ndarray:
    cos, sin = cos_sin(rope_table(rope, 1), jnp.asarray(positions, jnp.int32))
    return np.asarray(apply_rope(jnp.asarray(x), cos, sin, interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 8])
def test_rotation_is_complex_multiplication(interleaved: bool, dim: int) -> None:
    """Also partial: of 16 dims, 8 rotate and 8 pass untouched."""
    x = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 77, 4096, 9_999_991])
    real, imaginary = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else np.split(x[..., :dim], 2, -1)
    turned = (real + 1j * imaginary) * np.exp(1j * positions[:, None] * np.array(geometric(1e4, dim)))[:, None]
    expected = x.astype(np.float64)
    if interleaved:
        expected[..., 0:dim:2], expected[..., 1:dim:2] = turned.real, turned.imag
    else:
        expected[..., :dim] = np.concatenate([turned.real, turned.imag], -1)
    out = rotate(x, positions, Rope("default", 1e4, dim), interleaved)
    np.testing.assert_allclose(out, expected, atol=5e-6)
    np.testing.assert_array_equal(out[..., dim:], x[..., dim:])
    np.testing.assert_array_equal(out[0], x[0])


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    query=st.integers(0, 10_000_000),
    distance=st.integers(0, 10_000),
    shift=st.integers(0, 6_000_000),
    flag=st.booleans(),
)
def test_scores_depend_on_the_distance_only(query: int, distance: int, shift: int, flag: bool) -> None:
    """q·k of two tokens is the same wherever the pair stands."""
    rope = Rope("default", 5e5, 32)
    q, k = np.random.default_rng(distance).standard_normal((2, 1, 1, 32)).astype(np.float32)

    def score(start: int) -> float:
        q_turned = rotate(q, np.array([start + distance]), rope, flag)
        return float((q_turned.astype(np.float64) * rotate(k, np.array([start]), rope, flag)).sum())

    assert score(query) == pytest.approx(score(query + shift), abs=2e-5)


def test_bfloat16_keeps_its_type_and_is_rounded_once() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 2, 16), jnp.bfloat16)
    cos, sin = cos_sin(rope_table(Rope("default", 1e4, 16), 1), jnp.arange(4, dtype=jnp.int32))
    out = apply_rope(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, apply_rope(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))


# --- other ways ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [48, 49])
def test_sinusoids_at_any_position(width: int) -> None:
    """Sines, then cosines, of p / 10,000^(i / (n - 1)); right where float32 products are not."""
    pairs = width // 2
    angles = np.array(POSITIONS, np.float64)[:, None] * 10_000.0 ** (-np.arange(pairs) / (pairs - 1))
    want = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((len(POSITIONS), width % 2))], axis=1)
    found = sinusoids(jnp.asarray(POSITIONS, jnp.int32), width, max(POSITIONS) + 1)
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_alibi_slopes() -> None:
    """The paper's: 8 heads 1/2 ... 1/256; 12 heads those of 8, then every other one of 16."""
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    assert alibi_slopes(12) == (*(2.0**-i for i in range(1, 9)), *(2.0 ** -(i + 0.5) for i in range(4)))
    assert alibi_slopes(2) == (2.0**-4, 2.0**-8)


def test_deepseeks_softmax_factor() -> None:
    yarn = Rope("yarn", 1e4, 64, factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707)
    assert softmax_factor(yarn) == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert softmax_factor(Rope("default", 1e4, 64)) == 1.0
