"""Codes of few bits: KIVI's groups against its authors' functions, packed pages, and the rotation before them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pallas_kernels import LAYOUTS, Lanes, kivi, packed
from kvjax.pallas_kernels.packed import Codes, init_code_pages, write_code_rows
from kvjax.pallas_kernels.quantize import dequantize, quantize_rows
from kvjax.pallas_kernels.rotation import hadamard, rotate, rotate_back

GOLDENS = np.load(pathlib.Path(__file__).parent / "goldens" / "kivi.npz")
quantize_groups = jax.jit(kivi.quantize_groups, static_argnums=(1, 2, 3), static_argnames="dtype")
write_rows = jax.jit(write_code_rows, static_argnums=(5, 6), static_argnames=("slots", "max_query", "backend"))


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("what", ["k", "v"])
def test_codes_scales_and_zeros_are_those_of_kivi(what, group, bits):
    """Of numbers in float32, as its functions had them: (1, heads, tokens, dim)."""
    x = GOLDENS["keys" if what == "k" else "values"].astype(np.float32)
    axis = 2 if what == "k" else 3
    codes, scale, zero = quantize_groups(jnp.asarray(x), bits, group, axis, dtype=jnp.float32)
    case = f"{what}{bits}_{group}"
    np.testing.assert_allclose(scale, GOLDENS[f"{case}_scale"].squeeze(axis + 1), rtol=2e-7)
    np.testing.assert_array_equal(zero, GOLDENS[f"{case}_zero"].squeeze(axis + 1))
    differ = np.asarray(codes) != GOLDENS[f"{case}_codes"]  # a quotient beside a half may fall on either side
    assert differ.mean() < 1e-3 and np.abs(np.asarray(codes, int) - GOLDENS[f"{case}_codes"]).max() <= 1
    if group == 32:
        back = kivi.dequantize_groups(jnp.asarray(GOLDENS[f"{case}_codes"]), scale, zero, axis)
        np.testing.assert_allclose(back[:, 0, :, :8], GOLDENS[f"{case}_head"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 2]), st.floats(-6, 6), st.floats(-100, 100))
def test_error_is_within_half_of_the_stored_step(dtype, seed, bits, exponent, offset):
    """Wherever a group lies: scale and zero are rounded outward, so that no number is out of reach."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((64, 6)) * np.exp2(exponent) + offset).astype(np.float32)
    x[:32, 0] = x[0, 0]  # no range at all
    codes, scale, zero = quantize_groups(jnp.asarray(x), bits, 32, 0, dtype=dtype)
    assert (codes.dtype, scale.dtype, scale.shape) == (jnp.uint8, dtype, (2, 6))
    assert int(codes.max()) < 1 << bits
    step, low = (np.repeat(np.asarray(y, np.float64), 32, axis=0) for y in (scale, zero))
    error = np.abs(np.asarray(codes, np.float64) * step + low - x)
    assert (error <= step / 2 + 1e-5 * np.abs(x)).all()
    exact = np.ptp(x.reshape(2, 32, 6), axis=1) / ((1 << bits) - 1)
    eps = float(jnp.finfo(dtype).eps)
    widest = (exact + np.abs(x).reshape(2, 32, 6).max(1) * eps / ((1 << bits) - 1)) * (1 + 2 * eps) + 1e-7
    flat = np.ptp(x.reshape(2, 32, 6), axis=1) == 0
    assert (np.asarray(scale, np.float64)[~flat] <= widest[~flat]).all()


