"""Who runs: pure functions from state to state, or to a plan, all inside the loop.

admit     waiting requests enter idle slots, in order, while pages suffice; slots take over pages computed before
schedule  who computes how many tokens in this step
register  filled pages enter the prefix index
preempt   the newest gives way when pages run out
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from kvjax import cache as kv_cache
from kvjax import evicting, prefix, sampling
from kvjax.cache import CacheConfig
from kvjax.control import when
from kvjax.requests import PIN_SECONDS, RUNNING, TOO_LONG, WAITING
from kvjax.state import EngineState, Policy, Program, cached, known, of_slots, pending, running, with_status
from kvjax.types import KVSpec


class Plan(struct.PyTreeNode):
    """What a step computes.

    Attributes:
      tokens: (B,) int32 tokens of each slot that enter the model.
    """

    tokens: jax.Array


# --- admission and sharing ----------------------------------------------------------------------------------------
def admit(program: Program, state: EngineState, policy: Policy, packed: int) -> EngineState:
    """Lets waiting requests enter idle slots, and slots take over what others have computed.

    Requests enter in order, while pages suffice for what they hold and one more token. Pages that the prefix index
    has are not counted twice. Where nothing runs the first one enters whatever it needs: it gets pages by eviction,
    or ends as TOO_LONG. A request that the whole cache could not hold ends so at once.

    Newcomers, and slots whose prompt is still computed, become owners of pages in the index that continue what they
    have; the last known token is always computed. `packed`, static: most tokens of a step.
    """
    count = (~running(state)).sum(dtype=jnp.int32)
    wanted = jnp.minimum(policy.refill, state.line.count)
    ready = (state.line.count > 0) & (count > 0) & ~state.blocked
    ready &= (count >= wanted) | (count == program.cache.slots)
    needed = ready | _prefilling(program.cache, state).any() if program.share else ready
    kv = kv_cache.pages_of(state.cache)
    state = when(needed, lambda state: _enter(program, state, policy, packed, ready), _without_kv(state))
    return state.replace(cache=kv_cache.with_pages(state.cache, kv))


def _without_kv(state: EngineState) -> EngineState:
    return state.replace(cache=kv_cache.without_pages(state.cache))


def _enter(program: Program, state: EngineState, policy: Policy, packed: int, ready: jax.Array) -> EngineState:
    config, B = program.cache, program.cache.slots
    idle = ~running(state)
    rank = jnp.where(idle & ready, jnp.cumsum(idle, dtype=jnp.int32) - 1, -1)
    request = state.line.at(rank)
    candidate = request < state.requests.status.shape[0]
    least = _least_pages(config, state, request)
    hopeless = candidate & (least > config.pool_pages)
    for spec in config.by_head:
        hopeless |= candidate & (_claims(config, state, request, spec) > evicting.pool_pages(config, spec))
    if state.index is None:
        zeros = jnp.zeros((B,), jnp.int32)
        match = _Match(state.cache.groups[0].table.pages, zeros, zeros)
        return _start(program, state, policy, packed, request, candidate, hopeless, match)[0]
    looking = _prefilling(config, state)
    first = jnp.where(looking, cached(state) // config.rows, 0)
    whose = jnp.where(looking, state.slots.request, request)
    match = _find_prefix(config, state, policy, whose, (candidate & ~hopeless) | looking, first)
    state = state.replace(cache=_with_first_table(state, match.table))
    state, admitted = _start(program, state, policy, packed, request, candidate, hopeless, match)
    state = _take_over(program, state, first, jnp.where(admitted | looking, match.last, first))
    return _fork_tails(program, state)


def _start(
    program: Program,
    state: EngineState,
    policy: Policy,
    packed: int,
    request: jax.Array,
    candidate: jax.Array,
    hopeless: jax.Array,
    match: _Match,
) -> tuple[EngineState, jax.Array]:
    """Starts the candidates (B,) bool with rows `request` (B,) that fit, in order; (B,) bool says which.

    What one takes from the free: pages that it lacks, matched pages that were free to be evicted, and one to copy
    where all of its pages were found.
    """
    config, B, Q = program.cache, program.cache.slots, state.requests.status.shape[0]
    length = state.requests.known.at[request].get(mode="clip")
    least = _least_pages(config, state, request)
    rank = jnp.cumsum(candidate, dtype=jnp.int32) - 1
    complete = match.last * config.rows >= jnp.maximum(length, 1)
    fitting = candidate & ~hopeless
    cost = jnp.where(fitting, least - match.last + match.idle + complete.astype(jnp.int32), 0)
    free = state.cache.groups[0].pool.height - _owed(config, state)
    if state.index is not None:
        short = cost.sum(dtype=jnp.int32) > free
        free = jax.lax.cond(short, lambda: free + _evictable_pages(state, policy), lambda: free)
    alone = ~running(state).any()
    fits = jnp.cumsum(cost, dtype=jnp.int32) <= free
    for group, spec in enumerate(config.groups):
        if config.frees(spec):
            claim = jnp.where(fitting, _span(config, state, request, spec), 0)
            fits &= jnp.cumsum(claim, dtype=jnp.int32) <= _unclaimed(config, state, group, packed)
    fits |= alone & (rank == 0)
    for spec in config.by_head:
        claim = jnp.where(fitting, _claims(config, state, request, spec), 0)
        taken_pages = jnp.where(running(state), _claims(config, state, state.slots.request, spec, cached(state)), 0)
        left = evicting.pool_pages(config, spec) - taken_pages.sum(dtype=jnp.int32)
        fits &= jnp.cumsum(claim, dtype=jnp.int32) <= left
    refused = jnp.where(fitting & ~fits, rank, B).min()
    taken = candidate & (rank < refused)
    admitted = taken & ~hopeless
    gone = jnp.where(taken & hopeless, request, Q)
    moved = taken.sum(dtype=jnp.int32)
    state = state.replace(
        requests=state.requests.replace(status=state.requests.status.at[gone].set(TOO_LONG, mode="drop")),
        slots=state.slots.replace(request=jnp.where(admitted, request, state.slots.request)),
        line=state.line.replace(head=(state.line.head + moved) % Q, count=state.line.count - moved),
        blocked=state.blocked | ((refused < B) & ~alone),
    )
    state = with_status(state, admitted, jnp.int32(RUNNING))
    return _count_history(state, admitted), admitted


def _least_pages(config: CacheConfig, state: EngineState, request: jax.Array) -> jax.Array:
    """(B,) int32: pages for what the requests (B,) know and one token more; the last one of all needs no row."""
    known, limit = state.requests.known.at[request].get(mode="clip"), state.requests.limit.at[request].get(mode="clip")
    return kv_cache.pages_for(jnp.minimum(known + 1, limit - 1), config.rows)


def _owed(config: CacheConfig, state: EngineState) -> jax.Array:
    """() int32: pages that running prompts have yet to take: free, but not for others."""
    need = _least_pages(config, state, state.slots.request) - kv_cache.pages_for(cached(state), config.rows)
    return jnp.where(running(state), need, 0).sum(dtype=jnp.int32)


def _span(config: CacheConfig, state: EngineState, request: jax.Array, spec: KVSpec) -> jax.Array:
    """(B,) int32: pages that the requests (B,) come to hold in a group that gives back what is behind its window."""
    limit = state.requests.limit.at[request].get(mode="clip")
    return jnp.minimum(kv_cache.pages_for(limit, config.rows), config.span(spec))


def _unclaimed(config: CacheConfig, state: EngineState, group: int, packed: int) -> jax.Array:
    """() int32: pages of such a group that neither running requests nor the tokens of one step may come to hold. So
    none of them has to give way for its window."""
    claims = jnp.where(running(state), _span(config, state, state.slots.request, config.groups[group]), 0)
    return config.pool_of(group) - config.prompt_pages(packed) - claims.sum(dtype=jnp.int32)


def _claims(
    config: CacheConfig, state: EngineState, request: jax.Array, spec: KVSpec, computed: jax.Array | None = None
) -> jax.Array:
    """(B,) int32: pages that the requests (B,) may come to hold for layers whose rows are evicted."""
    context, limit = (x.at[request].get(mode="clip") for x in (state.requests.context, state.requests.limit))
    return evicting.claims(config, spec, context, limit, jnp.zeros_like(context) if computed is None else computed)


def _evictable_pages(state: EngineState, policy: Policy) -> jax.Array:
    assert state.index is not None
    refs = state.cache.groups[0].pool.refs
    return prefix.evictable(state.index, refs, policy.clock, jnp.bool_(False)).sum(dtype=jnp.int32)


def _count_history(state: EngineState, admitted: jax.Array) -> EngineState:
    """Counts of what the admitted requests hold, where penalties need them."""
    if state.slots.counts is None:
        return state
    requests = state.requests
    tokens = of_slots(state, requests.tokens.reshape(-1, requests.capacity))
    history = sampling.History(tokens, of_slots(state, requests.prompt), known(state))
    old, new = state.slots.counts, sampling.recount(history, state.slots.counts.counts.shape[1])
    counts = jax.tree.map(lambda o, n: jnp.where(admitted[:, None], n, o), old, new)
    return state.replace(slots=state.slots.replace(counts=counts))


class _Match(NamedTuple):
    """Pages found in the index.

    Attributes:
      table: (B, M) int32 block table of group 0, with them in columns [first, last).
      last: (B,) int32.
      idle: (B,) int32 how many of them nobody uses.
    """

    table: jax.Array
    last: jax.Array
    idle: jax.Array


def _with_first_table(state: EngineState, pages: jax.Array) -> kv_cache.Cache:
    first, *others = state.cache.groups
    return state.cache.replace(groups=(first.replace(table=first.table.replace(pages=pages)), *others))


def _page_tokens(state: EngineState, config: CacheConfig, request: jax.Array, page: jax.Array) -> jax.Array:
    """(B, R) int32: tokens on the page-th page (B,) of each request (B,)."""
    position = page[:, None] * config.rows + jnp.arange(config.rows, dtype=jnp.int32)[None, :]
    return state.requests.tokens.at[state.requests.place(request[:, None], position)].get(mode="clip")


def _find_prefix(
    config: CacheConfig, state: EngineState, policy: Policy, request: jax.Array, wanted: jax.Array, first: jax.Array
) -> _Match:
    """Looks page after page, for all slots at once, from page `first` (B,) of their requests on."""
    index, pool = state.index, state.cache.groups[0].pool
    assert index is not None
    P, M = config.pool_pages, config.pages_per_slot
    row = jnp.arange(config.slots, dtype=jnp.int32)
    full = jnp.minimum(
        state.requests.hashed.at[request].get(mode="clip"),
        state.requests.known.at[request].get(mode="clip") // config.rows,
    )

    def look(held: tuple[jax.Array, _Match]) -> tuple[jax.Array, _Match]:
        active, match = held
        j = match.last
        digest = state.requests.digests.at[request, j].get(mode="clip")
        before = match.table[row, jnp.maximum(j - 1, 0)]
        tokens = _page_tokens(state, config, request, j)
        page = prefix.find(index, pool.refs, policy.clock, digest, tokens, jnp.where(j > 0, before, P))
        found = active & (page < P)
        table = match.table.at[row, jnp.where(found, j, M)].set(page, mode="drop")
        unused = found & (pool.refs.at[page].get(mode="clip") == 1)
        last = j + found.astype(jnp.int32)
        return found & (last < full), _Match(table, last, match.idle + unused.astype(jnp.int32))

    start = _Match(state.cache.groups[0].table.pages, first, jnp.zeros_like(first))
    windows = [g for g, spec in enumerate(config.groups) if config.frees(spec)]
    if not windows:
        _, match = jax.lax.while_loop(lambda held: held[0].any(), look, (wanted & (first < full), start))
        return match

    def look_in_windows(held: tuple[jax.Array, _Match, _Match, list[jax.Array]]):
        """Goes on as before, but what counts is the last page with which every window is filled."""
        active, match, best, rows = held
        before = match.last
        active, match = look((active, match))
        page = match.table[row, jnp.maximum(match.last - 1, 0)]
        complete = match.last > before
        for i, g in enumerate(windows):
            there = index.sisters.at[page, g - 1].get(mode="fill", fill_value=kv_cache.NOWHERE) < kv_cache.NOWHERE
            rows[i] = jnp.where(match.last > before, jnp.where(there, rows[i] + 1, 0), rows[i])
            # The last known token is computed again, so the window is that of the token before the end of the page.
            needed = match.last - config.first_column(config.groups[g], match.last * config.rows - 1)
            complete &= rows[i] >= needed
        best = jax.tree.map(lambda new, old: jnp.where(_as(complete, new), new, old), match, best)
        return active, match, best, rows

    held = [first - config.first_column(config.groups[g], first * config.rows) for g in windows]
    _, _, match, _ = jax.lax.while_loop(
        lambda held: held[0].any(), look_in_windows, (wanted & (first < full), start, start, held)
    )
    return match


def _as(flag: jax.Array, x: jax.Array) -> jax.Array:
    """(B,) as (B, 1, …), of as many axes as x."""
    return flag.reshape(-1, *(1,) * (x.ndim - 1))


def _take_over(program: Program, state: EngineState, first: jax.Array, last: jax.Array) -> EngineState:
    """Makes running slots owners of the indexed pages in columns [first, last) of the first block table."""
    assert state.index is not None
    rows = jnp.where(last > first, last * program.cache.rows, 0)
    before = cached(state)
    # The last known token is always computed: its logits are needed.
    after = jnp.maximum(before, jnp.minimum(rows, known(state) - 1))
    cache = kv_cache.adopt(program.cache, state.cache, state.index, first, last, after, state.step)
    return _count_hits(state.replace(cache=cache), after - before)


def _count_hits(state: EngineState, gained: jax.Array) -> EngineState:
    """Counts (B,) int32 tokens that slots need not compute; what a request had computed before is no hit."""
    prompt = of_slots(state, state.requests.prompt)
    fresh = running(state) & (known(state) == prompt) & (of_slots(state, state.requests.preempted) == 0)
    before = of_slots(state, state.requests.hit)
    gained = jnp.where(fresh, jnp.minimum(gained, prompt - 1 - before), 0)
    return state.replace(
        requests=state.requests.replace(hit=state.requests.hit.at[state.slots.request].add(gained, mode="drop")),
        stats=state.stats.replace(hit=state.stats.hit + gained.sum(dtype=jnp.int32)),
    )


def _pin_times(config: CacheConfig, state: EngineState, policy: Policy, slot: jax.Array, page: jax.Array) -> jax.Array:
    """(W,) int32: until when the page-th pages (W,) of the slots' (W,) requests are pinned."""
    pins = state.requests.pins.at[state.slots.request.at[slot].get(mode="clip")].get(mode="clip")
    inside = (page[:, None] + 1) * config.rows <= pins
    seconds = jnp.where(inside, jnp.array(PIN_SECONDS, jnp.int32)[None, :], 0).max(axis=1)
    return jnp.where(seconds > 0, prefix.until(policy.clock, seconds), 0)


