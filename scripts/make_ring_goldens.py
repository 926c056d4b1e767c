#!/usr/bin/env python
"""Writes tests/goldens/ring_attention.npz: what another ring attention makes of a few tokens.

    python -m venv /tmp/ring && /tmp/ring/bin/pip install "jax[cpu]==0.4.38" "flax<0.11" einops
    /tmp/ring/bin/pip install --no-deps ringattention==0.1.2
    /tmp/ring/bin/python scripts/make_ring_goldens.py

That is haoliuhl/ringattention, the plain JAX form: causal, as many kv heads as query heads, scale 1/√H, sequences
packed by segment. It needs an older JAX than kvjax, so a virtual environment of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

RANKS, TOKENS, HEADS, DIM = 4, 24, 2, 16
GOLDENS = Path(__file__).parents[1] / "tests" / "goldens" / "ring_attention.npz"


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """(1, T, N, H) of each, (1, T) int32 segments of the whole sequence → (1, T, N, H); inside a shard_map."""
    from ringattention.ringattention_jax import ring_attention

    how = {
        "causal_block_size": 1, "query_chunk_size": 8, "key_chunk_size": 8, "deterministic": True, "dropout_rng": None,
        "attn_pdrop": 0.0, "dtype": jax.numpy.float32, "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": "highest", "prevent_cse": True,
    }  # fmt: skip
    return ring_attention(q, k, v, None, segments, None, "seq", True, how)


def main() -> None:
    from jax.experimental.shard_map import shard_map
    from jax.sharding import Mesh, PartitionSpec

    rng = np.random.default_rng(0)
    length = RANKS * TOKENS
    q, k, v = rng.standard_normal((3, length, HEADS, DIM)).astype(np.float32)
    segments = np.searchsorted([19, 60], np.arange(length), side="right").astype(np.int32)
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    spread, everywhere = PartitionSpec(None, "seq"), PartitionSpec()
    ring = shard_map(
        attend, mesh=mesh, in_specs=(spread, spread, spread, everywhere), out_specs=spread, check_rep=False
    )
    out = jax.jit(ring)(*(x[None] for x in (q, k, v, segments)))
    np.savez_compressed(GOLDENS, ranks=RANKS, q=q, k=k, v=v, segments=segments, out=np.asarray(out)[0])
    print(f"{GOLDENS}: {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
