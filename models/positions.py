"""How models know positions: rotary embedding (RoPE, arXiv 2104.09864), sinusoids, the slopes of ALiBi.

RoPE takes three steps, from the host to the device:

    rope_from_hf        config.json fields → `Rope`, static and hashable
    rope_table          `Rope`, longest length to serve → cos/sin of every digit of a position, once per engine
    cos_sin, apply_rope positions (T,) → angles, once per step; q and k rotated, once per layer

Frequencies are fixed by the longest length that the engine will serve, not by the length of the moment: dynamic NTK
and LongRoPE change all frequencies with it, and cached keys, already rotated, would go stale.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ModelError
from kvjax.types import Rotation

BASE = 256
"""Positions are written in this base; a table holds one angle per digit value."""
_MOST = 2**31 - 1
"""Positions are int32."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a model turns positions into angles. Raises ModelError for an impossible combination.

    Attributes:
      kind: "default", "linear" (position interpolation, 2306.15595), "ntk" (NTK-aware, static), "dynamic"
        (NTK-aware, by length), "yarn" (2309.00071), "llama3" (Llama 3.1), "longrope" (2402.13753) or "factors"
        (explicit divisors).
      theta: base of the geometric series of frequencies.
      dim: rotated dims of a head, even; the dims beyond it pass unrotated.
      factor: s, how many times the original length is stretched.
      original_length: L0, the length of pretraining; needed by dynamic, yarn, llama3 and longrope.
      attention_factor: yarn, longrope: multiplies cos and sin; None derives it as the paper does.
      beta_fast: yarn: dims that turn more often than this within L0 keep their frequency.
      beta_slow: yarn: dims that turn less often than this within L0 are fully interpolated.
      mscale: yarn, DeepSeek: with `mscale_all_dim`, the attention factor is the ratio of both scales.
      mscale_all_dim: see `mscale`; DeepSeek's softmax scale uses it too.
      truncate: yarn: whether the ramp's ends are rounded to whole dims (gpt-oss does not).
      low_freq_factor: llama3: wavelengths above L0 / low_freq_factor are fully interpolated.
      high_freq_factor: llama3: wavelengths below L0 / high_freq_factor are kept.
      short_factor: longrope: divisors (dim/2,) for lengths up to L0.
      long_factor: longrope: divisors (dim/2,) for lengths beyond L0.
      divisors: factors: divisors (dim/2,), as llama.cpp stores them in `rope_freqs.weight`.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _FREQUENCIES:
            raise ModelError(f"RoPE type {self.kind!r} is not one of {', '.join(_FREQUENCIES)}.")
        if self.dim <= 0 or self.dim % 2:
            raise ModelError(f"RoPE rotates pairs, but {self.dim} dims of a head are to be rotated.")
        if self.factor <= 0 or self.theta <= 0:
            raise ModelError(f"RoPE needs factor > 0 and rope_theta > 0, not {self.factor} and {self.theta}.")
        if self.kind in _NEED_LENGTH and self.original_length <= 0:
            raise ModelError(f"RoPE type {self.kind!r} needs original_max_position_embeddings.")
        for name in _LISTS.get(self.kind, ()):
            count = len(getattr(self, name))
            if count != self.dim // 2:
                raise ModelError(f"RoPE type {self.kind!r} needs {self.dim // 2} numbers in {name}, not {count}.")


# --- frequencies, float64 on the host -----------------------------------------------------------------------------


