"""Prints, as Markdown, what `kvjax eval --lines` has measured of ways to keep less of K and V: the tables of
docs/kv-memory.md, which has the commands.

python scripts/kv_memory.py kv-memory.jsonl
python scripts/kv_memory.py kv-memory.jsonl --plot quality.png      # quality against bytes

Lines that were measured on the same tasks, or on the same text alone, make a table; changes are against its first line
that evicts nothing. Answers of question-blind runs stand beside those of question-aware ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.errors import RequestError
from kvjax.evaluation import report
from kvjax.evaluation.variants import Result, Variant

MIB = 1 << 20


@dataclasses.dataclass
class Comparison:
    """Variants measured alike.

    Attributes:
      settings: what was measured.
      results: by variant.
      blind: the same tasks, but rows were evicted before the question was seen.
    """

    settings: dict[str, Any]
    results: dict[Variant, Result]
    blind: dict[Variant, Result]

    @property
    def full(self) -> Result:
        """What the others are compared with: the first that keeps every row."""
        return next(result for variant, result in self.results.items() if variant.policy == "none")


def read(paths: Sequence[pathlib.Path]) -> list[Comparison]:
    """What the files of `kvjax eval --lines` hold, in their order; a variant measured again counts as last measured."""
    found: dict[str, Comparison] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            settings, aware = entry["settings"], (entry["settings"]["tasks"] or {}).get("aware", True)
            what = {**settings, "tasks": settings["tasks"] and {**settings["tasks"], "aware": True}}
            if settings["tasks"]:  # a blind run leaves out the text, which would be the same
                what["text"] = None
            known = found.setdefault(json.dumps(what, sort_keys=True), Comparison(settings, {}, {}))
            result = report.from_dict(entry)
            (known.results if aware else known.blind)[result.variant] = result
    return [one for one in found.values() if any(variant.policy == "none" for variant in one.results)]


def table(one: Comparison) -> str:
    """A line a variant; columns of what was measured."""
    full = one.full
    columns: list[tuple[str, Callable[[Result], str]]] = [
        ("K and V", _name),
        ("pages at the peak, MiB", lambda r: f"{_peak(r) / MIB:.1f}"),
        ("of the first", lambda r: f"{_peak(r) / _peak(full):.1%}"),
    ]
    if full.perplexity is not None:
        columns += [
            ("bytes a token", lambda r: f"{r.bytes_per_token:,.0f}"),
            ("perplexity", lambda r: f"{r.perplexity.perplexity:.3f}" if r.perplexity else ""),
            ("change", lambda r: _change(r, full)),
        ]
    if full.cells:
        columns += [("retrieval", lambda r: _percent(r.score())), ("of the first", lambda r: _share(r, full))]
        if one.blind:
            columns += [("blind, of the first", lambda r: _share(one.blind.get(r.variant), full))]
        columns += [(kind, functools.partial(_of_kind, kind)) for kind in _kinds(full)]
    if full.usage is not None and full.usage.cpu_seconds > 0:
        columns += [("tokens/s", lambda r: _speed(r))]
    rows = [[of(result) for _, of in columns] for result in one.results.values()]
    return _markdown([name for name, _ in columns], rows)


def by_depth(one: Comparison) -> str:
    """Scores in per cent by depth of the fact, a line a variant, kind and length."""
    depths = sorted({cell.depth for cell in one.full.cells if cell.depth is not None})
    places = dict.fromkeys((cell.kind, cell.length) for cell in one.full.cells if cell.depth is not None)
    rows = []
    for result in one.results.values():
        for kind, length in places:
            cells = {c.depth: c for c in result.cells if (c.kind, c.length) == (kind, length)}
            scores = [f"{100 * cells[depth].score:.0f}" for depth in depths]
            rows.append([_name(result), kind, f"{length:,}", str(cells[depths[0]].samples), *scores])
    return _markdown(["K and V", "task", "tokens", "tasks a depth", *(f"{depth:.0%}" for depth in depths)], rows)


def title(one: Comparison) -> str:
    """What was measured."""
    text, tasks = one.settings["text"], one.settings["tasks"]
    parts = []
    if one.settings["rope"]:
        parts.append(f"RoPE {one.settings['rope']}")
    if text and one.full.perplexity:
        counted = one.full.perplexity.tokens
        parts.append(f"perplexity of {counted:,} tokens, window {text['window']:,}, stride {text['stride']:,}")
    if tasks:
        count = sum(cell.samples for cell in one.full.cells)
        lengths = " and ".join(f"{n:,}" for n in tasks["lengths"])
        parts.append(f"{count} tasks of {lengths} tokens, {tasks['depths']} depths, seed {tasks['seed']}")
    return f"{one.settings['dtype']}: " + "; ".join(parts)


def _name(result: Result) -> str:
    variant = result.variant
    return variant.kv if variant.policy == "none" else f"{variant.kv}, {variant.policy} {variant.budget:.1%}"


def _peak(result: Result) -> int:
    """Bytes of the pages in use at once, at most: by the tasks, where there are some, else by the text."""
    if result.usage is not None:
        return result.usage.peak_bytes
    return result.perplexity.scores.peak if result.perplexity else 0


def _change(result: Result, full: Result) -> str:
    if result.perplexity is None or full.perplexity is None:
        return ""
    return f"{result.perplexity.perplexity / full.perplexity.perplexity - 1:+.2%}"


def _percent(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.0f}"


def _of_kind(kind: str, result: Result) -> str:
    return _percent(result.score(kind))


def _share(result: Result | None, full: Result) -> str:
    """The score over that of the full cache."""
    score, best = None if result is None else result.score(), full.score()
    return "" if score is None or not best else f"{score / best:.0%}"


def _speed(result: Result) -> str:
    """Tokens computed a second of the processor, prompts and answers together."""
    return f"{result.usage.computed / result.usage.cpu_seconds:.0f}" if result.usage else ""


def _kinds(full: Result) -> list[str]:
    return list(dict.fromkeys(cell.kind for cell in full.cells))


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(one: Comparison, path: pathlib.Path) -> None:
    """Writes a PNG: perplexity and retrieval against the bytes at the peak, a line a policy."""
    panels: list[tuple[str, Callable[[Result], float | None]]] = []
    if one.full.perplexity is not None:
        panels.append(("perplexity", lambda r: r.perplexity.perplexity if r.perplexity else None))
    if one.full.cells:
        panels.append(("retrieval, %", lambda r: 100 * (r.score() or 0.0)))
    figure = report.figure_class()(figsize=(6.5 * len(panels), 4.5), layout="constrained")
    for axis, (label, value) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for policy in dict.fromkeys(variant.policy for variant in one.results):
            some = [r for v, r in one.results.items() if v.policy == policy and value(r) is not None]
            if policy != "none":  # its line begins at the cache that keeps every row
                some = [one.full, *some]
            some.sort(key=_peak)
            style = "o" if policy == "none" else ".-"
            axis.plot([_peak(r) / MIB for r in some], list(map(value, some)), style, label=policy, alpha=0.8)
            for result in some if policy == "none" else ():
                where = _peak(result) / MIB, value(result)
                axis.annotate(result.variant.kv, where, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.set(xlabel="pages of K and V at the peak, MiB", ylabel=label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=pathlib.Path, nargs="+", help="files of `kvjax eval --lines`")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG to draw the largest table in")
    arguments = parser.parse_args()
    found = read(arguments.lines)
    if not found:
        raise SystemExit("There is no line of a cache that keeps every row, which the others are compared with.")
    for one in found:
        print(title(one), table(one), sep="\n\n", end="\n\n")
        if one.settings["tasks"] and one.settings["tasks"]["depths"] >= 3 and one.full.cells:
            print(by_depth(one), end="\n\n")
    if arguments.plot is not None:
        try:
            plot(max(found, key=lambda one: len(one.results)), arguments.plot)
        except RequestError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
