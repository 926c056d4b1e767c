"""The kernels that scripts/tpu_roofline.py measures. A new one: a function that returns a Case, a line in `cases`.

Run as a program it compiles one of them, in a process of its own: python -m tpu_cycles.cases NAME CHIP
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_cycles.measure import CHIPS

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PAGES = (16, 64, 128, 256)
SEQUENCES, CONTEXT = 4, 4096
CHUNK = 512
"""Tokens of a prefill, after CONTEXT older ones."""

Spec = Callable[..., Any]
"""(shape, dtype, bfloat16 by default) → a jax.ShapeDtypeStruct on the chip."""


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: str
    storage: str
    page: int
    tag: str
    """Part of the kernel's name in the dump."""
    compile: Callable[[str], object]
    """Given a chip: jit(...).trace(...).lower().compile() of arguments on that chip, see `chip_of`."""
    operands: Mapping[int, Sequence[int]] | Callable[[], Mapping[int, Sequence[int]]]
    """Values of the scalar operands, see `measure.measure`; or a function that finds them."""
    flops: int
    """Of the whole call."""
    sequences: int
    """The table's numbers are those of the call divided by this."""
    megacore: bool = False
    """Whether the call is split between the two cores of a v5p. If not, one of them has the chip's bandwidth."""
    note: str = ""

    @property
    def name(self) -> str:
        return "/".join((self.kernel, self.shape, self.storage, f"page{self.page}")).replace(" ", "_")

    def cores(self, chip: str) -> int:
        """How many share the bandwidth: the cores of a 7x are devices of their own, which all work."""
        return 1 if chip == "v5p" and not self.megacore else CHIPS[chip].cores


@contextlib.contextmanager
def chip_of(chip: str) -> Iterator[Spec]:
    """A maker of arguments on that chip; inside, what asks for the current chip gets this one."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices[0]
    sharding = SingleDeviceSharding(device)
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=abstract)):
        yield lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def attention_flops(tokens: int, before: int) -> int:
    """Of QK^T and PV, causal, for `tokens` of one sequence that has `before` older ones."""
    return 4 * HEADS * HEAD_DIM * (tokens * before + tokens * (tokens + 1) // 2)


# --- JAX's own ------------------------------------------------------------------------------------------------
def jax_paged(page: int) -> Case:
    """jax.experimental.pallas.ops.tpu.paged_attention, decode, 4,096 tokens a compute block."""
    pages = SEQUENCES * CONTEXT // page

    def compile(chip: str) -> None:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        mode = "batch" if chip == "v5p" else None

        def attend(*arguments):
            return paged_attention(*arguments, pages_per_compute_block=CONTEXT // page, megacore_mode=mode)

        with chip_of(chip) as spec:
            kv = spec(KV_HEADS, pages, page, HEAD_DIM)
            lengths, table = spec(SEQUENCES, dtype=jnp.int32), spec(SEQUENCES, CONTEXT // page, dtype=jnp.int32)
            jax.jit(attend).trace(spec(SEQUENCES, HEADS, HEAD_DIM), kv, kv, lengths, table).lower().compile()

    return Case(
        "jax_paged",
        f"decode {CONTEXT}",
        "bfloat16",
        page,
        "paged_attention",
        compile,
        {0: [CONTEXT] * SEQUENCES, 1: range(pages), 2: [0], 3: [1]},
        SEQUENCES * attention_flops(1, CONTEXT - 1),
        SEQUENCES,
        megacore=True,
        note="block 4096",
    )


def jax_ragged(page: int, tokens: int, context: int, sequences: int, block: int, queries: int) -> Case:
    """jax.experimental.pallas.ops.tpu.ragged_paged_attention: the last `tokens` of `context` rows of each sequence."""
    width = context // page

    def compile(chip: str) -> None:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        def attend(*arguments):
            return ragged_paged_attention(
                *arguments,
                sm_scale=HEAD_DIM**-0.5,
                num_kv_pages_per_block=block // page,
                num_queries_per_block=queries,
                vmem_limit_bytes=(56 if chip == "tpu7x" else 96) << 20,
            )

        with chip_of(chip) as spec:
            ints = [(sequences,), (sequences, width), (sequences + 1,), (1,)]
            jax.jit(attend).trace(
                spec(sequences * tokens, HEADS, HEAD_DIM),
                spec(sequences * width, page, 2 * KV_HEADS, HEAD_DIM),
                *(spec(*shape, dtype=jnp.int32) for shape in ints),
            ).lower().compile()

    return Case(
        "jax_ragged",
        f"decode {context}" if tokens == 1 else f"prefill {tokens} on {context - tokens}",
        "bfloat16",
        page,
        "ragged_paged_attention",
        compile,
        {
            0: [context] * sequences,
            1: range(sequences * width),
            2: [tokens * sequence for sequence in range(sequences + 1)],
            3: [0, 0],
            4: [sequences],
        },
        sequences * attention_flops(tokens, context - tokens),
        sequences,
        note=f"kv {block}, bq {queries}",
    )


def cases() -> dict[str, Case]:
    """All of them, by name."""
    from tpu_cycles.kvjax_cases import kvjax_cases

    found = [
        *kvjax_cases(),
        *(jax_paged(page) for page in PAGES),
        *(jax_ragged(page, 1, CONTEXT, SEQUENCES, block=4096, queries=4) for page in PAGES),
        jax_ragged(128, CHUNK, CONTEXT + CHUNK, 1, block=1024, queries=32),
    ]
    return {case.name: case for case in found}


if __name__ == "__main__":
    cases()[sys.argv[1]].compile(sys.argv[2])
