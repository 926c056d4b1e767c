"""Cycles and DMA bytes of a Pallas TPU kernel on the path that it really takes, with no TPU.

libtpu compiles for the chip and dumps the VLIW program; llosim.py runs its scalar slots with real lengths and page
tables (the scalar unit decides every branch, loop and DMA), and counts. Two counts:
  issue    bundles that are not empty
  cycles   bundles of *packed-bundles-post-ra.txt, which keeps the empty ones that cover MXU, XLU and EUP latency; the
           final program drops those and the hardware interlocks instead. Use cycles.
ratio = cycles / (bytes fetched / HBM bandwidth * clock): below 1 the kernel is bound by memory, at the roofline.
Not seen: DMA latency and small-copy efficiency, HBM contention, bank conflicts, instruction fetch.

`dumped` compiles in a process of its own, `measure` counts; tpu_cycles/cases.py has the kernels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_cycles import llosim


@dataclass(frozen=True)
class Chip:
    topology: str
    clock: float
    """Hz, from public peaks; only v5e's is published."""
    bandwidth: float
    """HBM bytes a second of the whole chip."""
    cores: int
    delay_slots: int
    flop_per_cycle: int
    """Of one core's MXUs, in bfloat16."""


CHIPS = {
    "v5e": Chip("v5e:2x2", 1.5e9, 819e9, 1, 4, 131072),
    "v5p": Chip("v5p:2x2x1", 1.75e9, 2765e9, 2, 4, 131072),
    "v6e": Chip("v6e:2x2", 1.75e9, 1640e9, 1, 4, 524288),
    "tpu7x": Chip("tpu7x:2x2x1", 2.2e9, 7370e9, 2, 6, 524288),
}
UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
DUMP_FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=.*(final_bundles|packed-bundles-post-ra|utilization).*"
)


class MeasureError(RuntimeError):
    """The kernel did not compile, or its dump is missing, or was not followed to its end."""


@dataclass(frozen=True)
class Measurement:
    cycles: int
    issue: int
    fetched: int
    """Bytes copied from HBM to VMEM, in `copies` DMAs, which take `dma_cycles` at the full bandwidth."""
    copies: int
    dma_cycles: int
    ratio: float | None
    """None if nothing was fetched: XLA places a small operand in VMEM where the kernel does not ask for HBM."""
    stored: int
    """Bytes copied from VMEM to HBM; the ratio does not count them."""
    mxu: float
    """Share of a core's MXU peak: flops / (cycles * flop_per_cycle)."""
    slots: dict[str, int]
    """Occupancy of each unit, summed over its copies: MATMUL and MATPUSH over the MXUs of a core."""
    spills: int
    """FILL and SPILL slots."""
    inner_spills: int
    """Those in the innermost loop that multiplies matrices."""


def dumped(command: Sequence[str], folder: str | Path) -> None:
    """Runs a Python command that compiles a kernel for a TPU, so that libtpu leaves its program in the folder."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program out of the cache is not dumped
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder),
    }
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"does not compile: {_reason(done.stderr)}")


def _reason(stderr: str) -> str:
    """The line of a traceback that says what went wrong; libtpu's own stack follows it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (raised or lines or ["killed"])[-1][:500]


def dump_files(folder: str | Path, tag: str) -> tuple[Path, Path]:
    """The program and the slots of each of its bundles, of the one kernel with `tag` in its name."""
    program, slots = "packed-bundles-post-ra.txt", "pre-delay_hlo-static-per-bundle-utilization.txt"
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(Path(folder).glob("*.txt")):
        if name := re.fullmatch(rf"\d+-(.+)-\d+-({re.escape(program)}|{re.escape(slots)})", path.name):
            found.setdefault(name[1], {})[name[2]] = path
    kernels = [name for name in found if tag in name]
    if len(kernels) != 1:
        problem = f"{len(kernels)} kernels" if kernels else "no kernel"
        raise MeasureError(f"{problem} with {tag!r} in the name in {folder}; it has {', '.join(found) or 'none'}")
    files = found[kernels[0]]
    if len(files) != 2:
        raise MeasureError(f"the dump of {kernels[0]} in {folder} is not complete: it has {', '.join(files)}")
    return files[program], files[slots]


