"""A needle in a context that is dealt over eight chips: computed whole, found exactly.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python scripts/long_context.py 131072

The model is constructed, not trained: two layers that copy. The first sees two tokens and tells each what stands before
it; the second looks through the whole context for what once followed the last token. So a sequence of tokens that stands
in the prompt once is completed from its first token on, and any error of a position, a page or a merge shows.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import job, sharding
from kvjax.models import family_of
from kvjax.plans import Model, Options, Request
from kvjax.sampling_params import SamplingParams

V = 16
KEY, NEEDLE = 10, (11, 12, 13, 14)
HEAD = V + 8
CONTENT = np.array([*range(4, 12), *range(16, 24)])  # lanes of a head whose pairs do not turn, see `config`


def config(context: int) -> dict[str, Any]:
    """Qwen2 with one head and two layers, the first of a window of 2.

    With a base of 1e30 the lanes from the fourth pair on turn by less than 1e-4 in a million tokens.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": V, "hidden_size": 3 * V, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
        "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 1e30, "use_sliding_window": True,
        "sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
    }  # fmt: skip


def parameters(family: Any, of: Any) -> Any:
    """The residual stream has three parts of V numbers: the token, the mean of it and the one before, the answer."""
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), family.abstract(of))
    D, one = 3 * V, np.eye(V, dtype=np.float32)
    token, mean, answer = (slice(i * V, (i + 1) * V) for i in range(3))
    params["embed"][:, token] = one
    params["unembed"][:, answer] = one
    params["final_norm"][:] = 1
    first, second = params["layers"]
    for layer in (first, second):
        layer["attn_norm"][:], layer["mlp_norm"][:] = 1, 1
    first["kv"][1, 0, CONTENT, token] = one / np.sqrt(D)
    first["out"][mean, 0, CONTENT] = one
    second["q"][0, CONTENT, token] = one * (40 * np.sqrt(HEAD) * 1.5 / D)
    second["kv"][0, 0, CONTENT, mean] = 2 * one
    second["kv"][0, 0, CONTENT, token] = -one
    second["kv"][1, 0, CONTENT, token] = one
    second["out"][answer, 0, CONTENT] = one
    return params


def model(context: int, mesh: jax.sharding.Mesh | None = None) -> Model:
    """The model, in float32, on a mesh or on one device."""
    hf = config(context)
    family = family_of(hf)
    of = family.config(hf, None)
    place = sharding.param_sharding(mesh)
    params = jax.tree.map(lambda spec, x: jax.device_put(x, place(spec)), family.abstract(of), parameters(family, of))
    shape = None if mesh is None else sharding.automatic(mesh).abstract_mesh
    return Model(family, of, params, (), [bytes([i]) for i in range(V)], "float32", "float32", False, shape)


def prompt(length: int, place: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens below KEY, with KEY and the needle at `place`, and KEY at the end."""
    tokens = np.random.default_rng(seed).integers(0, KEY, length)
    tokens[place : place + 1 + len(NEEDLE)] = (KEY, *NEEDLE)
    tokens[-1] = KEY
    return tuple(tokens.tolist())


def find(length: int, place: int, mesh: jax.sharding.Mesh | None, packed: int = 8192, rows: int = 512) -> tuple:
    """The tokens that the engine completes the prompt with, as many as the needle has, and the seconds it took."""
    one = model(length + len(NEEDLE), mesh)
    options = Options(slots=1, rows=rows, packed=packed, kv_bytes=1 << 33, share_prefixes=False)
    request = Request(0, 0, prompt(length, place), SamplingParams(max_new_tokens=len(NEEDLE)))
    began = time.monotonic()
    found = [output.tokens for report in job.run(one, [request], options) for output in report.finished]
    return found[0], time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("length", type=int, nargs="?", default=131072)
    parser.add_argument("--places", type=float, nargs="*", default=[0.5], help="of the needle, 0 to 1")
    parser.add_argument("--packed", type=int, default=8192)
    given = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("seq",)) if jax.device_count() > 1 else None
    for share in given.places:
        place = min(int(share * given.length), given.length - 8)
        found, seconds = find(given.length, place, mesh, given.packed)
        right = found == NEEDLE
        print(json.dumps({"length": given.length, "place": place, "found": right, "seconds": round(seconds, 1)}))
        assert right, found


if __name__ == "__main__":
    jnp.zeros(())
    main()