def test_a_word_holds_scale_and_zero():
    rng = np.random.default_rng(0)
    scale, zero = (jnp.asarray(rng.standard_normal((3, 40)), jnp.bfloat16) for _ in range(2))
    words = kivi.join_words(scale, zero)
    assert words.dtype == jnp.uint32
    for got, want in zip(kivi.split_words(words), (scale, zero), strict=True):
        np.testing.assert_array_equal(got, want.astype(jnp.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_byte_holds_one_number_of_each_plane(bits):
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 32, 5), np.uint8)
    found = np.asarray(packed.pack(jnp.asarray(codes), bits, axis=1))
    planes = codes.reshape(3, 8 // bits, -1, 5).astype(int)
    np.testing.assert_array_equal(found, sum(planes[:, p] << bits * p for p in range(8 // bits)))
    np.testing.assert_array_equal(packed.unpack(jnp.asarray(found), bits, axis=1), codes)


BYTES = [
    (Codes("kivi4", "kivi4"), 5.0, 3.2),
    (Codes("kivi4", "kivi4", 64), 4.5, 3.56),
    (Codes("kivi2", "kivi2"), 3.0, 5.33),
    (Codes("kivi4", "kivi2"), 4.0, 4.0),
    (Codes("int4", "int4"), 4.25, 3.76),
    (Codes("int8", "int4"), 6.25, 2.56),
]


@pytest.mark.parametrize(("codes", "bits", "compression"), BYTES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_allocated(layout, codes, bits, compression):
    """Of Llama 3's rows, 8 heads of 128 and 128: bits a number, everything counted, and what of 16 that is."""
    pages = init_code_pages(4, 128, Lanes(8, 128, 128), codes, layout)
    nbytes = sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(pages))
    assert nbytes == pages.nbytes
    numbers = 4 * 128 * 8 * 256
    assert nbytes * 8 / numbers == bits
    assert 16 / bits == pytest.approx(compression, abs=0.005)


MIXED = [Codes("int4", "int4"), Codes("kivi4", "kivi2"), Codes("int8", "kivi4"), Codes("float8_e4m3fn", "int4")]


@pytest.mark.parametrize("codes", MIXED, ids=str)
def test_rows_are_written_in_every_layout(codes):
    """What pages give back is what the quantizers say of these tokens; dropped tokens change nothing."""
    K, H, Hv, R = 3, 64, 32, 64
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((96, K, dim)) * 3 + 1, jnp.float32) for dim in (H, Hv))
    page = jnp.asarray([2] * 32 + [9] * 32 + [0] * 32, jnp.int32)
    row = jnp.asarray([*range(32, 64), *range(32), *range(32)], jnp.int32)
    want = []
    for x, storage, axis in ((k, codes.key, 0), (v, codes.value, 2)):
        if packed.grouped(storage):
            bits, scale, zero = kivi.quantize_groups(x, packed.BITS[storage], 32, axis)
            want.append(kivi.dequantize_groups(bits, scale, zero, axis))
        else:
            want.append(dequantize(*quantize_rows(x, storage)))
    for layout in LAYOUTS:
        lanes = Lanes(K, H, Hv)
        pages = jax.tree.map(lambda x: jnp.full_like(x, -1 if x.dtype == jnp.float32 else 0xFF),
                             init_code_pages(3, R, lanes, codes, layout))  # fmt: skip
        pages = write_rows(pages, k, v, page, row, codes, layout)
        scales = pages.k_scales, pages.v_scales
        of = lanes if layout == "joined" else None
        got = packed.dequantized(pages.k, pages.v, scales, codes, layout, of, jnp.dtype("float32"))
        if layout == "head_major":
            got = got[0].transpose(0, 3, 1, 2), got[1].swapaxes(1, 2)
        kept = np.r_[0:32, 64:96]
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x[page, row][kept], y[kept], rtol=1e-6, atol=1e-6)
        assert (pages.k_scales[1] == pages.k_scales[1].reshape(-1)[0]).all()  # nobody's page


def test_a_tpu_writes_the_same_bytes():
    codes, lanes, rng = Codes("kivi4", "int4"), Lanes(2, 128, 128), np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((64, 2, 128)), jnp.float32) for _ in range(2))
    page, row = jnp.asarray([1] * 64, jnp.int32), jnp.arange(64, 128, dtype=jnp.int32)
    pages = init_code_pages(2, 128, lanes, codes, "joined")
    want, got = (
        write_rows(pages, k, v, page, row, codes, "joined", slots=1, max_query=64, backend=backend)
        for backend in ("xla", "tpu_interpret")
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_says_what_does_not_fit():
    with pytest.raises(ValueError, match="pages of 48 rows do not hold whole groups of 32 rows: take a multiple of 32"):
        init_code_pages(1, 48, Lanes(1, 64, 64), Codes("kivi4", "int4"), "head_major")
    with pytest.raises(ValueError, match="values of 80 numbers are no whole groups of 32: take int4 or int8"):
        init_code_pages(1, 64, Lanes(1, 80, 80), Codes("kivi4", "kivi4"), "joined")
    with pytest.raises(ValueError, match="storage 'bfloat16' has no packed pages; there are int8"):
        Codes("bfloat16", "int4")
    with pytest.raises(ValueError, match="groups of 32 do not divide 40 numbers"):
        kivi.quantize_groups(jnp.ones((40, 2)), 4, 32, 0)
    with pytest.raises(ValueError, match="KIVI codes have 4 or 2 bits; 3"):
        kivi.quantize_groups(jnp.ones((32, 2)), 3, 32, 0)
    pages = init_code_pages(1, 32, Lanes(1, 32, 32), Codes("int4", "int4"), "joined", by_page=True)
    with pytest.raises(NotImplementedError, match="one for all their rows"):
        ones = jnp.ones((1, 1, 32))
        write_code_rows(
            pages, ones, ones, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), Codes("int4", "int4"), "joined"
        )


