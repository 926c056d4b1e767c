"""The compiled loop: no cache-sized copy, no host callback, on this CPU and, ahead of time, on a v5e and a v6e."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from test_families import model_of

from kvjax import engine
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.eviction import Budget, named
from kvjax.eviction_rule import Eviction
from kvjax.models import family_of, moe
from kvjax.state import Program
from kvjax.stops import no_stops


def program_and_state(family, config, storage, slots, rows, pages, stacked, layout="head_major", pool=None, **over):
    cache = CacheConfig(family.kv_specs(config, storage), slots, rows, pages, pool, stacked, layout, **over)
    backend = "tpu" if layout == "joined" else "xla"
    dtype = storage if storage in ("float32", "bfloat16") else "bfloat16"
    program = Program(family.forward, family.unembed, config, config.width, dtype, cache, backend=backend)
    return program, jax.eval_shape(
        lambda: engine_state.init(program, jnp.asarray(no_stops(config.vocab)), rows=4 * slots)
    )


def compile_run(program, params, state, packed):
    number = state.step
    policy = engine_state.Policy(number, number, number, number, number)
    return engine.run.lower(program, params, state, policy, packed=packed).compile()


def copies_as_large_as(hlo: str, size: int) -> list[str]:
    """Copy instructions whose result has at least so many elements. Fused copies are instructions too."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S* (copy|copy-start)\(", line)
        if match:
            elements = 1
            for number in match[1].split(","):
                elements *= int(number)
            if elements >= size:
                found.append(line.strip()[:160])
    return found


def page_elements(state) -> int:
    return min(x.size for group in state.cache.groups for x in jax.tree.leaves(group.kv))


def within_the_loop(hlo: str) -> str:
    """All but the entry computation, which runs once a segment."""
    return re.sub(r"^ENTRY .*?^}", "", hlo, flags=re.M | re.S)


def assert_lean(compiled, state) -> None:
    hlo = compiled.as_text()
    assert copies_as_large_as(hlo, page_elements(state)) == []
    in_loop = copies_as_large_as(within_the_loop(hlo), state.requests.tokens.size)
    assert [line for line in in_loop if re.search(r"= \(?[su]32\[", line)] == []  # nor of the tables, all int32
    assert not re.search(r"custom_call_target=\"[^\"]*callback", hlo)
    assert "outfeed" not in hlo and "infeed" not in hlo


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mistral"])
def test_cpu_loop_copies_no_cache(name, stacked):
    model = tiny(name, stacked=stacked)
    program, state = program_and_state(model.family, model.config, "float32", 4, 16, 256, stacked)
    compiled = compile_run(program, model.params, state, 16)
    assert_lean(compiled, state)
    assert_in_place(compiled, state)


def assert_in_place(compiled, state) -> None:
    memory = compiled.memory_analysis()
    cache_bytes = sum(x.size * 4 for group in state.cache.groups for x in jax.tree.leaves(group.kv))
    assert memory.alias_size_in_bytes >= cache_bytes  # donated: updated in place
    assert memory.temp_size_in_bytes < cache_bytes / 4


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gpt_oss"])
def test_cpu_loop_of_other_caches(name):
    """Two groups of layers, latent pages, experts."""
    model = model_of(name)
    program, state = program_and_state(model.family, model.config, "float32", 4, 16, 256, False)
    compiled = compile_run(program, model.params, state, 16)
    assert_lean(compiled, state)
    assert_in_place(compiled, state)


def test_the_check_for_copies_sees_one():
    def through_a_conditional(x, i):  # what the loop avoids; see control.when
        return jax.lax.cond(i > 0, lambda x: x.at[i].set(0.0), lambda x: x.at[i + 1].set(1.0) + x.sum(), x)

    x, i = jax.ShapeDtypeStruct((1 << 16,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    hlo = jax.jit(through_a_conditional, donate_argnums=0).lower(x, i).compile().as_text() or ""
    assert copies_as_large_as(hlo, 1 << 16) != []


SMALL_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "sliding_window": 512,
}  # fmt: skip
"""Real shapes, but for the number of layers."""


@functools.cache
def chip(name: str) -> SingleDeviceSharding:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:2x2")
    return SingleDeviceSharding(topology.devices[0])


def on(sharding, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@pytest.mark.slow
def test_tpu_loop_of_two_groups():
    family = family_of(GEMMA_3_1B)
    config = family.config(GEMMA_3_1B, None)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), family.abstract(config))
    program, state = program_and_state(family, config, "bfloat16", 32, 128, 16, False, "token_major")
    compiled = compile_run(program, on(chip("v5e"), params), on(chip("v5e"), state), 256)
    assert_lean(compiled, state)


def test_tpu_computes_only_the_chosen_experts():
    """On a v5e: no expert's work is expanded to all tokens, and over a mesh no expert's weights are gathered."""
    E, D, F, T, C = 32, 1024, 2048, 64, 4
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices).reshape(4, 2), ("expert", "model"), axis_types=(AxisType.Auto,) * 2)

    def compiled(mesh, place):
        def mixture(x, weights, expert, experts):
            with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
                return moe.mixture(x, weights, expert, experts, moe.swiglu_experts)

        def array(shape, dtype, *axes):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place(*axes))

        over = array((E, D, F), jnp.bfloat16, "expert", None, "model")
        experts = {"gate": over, "up": over, "down": array((E, F, D), jnp.bfloat16, "expert", "model")}
        few = [array((T, C), dtype) for dtype in (jnp.float32, jnp.int32)]
        return jax.jit(mixture).lower(array((T, D), jnp.bfloat16), *few, experts).compile()

    for program in (
        compiled(None, lambda *_: SingleDeviceSharding(devices[0])),
        compiled(mesh.abstract_mesh, lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))),
    ):
        assert program.memory_analysis().temp_size_in_bytes < 1 << 20  # one expert's matrix has 4 MB
        assert "all-gather" not in program.as_text()


