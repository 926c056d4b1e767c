"""A needle in a context that is dealt over eight chips: computed whole, found exactly.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu
    python scripts/long_context.py 131072
    python scripts/long_context.py 1048576 --seeded

The first computes every token through the engine. With --seeded the K and V of all but the last step's tokens, which
do not depend on attention over the context, are laid into the pages directly; then only a prompt step of 8,192 tokens
and decode steps see a million rows, and K at the end of the pages is compared with RoPE in float64.

The model is constructed, not trained: two layers that copy. The first sees two tokens and tells each what stands
before it; the second looks through the whole context for what once followed the last token. So a sequence of tokens
that stands in the prompt once is completed from its first token on, and any error of a position, a page or a merge
shows.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax import cache as kv_cache
from kvjax import engine, job, plans, sharding
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
    second["kv_bias"][0, 0, 0] = 1  # turns with the position, once in 2π tokens; queries have nothing there
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


def find_seeded(length: int, place: int, mesh: jax.sharding.Mesh, packed: int = 8192, rows: int = 512) -> tuple:
    """As `find`, with the K and V of the first tokens given; and the largest error of K in the last 64 rows."""
    one = model(length + len(NEEDLE), mesh)
    options = Options(slots=1, rows=rows, packed=packed, kv_bytes=1 << 33, share_prefixes=False)
    config = plans.cache_config(one, 1, length + len(NEEDLE), options)
    program = plans.program_of(one, config, share=False)
    tokens = np.asarray(prompt(length, place), np.int32)
    before = length - packed
    cache = seeded(one, config, tokens[:before])
    form = jax.tree.map(lambda _: PartitionSpec(), cache)
    place_of = kv_cache.with_shardings(config, cache, form, sharding.SEQ)
    cache = jax.tree.map(
        lambda x, spec: sharding.put(x, NamedSharding(sharding.automatic(mesh), spec)), cache, place_of
    )

    @functools.partial(jax.jit, static_argnames="count", donate_argnames="cache")
    def step(params: Any, cache: Any, ids: jax.Array, *, count: int) -> tuple[Any, jax.Array]:
        def run(params: Any, cache: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
            groups = [
                group.replace(table=group.table.replace(lengths=group.table.lengths + count)) for group in cache.groups
            ]
            first = groups[0].table.lengths[0] - count
            placement = kv_cache.Placement(
                jnp.zeros((count,), jnp.int32), first + jnp.arange(count, dtype=jnp.int32),
                jnp.array([0, count], jnp.int32), count,
            )  # fmt: skip
            cache, hidden = engine.compute_last(program, params, cache.replace(groups=tuple(groups)), ids, placement)
            return cache, program.unembed(params, program.config, hidden).argmax(axis=-1).astype(jnp.int32)

        nowhere = PartitionSpec()
        each = sharding.manual(program.mesh, {sharding.SEQ}, run, (nowhere, place_of, nowhere), (place_of, nowhere))
        return each(params, cache, ids)

    began, found = time.monotonic(), []
    cache, token = step(one.params, cache, jnp.asarray(tokens[before:]), count=packed)
    found.append(int(token[0]))
    while len(found) < len(NEEDLE):
        cache, token = step(one.params, cache, token, count=1)
        found.append(int(token[0]))
    return tuple(found), time.monotonic() - began, rotation_error(config, cache, length)


def seeded(one: Model, config: kv_cache.CacheConfig, tokens: np.ndarray) -> Any:
    """A cache, on the host, with the K and V of the first tokens, as the model itself computes them.

    The first layer sees two tokens, so its attention is written out here; the second is the last.
    """
    made: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def attend(cache: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> tuple[Any, jax.Array]:
        made[layer] = np.asarray(k), np.asarray(v)
        if layer == 1:
            return cache, jnp.zeros_like(v)
        previous = jnp.concatenate([v[:1], v[:-1]])
        return cache, (v + previous) / 2

    host = jax.device_put(jax.device_get(one.params), jax.devices()[0])
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    one.family.forward(host, one.config, jnp.asarray(tokens), positions, None, attend)
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: kv_cache.init(config)))
    page, row = where(config, np.arange(len(tokens)))
    groups = []
    for g, group in enumerate(cache.groups):
        pages = np.arange(config.pages_per_slot, dtype=np.int32)[None]
        k, v = group.kv.k[0], group.kv.v[0]
        for layer in config.layers_of(g):
            k[page, :, :, row], v[page, :, row] = made[layer]
        table = group.table.replace(pages=pages, lengths=np.full((1,), len(tokens), np.int32))
        groups.append(group.replace(table=table))
    return cache.replace(groups=tuple(groups))


def where(config: kv_cache.CacheConfig, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page, and row in the pages of all chips, of each position: parts are dealt there and back."""
    n, R = config.seq, config.rows // config.seq
    page, rest = np.divmod(position, n * R)
    part = np.where(page % 2 == 0, rest // R, n - 1 - rest // R)
    return page, part * R + rest % R


def rotation_error(config: kv_cache.CacheConfig, cache: Any, length: int) -> float:
    """Largest difference of the turning pair of K, of the prompt's last 64 tokens, from cosine and sine in float64."""
    position = np.arange(length - 64, length)
    page, row = where(config, position)
    second = config.places_of(1)[0][0]
    k = np.asarray(cache.groups[second].kv.k[0])[page, 0, :, row].astype(np.float64)
    return float(max(np.abs(k[:, 0] - np.cos(position)).max(), np.abs(k[:, HEAD // 2] - np.sin(position)).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("length", type=int, nargs="?", default=131072)
    parser.add_argument("--places", type=float, nargs="*", default=[0.5], help="of the needle, 0 to 1")
    parser.add_argument("--packed", type=int, default=8192)
    parser.add_argument("--seeded", action="store_true")
    given = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("seq",)) if jax.device_count() > 1 else None
    for share in given.places:
        place = min(int(share * given.length), given.length - 8)
        report: dict[str, Any] = {"length": given.length, "place": place}
        if given.seeded:
            assert mesh is not None
            found, seconds, report["rotation_error"] = find_seeded(given.length, place, mesh, given.packed)
        else:
            found, seconds = find(given.length, place, mesh, given.packed)
        print(json.dumps(report | {"found": found == NEEDLE, "seconds": round(seconds, 1)}))
        assert found == NEEDLE, found


if __name__ == "__main__":
    main()
