"""Sizes of blocks for a chip and a shape, where they are better than those of `tpu_sizes.py`, which say what they mean.

Made by scripts/tpu_blocks.py, which also checks them (--check).

{(chip, row class, storage, page class): sizes}, see `tpu_sizes.key`; behind an entry, how much lower its cost is.
"""

DECODE: dict[tuple[str, str, str, int], tuple[int, int, int]] = {
    ("v5e", "8x128 q8", "float8_e4m3fn", 128): (512, 512, 8),  # 2.4%
}
CHUNKS: dict[tuple[str, str, str, int], tuple[int, int]] = {}
