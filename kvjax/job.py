"""A batch job, seen from the host: requests wait, enter free slots between segments, and leave as outputs.

Between two looks of the host the device runs alone: `engine.run` computes prompts, decodes, stops and frees pages.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import engine, sampling
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.errors import RequestError
from kvjax.pallas_kernels import default_layout
from kvjax.sampling_params import SamplingParams
from kvjax.state import IDLE, PREEMPTED, RUNNING, STOPPED, Admission, EngineState, Program
from kvjax.stops import AutomatonBank
from kvjax.types import Family, Params


@dataclasses.dataclass(frozen=True)
class Model:
    """What a job needs of a loaded model.

    Attributes:
      family: its functions.
      config: the family's config.
      params: the parameters, on the devices.
      eos: tokens that end an output.
      token_bytes: what each of the V tokens adds to the text, for stop strings.
      dtype: dtype name of the parameters and activations.
      storage: dtype name of the cached K and V.
      stacked: whether the layers are stacked for a scan.
    """

    family: Family
    config: Any
    params: Params
    eos: tuple[int, ...]
    token_bytes: Sequence[bytes]
    dtype: str
    storage: str
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """How a job is run; none of these changes a token of its outputs.

    Attributes:
      slots: B, most requests that run at once.
      rows: R, tokens a page holds.
      kv_bytes: bound on the memory of all K and V.
      packed: T, most tokens of a step that computes prompts.
      segment_seconds: the host looks at the job about this often.
      backend: attention backend.
      layout: of the pages; the platform's best when None.
    """

    slots: int = 64
    rows: int = 64
    kv_bytes: int = 4 << 30
    packed: int = 512
    segment_seconds: float = 1.0
    backend: str = "xla"
    layout: str | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
      index: number of its prompt in the job; part of its random key unless it has a seed of its own.
      sample: which of the prompt's n samples it is.
      prompt: token ids, at least one.
      params: validated sampling parameters.
    """

    index: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def length(self) -> int:
        """Tokens it may come to hold."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities at one output token, under the model itself.

    Attributes:
      chosen: of the token that was generated.
      top: token id → log-probability of the likeliest tokens.
    """

    chosen: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Output:
    """What became of a request.

    Attributes:
      request: the request.
      tokens: generated token ids, the stop token included.
      finish_reason: "stop" or "length"; None while it runs.
      logprobs: one entry per token, when asked for.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What the host saw at the end of a segment.

    Attributes:
      finished: requests that ended since the last report.
      running: the tokens so far of those that run; empty unless the job is followed.
      waiting: requests that have not started, or were preempted.
      computed: tokens passed through the model since the job began, prompts included.
      preempted: how often a request had to give way because pages ran out.
    """

    finished: tuple[Output, ...]
    running: tuple[Output, ...]
    waiting: int
    computed: int
    preempted: int


@dataclasses.dataclass
class _Entry:
    """A request and what it holds while it waits: after a preemption, its output so far."""

    order: int
    request: Request
    tokens: tuple[int, ...]
    stop_state: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


