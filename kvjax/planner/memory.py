"""Bytes of one device: weights, K and V, the engine's state, temporaries. Sizes come from the engine's own functions:
`abstract` and `kv_specs` of the family, `kvjax.sharding.RULES`, and `kvjax.cache.CacheConfig`.

B slots of an engine, T tokens of a step that computes prompts, R rows a page and device, P pages, Q requests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import plans, prefix
from kvjax.cache import CacheConfig
from kvjax.planner.meshes import Axes, rounded_up
from kvjax.sharding import RULES
from kvjax.types import KVSpec, ParamSpec


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Bytes of one device, by what they are for; ours and the compiler's have the same rows.

    Attributes:
      weights: parameters.
      kv: pages of K and V, with scales.
      state: everything else that the engine keeps: tables, requests, the prefix index.
      temporaries: what a step needs beyond these.
    """

    weights: int
    kv: int
    state: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.temporaries


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be held, but for its size.

    Attributes:
      specs: one KVSpec a layer.
      params: role, parameter, and how often it is there; see `params_of`.
      config: the family's config: `vocab`, `width`, `heads` are read, and `routing` where there are experts.
      dtype: of parameters and activations.
      rows: R.
      layout: of the pages.
      packed: T, at most; `kvjax.plans.Options.packed`.
    """

    specs: tuple[KVSpec, ...]
    params: tuple[tuple[str, ParamSpec, int], ...]
    config: Any
    dtype: str
    rows: int
    layout: str
    packed: int

    @property
    def groups(self) -> dict[KVSpec, int]:
        """The distinct specs, in order, and how many layers have each; those of newest rows in full precision, too."""
        return dict(collections.Counter(_with_recent(self.specs)))

    @property
    def readers(self) -> dict[KVSpec, int]:
        """The same specs, and how many layers read such rows: their own, or another layer's."""
        owners = (spec if spec.shares is None else self.specs[spec.shares] for spec in self.specs)
        return dict(collections.Counter(_with_recent(list(owners))))

    @property
    def routing(self) -> Any:
        """Of the experts, or None."""
        return getattr(self.config, "routing", None)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is to be held.

    Attributes:
      axes: of the mesh.
      context: tokens of each sequence, prompt and output together.
      batch: sequences, of all engines together.
    """

    axes: Axes
    context: int
    batch: int

    @property
    def slots(self) -> int:
        """B: sequences of one engine."""
        return -(-self.batch // self.axes.data)


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """K and V of the layers that share a spec, on one device.

    Attributes:
      spec: of the whole model.
      layers: how many.
      heads: kv heads that a device holds.
      copies: devices of the axis `model` that hold the same head; 1 where they divide the heads.
      rows: rows of one sequence that a device holds; of a layer with a window, pages behind it are given back.
      open_rows: rows that the tokens of one step may take besides, where pages are given back.
      row_bytes: of one token in one layer: codes, lanes that are filled up, scales.
      padding: bytes of a row that hold nothing.
      scales: bytes of a row that are scales.
      bytes: of all sequences and layers.
      ideal: the same if nothing but the rows that a query can see were held, without rounding to pages.
    """

    spec: KVSpec
    layers: int
    heads: int
    copies: int
    rows: int
    open_rows: int
    row_bytes: int
    padding: int
    scales: int
    bytes: int
    ideal: int


# --- weights ------------------------------------------------------------------------------------------------
def params_of(tree: Any) -> tuple[tuple[str, ParamSpec, int], ...]:
    """(role, parameter, how often) of a tree of ParamSpec; those of layers alike are counted together.

    The role is the parameter's key at the top of the tree ("embed", "unembed", …), or "layers". Names of tensors are
    left out.
    """
    found: dict[tuple[str, str, ParamSpec], int] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(tree):
        key = (str(path[0].key), str(path[-1]), ParamSpec(spec.shape, spec.axes, ()))
        found[key] = found.get(key, 0) + 1
    return tuple((role, spec, count) for (role, _, spec), count in found.items())


def parameters(job: Job) -> int:
    """How many numbers the model has."""
    return sum(count * math.prod(spec.shape) for _, spec, count in job.params)


def local_shape(spec: ParamSpec, axes: Axes) -> tuple[int, ...]:
    """The part of a parameter that one device holds, as `kvjax.sharding.param_sharding` divides it."""
    parts = [axes.size(RULES.get(name or "")) for name in spec.axes]
    return tuple(size // n if size % n == 0 else size for size, n in zip(spec.shape, parts, strict=True))


def tiled(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array in a TPU's memory, where the last two dimensions fill whole tiles of 8 × 128.

    XLA chooses which two dimensions come last, so that this costs little: 2% of a parameter of width 2,880. A
    dimension below 8 gets a tile of 1, 2 or 4 rows.
    """
    if len(shape) < 2:
        return rounded_up(math.prod(shape), 1024 if math.prod(shape) > 1024 else 128) * itemsize
    whole = math.prod(shape)
    best = min(
        whole // (a * b) * rounded_up(a, min(8, 1 << (a - 1).bit_length())) * rounded_up(b, 128)
        for a, b in _ordered_pairs(shape)
    )
    return best * itemsize


