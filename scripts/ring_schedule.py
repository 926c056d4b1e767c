#!/usr/bin/env python
"""What ring attention costs, without a ring: the ranks' work in each order, and DMA against compute on four chips.

    python scripts/ring_schedule.py                the tables, in Markdown
    python scripts/ring_schedule.py --cycles       with the kernel's inner block counted from its schedule (minutes)
    python scripts/ring_schedule.py --ranks 4 8    of some rings

Work is pairs of a query and a key that it sees. Balance is mean / max over ranks: of the whole ring, and of each hop,
of which the worst is shown; "all hops" is what is left if every hop waits for its slowest rank.

A hop sends a rank's K and V once in either direction of the ring, each over a link of its own, while the rank computes
on what it holds: its own block in hop 0, two blocks in the others. In zigzag order half of a block is seen on average.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tpu_cycles.measure import CHIPS, MeasureError, Measurement, dumped, measure

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B, model = 1
TOKENS = 2048, 8192
RANKS = 4, 8, 16, 64
COUNTED = 2048
"""Queries and keys of the call whose cycles are counted, of one kv head; every query sees every key."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX calls a device: a chip, on a TPU7x one of its two cores.

    Attributes:
      flops: a second, bfloat16, at the peak; on a v5p those of one of the two cores, as the kernel runs on one.
      link: bytes a second of one ICI link in one direction.
    """

    flops: float
    link: float


# Peaks, and the bidirectional ICI bandwidth of a chip (400, 1200, 800, 1200 GB/s):
#   https://docs.cloud.google.com/tpu/docs/v5e
#   https://docs.cloud.google.com/tpu/docs/tpu7x (its table has v5p, v6e and TPU7x)
# A chip of a 2D torus (v5e, v6e) has 4 links, of a 3D torus (v5p, TPU7x) 6, and a link half its bandwidth each way.
# The two devices of a TPU7x chip share its links; a ring that runs through both uses each link for one of them.
DEVICES = {
    "v5e": Device(197e12, 400e9 / 4 / 2),
    "v5p": Device(459e12 / 2, 1200e9 / 6 / 2),
    "v6e": Device(918e12, 800e9 / 4 / 2),
    "tpu7x": Device(2307e12 / 2, 1200e9 / 6 / 2),
}


def balance_table(ranks: Sequence[int], tokens: int = 512) -> list[str]:
    """Of plain, striped and zigzag order."""
    from kvjax.pallas_kernels.ring_attention import balance, plain, striped, zigzag

    lines = ["| ranks | order | whole ring | worst hop | all hops |", "|---|---|---|---|---|"]
    for n in ranks:
        for order in (plain, striped, zigzag):
            done = balance(order, n, tokens)
            numbers = (done.overall, min(done.hops), done.stepped)
            lines.append(f"| {n} | {order.__name__} | " + " | ".join(f"{100 * x:.1f} %" for x in numbers) + " |")
    return lines


def steps_table(n: int = 4, tokens: int = 512) -> list[str]:
    """Each rank's share of each hop, in percent of the mean rank's whole work."""
    from kvjax.pallas_kernels.ring_attention import plain, striped, work, zigzag

    lines = ["| order | hop | " + " | ".join(f"rank {r}" for r in range(n)) + " |", "|---" * (n + 2) + "|"]
    for order in (plain, striped, zigzag):
        done = work(order(n, tokens))
        whole = done.sum() / n
        for hop, row in enumerate(done):
            lines.append(f"| {order.__name__} | {hop} | " + " | ".join(f"{100 * x / whole:.1f}" for x in row) + " |")
    return lines


def chip_table(shares: dict[str, float]) -> list[str]:
    """DMA and compute of a hop.

    shares: of the peak that the kernel reaches, where it is known.
    """
    lines = [
        "| chip | tokens | storage | DMA of a hop | compute: hop 0 | others | DMA / compute: hop 0 | others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for chip, device in DEVICES.items():
        for tokens in TOKENS:
            for storage, width in (("bfloat16", 2.0), ("int8", 1.0)):
                scale = 0 if storage == "bfloat16" else 4 / HEAD_DIM  # of a row
                dma = tokens * 2 * KV_HEADS * HEAD_DIM * (width + scale) / device.link
                block = 4 * HEADS * HEAD_DIM * tokens * tokens / 2 / device.flops  # half of a block is seen
                own, others = (x * block / shares.get(chip, 1.0) for x in (1, 2))
                if tokens == 2048 or storage == "bfloat16":
                    lines.append(
                        f"| {chip} | {tokens} | {storage} | {1e6 * dma:.0f} µs | {1e6 * own:.0f} µs "
                        f"| {1e6 * others:.0f} µs | {dma / own:.2f} | {dma / others:.2f} |"
                    )
    return lines


# --- The kernel's inner block: cycles of its schedule ------------------------------------------------------------


def _attend(storage: str, backend: str = "tpu"):
    """The op on one device, and the shapes and dtypes of its arguments."""
    import jax.numpy as jnp

    from kvjax.pallas_kernels.ring_attention import AttentionSpec, ring_attention

    spec = AttentionSpec(HEAD_DIM**-0.5)
    group = HEADS // KV_HEADS
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((COUNTED, group, HEAD_DIM), jnp.bfloat16),
        ((COUNTED, 1, HEAD_DIM), jnp.dtype(storage)),
        ((COUNTED, 1, HEAD_DIM), jnp.dtype(storage)),
        ((COUNTED,), jnp.int32),
        ((COUNTED,), jnp.int32),
    ]
    if storage != "bfloat16":
        shapes.append(((COUNTED, 2), jnp.float32))

    def attend(q, k, v, q_positions, kv_positions, scales=None):
        return ring_attention(
            q, k, v, q_positions, kv_positions, spec, axis="seq", scales=scales, backend=backend
        )  # fmt: skip

    return attend, shapes


def compile_for(chip: str, storage: str) -> None:
    """Compiles the kernel for one device of a chip, in a process that leaves its program behind."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices[0]
    mesh = Mesh(np.array([device]), ("seq",))
    attend, shapes = _attend(storage)
    here = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in shapes]
    ring = jax.shard_map(
        attend, mesh=mesh, in_specs=(PartitionSpec(),) * len(arrays), out_specs=PartitionSpec(), check_vma=False
    )
    jax.jit(ring).lower(*arrays).compile()


