#!/usr/bin/env python
"""Writes tests/goldens/kivi.npz: what KIVI's own functions make of a few keys and values.

    git clone https://github.com/jy-yuan/KIVI /tmp/KIVI && git -C /tmp/KIVI checkout 876b4d2
    python -m venv /tmp/kivi && /tmp/kivi/bin/pip install torch numpy
    /tmp/kivi/bin/python scripts/make_kivi_goldens.py /tmp/KIVI

Those are the plain torch functions of quant/new_pack.py, in float32 on a CPU. (transformers' QuantizedCache is another
method: it quantizes again at every flush, K and V in the same groups.)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

HEADS, TOKENS, DIM = 2, 64, 64
GOLDENS = Path(__file__).parents[1] / "tests" / "goldens" / "kivi.npz"


def keys_and_values() -> tuple[np.ndarray, np.ndarray]:
    """(1, heads, tokens, dim) of each, numbers of float16: keys with an offset and a size of each channel's own."""
    rng = np.random.default_rng(8)
    shape = (1, HEADS, TOKENS, DIM)
    offset, size = rng.normal(0, 3, (HEADS, 1, DIM)), np.exp(rng.normal(0, 1, (HEADS, 1, DIM)))
    return (
        (rng.standard_normal(shape) * size + offset).astype(np.float16),
        rng.standard_normal(shape).astype(np.float16),
    )


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "quant"))
    import new_pack
    import torch

    keys, values = keys_and_values()
    found: dict[str, Any] = {"keys": keys, "values": values}
    for bits in (4, 2):
        for group in (32, 64):
            for name, x in (("k", keys), ("v", values)):
                packed, scale, zero = getattr(new_pack, f"quant_and_pack_{name}cache")(
                    torch.tensor(x.astype(np.float32)), group, bits
                )
                codes = new_pack.unpack_tensor(packed, bits, 2 if name == "k" else 3)
                back = getattr(new_pack, f"unpack_and_dequant_{name}cache")(packed, scale, zero, group, bits)
                case = f"{name}{bits}_{group}"
                found |= {
                    f"{case}_codes": codes.numpy().astype(np.uint8),
                    f"{case}_scale": scale.numpy(),
                    f"{case}_zero": zero.numpy(),
                }
                if group == 32:
                    found[f"{case}_head"] = back[:, 0, :, :8].numpy()
    np.savez_compressed(GOLDENS, **found)
    print(f"{GOLDENS}: {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
