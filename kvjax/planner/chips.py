"""What there is to run on: memory that a program can use, and peak figures for estimates.

Memory of TPUs is what XLA's compiler says it has: programs that are too large for it were compiled ahead of time for
every kind, and the error of libtpu 0.0.52 names the limit ("exceeds available HBM (95.73G)"). It is less than the data
sheet's, since the runtime reserves some.

Peak figures of TPUs are Google Cloud's documentation (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x, read in
2026), per chip: bfloat16 and 8-bit operations, HBM bandwidth, and the bidirectional interconnect bandwidth that
`_axis` divides over the links of a torus. Those of GPUs are NVIDIA's data sheets of the SXM modules, without sparsity.
"""

from __future__ import annotations

import dataclasses
import math
import re

from kvjax.errors import RequestError

_GIB = 2**30
_GPU_SHARE = 0.75  # of its memory JAX takes at the start, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of accelerator. All numbers are those of one JAX device.

    Attributes:
      name: as users write it.
      platform: "tpu" or "gpu".
      hbm: bytes that a program can use.
      flops: bfloat16 operations a second.
      flops_8bit: the same of 8-bit numbers (int8; float8 on a 7x). Estimates leave it out: kernels multiply bfloat16.
      bandwidth: bytes a second between HBM and the cores.
      link: bytes a second that a device sends along one axis of a mesh.
      latency: seconds for a message to the neighbour.
      dims: of the torus; 0 where every device is every other's neighbour.
      devices: JAX devices a chip.
      most: chips in one slice, or GPUs in one machine.
    """

    name: str
    platform: str
    hbm: int
    flops: float
    flops_8bit: float
    bandwidth: float
    link: float
    latency: float
    dims: int
    devices: int
    most: int


def _axis(bidirectional: float, dims: int) -> float:
    """Bytes a second that a chip sends along one axis of its torus: half of the traffic is incoming."""
    return bidirectional / 2 / dims


# About 1 µs from a chip to its neighbour: the "scaling book" (jax-ml.github.io/scaling-book, part 2).
_TPU_HOP, _GPU_HOP = 1e-6, 3e-6

CHIPS = {
    chip.name: chip
    for chip in (
        # One device a chip, as on a v4 VM (megacore). Its libtpu has 30.75 GiB, not the 31.25 of a v6e.
        Chip("v4", "tpu", int(30.75 * _GIB), 275e12, 275e12, 1200e9, _axis(600e9, 3), _TPU_HOP, 3, 1, 4096),
        Chip("v5e", "tpu", int(15.75 * _GIB), 197e12, 393e12, 819e9, _axis(400e9, 2), _TPU_HOP, 2, 1, 256),
        Chip("v5p", "tpu", int(95.73 * _GIB), 459e12, 918e12, 2765e9, _axis(1200e9, 3), _TPU_HOP, 3, 1, 8960),
        Chip("v6e", "tpu", int(31.24 * _GIB), 918e12, 1836e12, 1638e9, _axis(800e9, 2), _TPU_HOP, 2, 1, 256),
        # Two devices share a chip: 2,307 Tflop/s, 7,370 GB/s and 1,200 GB/s of links.
        Chip(
            "7x", "tpu", int(94.74 * _GIB), 2307e12 / 2, 4614e12 / 2, 7370e9 / 2, _axis(600e9, 3), _TPU_HOP, 3, 2, 9216
        ),
        Chip("a100", "gpu", int(80 * _GIB * _GPU_SHARE), 312e12, 624e12, 2039e9, 300e9, _GPU_HOP, 0, 1, 8),
        Chip("h100", "gpu", int(79.6 * _GIB * _GPU_SHARE), 989e12, 1979e12, 3350e9, 450e9, _GPU_HOP, 0, 1, 8),
        Chip("h200", "gpu", int(139.8 * _GIB * _GPU_SHARE), 989e12, 1979e12, 4800e9, 450e9, _GPU_HOP, 0, 1, 8),
        Chip("b200", "gpu", int(178 * _GIB * _GPU_SHARE), 2250e12, 4500e12, 8000e9, 900e9, _GPU_HOP, 0, 1, 8),
    )
}
_ALIASES = {"tpu7x": "7x", "v7x": "7x", "ironwood": "7x", "trillium": "v6e", "v5litepod": "v5e", "v4p": "v4"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """So many chips of a kind.

    Attributes:
      chip: the kind.
      chips: how many.
      topology: their torus, or None where only their number is known.
    """

    chip: Chip
    chips: int
    topology: tuple[int, ...] | None = None

    @property
    def devices(self) -> int:
        """What a mesh is made of."""
        return self.chips * self.chip.devices

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.topology)) if self.topology else self.chips}"


def parse_chips(text: str) -> Slice:
    """Chips as users name them: "v5e:16", "v5e:4x4", "v5p:4x4x4", "h100:8", or "v5e" for one.

    Raises:
      RequestError: no such kind, or not so many of it.
    """
    name, _, size = str(text).strip().lower().partition(":")
    chip = CHIPS.get(_ALIASES.get(name, name))
    if chip is None:
        raise RequestError(f"chips is {text!r}: give a kind and a number or topology, of {', '.join(CHIPS)}.")
    if not re.fullmatch(r"\d{1,6}(x\d{1,6})*", size or "1"):
        example = "8" if not chip.dims else f"16 or {'x'.join(['4'] * chip.dims)}"
        raise RequestError(f"chips is {text!r}: after the colon a number or a topology is needed, such as {example}.")
    sizes = tuple(map(int, (size or "1").split("x")))
    topology = sizes if len(sizes) > 1 else None
    if topology and len(topology) != chip.dims:
        shape = f"a torus of {chip.dims} dimensions" if chip.dims else "no torus"
        raise RequestError(f"chips is {text!r}: {chip.name} has {shape}, so its topology cannot be {size}.")
    chips = math.prod(sizes)
    if not 1 <= chips <= chip.most:
        where = "slice" if chip.dims else "machine"
        raise RequestError(f"chips is {text!r}: a {where} has 1 to {chip.most} of {chip.name}, not {chips}.")
    return Slice(chip, chips, topology)
