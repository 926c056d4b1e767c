#!/usr/bin/env python
"""How near TPU kernels come to the roofline, counted from the schedule that libtpu makes for each chip, without a TPU.

    python scripts/tpu_roofline.py                                        every kernel on four chips
    python scripts/tpu_roofline.py --chips v5e --kernels jax_paged        some: a part of the name is enough
    python scripts/tpu_roofline.py --list                                 their names

Each kernel is compiled for each chip in a process of its own, and the scalar half of the compiled program is run with
real lengths and page tables (scripts/tpu_cycles). All numbers are of one sequence: those of the call divided by its
sequences, its start and its end included.

  cycles    bundles executed, with the empty ones that cover latencies
  dma       cycles that the bytes fetched from HBM take at the full bandwidth
  ratio     cycles / dma: below 1 the kernel is bound by memory
  mxu       share of a core's bfloat16 MXU peak: flops / (cycles * flop_per_cycle)
  MATMUL... slots used of each unit, of all its copies; FILL and SPILL are vector spills
  inner     FILL and SPILL slots in the innermost loop that multiplies matrices
  copies    DMAs from HBM
On a v5p a kernel that is marked as megacore is split between both cores, which have half the bandwidth each: its
numbers are those of one of them, which does half of the call. Others leave one core idle. On a 7x a core is a device,
and has half the bandwidth.
Not seen: DMA latency and small-copy efficiency, HBM contention, bank conflicts, instruction fetch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpu_cycles.cases import Case, cases, chip_of
from tpu_cycles.measure import CHIPS, UNITS, MeasureError, Measurement, dumped, measure

COLUMNS = ("kernel", "shape", "storage", "page", "chip", "cycles", "dma", "ratio", "mxu", *UNITS, "inner", "copies")


def measured(case: Case, chip: str, keep: Path | None = None) -> Measurement:
    """Compiles a case and counts. keep: where to leave the dump."""
    with contextlib.ExitStack() as stack:
        folder = keep / f"{case.name.replace('/', '-')}-{chip}" if keep else None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.iterdir():
            stale.unlink()
        dumped(["-m", "tpu_cycles.cases", case.name, chip], folder)
        with chip_of(chip):  # sizes, and so operands, may depend on it
            operands = case.operands() if callable(case.operands) else case.operands
        return measure(folder, case.tag, chip, operands, case.flops, case.cores(chip))


def row(case: Case, chip: str, result: Measurement | str) -> list[str]:
    """A line of the table; a result that is a text says why there is none."""
    start = [case.kernel + (f" ({case.note})" if case.note else ""), case.shape, case.storage, str(case.page), chip]
    if isinstance(result, str):
        return [*start, result]
    counts = [result.cycles, result.dma_cycles]
    slots = [*(result.slots[unit] for unit in UNITS), result.inner_spills, result.copies]
    return [
        *start,
        *(f"{count / case.sequences:.0f}" for count in counts),
        "none" if result.ratio is None else f"{result.ratio:.3f}",
        f"{result.mxu:.1%}",
        *(f"{slot / case.sequences:.0f}" for slot in slots),
    ]


def line(words: Sequence[str], widths: Sequence[int], markdown: bool) -> str:
    """A line of the table, aligned, or of a Markdown one."""
    if markdown:
        return "| " + " | ".join(words) + " |"
    return "  ".join(f"{word:<{width}}" for word, width in zip(words, widths, strict=False)).rstrip()


def header(selected: Sequence[Case], markdown: bool) -> tuple[str, list[int]]:
    """The head of the table, and the widths of its columns."""
    texts = [row(case, chip, "") for case in selected for chip in CHIPS]
    known = [max(len(text[i]) for text in texts) for i in range(5)]
    widths = [max(len(name), known[i] if i < 5 else 6) for i, name in enumerate(COLUMNS)]
    head = line(COLUMNS, widths, markdown)
    return head + ("\n" + line(["---"] * len(COLUMNS), widths, markdown) if markdown else ""), widths


def record(case: Case, chip: str, result: Measurement | str) -> dict[str, object]:
    """The numbers of the whole call, for JSON."""
    found = {"error": result} if isinstance(result, str) else dataclasses.asdict(result)
    names = ("kernel", "shape", "storage", "page", "flops", "sequences", "note")
    return {"name": case.name, "chip": chip, **{name: getattr(case, name) for name in names}, **found}


def chosen(patterns: str) -> list[Case]:
    """Cases that have one of the patterns, separated by commas, in their names."""
    wanted = [pattern for pattern in patterns.split(",") if pattern]
    found = [case for name, case in cases().items() if not wanted or any(pattern in name for pattern in wanted)]
    if not found:
        raise SystemExit(f"no kernel with {patterns} in its name; there are:\n" + "\n".join(cases()))
    return found


def chips(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(CHIPS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(CHIPS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=chips, default=list(CHIPS), help="of v5e,v5p,v6e,tpu7x; all by default")
    parser.add_argument("--kernels", default="", metavar="A,B", help="parts of names (see --list); all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers of the whole calls there")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the dumps there")
    parser.add_argument("--list", action="store_true", help="print the names of the kernels and end")
    arguments = parser.parse_args()
    selected = chosen(arguments.kernels)
    if arguments.list:
        print("\n".join(case.name for case in selected))
        return 0
    head, widths = header(selected, arguments.markdown)
    print("Of one sequence: the call's numbers divided by its sequences.\n")
    print(head, flush=True)
    results = []
    for case, chip in itertools.product(selected, arguments.chips):
        result: Measurement | str
        try:
            result = measured(case, chip, arguments.keep)
        except MeasureError as error:
            result = str(error)
        results.append((case, chip, result))
        print(line(row(case, chip, result), widths, arguments.markdown), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([record(*result) for result in results], indent=1) + "\n")
    return int(any(isinstance(result, str) for _, _, result in results))


if __name__ == "__main__":
    sys.exit(main())
