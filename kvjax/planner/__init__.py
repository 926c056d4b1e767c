"""Does it fit? What a model takes of which chips, before any of them is rented.

    from kvjax import planner
    from kvjax.cli.plan import model_of
    plan = planner.plan(model_of("llama-3.1-70b"), context=131072, batch=8, chips="v5p:4x4", storage="int8")
    plan.fits, plan.memory.total, plan.largest_context

Sizes are counted by the functions that the engine itself uses; times are bounds from peak figures. The families are
passed in, as they are to the engine: `kvjax.cli.plan.model_of` finds the one that a name, a file or a repo id needs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvjax import storages
from kvjax.errors import RequestError
from kvjax.pallas_kernels import Lanes
from kvjax.planner import memory, roofline
from kvjax.planner.chips import CHIPS, Chip, Slice, parse_chips
from kvjax.planner.compiled import compile_for
from kvjax.planner.memory import Job, KVGroup, MemoryAccount, Size
from kvjax.planner.meshes import Axes, candidates, parse_mesh
from kvjax.planner.named import CONFIGS
from kvjax.planner.roofline import Time, Times
from kvjax.planner.units import MOST_TOKENS, parse_tokens
from kvjax.types import Family

__all__ = [
    "CHIPS",
    "CONFIGS",
    "Axes",
    "Chip",
    "KVGroup",
    "MemoryAccount",
    "Model",
    "Plan",
    "Slice",
    "Suggestion",
    "Time",
    "Times",
    "compile_for",
    "parse_tokens",
    "plan",
]

_SUGGESTIONS = 5


@dataclasses.dataclass(frozen=True)
class Model:
    """What is planned for.

    Attributes:
      name: for people.
      family: its functions.
      config: the family's config; `vocab`, `width`, `heads`, `context` and `trained_context` are read.
    """

    name: str
    family: Family
    config: Any

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A mesh that the chips could be divided into.

    Attributes:
      axes: the mesh.
      memory: of one device.
      fits: whether that is less than it has.
      times: what a user would wait for.
    """

    axes: Axes
    memory: MemoryAccount
    fits: bool
    times: Times


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model, a job and chips, and what comes of them. Bytes are those of one device.

    Attributes:
      model: what runs.
      parameters: how many numbers it has.
      slice: where it runs.
      axes: the mesh; the best of `suggestions` if none was asked for.
      context: tokens of each sequence, prompt and output together.
      batch: sequences at once.
      dtype: of parameters and activations.
      storage: of K and V.
      rows: R, rows a page on each device.
      memory: of one device.
      groups: K and V of every group of layers.
      bytes_per_token: of K and V in all layers, before anything is divided or rounded.
      sequence_bytes: of K and V of one sequence, as the engine holds it, on all devices of one engine and one copy.
      ideal_sequence_bytes: the same if layers with a window held no more rows than that.
      fits: whether memory.total is at most what a device has.
      largest_context: tokens of `batch` sequences that would fit; 0 if none do.
      largest_batch: sequences of `context` tokens that would fit; 0 if none do.
      times: estimates from peak figures.
      suggestions: other meshes, the best first; empty where a mesh was asked for.
      notes: what a user has to know, a sentence each.
      packed: T, tokens of a step that computes prompts, at most.
    """

    model: Model
    parameters: int
    slice: Slice
    axes: Axes
    context: int
    batch: int
    dtype: str
    storage: str
    rows: int
    memory: MemoryAccount
    groups: tuple[KVGroup, ...]
    bytes_per_token: int
    sequence_bytes: int
    ideal_sequence_bytes: int
    fits: bool
    largest_context: int
    largest_batch: int
    times: Times
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]
    packed: int


def plan(
    model: Model,
    *,
    context: str | int | None = None,
    batch: int = 1,
    chips: str = "v5e:1",
    mesh: str | None = None,
    storage: str | None = None,
    dtype: str = "bfloat16",
    rows: int | None = None,
    packed: int = 512,
) -> Plan:
    """Computes what a job takes of every chip.

    Args:
      model: what is to run.
      context: tokens of each sequence, as `parse_tokens` reads them; the model's own if None.
      batch: sequences at once.
      chips: as `parse_chips` reads them: "v5p:4x4x4", "v5e:16", "h100:8".
      mesh: as `parse_mesh` reads it: "seq=16,model=4". The best that is found if None.
      storage: of K and V: "bfloat16", "int8", "float8_e4m3fn", "kivi4", … (`kvjax.storages`); as dtype if None.
      dtype: of parameters and activations.
      rows: R; what the engine chooses if None.
      packed: T, tokens of a step that computes prompts.

    Raises:
      RequestError: an argument is impossible; the text says which, and what would be possible.
    """
    where = parse_chips(chips)
    tokens = model.config.context if context is None else parse_tokens(context)
    limit = getattr(model.config, "learned_positions", 0) or MOST_TOKENS
    storage = storage or dtype
    _check(model, tokens, limit, batch=batch, rows=rows, packed=packed)
    job = job_of(model, where.chip, storage, dtype, rows, packed)
    found: tuple[Suggestion, ...] = ()
    if mesh is None:
        found = suggestions(job, where, tokens, batch)
        axes = found[0].axes
    else:
        axes = parse_mesh(mesh, where.devices)
    size, chip = Size(axes, tokens, batch), where.chip
    account = memory.account(job, size, chip.platform)
    groups = memory.kv_groups(job, size)
    return Plan(
        model=model,
        parameters=memory.parameters(job),
        slice=where,
        axes=axes,
        context=tokens,
        batch=batch,
        dtype=dtype,
        storage=storage,
        rows=job.rows,
        memory=account,
        groups=groups,
        bytes_per_token=memory.bytes_per_token(job.specs),
        sequence_bytes=sum(group.layers * axes.seq * group.rows * group.spec.row_bytes for group in groups),
        ideal_sequence_bytes=memory.ideal_bytes(job.specs, tokens),
        fits=account.total <= chip.hbm,
        largest_context=memory.largest_context(job, size, chip.hbm, chip.platform, limit),
        largest_batch=memory.largest_batch(job, size, chip.hbm, chip.platform),
        times=roofline.times(job, size, chip),
        suggestions=found[:_SUGGESTIONS],
        notes=notes(job, size, model, groups, where),
        packed=memory.packed(job, size.slots),
    )


def _check(model: Model, context: int, limit: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise RequestError(f"{name} is {count}: at least 1 is needed.")
    if counts["batch"] and counts["batch"] > 1 << 20:
        raise RequestError(f"batch is {counts['batch']}: at most {1 << 20} sequences are possible.")
    if context > limit:
        raise RequestError(
            f"context is {context}, but {model} has learned its {limit} positions one by one: give at most {limit}."
        )


def job_of(model: Model, chip: Chip, storage: str, dtype: str, rows: int | None = None, packed: int = 512) -> Job:
    """What is to be held, as the engine would lay it out on such a chip.

    TPUs have joined rows, in pages of 128 where they are codes of 8 bits, since kernels apply so many scales at once;
    otherwise, and on GPUs, pages have 64 rows (`kvjax.plans`).
    """
    if dtype not in storages.FLOATS:
        raise RequestError(f"dtype is {dtype!r}: give one of {', '.join(storages.FLOATS)}.")
    storage = storages.resolve(storage, dtype)
    tpu = chip.platform == "tpu"
    specs, layout = model.family.kv_specs(model.config, storage), "joined" if tpu else "token_major"
    rows = rows or (128 if tpu and storages.parse(storage).dtype.itemsize == 1 else 64)
    for spec in dict.fromkeys(specs):
        if spec.stored.codes is not None:
            lanes = Lanes(spec.kv_heads, spec.key_dim, spec.value_dim, spec.latent)
            try:
                spec.stored.codes.check(rows, lanes, layout)
            except (NotImplementedError, ValueError) as error:
                raise RequestError(f"K and V cannot be stored as {storage}: {error}.") from error
    return Job(
        specs=specs,
        params=memory.params_of(model.family.abstract(model.config)),
        config=model.config,
        dtype=dtype,
        rows=rows,
        layout=layout,
        packed=packed,
    )


def suggestions(job: Job, where: Slice, context: int, batch: int) -> tuple[Suggestion, ...]:
    """Meshes for these chips, the best first: those that fit, by the time of a token, then of the first token.

    Behind them those that do not fit, the smallest first.
    """
    experts = job.routing.experts if job.routing is not None else 0
    # The kernels of GPUs do not read sequences that are dealt over the axis `seq`.
    parts = -(-context // job.rows) if where.chip.platform == "tpu" else 1
    shapes = candidates(where.devices, heads=job.config.heads, experts=experts, batch=batch, parts=parts)
    found = [_suggestion(job, where, Size(axes, context, batch)) for axes in shapes or (Axes(model=where.devices),)]
    fastest = min((one.times.token.total for one in found if one.fits), default=1.0)

    def order(one: Suggestion) -> tuple[float, ...]:
        if not one.fits:
            return 1, one.memory.total
        # Times of a token within a tenth of each other are as good as equal: then the first token decides.
        return 0, int(math.log(one.times.token.total / fastest, 1.1)), one.times.first_token.total, one.memory.total

    return tuple(sorted(found, key=order))


def _suggestion(job: Job, where: Slice, size: Size) -> Suggestion:
    account = memory.account(job, size, where.chip.platform)
    return Suggestion(size.axes, account, account.total <= where.chip.hbm, roofline.times(job, size, where.chip))


def notes(job: Job, size: Size, model: Model, groups: tuple[KVGroup, ...], where: Slice) -> tuple[str, ...]:
    """What a user has to know, a sentence each."""
    axes, found = size.axes, list[str]()
    said = dict.fromkeys(memory.replicated(group, axes) for group in groups)
    found.extend(f"{sentence}." for sentence in said if sentence is not None)
    if job.config.heads % axes.model:
        found.append(
            f"{job.config.heads} query heads over model={axes.model} cannot be divided: each device computes all."
        )
    if job.routing is not None and job.routing.experts % axes.expert:
        found.append(
            f"{job.routing.experts} experts over expert={axes.expert} cannot be divided: each device holds all."
        )
    if job.routing is None and axes.expert > 1:
        found.append(f"The model has no experts: expert={axes.expert} only makes copies.")
    if size.batch % axes.data:
        idle = size.slots * axes.data - size.batch
        found.append(
            f"{size.batch} sequences over data={axes.data}: {idle} of {size.slots * axes.data} slots stay empty."
        )
    trained = getattr(model.config, "trained_context", size.context)
    if size.context > trained:
        found.append(f"The checkpoint promises {trained:,} tokens: {size.context:,} want its RoPE scaled (--rope).")
    if where.chip.platform == "gpu":
        if axes.seq > 1:
            found.append("The kernels of GPUs do not read sequences that are dealt over seq: attention is plain XLA.")
        found.append("JAX takes 75% of a GPU's memory by default: XLA_PYTHON_CLIENT_MEM_FRACTION=.95 allows more.")
    return tuple(found)