# ---- Rotation


@pytest.mark.parametrize("n", [1, 12, 20, 64, 80, 96, 128, 192, 256])
def test_hadamard_matrices_are_orthogonal(n):
    matrix = hadamard(n).astype(int)
    assert (np.abs(matrix) == 1).all()
    np.testing.assert_array_equal(matrix @ matrix.T, n * np.eye(n, dtype=int))
    if n & (n - 1) == 0:
        np.testing.assert_array_equal(matrix, scipy.linalg.hadamard(n))


@pytest.mark.parametrize("n", [0, 6, 28, 36])
def test_there_is_no_matrix_of_other_orders(n):
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {n}"):
        hadamard(n)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_products_survive_rotation(dim):
    rng = np.random.default_rng(dim)
    q, k = (jnp.asarray(rng.standard_normal((5, 3, dim)), jnp.float32) for _ in range(2))
    want = np.einsum("tkh,skh->kts", np.asarray(q, np.float64), np.asarray(k, np.float64))
    got = jnp.einsum("tkh,skh->kts", rotate(q), rotate(k), precision="highest")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rotate_back(rotate(q)), q, rtol=1e-5, atol=1e-5)
    assert rotate(q.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rotation_helps_int4_where_channels_are_outliers():
    """Keys of 128 channels, 4 of them 20 times as large, as in Llama's: the error of q · k in int4, relative."""
    rng = np.random.default_rng(0)
    size = np.ones(128)
    size[[3, 40, 77, 100]] = 20
    k = jnp.asarray(rng.standard_normal((512, 1, 128)) * size, jnp.float32)
    q = jnp.asarray(rng.standard_normal((64, 1, 128)), jnp.float32)

    def error(q, k):
        want = np.einsum("tkh,skh->kts", np.asarray(q, np.float64), np.asarray(k, np.float64))
        back = dequantize(*quantize_rows(k, "int4"))
        got = np.einsum("tkh,skh->kts", np.asarray(q, np.float64), np.asarray(back, np.float64))
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    plain, rotated = error(q, k), error(rotate(q), rotate(k))
    assert plain > 0.2 and rotated < 0.14 and rotated < 0.6 * plain, (plain, rotated)
