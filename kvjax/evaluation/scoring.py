"""Log-probabilities of given texts, computed through the paged cache: teacher forcing, chunk by chunk.

What a token sees of earlier ones is what the cache stores of them, their quantization and eviction included. One
program is compiled for a shape, and logits exist for a block of tokens at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kvjax import cache as kv_cache
from kvjax import engine, evicting, plans
from kvjax.cache import Cache, CacheConfig, Placement
from kvjax.errors import RequestError
from kvjax.eviction_rule import NEVER
from kvjax.plans import Model, Options
from kvjax.state import Program, pages_in_use
from kvjax.types import Params

After = Callable[[Cache, jax.Array], Cache]
"""(cache, lengths (B,) int32) → cache: what becomes of the cache when so many tokens of each text are in it. Pure, and
traced. Rows may move and `table.lengths` may fall, alike in all groups; tokens that follow keep their positions."""

_BLOCK = 256
"""Tokens whose logits are held at once: of a vocabulary of 128 thousand, 128 MiB."""


class Chunk(struct.PyTreeNode):
    """Tokens of several texts that enter the model together, packed text after text, padding last.

    Attributes:
      ids: (T,) int32.
      targets: (T,) int32, the token that follows each.
      slots: (T,) int32 text of each token, B for padding.
      positions: (T,) int32 of each in its text.
      row_starts: (B + 1,) int32 first packed token of each text.
      seen: (B,) int32 tokens of each text before this chunk.
    """

    ids: jax.Array
    targets: jax.Array
    slots: jax.Array
    positions: jax.Array
    row_starts: jax.Array
    seen: jax.Array


@dataclasses.dataclass(frozen=True)
class Scores:
    """What was found of some texts.

    Attributes:
      logprobs: of each text of n tokens, (n − 1,) float32 in nats: entry i is log p(token i + 1 | tokens 0 … i).
      allocated: bytes of all K and V arrays of the cache, scales included.
      peak: bytes of the pages in use, at most.
      bytes_per_token: bytes of the pages in use at the ends of the texts over their tokens; what a last page has
        room for besides is counted too.
    """

    logprobs: tuple[np.ndarray, ...]
    allocated: int
    peak: int
    bytes_per_token: float


@functools.partial(jax.jit, static_argnames=("program", "most", "after"), donate_argnames=("cache",))
def score(
    program: Program,
    params: Params,
    cache: Cache,
    chunk: Chunk,
    evict: jax.Array,
    context: jax.Array,
    *,
    most: int,
    after: After | None = None,
) -> tuple[Cache, jax.Array, jax.Array]:
    """Computes one chunk; the cache is donated.

    Args:
      program: the static part, of `plans.program_of`.
      params: the model's parameters.
      cache: with room for the chunk's tokens.
      chunk: the tokens.
      evict: () bool; whether rows are evicted when the chunk is in the cache, if the program evicts any.
      context: () int32 tokens of a text after which rows are evicted, or few are read (Quest), NEVER for none.
      most: static; most tokens that a text has in a chunk.
      after: applied to the cache when the chunk is in it.

    Returns:
      The cache; (T,) float32 log-probabilities of the targets, in nats; and (groups,) int32 pages in use when the
      chunk was in and nothing had been applied, then (groups,) when it had: together (2, groups).
    """
    tokens = chunk.row_starts[1:] - chunk.row_starts[:-1]
    now, T = jnp.int32(0), chunk.ids.shape[0]
    held = cache.groups[0].table.lengths
    cache = kv_cache.reserve(program.cache, cache, None, tokens, now, now, jnp.bool_(False), T).cache
    # A token's row in the cache is its position only as long as nothing was evicted.
    owner = jnp.minimum(chunk.slots, program.cache.slots - 1)
    rows = (held - chunk.row_starts[:-1])[owner] + jnp.arange(T, dtype=jnp.int32)
    placement = Placement(chunk.slots, rows, chunk.row_starts, most)
    if program.cache.eviction is not None:
        cuts = jnp.where(evict, chunk.seen + tokens, NEVER)
        placement = placement.replace(positions=chunk.positions, cuts=cuts, context=jnp.full_like(tokens, context))
    cache, hidden = engine.compute(program, params, cache, chunk.ids, placement, chunk.positions)
    before = pages_in_use(program.cache, cache)
    cache = kv_cache.trim(program.cache, cache, held, now)
    if program.cache.eviction is not None:
        cache = kv_cache.evict(program.cache, cache, evict & (tokens > 0), chunk.seen + tokens, now)
    if after is not None:
        cache = after(cache, chunk.seen + tokens)
    return (
        cache,
        _of_targets(program, params, hidden, chunk.targets),
        jnp.stack([before, pages_in_use(program.cache, cache)]),
    )


def _of_targets(program: Program, params: Params, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """hidden (T, D), targets (T,) → (T,) float32 log-probabilities."""
    T, D = hidden.shape
    block = min(_BLOCK, T)
    pad = -T % block

    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = program.unembed(params, program.config, part[0])
        return jnp.take_along_axis(logits, part[1][:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)

    blocks = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, block, D), jnp.pad(targets, (0, pad)).reshape(-1, block)
    return jax.lax.map(one, blocks).reshape(-1)[:T]


@functools.partial(jax.jit, static_argnums=0)
def _empty(config: CacheConfig) -> Cache:
    return kv_cache.init(config)


def logprobs(
    model: Model,
    texts: Sequence[Sequence[int]],
    options: Options | None = None,
    *,
    chunk: int = 512,
    slots: int = 1,
    after: After | None = None,
    compress_at: int | None = None,
) -> Scores:
    """Log-probabilities of every token of some texts but the first.

    Args:
      model: the model; `model.storage` says how K and V are stored.
      texts: token ids, at least two a text.
      options: pages, layout, backend and `kv_bytes` are those of a job; slots and packed are not read.
      chunk: most tokens of a text that enter the model at once; with a smaller one less memory is needed, and
        `after` comes more often.
      slots: texts that are computed together.
      after: applied to the cache after each chunk, or with `compress_at` once. A model that evicts rows does so then.
      compress_at: tokens of a text after which `after` is applied, or rows are evicted, the only time; a chunk ends
        there. A text that has fewer is scored as it is, or its rows are compressed behind its end, which changes
        nothing of its scores.

    Raises:
      RequestError: a text that is too short, or too long for the context; a model on a mesh; too few `kv_bytes`.
    """
    options = options or Options()
    _check(model, texts, chunk, slots, compress_at)
    if not texts:
        return Scores((), 0, 0, 0.0)
    longest = max(map(len, texts))
    if model.eviction is not None and after is not None:
        raise RequestError("The model evicts rows itself: give it without eviction, or leave out `after`.")
    slots = min(slots, len(texts))
    packed = slots * min(chunk, longest)
    config = plans.cache_config(model, slots, longest, options, packed)
    if config != plans.cache_config(model, slots, longest, dataclasses.replace(options, kv_bytes=1 << 60), packed):
        raise RequestError(
            f"kv_bytes is {options.kv_bytes}, too few for {config.slots} texts of {longest} tokens: raise kv_bytes."
        )
    program = plans.program_of(model, config, backend=plans.backend_of(model, options), share=False)
    width = min(chunk, longest)
    batches = [
        _batch(program, model.params, texts[first : first + config.slots], width, after, compress_at)
        for first in range(0, len(texts), config.slots)
    ]
    used = [counts @ plans.page_bytes(config) for _, counts in batches]  # (steps, 2) bytes
    held = sum(int(steps[-1, 1]) for steps in used)
    return Scores(
        tuple(itertools.chain.from_iterable(found for found, _ in batches)),
        config.kv_bytes,
        max(int(steps.max()) for steps in used),
        held / sum(map(len, texts)),
    )


def _check(model: Model, texts: Sequence[Sequence[int]], chunk: int, slots: int, compress_at: int | None) -> None:
    for name, value in (("chunk", chunk), ("slots", slots), ("compress_at", compress_at)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}: give at least 1.")
    if model.mesh is not None:
        raise RequestError("Texts are not scored over a mesh: load the model without one.")
    for i, text in enumerate(texts):
        if not 2 <= len(text) <= model.config.context:
            raise RequestError(
                f"Text {i} has {len(text)} tokens, and 2 to the context's {model.config.context} can be scored: "
                "give a longer text, or cut it."
            )
    if texts and compress_at is not None and compress_at > max(map(len, texts)):
        raise RequestError(f"compress_at is {compress_at}, and no text has so many tokens: give a smaller one.")


def bytes_per_row(model: Model, options: Options) -> float:
    """Bytes that a job's cache allocates for a token's K and V in all layers, scales and padding included, and what is
    noted of rows that may be evicted; not what is known of a slot's queries, however many its tokens."""
    config = plans.cache_config(model, 1, 1, options, 1)
    of_slots = sum(evicting.moments_bytes(config, spec) for spec in config.by_head)
    return (config.kv_bytes - of_slots) / (config.pool_pages * config.rows)