@pytest.mark.parametrize(("name", "stacked"), [("v5e", True)])
def test_tpu_loop_copies_no_cache(name, stacked):
    family = family_of(SMALL_LLAMA_3)
    config = family.config(SMALL_LLAMA_3, None)
    specs = family.abstract(config)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), specs)
    if stacked:
        layers = [jax.tree.leaves(layer) for layer in params["layers"]]
        stack = [jax.ShapeDtypeStruct((len(layers), *leaf.shape), leaf.dtype) for leaf in layers[0]]
        params["layers"] = jax.tree.unflatten(jax.tree.structure(params["layers"][0]), stack)
    program, state = program_and_state(family, config, "bfloat16", 32, 128, 16, stacked, "token_major")
    compiled = compile_run(program, on(chip(name), params), on(chip(name), state), 256)
    memory = compiled.memory_analysis()
    # A copy of one layer's pages would need its size in temporary memory.
    assert stacked or memory.temp_size_in_bytes < 2 * page_elements(state)
    if name != "v6e":  # whose program this jaxlib compiles, but cannot print
        assert_lean(compiled, state)
    cache_bytes = sum(x.size * 2 for group in state.cache.groups for x in jax.tree.leaves(group.kv))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < 256 << 20


LLAMA_3_8B = SMALL_LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def kernel_loop(name, fields, storage, pool, stacked=True, slots=64, **over):
    """The loop with the TPU's kernels, over one chip: slots of 8,192 tokens, in a pool of so many pages."""
    family = family_of(fields)
    config = family.config(fields, None)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), family.abstract(config))
    if stacked:
        layers = [jax.tree.leaves(layer) for layer in params["layers"]]
        stack = [jax.ShapeDtypeStruct((len(layers), *leaf.shape), leaf.dtype) for leaf in layers[0]]
        params["layers"] = jax.tree.unflatten(jax.tree.structure(params["layers"][0]), stack)
    program, state = program_and_state(family, config, storage, slots, 128, 64, stacked, "joined", pool, **over)
    place = SingleDeviceSharding(
        topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name]).devices[0]
    )
    return compile_run(program, on(place, params), on(place, state), 512), state


KERNEL_LOOPS = {
    "llama 3 8b on a v5p": ("v5p", LLAMA_3_8B, "bfloat16", 4096, True),
    "int8 pages on a v5e": ("v5e", LLAMA_3_8B | {"num_hidden_layers": 16}, "int8", 1024, True),
    "kivi on a v5e": (
        "v5e",
        LLAMA_3_8B | {"num_hidden_layers": 16},
        "kivi4/kivi4:group=32,recent=128,full=bfloat16",
        512,
        True,
    ),
    "layers apart on a v5e": ("v5e", SMALL_LLAMA_3, "bfloat16", 1024, False),
    "heads of 64 on a 7x": ("tpu7x", SMALL_LLAMA_3 | {"head_dim": 64}, "bfloat16", 1024, False),
}


@pytest.mark.slow
def test_tpu_loop_that_evicts_rows():
    """Of 64 slots on a v5e: neither the pages nor what is noted of their rows are copied in a step."""
    layers, slots = 4, 64
    over = {"eviction": Eviction(named("h2o"), Budget(share=0.5))}
    compiled, state = kernel_loop(
        "v5e", LLAMA_3_8B | {"num_hidden_layers": layers}, "bfloat16", None, slots=slots, **over
    )
    arrays = jax.tree.leaves(state.cache.by_head[0].kv)
    memory = compiled.memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in arrays)
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 2
    looped = within_the_loop(compiled.as_text())
    for array in arrays:  # what fits VMEM, memory space 1, may be moved there
        shape = ",".join(map(str, array.shape))
        copies = re.findall(rf"\[{shape}\](\S*) (?:copy|copy-start)\(", looped)
        assert [layout for layout in copies if "S(1)" not in layout] == []


@pytest.mark.slow
@pytest.mark.parametrize("loop", KERNEL_LOOPS.values(), ids=KERNEL_LOOPS)
def test_tpu_loop_with_kernels(loop):
    """Fits the chip, and copies neither the pages nor any layer's share of them."""
    name, _, _, pool, _ = loop
    compiled, state = kernel_loop(*loop)
    pages = [x for group in state.cache.groups for x in jax.tree.leaves(group.kv.k)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in pages)
    of_layer = pages[0].size * pages[0].dtype.itemsize // (pages[0].shape[0] // pool)
    # On a 7x the program of this vocabulary has 1.1 GB of temporaries, 1.2 with plain attention.
    assert memory.temp_size_in_bytes < max(of_layer, (1200 if name == "tpu7x" else 512) << 20)
    if name == "v5e":  # the others' programs this jaxlib compiles, but cannot print
        looped = within_the_loop(compiled.as_text())
        for array in pages:
            page_shape = ",".join(map(str, array.shape))
            assert not re.search(rf"\[{page_shape}\]\S* (copy|copy-start)\(", looped)