def inverse_frequencies(rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Radians per position of every rotated pair, and the factor on cos and sin.

    Args:
      rope: the model's RoPE.
      length: the longest sequence that will be served, prompt and output together; read by dynamic and longrope.

    Returns:
      Frequencies (dim/2,) float64; the attention factor, which scales q and k both, so logits get its square.
    """
    return _FREQUENCIES[rope.kind](rope, length), _attention_factor(rope)


def _powers(theta: float, dim: int) -> np.ndarray:
    """f_i = θ^(−2i/d), (dim/2,) float64."""
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _default(rope: Rope, length: int) -> np.ndarray:
    return _powers(rope.theta, rope.dim)


def _linear(rope: Rope, length: int) -> np.ndarray:
    return _powers(rope.theta, rope.dim) / rope.factor


def _ntk(rope: Rope, length: int) -> np.ndarray:
    """θ' = θ·s^(d/(d−2)): the slowest pair is interpolated by s, the fastest is untouched."""
    return _powers(rope.theta * rope.factor ** (rope.dim / (rope.dim - 2)), rope.dim)


def _dynamic(rope: Rope, length: int) -> np.ndarray:
    """NTK-aware with s grown to s·n/L0 − (s−1); n ≤ L0 gives the original frequencies."""
    stretch = rope.factor * max(length, rope.original_length) / rope.original_length - (rope.factor - 1)
    return _ntk(dataclasses.replace(rope, factor=stretch), length)


def _yarn(rope: Rope, length: int) -> np.ndarray:
    """f' = f(1−γ) + (f/s)γ, with γ a ramp from 0 to 1 between the pairs that turn beta_fast and beta_slow times."""
    low, high = (
        rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Clamped at dim−1 although pairs end at dim/2−1: so it is in the authors' code, which the models trained with.
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float64) - low) / width, 0, 1)
    kept = _powers(rope.theta, rope.dim)
    return kept * (1 - ramp) + kept / rope.factor * ramp


def _llama3(rope: Rope, length: int) -> np.ndarray:
    """Short wavelengths kept, long ones interpolated by s, a linear blend in L0/λ between."""
    kept = _powers(rope.theta, rope.dim)
    turns = rope.original_length * kept / (2 * math.pi)  # L0/λ
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0, 1)
    return (1 - blend) * kept / rope.factor + blend * kept


def _longrope(rope: Rope, length: int) -> np.ndarray:
    divisors = rope.long_factor if length > rope.original_length else rope.short_factor
    return _powers(rope.theta, rope.dim) / np.asarray(divisors, np.float64)


def _factors(rope: Rope, length: int) -> np.ndarray:
    return _powers(rope.theta, rope.dim) / np.asarray(rope.divisors, np.float64)


