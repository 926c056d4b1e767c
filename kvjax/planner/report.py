"""A plan as a table for people, and as a JSON object for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.planner import KVGroup, MemoryAccount, Plan, Suggestion, Time
from kvjax.planner.memory import replicated
from kvjax.planner.units import bytes_text, count_text, seconds_text

ESTIMATES = "computed from peak figures of the chip, not measured: nothing is faster, and real runs are slower"


def as_dict(plan: Plan, compiled: MemoryAccount | None = None) -> dict[str, Any]:
    """A plan as JSON: bytes, tokens and seconds. `compiled` is the compiler's account, if there is one."""
    chip = plan.slice.chip
    return {
        "model": plan.model.name,
        "family": plan.model.family.name,
        "parameters": plan.parameters,
        "chips": {
            "kind": chip.name,
            "count": plan.slice.chips,
            "devices": plan.slice.devices,
            "topology": plan.slice.topology,
            "hbm_bytes": chip.hbm,
        },
        "mesh": dataclasses.asdict(plan.axes),
        "context": plan.context,
        "batch": plan.batch,
        "dtype": plan.dtype,
        "kv": {
            "storage": plan.storage,
            "rows_per_page": plan.rows,
            "bytes_per_token": plan.bytes_per_token,
            "bytes_per_sequence": plan.sequence_bytes,
            "ideal_bytes_per_sequence": plan.ideal_sequence_bytes,
            "groups": [_group_dict(plan, group) for group in plan.groups],
        },
        "per_device": _account_dict(plan.memory),
        "compiled_per_device": None if compiled is None else _account_dict(compiled),
        "fits": plan.fits,
        "largest_context": plan.largest_context,
        "largest_batch": plan.largest_batch,
        "estimates": {"basis": ESTIMATES, **_times_dict(plan)},
        "suggestions": [_suggestion_dict(suggestion) for suggestion in plan.suggestions],
        "notes": list(plan.notes),
    }


def _account_dict(account: MemoryAccount) -> dict[str, int]:
    return {**dataclasses.asdict(account), "total": account.total}


def _group_dict(plan: Plan, group: KVGroup) -> dict[str, Any]:
    return {
        "layers": group.layers,
        "kv_heads": group.spec.kv_heads,
        "key_dim": group.spec.key_dim,
        "value_dim": group.spec.value_dim,
        "window": group.spec.window,
        "latent": group.spec.latent,
        "heads_per_device": group.heads,
        "copies": group.copies,
        "replicated": replicated(group, plan.axes),
        "rows_per_sequence_and_device": group.rows,
        "open_rows_per_device": group.open_rows,
        "row_bytes": group.row_bytes,
        "padding_bytes": group.padding,
        "scale_bytes": group.scales,
        "bytes": group.bytes,
        "ideal_bytes": group.ideal,
    }


def _time_dict(time: Time) -> dict[str, Any]:
    return {"seconds": time.total, **dataclasses.asdict(time), "bound": time.bound}


def _times_dict(plan: Plan | Suggestion) -> dict[str, Any]:
    times = plan.times
    return {
        "prefill": _time_dict(times.prefill),
        "first_token": _time_dict(times.first_token),
        "token": _time_dict(times.token),
    }


def _suggestion_dict(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "mesh": dataclasses.asdict(suggestion.axes),
        "fits": suggestion.fits,
        "per_device": _account_dict(suggestion.memory),
        **{name: value["seconds"] for name, value in _times_dict(suggestion).items()},
    }


# --- for people ---------------------------------------------------------------------------------------------
def table(plan: Plan, compiled: MemoryAccount | None = None) -> str:
    """A plan as text. With `compiled`, the compiler's account stands beside ours."""
    parts = [_head(plan), _memory(plan, compiled), _answers(plan), _times(plan)]
    if plan.suggestions:
        parts.append(_suggested(plan))
    if plan.notes:
        parts.append("\n".join(f"note: {note}" for note in plan.notes))
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    devices = f", {plan.slice.devices} devices" if plan.slice.chip.devices > 1 else ""
    chips = f"{plan.slice.chips} chip{'s' if plan.slice.chips > 1 else ''}{devices}"
    what = f"{plan.batch:,} sequence{'s' if plan.batch > 1 else ''} of {plan.context:,} tokens"
    where = f"pages of {plan.rows} rows" + (f" on each of {plan.axes.seq} devices" if plan.axes.seq > 1 else "")
    return "\n".join(
        (
            f"{plan.model.name}: {count_text(plan.parameters)} parameters as {plan.dtype}",
            f"{what}, K and V as {plan.storage} in {where}",
            f"{plan.slice}: {chips} of {bytes_text(plan.slice.chip.hbm)} a {_device(plan)}, mesh {plan.axes}",
        )
    )


