"""What a job's program looks like: the shapes of its state, from the requests that it is to serve."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kvjax import evicting, sampling, sharding, storages
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.errors import RequestError
from kvjax.eviction_rule import Eviction
from kvjax.pallas_kernels import Lanes, default_backend, default_layout
from kvjax.pallas_kernels import check as check_pages
from kvjax.pallas_kernels.rotation import hadamard
from kvjax.sampling_params import SamplingParams
from kvjax.state import EngineState, Program
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
      mesh: the shape of the mesh that the parameters are on, or None.
      eviction: what is evicted of cached rows, or None.
    """

    family: Family
    config: Any
    params: Params
    eos: tuple[int, ...]
    token_bytes: Sequence[bytes]
    dtype: str
    storage: str
    stacked: bool
    mesh: AbstractMesh | None = None
    eviction: Eviction | None = None

    @property
    def positions(self) -> str:
        """How rotary positions are scaled, "" for not at all: part of what a cached prefix depends on."""
        rope = getattr(self.config, "rope", None)
        if rope is None or rope.kind == "default":
            return ""
        return f"{rope!r} to {self.config.context}"

    @functools.cached_property
    def own_eviction(self) -> Eviction | None:
        """`eviction`, with what it has to know of this model. Raises ModelError."""
        return None if self.eviction is None else self.eviction.for_model(self.family, self.config)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a job is run; none of these changes a token of its outputs.

    Attributes:
      slots: B, most requests that run at once, in each engine (`kvjax.engines`).
      rows: R, tokens that a page holds on each chip; what the backend reads best when None. A page of a sequence that
        is dealt over n chips has n times as many.
      kv_bytes: bound on the memory of all K and V, on each chip.
      packed: T, most tokens of a step that computes prompts.
      queue: Q, requests that an engine holds, running ones included; chosen from `slots` when None.
      refill: idle slots at which waiting requests enter; an eighth of the slots when None.
      share_prefixes: whether requests share the K and V of equal beginnings.
      prefix_ttl: seconds for which a prefix can be found after its last use; None for no end.
      segment_seconds: the host looks at the job about this often.
      backend: attention backend; the platform's best when None.
      layout: of the pages; the backend's best when None.
    """

    slots: int = 64
    rows: int | None = None
    kv_bytes: int = 4 << 30
    packed: int = 512
    queue: int | None = None
    refill: int | None = None
    share_prefixes: bool = True
    prefix_ttl: float | None = None
    segment_seconds: float = 1.0
    backend: str | None = None
    layout: str | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
      index: number of its prompt in the job; part of its random key unless it has a seed of its own.
      sample: which of the prompt's n samples it is.
      prompt: token ids, at least one.
      params: validated sampling parameters.
      salt: only requests of equal salt share prefixes.
      pins: tokens at the prompt's beginning to keep for 5 minutes, and for 1 hour, of the job's clock.
    """

    index: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    pins: tuple[int, int] = (0, 0)

    @property
    def length(self) -> int:
        """Tokens it may come to hold."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shapes of a job's state. Equal plans of a model share one compiled program.

    Attributes:
      cache: of K and V.
      queue: Q.
      packed: T of a step that computes prompts.
      biases: J, width of the logit-bias lists.
      stops: Z, width of the stop-token lists.
      penalties: whether outputs are counted for penalties.
      logprobs: top log-probabilities to record, or None.
      backend: attention backend.
      share: whether prefixes are shared.
    """

    cache: CacheConfig
    queue: int
    packed: int
    biases: int
    stops: int
    penalties: bool
    logprobs: int | None
    backend: str = "xla"
    share: bool = True

    def covers(self, model: Model, request: Request) -> bool:
        """Whether a job of this plan can serve the request."""
        biases, stops = sampling.widths([request.params], model.eos)
        asked = request.params.logprobs
        return (
            request.length <= self.cache.capacity
            and biases <= self.biases
            and stops <= self.stops
            and (self.penalties or not request.params.penalizes)
            and (asked is None or (self.logprobs is not None and asked <= self.logprobs))
        )


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def check(request: Request, context: int) -> None:
    """Raises RequestError for a request that can never be served."""
    if not request.prompt:
        raise RequestError("The prompt is empty: give at least one token.")
    if request.length > context:
        raise RequestError(
            f"The prompt's {len(request.prompt)} tokens and max_new_tokens {request.params.max_new_tokens} exceed the "
            f"context of {context} tokens: shorten the prompt, lower max_new_tokens, or load with a larger context."
        )