def operands(storage: str) -> dict[int, list[int]]:
    """The int32 operands of the kernel, by number: its list of visits and who is where."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from kvjax.pallas_kernels.ring_attention import tpu

    found: dict[int, list[int]] = {}

    def instead(*_, out_shape, **__):
        def call(*arrays):
            for number, x in enumerate(arrays):
                if x.dtype == jnp.int32:
                    keep = lambda value, number=number: found.update({number: np.asarray(value).ravel().tolist()})  # noqa: E731
                    jax.debug.callback(keep, x)
            return [jnp.zeros(shape.shape, shape.dtype) for shape in out_shape]

        return call

    attend, shapes = _attend(storage)
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    arrays[4] = jnp.arange(COUNTED, dtype=jnp.int32)
    arrays[3] = arrays[4] + COUNTED
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("seq",))
    everywhere = PartitionSpec()
    with mock.patch.object(tpu.pl, "pallas_call", instead):
        ring = jax.shard_map(
            attend, mesh=mesh, in_specs=(everywhere,) * len(arrays), out_specs=everywhere, check_vma=False
        )
        jax.block_until_ready(jax.jit(ring)(*arrays))
        jax.effects_barrier()
    return found


def counted(chip: str, storage: str) -> Measurement:
    """Cycles of the kernel on one device, every block unmasked, no ring around it."""
    with tempfile.TemporaryDirectory() as folder:
        dumped([__file__, "--compile", chip, storage], folder)
        flops = 4 * (HEADS // KV_HEADS) * HEAD_DIM * COUNTED * COUNTED
        return measure(folder, "kvjax_ring_attention", chip, operands(storage), flops, 1)


def cycles_table(storages: Sequence[str] = ("bfloat16", "int8")) -> tuple[list[str], dict[str, float]]:
    """The table, and the share of the MXU's peak that bfloat16 reaches on each chip."""
    lines = ["| chip | storage | cycles of a visit | share of the MXU's peak | spills |", "|---|---|---|---|---|"]
    shares = {}
    for chip in DEVICES:
        for storage in storages:
            try:
                result = counted(chip, storage)
            except MeasureError as error:
                lines.append(f"| {chip} | {storage} | {error} | | |")
                continue
            visits = sum(operands(storage)[0])
            numbers = f"{result.cycles / visits:.0f} | {100 * result.mxu:.0f} % | {result.inner_spills}"
            lines.append(f"| {chip} | {storage} | {numbers} |")
            if storage == "bfloat16":
                shares[chip] = result.mxu
    return lines, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--cycles", action="store_true", help="count the cycles of the kernel's inner block")
    parser.add_argument("--compile", nargs=2, metavar=("CHIP", "STORAGE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_for(*options.compile)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    shares: dict[str, float] = {}
    print("\n".join(balance_table(options.ranks)), "\n")
    print("\n".join(steps_table()), "\n")
    if options.cycles:
        lines, shares = cycles_table()
        print("\n".join(lines), "\n")
    print("\n".join(chip_table(shares)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
