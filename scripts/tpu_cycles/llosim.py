"""Runs the scalar half of a dumped TPU kernel, so that bundles are counted on the path really taken.

A *final_bundles.txt or *packed-bundles-post-ra.txt dump of libtpu is a list of VLIW bundles. The scalar unit decides
every branch, loop and DMA; the vector slots decide nothing. So: interpret the scalar slots with the real page table and
lengths in SMEM, ignore the vector slots, and count what was executed.
"""

from __future__ import annotations

import collections
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

GRANULE = 32
"""Bytes of the unit in which the dump gives the size of a DMA."""

BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:(LH|LB|LE|PB|PF|CT):|:)\s*((?:>\s*)*)\{(.*)$", re.S)
OPERAND = re.compile(r"inlined_call_operand([^\[]*) \[shape: (\w+)\[([\d,]*)\], index: (\d+), kind: (\w+)")
REGISTER = re.compile(r"%([sp]\d+)")
PREDICATE = re.compile(r"\(\s*(!?%p\d+(?:_p\d+)?)(?:\s*,\s*([^()]*))?\)")
TARGET = re.compile(r"target\s*bundleno\s*=\s*(\d+).*$|target\s*=\s*\$region(\d+).*$", re.S)
IGNORED = ("vsync", "sfence", "shalt", "strace", "sdelay", "snop", "vnop", "setrngseed", "vtrace", "slaneid")

Registers = dict[str, int]
Value = Callable[[Registers], int]


def wrap(x: int) -> int:
    """As a signed 32-bit integer."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x & 0x80000000 else x


def _near(x: int, bits: int) -> int:
    """Wrapped, unless it is an address of an operand: those are wider than 32 bits here, see `operand_of`."""
    return wrap(x) if abs(x) < 1 << bits else x


def operand_of(address: int) -> tuple[int | None, int]:
    """Operand index and offset in granules of an address; (None, 0) for memory that the compiler made.

    Operand k stands at (2k + 1) << 48, and the compiled code shifts it left by 4 bits before it copies from it.
    """
    top = address >> 48
    if top <= 0:
        return None, 0
    return (top - 1 if top & 1 else top // 16 - 1) // 2, address - (top << 48)


# --- reading a dump -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Instruction:
    """One scalar operation: dest = op(args), if the predicate holds; else dest = otherwise."""

    op: str
    dest: str | None = None
    args: Sequence[Value] = ()
    reads: Sequence[str] = ()
    predicate: Value | None = None
    otherwise: Value | None = None
    target: tuple[str, int] | None = None
    """Of a branch: ("bundle", address) or ("region", number)."""
    operand: int = -1
    """Of an inlined_call_operand: its index."""


def split_bundles(text: str) -> list[str]:
    """The bundles of a dump, each with its continuation lines."""
    bundles: list[list[str]] = []
    for line in text.splitlines():
        if BUNDLE.match(line):
            bundles.append([line])
        elif bundles:
            bundles[-1].append(line)
    return ["\n".join(lines) for lines in bundles]


def split_args(text: str) -> list[str]:
    """Splits at the commas that stand outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _term(token: str) -> Value:
    """A register, a number or the address of an allocation; what else stands in a dump counts as 0."""
    if found := REGISTER.match(token):
        name = found[1]
        return lambda registers: registers.get(name, 0)
    if found := re.match(r"#allocation(\d+)", token):
        number = int(found[1]) << 20
    elif re.fullmatch(r"-?\d+", token):
        number = wrap(int(token))
    elif found := re.fullmatch(r"\$?(0x[0-9a-f]+)", token):
        number = int(found[1], 16)
    else:
        number = 0
    return lambda registers: number


def parse_value(token: str) -> Value:
    """How to get an operand: %s21_s2, !%p3_p1, 4294967295, or an address like [smem:[#allocation8 + %s21_s2]]."""
    token = token.strip()
    if token.startswith("["):
        inner = re.sub(r"^\[(?:\w+:\[)?|\]+$", "", token)
        terms = tuple(_term(part.split()[0]) for part in inner.split("+") if part.strip())
        return lambda registers: sum(term(registers) for term in terms)
    if token.startswith("!"):
        inverted = _term(token[1:])
        return lambda registers: int(not inverted(registers))
    return _term(token)


def parse_instruction(text: str) -> Instruction | None:
    """A slot of a bundle; None for vector slots and for scalar slots that change nothing here."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S).strip()
    found = re.match(r"(?:%(\w+?)\s*=\s*)?(\S+)(.*)$", text, re.S)
    if not found:
        return None
    name, op, body = found[1] or "", found[2], found[3].strip()
    register = re.match(r"([a-z]+)(\d+)(?:_|$)", name)
    if register and register[1] not in ("s", "p"):
        return None
    dest = register[1] + register[2] if register else None  # no dest: an unnamed id such as %123
    if operand := OPERAND.match(f"{op} {body}"):
        return Instruction(op, dest, operand=int(operand[4]))
    if op.startswith("dma.done"):
        return Instruction("dma.done")
    if op.startswith(IGNORED) or (op.startswith("v") and not dest):
        return None
    return _parse_body(op, dest, body)


def _parse_body(op: str, dest: str | None, body: str) -> Instruction:
    instruction = Instruction(op, dest, reads=REGISTER.findall(body))
    body = re.sub(r"^\[(?:thread|resolvable):[^\]]*\]\s*", "", body)
    if guard := PREDICATE.search(body):
        instruction.predicate = parse_value(guard[1])
        instruction.otherwise = parse_value(guard[2]) if guard[2] else None
        body = body[: guard.start()] + body[guard.end() :]
    if target := TARGET.search(body):
        instruction.target = ("bundle", int(target[1])) if target[1] else ("region", int(target[2]))
        body = body[: target.start()]
    if op in ("sld", "sst"):
        body = body.replace("]]", "]],", 1)  # sst [smem:[address]] value
    instruction.args = tuple(map(parse_value, split_args(body)))
    return instruction


def in_order(instructions: list[Instruction]) -> list[Instruction]:
    """Phis first, then producers before consumers: chains of int_to_ptr stand in one bundle."""
    order = [x for x in instructions if x.op == "sphi"]
    pending = [x for x in instructions if x.op != "sphi"]
    while pending:
        dests = {x.dest for x in pending if x.dest}
        ready = (x for x in pending if not any(read in dests and read != x.dest for read in x.reads))
        chosen = next(ready, pending[0])
        pending.remove(chosen)
        order.append(chosen)
    return order


# --- what the scalar unit computes ----------------------------------------------------------------------------
def _unsigned(function: Callable[[int, int], int], bits: int = 32) -> Callable[[int, int], int]:
    mask = (1 << bits) - 1
    return lambda a, b: function(a & mask, b & mask)


PURE: dict[str, Callable[..., int]] = {
    "smov.u32": lambda a: a,
    "pmov": lambda a: a,
    "pneg": lambda a: int(not a),
    "sadd.s32": lambda a, b: _near(a + b, 33),
    "ssub.s32": lambda a, b: _near(a - b, 33),
    "smul.u32": lambda a, b: wrap(a * b),
    "smul.s32": lambda a, b: wrap(a * b),
    "smulhi.u32": _unsigned(lambda a, b: wrap(a * b >> 32)),
    "smul.u32.hi": _unsigned(lambda a, b: wrap(a * b >> 32)),
    "sshll.u32": lambda a, b: _near(a << (b & 31), 35),
    "sshra.s32": lambda a, b: a >> (b & 31),
    "sshrl.u32": lambda a, b: (a & 0xFFFFFFFF) >> (b & 31),
    "sand.u32": lambda a, b: wrap(a & b),
    "sor.u32": lambda a, b: wrap(a | b),
    "sxor.u32": lambda a, b: wrap(a ^ b),
    "smax.s32": max,
    "smax.u32": _unsigned(lambda a, b: wrap(max(a, b))),
    "smin.s32": min,
    "smin.u32": _unsigned(lambda a, b: wrap(min(a, b))),
    "scalar_select": lambda predicate, a, b: a if predicate else b,
    "por": lambda a, b: int(bool(a) or bool(b)),
    "pand": lambda a, b: int(bool(a) and bool(b)),
    "pxor": lambda a, b: int(bool(a) != bool(b)),
    "pnand": lambda a, b: int(not (a and b)),
    "pnor": lambda a, b: int(not (a or b)),
}
PREFIXED: dict[str, Callable[..., int]] = {
    "scalar_lea": lambda a, *more: a + sum(more[:1]),
    "int_to_ptr": lambda *args: args[-1],
    # What comes from vector registers or status registers decides no branch, loop or DMA.
    "spop": lambda *args: 0,
    "vtos": lambda *args: 0,
    "sfrf": lambda *args: 0,
}


def pure(op: str) -> Callable[..., int] | None:
    """The function of an operation that touches nothing but registers; None for what is unknown."""
    if op in PURE:
        return PURE[op]
    if op.startswith("scmp."):  # scmp.lt.s32.totalorder
        _, relation, kind = op.split(".")[:3]
        compare = getattr(operator, relation)
        return _unsigned(compare, 64) if kind.startswith("u") else compare
    return next((function for prefix, function in PREFIXED.items() if op.startswith(prefix)), None)


# --- running it -----------------------------------------------------------------------------------------------
@dataclass
class Run:
    """What was executed: how often each bundle, how many copies and bytes of each kind."""

    counts: list[int]
    dma: collections.Counter[str] = field(default_factory=collections.Counter)
    """hbm_to_vmem → copies, hbm_to_vmem_bytes → their bytes, and so on; waits; spill_in, spill_out (of scalars)."""
    unknown: collections.Counter[str] = field(default_factory=collections.Counter)
    """What was executed but not understood: the counts are not to be trusted."""
    cycles: int = 0
    ended: bool = False


class Program:
    """A dump, parsed. `slots` is the chip's number of branch delay slots.

    addresses, labels, depth (how many loops a bundle stands in), instructions and issued (whether anything stands in
    it) are lists with an item for each bundle.
    """

    def __init__(self, path: str | Path, slots: int) -> None:
        self.slots = slots
        self.addresses: list[int] = []
        self.labels: list[str | None] = []
        self.depth: list[int] = []
        self.instructions: list[list[Instruction]] = []
        self.issued: list[bool] = []
        self.operands: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Inputs: index → (type, shape)."""
        self.megacore = False
        """Whether the call is split between two cores, and what core 0 does of it is run: it asks which core it is on,
        and not only to let the other one idle."""
        self.scalars: set[int] = set()
        """Inputs that come in a register: each is one word."""
        self._regions: dict[int, int] = {}
        text = Path(path).read_text(errors="replace")
        for bundle in split_bundles(text):
            self._add(bundle)
        for core in re.findall(r"(%s\w+) = sld [^;]*megacore core id", text):
            idles = re.findall(rf"scmp\.\w+\.s32\.totalorder {core}, 0\b", text)
            self.megacore |= len(re.findall(rf"{core}\b", text)) > 1 + len(idles)
        self._index = {address: index for index, address in enumerate(self.addresses)}

    def _add(self, bundle: str) -> None:
        found = BUNDLE.match(bundle)
        assert found
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle):
            self._regions.setdefault(int(region), len(self.addresses))
        for memory, kind, shape, index, role in OPERAND.findall(bundle):
            if role == "input":
                self.operands[int(index)] = kind, tuple(map(int, shape.split(","))) if shape else ()
                self.scalars |= {int(index)} if memory.startswith(".<no") else set()
        self.addresses.append(int(found[1], 16))
        self.labels.append(found[2])
        self.depth.append(found[3].count(">"))
        self.issued.append(
            "{}" not in bundle
        )  # nor in its comments: the first bundle, with the operands, counts as empty
        body = found[4].rpartition("}")[0]
        slots = (parse_instruction(slot) for slot in body.split(";;"))
        self.instructions.append(in_order([slot for slot in slots if slot is not None]))

    def bundle_of(self, target: tuple[str, int]) -> int:
        kind, number = target
        return self._index[number] if kind == "bundle" else self._regions[number]

    def run(self, operands: Mapping[int, Sequence[int]], max_bundles: int = 10_000_000) -> Run:
        """Executes the program. operands: {index: the words of that operand, as they lie in memory}."""
        machine = _Machine(self, operands)
        bundle = 0
        target: int | None = None
        delay = 0
        while bundle < len(self.addresses) and machine.run.cycles < max_bundles:
            taken = machine.execute(bundle)
            if taken is not None and target is None:
                target, delay = self.bundle_of(taken), self.slots + 1
            bundle += 1
            if target is not None:
                delay -= 1
                if delay == 0:
                    bundle, target = target, None
        machine.run.ended = bundle >= len(self.addresses)
        return machine.run

    def trips(self, run: Run) -> list[int]:
        """How often the body of each loop was entered, in the order of the dump."""
        return [count for count, label in zip(run.counts, self.labels, strict=True) if label == "LB"]