def check(config: CacheConfig, request: Request, context: int) -> None:
    """Raises RequestError for a request that can never be served."""
    if not request.prompt:
        raise RequestError("The prompt is empty: give at least one token.")
    if request.length > context:
        raise RequestError(
            f"The prompt's {len(request.prompt)} tokens and max_new_tokens {request.params.max_new_tokens} exceed the "
            f"context of {context} tokens: shorten the prompt, lower max_new_tokens, or load with a larger context."
        )
    pages = -(-request.length // config.rows)
    if pages > config.pool_pages:
        raise RequestError(
            f"A request of {request.length} tokens needs {pages} pages of K and V, and kv_bytes allows "
            f"{config.pool_pages}: raise kv_bytes, or shorten the request."
        )


def plan_cache(model: Model, requests: Sequence[Request], options: Options) -> CacheConfig:
    """A cache as large as the requests can fill, within `kv_bytes`; slots and lengths rounded to powers of two.

    Few distinct shapes mean few compilations.
    """
    slots = min(options.slots, _power_of_two(len(requests)))
    longest = max(request.length for request in requests)
    per_slot = _power_of_two(-(-longest // options.rows))
    config = CacheConfig(
        model.family.kv_specs(model.config, model.storage),
        slots,
        options.rows,
        per_slot,
        stacked=model.stacked,
        layout=options.layout or default_layout(),
    )
    if model.stacked and len(config.groups) > 1:
        raise RequestError("Layers with different caches cannot be scanned: load with layers='unrolled'.")
    affordable = options.kv_bytes // config.page_bytes
    if affordable < slots * per_slot:
        config = dataclasses.replace(config, pages=affordable)
    return config


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def run(
    model: Model, requests: Sequence[Request], options: Options, *, seed: int = 0, follow: bool = False
) -> Iterator[Report]:
    """Generates all requests; yields a report after every segment.

    Args:
      model: the model.
      requests: in the order in which they start.
      options: how.
      seed: the job's, for requests without one.
      follow: whether reports hold the tokens of running requests.

    Raises:
      RequestError: a request can never be served; nothing has run then.
    """
    if not requests:
        return
    config = plan_cache(model, requests, options)
    for request in requests:
        check(config, request, model.config.context)
    bank = AutomatonBank(model.token_bytes)
    automata = [bank.add(request.params.stop) for request in requests]
    program, state = _start(model, config, requests, bank, options)
    packed = packed_tokens(config.slots, requests, options)
    widths = (state.sampler.bias_ids.shape[1], state.sampler.stop_ids.shape[1])

    waiting = collections.deque(_Entry(i, request, request.prompt) for i, request in enumerate(requests))
    slots: list[_Entry | None] = [None] * config.slots
    preempted, steps, clock = 0, 4, _Clock(options.segment_seconds)
    look = _look(config, state)
    while waiting or any(slots):
        entering = _enter(config, waiting, slots, look.free_pages)
        if entering:
            state = engine.admit(state, _admission(model, config, entering, automata, seed, widths))
            for slot, entry in entering:
                slots[slot] = entry
        # With work waiting, come back once an eighth of the slots is free: a refill costs a mixed step.
        leave = config.slots - max(1, config.slots // 8) if waiting else 0
        busy = sum(entry is not None for entry in slots)
        with clock:
            state = engine.run(
                program, model.params, state, jnp.int32(steps), jnp.int32(min(leave, busy - 1)), packed=packed
            )
            look = _look(config, state)
        steps = clock.next_steps(look.step)
        finished, running = [], []
        for slot, held in enumerate(slots):
            if held is None:
                continue
            status = int(look.status[slot])
            if status == RUNNING and not follow:
                continue
            output = _output(look, slot, held, status)
            if status == RUNNING:
                running.append(output)
                continue
            slots[slot] = None
            if status == PREEMPTED:
                preempted += 1
                tokens = held.request.prompt + output.tokens
                again = _Entry(held.order, held.request, tokens, int(look.stop_state[slot]), output.logprobs or ())
                waiting = collections.deque(sorted([*waiting, again], key=lambda e: e.order))
            else:
                finished.append(output)
        yield Report(tuple(finished), tuple(running), len(waiting), look.computed, preempted)


class _Clock:
    """Chooses how many steps a segment has, from how long the last one took."""

    def __init__(self, seconds: float):
        self.seconds, self.step, self.elapsed, self.warm = seconds, 0, 0.0, False

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.elapsed = time.monotonic() - self.began

    def next_steps(self, step: int) -> int:
        done, self.step = step - self.step, step
        first, self.warm = not self.warm, True
        if first or done == 0:  # the first segment compiles
            return 4
        return max(1, min(1024, round(self.seconds * done / self.elapsed)))


def program_of(model: Model, cache: CacheConfig, *, logprobs: int | None = None, backend: str = "xla") -> Program:
    """The static part of a loop that runs this model over such a cache; see `kvjax.state.Program`."""
    family = model.family
    return Program(
        family.forward, family.unembed, model.config, model.config.width, model.dtype, cache, logprobs, backend
    )


def _start(
    model: Model, config: CacheConfig, requests: Sequence[Request], bank: AutomatonBank, options: Options
) -> tuple[Program, EngineState]:
    params = [request.params for request in requests]
    asked = [p.logprobs for p in params if p.logprobs is not None]
    program = program_of(model, config, logprobs=max(asked, default=None), backend=options.backend)
    biases, stops = sampling.widths(params, model.eos)
    penalties = len(model.token_bytes) if any(p.penalizes for p in params) else None
    state = engine_state.init(program, jnp.asarray(bank.table()), biases=biases, stops=stops, penalties=penalties)
    return program, state


def packed_tokens(slots: int, requests: Sequence[Request], options: Options) -> int:
    """T of a mixed step: enough for the first prompts at once, a power of two, more than one token a slot."""
    prompts = sum(len(request.prompt) for request in requests[:slots])
    return max(2 * slots, min(options.packed, max(64, _power_of_two(prompts))))


def _enter(
    config: CacheConfig, waiting: collections.deque[_Entry], slots: Sequence[_Entry | None], free_pages: int
) -> list[tuple[int, _Entry]]:
    """Takes from the queue, in order, what finds a slot and pages for the tokens that it holds and one more."""
    entering = []
    for slot, taken in enumerate(slots):
        if taken is not None or not waiting:
            continue
        pages = -(-(len(waiting[0].tokens) + 1) // config.rows)
        if pages > free_pages:
            break
        free_pages -= pages
        entering.append((slot, waiting.popleft()))
    return entering


def _admission(
    model: Model,
    config: CacheConfig,
    entering: Sequence[tuple[int, _Entry]],
    automata: Sequence[int],
    seed: int,
    widths: tuple[int, int],
) -> Admission:
    entries = [entry for _, entry in entering]
    rows = sampling.pack(
        [entry.request.params for entry in entries],
        eos=model.eos,
        seed=seed,
        requests=[entry.request.index for entry in entries],
        samples=[entry.request.sample for entry in entries],
        shape=widths,
    )
    return engine_state.admission(
        config,
        [entry.tokens for entry in entries],
        [entry.request.length for entry in entries],
        rows,
        slots=[slot for slot, _ in entering],
        prompts=[len(entry.request.prompt) for entry in entries],
        order=[entry.order for entry in entries],
        automata=[automata[entry.order] for entry in entries],
        stop_states=[entry.stop_state for entry in entries],
    )


@dataclasses.dataclass(frozen=True)
class _Look:
    """Host copies of what the driver reads of a state."""

    status: np.ndarray
    known: np.ndarray
    stop_state: np.ndarray
    tokens: np.ndarray
    logprobs: Any
    free_pages: int
    step: int
    computed: int


def _look(config: CacheConfig, state: EngineState) -> _Look:
    slots = state.slots
    read = slots.status, slots.known, slots.stop_state, slots.tokens, slots.logprobs, engine.cached(state)
    # Copies: on the CPU a view would alias the buffer that the next segment overwrites.
    status, known, stop_state, tokens, logprobs, cached = jax.tree.map(np.array, read)
    free = min(int(group.pool.height) for group in state.cache.groups)
    # Running prompts take pages chunk by chunk: what they have yet to take is not free for others.
    owed = np.where(status == RUNNING, -(-(known + 1) // config.rows) - -(-cached // config.rows), 0).sum()
    return _Look(status, known, stop_state, tokens, logprobs, free - int(owed), int(state.step), int(state.computed))


def _output(look: _Look, slot: int, entry: _Entry, status: int) -> Output:
    request, known = entry.request, int(look.known[slot])
    tokens = tuple(look.tokens[slot, len(request.prompt) : known].tolist())
    reason = {STOPPED: "stop", RUNNING: None, PREEMPTED: None, IDLE: None}.get(status, "length")
    return Output(request, tokens, reason, _logprobs(look, slot, entry, known))


def _logprobs(look: _Look, slot: int, entry: _Entry, known: int) -> tuple[TokenLogprob, ...] | None:
    top = entry.request.params.logprobs
    if top is None:
        return None
    chosen, ids, values = (array[slot, len(entry.tokens) : known] for array in look.logprobs)
    new = [
        TokenLogprob(float(c), dict(zip(i[:top].tolist(), v[:top].tolist(), strict=True)))
        for c, i, v in zip(chosen, ids, values, strict=True)
    ]
    return (*entry.logprobs, *new)