def _prefilling(config: CacheConfig, state: EngineState) -> jax.Array:
    """(B,) bool: slots with more than one token to compute, at the beginning of a page."""
    return (pending(state) > 1) & (cached(state) % config.rows == 0)


def _fork_tails(program: Program, state: EngineState) -> EngineState:
    """Slots with the prompt of another one that has computed it take its last, unfilled page by reference, too."""
    config, B, R = program.cache, program.cache.slots, program.cache.rows
    table = state.cache.groups[0].table.pages
    prompt, request = of_slots(state, state.requests.prompt), state.slots.request
    page = (prompt - 1) // R
    rest = (prompt - 1) % R
    takes = _prefilling(config, state) & (known(state) == prompt) & (cached(state) == page * R) & (rest > 0)
    gives = running(state) & (cached(state) >= prompt - 1) & ~takes

    def forked(state: EngineState) -> EngineState:
        tail = of_slots(state, state.requests.tail)
        same = (tail[:, None, :] == tail[None, :, :]).all(axis=-1) & (prompt[:, None] == prompt[None, :])
        same &= takes[:, None] & gives[None, :]
        for spec in config.groups:  # who has gone on may have given back what is behind its window
            given = config.first_column(spec, cached(state))
            same &= given[None, :] <= jnp.minimum(page, config.first_column(spec, prompt - 1))[:, None]
        source = same.argmax(axis=1).astype(jnp.int32)
        # The digest is no proof: the page before must be the same one, or the same namespace, and the tokens equal.
        column = jnp.maximum(page - 1, 0)[:, None]
        mine = jnp.take_along_axis(table, column, axis=1)[:, 0]
        theirs = jnp.take_along_axis(table[source], column, axis=1)[:, 0]
        root = of_slots(state, state.requests.root)
        agree = jnp.where(page > 0, mine == theirs, (root == root[source]).all(axis=1))
        a = _page_tokens(state, config, request, page)
        b = _page_tokens(state, config, request.at[source].get(mode="clip"), page)
        agree &= ((a == b) | (jnp.arange(R, dtype=jnp.int32)[None, :] >= rest[:, None])).all(axis=1)
        chosen = same.any(axis=1) & agree
        cache = kv_cache.fork(config, state.cache, jnp.where(chosen, source, B), prompt - 1, state.step)
        return _count_hits(state.replace(cache=cache), jnp.where(chosen, rest, 0))

    return when(takes.any() & gives.any(), forked, state)


