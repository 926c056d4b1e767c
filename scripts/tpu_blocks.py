#!/usr/bin/env python
"""Chooses the sizes of the TPU kernels' blocks for each chip and shape, from libtpu's static schedule, without a TPU.

    python scripts/tpu_blocks.py                         tries all candidates, writes the table
    python scripts/tpu_blocks.py --chips v5p,tpu7x       of some chips; the others' entries are kept
    python scripts/tpu_blocks.py --check                 measures the table's entries again

A choice costs the larger of two: the cycles of the schedule, and those that the bytes fetched take at the full
bandwidth (scripts/tpu_cycles). So what is hidden behind the DMA does not count. Each shape is measured in several
contexts, decode with one program for all of them, as the engine has one. A candidate is better than the sizes that hold
for everything (`tpu_sizes.py`) if its cost is more than 1% lower in the geometric mean, and in no context more than 1%
higher. The best goes into pallas_kernels/paged_attention/tpu_blocks.py; where none is better, nothing does.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tpu_cycles.cases import HEADS, SEQUENCES, Case
from tpu_cycles.kvjax_cases import attention
from tpu_cycles.measure import CHIPS, MeasureError, dumped, measure

SIZES = "kvjax.pallas_kernels.paged_attention.tpu_sizes"
TABLE = Path(__file__).parents[1] / "pallas_kernels" / "paged_attention" / "tpu_blocks.py"
MARGIN = 0.01
LENGTHS = 3
"""The operand of the decode kernel that holds the slots' lengths."""

Sizes = tuple[int, ...]
Key = tuple[str, str, str, int]
Table = dict[str, dict[Key, Sizes]]
"""DECODE and CHUNKS."""


@dataclass(frozen=True)
class Shape:
    """Cases that share an entry of the table; the programs of decode run with slots of each of the lengths."""

    kind: str
    """DECODE or CHUNKS."""
    cases: tuple[Case, ...]
    lanes: tuple[Any, ...]
    """Arguments of `Lanes`."""
    heads: int
    storage: str
    page: int
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.cases[0].name}"

    @property
    def contexts(self) -> list[str]:
        return [str(length) for length in self.lengths] or [case.shape.split(" ", 3)[-1] for case in self.cases]

    def key(self, chip: str) -> Key:
        """Of the table."""
        from kvjax.pallas_kernels import Lanes
        from kvjax.pallas_kernels.paged_attention import tpu_sizes

        return tpu_sizes.key(chip.removeprefix("tpu"), Lanes(*self.lanes), self.heads, self.storage, self.page)

    def rounds(self) -> list[Callable[[Sizes], list[Sizes]]]:
        """What to try in turn, beside the best sizes so far: other units ahead, then other blocks and pieces."""
        from kvjax.pallas_kernels import Lanes

        if self.kind == "CHUNKS":
            return [lambda _: [(256, 512), (512, 256), (512, 1024)]]
        units = len(Lanes(*self.lanes).units)  # so many ahead are all of them
        pieces = [(2048, 2048), (1024, 1024), (512, 512), (4096, 2048), (4096, 1024)]
        return [
            lambda best: [(*best[:2], ahead) for ahead in (4, 8, 16) if min(ahead, units) != min(best[2], units)],
            lambda best: [(*piece, best[2]) for piece in pieces],
        ]


@functools.cache
def shapes() -> dict[str, Shape]:
    """By name."""

    def decode(page: int, storage: str = "bfloat16", heads: int = HEADS, *lanes: Any) -> Shape:
        lanes = lanes or (8, 128, 128, False)
        how = dict(zip(("kv_heads", "key_dim", "value_dim", "latent"), lanes, strict=True))
        case = attention("kvjax_decode", 1, 4096, page, storage, heads=heads, sequences=SEQUENCES, **how)
        return Shape("DECODE", (case,), lanes, heads, storage, page, (500, 1500, 3900, 4096))

    def prefill(page: int, storage: str = "bfloat16") -> Shape:
        calls = ((512, 4608, 1), (512, 512, 1), (128, 128, 4))
        cases = tuple(attention("kvjax_prefill", n, last, page, storage, sequences=many) for n, last, many in calls)
        return Shape("CHUNKS", cases, (8, 128, 128, False), HEADS, storage, page)

    found = [
        *(decode(page) for page in (16, 128)),
        *(decode(page, "bfloat16", HEADS, 8, 64, 64, False) for page in (16, 128)),
        *(decode(128, storage) for storage in ("int8", "float8_e4m3fn")),
        decode(128, "bfloat16", 16, 1, 576, 512, True),
        prefill(128),
    ]
    return {shape.name: shape for shape in found}


