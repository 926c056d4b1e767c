"""Snapshots of a running job: what a machine that is taken away leaves to the next one.

folder/7/host    JSON: what the host knows
folder/7/rows    the tokens and log-probabilities of all unfinished requests
folder/7/state   the engine's state, K and V included, for a continuation bit for bit; may be left out

A snapshot is a checkpoint of Orbax, which appears whole or not at all: by a rename on a disk, by a file that is written
last in a bucket. What a killed process has begun is ignored, and removed by the next.

Several processes that hold a job together (kvjax.processes) save and resume it together. Process 0 writes and reads
what the host knows, and tells the others; the state is written and read by all, each the part on its devices, for which
the folder has to be on a disk that all of them see. Where it is not, snapshots hold no state.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from kvjax import plans, processes, sharding, stops
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.errors import UserError
from kvjax.eviction_options import described
from kvjax.job import Entry, Job, Memory
from kvjax.plans import Model, Options, Plan, Request, layout_of
from kvjax.sampling_params import SamplingParams
from kvjax.state import EngineState
from kvjax.types import KVSpec

FORMAT = 1
KEEP = 2
"""Snapshots that stay: the newest, and the one before, should the newest turn out to be damaged."""

_SHAPING = ("slots", "rows", "kv_bytes", "packed", "queue", "share_prefixes", "backend", "layout")
"""Options that shape the state; with others a job goes on without it."""

_AUTOMATA = "automata"  # made anew from the stop strings


class NoSnapshot(UserError):
    """There is no complete snapshot to go on from."""


def save(job: Job, folder: epath.PathLike, *, pages: bool = True, note: Any = None) -> None:
    """Writes a snapshot of a job between two segments, and removes all but the `KEEP` newest.

    The state is donated to the next segment: all of it is written when this returns.

    Args:
      job: the job.
      folder: where its snapshots lie, a path or `gs://…`; made if it is not there.
      pages: whether K, V and the rest of the engine's state are kept. Without them the requests go on as after a
        preemption: the same tokens, computed again, from a snapshot that is small and quick to write.
      note: a JSON value for the caller's own use, such as what the job is made from; see `resume`.

    Raises:
      UserError: the folder cannot be written.
    """
    memory, folder = job.memory(), epath.Path(folder)
    shared = not job.several or _all_see(folder) if pages else True
    arrays = _leaves(job.state) if pages and shared and job.state is not None else {}
    host, rows = _packed(memory)
    host |= {"format": FORMAT, "note": note, "model": fingerprint(job.model), "options": _shaping(job.options)}
    host["state"] = _described(arrays)
    once = processes.first if job.several else _here
    number = once(lambda: _writing(folder, _begin))
    if arrays or not job.several:
        _writing(folder, lambda _: _write(folder / str(number), host, rows, arrays))
    else:
        once(lambda: _writing(folder, lambda _: _write(folder / str(number), host, rows, {}, alone=True)))
    once(lambda: _writing(folder, _remove_old))


def _here(make: Callable[[], Any]) -> Any:
    return make()


def _writing(folder: epath.Path, do: Callable[[epath.Path], Any]) -> Any:
    try:
        return do(folder)
    except Exception as error:  # a bucket's client raises errors of its own
        raise UserError(f"A snapshot cannot be written to {folder} ({_reason(error)}).") from error


def _begin(folder: epath.Path) -> int:
    """The number of a new snapshot."""
    folder.mkdir(parents=True, exist_ok=True)
    _remove_torn(folder)
    return max(_numbers(folder), default=-1) + 1


def _write(path: epath.Path, host: Any, rows: Any, arrays: Mapping[str, Any], alone: bool = False) -> None:
    import orbax.checkpoint as ocp

    items = {"host": ocp.args.JsonSave(host), "rows": ocp.args.PyTreeSave(rows)}
    if arrays:
        items["state"] = ocp.args.PyTreeSave(dict(arrays))
    with _checkpointer(alone) as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(**items))


def _remove_old(folder: epath.Path) -> None:
    for old in _numbers(folder)[:-KEEP]:
        (folder / str(old)).rmtree()


def _all_see(folder: epath.Path) -> bool:
    """Whether all processes see what process 0 writes there."""

    def mark() -> str:
        mark = folder / f"0.orbax-checkpoint-tmp-seen-{time.time_ns()}"  # which the next removes if this one is killed
        mark.mkdir(parents=True)
        (mark / "seen").write_text("")
        return mark.name

    mine = folder / processes.first(lambda: _writing(folder, lambda _: mark()))
    unseen = processes.any_of(not (mine / "seen").exists())
    processes.first(lambda: _writing(folder, lambda _: mine.rmtree()))
    if unseen and processes.index() == 0:
        _say_once(f"Not all processes see {folder}: snapshots hold no K and V, which are computed again.")
    return not unseen


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def resume(
    model: Model,
    folder: epath.PathLike,
    options: Options,
    *,
    plan: Plan | None = None,
    note: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Job:
    """The job of the newest complete snapshot, with its requests, its numbers of submissions and its clock.

    With the state in the snapshot, and the options (and the plan) that it was made with, the job goes on bit for bit.
    Otherwise its requests go on as after a preemption, with the same tokens. The seed is the snapshot's.

    Args:
      model: the model it was made with.
      folder: where the job's snapshots lie.
      options: how the job is to be run.
      plan: shapes to begin with; the snapshot's, where the options are, when None.
      note: if not None, only snapshots with this note count.
      clock: of the new job.

    Raises:
      NoSnapshot: there is no complete snapshot, or none with that note.
      UserError: it is of another model.
    """
    folder = epath.Path(folder)
    several = processes.spans(sharding.mesh_of(model.params))
    numbers = processes.first(lambda: _complete(folder)) if several else _complete(folder)
    why = ""
    for number in reversed(numbers):
        one = folder / str(number)
        try:
            host, rows = _told(one) if several else _read(one)
            if note is not None and host["note"] != json.loads(json.dumps(note)):
                continue
            _check_model(host["model"], fingerprint(model), one)
            memory = _unpacked(host, rows, model)
            found = _found(model, options, plan, memory, host)
            state = None
            if found.exact and several:
                state = _read_state_together(one, model, memory, host)
            elif found.exact:
                state = _read_state(one, model, memory, host)
        except UserError:
            raise
        except Exception as error:  # damaged after it was complete, or of another version: Orbax raises many kinds
            why = why or f" ({number} cannot be read: {_reason(error)})"
            continue
        job = Job(model, options, plan=found.plan, clock=clock)
        job.remember(memory, state)
        return job
    of = "" if note is None else " of this job"
    raise NoSnapshot(f"There is no complete snapshot{of} in {folder}{why}.")


def _complete(folder: epath.Path) -> list[int]:
    try:
        _remove_torn(folder)
        return _numbers(folder)
    except Exception as error:
        raise UserError(f"{folder} cannot be read ({_reason(error)}).") from error


def exists(folder: epath.PathLike) -> bool:
    """Whether a folder has anything of a snapshot in it, also of one that is not whole."""
    return bool(_ours(epath.Path(folder)))


def remove(folder: epath.PathLike) -> None:
    """Deletes the snapshots of a folder, whole or not, and the folder if nothing else is in it. Raises UserError."""
    folder = epath.Path(folder)
    try:
        for path in _ours(folder):
            path.rmtree(missing_ok=True)
        if folder.is_dir() and not list(folder.iterdir()):
            folder.rmdir()
    except Exception as error:  # a bucket's client raises errors of its own
        raise UserError(f"The snapshots in {folder} cannot be deleted ({_reason(error)}).") from error


def fingerprint(model: Model) -> dict[str, Any]:
    """What of a model has to be the same when a job goes on; not the weights themselves."""
    shapes: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        stacked = model.stacked and str(getattr(path[0], "key", "")) == "layers"
        shape = leaf.shape[1:] if stacked else leaf.shape
        shapes[f"{leaf.dtype} {shape}"] += leaf.shape[0] if stacked else 1
    return {
        "family": model.family.name,
        "context": model.config.context,
        "dtype": model.dtype,
        "kv_dtype": model.storage,
        "evict": described(model.eviction),
        "config": _digest(repr(model.config)),
        "parameters": _digest(repr(sorted(shapes.items()))),
    }


def _check_model(before: Mapping[str, Any], now: Mapping[str, Any], path: epath.Path) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            found = f"{key} {before.get(key)!r}, not {value!r}"
            raise UserError(f"The snapshot {path} is of another model ({found}): load the one it was made with.")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


# --- folders ------------------------------------------------------------------------------------------------
def _ours(folder: epath.Path) -> list[epath.Path]:
    """What of a folder is a snapshot, or what became of one that was not finished: 7, 7.orbax-checkpoint-tmp…"""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.partition(".orbax-checkpoint-tmp")[0].isdecimal()]


def _numbers(folder: epath.Path) -> list[int]:
    """Of the complete snapshots, the newest last."""
    import orbax.checkpoint as ocp

    found = (path for path in _ours(folder) if path.name.isdecimal())
    return sorted(int(path.name) for path in found if ocp.utils.is_checkpoint_finalized(path))


def _remove_torn(folder: epath.Path) -> None:
    import orbax.checkpoint as ocp

    for path in _ours(folder):
        if not path.name.isdecimal() or not ocp.utils.is_checkpoint_finalized(path):
            path.rmtree(missing_ok=True)


def _checkpointer(alone: bool = False) -> Any:
    """`alone`: for this process, where there are several, and the others do not take part."""
    import orbax.checkpoint as ocp

    who = ocp.options.MultiprocessingOptions()
    if alone and processes.count() > 1:
        mine = processes.index()
        who = ocp.options.MultiprocessingOptions(mine, {mine}, "kvjax")
    # Uncompressed: K and V hardly shrink, and the job waits meanwhile.
    one = functools.partial(ocp.PyTreeCheckpointHandler, use_ocdbt=True, use_compression=False)
    arrays = {name: one(multiprocessing_options=who) for name in ("rows", "state")}
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=who),
        host=ocp.JsonCheckpointHandler(multiprocessing_options=who),
        **arrays,
    )
    return ocp.Checkpointer(handler, multiprocessing_options=who)


def _read(path: epath.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the host knew, by this process alone."""
    host = _read_host(path)
    return host, _read_arrays(path, "rows", host["rows"])


