"""Times from peak figures: a bound that nothing beats, not a measurement.

A step takes as long as the slower of its arithmetic and its reading of HBM, and then what collectives take, of which
nothing is hidden.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from kvjax.planner import memory
from kvjax.planner.chips import Chip
from kvjax.planner.memory import Job, Size
from kvjax.planner.meshes import Axes
from kvjax.types import KVSpec, ParamSpec


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one thing.

    Attributes:
      arithmetic: at the peak of bfloat16.
      reading: of HBM at its full bandwidth.
      exchange: collectives between devices.
    """

    arithmetic: float
    reading: float
    exchange: float

    @property
    def total(self) -> float:
        return max(self.arithmetic, self.reading) + self.exchange

    @property
    def bound(self) -> str:
        """What takes longest."""
        names = ("arithmetic", "reading", "exchange")
        return max(names, key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Times:
    """What a user waits for.

    Attributes:
      prefill: computing the prompts of the whole batch, each as long as the context.
      first_token: one such prompt alone on an idle engine, to its first token.
      token: one decode step of the whole batch at the full context: a token of every sequence.
    """

    prefill: Time
    first_token: Time
    token: Time


def times(job: Job, size: Size, chip: Chip) -> Times:
    """Estimates for a batch of `size.batch` sequences of `size.context` tokens."""
    return Times(
        prefill=prefill(job, size, chip, size.slots),
        first_token=prefill(job, size, chip, 1),
        token=decode(job, size, chip),
    )


def decode(job: Job, size: Size, chip: Chip) -> Time:
    """One step of B slots whose contexts are full."""
    axes, B = size.axes, size.slots
    flops, read = B * _flops_per_token(job, axes, unembedded=True), float(_read(job, axes, B))
    for spec, layers in job.readers.items():
        rows = memory.visible(spec, size.context) / axes.seq
        # A latent row is used as it is: q absorbed the projection.
        flops += layers * B * rows * 2 * memory.query_heads(job, axes) * (spec.key_dim + spec.value_dim)
        read += layers * B * rows * memory.row_bytes(job, axes, spec)
    exchange = _sums(job, axes, chip, B)
    for spec, layers in job.readers.items():  # partial outputs, each with its log-sum-exp, go to every device
        partial = B * memory.query_heads(job, axes) * (spec.value_dim + 1) * 4
        exchange += layers * _gather(axes.seq * partial, axes.seq, chip)
    return Time(flops / chip.flops, read / chip.bandwidth, exchange)


def prefill(job: Job, size: Size, chip: Chip, sequences: int) -> Time:
    """Prompts of `size.context` tokens, in steps of T.

    The axis `seq` divides the tokens of a step. For attention every device gets all of their queries, which it lets see
    the rows that it holds; then the parts of the outputs are exchanged.
    """
    axes, T, itemsize = size.axes, memory.packed(job, size.slots), jnp.dtype(job.dtype).itemsize
    N, seq, tokens = memory.query_heads(job, axes), axes.seq, sequences * size.context
    steps = math.ceil(tokens / T)
    flops = tokens / seq * _flops_per_token(job, axes, unembedded=False)
    read, exchange = float(steps * _read(job, axes, T)), steps * _sums(job, axes, chip, T / seq)
    config = memory.cache(job, size)
    for spec, layers in job.readers.items():
        pairs = sequences * _pairs(spec, size.context) / seq  # of a query and a key that it sees
        flops += layers * pairs * _pair_flops(job, axes, spec, T)
        read += layers * pairs / T * memory.row_bytes(job, axes, spec)  # T queries share what is read
        heads = config.on_chip(spec).kv_heads
        sent = T * (N * spec.key_dim + heads * (spec.key_dim + spec.value_dim)) * itemsize
        parts = T * N * (spec.value_dim + 1) * 4
        exchange += layers * steps * (_gather(sent, seq, chip) + _gather(parts, seq, chip))
    return Time(flops / chip.flops, read / chip.bandwidth, exchange)


def _pairs(spec: KVSpec, context: int) -> float:
    seen = memory.visible(spec, context)
    return seen * (seen + 1) / 2 + (context - seen) * seen


def _pair_flops(job: Job, axes: Axes, spec: KVSpec, tokens: int) -> float:
    """Operations for one query and one key, of all heads of a device."""
    heads = memory.query_heads(job, axes)
    plain = 2 * heads * (spec.key_dim + spec.value_dim)
    if not spec.latent:
        return plain
    # Latents can also be expanded, once for the T queries of a step; then heads have their own, narrower keys.
    config = job.config
    width = config.nope_dim + config.value_dim
    expanded = 2 * heads * (width + config.rope_dim + width * spec.value_dim / tokens)
    return min(plain, expanded)


def _flops_per_token(job: Job, axes: Axes, *, unembedded: bool) -> float:
    """Operations of all matrices for one token on a device; a token meets only its C of E experts."""
    total = 0.0
    for role, spec, count in job.params:
        if len(spec.shape) > 1 and role in ("layers", "unembed") and (unembedded or role == "layers"):
            total += 2 * count * math.prod(memory.local_shape(spec, axes)) * _chosen(job, spec)
    tied = not any(role == "unembed" for role, _, _ in job.params)
    if unembedded and tied:
        total += 2 * next(math.prod(memory.local_shape(spec, axes)) for role, spec, _ in job.params if role == "embed")
    return total


def _chosen(job: Job, spec: ParamSpec) -> float:
    """The share of a parameter that a token meets."""
    if job.routing is None or spec.axes[:1] != ("experts",):
        return 1.0
    return job.routing.chosen / job.routing.experts


def _read(job: Job, axes: Axes, tokens: int) -> float:
    """Bytes of weights that a step reads: of experts those that its tokens choose, as if by chance."""
    itemsize = jnp.dtype(job.dtype).itemsize
    total = 0.0
    for role, spec, count in job.params:
        if role == "embed" and any(other == "unembed" for other, _, _ in job.params):
            continue  # a few rows of it
        share = 1 - (1 - _chosen(job, spec)) ** tokens
        total += count * math.prod(memory.local_shape(spec, axes)) * itemsize * share
    return total


def _sums(job: Job, axes: Axes, chip: Chip, tokens: float) -> float:
    """Seconds of a step's sums over devices: two a layer over `model`, one over `expert`."""
    layers, row = len(job.specs), tokens * job.config.width
    seconds = 2 * layers * 2 * _gather(row * jnp.dtype(job.dtype).itemsize, axes.model, chip)
    if job.routing is not None:
        seconds += layers * 2 * _gather(row * 4, axes.expert, chip)
    return seconds


def _gather(size: float, devices: int, chip: Chip) -> float:
    """Seconds until every device has all parts of `size` bytes; a sum over devices takes twice as long.

    An exchange of parts between all takes no longer.
    """
    if devices == 1:
        return 0.0
    # An axis of n devices is a ring, or a torus of shorter ones; messages go half around, both ways.
    hops = min(devices, chip.dims * devices ** (1 / chip.dims)) / 2 if chip.dims else 1
    return size * (devices - 1) / devices / chip.link + hops * chip.latency