def _batch(
    program: Program,
    params: Params,
    texts: Sequence[Sequence[int]],
    width: int,
    after: After | None,
    compress_at: int | None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Log-probabilities of up to B texts, and pages in use (steps, 2, groups) before and after `after`."""
    cache, parts, used = _empty(program.cache), [], []
    for begin, end in _steps(max(map(len, texts)), width, compress_at):
        here = compress_at in (None, end)
        chunk = _packed(texts, begin, end, program.cache.slots, width)
        evict, now = np.bool_(here), after if here else None
        context = np.int32(NEVER if compress_at is None else compress_at)
        cache, values, pages = score(program, params, cache, chunk, evict, context, most=width, after=now)
        parts.append((chunk, values))
        used.append(pages)
    found = [np.zeros((len(text) - 1,), np.float32) for text in texts]
    for chunk, values in parts:
        host = np.asarray(values)
        for slot, text in enumerate(found):
            mine = chunk.slots == slot
            where = np.asarray(chunk.positions)[mine]
            inside = where < len(text)  # the last token has none to predict
            text[where[inside]] = host[mine][inside]
    return found, np.asarray(jnp.stack(used))


def _steps(longest: int, width: int, compress_at: int | None) -> Iterator[tuple[int, int]]:
    """The positions [begin, end) of each chunk."""
    begin = 0
    while begin < longest:
        end = min(begin + width, longest)
        if compress_at is not None and begin < compress_at:
            end = min(end, compress_at)
        yield begin, end
        begin = end


def _packed(texts: Sequence[Sequence[int]], begin: int, end: int, slots: int, width: int) -> Chunk:
    """Tokens [begin, end) of each text, padded to `slots` · `width`, on the host."""
    T = slots * width
    counts = [max(0, min(end, len(text)) - begin) for text in texts] + [0] * (slots - len(texts))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids, targets, positions = (np.zeros((T,), np.int32) for _ in range(3))
    owners = np.full((T,), slots, np.int32)
    for slot, text in enumerate(texts):
        here = slice(starts[slot], starts[slot + 1])
        known = text[begin + 1 : begin + 1 + counts[slot]]
        ids[here], owners[here] = text[begin : begin + counts[slot]], slot
        targets[here] = [*known, *[0] * (counts[slot] - len(known))]
        positions[here] = np.arange(begin, begin + counts[slot])
    seen = np.asarray([min(begin, len(text)) for text in texts] + [0] * (slots - len(texts)), np.int32)
    return Chunk(ids, targets, owners, positions, starts, seen)  # type: ignore[arg-type]