# --- the plan ---------------------------------------------------------------------------------------------------
def schedule(program: Program, state: EngineState, budget: int) -> Plan:
    """Decode rows first, then prompts, oldest first, up to `budget` ≥ B tokens; one token a slot where it is B.

    A prompt that does not fit whole stops at the end of a page, if it reaches one. One whose next page is being
    computed by another slot waits for it.
    """
    waiting = pending(state)
    if budget == program.cache.slots:
        return Plan(jnp.minimum(waiting, 1))
    decode = waiting == 1
    plan = jnp.where(decode, 1, 0)
    prompts = waiting > 1
    return Plan(jax.lax.cond(prompts.any(), lambda: plan + _chunks(program, state, prompts, budget), lambda: plan))


def _chunks(program: Program, state: EngineState, prompts: jax.Array, budget: int) -> jax.Array:
    R, length = program.cache.rows, cached(state)
    waiting = pending(state)
    if program.share:
        prompts &= ~_follows(program.cache, state, prompts)
    asked = jnp.where(prompts, waiting, 0)
    if program.cache.eviction is not None:  # rows are evicted between two steps
        cuts = program.cache.eviction.next_cut(of_slots(state, state.requests.context), length)
        asked = jnp.minimum(asked, cuts - length)
    age = of_slots(state, state.requests.order)
    by_age = jnp.argsort(jnp.where(prompts, age, jnp.int32(2**31 - 1)))
    ahead = jnp.cumsum(asked[by_age], dtype=jnp.int32) - asked[by_age]
    left = budget - (waiting == 1).sum(dtype=jnp.int32) - jnp.zeros_like(ahead).at[by_age].set(ahead)
    given = jnp.clip(left, 0, asked)
    whole_pages = (length + given) // R * R - length
    return jnp.where((given < asked) & (whole_pages > 0), whole_pages, given)


