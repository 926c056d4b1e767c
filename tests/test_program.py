"""The compiled loop: no cache-sized copy, no host callback, on this CPU and, ahead of time, on a v5e and a v6e."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from engines import tiny
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from kvjax import engine
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.models import family_of
from kvjax.state import Program
from kvjax.stops import no_stops


def program_and_state(family, config, storage, slots, rows, pages, stacked, layout="head_major"):
    cache = CacheConfig(family.kv_specs(config, storage), slots, rows, pages, stacked=stacked, layout=layout)
    program = Program(family.forward, family.unembed, config, config.width, storage, cache)
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
    memory = compiled.memory_analysis()
    cache_bytes = sum(x.size * 4 for group in state.cache.groups for x in jax.tree.leaves(group.kv))
    assert memory.alias_size_in_bytes >= cache_bytes  # donated: updated in place
    assert memory.temp_size_in_bytes < cache_bytes / 4


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


@functools.cache
def chip(name: str) -> SingleDeviceSharding:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:2x2")
    return SingleDeviceSharding(topology.devices[0])


def on(sharding, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@pytest.mark.parametrize(("name", "stacked"), [("v5e", False), ("v5e", True), ("v6e", False)])
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
