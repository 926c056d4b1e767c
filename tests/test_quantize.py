"""Quantized rows against float64 arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pallas_kernels.quantize import TOPS, dequantize, quantize, quantize_rows

RELATIVE = {"int4": 0.0, "int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""Half a unit in the last place of a normal number."""
STEP = {"int4": 1.0, "int8": 1.0, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
"""Between codes, or the smallest ones."""

rows = jax.jit(quantize_rows, static_argnums=1)
fixed = jax.jit(quantize, static_argnums=2)


def f64(x):
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


@pytest.mark.parametrize("storage", TOPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-80, 80))
def test_error_is_bounded(storage, dtype, seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 5, 16)) * np.exp2(exponent + rng.integers(-8, 9, (3, 5, 1)))
    x = jnp.asarray(x, dtype)
    codes, scale = rows(x, storage)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (jnp.dtype(storage), x.shape, jnp.float32, (3, 5))
    np.testing.assert_allclose(f64(scale), np.abs(f64(x)).max(-1) / TOPS[storage], rtol=1e-6)
    assert (np.abs(f64(codes)).max(-1) == TOPS[storage]).all()  # the largest number has the largest code
    back = f64(dequantize(codes, scale))
    bound = np.maximum(RELATIVE[storage] * np.abs(f64(x)), STEP[storage] / 2 * f64(scale)[..., None])
    assert (np.abs(back - f64(x)) <= bound * (1 + 1e-4)).all()


@pytest.mark.parametrize("storage", TOPS)
def test_codes_are_those_of_numpy(storage):
    """Rounded half to even, here with scales that divide exactly."""
    top, target = TOPS[storage], jnp.dtype(storage)
    x = np.concatenate([np.linspace(-top, top, 1023), np.arange(-7, 7) + 0.5, [top, -top]]).astype(np.float32)
    codes, scale = rows(jnp.asarray(x * np.float32(0.25))[None], storage)
    assert scale == 0.25
    wanted = x if "float" in storage else np.round(x)
    np.testing.assert_array_equal(f64(codes[0]), wanted.astype(target).astype(np.float64))


@pytest.mark.parametrize("storage", TOPS)
def test_rows_without_numbers(storage):
    """Zeros, and numbers whose scale underflows: codes of 0, no NaN, whatever stands beside them."""
    x = np.zeros((3, 4), np.float32)
    x[1] = [1, -2, 3, -4]
    x[2, 1] = 1e-42
    codes, scale = rows(jnp.asarray(x), storage)
    assert (f64(codes[0::2]) == 0).all() and (f64(scale[0::2]) == 1).all()
    assert (f64(codes[1]) != 0).all()


@pytest.mark.parametrize("storage", TOPS)
def test_extremes(storage):
    """The largest bfloat16 is no infinity on the way, and a given scale clips what it does not reach."""
    most = jnp.finfo(jnp.bfloat16).max
    codes, scale = rows(jnp.asarray([[most, -most, 0]], jnp.bfloat16), storage)
    assert f64(codes).tolist() == [[TOPS[storage], -TOPS[storage], 0]] and jnp.isfinite(scale).all()
    codes = fixed(jnp.asarray([[1e9, -1e9, 465, 0]], jnp.float32), jnp.float32(1), storage)
    assert f64(codes)[0, :2].tolist() == [TOPS[storage], -TOPS[storage]] and np.isfinite(f64(codes)).all()


@pytest.mark.parametrize("shape", [(), (1, 3), (4, 1), (4,), (4, 3), (4, 3, 1)])
def test_given_scales_broadcast_over_leading_axes(shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 16)).astype(np.float32)
    scale = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    full = np.broadcast_to(scale.reshape(*shape, *(1,) * (3 - len(shape))), x.shape)
    codes = fixed(jnp.asarray(x), jnp.asarray(scale), "int8")
    np.testing.assert_array_equal(np.asarray(codes), np.clip(np.round(x / full), -127, 127).astype(np.int8))
    back = dequantize(codes, jnp.asarray(scale), jnp.bfloat16)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(f64(back), f64(jnp.asarray(np.asarray(codes, np.float32) * full, jnp.bfloat16)))


def test_other_storage_is_refused():
    with pytest.raises(NotImplementedError, match="bfloat16"):
        quantize_rows(jnp.ones((2, 2)), "bfloat16")