def utilization(path: Path) -> list[list[int]]:
    """Slots used in each bundle, in the order of UNITS."""
    _, found, table = path.read_text(errors="replace").partition("== UTILIZATION")
    rows = [[int(word) for word in line.split()] for line in table.splitlines()[1:] if line.strip()]
    if not found or any(len(row) != len(UNITS) for row in rows):
        raise MeasureError(f"{path} has no table of {len(UNITS)} units")
    return rows


def placed(program: llosim.Program, operands: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """The operands as they lie in memory, after a check against the program's own."""
    known = {index: f"{kind}{list(shape)}" for index, (kind, shape) in program.operands.items()}
    if missing := sorted(set(operands) - set(known)):
        raise MeasureError(f"the program has no operands {missing}: it has {known}")
    words = {}
    for index, values in operands.items():
        try:
            words[index] = llosim.as_laid_out(values, program.operands[index][1])
        except ValueError as error:
            raise MeasureError(f"operand {index}: {error}; the program has {known}") from None
    if missing := sorted(program.scalars - set(operands)):
        raise MeasureError(f"operands {missing} are scalars and were not given: the program has {known}")
    return words


def measure(
    folder: str | Path,
    tag: str,
    chip: str,
    operands: Mapping[int, Sequence[int]],
    flops: int = 0,
    cores: int | None = None,
) -> Measurement:
    """Runs the dumped program.

    operands: {operand number: its int32 values, row-major and flat} for the scalar operands, in the order of the
    compiled custom call (a dynamic grid bound, if there is one, is operand 0). flops: those of the whole call.
    cores: how many share the chip's bandwidth, all by default; 1 for a kernel that leaves the others idle.

    Where the call is split between two cores (megacore, v5p), all numbers are those of one, which does half of it.
    """
    spec = CHIPS[chip]
    program_file, slots_file = dump_files(folder, tag)
    program = llosim.Program(program_file, spec.delay_slots)
    if program.megacore and cores == 1:
        raise MeasureError(f"{program_file.name} is split between two cores: it has not the bandwidth for itself")
    rows = utilization(slots_file)
    if len(rows) != len(program.addresses):
        raise MeasureError(f"{program_file} has {len(program.addresses)} bundles, {slots_file} {len(rows)}")
    run = program.run(placed(program, operands))
    if not run.ended or run.unknown:
        raise MeasureError(f"the program was not followed to its end: {run.cycles} bundles, {dict(run.unknown)}")
    fetched = run.dma["hbm_to_vmem_bytes"]
    dma_cycles = fetched / (spec.bandwidth / (cores or spec.cores)) * spec.clock
    slots = _used(run.counts, rows)
    return Measurement(
        cycles=run.cycles,
        issue=sum(count for count, issued in zip(run.counts, program.issued, strict=True) if issued),
        fetched=fetched,
        copies=run.dma["hbm_to_vmem"],
        dma_cycles=round(dma_cycles),
        ratio=round(run.cycles / dma_cycles, 3) if fetched else None,
        stored=run.dma["vmem_to_hbm_bytes"],
        mxu=flops / (2 if program.megacore else 1) / (run.cycles * spec.flop_per_cycle),
        slots=slots,
        spills=slots["FILL"] + slots["SPILL"],
        inner_spills=_inner_spills(program.depth, run.counts, rows),
    )


def _used(counts: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[str, int]:
    """Slots of each unit in all bundles executed."""
    return {unit: sum(n * row[i] for n, row in zip(counts, rows, strict=True)) for i, unit in enumerate(UNITS)}


def _inner_spills(depth: Sequence[int], counts: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    """FILL and SPILL slots at the depth of the innermost loop with matrix work (deeper ones only search or copy)."""
    multiplies = [d for d, row in zip(depth, rows, strict=True) if row[UNITS.index("MATPUSH")]]
    inner = max(multiplies or depth)
    slots = _used([n if d == inner else 0 for d, n in zip(depth, counts, strict=True)], rows)
    return slots["FILL"] + slots["SPILL"]