def _told(path: epath.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """`_read` by process 0. Raises ValueError in all processes if it fails there."""

    def read() -> bytes:
        try:
            host, rows = _read(path)
        except Exception as error:
            return b"!" + _reason(error).encode()
        file = io.BytesIO()
        np.savez(file, host=np.frombuffer(json.dumps(host).encode(), np.uint8), **rows)  # type: ignore[arg-type]
        return b" " + file.getvalue()

    raw = processes.first_bytes(read)
    if raw[:1] == b"!":
        raise ValueError(raw[1:].decode())
    with np.load(io.BytesIO(raw[1:])) as arrays:
        rows = {name: arrays[name] for name in arrays.files}
    return json.loads(rows.pop("host").tobytes()), rows


def _read_host(path: epath.Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with _checkpointer(alone=True) as checkpointer:
        host = checkpointer.restore(path, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host
    if host["format"] != FORMAT:
        raise ValueError(f"format {host['format']}")
    return host


def _read_arrays(path: epath.Path, item: str, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of an item, on the host: where they go on the devices is not the snapshot's to say."""
    import orbax.checkpoint as ocp

    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in described}
    with _checkpointer(alone=True) as checkpointer:
        restored = checkpointer.restore(
            path, args=ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=args)})
        )
    arrays = {name: np.asarray(array) for name, array in restored[item].items()}
    if _described(arrays) != described:
        raise ValueError(f"{item} is not what was written")
    return arrays


