"""Multi-head latent attention: absorbed into q and the output, or expanded into keys and values, it means the same."""

import golden_families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import model_of

from kvjax.models import deepseek
from kvjax.models.positions import cos_sin, rope_table
from kvjax.pallas_kernels.paged_attention import latent

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc"},
    **{"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-06, "moe_layer_freq": 1},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_absorbed_equals_expanded(name):
    model = model_of(name)
    config, p = model.config, model.params["layers"][0]
    h = jnp.asarray(np.random.default_rng(0).standard_normal((7, config.width)), jnp.float32)
    angles = cos_sin(rope_table(config.rope, config.context), jnp.arange(7, dtype=jnp.int32))
    q, key = deepseek.queries_and_latent(config, p, h, angles)
    seen = jnp.tril(jnp.ones((7, 7), bool))

    def attention(q, k, v):
        s = jnp.einsum("tnh,snh->nts", q, jnp.broadcast_to(k, (7, q.shape[1], k.shape[2])), precision="highest")
        weights = jax.nn.softmax(jnp.where(seen[None], s * config.scale, -jnp.inf), axis=-1)
        return jnp.einsum(
            "nts,snh->tnh", weights, jnp.broadcast_to(v, (7, q.shape[1], v.shape[2])), precision="highest"
        )

    with jax.enable_x64(True):  # the sums outside latent.py exact: in float32 a processor's rounding adds to its own
        q, key, up = (jnp.asarray(np.asarray(x), jnp.float64) for x in (q, key, p["from_latent"]))
        nope = config.nope_dim
        absorbed = latent.values(attention(latent.absorbed(q, up, nope), key, key[..., : config.latent]), up, nope)
        expanded = attention(q, *latent.expanded(key[:, 0], up, nope))
        assert absorbed.dtype == jnp.float64
        np.testing.assert_allclose(absorbed, expanded, atol=2e-6)


def test_the_cache_of_v3_has_70_272_bytes_a_token():
    config = deepseek.config_from_hf(DEEPSEEK_V3)
    assert sum(spec.row_bytes for spec in deepseek.kv_specs(config, "bfloat16")) == 70_272
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)


def test_the_golden_covers_dense_and_sparse_layers():
    config = deepseek.config_from_hf(golden_families.config("deepseek_v3"))
    assert config.sparse == (False, True, True) and config.corrected
