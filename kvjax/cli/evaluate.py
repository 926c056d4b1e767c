"""`kvjax eval`: what ways to store K and V cost in quality, and save in bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.interrupts import import_engine
from kvjax.cli.options import Dtype, Layers, Loading, Seed
from kvjax.cli.runtime import note, status
from kvjax.errors import RequestError

if TYPE_CHECKING:
    from kvjax.evaluation.variants import Grid, Result, Variant
    from kvjax.llm import LLM

_PERPLEXITY = "perplexity"
_TASKS = "perplexity, needle, multikey, multivalue, variables, words, middle"


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Model, as for generate (default: SmolLM2-135M)")] = None,
    tasks: Annotated[str, typer.Option(help=f"Some of {_TASKS}, with commas")] = "perplexity,needle",
    kv: Annotated[str, typer.Option(help="Number formats of K and V to compare")] = "bfloat16,int8,float8_e4m3fn",
    evict: Annotated[
        list[str] | None, typer.Option(help="Eviction policy to compare, such as snapkv:window=32+adakv; repeatable")
    ] = None,
    keep: Annotated[str, typer.Option(help="Shares of the rows that policies keep, with commas")] = "0.5",
    blind: Annotated[
        bool, typer.Option("--blind/--aware", help="Evict before the question is in the cache, or when it is")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="Text for the perplexity (default: prose that is shipped)")] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window of the text (default: 1024, or the context)", min=2)
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Between windows (default: half of --window)", min=1)] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the tasks' prompts, with commas")] = "512,1024",
    depths: Annotated[int, typer.Option(help="Depths of needle, multikey and middle", min=1)] = 5,
    samples: Annotated[int, typer.Option(help="Tasks of each kind, length and depth", min=1)] = 2,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Ask in the chat template, or in plain text")] = False,
    slots: Annotated[int, typer.Option(help="Tasks that are answered at once", min=1)] = 8,
    context: Annotated[int | None, typer.Option(help="Longest prompt with output (default: the model's own)")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of parameters (default: float32 on CPUs, else bfloat16)")] = None,
    rope: Annotated[str | None, typer.Option(help="Scale RoPE as for generate, e.g. yarn:4")] = None,
    layers: Annotated[Layers, typer.Option(help="How the program goes through the layers")] = Layers.unrolled,
    lines: Annotated[
        Path | None,
        typer.Option(help="File that gets a JSON line a variant when it is measured; those it has are not run again"),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write everything measured to")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw quality against bytes in")] = None,
    heat_map: Annotated[Path | None, typer.Option("--heatmap", help="PNG to draw the needle's grid in")] = None,
) -> None:
    """Compare storages and evictions of the KV cache: perplexity, answers to questions on long texts, and bytes."""
    kinds = _kinds(tasks)
    storages = tuple(dict.fromkeys(re.split(r",\s*(?=[bik]|f(?!ull))", kv.strip())))  # options have commas, too
    sizes, budgets = _numbers(lengths), _shares(keep)
    prose = _text(text) if _PERPLEXITY in kinds else ""
    _check_targets(lines, as_json, plot, heat_map)
    if heat_map is not None and "needle" not in kinds:
        raise RequestError("--heatmap shows the needle: add needle to --tasks.")
    import_engine()
    from kvjax.evaluation import report, variants

    if plot is not None or heat_map is not None:
        report.figure_class()  # now, not after hours of work
    asked = tuple(kind for kind in kinds if kind != _PERPLEXITY)
    grid = variants.Grid(asked, sizes, depths, samples, seed, chat, not blind) if asked else None
    compared = variants.compared(storages, evict or (), budgets)
    for variant in compared:
        variant.check()
    with status("loading"):
        llm = Loading(model=model, context=context, dtype=dtype, rope=rope, layers=layers).load(slots=slots)
    window = min(1024, llm.context) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    found = _Lines(lines, _settings(llm, prose, window, stride, grid, rope))
    missing = [variant for variant in compared if variant not in found.results]
    if missing:
        variants.measure(
            llm,
            missing,
            text=llm.tokenizer.encode(prose) if prose else (),
            window=window,
            stride=stride,
            grid=grid,
            on_start=note,
            on_result=found.add,
        )
    results = [found.results[variant] for variant in compared]
    print(report.table(results))
    if as_json is not None:
        _write_json(as_json, llm, results)
    if plot is not None:
        report.plot(results, plot)
    if heat_map is not None:
        report.heat_map(results, heat_map)


def _settings(llm: LLM, prose: str, window: int, stride: int, grid: Grid | None, rope: str | None) -> dict[str, Any]:
    """What results depend on, apart from the variant, as JSON has it."""
    text = {"sha256": hashlib.sha256(prose.encode()).hexdigest(), "window": window, "stride": stride}
    return {
        "model": llm.description,
        "dtype": llm.model.dtype,
        "rope": rope,
        "context": llm.context,
        "text": text if prose else None,
        "tasks": None if grid is None else json.loads(json.dumps(dataclasses.asdict(grid))),
    }


class _Lines:
    """The results so far, each written to a file, if there is one, as it comes.

    Attributes:
      results: by variant; those in the file that were measured with the same settings are there from the beginning.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        from kvjax.evaluation import report

        self._path, self._settings = path, settings
        self.results: dict[Variant, Result] = {}
        if path is None or not path.exists():
            return
        for number, line in enumerate(_text(path).splitlines() if path.stat().st_size else (), 1):
            try:
                read = json.loads(line)
                if read["settings"] == settings:
                    result = report.from_dict(read)
                    self.results[result.variant] = result
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(f"Line {number} of {path} is no result of kvjax eval: give another file.") from error

    def add(self, result: Result) -> None:
        from kvjax.evaluation import report

        self.results[result.variant] = result
        if self._path is not None:
            line = json.dumps({"settings": self._settings, **report.as_dict([result])[0]}, ensure_ascii=False)
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as error:
                raise RequestError(f"{self._path} cannot be written ({error.strerror}): give another path.") from error


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise RequestError(f"{option} has {name!r}: give some of {', '.join(known)}.")
    return names


def _kinds(text: str) -> tuple[str, ...]:
    return _names("--tasks", text, _TASKS.split(", "))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise RequestError(f"--lengths has {part!r}: give numbers of tokens, such as 512,1024.")
    return tuple(dict.fromkeys(map(int, parts)))


def _shares(text: str) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        try:
            share = float(part)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise RequestError(f"--keep has {part.strip()!r}: give shares of the rows, such as 0.5,0.25.")
        found.append(share)
    return tuple(dict.fromkeys(found))


def _text(path: Path | None) -> str:
    if path is None:
        path = Path(__file__).parents[1] / "evaluation" / "prose.txt"
    try:
        found = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no text ({error.reason}): give UTF-8.") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}): give a text file.") from error
    if not found.strip():
        raise RequestError(f"{path} is empty: give a file with text.")
    return found


def _check_targets(*paths: Path | None) -> None:
    """What cannot be written is said before anything is computed."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise RequestError(f"{path} cannot be written: give the name of a file in a folder that exists.")


def _write_json(path: Path, llm: LLM, results: Sequence[Result]) -> None:
    from kvjax.evaluation import report

    found = {"model": llm.description, "dtype": llm.model.dtype, "variants": report.as_dict(results)}
    try:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written ({error.strerror}): give another path.") from error