def _described(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [list(array.shape), array.dtype.name] for name, array in arrays.items()}


# --- the engine's state -------------------------------------------------------------------------------------
def _leaves(state: Any) -> dict[str, Any]:
    """The arrays of a state by their places in it; none that are empty, which Orbax does not write."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if math.prod(leaf.shape) and name != _AUTOMATA}


def _leaves_like(form: Any, other: Any) -> dict[str, Any]:
    """The leaves of another tree by the places of the arrays of `form`."""
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(form)
    ]
    return dict(zip(names, jax.tree.leaves(other), strict=True))


def _abstract(model: Model, plan: Plan) -> EngineState:
    table = jax.ShapeDtypeStruct((1, 2, len(model.token_bytes)), jnp.int8)
    return jax.eval_shape(lambda automata: plans.start(model, plan, automata)[1], table)


def _read_state(path: epath.Path, model: Model, memory: Memory, host: Mapping[str, Any]) -> EngineState:
    assert memory.plan is not None
    arrays = _read_arrays(path, "state", host["state"])

    def leaf(place: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        return arrays.pop(name) if name in arrays else np.zeros(shape.shape, shape.dtype)

    state: Any = jax.tree_util.tree_map_with_path(leaf, _abstract(model, memory.plan))
    state = state.replace(automata=stops.no_stops(len(model.token_bytes)))
    return plans.placed(model, memory.plan, state)


def _read_state_together(path: epath.Path, model: Model, memory: Memory, host: Mapping[str, Any]) -> EngineState | None:
    """`_read_state` by all processes, each what its devices hold; None where one of them does not see the folder."""
    import orbax.checkpoint as ocp

    assert memory.plan is not None
    if processes.any_of(not ocp.utils.is_checkpoint_finalized(path) if path.exists() else True):
        return None
    form = _abstract(model, memory.plan)
    plan = memory.plan
    program = plans.program_of(model, plan.cache, logprobs=plan.logprobs, backend=plan.backend, share=plan.share)
    where = engine_state.shardings(program, form, sharding.mesh_of(model.params))
    shapes, places = _leaves(form), _leaves_like(form, where)
    args = {
        name: ocp.ArrayRestoreArgs(sharding=places[name], global_shape=shape.shape, dtype=shape.dtype)
        for name, shape in shapes.items()
    }
    error: Exception | None = None
    arrays: dict[str, Any] = {}
    try:
        with _checkpointer() as checkpointer:
            restored = checkpointer.restore(
                path, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(restore_args=args))
            )
        arrays = dict(restored["state"])
        if _described(arrays) != host["state"]:
            raise ValueError("state is not what was written")
    except Exception as failed:
        error = failed
    if processes.any_of(error is not None):
        raise error or ValueError("another process could not read it")

    def leaf(place: Any, shape: jax.ShapeDtypeStruct, to: jax.sharding.Sharding) -> jax.Array:
        name = jax.tree_util.keystr(place, simple=True, separator=".")
        if name in arrays:
            return _own(arrays.pop(name))
        if name == _AUTOMATA:
            return sharding.put(stops.no_stops(len(model.token_bytes)), to)
        return sharding.put(np.zeros(shape.shape, shape.dtype), to)

    return jax.tree_util.tree_map_with_path(leaf, form, where)


def _own(array: jax.Array) -> jax.Array:
    """The array in memory that may be donated: a CPU device may have adopted what Orbax has read."""
    pieces = array.addressable_shards
    if any(piece.device.platform != "cpu" for piece in pieces):
        return array
    pieces = [jax.device_put(np.array(piece.data), piece.device, may_alias=False) for piece in pieces]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


@dataclasses.dataclass(frozen=True)
class _Found:
    """How a job can go on.

    Attributes:
      exact: with the state of the snapshot.
      plan: the shapes to begin with, or None.
    """

    exact: bool
    plan: Plan | None


def _found(model: Model, options: Options, plan: Plan | None, memory: Memory, host: Mapping[str, Any]) -> _Found:
    held = memory.plan
    same = (
        held is not None
        and _shaping(options) == host["options"]
        and held.cache.layout == layout_of(model, options)
        and held.cache.stacked == model.stacked
        and all(getattr(held.cache, name) == size for name, size in plans.divided(model).items())
        and held.cache.specs == model.family.kv_specs(model.config, model.storage)
    )
    if not same or held is None:
        return _Found(False, plan)
    exact = plan in (None, held) and bool(host["state"])
    return _Found(exact and host["state"] == _described(_leaves(_abstract(model, held))), plan or held)


def _shaping(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _SHAPING}


# --- what the host knows ------------------------------------------------------------------------------------
def _packed(memory: Memory) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """JSON, and the arrays that would be clumsy in it, those of all requests one after another."""
    params: list[SamplingParams] = []  # requests share most of them
    entries = [_asked_for(entry) for entry in (*memory.entries, *(entry for entry, _ in memory.ended))]
    written = [_written(entry, params) for entry in entries]
    logprobs = [entry.logprobs for entry in entries if entry.logprobs is not None]
    rows = {
        "tokens": _joined([np.asarray(entry.tokens, np.int32) for entry in entries]),
        "chosen": _joined([chosen for chosen, _, _ in logprobs]),
        "top_ids": _joined([ids for _, ids, _ in logprobs]),
        "top_values": _joined([values for _, _, values in logprobs]),
    }
    rows = {name: array for name, array in rows.items() if array.size}
    rows["count"] = np.asarray([len(entries)], np.int32)
    host = {
        "seed": memory.seed,
        "plan": None if memory.plan is None else _written_plan(memory.plan),
        "order": memory.order,
        "seconds": memory.seconds,
        "entries": written[: len(memory.entries)],
        "live": sorted(memory.live),
        "ended": written[len(memory.entries) :],
        "reasons": [reason for _, reason in memory.ended],
        "stops": [sorted(stop) for stop in memory.stops],
        "before": memory.before,
        "total": memory.total,
        "params": [_json_params(p) for p in params],
        "rows": _described(rows),
    }
    return host, rows


def _asked_for(entry: Entry) -> Entry:
    """Without the log-probabilities that the engine records for the sake of others."""
    return entry if entry.request.params.logprobs is not None else dataclasses.replace(entry, logprobs=None)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.zeros(0, np.int32)


def _written(entry: Entry, params: list[SamplingParams]) -> dict[str, Any]:
    request = entry.request
    if not params or params[-1] != request.params:  # neighbours are alike
        params.append(request.params)
    return {
        "order": entry.order,
        "index": request.index,
        "sample": request.sample,
        "prompt": len(request.prompt),
        "tokens": len(entry.tokens),
        "params": len(params) - 1,
        "salt": request.salt,
        "pins": list(request.pins),
        "stop_state": entry.stop_state,
        "hit": entry.hit,
        "preempted": entry.preempted,
        "logprobs": None if entry.logprobs is None else list(entry.logprobs[1].shape),
    }


def _json_params(params: SamplingParams) -> dict[str, Any]:
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return fields | {"logit_bias": list((params.logit_bias or {}).items())}


def _unpacked(host: Mapping[str, Any], rows: Mapping[str, np.ndarray], model: Model) -> Memory:
    params = [SamplingParams(**p | {"logit_bias": dict(p["logit_bias"]) or None}) for p in host["params"]]
    take = _Reader(rows)
    entries = [_read_entry(value, params, take) for value in host["entries"]]
    ended = [_read_entry(value, params, take) for value in host["ended"]]
    return Memory(
        seed=host["seed"],
        plan=_read_plan(host["plan"], model),
        order=host["order"],
        seconds=host["seconds"],
        entries=tuple(entries),
        live=frozenset(host["live"]),
        ended=tuple(zip(ended, host["reasons"], strict=True)),
        stops=tuple(map(frozenset, host["stops"])),
        before=host["before"],
        total=host["total"],
    )


class _Reader:
    """Takes pieces off the arrays, in the order in which they were joined."""

    def __init__(self, rows: Mapping[str, np.ndarray]):
        self._rows, self._at = rows, collections.Counter[str]()

    def __call__(self, name: str, shape: Sequence[int]) -> np.ndarray:
        size = math.prod(shape)
        start, self._at[name] = self._at[name], self._at[name] + size
        if not size:
            return np.zeros(shape, np.int32 if name in ("tokens", "top_ids") else np.float32)
        return self._rows[name][start : start + size].reshape(shape)


def _read_entry(value: Mapping[str, Any], params: Sequence[SamplingParams], take: _Reader) -> Entry:
    tokens = tuple(take("tokens", [value["tokens"]]).tolist())
    shape = value["logprobs"]
    logprobs = None
    if shape is not None:
        logprobs = take("chosen", shape[:1]), take("top_ids", shape), take("top_values", shape)
    first, second = value["pins"]
    request = Request(
        index=value["index"],
        sample=value["sample"],
        prompt=tokens[: value["prompt"]],
        params=params[value["params"]],
        salt=value["salt"],
        pins=(first, second),
    )
    fields = {name: value[name] for name in ("order", "stop_state", "hit", "preempted")}
    return Entry(request=request, tokens=tokens, logprobs=logprobs, **fields)


def _written_plan(plan: Plan) -> dict[str, Any]:
    """JSON; what is evicted is the model's, which `fingerprint` compares."""
    return dataclasses.asdict(dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, eviction=None)))


def _read_plan(value: Mapping[str, Any] | None, model: Model) -> Plan | None:
    if value is None:
        return None
    specs = tuple(KVSpec(**spec) for spec in value["cache"]["specs"])
    cache = {**value["cache"], "specs": specs, "eviction": model.own_eviction}
    for name in ("window_pages", "head_pages"):
        cache[name] = cache.get(name) and tuple(cache[name])
    return Plan(**{**value, "cache": CacheConfig(**cache)})
