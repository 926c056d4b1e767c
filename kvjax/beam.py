"""Beam search in one device program: beams share pages, fork by reference, and copy a page before they write to it.

prefill   the prompts are computed in chunks, each in the first slot of its group of `width`, then forked to the others
choose    the best continuations of a prompt: some end as hypotheses, others go on
extend    the slots change hands (`cache.reparent`), and the chosen tokens are computed

What is chosen is what Hugging Face transformers 5 chooses in `generate(num_beams=width, do_sample=False)`, ties aside.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from kvjax import cache as kv_cache
from kvjax import plans, sharding
from kvjax.cache import Cache, CacheConfig, Placement
from kvjax.engine import compute_last
from kvjax.errors import RequestError
from kvjax.plans import Model, Options
from kvjax.sharding import SEQ
from kvjax.state import Program
from kvjax.types import Params

NEVER = -1e9
"""Added to the score of what must not be chosen; a finite number, as in transformers, so that nothing becomes NaN."""


class Rules(struct.PyTreeNode):
    """What a search looks for. All of it is traced: other rules need no other program.

    Attributes:
      limit: () int32 tokens that a hypothesis has at most.
      length_penalty: () float32; a score is the sum of log-probabilities over length ** length_penalty.
      early: () bool whether a prompt is done as soon as it has `width` hypotheses.
      patient: () bool whether to ask what a beam could still be worth at the limit, rather than at its length.
      eos: (E,) int32 tokens that end a hypothesis.
    """

    limit: jax.Array
    length_penalty: jax.Array
    early: jax.Array
    patient: jax.Array
    eos: jax.Array


class Hypotheses(struct.PyTreeNode):
    """The best finished outputs of each of A prompts, best first; a path in the trail, and the token that ended it.

    Attributes:
      score: (A, W) float32.
      ended: (A, W) bool whether there is one.
      length: (A, W) int32 tokens, the last one included.
      slot: (A, W) int32 slot that held all tokens but the last.
      token: (A, W) int32 last token.
    """

    score: jax.Array
    ended: jax.Array
    length: jax.Array
    slot: jax.Array
    token: jax.Array


class Trail(struct.PyTreeNode):
    """Every choice so far, for B slots and up to N tokens. No beam's tokens are ever copied.

    Attributes:
      token: (N, B) int32 token that the slot went on with.
      source: (N, B) int32 slot that held what came before.
    """

    token: jax.Array
    source: jax.Array


class Statistics(struct.PyTreeNode):
    """What has happened; () int32 each, pages being those of group 0.

    Attributes:
      computed: tokens passed through the model.
      forks: beams that went on from a beam that another one went on from, too.
      copied: pages copied before a write.
      peak: most pages held at once.
    """

    computed: jax.Array
    forks: jax.Array
    copied: jax.Array
    peak: jax.Array


class Search(struct.PyTreeNode):
    """A search of A prompts, W beams each, in B = A·W slots; prompt a has the slots from a·W on.

    Attributes:
      cache: K and V of the prompts and beams.
      prompts: (A, C) int32.
      lengths: (A,) int32 tokens of each prompt; 0 for none.
      rules: of the search.
      hidden: (B, D) of each slot's last token.
      scores: (A, W) float32 sums of log-probabilities, best first.
      trail: choices.
      done: hypotheses.
      open: (A,) bool whether the prompt's search goes on.
      made: () int32 tokens that each beam has.
      step: () int32 steps run.
      starved: () bool whether pages ran out: all hypotheses are void.
      stats: counters.
    """

    cache: Cache
    prompts: jax.Array
    lengths: jax.Array
    rules: Rules
    hidden: jax.Array
    scores: jax.Array
    trail: Trail
    done: Hypotheses
    open: jax.Array
    made: jax.Array
    step: jax.Array
    starved: jax.Array
    stats: Statistics

    @property
    def width(self) -> int:
        """W."""
        return self.scores.shape[1]


# --- on the device -----------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("program", "width", "steps"))
def start(program: Program, prompts: jax.Array, lengths: jax.Array, rules: Rules, *, width: int, steps: int) -> Search:
    """A search that has not begun.

    Args:
      program: the static part; its cache has A·W slots.
      prompts: (A, C) int32, padded.
      lengths: (A,) int32; 0 where there is no prompt.
      rules: of the search.
      width: W, static.
      steps: N, static; at least `rules.limit`.
    """
    # Copies: the state is donated, the caller's arrays are not.
    prompts, lengths, rules = jax.tree.map(jnp.copy, (prompts, lengths, rules))
    A, B = prompts.shape[0], program.cache.slots
    assert A * width == B, f"{B} slots for {A} prompts of {width} beams"
    none = jnp.zeros((A, width), jnp.int32)
    # Only the first beam counts at first: all of them are the same.
    scores = jnp.full((A, width), NEVER, jnp.float32).at[:, 0].set(0.0)
    return Search(
        cache=kv_cache.init(program.cache),
        prompts=prompts,
        lengths=lengths,
        rules=rules,
        hidden=jnp.zeros((B, program.width), program.dtype),
        scores=scores,
        trail=Trail(jnp.zeros((steps, B), jnp.int32), jnp.zeros((steps, B), jnp.int32)),
        done=Hypotheses(jnp.full((A, width), NEVER, jnp.float32), none > 0, none, none, none),
        open=lengths > 0,
        made=jnp.int32(0),
        step=jnp.int32(0),
        starved=jnp.bool_(False),
        stats=Statistics(*(jnp.int32(0) for _ in range(4))),
    )


@functools.partial(jax.jit, static_argnames=("program", "packed"), donate_argnames=("state",))
def search(program: Program, params: Params, state: Search, *, packed: int) -> Search:
    """Runs a search to its end in one device program, the state donated and updated in place.

    Args:
      program: the static part.
      params: the model's parameters.
      state: from `start`.
      packed: T, static; tokens of a step that computes prompts.

    Returns:
      The state with all hypotheses, and no page held.
    """

    def searched(state: Search, params: Params) -> Search:
        state = prefill(program, params, state, packed)
        state = choose(program, params, state)
        return jax.lax.while_loop(
            lambda state: state.open.any(),
            lambda state: choose(program, params, extend(program, params, state)),
            state,
        )

    where = jax.tree.map(lambda _: PartitionSpec(), state)
    where = where.replace(cache=kv_cache.with_shardings(program.cache, state.cache, where.cache, SEQ))
    over = {SEQ} if program.cache.seq > 1 else set()
    return sharding.manual(program.mesh, over, searched, (where, PartitionSpec()), where)(state, params)


def prefill(program: Program, params: Params, state: Search, packed: int) -> Search:
    """Computes every prompt once, `packed` tokens a step, and lets all beams of a prompt hold its pages."""
    B, W = program.cache.slots, state.width
    leader = jnp.arange(B, dtype=jnp.int32) // W * W
    leads = leader == jnp.arange(B, dtype=jnp.int32)
    goal = jnp.where(leads, jnp.repeat(state.lengths, W), 0)

    def prompt_token(slot: jax.Array, position: jax.Array) -> jax.Array:
        return state.prompts.at[slot // W, position].get(mode="clip")

    def some(state: Search) -> Search:
        pending = goal - _held(state)
        before = jnp.cumsum(pending, dtype=jnp.int32) - pending
        tokens = jnp.clip(packed - before, 0, pending)
        return _compute(program, params, state, tokens, prompt_token, packed, packed)

    state = jax.lax.while_loop(lambda state: (_held(state) < goal).any() & ~state.starved, some, state)
    source = jnp.where(leads, B, leader)
    cache = kv_cache.fork(program.cache, state.cache, source, _held(state)[leader], state.step)
    return state.replace(cache=cache, hidden=state.hidden[leader])


def extend(program: Program, params: Params, state: Search) -> Search:
    """Hands the slots to the beams that were chosen, and computes the tokens that they go on with."""
    W, B = state.width, program.cache.slots
    source, token = state.trail.source[state.made - 1], state.trail.token[state.made - 1]
    cache = kv_cache.reparent(program.cache, state.cache, source, state.step)
    goes = jnp.repeat(state.open, W)
    parents = jnp.zeros((B,), jnp.int32).at[jnp.where(goes, source, B)].set(1, mode="drop").sum(dtype=jnp.int32)
    forks = state.stats.forks + goes.sum(dtype=jnp.int32) - parents
    state = state.replace(cache=cache, stats=state.stats.replace(forks=forks))
    return _compute(program, params, state, goes.astype(jnp.int32), lambda slot, _: token[slot], B, 1)


def _compute(
    program: Program,
    params: Params,
    state: Search,
    tokens: jax.Array,
    token_at: Callable[[jax.Array, jax.Array], jax.Array],
    packed: int,
    max_query: int,
) -> Search:
    """Makes room for the next tokens (B,) int32 of every slot and computes them; `hidden` is their last one's.

    `token_at` gives the token ids (T,) at slots (T,) and positions (T,) int32.
    """
    config, stats = program.cache, state.stats
    clock, pinned_too = jnp.int32(0), jnp.bool_(False)
    reserved = kv_cache.reserve(config, state.cache, None, tokens, state.step, clock, pinned_too, packed)
    kv = kv_cache.copy_pages(config, kv_cache.pages_of(reserved.cache), reserved.copies, program.backend)
    cache = kv_cache.with_pages(reserved.cache, kv)
    tokens = jnp.where(reserved.starved, 0, tokens)
    ends = jnp.cumsum(tokens, dtype=jnp.int32)
    index = jnp.arange(packed, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    safe = jnp.minimum(slot, config.slots - 1)
    position = cache.groups[0].table.lengths[safe] - ends[safe] + index
    row_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    placement = Placement(slot, position, row_starts, max_query)
    before = cache.groups[0].table.lengths - tokens
    cache, hidden = compute_last(program, params, cache, token_at(safe, position), placement)
    cache = kv_cache.trim(config, cache, before, state.step)
    return state.replace(
        cache=cache,
        hidden=jnp.where(tokens[:, None] > 0, hidden, state.hidden),
        step=state.step + 1,
        starved=state.starved | reserved.starved.any(),
        stats=stats.replace(
            computed=stats.computed + tokens.sum(dtype=jnp.int32),
            copied=stats.copied + reserved.copies[0].count,
            peak=jnp.maximum(stats.peak, config.pool_pages - cache.groups[0].pool.height),
        ),
    )


def choose(program: Program, params: Params, state: Search) -> Search:
    """Scores every next token of every beam; the best end as hypotheses or go on. Prompts that are done free pages."""
    A, W = state.scores.shape
    B, rules, made = A * W, state.rules, state.made + 1
    logprobs = jax.nn.log_softmax(program.unembed(params, program.config, state.hidden))
    V = logprobs.shape[1]
    totals = (state.scores[:, :, None] + logprobs.reshape(A, W, V)).reshape(A, W * V)
    # So many that W can go on, if every beam has all its ends among them.
    total, index = jax.lax.top_k(totals, max(2, 1 + rules.eos.shape[0]) * W)
    index = index.astype(jnp.int32)
    first = jnp.arange(A, dtype=jnp.int32)[:, None] * W
    source, token = first + index // V, index % V
    ends = (token[:, :, None] == rules.eos[None, None]).any(axis=2) | (made >= rules.limit)

    done = _with_ended(state, total, source, token, ends & (jnp.arange(total.shape[1]) < W)[None], made)
    scores, place = jax.lax.top_k(total + jnp.where(ends, jnp.float32(NEVER), 0.0), W)
    still = state.open & ~state.starved & (made < rules.limit)
    still &= _may_improve(rules, scores[:, 0], done, made) & ~(rules.early & done.ended.all(axis=1))
    going = jnp.repeat(still, W)
    source = jnp.where(going, jnp.take_along_axis(source, place, axis=1).reshape(B), jnp.arange(B, dtype=jnp.int32))
    token = jnp.take_along_axis(token, place, axis=1).reshape(B)
    trail = Trail(state.trail.token.at[made - 1].set(token), state.trail.source.at[made - 1].set(source))
    cache, _ = kv_cache.release(
        program.cache, state.cache, None, ~going, state.step, jnp.int32(0), lambda slot, column: slot
    )
    return state.replace(cache=cache, scores=scores, trail=trail, done=done, open=still, made=made)


def _with_ended(
    state: Search, total: jax.Array, source: jax.Array, token: jax.Array, ended: jax.Array, made: jax.Array
) -> Hypotheses:
    """The W best of the hypotheses so far and of candidates (A, X) that ended with `made` tokens, in open prompts."""
    ended &= state.open[:, None]
    score = total / made.astype(jnp.float32) ** state.rules.length_penalty + jnp.where(ended, 0.0, jnp.float32(NEVER))
    new = Hypotheses(score, ended, jnp.full_like(token, made), source, token)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), state.done, new)
    _, best = jax.lax.top_k(both.score, state.width)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, best, axis=1), both)


def _may_improve(rules: Rules, best: jax.Array, done: Hypotheses, made: jax.Array) -> jax.Array:
    """(A,) bool: whether the best beam, of sum (A,) float32, could become better than the worst of W hypotheses.

    At which length its sum is judged is a rule of thumb, transformers' own: log-probabilities to come count as 0.
    """
    length = jnp.where(rules.patient & (rules.length_penalty > 0), rules.limit, made).astype(jnp.float32)
    worst = jnp.where(done.ended.all(axis=1), done.score.min(axis=1), jnp.float32(NEVER))
    return best / length**rules.length_penalty > worst


def _held(state: Search) -> jax.Array:
    """(B,) int32: tokens of each slot in the cache."""
    return state.cache.groups[0].table.lengths


@jax.jit
def outputs(state: Search) -> jax.Array:
    """(A, W, N) int32: the tokens of the hypotheses, the last one included; 0 behind it."""
    done, trail = state.done, state.trail

    def back(slot: jax.Array, choice: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        place, token, source = choice
        inside = place < done.length - 1
        tokens = jnp.where(inside, token[slot], jnp.where(place == done.length - 1, done.token, 0))
        return jnp.where(inside, source[slot], slot), tokens

    places = jnp.arange(trail.token.shape[0], dtype=jnp.int32)
    _, tokens = jax.lax.scan(back, done.slot, (places, trail.token, trail.source), reverse=True)
    return jnp.moveaxis(tokens, 0, 2)


# --- on the host -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """An output of a search.

    Attributes:
      tokens: the one that ended it included.
      finish_reason: "stop" or "length".
      score: sum of log-probabilities over length ** length_penalty.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    score: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shapes of a search. Equal plans of a model share one compiled program.

    Attributes:
      cache: of A·W slots.
      prompts: A, prompts that are searched together.
      width: W.
      packed: T of a step that computes prompts.
      steps: N.
      backend: attention backend.
    """

    cache: CacheConfig
    prompts: int
    width: int
    packed: int
    steps: int
    backend: str = "xla"


def check(width: Any, n: Any, length_penalty: Any, early_stopping: Any) -> None:
    """Raises RequestError for arguments of `LLM.beam_search` that mean nothing."""
    if not _is_count(width):
        raise RequestError(f"width is {width!r}: give a whole number of beams, at least 1.")
    if not _is_count(n) or n > width:
        raise RequestError(
            f"n is {n!r}, and a search of width {width} finds {width}: give a whole number from 1 to it."
        )
    real = isinstance(length_penalty, numbers.Real) and not isinstance(length_penalty, bool)
    if not real or not -8 <= float(length_penalty) <= 8:
        raise RequestError(f"length_penalty is {length_penalty!r}: give a number from -8 to 8.")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise RequestError(f"early_stopping is {early_stopping!r}: give False, True or 'never'.")


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def rules(limit: int, eos: Sequence[int], length_penalty: float = 1.0, early_stopping: bool | str = False) -> Rules:
    """Rules of Python values, whose meaning is that of transformers' generation config."""
    return Rules(
        limit=jnp.int32(limit),
        length_penalty=jnp.float32(length_penalty),
        early=jnp.bool_(early_stopping is True),
        patient=jnp.bool_(early_stopping == "never"),
        eos=jnp.asarray(list(eos), jnp.int32),
    )