def _follows(config: CacheConfig, state: EngineState, prompts: jax.Array) -> jax.Array:
    """(B,) bool: slots at the beginning of a page that another slot, further on or older, is about to compute."""
    length, request = cached(state), state.slots.request
    page = length // config.rows
    full = (page + 1) * config.rows <= jnp.minimum(known(state), of_slots(state, state.requests.hashed) * config.rows)
    digest = state.requests.digests.at[request, page].get(mode="clip")
    key = jnp.where(full[:, None], digest, of_slots(state, state.requests.tail))
    valid = prompts & (full | (known(state) == of_slots(state, state.requests.prompt)))
    same = (key[:, None, :] == key[None, :, :]).all(axis=-1) & (full[:, None] == full[None, :])
    age = of_slots(state, state.requests.order)
    ahead = (length[None, :] > length[:, None]) | ((length[None, :] == length[:, None]) & (age[None, :] < age[:, None]))
    return ((same & ahead & valid[None, :]).any(axis=1)) & valid & (length % config.rows == 0)


# --- giving way -------------------------------------------------------------------------------------------------
def preempt(state: EngineState, starved: jax.Array, ended: jax.Array) -> tuple[EngineState, jax.Array]:
    """Where pages ran out, the newest request goes back to the front of the line; the last one left ends TOO_LONG.

    Args:
      state: the state.
      starved: (B,) bool running slots that got no page.
      ended: (B,) bool running slots whose requests ended in this step: they are about to give back their pages.

    Returns:
      The state, and (B,) bool the slots that give way.
    """
    active = running(state)
    age = jnp.where(active, of_slots(state, state.requests.order), -1)
    # Pages of a request that ended are free in the next step: nobody gives way for them.
    newest = active & (age == age.max()) & starved.any() & ~ended.any()
    last = active.sum(dtype=jnp.int32) == 1
    state = with_status(state, newest, jnp.where(last, TOO_LONG, WAITING).astype(jnp.int32))
    Q = state.requests.status.shape[0]
    requeued = jnp.where(newest & ~last, state.slots.request, Q)
    moved = (requeued < Q).any().astype(jnp.int32)
    head = (state.line.head - moved) % Q
    rows = state.line.rows.at[jnp.where(moved > 0, head, Q)].set(requeued.min(), mode="drop")
    requests = state.requests.replace(preempted=state.requests.preempted.at[requeued].add(1, mode="drop"))
    stats = state.stats.replace(preempted=state.stats.preempted + moved)
    waiting = state.line.replace(rows=rows, head=head, count=state.line.count + moved)
    return state.replace(requests=requests, line=waiting, stats=stats), newest


