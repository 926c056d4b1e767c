"""Prints, as Markdown, what each way to store K and V costs the default model in quality: the tables of the docs.

python scripts/kv_quality.py --kv float32,bfloat16,int8,float8_e4m3fn --lengths 512,1024,2048 --samples 4
python scripts/kv_quality.py --from out.json        # of `kvjax eval --json out.json`, without running anything
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from kvjax.cli import main as kvjax_command

TASKS = "perplexity,needle,multikey,multivalue,variables,words,middle"


def perplexities(variants: Sequence[dict[str, Any]]) -> str:
    """Bytes and perplexity of each variant; changes are against the first."""
    first = variants[0]
    rows = []
    for variant in variants:
        found = variant["perplexity"]
        rows.append(
            [
                _name(variant),
                f"{found['bytes_per_token']:,.0f}",
                f"{found['bytes_per_token'] / first['perplexity']['bytes_per_token']:.1%}",
                f"{found['perplexity']:.3f}",
                f"{found['perplexity'] / first['perplexity']['perplexity'] - 1:+.2%}",
                f"{found['bits_per_byte']:.4f}",
            ]
        )
    return _markdown(["K and V", "bytes a token", "of the first", "perplexity", "change", "bits a byte"], rows)


def scores(variants: Sequence[dict[str, Any]]) -> str:
    """Mean score of each variant by task and length, in per cent, over all depths; the last line counts the tasks."""
    columns = list(dict.fromkeys((task["task"], task["length"]) for task in variants[0]["tasks"]))

    def cells(variant: dict[str, Any], column: tuple[str, int]) -> list[dict[str, Any]]:
        return [task for task in variant["tasks"] if (task["task"], task["length"]) == column]

    rows = []
    for variant in variants:
        means = []
        for column in columns:
            some = cells(variant, column)
            total = sum(task["samples"] for task in some)
            means.append(f"{100 * sum(task['score'] * task['samples'] for task in some) / total:.0f}")
        rows.append([_name(variant), *means])
    counts = [str(sum(task["samples"] for task in cells(variants[0], column))) for column in columns]
    return _markdown(["K and V", *(f"{kind} {n:,}" for kind, n in columns)], [*rows, ["tasks", *counts]])


def _name(variant: dict[str, Any]) -> str:
    kept = "" if variant["policy"] == "none" else f" {variant['policy']} {variant['budget']:.0%}"
    return variant["kv"] + kept


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The variants that `kvjax eval` writes. Raises SystemExit with its code where it fails."""
    if arguments.source is not None:
        return json.loads(arguments.source.read_text())["variants"]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "out.json"
        chosen = ("--kv", arguments.kv, "--lengths", arguments.lengths, "--samples", str(arguments.samples))
        code = kvjax_command(["eval", "--layers", "scanned", "--tasks", arguments.tasks, *chosen, "--json", str(path)])
        if code:
            raise SystemExit(code)
        return json.loads(path.read_text())["variants"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=pathlib.Path, help="JSON that was measured before")
    parser.add_argument("--kv", default="float32,bfloat16,int8,float8_e4m3fn,float8_e5m2")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--lengths", default="512,1024,2048")
    parser.add_argument("--samples", type=int, default=4)
    variants = measured(parser.parse_args())
    if variants[0]["perplexity"] is not None:
        print(perplexities(variants), end="\n\n")
    if variants[0]["tasks"]:
        print(scores(variants))


if __name__ == "__main__":
    main()
