"""Results as a table, as JSON, and as pictures (matplotlib, of the `plot` extra)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.errors import RequestError
from kvjax.evaluation.perplexity import Perplexity
from kvjax.evaluation.scoring import Scores
from kvjax.evaluation.variants import Cell, Result, Usage, Variant


def as_dict(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One object a variant: bytes, nats, scores from 0 to 1; `Result`, `Perplexity` and `Cell` say what they are."""
    return [
        {
            "kv": result.variant.kv,
            "policy": result.variant.policy,
            "budget": result.variant.budget,
            "row_bytes": result.row_bytes,
            "bytes_per_token": result.bytes_per_token,
            "perplexity": _perplexity(result),
            "usage": None if result.usage is None else dataclasses.asdict(result.usage),
            "tasks": [
                {
                    "task": cell.kind,
                    "length": cell.length,
                    "depth": cell.depth,
                    "score": cell.score,
                    "samples": cell.samples,
                    "bytes_per_token": cell.bytes_per_token,
                    "answers": list(cell.texts),
                }
                for cell in result.cells
            ],
        }
        for result in results
    ]


def _perplexity(result: Result) -> dict[str, float | int] | None:
    found = result.perplexity
    if found is None:
        return None
    return {
        "nats": found.nats,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "text_bytes": found.text_bytes,
        "bytes_per_token": found.scores.bytes_per_token,
        "allocated_bytes": found.scores.allocated,
        "peak_bytes": found.scores.peak,
    }


def from_dict(found: Mapping[str, Any]) -> Result:
    """The inverse of `as_dict` for one variant, but for the log-probabilities of the text."""
    text, usage, perplexity = found["perplexity"], found["usage"], None
    if text is not None:
        scores = Scores((), text["allocated_bytes"], text["peak_bytes"], text["bytes_per_token"])
        perplexity = Perplexity(text["nats"], text["tokens"], text["text_bytes"], scores)
    cells = tuple(
        Cell(
            cell["task"],
            cell["length"],
            cell["depth"],
            cell["score"],
            cell["samples"],
            tuple(cell["answers"]),
            cell["bytes_per_token"],
        )
        for cell in found["tasks"]
    )
    variant = Variant(found["kv"], found["policy"], found["budget"])
    return Result(variant, perplexity, cells, found["row_bytes"], None if usage is None else Usage(**usage))


def table(results: Sequence[Result]) -> str:
    """A line a variant: bytes a token, perplexity with its change against the first, and mean scores in per cent."""
    first = results[0]
    columns = list(dict.fromkeys((cell.kind, cell.length) for cell in first.cells))
    with_text = first.perplexity is not None
    head = ["kv", "bytes/token", *(["perplexity", "change", "bits/byte"] if with_text else [])]
    rows = [head + [f"{kind} {length}" for kind, length in columns] + (["mean"] if len(columns) > 1 else [])]
    for result in results:
        row = [result.variant.name, f"{result.bytes_per_token:,.0f}"]
        if (found := result.perplexity) is not None and first.perplexity is not None:
            change = f"{found.perplexity / first.perplexity.perplexity - 1:+.2%}"
            row += [f"{found.perplexity:.4f}", change, f"{found.bits_per_byte:.4f}"]
        row += [_percent(result.score(kind, length)) for kind, length in columns]
        rows.append(row + ([_percent(result.score())] if len(columns) > 1 else []))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(word.rjust(n) for word, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _percent(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.1f}"


def figure_class() -> Any:
    """Matplotlib's Figure. Raises RequestError, one sentence, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("Plots need matplotlib, which is not installed: pip install 'kvjax[plot]'.") from error
    return Figure


def plot(results: Sequence[Result], path: str | os.PathLike[str]) -> None:
    """Writes a PNG of quality against bytes of K and V a token; perplexity and score are panels of their own."""
    panels: list[tuple[str, list[float]]] = []
    if results[0].perplexity is not None:
        panels.append(("perplexity", [r.perplexity.perplexity for r in results if r.perplexity is not None]))
    if results[0].cells:
        panels.append(("mean score, %", [100 * (r.score() or 0.0) for r in results]))
    figure = figure_class()(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axis, (label, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        sizes = [result.bytes_per_token / 1024 for result in results]
        axis.scatter(sizes, values)
        for result, x, y in zip(results, sizes, values, strict=True):
            axis.annotate(result.variant.name, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
        axis.set(xlabel="K and V, KiB a token", ylabel=label)
        axis.margins(x=0.15, y=0.15)
        axis.set_xlim(0, 1.3 * max(sizes))
        if label.endswith("%"):
            axis.set_ylim(0, 105)
        axis.grid(alpha=0.3)
    _save(figure, path)


def heat_map(results: Sequence[Result], path: str | os.PathLike[str], kind: str = "needle") -> None:
    """Writes a PNG of the score of a placed kind of task by length and depth, a panel a variant.

    Raises:
      RequestError: there are no such tasks among the results.
    """
    cells = [[cell for cell in result.cells if cell.kind == kind and cell.depth is not None] for result in results]
    if not cells[0]:
        raise RequestError(f"There are no {kind} tasks to draw a heat map of: add {kind} to the tasks.")
    lengths, depths = (sorted({getattr(cell, name) for cell in cells[0]}) for name in ("length", "depth"))
    figure = figure_class()(figsize=(1.5 + 3 * len(results), 3.6), layout="constrained")
    for axis, result, some in zip(figure.subplots(1, len(results), squeeze=False)[0], results, cells, strict=True):
        score = {(cell.depth, cell.length): cell.score for cell in some}
        shown = [[score[depth, length] for length in lengths] for depth in depths]
        image = axis.imshow(shown, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(title=result.variant.name, xlabel="tokens", ylabel="depth")
        for i, row in enumerate(shown):
            for j, value in enumerate(row):
                axis.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="score")
    _save(figure, path)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise RequestError(f"{os.fspath(path)} cannot be written ({error.strerror}): give another path.") from error