def vacate(program: Program, state: EngineState, policy: Policy, gone: jax.Array) -> EngineState:
    """Frees the slots in (B,) bool `gone`; pages that the prefix index owns stay, and live and are pinned from now."""

    def pinned(slot: jax.Array, column: jax.Array) -> jax.Array:
        return _pin_times(program.cache, state, policy, slot, column)

    live = prefix.until(policy.clock, policy.ttl)
    cache, index = kv_cache.release(program.cache, state.cache, state.index, gone, state.step, live, pinned)
    return state.replace(
        cache=cache,
        index=index,
        slots=state.slots.replace(request=jnp.where(gone, state.requests.status.shape[0], state.slots.request)),
        blocked=state.blocked & ~gone.any(),
    )


def register(program: Program, state: EngineState, policy: Policy, before: jax.Array) -> EngineState:
    """Enters the pages that were filled since the lengths were `before` (B,) int32 into the prefix index.

    A page whose tokens the index has already is swapped for that one, so that equal prefixes lie in equal pages.
    """
    if state.index is None:
        return state
    config = program.cache
    first, last = before // config.rows, jnp.where(running(state), cached(state), 0) // config.rows
    kv = kv_cache.pages_of(state.cache)
    state = when((first < last).any(), lambda state: _register(program, state, policy, first, last), _without_kv(state))
    return state.replace(cache=kv_cache.with_pages(state.cache, kv))