def _memory(plan: Plan, compiled: MemoryAccount | None) -> str:
    account, hbm = plan.memory, plan.slice.chip.hbm
    alone = len(plan.groups) == 1
    rows = [
        ("weights", account.weights, _weights_text(plan), "weights"),
        *(_group_row(plan, group, "kv" if alone else "") for group in plan.groups),
        *([] if alone else [("K and V together", account.kv, "", "kv")]),
        ("tables and state", account.state, "block tables, requests, prefix index; on every device", "state"),
        ("temporaries", account.temporaries, "of one step, estimated", "temporaries"),
        ("total", account.total, f"of {bytes_text(hbm)}", "total"),
        ("left", hbm - account.total, "" if plan.fits else "too large", ""),
    ]
    lines = [[f"bytes per {_device(plan)}", "computed", *(["compiler"] if compiled else []), ""]]
    for name, count, text, key in rows:
        theirs = [bytes_text(getattr(compiled, key)) if key else ""] if compiled else []
        lines.append([name, bytes_text(count), *theirs, text])
    return grid(lines, numbers=(1, 2) if compiled else (1,))


def _device(plan: Plan) -> str:
    return "device" if plan.slice.chip.devices > 1 else "chip"


def _group_row(plan: Plan, group: KVGroup, key: str) -> tuple[str, int, str, str]:
    return f"K and V{_kind(plan, group)}", group.bytes, _group_text(plan, group), key


def _kind(plan: Plan, group: KVGroup) -> str:
    if len(plan.groups) == 1:
        return ""
    return ", full" if group.spec.window is None else f", window {group.spec.window:,}"


def _weights_text(plan: Plan) -> str:
    axes = plan.axes
    named = (("model", axes.model, ""), ("expert", axes.expert, ", experts alone"))
    divided = [f"{axis}={size}{alone}" for axis, size, alone in named if size > 1]
    copied = [f"{axis}={size}" for axis, size in (("data", axes.data), ("seq", axes.seq)) if size > 1]
    parts = [f"divided over {' and '.join(divided)}"] if divided else ["whole"]
    return "; ".join(parts + ([f"copied over {' and '.join(copied)}"] if copied else []))


def _group_text(plan: Plan, group: KVGroup) -> str:
    sequences = -(-plan.batch // plan.axes.data)
    rows = f"{sequences:,} × {group.rows:,} rows"
    if group.open_rows:
        rows = f"({rows} + {group.open_rows:,} for a step's prompts)"
    parts = [f"{group.layers} layers × {rows} × {group.row_bytes:,} B"]
    if group.spec.latent:
        parts.append("latent")
    else:
        parts.append(f"{group.heads} of {group.spec.kv_heads} kv heads")
    if group.copies > 1:
        parts.append(f"{group.copies}x replicated")
    if group.scales:
        parts.append(f"{group.scales} B of a row are scales")
    if group.padding:
        parts.append(f"{group.padding} B padding")
    return ", ".join(parts)


def _answers(plan: Plan) -> str:
    total, ideal = plan.sequence_bytes, plan.ideal_sequence_bytes
    seen = f", {bytes_text(ideal)} if only the rows that queries see were held" if ideal < 0.99 * total else ""
    rows = [
        ["fits", "yes" if plan.fits else "no"],
        [
            "largest context",
            f"{plan.largest_context:,} tokens, for {plan.batch:,} at once" if plan.largest_context else "none",
        ],
        [
            "largest batch",
            f"{plan.largest_batch:,} sequences of {plan.context:,} tokens" if plan.largest_batch else "none",
        ],
        ["K and V of one sequence", f"{bytes_text(total)}, {plan.bytes_per_token:,} bytes a token, one copy{seen}"],
    ]
    return grid(rows)


def _times(plan: Plan) -> str:
    times = plan.times
    whats = {
        "prefill": (times.prefill, f"{_prompts(plan.batch)} of {plan.context:,} tokens"),
        "time to first token": (times.first_token, "one such prompt alone"),
        "time per token": (times.token, f"a step of {plan.batch:,} at the full context: {_rate(plan)}"),
    }
    rows = [
        [name, seconds_text(time.total), f"most of it {_BOUND[time.bound]}", text]
        for name, (time, text) in whats.items()
    ]
    return f"{ESTIMATES}:\n{grid(rows, numbers=(1,))}"


_BOUND = {"arithmetic": "arithmetic", "reading": "reading HBM", "exchange": "exchange between devices"}


def _prompts(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count:,} prompts"


def _rate(plan: Plan) -> str:
    return f"{plan.batch / plan.times.token.total:,.0f} tokens/s"


def _suggested(plan: Plan) -> str:
    head = ["mesh, the best first", "total", "fits", "time per token", "first token", "prefill"]
    rows = [
        [
            str(suggestion.axes),
            bytes_text(suggestion.memory.total),
            "yes" if suggestion.fits else "no",
            seconds_text(suggestion.times.token.total),
            seconds_text(suggestion.times.first_token.total),
            seconds_text(suggestion.times.prefill.total),
        ]
        for suggestion in plan.suggestions
    ]
    return grid([head, *rows], numbers=(1, 3, 4, 5))


def grid(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Columns of text, those of `numbers` to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