def pages_for(config: CacheConfig, prompt: int, limit: int, width: int) -> int:
    """Most pages that the beams of a prompt of so many tokens can need at once.

    Full pages of the prompt are there once, what follows once a beam; and where beams share an unfilled page, `reserve`
    asks for one page more than it takes: of up to width / 2 pages at once.
    """
    shared = prompt // config.rows
    own = -(-(prompt + limit - 1) // config.rows) - shared
    return shared + width * own + width // 2


def plan(model: Model, prompts: Sequence[Sequence[int]], width: int, limit: int, options: Options) -> Plan:
    """Shapes for these prompts; sizes are powers of two where they can be, so that few get compiled.

    Args:
      model: the model.
      prompts: token ids, at least one prompt.
      width: W.
      limit: tokens of an output at most.
      options: `slots` and `kv_bytes` say how many prompts are searched together.

    Raises:
      RequestError: `options.kv_bytes` does not hold the beams of the longest prompt, should none share what it makes.
    """
    longest = max(map(len, prompts))
    together = max(1, min(plans.power_of_two(len(prompts)), options.slots // width))
    config = plans.cache_config(model, together * width, longest + limit, options)
    worst = max(pages_for(config, len(prompt), limit, width) for prompt in prompts)
    affordable = options.kv_bytes // config.page_bytes
    if affordable < worst:
        raise RequestError(
            f"kv_bytes is {options.kv_bytes}, and {width} beams of a prompt of {longest} tokens and up to {limit} new "
            f"ones may need {worst * config.page_bytes} bytes of K and V: raise kv_bytes, or lower width or "
            "max_new_tokens."
        )
    together = min(together, affordable // worst)
    pages = min(affordable, plans.power_of_two(together * worst))
    config = dataclasses.replace(config, slots=together * width, pages=pages)
    packed = min(options.packed, max(64, plans.power_of_two(sum(map(len, prompts)))))
    return Plan(config, together, width, packed, plans.power_of_two(limit), plans.backend_of(model, options))


def begin(model: Model, shapes: Plan, prompts: Sequence[Sequence[int]], rules: Rules) -> tuple[Program, Search]:
    """The program of a plan, and a search of up to A prompts that has not begun."""
    program = plans.program_of(model, shapes.cache, backend=shapes.backend, share=False)
    padded = np.zeros((shapes.prompts, shapes.cache.capacity), np.int32)
    lengths = np.zeros((shapes.prompts,), np.int32)
    for a, prompt in enumerate(prompts):
        padded[a, : len(prompt)], lengths[a] = prompt, len(prompt)
    arrays = jnp.asarray(padded), jnp.asarray(lengths)
    return program, start(program, *arrays, rules, width=shapes.width, steps=shapes.steps)


def finished(state: Search, eos: Sequence[int]) -> list[list[Hypothesis]]:
    """The hypotheses of every prompt of a search that has ended, best first."""
    tokens, done = jax.device_get((outputs(state), state.done))
    return [
        [
            Hypothesis(ids, "stop" if ids[-1] in eos else "length", float(score))
            for ids, score in zip(map(_tuple, row, lengths), scores, strict=True)
        ]
        for row, lengths, scores, asked in zip(tokens, done.length, done.score, state.lengths.tolist(), strict=True)
        if asked
    ]


def _tuple(row: np.ndarray, length: np.ndarray) -> tuple[int, ...]:
    return tuple(row[:length].tolist())


def run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    width: int,
    limit: int,
    options: Options,
    *,
    eos: Sequence[int],
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[list[Hypothesis]]:
    """Searches any number of prompts, as many at once as slots and memory allow.

    Args:
      model: the model.
      prompts: token ids, none of them empty.
      width: W.
      limit: tokens of an output at most.
      options: how jobs are run.
      eos: tokens that end an output.
      length_penalty: as in `Rules`.
      early_stopping: True ends a prompt's search at `width` hypotheses; False when its best beam would not be among
        them if it ended now; "never" when it would not even if no token up to the limit cost anything.

    Returns:
      W hypotheses of each prompt, best first.

    Raises:
      RequestError: the memory for K and V is too small (see `plan`).
    """
    if not prompts:
        return []
    shapes = plan(model, prompts, width, limit, options)
    asked = rules(limit, eos, length_penalty, early_stopping)
    found: list[list[Hypothesis]] = []
    for first in range(0, len(prompts), shapes.prompts):
        program, state = begin(model, shapes, prompts[first : first + shapes.prompts], asked)
        state = search(program, model.params, state, packed=shapes.packed)
        assert not state.starved, "pages ran out, which `pages_for` rules out"
        found += finished(state, eos)
    return found