@contextlib.contextmanager
def held_to(kind: str, sizes: Sizes) -> Iterator[None]:
    """Inside, the kernels are cut up by these sizes."""
    with mock.patch(f"{SIZES}.{'decode' if kind == 'DECODE' else 'chunk'}_limits", lambda *_: sizes):
        yield


@functools.cache
def costs(name: str, chip: str, sizes: Sizes) -> list[tuple[int, int]]:
    """(cycles, those of the DMA) of the call in each of a shape's contexts."""
    shape, found = shapes()[name], []
    for number, case in enumerate(shape.cases):
        with tempfile.TemporaryDirectory() as folder, held_to(shape.kind, sizes):
            dumped([__file__, "--compile", name, str(number), chip, repr(sizes)], folder)
            assert callable(case.operands)
            operands = case.operands()
            for more in [{LENGTHS: [length] * SEQUENCES} for length in shape.lengths] or [{}]:
                result = measure(folder, case.tag, chip, {**operands, **more}, case.flops, case.cores(chip))
                found.append((result.cycles, result.dma_cycles))
    return found


def gains(usual: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[float]:
    """By how much, of one, the cost is lower in each context."""
    return [1 - max(other) / max(one) for one, other in zip(usual, others, strict=True)]


def mean(gains: Sequence[float]) -> float:
    """The geometric one of the costs, as a gain."""
    return 1 - math.exp(sum(math.log(1 - gain) for gain in gains) / len(gains))


def better(gains: Sequence[float]) -> bool:
    return mean(gains) > MARGIN and min(gains) > -MARGIN


def fits(kind: str, sizes: Sizes) -> bool:
    """Whether it compiles wherever the usual sizes do, with every feature; larger ones are shown, but not taken."""
    return all(size <= most for size, most in zip(sizes, usual_sizes(kind), strict=True))


def usual_sizes(kind: str) -> Sizes:
    from kvjax.pallas_kernels.paged_attention import tpu_sizes

    return getattr(tpu_sizes, kind)


def told(shape: Shape, chip: str, sizes: Sizes, found: Sequence[tuple[int, int]], gained: Sequence[float]) -> str:
    """A line on what was measured."""
    each = [f"{context}: {cycles} ({dma})" for context, (cycles, dma) in zip(shape.contexts, found, strict=True)]
    many = f"  gain {mean(gained):.1%} ({', '.join(f'{gain:.1%}' for gain in gained)})" if any(gained) else ""
    return f"{chip} {shape.name} {sizes}  {'  '.join(each)}{many}"


def choice(shape: Shape, chip: str) -> tuple[Sizes, float] | None:
    """The best candidate and its gain, or None where none is better."""
    usual = costs(shape.name, chip, usual_sizes(shape.kind))
    print(told(shape, chip, usual_sizes(shape.kind), usual, [0.0]), flush=True)
    if mean(gains(usual, [(dma, dma or 1) for _, dma in usual])) <= MARGIN:  # XLA may keep few pages in VMEM: no DMA
        print("    the bytes take as long: nothing to gain", flush=True)
        return None
    best, gain = usual_sizes(shape.kind), 0.0
    for candidates in shape.rounds():
        for sizes in candidates(best):
            try:
                measured = costs(shape.name, chip, sizes)
            except MeasureError as error:
                print(f"{chip} {shape.name} {sizes}  {error}", flush=True)
                continue
            gained = gains(usual, measured)
            print(told(shape, chip, sizes, measured, gained), flush=True)
            if better(gained) and fits(shape.kind, sizes) and mean(gained) > gain:
                best, gain = sizes, mean(gained)
    return (best, gain) if gain else None


def table() -> Table:
    """As it is."""
    from kvjax.pallas_kernels.paged_attention import tpu_blocks

    return {"DECODE": {**tpu_blocks.DECODE}, "CHUNKS": {**tpu_blocks.CHUNKS}}


HEAD = '''\
"""Sizes of blocks for a chip and a shape, where they are better than those of `tpu_sizes.py`, which say what they mean.

Made by scripts/tpu_blocks.py, which also checks them (--check).

{(chip, row class, storage, page class): sizes}, see `tpu_sizes.key`; behind an entry, how much lower its cost is.
"""
'''


def written(entries: Table, notes: Mapping[Key, str]) -> str:
    """The text of the table. notes: of each key, what to say behind it."""
    text = [HEAD]
    for kind, numbers in (("DECODE", 3), ("CHUNKS", 2)):
        type_ = f"dict[tuple[str, str, str, int], tuple[{', '.join(['int'] * numbers)}]]"
        lines = [
            f"    ({', '.join(map(json.dumps, key))}): {sizes},  # {notes[key]}\n"
            for key, sizes in sorted(entries[kind].items())
        ]
        text.append(f"{kind}: {type_} = {{" + "".join(["\n", *lines] if lines else []) + "}\n")
    return "\n".join((text[0], "".join(text[1:])))


def notes_of(text: str) -> dict[Key, str]:
    """What a table says behind its entries."""
    found = {}
    for line in text.splitlines():
        entry, separator, note = line.partition(",  # ")
        if separator:
            found[ast.literal_eval("{" + entry + "}").popitem()[0]] = note
    return found


def search(chips: Sequence[str]) -> int:
    """Writes the table, with the other chips' entries as they are."""
    entries, notes = table(), notes_of(TABLE.read_text())
    names = [chip.removeprefix("tpu") for chip in chips]
    entries = {kind: {key: x for key, x in part.items() if key[0] not in names} for kind, part in entries.items()}
    for chip in chips:
        for shape in shapes().values():
            if found := choice(shape, chip):
                key = shape.key(chip)
                entries[shape.kind][key], notes[key] = found[0], f"{found[1]:.1%}"
            TABLE.write_text(written(entries, notes))
    return 0


def check(chips: Sequence[str]) -> int:
    """Measures the entries again; 1 if one is not better any more, or if no shape measures it."""
    failed = 0
    by_key = {(shape.kind, shape.key(chip)): (shape, chip) for shape in shapes().values() for chip in chips}
    for kind, part in table().items():
        for key, sizes in part.items():
            if f"tpu{key[0]}" not in chips and key[0] not in chips:
                continue
            if (kind, key) not in by_key:
                print(f"{kind} {key}: there is no such shape", flush=True)
                failed = 1
                continue
            shape, chip = by_key[kind, key]
            measured = costs(shape.name, chip, sizes)
            gained = gains(costs(shape.name, chip, usual_sizes(kind)), measured)
            holds = better(gained)
            print("holds " if holds else "FAILS ", told(shape, chip, sizes, measured, gained), flush=True)
            failed |= not holds
    return int(failed)


def chips(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(CHIPS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(CHIPS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=chips, default=list(CHIPS), help="of v5e,v5p,v6e,tpu7x; all by default")
    parser.add_argument("--check", action="store_true", help="measure the table's entries again; 1 if one fails")
    parser.add_argument("--compile", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:  # in a process of its own, whose program is dumped
        name, number, chip, sizes = arguments.compile
        with held_to(shapes()[name].kind, ast.literal_eval(sizes)):
            shapes()[name].cases[int(number)].compile(chip)
        return 0
    return (check if arguments.check else search)(arguments.chips)


if __name__ == "__main__":
    sys.exit(main())
