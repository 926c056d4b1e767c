"""Sizes of blocks for a chip and a shape, where they are better than those of `tpu_sizes.py`, which say what they mean.

Made by scripts/tpu_blocks.py, which also checks them (--check).

{(chip, row class, storage, page class): sizes}, see `tpu_sizes.key`; behind an entry, how much lower its cost is.
"""

DECODE: dict[tuple[str, str, str, int], tuple[int, int, int]] = {
    ("7x", "8x128 q8", "bfloat16", 16): (2048, 2048, 8),  # 3.6%
    ("7x", "8x128 q8", "int8", 128): (2048, 2048, 8),  # 1.0%
    ("v5e", "4x128 q8", "bfloat16", 16): (512, 512, 8),  # 3.9%
    ("v5e", "8x128 q8", "float8_e4m3fn", 128): (512, 512, 8),  # 2.2%
    ("v5p", "8x128 q8", "bfloat16", 16): (2048, 2048, 8),  # 4.1%
    ("v6e", "4x128 q8", "bfloat16", 16): (2048, 2048, 8),  # 4.7%
    ("v6e", "8x128 q8", "bfloat16", 16): (512, 512, 8),  # 4.2%
}
CHUNKS: dict[tuple[str, str, str, int], tuple[int, int]] = {}
