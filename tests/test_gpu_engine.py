"""The GPU's kernels in the engine, interpreted on a CPU, and when the engine takes them."""

import gpu_aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny, tokens
from jax.sharding import NamedSharding, PartitionSpec
from test_gpu_kernels import compilable, interpreted
from test_program import SMALL_LLAMA_3, compile_run, copies_as_large_as, on, page_elements, within_the_loop

from kvjax import plans
from kvjax import state as engine_state
from kvjax.cache import CacheConfig
from kvjax.checkpoints.place import init_params
from kvjax.errors import RequestError
from kvjax.models import family_of
from kvjax.models.llama import LLAMA
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams
from kvjax.state import Program
from kvjax.stops import no_stops

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}


def llama(storage: str = "bfloat16") -> Model:
    """Random, with heads of 64; in bfloat16."""
    config = LLAMA.config(CONFIG, None)
    params = init_params(jax.random.key(0), LLAMA.abstract(config), dtype=jnp.bfloat16)
    return Model(LLAMA, config, params, (), [b"?"] * config.vocab, "bfloat16", storage, False)


@interpreted
@pytest.mark.slow
def test_the_engine_gives_the_same_tokens():
    """Chunked prompts, refilled slots, shared pages: the kernels' tokens are those of plain jnp, but for near ties."""
    prompts = [np.random.default_rng(n).integers(4, 320, n).tolist() for n in (5, 1, 17, 40, 3)]
    prompts.append([*prompts[3][:36], 7, 8])
    model, options = llama(), {"slots": 4, "packed": 16, "rows": 16}
    greedy = SamplingParams(max_new_tokens=8)
    want = tokens(model, prompts, greedy, layout="token_major", **options)
    got = tokens(model, prompts, greedy, backend="gpu_interpret", **options)
    same = sum(a == b for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.85 * sum(map(len, want))


@interpreted
def test_the_engine_takes_the_kernels_for_what_they_read(monkeypatch, caplog):
    monkeypatch.setattr(plans, "default_backend", lambda: "gpu")
    plans._say_once.cache_clear()
    assert plans.backend_of(llama(), Options()) == plans.backend_of(llama("int8"), Options()) == "gpu"
    assert plans.layout_of(llama(), Options()) == "token_major" and plans.rows_of(llama(), Options()) == 64
    assert not caplog.records
    narrow = tiny("tiny_llama")  # heads of 16 in float32
    for _ in range(2):
        assert plans.backend_of(narrow, Options()) == "xla"
    (record,) = caplog.records
    assert record.message.startswith("attention runs as plain XLA: the GPU's kernels read bfloat16, float16, int8, ")
    assert record.message.endswith("these pages hold float32, which wgmma does not multiply")
    assert plans.backend_of(llama(), Options(rows=24)) == "xla"


def test_what_the_kernels_do_not_read_is_refused_when_asked_for():
    with pytest.raises(RequestError, match=r"these pages hold float32.*choose other rows, another storage or layout"):
        tokens(tiny("tiny_llama"), [[5]], SamplingParams(max_new_tokens=1), backend="gpu_interpret")


@compilable
@pytest.mark.slow
def test_the_loop_compiles_for_an_h200():
    """Four layers with Llama-3-8B's attention, 64 slots of 4,096 tokens: no copy of the size of the cache."""
    family = family_of(SMALL_LLAMA_3)
    config = family.config(SMALL_LLAMA_3, None)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), family.abstract(config))
    cache = CacheConfig(family.kv_specs(config, "bfloat16"), 64, 64, 64, 2048, layout="token_major")
    program = Program(family.forward, family.unembed, config, config.width, "bfloat16", cache, backend="gpu")
    stops = no_stops(config.vocab)
    state = jax.eval_shape(lambda: engine_state.init(program, jnp.asarray(stops), rows=256))
    mesh = gpu_aot.mesh("h200")
    place = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):  # tells Pallas which GPU to lower for
        compiled = compile_run(program, on(place, params), on(place, state), 512)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    pages = sum(x.size * x.dtype.itemsize for group in state.cache.groups for x in jax.tree.leaves(group.kv))
    assert memory.alias_size_in_bytes >= pages
    assert memory.temp_size_in_bytes < 256 << 20
    assert "mosaic_gpu" in text and not copies_as_large_as(within_the_loop(text), page_elements(state))