def _register(program: Program, state: EngineState, policy: Policy, first: jax.Array, last: jax.Array) -> EngineState:
    """Page after page of each slot, all slots at once; newcomers that meet in a bucket take turns."""

    def some_left(held: tuple[jax.Array, EngineState]) -> jax.Array:
        return (held[0] < last).any()

    def enter_next(held: tuple[jax.Array, EngineState]) -> tuple[jax.Array, EngineState]:
        column, state = held
        state, done = _register_column(program, state, policy, column, column < last)
        return column + done.astype(jnp.int32), state

    _, state = jax.lax.while_loop(some_left, enter_next, (first, state))
    return state


def _register_column(
    program: Program, state: EngineState, policy: Policy, column: jax.Array, wanted: jax.Array
) -> tuple[EngineState, jax.Array]:
    """Enters one page of each slot; (B,) bool says whose turn is over."""
    config, request, index = program.cache, state.slots.request, state.index
    assert index is not None
    P, M, R, B = config.pool_pages, config.pages_per_slot, config.rows, config.slots
    row = jnp.arange(B, dtype=jnp.int32)
    pages = state.cache.groups[0].table.pages
    page = pages[row, jnp.minimum(column, M - 1)]
    parent = jnp.where(column > 0, pages[row, jnp.maximum(column - 1, 0)], P)
    tokens = _page_tokens(state, config, request, column)
    position = column[:, None] * R + jnp.arange(R, dtype=jnp.int32)[None, :]
    before = jnp.where(
        (column > 0)[:, None],
        state.requests.digests.at[request, column - 1].get(mode="clip"),
        of_slots(state, state.requests.root),
    )
    digest = before + prefix.token_digests(tokens, position).sum(axis=1, dtype=jnp.uint32)
    noted = jnp.where(wanted, request, state.requests.status.shape[0])
    requests = state.requests.replace(
        digests=state.requests.digests.at[noted, column].set(digest, mode="drop"),
        hashed=state.requests.hashed.at[noted].max(column + 1, mode="drop"),
    )
    state = state.replace(requests=requests)

    refs = state.cache.groups[0].pool.refs
    chained = wanted & ((column == 0) | prefix.registered(index, parent)) & ~prefix.registered(index, page)
    twin = jnp.where(chained, prefix.find(index, refs, policy.clock, digest, tokens, parent), P)
    cache, index = kv_cache.swap(config, state.cache, index, column, twin, state.step)
    new = prefix.Entry(
        page=page,
        digest=digest,
        tokens=tokens,
        parent=parent,
        depth=column,
        sisters=kv_cache.sisters(cache, row, column),
    )
    index, entered, full = prefix.enter(index, new, chained & (twin == P))
    cache = kv_cache.own(cache, jnp.where(entered, page, P), new.sisters, state.step)
    done = wanted & (~chained | (twin < P) | entered | full)
    blocked = state.blocked & ~(twin < P).any()  # a page was given back
    return state.replace(cache=cache, index=index, blocked=blocked), done