class _Machine:
    """Registers, SMEM and spilled scalars while a program runs."""

    def __init__(self, program: Program, operands: Mapping[int, Sequence[int]]) -> None:
        self.program = program
        self.operands = operands
        self.registers: Registers = {}
        self.written: dict[str, float] = {}
        """When a register was last written: a phi takes the younger of its two."""
        self.smem: dict[int, int] = {}
        self.spilled: dict[int, int] = {}
        self.run = Run([0] * len(program.addresses))

    def execute(self, bundle: int) -> tuple[str, int] | None:
        """Executes a bundle; the target of the branch that it takes, if it takes one."""
        self.run.counts[bundle] += 1
        taken = None
        for instruction in self.program.instructions[bundle]:
            if instruction.op == "sphi":
                youngest = max(instruction.reads, key=lambda name: self.written.get(name, -1))
                self._write(instruction, self.registers.get(youngest, 0), 0.25)
            elif instruction.predicate is not None and not instruction.predicate(self.registers):
                if instruction.otherwise is not None:
                    self._write(instruction, instruction.otherwise(self.registers))
            elif instruction.op.startswith("sbr"):
                taken = instruction.target
            else:
                self._perform(instruction)
        self.run.cycles += 1
        return taken

    def _write(self, instruction: Instruction, value: int, when: float = 0.5) -> None:
        if instruction.dest is not None:
            self.registers[instruction.dest] = value
            self.written[instruction.dest] = self.run.cycles + when

    def _perform(self, instruction: Instruction) -> None:
        op = instruction.op
        if op.startswith("inlined_call_operand"):
            self._write(instruction, self._argument(instruction), 0)
            return
        values = [value(self.registers) for value in instruction.args]
        if op == "sld":
            self._write(instruction, self.smem.get(values[0], 0))
        elif op == "sst":
            self.smem[values[0]] = values[1]
        elif op == "dma.done":
            self.run.dma["waits"] += 1
        elif op.startswith("dma."):
            self._copy(op.removeprefix("dma."), *values[:3])
        elif (function := pure(op)) is not None:
            self._write(instruction, int(function(*values)))
        else:
            self.run.unknown[op] += 1
            self._write(instruction, 0)

    def _argument(self, instruction: Instruction) -> int:
        """The value of a scalar operand, which comes in a register, or the address of another."""
        index = instruction.operand
        return self.operands.get(index, [0])[0] if "<no" in instruction.op else (2 * index + 1) << 48

    def _copy(self, kind: str, source: int, granules: int, destination: int) -> None:
        """Starts a DMA; only copies to and from SMEM move anything."""
        if kind.endswith("_to_smem"):
            for offset, word in enumerate(self._read(source, max(0, granules) * GRANULE // 4)):
                self.smem[destination + offset] = word
        elif kind.startswith("smem_to_") and operand_of(destination)[0] is None:
            self.run.dma["spill_out"] += 1
            for offset in range(max(0, granules) * GRANULE // 4):
                self.spilled[destination + offset] = self.smem.get(source + offset, 0)
        else:
            self.run.dma[kind] += 1
            self.run.dma[kind + "_bytes"] += max(granules, 0) * GRANULE

    def _read(self, address: int, words: int) -> Sequence[int]:
        index, offset = operand_of(address)
        if index is None:
            self.run.dma["spill_in"] += 1
            return [self.spilled.get(address + word, 0) for word in range(words)]
        if index not in self.operands:
            self.run.unknown[f"a copy of operand {index}, which was not given, to SMEM"] += 1
            return []
        first = offset * GRANULE // 4
        return self.operands[index][first : first + words]


# --- operands -------------------------------------------------------------------------------------------------
def as_laid_out(values: Sequence[int], shape: tuple[int, ...]) -> list[int]:
    """The words of an int32 array as they lie in memory: rows of 128, in tiles of up to 8 rows. values: row-major."""
    if len(values) != prod(shape):
        raise ValueError(f"{len(values)} values for an operand of shape {list(shape)}")
    if len(shape) < 2:
        return list(values)
    *_, rows, columns = shape
    height = min(8, 1 << (rows - 1).bit_length())
    return [
        values[(plane * rows + row) * columns + column] if row < rows and column < columns else 0
        for plane in range(prod(shape[:-2]))
        for top in range(0, rows, height)
        for left in range(0, columns, 128)
        for row in range(top, top + height)
        for column in range(left, left + 128)
    ]