_FREQUENCIES: dict[str, Callable[[Rope, int], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "factors": _factors,
}
_NEED_LENGTH = ("dynamic", "yarn", "llama3", "longrope")
_NEED_FACTOR = ("linear", "ntk", "dynamic", "llama3")
_LISTS = {"longrope": ("short_factor", "long_factor"), "factors": ("divisors",)}


def _attention_factor(rope: Rope) -> float:
    """YaRN §3.4: 0.1·ln s + 1, or DeepSeek's ratio of two such scales. LongRoPE: √(1 + ln s / ln L0)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1 or rope.kind not in ("yarn", "longrope"):
        return 1.0
    stretch = math.log(rope.factor)
    if rope.kind == "longrope":
        return math.sqrt(1 + stretch / math.log(rope.original_length))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * stretch + 1) / (0.1 * rope.mscale_all_dim * stretch + 1)
    return 0.1 * stretch + 1


def rotation(rope: Rope, length: int, interleaved: bool = False, first: int = 0) -> Rotation:
    """The same as `kvjax.types.Rotation`, for what turns queries and keys once more; as `apply_rope` has them."""
    frequencies, factor = inverse_frequencies(rope, length)
    return Rotation(tuple(frequencies.tolist()), factor, interleaved, first)


# --- config.json --------------------------------------------------------------------------------------------------


def rope_from_hf(config: Mapping[str, Any], head_dim: int, layer_type: str | None = None) -> Rope:
    """The RoPE that a Hugging Face config describes.

    Reads `rope_scaling` beside `rope_theta` (transformers 4; also the legacy key "type"), and `rope_parameters`
    (transformers 5; also one dict per layer type). One addition of kvjax, for GGUF files that carry
    `rope_freqs.weight`: `{"rope_type": "factors", "divisors": [...]}`.

    Args:
      config: contents of config.json.
      head_dim: H of the part of a head that RoPE sees (MLA: qk_rope_head_dim); partial_rotary_factor applies to it.
      layer_type: which dict to read where there is one per layer type, e.g. "sliding_attention".

    Raises:
      ModelError: an unknown RoPE type, or a missing or impossible field.
    """
    fields = _fields(config, layer_type)
    kind = next((fields[key] for key in ("rope_type", "type") if fields.get(key) is not None), "default")
    kind = "longrope" if kind == "su" else kind  # early Phi-3 checkpoints
    if not isinstance(kind, str) or kind not in _FREQUENCIES:
        raise ModelError(f"RoPE type {reprlib.repr(kind)} in config.json is not one of {', '.join(_FREQUENCIES)}.")
    if fields.get("short_mscale") or fields.get("long_mscale"):
        raise ModelError("RoPE with short_mscale and long_mscale (Phi-3.5-MoE) is not implemented.")
    original = _original_length(config, fields)
    partial = _number(fields, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise ModelError(f"config.json: partial_rotary_factor is {partial}, a number above 0 and up to 1 is needed.")
    rope = Rope(
        kind=kind,
        theta=_number(fields, "rope_theta", _number(config, "rope_theta", 10_000.0)),
        dim=int(head_dim * partial),
        factor=_factor(config, fields, kind, original),
        original_length=original,
        attention_factor=None if fields.get("attention_factor") is None else _number(fields, "attention_factor"),
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        mscale=_number(fields, "mscale", 0.0) or None,
        mscale_all_dim=_number(fields, "mscale_all_dim", 0.0) or None,
        truncate=_flag(fields, "truncate", True),
        low_freq_factor=_number(fields, "low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=_number(fields, "high_freq_factor", None if kind == "llama3" else 4.0),
        **{name: _numbers(fields, name) for name in _LISTS.get(kind, ())},
    )
    if not _is_finite(rope):
        stated = ", ".join(f"{name} {reprlib.repr(value)}" for name, value in fields.items())
        theta = "" if "rope_theta" in fields else f", rope_theta {rope.theta}"
        reason = "give frequencies that are not finite: copy them from the original config.json"
        raise ModelError(f"The RoPE parameters in config.json ({stated or kind}{theta}) {reason}.")
    return rope


def _is_finite(rope: Rope) -> bool:
    """Whether all angles are numbers, whatever the length to serve: some fields divide, or are exponents."""
    try:
        with np.errstate(all="ignore"):
            found = [inverse_frequencies(rope, length) for length in (rope.original_length, _MOST)]
            return all(
                np.isfinite(frequencies * 2.0**32).all() and math.isfinite(scale) for frequencies, scale in found
            )
    except (ArithmeticError, ValueError):
        return False


def _fields(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), Mapping | None):
            reason = "an object such as {'rope_type': 'linear', 'factor': 2.0} is needed, or null"
            raise ModelError(f"config.json: {name} is {reprlib.repr(config[name])}, {reason}.")
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not any(isinstance(value, Mapping) for value in fields.values()):
        return fields
    nested = fields.get(layer_type)
    if not isinstance(nested, Mapping):
        raise ModelError(f"config.json has RoPE parameters for {', '.join(fields)}, but none for {layer_type!r}.")
    return nested


def _number(fields: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = fields.get(name)
    value = otherwise if value is None else value
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"RoPE parameters in config.json need a finite number for {name}, not {reprlib.repr(value)}.")
    return number


def _flag(fields: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = fields.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"RoPE parameters in config.json need true or false for {name}, not {reprlib.repr(value)}.")
    return value


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list | tuple):
        raise ModelError(
            f"RoPE parameters in config.json need a list of numbers for {name}, not {reprlib.repr(values)}."
        )
    return tuple(_number({name: value}, name) for value in values)


def _original_length(config: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """L0, or 0 where unknown. Phi-3 keeps it at the top; files that leave it out mean max_position_embeddings."""
    name = "original_max_position_embeddings"
    length = _number(config, name, 0.0) or _number(fields, name, 0.0)
    if not length:
        name = "max_position_embeddings"
        length = _number(config, name, 0.0)
    if not 0 <= length <= _MOST or length % 1:
        raise ModelError(f"config.json: {name} is {length}, a whole number from 0 to {_MOST} is needed.")
    return int(length)


def _factor(config: Mapping[str, Any], fields: Mapping[str, Any], kind: str, original: int) -> float:
    """s; where yarn and longrope leave it out it is the ratio of both lengths, as Phi-3 and DeepSeek mean it."""
    if fields.get("factor") is None and kind in ("yarn", "longrope"):
        return _number(config, "max_position_embeddings") / original if original else 1.0
    return _number(fields, "factor", None if kind in _NEED_FACTOR else 1.0)


# --- angles and rotation ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def rope_table(rope: Rope, length: int) -> np.ndarray:
    """Cos and sin of every digit of a position, for `cos_sin`: (digits, 2, 256, dim/2) float32, read only.

    A float32 product position·f is off by 0.5 radian at 10 million (24 bits of mantissa). Instead the position is
    written in base 256, p = Σ d_k·256^k, and the table holds cos and sin of d·256^k·f, computed in float64; the
    angles of the digits add up by the addition formula, at the cost of one rounding each. Three digits reach
    16,777,215; a longer `length` gets a fourth. 393 kB for dim 128. NumPy, so it may be cached and closed over by a
    jitted function; it is in [..., cos or sin, ...] planes because a minor axis of 2 is padded to 128 on TPU.
    """
    return _digit_table(*inverse_frequencies(rope, length), length)


def _digit_table(frequencies: np.ndarray, factor: float, length: int) -> np.ndarray:
    """The table of `rope_table` for any frequencies (n,), with a factor on cos and sin."""
    digits = 3 if length <= BASE**3 else 4
    places = float(BASE) ** np.arange(digits)
    angles = np.arange(BASE)[None, :, None] * places[:, None, None] * frequencies
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    table[-1] *= factor  # a product takes one factor from each digit, so one digit carries it for all
    table = table.astype(np.float32)
    table.setflags(write=False)
    return table


def cos_sin(table: jax.Array | np.ndarray, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of the angles of positions, within 1e-6 of float64 at every position.

    Args:
      table: from `rope_table`.
      positions: (T,) int32. Outside 0 … 256^digits − 1 they clamp to that range, so padding may hold anything.

    Returns:
      cos, sin: (T, dim/2) float32, the attention factor included.
    """
    table = jnp.asarray(table)
    digits = table.shape[0]
    positions = jnp.clip(positions, 0, min(BASE**digits, 2**31) - 1)
    cos, sin = table[0][:, positions % BASE]
    for k in range(1, digits):
        cos_k, sin_k = table[k][:, positions // BASE**k % BASE]
        cos, sin = cos * cos_k - sin * sin_k, sin * cos_k + cos * sin_k
    return cos, sin


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
    """Rotates the first dim dims of every head; computed in float32.

    Args:
      x: (T, heads, H), H ≥ dim; dims beyond dim are left as they are.
      cos: (T, dim/2) float32.
      sin: (T, dim/2) float32.
      interleaved: pair i is dims (2i, 2i+1), as in the paper, GPT-J and DeepSeek's MLA; else (i, i + dim/2), as in
        Hugging Face's Llama.

    Returns:
      (T, heads, H), of x's dtype.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotary = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = jnp.split(rotary, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = jnp.stack(turned, axis=-1).reshape(rotary.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    joined = joined.astype(x.dtype)
    return joined if 2 * half == x.shape[-1] else jnp.concatenate([joined, x[..., 2 * half :]], axis=-1)


def softmax_factor(rope: Rope) -> float:
    """DeepSeek multiplies its softmax scale by the square of YaRN's scale for `mscale_all_dim`; else 1."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2


# --- other ways ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _sinusoid_table(pairs: int, length: int) -> np.ndarray:
    return _digit_table(10_000.0 ** (-np.arange(pairs, dtype=np.float64) / (pairs - 1)), 1.0, length)


def sinusoids(positions: jax.Array, width: int, length: int) -> jax.Array:
    """Sines, then cosines, of a position at D/2 geometric frequencies from 1 to 1/10,000, as in tensor2tensor.

    Args:
      positions: (T,) int32.
      width: D; where it is odd, the last number is 0.
      length: more than the largest position.

    Returns:
      (T, D) float32, within 1e-6 of float64 at every position.
    """
    cos, sin = cos_sin(_sinusoid_table(width // 2, length), positions)
    return jnp.pad(jnp.concatenate([sin, cos], axis=-1), ((0, 0), (0, width % 2)))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """m of every head for ALiBi (2108.12409): 2^(−8i/n), i = 1 … n, for a power of two n.

    Of the list for the next power of two, other numbers of heads take every second slope first, then the rest.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8 * i / count) for i in range(1, count + 1)]
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])
