"""The counter of TPU cycles: on a program written by hand, and on one that libtpu compiled."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "scripts"))

from tpu_cycles import llosim, measure

ROWS, BLOCK, STEPS = 64, 16, 3

BY_HAND = """\
LB: loop body
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[64,128], index: 1, kind: input, shape index: {}] /* x */
  ;;  %s2_s1 = inlined_call_operand.hbm [shape: s32[4], index: 0, kind: input, shape index: {}] }
   0x1   :  { %s3_s2 = sshll.u32 %s2_s1, 4  ;;  %s4_s2 = int_to_ptr.hbm [resolvable:$true] %s3_s2 }
   0x2   :  { %s5_s3 = smov.u32 [#allocation7]  ;;  %s6_s4 = smov.u32 0 /* copy */ }
   0x3   :  { %7 = dma.hbm_to_smem /*hbm=*/%s4_s2, /*size_in_granules=*/16, /*smem=*/%s5_s3, /*sync=*/[#allocation1] }
   0x4   :  { %s8_s5 = sld [smem:[#allocation7 + $0x1]] }
   0x5   :  { %s9_s0 = sshll.u32 %s1_s0, 4  ;;  %s10_s0 = int_to_ptr.hbm [resolvable:$true] %s9_s0 }
   0x6 LB: > { %s11_s4 = sphi %s6_s4, %s12_s4  ;;  %v1_v0 = vadd.f32 %v1_v0, %v1_v0 }
   0x7   : > { %13 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s10_s0, /*size_in_granules=*/128, /*vmem=*/%s5_s3 }
   0x8   : > { %s12_s4 = sadd.s32 1, %s11_s4 }
   0x9   : > { %p14_p0 = scmp.lt.s32.totalorder %s12_s4, %s8_s5  ;;  %p15_p1 = scmp.eq.s32.totalorder %s12_s4, 2 }
   0xa   : > { %16 = sbr.rel (%p14_p0) target bundleno = 6 (0x6), region = 1 }
   0xb   : > {}
   0xc   : > { %17 = dma.hbm_to_vmem (%p15_p1), /*hbm=*/%s10_s0, /*size_in_granules=*/1, /*vmem=*/%s5_s3, /*sync=*/0 }
   0xd   : > {}
   0xe   : > {}
   0xf   :  { %18 = shalt.err (%p14_p0) /* a comment */ }
"""


def by_hand(folder: pathlib.Path) -> llosim.Program:
    path = folder / "1-loop.1-01-packed-bundles-post-ra.txt"
    path.write_text(BY_HAND)
    return llosim.Program(path, slots=4)


def test_a_loop_is_followed_with_the_values_of_its_operands(tmp_path):
    program = by_hand(tmp_path)
    run = program.run({0: [9, STEPS, 9, 9]})
    assert run.ended and not run.unknown
    assert program.trips(run) == [STEPS]
    assert run.cycles == 6 + STEPS * 9 + 1  # four delay slots belong to the loop
    assert run.dma["hbm_to_vmem"] == STEPS + 1  # the one under a predicate, in the second round
    assert run.dma["hbm_to_vmem_bytes"] == (STEPS * 128 + 1) * llosim.GRANULE
    assert program.depth == [0] * 6 + [1] * 9 + [0]
    assert program.issued[1:] == [index not in (11, 13, 14) for index in range(1, 16)]


def test_slots_and_spills_are_counted_where_they_are_executed(tmp_path):
    by_hand(tmp_path)
    rows = [dict.fromkeys(measure.UNITS, 0) for _ in range(16)]
    rows[1] |= {"SPILL": 1}  # before the loop
    rows[8] |= {"MATPUSH": 4, "FILL": 2}
    text = "== UTILIZATION:\n" + "\n".join(" ".join(map(str, row.values())) for row in rows)
    (tmp_path / "1-loop.1-02-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(text)
    result = measure.measure(tmp_path, "loop", "v5p", {0: [0, 10, 0, 0]}, cores=1)
    assert result.slots["MATPUSH"] == 40 and result.slots["FILL"] == 20 and result.slots["SPILL"] == 1
    assert (result.spills, result.inner_spills) == (21, 20)
    assert result.dma_cycles == round((10 * 128 + 1) * 32 / 2765e9 * 1.75e9)
    assert measure.measure(tmp_path, "loop", "v5p", {0: [0, 10, 0, 0]}).dma_cycles == pytest.approx(
        2 * result.dma_cycles, abs=1
    )


def test_what_was_not_given_is_reported(tmp_path):
    program = by_hand(tmp_path)
    assert "operand 0" in str(program.run({}).unknown)
    assert not program.run({0: [0, 100]}, max_bundles=50).ended
    with pytest.raises(measure.MeasureError, match="3 values for an operand of shape"):
        measure.placed(program, {0: [1, 2, 3]})
    with pytest.raises(measure.MeasureError, match="no operands"):
        measure.placed(program, {7: [1]})


def test_a_dump_that_is_missing_is_reported(tmp_path):
    with pytest.raises(measure.MeasureError, match="no kernel with 'loop'"):
        measure.measure(tmp_path, "loop", "v5e", {})
    by_hand(tmp_path)
    with pytest.raises(measure.MeasureError, match="not complete"):
        measure.measure(tmp_path, "loop", "v5e", {})


def test_operands_lie_in_tiles():
    assert llosim.as_laid_out(range(3), (3,)) == [0, 1, 2]
    words = llosim.as_laid_out(range(3 * 130), (3, 130))
    assert len(words) == 4 * 256  # rows up to a tile of 4, columns up to two of 128
    assert words[128] == 130 and words[4 * 128] == 128 and words[5 * 128 + 1] == 259


def compile_tiny() -> None:
    """Sums blocks of an array that lies in HBM, as many as a scalar says; in a process of its own, see below."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import SingleDeviceSharding

    def kernel(steps, x, out, buffer, semaphore):
        def add(i, total):
            copy = pltpu.make_async_copy(x.at[pl.ds(i * BLOCK, BLOCK)], buffer, semaphore)
            copy.start()
            copy.wait()
            return total + buffer[...]

        out[...] = jax.lax.fori_loop(0, steps[0], add, jnp.zeros((BLOCK, 128)))

    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec((BLOCK, 128)),
        scratch_shapes=[pltpu.VMEM((BLOCK, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((BLOCK, 128), jnp.float32), grid_spec=grid, name="sum_blocks")
    shapes = (((1,), jnp.int32), ((ROWS, 128), jnp.float32))
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=SingleDeviceSharding(device)) for shape in shapes]
    jax.jit(call).trace(*arguments).lower().compile()


def test_a_compiled_kernel_fetches_the_bytes_it_asks_for(tmp_path):
    measure.dumped([__file__], tmp_path)
    flops = 1 << 20
    found = [measure.measure(tmp_path, "sum_blocks", "v5e", {0: [steps]}, flops) for steps in (1, STEPS)]
    for steps, result in zip((1, STEPS), found, strict=True):
        assert (result.copies, result.fetched) == (steps, steps * BLOCK * 128 * 4)
        assert result.stored == BLOCK * 128 * 4
        assert result.dma_cycles == round(result.fetched / 819e9 * 1.5e9)
        assert result.mxu == pytest.approx(flops / 131072 / result.cycles)
        assert result.spills == result.inner_spills == 0
    assert 0 < found[0].issue < found[1].issue <= found[1].cycles

    program_file, _ = measure.dump_files(tmp_path, "sum_blocks")
    program = llosim.Program(program_file, measure.CHIPS["v5e"].delay_slots)
    assert program.trips(program.run({0: [STEPS]})) == [STEPS]
    with pytest.raises(measure.MeasureError, match=r"operands \[0\] are scalars"):
        measure.measure(tmp_path, "sum_blocks", "v5e", {})


def test_a_kernel_that_does_not_compile_says_why(tmp_path):
    with pytest.raises(measure.MeasureError, match="does not compile: ValueError: too large"):
        measure.dumped(["-c", "raise ValueError('too large')"], tmp_path)


if __name__ == "__main__":
    compile_tiny()