def plan(model: Model, requests: Sequence[Request], options: Options, least: Plan | None = None) -> Plan:
    """Shapes for these requests and those of the plan `least`; sizes are powers of two, so that few get compiled.

    Args:
      model: the model.
      requests: at least one.
      options: how the job is run.
      least: a plan that this one has to cover as well.

    Raises:
      RequestError: `options.kv_bytes` does not hold a single page.
    """
    params = [request.params for request in requests]
    biases, stops = sampling.widths(params, model.eos)
    asked = [p.logprobs for p in params if p.logprobs is not None]
    penalties = any(p.penalizes for p in params)
    engines = sharding.sizes(model.mesh)["data"]
    slots = min(options.slots, power_of_two(-(-len(requests) // engines)))
    longest = max(request.length for request in requests)
    if least is not None:
        biases, stops, penalties = max(biases, least.biases), max(stops, least.stops), penalties or least.penalties
        asked += [] if least.logprobs is None else [least.logprobs]
        slots, longest = max(slots, least.cache.slots), max(longest, least.cache.capacity)
    packed = _packed(slots, requests, options, least, _unit(model))
    cache = cache_config(model, slots, longest, options, packed)
    return Plan(
        cache=cache,
        queue=_queue(cache, options),
        packed=packed,
        biases=biases,
        stops=stops,
        penalties=penalties,
        logprobs=max(asked, default=None),
        backend=backend_of(model, options),
        share=options.share_prefixes and model.eviction is None,  # what is left of a prefix depends on what followed
    )


def backend_of(model: Model, options: Options) -> str:
    """The attention backend of a job."""
    if options.backend is not None:
        return options.backend
    backend = default_backend()
    if backend == "gpu":  # whose kernels do not read every cache
        try:
            _check(model, options, backend)
        except NotImplementedError as error:
            _say_once(f"attention runs as plain XLA: {error}")
            return "xla"
    return backend


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _check(model: Model, options: Options, backend: str) -> None:
    """Raises NotImplementedError for a cache that the backend cannot read, with the reason."""
    layout, rows = options.layout or default_layout(backend), _rows(model, options, backend)
    over: Any = divided(model)
    if backend.startswith("gpu") and over["seq"] > 1:
        raise NotImplementedError("the GPU's kernels do not read sequences that are dealt over chips (mesh axis seq)")
    if backend.startswith("gpu") and model.eviction is not None and model.eviction.policy.positions == "slot":
        raise NotImplementedError("the GPU's kernels do not read parts of a sequence, as positions='slot' needs")
    config = CacheConfig(model.family.kv_specs(model.config, model.storage), 1, rows, 1, **over)
    kept = dict.fromkeys(spec for s in config.specs for spec in (s, s.recent) if spec is not None)
    for spec in map(config.on_chip, kept):
        lanes, stored = Lanes(spec.kv_heads, spec.key_dim, spec.value_dim, spec.latent), spec.stored
        if stored.codes is not None and model.eviction is not None:
            raise RequestError("Rows of packed codes are not evicted so far: choose another kv_dtype, or no eviction.")
        try:
            if stored.rotate:
                hadamard(spec.key_dim)
            check_pages(backend, layout, rows, stored.dtype.name, lanes, model.dtype, codes=stored.codes)
        except ValueError as error:  # rows or heads that the codes do not fit, whatever the backend
            raise RequestError(f"K and V cannot be stored as {model.storage}: {error}.") from error


def divided(model: Model) -> dict[str, int]:
    """How a cache is divided over the model's mesh: fields of CacheConfig."""
    axes = sharding.sizes(model.mesh)
    return {"seq": axes["seq"], "model": axes["model"], "query_heads": getattr(model.config, "heads", 0)}


def rows_of(model: Model, options: Options) -> int:
    """Tokens of a job's pages, which are shared and copied as a whole: R on each of the chips of the axis seq."""
    return _rows(model, options, backend_of(model, options)) * sharding.sizes(model.mesh)["seq"]


def _rows(model: Model, options: Options, backend: str) -> int:
    """64, and 16 where rows are evicted and each head rounds up to pages of its own. But 128 for the TPU's kernels over
    codes, whose scales they apply to so many rows at once, and where rows are evicted: what is noted of a page's rows
    takes 128 lanes there, however many they are."""
    if options.rows is not None:
        return options.rows
    codes = storages.parse(model.storage).dtype.itemsize == 1
    if backend.startswith("tpu") and (codes or model.eviction is not None):
        return 128
    return 64 if model.eviction is None else 16


def layout_of(model: Model, options: Options) -> str:
    """The layout of a job's pages."""
    return options.layout or default_layout(backend_of(model, options))


def cache_config(model: Model, slots: int, longest: int, options: Options, packed: int | None = None) -> CacheConfig:
    """A cache as large as so many sequences of this length can fill, within `kv_bytes`. Raises RequestError.

    packed: most tokens of a step; then layers with a window get pages for no more than they hold. None: for all rows.
    """
    backend = backend_of(model, options)
    try:
        _check(model, options, backend)
    except NotImplementedError as error:
        raise RequestError(f"{error}: choose other rows, another storage or layout, or backend='xla'.") from error
    over: Any = divided(model)
    rows = _rows(model, options, backend) * over["seq"]
    per_slot = power_of_two(-(-longest // rows))
    config = CacheConfig(
        model.family.kv_specs(model.config, model.storage),
        slots,
        rows,
        per_slot,
        stacked=model.stacked,
        layout=layout_of(model, options),
        eviction=model.own_eviction,
        **over,
    )
    if model.eviction is not None:
        _check_eviction(model, config, packed)
    if model.stacked and len(set(config.specs)) > 1:
        raise RequestError("Layers with different caches cannot be scanned: load with layers='unrolled'.")
    if packed is not None:
        config = _within(config, options.kv_bytes, packed)
        return _with_head_pages(config, options.kv_bytes) if config.by_head else config
    affordable = options.kv_bytes // config.page_bytes
    if affordable < 1:
        raise RequestError(
            f"kv_bytes is {options.kv_bytes}, and a page of {rows} tokens needs {config.page_bytes} bytes of "
            "K and V: raise kv_bytes."
        )
    if affordable < slots * per_slot:
        config = dataclasses.replace(config, pages=affordable)
    return config


def _check_eviction(model: Model, config: CacheConfig, packed: int | None) -> None:
    """Raises RequestError for what does not go with evicting rows."""
    if packed is None:
        raise RequestError("Beams and embeddings do not evict rows: load the model without eviction.")
    if config.seq > 1:
        raise RequestError(
            "Rows of sequences that are dealt over chips (mesh axis seq) are not evicted so far: "
            "load with a mesh of data, expert and model, or without eviction."
        )
    assert model.eviction is not None
    for spec in config.by_head:
        model.eviction.check_chips(config.parts_of(spec), spec.kv_heads)
    if any(spec.shares is not None for spec in config.specs):
        raise RequestError("Rows that several layers share are not evicted so far: load without eviction.")
    if not config.by_head:
        raise RequestError("Every layer has a window that bounds its rows already: load without eviction.")


def with_window_pages(config: CacheConfig, packed: int, share: float = 1.0) -> CacheConfig:
    """Pages for the groups that give back what is behind a window: what all slots come to hold, or a share of it, but
    one slot's at least; and those that `packed` tokens of a step open."""
    open_pages, most = config.prompt_pages(packed), config.slots * config.pages_per_slot
    spans = [config.span(spec) for spec in config.groups if config.frees(spec)]
    held = tuple(min(max(span, int(share * config.slots * span)) + open_pages, most) for span in spans)
    return dataclasses.replace(config, window_pages=held or None)


def _within(config: CacheConfig, kv_bytes: int, packed: int) -> CacheConfig:
    """The cache with as many pages of each group as `kv_bytes` holds, in the proportion in which requests take them.

    A group that gives back what is behind its window has pages for one request and a step's tokens at least, and no
    more than all slots can come to hold. Raises RequestError.
    """
    full = with_window_pages(config, packed)
    if full.group_bytes <= kv_bytes:
        return full
    groups = range(len(config.groups))
    windows = [g for g in groups if config.frees(config.groups[g])]
    page = sum(config.bytes_of(g) for g in groups if g not in windows)  # of the groups that keep every row
    open_bytes = sum(config.bytes_of(g) for g in windows) * config.prompt_pages(packed)
    config = with_window_pages(config, packed, max(0.0, (kv_bytes - open_bytes) / (full.group_bytes - open_bytes)))
    for_windows = sum(config.pool_of(g) * config.bytes_of(g) for g in windows)
    if kv_bytes < for_windows + page:
        raise RequestError(
            f"kv_bytes is {kv_bytes}, and a page of {config.rows} tokens needs {page} bytes of K and V"
            + (f", the windows of one request {for_windows}" if windows else "")
            + ": raise kv_bytes."
        )
    return dataclasses.replace(config, pages=(kv_bytes - for_windows) // page) if page else config


def _with_head_pages(config: CacheConfig, kv_bytes: int) -> CacheConfig:
    """The cache with as many pages of single heads as what is left of `kv_bytes` holds. Raises RequestError."""
    left = kv_bytes - config.group_bytes - sum(evicting.moments_bytes(config, spec) for spec in config.by_head)
    bytes_of = [evicting.page_bytes(config, spec) for spec in config.by_head]
    most = [evicting.pool_pages(config, spec) for spec in config.by_head]
    share = min(1.0, left / sum(count * size for count, size in zip(most, bytes_of, strict=True)))
    if share <= 0:
        raise RequestError(f"kv_bytes is {kv_bytes}, and windows or moments of queries take all of it: raise kv_bytes.")
    return dataclasses.replace(config, head_pages=tuple(int(count * share) for count in most))


def page_bytes(config: CacheConfig) -> np.ndarray:
    """(G,) int64 bytes of a page in all its layers on each chip, scales included: of each group, and then of each that
    has pages by head, with what is noted of their rows."""
    groups = [config.bytes_of(group) for group in range(len(config.groups))]
    return np.asarray([*groups, *(evicting.page_bytes(config, spec) for spec in config.by_head)], np.int64)


def _queue(cache: CacheConfig, options: Options) -> int:
    """Four rows a slot, fewer where they are long: 64 MiB of tokens at most, but two a slot."""
    if options.queue is not None:
        return max(options.queue, 2 * cache.slots)
    affordable = (1 << 24) // cache.capacity
    return max(2 * cache.slots, min(max(4 * cache.slots, 64), affordable))


def _unit(model: Model) -> int:
    """What the tokens of a prompt step are a multiple of, so that chips of `seq` can divide them, and a quarter too."""
    seq = sharding.sizes(model.mesh)["seq"]
    return 8 * seq if seq > 1 else 1


def _packed(slots: int, requests: Sequence[Request], options: Options, least: Plan | None, unit: int) -> int:
    """Enough for the first prompts at once, a power of two, more than one token a slot; a multiple of `unit`."""
    prompts = sum(len(request.prompt) for request in requests[:slots])
    packed = max(2 * slots, min(options.packed, max(64, power_of_two(prompts))))
    packed = packed if least is None else max(packed, least.packed)
    return -(-packed // unit) * unit


def program_of(
    model: Model, cache: CacheConfig, *, logprobs: int | None = None, backend: str = "xla", share: bool = True
) -> Program:
    """The static part of a loop that runs this model over such a cache; see `kvjax.state.Program`."""
    family = model.family
    return Program(
        family.forward,
        family.unembed,
        model.config,
        model.config.width,
        model.dtype,
        cache,
        logprobs,
        backend,
        share,
        model.mesh,
    )


def start(model: Model, shapes: Plan, automata: np.ndarray) -> tuple[Program, EngineState]:
    """The program of a plan, and its engine without requests."""
    program = program_of(model, shapes.cache, logprobs=shapes.logprobs, backend=shapes.backend, share=shapes.share)
    penalties = len(model.token_bytes) if shapes.penalties else None
    mesh = sharding.mesh_of(model.params)
    empty = starter(program, mesh, shapes.queue, shapes.biases, shapes.stops, penalties)
    return program, empty(jnp.asarray(automata))


def placed(model: Model, shapes: Plan, state: Any) -> EngineState:
    """The state of a plan, of arrays on the host, where the engine has it."""
    program = program_of(model, shapes.cache, logprobs=shapes.logprobs, backend=shapes.backend, share=shapes.share)
    where = engine_state.shardings(program, state, sharding.mesh_of(model.params))
    if where is None:
        return jax.tree.map(lambda host: sharding.put(host, None), state)
    return jax.tree.map(sharding.put, state, where)


@functools.lru_cache(maxsize=64)
def starter(program: Program, mesh: Mesh | None, rows: int, biases: int, stops: int, penalties: int | None) -> Any:
    """A jitted function, automata → an empty state: one program rather than one for each array."""

    def init(automata: jax.Array) -> EngineState:
        one = engine_state.init(program, automata, rows=rows, biases=biases, stops=stops, penalties=penalties)
        return engine_state.several(program, one)

    form = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2, 1), jnp.int8))
    return jax.jit(init, out_shardings=engine_state.shardings(program, form, mesh))
