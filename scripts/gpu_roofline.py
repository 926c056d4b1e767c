"""Bytes, operations and the roofline time of the GPU's attention kernels, counted, not measured, on an H200.

    python scripts/gpu_roofline.py [--compile]

A kernel takes at least the longer of the time to read and write its bytes once and the time of its multiplications, at
4.8 TB/s and 790 TFLOP/s in bfloat16 (a data sheet's bandwidth, and what large products reach of 989). With --compile,
where JAX's CUDA plugin and ptxas are installed, each is also compiled; registers, spilled bytes and shared memory of a
block of threads are then ptxas's and Mosaic GPU's.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

BANDWIDTH, FLOPS = 4.8e12, 790e12
BITS = {"bfloat16": 16, "int8": 8, "float8_e4m3fn": 8, "int4": 4}


@dataclasses.dataclass(frozen=True)
class Call:
    """Attention of `slots` slots with `context` rows each, the last `queries` of which are this step's.

    Attributes:
      name: of the shape.
      slots: B.
      context: rows of a slot.
      queries: 1 to decode.
      heads: N. kv_heads: K. dim: H. value_dim: Hv.
      storage: of the pages.
      latent: whether the values are part of the keys.
    """

    name: str
    slots: int
    context: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    storage: str = "bfloat16"
    latent: bool = False

    @property
    def read(self) -> int:
        """Bytes of K, V and scales, each read once."""
        width = self.dim if self.latent else self.dim + self.value_dim
        bits = BITS[self.storage] * width
        if BITS[self.storage] < 16:
            bits += 32 * (1 if self.latent else 2)  # a float32 scale for each row of K and of V
        return self.slots * self.context * self.kv_heads * bits // 8

    @property
    def moved(self) -> int:
        """Bytes of K and V, of the queries and of the result."""
        return self.read + self.slots * self.queries * self.heads * (self.dim + self.value_dim) * 2

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, of pairs of query and key that are visible."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 2 * self.slots * self.heads * pairs * (self.dim + self.value_dim)

    @property
    def seconds(self) -> float:
        return max(self.moved / BANDWIDTH, self.operations / FLOPS)


MLA: dict[str, Any] = {"heads": 128, "kv_heads": 1, "dim": 576, "value_dim": 512, "latent": True}
CALLS = [
    *(Call("Llama-3-8B decode", slots, context) for slots in (1, 8, 64, 256) for context in (1024, 8192, 65536)),
    *(Call("Llama-3-8B decode", 64, 8192, storage=storage) for storage in ("int8", "float8_e4m3fn", "int4")),
    Call("DeepSeek-V3 decode (latent)", 64, 8192, **MLA),
    Call("DeepSeek-V3 decode (latent)", 64, 8192, storage="int8", **MLA),
    Call("Llama-3-8B prompt", 1, 8192, 8192),
    Call("Llama-3-8B chunk of 512", 1, 8192, 512),
    Call("Llama-3-8B chunk of 512", 1, 65536, 512, storage="int8"),
]


def accounts(call: Call) -> list[str]:
    """Registers, spilled bytes and shared memory of the kernel that does the call's work."""
    import jax
    import jax.numpy as jnp

    root = pathlib.Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "tests")]
    import gpu_aot

    from kvjax.pallas_kernels import AttentionSpec, paged_attention

    if reason := gpu_aot.missing():
        raise SystemExit(reason)
    storage, R, T = jnp.dtype(call.storage), 64, call.slots * call.queries
    spec = AttentionSpec(0.1, latent=call.value_dim if call.latent else None, layout="token_major")

    def array(*sizes: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    v = None if call.latent else array(256, R, call.kv_heads, call.value_dim, dtype=storage)
    arrays: Any = (
        array(T, call.heads, call.dim, dtype=jnp.bfloat16),
        array(256, R, call.kv_heads, call.dim, dtype=storage),
        v, array(call.slots, call.context // R), array(call.slots), array(call.slots + 1),
    )  # fmt: skip
    scales = array(256, (1 if call.latent else 2) * call.kv_heads, R, dtype=jnp.float32)
    features = {"scales": scales} if BITS[call.storage] < 16 else {}

    def attend(arrays: Any, features: Any) -> Any:
        q, k, v, table, lengths, starts = arrays
        how = {"max_query": call.queries, "backend": "gpu", **features}
        return paged_attention(q, k, v, table, lengths, starts, spec, **how)

    wanted = "decode" if call.queries == 1 else "prefill"
    kernels = gpu_aot.compile_for("h200", attend, arrays, features).kernels
    kernel = next(kernel for kernel in kernels if wanted in kernel.name)
    return [str(kernel.registers), str(kernel.spilled), f"{kernel.shared / 1024:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also compile each, for ptxas's account")
    compiling = parser.parse_args().compile
    head = ["shape", "slots", "context", "storage", "MB", "GFLOP", "bound by", "roofline µs"]
    head += ["registers", "spilled", "KiB shared"] if compiling else []
    print("|", " | ".join(head), "|")
    print("|" + "---|" * len(head))
    for call in CALLS:
        bound = "memory" if call.moved / BANDWIDTH > call.operations / FLOPS else "products"
        row = [call.name, str(call.slots), f"{call.context:,}", call.storage, f"{call.moved / 1e6:,.1f}"]
        row += [f"{call.operations / 1e9:,.1f}", bound, f"{call.seconds * 1e6:,.1f}"]
        print("|", " | ".join(row + (accounts(call) if compiling else [])), "|", flush=True)


if __name__ == "__main__":
    main()