def _ordered_pairs(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    for i, a in enumerate(shape):
        for j, b in enumerate(shape):
            if i != j:
                yield a, b


def weights(job: Job, axes: Axes, platform: str = "tpu") -> int:
    """Bytes of the parameters on a device."""
    itemsize = jnp.dtype(job.dtype).itemsize

    def size(spec: ParamSpec) -> int:
        shape = local_shape(spec, axes)
        return tiled(shape, itemsize) if platform == "tpu" else math.prod(shape) * itemsize

    return sum(count * size(spec) for _, spec, count in job.params)


# --- K and V ------------------------------------------------------------------------------------------------
def bytes_per_token(specs: Sequence[KVSpec]) -> int:
    """Bytes of one token's K and V in every layer, before anything is divided or rounded."""
    return sum(spec.row_bytes for spec in specs)


def ideal_bytes(specs: Sequence[KVSpec], context: int) -> int:
    """Bytes of one sequence's K and V if layers with a window held so many rows, and no page were rounded up."""
    return sum(spec.row_bytes * visible(spec, context) for spec in _with_recent(specs))


def _with_recent(specs: Sequence[KVSpec]) -> list[KVSpec]:
    owners = [spec for spec in specs if spec.shares is None]
    return [one for spec in owners for one in (spec, spec.recent) if one is not None]


def visible(spec: KVSpec, context: int) -> int:
    """Rows that the last query of a sequence sees."""
    return context if spec.window is None else min(spec.window, context)


def cache(job: Job, size: Size) -> CacheConfig:
    """The cache of one engine, with a page for every token that its sequences can come to."""
    axes = size.axes
    config = CacheConfig(
        job.specs,
        size.slots,
        superpage(job, axes),
        pages(job, size),
        layout=job.layout,
        seq=axes.seq,
        model=axes.model,
        query_heads=job.config.heads,
    )
    return plans.with_window_pages(config, packed(job, size.slots))


def superpage(job: Job, axes: Axes) -> int:
    """Tokens of one page: R rows on each device of the axis `seq`."""
    return job.rows * axes.seq


def pages(job: Job, size: Size) -> int:
    """Pages that the longest sequence takes."""
    return -(-size.context // superpage(job, size.axes))


def kv_groups(job: Job, size: Size) -> tuple[KVGroup, ...]:
    """K and V of every group of layers, on a device that holds `size.slots` sequences of `size.context` tokens.

    Layers with a window hold whole pages of what it spans, and those that a step's prompts open before it ends.
    """
    specs = (spec for spec in cache(job, size).groups if spec in job.groups)
    return tuple(_group(job, size, spec, job.groups[spec]) for spec in specs)


def _group(job: Job, size: Size, spec: KVSpec, layers: int) -> KVGroup:
    config = cache(job, size)
    held, row = config.on_chip(spec), row_bytes(job, size.axes, spec)
    rows = config.span(spec) * job.rows
    pool = config.pool_of(config.groups.index(spec)) * job.rows
    return KVGroup(
        spec=spec,
        layers=layers,
        heads=held.kv_heads,
        copies=size.axes.model * held.kv_heads // spec.kv_heads,
        rows=rows,
        open_rows=pool - size.slots * rows,
        row_bytes=row,
        padding=row - held.row_bytes,
        scales=4 * held.scales,
        bytes=layers * pool * row,
        ideal=layers * size.slots * -(-visible(spec, size.context) // size.axes.seq) * held.row_bytes,
    )


def row_bytes(job: Job, axes: Axes, spec: KVSpec) -> int:
    """Bytes of one token in one layer on a device, as the cache lays it out: lanes filled up, with scales."""
    one = dataclasses.replace(job, specs=(spec,))
    config = cache(one, Size(axes, 1, 1))
    return config.bytes_of(config.groups.index(spec)) // job.rows


def replicated(group: KVGroup, axes: Axes) -> str | None:
    """Says that heads are held more than once, where they are."""
    if group.copies == 1:
        return None
    n, model = group.spec.kv_heads, axes.model
    heads = f"{n} kv head{'s' if n > 1 else ''}"
    if group.spec.latent:
        return f"latent rows are never divided: each of model={model} devices holds them whole ({model}x replicated)"
    if group.heads < n:
        return f"{heads} over model={model}: each head is held by {group.copies} devices ({group.copies}x replicated)"
    return f"{heads} over model={model}: there is no even share, each device holds all ({model}x replicated)"


# --- the engine's state -------------------------------------------------------------------------------------
def queue(slots: int, capacity: int) -> int:
    """Q, as `kvjax.plans` chooses it, but rounded up: so Q·S never shrinks where S grows."""
    return max(2 * slots, min(max(4 * slots, 64), -(-(1 << 24) // capacity)))


def state(job: Job, size: Size) -> int:
    """Bytes of `kvjax.state.EngineState` without K and V, which every device holds alike.

    A formula rather than `jax.eval_shape`, since a search evaluates it often; a test holds the two together. Tables
    have a power of two of columns.
    """
    B, config = size.slots, cache(job, size)
    P, groups = config.pool_pages, len(config.groups)
    M = 1 << (pages(job, size) - 1).bit_length()
    S = M * superpage(job, size.axes)
    Q = queue(B, S)
    digest, word = 16, 4
    # tokens; digests of pages; ten counters, `hashed`, two pins, root and tail, sampler with one bias and one stop
    requests = Q * (S * word + M * digest + (10 + 1 + 2) * word + 2 * digest + 14 * word) + (Q + 2) * word
    # per page: free, refs, last_use, claim; per slot: its row of the block table, and a length
    pools = sum(config.pool_of(g) * 4 * word + word + B * (M + 1) * word for g in range(groups))
    buckets = 1 << max(4 * P // prefix.WAYS - 1, 0).bit_length()
    # per page: place, digest, tokens, parent, depth, live, pinned, sisters
    index = buckets * (prefix.WAYS + 1) * word
    index += P * (word + digest + superpage(job, size.axes) * word + 4 * word + (groups - 1) * word)
    automata, slots = 2 * job.config.vocab, B * word
    return requests + pools + index + automata + slots


# --- temporaries --------------------------------------------------------------------------------------------
def packed(job: Job, slots: int) -> int:
    """T of a step that computes prompts: more than one token a slot."""
    return max(2 * slots, job.packed)


def temporaries(job: Job, size: Size) -> int:
    """Bytes that a step needs beyond its arguments: an estimate, to be compared with the compiler's account.

    Layers run one after another and reuse each other's memory, so one counts: its input and output with float32 sums
    of both, and what it makes of its tokens, by matrices or by experts. Logits and what sampling makes of them
    (float32, and as many 32-bit keys and weights) exist when layers do not.

    libtpu 0.0.52, for two layers on a v5e, 512 tokens a step: Llama 3 8B 134 MiB with 8 slots and 141 with 64, computed
    136; Qwen3 30B-A3B 62 MiB, computed 62. Programs over a mesh were not compared yet.
    """
    axes, itemsize = size.axes, jnp.dtype(job.dtype).itemsize
    T, D = -(-packed(job, size.slots) // axes.seq), job.config.width
    residual = T * D * (3 * itemsize + 2 * 4)
    vectors = _vectors(job, axes)
    made = T * (sum(vectors) * itemsize + max(vectors) * 4)  # the largest as float32 sums, too
    layer = residual + max(made, _expert_rows(job, axes, T)) + _exchanged(job, size)
    vocab = job.config.vocab // axes.model if job.config.vocab % axes.model == 0 else job.config.vocab
    return max(layer, 3 * size.slots * vocab * 4)


def _vectors(job: Job, axes: Axes) -> list[int]:
    """Numbers that each of a layer's matrices makes of one token, on a device, or is given of one.

    Those of all kinds of layer, where they differ.
    """
    found = []
    for role, spec, _ in job.params:
        if role == "layers" and len(spec.shape) > 1 and "experts" not in spec.axes and "width" in spec.axes:
            shape = local_shape(spec, axes)
            found.append(math.prod(shape) // shape[spec.axes.index("width")])
    return found


def _exchanged(job: Job, size: Size) -> int:
    """Bytes of what the axis `seq` exchanges: of prompts every device gets all q, k and v, and sends and gets parts of
    the output with their log-sum-exp, float32; of decode it gets those of all devices.
    """
    seq, N = size.axes.seq, query_heads(job, size.axes)
    if seq == 1:
        return 0
    T, itemsize = packed(job, size.slots), jnp.dtype(job.dtype).itemsize

    def of(spec: KVSpec, heads: int) -> int:
        parts = N * (spec.value_dim + 1) * 4
        sent = (N * spec.key_dim + heads * (spec.key_dim + spec.value_dim)) * itemsize
        return max(T * (sent + 2 * parts), seq * size.slots * parts)

    config = cache(job, size)
    return max(of(spec, config.on_chip(spec).kv_heads) for spec in job.groups)


def query_heads(job: Job, axes: Axes) -> int:
    """Query heads that a device computes."""
    heads = job.config.heads
    return heads // axes.model if heads % axes.model == 0 else heads


def _expert_rows(job: Job, axes: Axes, tokens: int) -> int:
    """Bytes of the rows of experts: every device orders all T·C assignments, whichever experts it holds."""
    if job.routing is None:
        return 0
    itemsize, D = jnp.dtype(job.dtype).itemsize, job.config.width
    # Gate and up: the matrices that end in the feed-forward's axis. Their product is a float32 sum before it is cast.
    inner = sum(local_shape(spec, axes)[-1] for _, spec, _ in job.params if spec.axes == ("experts", "width", "ffw"))
    return tokens * job.routing.chosen * (D * itemsize + max(D * 4, inner * (itemsize + 2)))


def account(job: Job, size: Size, platform: str = "tpu") -> MemoryAccount:
    """Everything on one device."""
    return MemoryAccount(
        weights=weights(job, size.axes, platform),
        kv=sum(group.bytes for group in kv_groups(job, size)),
        state=state(job, size),
        temporaries=temporaries(job, size),
    )


# --- what fits ----------------------------------------------------------------------------------------------
def largest_context(job: Job, size: Size, hbm: int, platform: str, limit: int) -> int:
    """Tokens of the longest sequences, whole pages, of which `size.batch` fit; 0 if none do.

    Args:
      job: what is held.
      size: of which the context does not count.
      hbm: bytes of a device.
      platform: of the chip.
      limit: tokens that positions can count, or that the model has learned.
    """
    step = superpage(job, size.axes)

    def fits(count: int) -> bool:
        return account(job, dataclasses.replace(size, context=count * step), platform).total <= hbm

    return min(_most(fits, -(-limit // step)) * step, limit)


def largest_batch(job: Job, size: Size, hbm: int, platform: str) -> int:
    """Sequences of `size.context` tokens that fit, of all engines together; 0 if none do."""

    def fits(slots: int) -> bool:
        return account(job, dataclasses.replace(size, batch=slots * size.axes.data), platform).total <= hbm

    return _most(fits, 1 << 20) * size.axes.data


def _most(fits: Any, limit: int) -> int:
    """The largest n ≤ limit with fits(n), for a `fits` that once false stays false; 0 if not even 1 does."""
    if limit < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
