"""Pages of codes, of which several share a byte; K and V each in a storage of its own.

    storage          bits   scale
    int8, float8_…   8      float32 for each row of a head, or for each page of one: symmetric (quantize.py)
    int4             4      the same
    kivi4, kivi2     4, 2   and a zero, 16 bits each, for each group: asymmetric (kivi.py)

A byte holds numbers that lie far apart: of n numbers along an axis, cut into as many equal planes as a byte has codes,
byte i holds number i of every plane, the first in the lowest bits. So a kernel gets whole planes by shifts and masks,
and no number moves. (jnp.int4 is packed on a TPU, but takes a byte a number in an array on a CPU.)

    head_major, token_major   planes of each head's channels: K (P, K, H·bits/8, R) or (P, R, K, H·bits/8), uint8
    joined                    planes of all heads' lanes, K's apart from V's, each filled up to whole tiles of bytes

Scales of rows or pages are (P, K, R) or (P, K) float32, as the attention op has them. The words of groups (scale and
zero, `kivi.join_words`) are uint32, for K (P, R / group, K·H), for V (P, K·Hv / group, R); in the joined layout K·H and
K·Hv are filled up to a multiple of 128. With a group of 32, codes of 4 bits take 5 bits a number, and codes of 2 bits
take 3; with 64, codes of 4 bits take 4.5.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from kvjax.pallas_kernels import joined, kivi, write_rows_tpu
from kvjax.pallas_kernels.joined import LANES, Lanes
from kvjax.pallas_kernels.quantize import quantize_rows

BITS = {"int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "int4": 4, "kivi4": 4, "kivi2": 2}
"""Bits of a code of each storage."""


def grouped(storage: str) -> bool:
    """Whether a storage has a scale and a zero for each group."""
    return storage.startswith("kivi")


@dataclasses.dataclass(frozen=True)
class Codes:
    """What pages of codes hold; hashable, part of the compiled program.

    Attributes:
      key: storage of K, one of BITS.
      value: storage of V, one of BITS.
      group: numbers that share a scale and a zero, in storages that have groups; 32 or 64.
    """

    key: str
    value: str
    group: int = 32

    def __post_init__(self):
        for storage in (self.key, self.value):
            if storage not in BITS:
                raise ValueError(f"storage {storage!r} has no packed pages; there are {', '.join(BITS)}")
        if self.group not in (32, 64):
            raise ValueError(f"groups of {self.group}: take 32 or 64")

    def check(self, rows: int, lanes: Lanes, layout: str) -> None:
        """Raises ValueError or NotImplementedError, with the reason, for rows a page or heads that do not fit."""
        if lanes.latent:
            raise NotImplementedError("latent pages have no packed codes: their values are part of their keys")
        if grouped(self.key) and rows % self.group:
            raise ValueError(
                f"pages of {rows} rows do not hold whole groups of {self.group} rows: take a multiple of {self.group}"
            )
        if grouped(self.value) and lanes.value_dim % self.group:
            raise ValueError(
                f"values of {lanes.value_dim} numbers are no whole groups of {self.group}: take int4 or int8 for V"
            )
        for name, dim, storage in (("keys", lanes.key_dim, self.key), ("values", lanes.value_dim, self.value)):
            if layout != "joined" and dim * BITS[storage] % 8:
                raise ValueError(f"{name} of {dim} numbers of {BITS[storage]} bits are no whole bytes")

    def lanes(self, lanes: Lanes) -> Lanes:
        """Where heads lie among the unpacked lanes of joined pages: K's, then V's, each of whole tiles of bytes."""
        key, value = (_filled(lanes.kv_heads * dim, s) for dim, s in self._parts(lanes))
        return dataclasses.replace(lanes, values_at=key, filled=key + value)

    def tiles(self, lanes: Lanes) -> tuple[int, int]:
        """Tiles of 128 bytes of K and of V in a joined row; `lanes` as they come."""
        key, value = (_filled(lanes.kv_heads * dim, s) * BITS[s] // 8 // LANES for dim, s in self._parts(lanes))
        return key, value

    def _parts(self, lanes: Lanes) -> tuple[tuple[int, str], tuple[int, str]]:
        return (lanes.key_dim, self.key), (lanes.value_dim, self.value)


def _filled(numbers: int, storage: str) -> int:
    """Lanes for so many numbers, whole tiles of bytes."""
    per_tile = LANES * 8 // BITS[storage]
    return -(-numbers // per_tile) * per_tile


# ---- Bits


def pack(codes: jax.Array, bits: int, axis: int = -1) -> jax.Array:
    """uint8 codes (…, n, …) below 2^bits → bytes uint8 (…, n · bits / 8, …), planes along the axis.

    Raises:
      ValueError: where the codes are no whole bytes.
    """
    planes = 8 // bits
    if codes.shape[axis] % planes:
        raise ValueError(f"{codes.shape[axis]} codes of {bits} bits are no whole bytes: take a multiple of {planes}")
    packed = None
    for number, plane in enumerate(jnp.split(codes, planes, axis=axis)):
        shifted = plane << jnp.uint8(bits * number)
        packed = shifted if packed is None else packed | shifted
    assert packed is not None
    return packed


def unpack(packed: jax.Array, bits: int, axis: int = -1) -> jax.Array:
    """The inverse of `pack`."""
    mask = jnp.uint8((1 << bits) - 1)
    planes = [(packed >> jnp.uint8(bits * number)) & mask for number in range(8 // bits)]
    return jnp.concatenate(planes, axis=axis) if len(planes) > 1 else planes[0]


def to_bits(codes: jax.Array, storage: str) -> jax.Array:
    """Symmetric codes → uint8, of int4 in the low half."""
    if storage == "int4":
        return codes.astype(jnp.int8).astype(jnp.uint8) & jnp.uint8(15)
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def from_bits(bits: jax.Array, storage: str) -> jax.Array:
    """The numbers that uint8 codes of any storage stand for, float32, before scale and zero."""
    if grouped(storage):
        return bits.astype(jnp.float32)
    if storage == "int4":
        return ((bits ^ jnp.uint8(8)).astype(jnp.int8) - jnp.int8(8)).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(storage)).astype(jnp.float32)


# ---- Tokens → codes


def encode_keys(k: jax.Array, codes: Codes) -> tuple[jax.Array, jax.Array]:
    """K (T, K, H) → uint8 codes (T, K, H), not packed, and their scales: (T, K) float32, or words (T / group, K, H).

    With groups, tokens follow each other: T is a multiple of `group`, and each `group` of them share scales.

    Raises:
      ValueError: where T is no multiple of `group`.
    """
    if grouped(codes.key):
        bits, scale, zero = kivi.quantize_groups(k, BITS[codes.key], codes.group, 0)
        return bits, kivi.join_words(scale, zero)
    symmetric, scale = quantize_rows(k, codes.key)
    return to_bits(symmetric, codes.key), scale


def encode_values(v: jax.Array, codes: Codes) -> tuple[jax.Array, jax.Array]:
    """V (T, K, Hv) → uint8 codes (T, K, Hv), not packed, and scales: (T, K) float32, or words (T, K, Hv / group).

    Raises:
      ValueError: where `group` does not divide Hv.
    """
    if grouped(codes.value):
        bits, scale, zero = kivi.quantize_groups(v, BITS[codes.value], codes.group, 2)
        return bits, kivi.join_words(scale, zero)
    symmetric, scale = quantize_rows(v, codes.value)
    return to_bits(symmetric, codes.value), scale


# ---- Pages


class CodePages(struct.PyTreeNode):
    """Pages of one layer; see the head of this file for shapes.

    Attributes:
      k: uint8 codes of K; in the joined layout of K and V.
      v: uint8 codes of V; None in the joined layout.
      k_scales: float32 scales, or uint32 words.
      v_scales: the same of V.
    """

    k: jax.Array
    v: jax.Array | None
    k_scales: jax.Array
    v_scales: jax.Array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))


def init_code_pages(pages: int, rows: int, lanes: Lanes, codes: Codes, layout: str, by_page: bool = False) -> CodePages:
    """Zeroed pages, P of R rows.

    by_page: symmetric scales are of whole pages.

    Raises:
      ValueError, NotImplementedError: as `Codes.check`.
    """
    codes.check(rows, lanes, layout)
    K, (H, key), (Hv, value) = lanes.kv_heads, *codes._parts(lanes)
    key_lanes, value_lanes = K * H, K * Hv
    if layout == "joined":
        key_lanes, value_lanes = (-(-x // LANES) * LANES for x in (key_lanes, value_lanes))
        k, v = jnp.zeros((pages, sum(codes.tiles(lanes)), rows, LANES), jnp.uint8), None
    else:
        per_key, per_value = H * BITS[key] // 8, Hv * BITS[value] // 8
        head_major = layout == "head_major"
        k = jnp.zeros((pages, K, per_key, rows) if head_major else (pages, rows, K, per_key), jnp.uint8)
        v = jnp.zeros((pages, K, rows, per_value) if head_major else (pages, rows, K, per_value), jnp.uint8)
    plain = jnp.ones((pages, K) if by_page else (pages, K, rows), jnp.float32)
    return CodePages(
        k,
        v,
        jnp.zeros((pages, rows // codes.group, key_lanes), jnp.uint32) if grouped(key) else plain,
        jnp.zeros((pages, value_lanes // codes.group, rows), jnp.uint32) if grouped(value) else plain,
    )


def write_code_rows(
    pages: CodePages,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    row: jax.Array,
    codes: Codes,
    layout: str,
    *,
    slots: int | None = None,
    max_query: int | None = None,
    backend: str = "xla",
) -> CodePages:
    """Quantizes the K and V of T tokens and writes them into their rows, in place when the pages are donated.

    Where K has groups, each `group` tokens are consecutive rows of one page from a multiple of `group` on, or all are
    dropped: a group is written once, when it is full.

    Args:
      pages: with scales of rows, not of pages: a page's scale would have to be known before its rows are.
      k: (T, K, H) any float; rotated before, if K is.
      v: (T, K, Hv).
      page: (T,) int32 physical page of each token; P or more drops the token.
      row: (T,) int32 row within the page.
      codes: what the pages hold.
      layout: of the pages.
      slots, max_query, backend: as `kv_store.write_rows` has them.

    Returns:
      The new pages.

    Raises:
      NotImplementedError: for pages with scales of whole pages.
      ValueError: where T is no multiple of `group`, if K has groups.
    """
    lanes = Lanes(k.shape[1], k.shape[2], v.shape[2])
    if 2 in (pages.k_scales.ndim, pages.v_scales.ndim):
        raise NotImplementedError("rows are written with a scale of their own: these pages have one for all their rows")
    k_bits, k_scales = encode_keys(k, codes)
    v_bits, v_scales = encode_values(v, codes)
    k_words = _write_key_scales(pages.k_scales, k_scales, page, row, codes)
    flat = v_scales.reshape(v_scales.shape[0], -1)  # (T, K), or (T, K·Hv / group)
    flat = jnp.pad(flat, ((0, 0), (0, pages.v_scales.shape[1] - flat.shape[1])))
    v_words = pages.v_scales.at[page, :, row].set(flat, mode="drop")
    if layout == "joined":
        rows = packed_rows(k_bits, v_bits, lanes, codes)
        if backend.startswith("tpu"):
            new = write_rows_tpu.write_rows(
                pages.k, rows, page, row, one_per_stripe=max_query == 1, slots=slots,
                interpret=backend == "tpu_interpret",
            )  # fmt: skip
        else:
            new = pages.k.at[page, :, row].set(rows.reshape(rows.shape[0], -1, LANES), mode="drop")
        return CodePages(new, None, k_words, v_words)
    assert pages.v is not None
    every = slice(None)
    k_place, v_place = ((page, every, every, row), (page, every, row)) if layout == "head_major" else ((page, row),) * 2
    k_new = pages.k.at[k_place].set(pack(k_bits, BITS[codes.key]), mode="drop")
    v_new = pages.v.at[v_place].set(pack(v_bits, BITS[codes.value]), mode="drop")
    return CodePages(k_new, v_new, k_words, v_words)


def _write_key_scales(pages: jax.Array, scales: jax.Array, page: jax.Array, row: jax.Array, codes: Codes) -> jax.Array:
    if not grouped(codes.key):
        return pages.at[page, :, row].set(scales, mode="drop")
    words = scales.reshape(scales.shape[0], -1)
    words = jnp.pad(words, ((0, 0), (0, pages.shape[2] - words.shape[1])))
    first = slice(None, None, codes.group)
    return pages.at[page[first], row[first] // codes.group].set(words, mode="drop")


def packed_rows(k_bits: jax.Array, v_bits: jax.Array, lanes: Lanes, codes: Codes) -> jax.Array:
    """uint8 codes (…, K, H) and (…, K, Hv) → joined rows of bytes (…, 128 · sum(codes.tiles))."""
    parts = []
    for bits, storage in ((k_bits, codes.key), (v_bits, codes.value)):
        flat = bits.reshape(*bits.shape[:-2], -1)
        wide = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, _filled(flat.shape[-1], storage) - flat.shape[-1])])
        parts.append(pack(wide, BITS[storage]))
    return jnp.concatenate(parts, axis=-1)


def dequantized(
    k: jax.Array,
    v: jax.Array | None,
    scales: tuple[jax.Array, jax.Array],
    codes: Codes,
    layout: str,
    lanes: Lanes | None,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Pages of codes → K and V of `dtype`, computed in float32: of head-major pages in their layout, else (P, R, K, H).

    Args:
      k, v, scales: as in `CodePages`; some pages, or all.
      codes: what they hold.
      layout: of the pages.
      lanes: where heads lie in joined pages, as they come.
      dtype: wanted.
    """
    head_major = layout == "head_major"
    if lanes is not None:
        rows = joined.rows_of(k)  # (P, R, bytes)
        at = codes.tiles(lanes)[0] * LANES
        K, H, Hv = lanes.kv_heads, lanes.key_dim, lanes.value_dim
        k_bits, v_bits = (
            unpack(part, BITS[storage])[..., : K * dim].reshape(*rows.shape[:-1], K, dim)
            for part, storage, dim in ((rows[..., :at], codes.key, H), (rows[..., at:], codes.value, Hv))
        )
    else:
        assert v is not None
        k_bits = unpack(k, BITS[codes.key], axis=2 if head_major else 3)
        v_bits = unpack(v, BITS[codes.value], axis=3)
    # Rows, heads and channels, in this order, become axes of the layout.
    k_order, v_order = ((2, 3, 1), (2, 1, 3)) if head_major else ((1, 2, 3), (1, 2, 3))
    K = k_bits.shape[1 if head_major else 2]
    P, numbers = k.shape[0], []
    for bits, scale, storage, order, is_key in (
        (k_bits, scales[0], codes.key, k_order, True),
        (v_bits, scales[1], codes.value, v_order, False),
    ):
        x = from_bits(bits, storage)
        if grouped(storage):
            if is_key:
                H = x.shape[order.index(3) + 1]
                words = scale[..., : K * H].reshape(P, -1, K, H)  # (P, R / group, K, H)
            else:
                per_head = x.shape[3] // codes.group
                words = scale[:, : K * per_head].reshape(P, K, per_head, -1).transpose(0, 3, 1, 2)
            step, zero = kivi.split_words(words.transpose(0, *order))
            axis = order.index(1 if is_key else 3) + 1
            numbers.append(kivi.dequantize_groups(bits, step, zero, axis, dtype))
        else:
            by_row = scale if scale.ndim == 3 else scale[..., None]  # (P, K, R) or (P, K, 1)
            numbers.append((x * by_row.swapaxes(1, 2)[..., None].transpose(0, *order)).astype(dtype))
    return numbers[0], numbers[1]
