"""The table of the TPU kernels' block sizes: what it may hold, when it is asked, and that its entries compile."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "scripts"))

import tpu_blocks as script
from tpu_cycles.cases import chip_of

from kvjax.pallas_kernels import Lanes
from kvjax.pallas_kernels.paged_attention import tpu, tpu_blocks, tpu_sizes

CHIPS = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "7x": "tpu7x"}
ENTRIES = [(kind, *entry) for kind, part in script.table().items() for entry in part.items()]
LLAMA = Lanes(8, 128, 128)


def case_id(entry) -> str:
    return " ".join(map(str, entry)) if isinstance(entry, tuple) else str(entry)


def shape_of(kind, key) -> script.Shape:
    return next(x for x in script.shapes().values() if x.kind == kind and x.key(CHIPS[key[0]]) == key)


def pages_of(rows: int, storage: str = "bfloat16", lanes: Lanes = LLAMA) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((4, lanes.row // 128, rows, 128), jnp.dtype(storage))


@pytest.mark.parametrize(("kind", "key", "sizes"), ENTRIES, ids=case_id)
def test_entries_are_well_formed(kind, key, sizes):
    chip, row, storage, page = key
    assert chip in CHIPS and storage in tpu.STORAGE and page in (16, 128)
    assert re.fullmatch(r"(latent )?\d+x\d+ q\d+", row) and int(row.rpartition("x")[2].split()[0]) % 128 == 0
    usual = getattr(tpu_sizes, kind)
    assert sizes != usual and len(sizes) == len(usual)
    assert all(0 < size <= most for size, most in zip(sizes, usual, strict=True))  # so that VMEM suffices
    assert all(size % 128 == 0 and size & (size - 1) == 0 for size in sizes[:2])
    assert kind == "CHUNKS" or sizes[0] % sizes[1] == 0
    assert shape_of(kind, key).key(CHIPS[chip]) == key  # something measures it


def test_the_table_is_as_the_script_writes_it():
    text = script.TABLE.read_text()
    assert script.written(script.table(), script.notes_of(text)) == text


def test_what_is_better():
    usual = [(100, 200), (300, 200)]
    assert script.gains(usual, [(150, 200), (150, 200)]) == [0, pytest.approx(1 / 3)]  # 100 of 200 is hidden anyway
    assert script.better([0.0, 0.03]) and not script.better([0.0, 0.01]) and not script.better([-0.02, 0.5])
    assert script.mean([0.0, 0.75]) == pytest.approx(0.5)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_chip_is_that_of_the_mesh(chip):
    assert tpu_sizes.chip() is None  # a CPU
    with chip_of(CHIPS[chip]):
        assert tpu_sizes.chip() == chip


def test_classes_of_rows_and_pages():
    assert tpu_sizes.row_class(LLAMA, 32) == tpu_sizes.row_class(LLAMA, 8) == "8x128 q8"
    assert tpu_sizes.row_class(Lanes(8, 64, 64), 32) == "4x128 q8"
    assert tpu_sizes.row_class(Lanes(1, 576, 512, True), 16) == "latent 1x640 q16"
    assert [tpu_sizes.page_class(rows) for rows in (16, 64, 128, 256)] == [16, 16, 128, 128]


def test_what_is_not_in_the_table_takes_the_usual_sizes(monkeypatch):
    key = tpu_sizes.key("v6e", LLAMA, 32, "bfloat16", 128)
    monkeypatch.setattr(tpu_blocks, "DECODE", {key: (1024, 512, 4)})
    monkeypatch.setattr(tpu_blocks, "CHUNKS", {key: (256, 256)})

    def limits(*arguments):
        return tpu_sizes.decode_limits(*arguments), tpu_sizes.chunk_limits(*arguments)

    usual = tpu_sizes.DECODE, tpu_sizes.CHUNKS
    assert limits(LLAMA, 32, pages_of(128)) == usual  # no TPU
    with chip_of("v5e"):
        assert limits(LLAMA, 32, pages_of(128)) == usual
    with chip_of("v6e"):
        assert limits(LLAMA, 32, pages_of(256)) == ((1024, 512, 4), (256, 256))
        for other in (pages_of(64), pages_of(128, "int8")):
            assert limits(LLAMA, 32, other) == usual
        assert limits(LLAMA, 128, pages_of(128)) == usual  # more queries
        assert limits(Lanes(4, 128, 128), 32, pages_of(128)) == usual


def test_limits_of_decode():
    usual = tpu.decode_blocks(4096, 128, 4096)
    assert (usual.block, usual.pieces) == (4096, ((4096, 8), (1024, 8), (512, 8), (256, 8)))
    less = tpu.decode_blocks(4096, 128, 4096, (2048, 1024, 4))
    assert (less.block, less.pieces) == (2048, ((1024, 4), (512, 4), (256, 4)))
    assert tpu.decode_blocks(4096, 128, 8192, (4096, 4096, 8)).block == 2048  # VMEM comes first
    assert tpu.decode_blocks(300, 16, 4096, (4096, 512, 4)).pieces == ((512, 4), (256, 4))
    assert tpu.decode_blocks(8192, 1024, 4096, (512, 512, 8)).block == 1024  # a page at least


def traced(shape: script.Shape, chip: str) -> str:
    """The kernels that a shape's first call would compile, as text."""
    seen = []

    def stop(*arguments, **_):
        seen.append(arguments)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", lambda self, *_, **__: stop(str(self.jaxpr)))
        with pytest.raises(InterruptedError):
            shape.cases[0].compile(CHIPS[chip])
    return seen[0][0]


def test_a_trace_asks_for_its_chip(monkeypatch):
    decode, chunks = (next(x for x in script.shapes().values() if x.kind == kind) for kind in ("DECODE", "CHUNKS"))
    monkeypatch.setattr(tpu_blocks, "DECODE", {decode.key("v6e"): (512, 512, 4)})
    monkeypatch.setattr(tpu_blocks, "CHUNKS", {chunks.key("v6e"): (512, 256)})
    for shape in (decode, chunks):
        rows = 4096 if shape is decode else 512
        mine, usual = f"bf16[2,16,{512 if shape is decode else 256},128]", f"bf16[2,16,{rows},128]"  # two blocks
        assert mine in traced(shape, "v6e") and usual not in traced(shape, "v6e")
        assert usual in traced(shape, "v5e") and mine not in traced(shape, "v5e")


@pytest.mark.parametrize(
    ("kind", "key"),
    [pytest.param(*entry[:2], marks=[] if i < 2 else [pytest.mark.slow]) for i, entry in enumerate(ENTRIES)],
    ids=case_id,
)
def test_entries_compile(kind, key):
    for case in shape_of(kind, key).cases:
        case.compile(CHIPS[key[0]])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key", "sizes"), ENTRIES[:1], ids=case_id)
def test_an_entry_is_better_still(kind, key, sizes):
    shape, chip = shape_of(kind, key), CHIPS[key[0]]
    usual, measured = (script.costs(shape.name, chip, x) for x in (getattr(tpu_sizes, kind), sizes))
    assert script.better(script.gains(usual, measured))
