"""Rows evicted inside the loop: against a model that keeps plain arrays, and pages that add up after every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny
from test_families import model_of
from test_program import compile_run, copies_as_large_as, within_the_loop

from kvjax import cache as kv_cache
from kvjax import job, plans, reading, snapshots
from kvjax import state as engine_state
from kvjax.cache import LEDGER, CacheConfig
from kvjax.errors import ModelError, RequestError, UserError
from kvjax.evicting import claims
from kvjax.eviction import Budget, Moments, Policy, Rows, adakv, named, pyramid, scores, select, share_of
from kvjax.eviction_options import eviction_of
from kvjax.eviction_rule import NEVER, Eviction
from kvjax.models.positions import Rope, apply_rope, cos_sin, inverse_frequencies, rope_table, rotation
from kvjax.pallas_kernels import AttentionSpec, Lanes, init_pages, paged_attention
from kvjax.pallas_kernels import joined as joined_store
from kvjax.plans import Model, Options
from kvjax.sampling_params import SamplingParams
from kvjax.stops import no_stops
from kvjax.types import KVSpec

R = 4


def evicting(policy: Policy, name: str = "tiny_llama", storage: str = "float32", **options) -> Model:
    budget = Budget(**{key: options.pop(key) for key in ("rows", "share") if key in options})
    model = tiny(name, storage=storage)
    return dataclasses.replace(model, eviction=Eviction(policy, budget, **options))


MOST = 64
"""Rows of the longest sequence here: one shape, one compilation."""
selected, divided = (jax.jit(function, static_argnums=0) for function in (select, adakv))


# --- the same, with plain arrays ------------------------------------------------------------------------------
class Plain:
    """One sequence: K and V of every layer and head in arrays of float32, and nothing paged."""

    def __init__(self, model: Model, context: int):
        self.model, self.context = model, context
        self.rows: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self.queries: dict[int, list[np.ndarray]] = {}
        """Of each layer, (N, H) of those whose moments count, without RoPE."""
        self.computed = 0

    def compute(self, tokens: Sequence[int], watched: Sequence[bool]) -> np.ndarray:
        """Appends the tokens; the logits of the last one."""
        model, first = self.model, self.computed
        positions = jnp.arange(first, first + len(tokens), dtype=jnp.int32)

        def attend(cache, layer, q, k, v, scale, **features):
            q, k, v = map(np.asarray, (q, k, v))
            out = self._attend(layer, q, k, v, scale, np.asarray(watched))
            return cache, jnp.asarray(out, jnp.float32)

        ids = jnp.asarray(tokens, jnp.int32)
        _, hidden = model.family.forward(model.params, model.config, ids, positions, None, attend)
        self.computed += len(tokens)
        return np.asarray(model.family.unembed(model.params, model.config, hidden[-1:]))[0]

    def _turned(self, layer: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x (S, …, H) with RoPE for so many positions more, in complex float64."""
        config = self.model.config
        if not config.rotary[layer]:
            return x
        frequencies, _ = inverse_frequencies(config.rope, config.context)
        n = len(frequencies)
        pairs = x[..., :n].astype(np.float64) + 1j * x[..., n : 2 * n]
        pairs *= np.exp(1j * np.multiply.outer(positions, frequencies)).reshape(len(x), *[1] * (x.ndim - 2), n)
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * n :]], axis=-1)

    def _attend(self, layer, q, k, v, scale, watched):
        (T, N, H), K = q.shape, k.shape[1]
        what = self.model.eviction
        by_place = what is not None and what.policy.positions == "slot"
        own = self.computed + np.arange(T)
        if what is not None and what.policy.moments:
            self.queries.setdefault(layer, []).extend(self._turned(layer, q, -own)[watched])
        out = np.zeros((T, N, v.shape[2]))
        for head in range(K):
            old = self.rows.setdefault((layer, head), {
                "k": np.zeros((0, H)), "v": np.zeros((0, v.shape[2])), "positions": np.zeros(0, np.int32),
                "weights": np.zeros(0), "seen": np.zeros(0, np.int32),
            })  # fmt: skip
            held = len(old["k"])
            zeros = np.zeros(T)
            new = {"k": k[:, head], "v": v[:, head], "positions": self.computed + np.arange(T), "weights": zeros,
                   "seen": zeros.astype(np.int32)}  # fmt: skip
            rows = {name: np.concatenate([old[name], new[name]]) for name in old}
            keys, queries = rows["k"], q
            if by_place:  # without RoPE first, then with the place's, as the authors cache keys and number them
                place = np.arange(held + T)
                keys = self._turned(layer, self._turned(layer, keys, -rows["positions"]), place)
                queries = self._turned(layer, self._turned(layer, q, -own), place[held:])
            causal = np.arange(held + T)[None, :] <= held + np.arange(T)[:, None]
            seen = causal
            if what is not None and what.policy.reads is not None and layer >= what.policy.reads.dense:
                heads = slice(head * N // K, (head + 1) * N // K)
                seen = causal.copy()
                for i in np.flatnonzero(own >= self.context).tolist():
                    seen[i] &= self._read(q[i, heads], keys, held + i, what)
            for n in range(head * N // K, (head + 1) * N // K):
                scores = np.where(seen, queries[:, n].astype(np.float64) @ keys.T.astype(np.float64) * scale, -np.inf)
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                out[:, n] = p @ rows["v"]
                rows["weights"] = rows["weights"] + p[watched].sum(axis=0) * K / N
            rows["seen"] = rows["seen"] + causal[watched].sum(axis=0, dtype=np.int32)
            self.rows[layer, head] = rows
        return out

    def _read(self, q: np.ndarray, keys: np.ndarray, place: int, what: Eviction) -> np.ndarray:
        """(S,) bool: the rows that one query reads, q (G, H), its own at a place among the keys (S, H) of a head."""
        assert what.policy.reads is not None
        newest = place // R
        budget = what.budget.rows and -(-what.budget.rows // R)
        count = what.policy.reads.pages or budget or int(share_of(jnp.int32(newest + 1), what.budget.share or 0.0))
        best = []
        for page in range(newest):
            own = keys[page * R : (page + 1) * R]
            most = np.maximum(q * own.min(axis=0), q * own.max(axis=0)).sum(axis=1).max()
            best.append((-most, page))
        read = {newest, *(page for _, page in sorted(best)[: max(count, 3) - 1])}
        return np.isin(np.arange(len(keys)) // R, sorted(read))

    def _expecting(self, layer: int) -> tuple[Policy, Moments]:
        """The policy with what a layer turns by, and the moments of its queries, in float64."""
        config, policy = self.model.config, self.model.eviction.policy  # type: ignore[union-attr]
        frequencies = tuple(inverse_frequencies(config.rope, config.context)[0].tolist())
        score: Any = policy.score
        score = dataclasses.replace(score, frequencies=frequencies if config.rotary[layer] else (0.0,))
        q = np.stack(self.queries[layer])
        mean = q.mean(axis=0)
        scatter = np.einsum("tni,tnj->nij", q - mean, q - mean)
        moments = Moments(jnp.int32(len(q)), jnp.asarray(mean, jnp.float32), jnp.asarray(scatter, jnp.float32))
        return dataclasses.replace(policy, score=score), moments

    def evict(self) -> None:
        what = self.model.eviction
        assert what is not None
        layers = max(layer for layer, _ in self.rows) + 1
        heads = len(self.rows) // layers
        now = jnp.int32(self.computed)
        counts = np.full(layers, int(what.kept(now)))
        if what.layers == "pyramid":
            window = max(what.policy.recent, what.least, 1)
            counts = np.asarray(what.at_least(pyramid(what.budget, self.computed, layers, window), now))
        for layer in range(layers):
            mine = [self.rows[layer, head] for head in range(heads)]

            def padded(name, mine=mine):
                arrays = [np.pad(x := rows[name], [(0, MOST - len(x))] + [(0, 0)] * (x.ndim - 1)) for rows in mine]
                return jnp.asarray(np.stack(arrays), jnp.int32 if name in ("positions", "seen") else jnp.float32)

            lengths = jnp.asarray([len(rows["k"]) for rows in mine], jnp.int32)
            seen = Rows(padded("k"), padded("v"), lengths, padded("positions"), jnp.int32(self.computed),
                        padded("weights"), padded("seen"))  # fmt: skip
            policy = what.policy
            if policy.moments:
                policy, moments = self._expecting(layer)
                seen = seen.replace(moments=moments)
            count = jnp.int32(counts[layer])
            if policy.whole:
                count = jnp.where(jnp.asarray(policy.whole[layer]), lengths, count)
            if what.heads == "adakv":
                count = divided(policy, seen, count)
            kept, count = map(np.asarray, selected(policy, seen, count))
            for head, rows in enumerate(mine):
                places = kept[head, : count[head]]
                rows |= {name: x[places] for name, x in rows.items()}
                if what.policy.watch != "all":
                    rows["weights"][:], rows["seen"][:] = 0, 0


def cut_after(what: Eviction, prompt: int, computed: int) -> int:
    return int(what.next_cut(jnp.asarray([prompt], jnp.int32), jnp.asarray([computed], jnp.int32))[0])


def expected(model: Model, prompt: Sequence[int], new: int, context: int | None = None) -> list[int]:
    """Greedy tokens of one sequence, its rows evicted as the engine says it does."""
    what, tokens = model.eviction, list(prompt)
    assert what is not None
    plain = Plain(model, context or len(prompt))
    watch = what.policy.watch
    while True:
        stop = min(len(tokens), cut := cut_after(what, context or len(prompt), plain.computed))
        last = 1 if watch == "last" else watch if isinstance(watch, int) else 0
        positions = range(plain.computed, stop)
        watched = [watch == "all" or cut - last <= i < cut for i in positions]
        if what.policy.moments:
            watched = [what.policy.sinks <= i < (context or len(prompt)) for i in positions]
        logits = plain.compute(tokens[plain.computed : stop], watched)
        if plain.computed == len(tokens):
            tokens.append(int(logits.argmax()))
        if plain.computed == cut:
            plain.evict()
        if len(tokens) == len(prompt) + new:
            return tokens[len(prompt) :]


PROMPTS = [[(7 * i * i + 3 * seed) % 60 + 1 for i in range(count)] for seed, count in enumerate((23, 9, 31, 16, 5))]
SOME = SamplingParams(max_new_tokens=12)
RETRIEVAL = ((True, False), (False, False), (False, True))
"""Heads of tiny_llama that keep every row."""
READING: dict[str, tuple[Policy, dict[str, Any]]] = {
    "pages": (named("quest", pages=3), {"share": 1.0}),
    "share, from layer 1 on": (named("quest", dense=1), {"share": 0.6}),
    "rows, in all layers": (named("quest", dense=0), {"rows": 14}),
}
"""Of prompts of up to 31 tokens and 12 more, in pages of 4."""
CASES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "streaming": (named("streaming", sinks=2), {"rows": 9, "every": 3}),
    "by slot": (named("streaming", sinks=2, positions="slot"), {"rows": 9, "every": 3}),
    "by slot, few": (named("streaming", sinks=4, positions="slot"), {"share": 0.3, "every": 4, "layers": "pyramid"}),
    "knorm": (named("knorm", sinks=1, recent=2), {"share": 0.4, "every": 5}),
    "h2o, pyramid": (named("h2o", recent=1), {"share": 0.5, "layers": "pyramid", "every": 6}),
    "tova": (named("tova"), {"rows": 8, "every": 1}),
    "observed": (named("observed"), {"share": 0.5, "every": 8}),
    "expected": (named("expected_attention", sinks=2, future=64), {"share": 0.5, "every": 5}),
    "expected, adakv": (named("expected_attention", covariance=False), {"rows": 9, "heads": "adakv", "every": 7}),
    "duo": (named("duo", heads=RETRIEVAL, sinks=2, recent=5, within=6), {"rows": 7, "every": 3}),
    "snapkv, adakv": (named("snapkv", window=4), {"share": 0.5, "heads": "adakv"}),
}
"""A policy of each kind: what it watches, when it evicts, and how its budget is divided."""
SLOW = ("tova", "observed", "knorm", "streaming", "by slot, few", "expected", "expected, adakv")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_tokens_are_those_of_plain_arrays(name):
    """Several prompts at once, in slots that others had before, with chunks that end anywhere."""
    policy, options = CASES[name]
    model = evicting(policy, **options)
    found = engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)
    assert found == [expected(model, prompt, 12) for prompt in PROMPTS]
    if policy.positions == "slot":
        kept = dataclasses.replace(policy, positions="token")
        assert found != [expected(evicting(kept, **options), prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "gpt_oss", "gpt2"])
def test_places_as_positions_in_other_families(name):
    """Latents whose queries are rotated behind dims that are not; logits that join each denominator; no RoPE at all.

    Streaming over a budget that is never spent changes nothing; positions of a model without RoPE stay.
    """
    model = model_of(name)

    def found(policy: Policy, rows: int) -> list[list[int]]:
        what = Eviction(policy, Budget(rows=rows), every=3)
        return engines.tokens(dataclasses.replace(model, eviction=what), PROMPTS, SOME, rows=R, slots=2, packed=16)

    by_slot, kept = (named("streaming", sinks=2, positions=positions) for positions in ("slot", "token"))
    assert found(by_slot, MOST) == engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)
    assert (found(by_slot, 9) == found(kept, 9)) == (name == "gpt2")


@pytest.mark.slow
def test_layers_without_rope_expect_queries_as_they_are():
    """SmolLM3 leaves RoPE out in some layers, which share pages with the others."""
    what = Eviction(named("expected_attention", sinks=1, future=16), Budget(share=0.4), every=5)
    model = dataclasses.replace(model_of("smollm3"), eviction=what)
    assert len(set(model.config.rotary)) == 2
    found = engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)
    assert found == [expected(model, prompt, 12) for prompt in PROMPTS]


def test_rows_left_by_expected_attention_are_those_of_kvpress():
    """The golden model's queries, keys and values through the cache, in two chunks; a slot beside it has another
    prompt. Then the same slots again, with half the prompt first."""
    golden = np.load(engines.GOLDENS / "eviction.npz")
    L, N, S, H = golden["queries"].shape
    rope = Rope("default", 10_000.0, H)
    turned = rotation(rope, S)
    what = Eviction(named("expected_attention"), Budget(share=0.5), rotations=(turned,) * L)
    spec = KVSpec(golden["keys"].shape[1], H, H, storage="float32")
    config = CacheConfig((spec,) * L, 2, 8, 16, eviction=what, query_heads=N)
    angles = cos_sin(rope_table(rope, S), jnp.arange(S))
    cache, now = kv_cache.init(config), jnp.int32(0)

    @functools.partial(jax.jit, static_argnames=("start", "stop", "ends"))
    def computed(cache, start, stop, ends):
        """Tokens start … stop of slot 1, as many of slot 0 whose queries and keys are twice as large."""
        T = stop - start
        tokens = jnp.asarray([T, T], jnp.int32)
        cache = kv_cache.reserve(config, cache, None, tokens, now, now, jnp.bool_(False), 2 * T).cache
        slots, positions = jnp.repeat(jnp.arange(2), T), jnp.tile(jnp.arange(start, stop), 2)
        starts = jnp.asarray([0, T, 2 * T], jnp.int32)
        context = jnp.asarray([S, S], jnp.int32)
        placement = kv_cache.Placement(slots, positions, starts, T, cuts=context, context=context)
        for layer in range(L):
            q = apply_rope(jnp.asarray(golden["queries"][layer]).swapaxes(0, 1), *angles)
            k, v = (jnp.asarray(golden[name][layer]).swapaxes(0, 1) for name in ("keys", "values"))
            q, k, v = (jnp.concatenate([x[start:stop] * 2, x[start:stop]]) for x in (q, k, v))
            cache, _ = kv_cache.attend(config, placement, cache, layer, q, k, v, H**-0.5)
        return kv_cache.evict(config, cache, jnp.asarray([ends, ends]), context, now) if ends else cache

    for cut in (30, 44):
        cache = computed(computed(cache, 0, cut, False), cut, S, True)
        (heads,) = cache.by_head
        for layer in range(L):
            want = golden[f"expected_attention/0.5/{layer}"]
            assert heads.table.lengths[layer, 1].tolist() == [want.shape[1]] * spec.kv_heads
            for head in range(spec.kv_heads):
                left = heads.kv.positions[heads.table.pages[layer, 1, head]].reshape(-1)[: want.shape[1]]
                np.testing.assert_array_equal(left, want[head])
        everyone = jnp.asarray([True, True])
        cache = kv_cache.release(config, cache, None, everyone, now, now, lambda slot, column: slot)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "pages" else [pytest.mark.slow]) for name in READING]
)
def test_reading_some_pages_is_reading_those_rows(name):
    """Quest against masks over plain arrays; every prompt alone computes the same."""
    policy, options = READING[name]
    model = evicting(policy, **options)
    found = engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)
    assert found == [expected(model, prompt, 12) for prompt in PROMPTS]
    assert found != engines.tokens(tiny("tiny_llama"), PROMPTS, SOME, rows=R, slots=2, packed=16)


def test_reading_all_pages_changes_nothing():
    exact = engines.tokens(tiny("tiny_llama"), PROMPTS, SOME, rows=R, slots=2, packed=16)
    for what in (Eviction(named("quest", pages=11, dense=0), Budget(share=1.0)),):
        model = dataclasses.replace(tiny("tiny_llama"), eviction=what)
        assert engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16) == exact


def test_tokens_computed_again_read_the_same_pages(tmp_path):
    """What was generated before a snapshot is computed again in one step where another plan resumes it."""
    policy, options = READING["rows, in all layers"]
    model = evicting(policy, **options)
    running = job.Job(model, Options(rows=R, slots=2, packed=16, segment_seconds=1e-6))
    for request in engines.requests(PROMPTS, SOME):
        running.add(request)
    ended = [output for _ in range(12) for output in running.advance().finished]
    snapshots.save(running, tmp_path)
    resumed = snapshots.resume(model, tmp_path, Options(rows=R, slots=4, packed=32))
    while resumed.unfinished:
        ended += resumed.advance().finished
    found = {output.request.index: list(output.tokens) for output in ended}
    assert [found[i] for i in range(len(PROMPTS))] == [expected(model, prompt, 12) for prompt in PROMPTS]


def test_pages_read_are_counted_as_said():
    for policy, options, used, count in (
        (named("quest", pages=5), {"share": 1.0}, (1, 3, 5, 6, 90), [1, 3, 5, 5, 5]),
        (named("quest"), {"share": 0.25}, (1, 3, 12, 16, 90), [1, 3, 3, 4, 22]),
        (named("quest"), {"rows": 33}, (1, 8, 9, 90), [1, 8, 9, 9]),
    ):
        what = Eviction(policy, Budget(**options))
        assert what.pages_read(jnp.asarray(used, jnp.int32), R).tolist() == count
        assert [what.most_pages(u, R) >= c for u, c in zip(used, count, strict=True)] == [True] * len(used)
    assert eviction_of("quest:pages=8", None) == Eviction(named("quest", pages=8), Budget(share=1.0))
    assert eviction_of("quest", 0.25) == Eviction(named("quest"), Budget(share=0.25))


@pytest.mark.parametrize(
    "text, keep, said",
    [
        ("quest", None, "give pages, as in quest:pages=32, or keep"),
        ("quest:pages=8", 0.5, "keep is 0.5 and quest has pages=8: give one of them"),
        ("quest:pages=2", None, "pages=2, but a whole number from 3"),
        ("quest:pages=8,dense=-1", None, "dense=-1"),
        ("quest:pages=8+pyramid", None, "says what each head keeps: leave out"),
    ],
)
def test_bad_readings_are_named(text, keep, said):
    with pytest.raises(ModelError, match=said):
        eviction_of(text, keep)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by slot", "expected", "pages"])
def test_scanned_layers_read_and_evict_alike(name):
    """The layer is a number of the device there: how it turns queries, and whether it reads all, is looked up."""
    policy, options = (CASES | READING)[name]
    model = evicting(policy, **options)
    scanned = dataclasses.replace(tiny("tiny_llama", stacked=True), eviction=model.eviction)
    found = engines.tokens(scanned, PROMPTS, SOME, rows=R, slots=2, packed=16)
    assert found == [expected(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by slot", "expected", "pages", "h2o, pyramid"])
def test_the_loop_copies_nothing_of_the_heads(name):
    """Neither pages, nor moments, nor bounds: each layer writes into what the one before has read."""
    policy, options = (CASES | READING)[name]
    model = evicting(policy, **options)
    shapes = plans.plan(model, engines.requests([[1] * 200] * 4, SOME), Options(rows=16, slots=4, packed=16))
    program = plans.program_of(model, shapes.cache, share=shapes.share)
    automata = jnp.asarray(no_stops(model.config.vocab))
    state = jax.eval_shape(lambda: engine_state.init(program, automata, rows=shapes.queue))
    (heads,) = state.cache.by_head
    hlo = within_the_loop(compile_run(program, model.params, state, 16).as_text())
    for x in jax.tree.leaves(heads.kv):
        assert x.ndim == 1 or f"[{','.join(map(str, x.shape))}]" in hlo
    large = min(x.size for x in jax.tree.leaves(heads.kv) if x.size > heads.kv.positions.size)
    assert copies_as_large_as(hlo, large) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by place", "by pages"])
def test_kernels_of_the_tpu_read_what_xla_reads(way):
    """Slots without rows behind the sinks, without tokens, and of tokens of which some read all pages and some few."""
    rng, (B, K, M, R, H, N) = np.random.default_rng(0), (4, 2, 4, 32, 64, 4)
    lanes, P, sinks = Lanes(1, H, H), 4 * 2 * 4, 32
    joined, _ = init_pages(P, R, lanes, jnp.dtype("float32"), "joined")
    joined = jnp.asarray(rng.standard_normal(joined.shape), jnp.float32)
    table = jnp.asarray(rng.permutation(P).reshape(B, K, M), jnp.int32)
    tokens, held = np.asarray([1, 3, 0, 2]), np.asarray([90, 30, 64, 128])
    slots = np.concatenate([np.repeat(np.arange(B), tokens), [B, B]])
    starts = jnp.asarray(np.cumsum([0, *tokens]), jnp.int32)
    place = np.concatenate([held[b] - tokens[b] + np.arange(tokens[b]) for b in range(B)])
    positions = np.append(place + (7 * (place >= sinks) if way == "by place" else 0), [0, 0])
    context = jnp.asarray([20, 64, 64, 127], jnp.int32)
    whose, where = (jnp.asarray(x, jnp.int32) for x in (slots, positions))
    placement = kv_cache.Placement(whose, where, starts, 3, context=context)
    lengths = jnp.asarray(np.repeat(held[:, None], K, axis=1), jnp.int32)
    q = jnp.asarray(rng.standard_normal((8, N, H)), jnp.float32)
    what = AttentionSpec(H**-0.5, layout="joined", lanes=lanes)
    logits = jnp.asarray(rng.standard_normal(N), jnp.float32)

    def read(backend: str) -> np.ndarray:
        over_rows = functools.partial(paged_attention, k_pages=joined, v_pages=None, spec=what, backend=backend)
        if way == "by place":
            policy = named("streaming", sinks=sinks, positions="slot")
            turned = rotation(Rope("default", 10_000.0, H), 256), jnp.bool_(True)
            eviction = Eviction(policy, Budget(rows=64))
            return np.asarray(reading.by_place(eviction, placement, over_rows, q, table, lengths, logits, *turned))
        eviction = Eviction(named("quest", pages=3, dense=0), Budget(share=1.0))
        keys = joined_store.split(joined_store.rows_of(joined), lanes)[0][:, :, 0]
        bounds = jnp.stack([keys.min(axis=1), keys.max(axis=1)], axis=1)
        return np.asarray(reading.by_pages(eviction, placement, over_rows, q, table, lengths, logits, bounds, 0, R))

    found, want = (read(backend)[: int(starts[-1])] for backend in ("tpu_interpret", "xla"))
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


# --- pages ------------------------------------------------------------------------------------------------------
def check(config, state) -> int:
    """Tables, owners and free pages agree; how many pages are in use."""
    state = jax.device_get(state)
    assert config.groups == (LEDGER,) and state.cache.groups[0].kv.k == ()
    (group,) = state.cache.by_head
    pages, lengths, pool = group.table.pages, group.table.lengths, group.pool
    owned = [
        int(pages[layer, slot, head, column])
        for layer, slot, head in np.ndindex(lengths.shape)
        for column in range(-(-int(lengths[layer, slot, head]) // config.rows))
    ]
    assert len(owned) == len(set(owned))
    refs = np.zeros(pool.refs.shape, int)
    refs[owned] = 1
    assert pool.refs.tolist() == refs.tolist()
    assert sorted(pool.free[: pool.height].tolist()) == np.flatnonzero(refs == 0).tolist()
    idle = np.asarray(state.slots.request) >= state.requests.status.shape[0]
    assert (lengths[:, idle] == 0).all()
    return len(owned)


class OneStep(contextlib.nullcontext):
    """A pace of one step a segment."""

    steps, step = 1, 0

    def begin_again(self) -> None:
        pass


def stepwise(model: Model, prompts, params, **options):
    """Runs a job a step at a time: outputs, and pages in use after every step."""
    shapes = Options(**{"rows": R, "slots": 2, "packed": 16, **options})
    running = job.Job(model, shapes)
    requests = engines.requests(prompts, params)
    for request in requests:
        running.add(request)
    used, done = [], dict[int, list[int]]()
    running._pace = OneStep()  # type: ignore[assignment]
    while running.unfinished:
        done |= {output.request.index: list(output.tokens) for output in running.advance().finished}
        assert running.plan is not None
        used.append(check(running.plan.cache, running.state))
    return [done[request.index] for request in requests], used


def test_a_prompt_gives_back_pages_when_it_is_compressed():
    """Half the rows of 32 tokens in pages of 4: 8 pages a head before, 4 after; K and V are gone, not masked."""
    model = evicting(named("knorm"), share=0.5)
    prompt = [i % 50 + 1 for i in range(32)]
    found, used = stepwise(model, [prompt], SamplingParams(max_new_tokens=4), packed=32)
    spec = model.family.kv_specs(model.config, "float32")
    heads = sum(s.kv_heads for s in spec)
    assert used[0] == 4 * heads
    assert used[-1] == 0
    assert found == [expected(model, prompt, 4)]


def test_pages_of_streaming_heads_return_while_retrieval_heads_keep_theirs():
    """32 tokens, pages of 4: 2 retrieval heads hold all, 4 streaming heads 7 rows, and 8 more in between."""
    policy = named("duo", heads=RETRIEVAL, sinks=2, recent=5, within=8)
    model = evicting(policy, rows=7, every=3)
    prompt = [i % 50 + 1 for i in range(32)]
    found, used = stepwise(model, [prompt], SamplingParams(max_new_tokens=4), packed=32)
    assert used[:4] == [2 * 2 + 4 * 2, 2 * 4 + 4 * 2, 2 * 6 + 4 * 2, 2 * 8 + 4 * 2]
    assert max(used) == 2 * 9 + 4 * 3 and used[-1] == 0
    assert found == [expected(model, prompt, 4)]
    config = plans.cache_config(model, 2, 64, Options(rows=R, slots=2), 32)
    most = claims(config, config.specs[0], *(jnp.asarray([x], jnp.int32) for x in (32, 36, 0)))
    assert most.tolist() == [2 * 9 + 4 * (4 + 1)]
    whole = dataclasses.replace(policy, whole=((True, True),) * 3)
    assert stepwise(evicting(whole, rows=7), PROMPTS[:2], SOME)[0] == engines.tokens(
        tiny("tiny_llama"), PROMPTS[:2], SOME
    )


def test_a_file_says_which_heads_retrieve(tmp_path):
    table = tmp_path / "a+b,c" / "lr=0.02-heads.tsv"
    table.parent.mkdir()
    table.write_text("6.05e-01\t0.0e+00\n2.49e-02\t0.0\n0.4999\t5.0e-01\n")
    lists = tmp_path / "heads.json"
    lists.write_text("[[1, 0.2], [false, 0], [0.1, true]]")
    for path in (table, lists):
        found = eviction_of(f"duo:heads={path},sinks=2,recent=5,within=6", None, 3)
        assert found == Eviction(CASES["duo"][0], Budget(rows=7), every=3)
    found = eviction_of(f"duo:heads={table}", None)
    assert found is not None and (found.budget.rows, found.policy.sinks, found.policy.recent) == (384, 128, 256)
    strict = eviction_of(f"duo:heads={table},threshold=0.6", None)
    assert strict is not None and strict.policy.whole == ((True, False), (False, False), (False, False))


@pytest.mark.parametrize(
    "text, options, keep, said",
    [
        ("1\t0\n1\n", "", None, "'.*heads.tsv' is not a table of heads: one list, or line, for each layer"),
        ("", "", None, "is not a table of heads"),
        ("1\tx\n", "", None, "is not a table of heads"),
        ("1\tnan\n", "", None, "is not a table of heads"),
        (None, "", None, "cannot be read from '.*heads.tsv'"),
        ("1\t0\n", ",threshold=high", None, "threshold='high', but a number such as 0.5"),
        ("1\t0\n", ",sinks=-1", None, "sinks is -1"),
        ("1\t0\n", ",within=0", None, "within is 0"),
        ("1\t0\n", "", 0.5, "keep is 0.5, but duo says what heads keep"),
        ("1\t0\n", "+adakv", None, "'duo' says what each head keeps: leave out"),
    ],
)
def test_bad_heads_are_named(tmp_path, text, options, keep, said):
    path = tmp_path / "heads.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=said):
        eviction_of(f"duo:heads={path}{options}", keep)


def test_heads_are_those_of_the_model():
    with pytest.raises(ModelError, match="are 1 layers of 2, the model's 3 layers of 2: give those of this model"):
        _ = evicting(named("duo", heads=[(True, False)]), rows=7).own_eviction
    with pytest.raises(ModelError, match="needs the option 'heads'"):
        eviction_of("duo", None)


def test_a_long_output_stays_within_its_budget():
    model = evicting(named("streaming", sinks=2), rows=10, every=4)
    found, used = stepwise(model, [[1, 2, 3]], SamplingParams(max_new_tokens=60))
    heads = sum(spec.kv_heads for spec in model.family.kv_specs(model.config, "float32"))
    assert max(used) == 4 * heads  # 14 rows
    assert found == [expected(model, [1, 2, 3], 60)]


def test_pages_add_up_whatever_happens():
    rng = random.Random(0)
    model = evicting(named("snapkv", window=4), share=0.5, heads="adakv")
    prompts = [[rng.randrange(1, 60) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    params = [SamplingParams(max_new_tokens=rng.randint(1, 12)) for _ in prompts]
    found, used = stepwise(model, prompts, params, slots=4)
    assert used[-1] == 0
    assert found == [expected(model, prompt, p.max_new_tokens) for prompt, p in zip(prompts, params, strict=True)]


def test_little_memory_gives_the_same_tokens():
    """Requests enter as what they may come to hold fits; the same tokens, one after another if need be."""
    model = evicting(named("h2o"), rows=10, every=4)
    config = plans.cache_config(model, 2, 64, Options(rows=R, slots=2), 16)
    assert config.head_pages is not None
    one = config.kv_bytes // config.head_pages[0]
    heads = sum(spec.kv_heads for spec in config.specs)
    found, used = stepwise(model, PROMPTS, SOME, kv_bytes=one * 9 * heads)
    assert max(used) <= 9 * heads
    assert found == [expected(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
def test_codes_stay_the_codes_that_they_are():
    """int8 rows are moved with their scales, and never quantized again."""
    model = evicting(named("window"), storage="int8", rows=8, every=4)
    found, _ = stepwise(model, PROMPTS[:2], SOME)
    again = dataclasses.replace(model, eviction=Eviction(named("streaming", sinks=0), Budget(rows=8), every=4))
    assert found == stepwise(again, PROMPTS[:2], SOME)[0]
    whole = dataclasses.replace(model, eviction=Eviction(named("window"), Budget(rows=64)))
    exact = engines.tokens(tiny("tiny_llama", storage="int8"), PROMPTS[:2], SOME)
    assert stepwise(whole, PROMPTS[:2], SOME)[0] == exact != found


# --- what cannot be ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_budget_that_is_never_reached_changes_nothing():
    model = evicting(named("h2o"), rows=64)
    assert engines.tokens(model, PROMPTS, SOME) == engines.tokens(tiny("tiny_llama"), PROMPTS, SOME)


@pytest.mark.parametrize(
    ("prompt", "computed", "rows", "share", "cut"),
    [
        (20, 0, 8, None, 20), (20, 12, 8, None, 20), (20, 20, 8, None, 24), (20, 23, 8, None, 24),
        (20, 24, 8, None, 28), (5, 0, 8, None, 12), (5, 11, 8, None, 12), (5, 12, 8, None, 16),
        (20, 3, None, 0.5, 20), (1, 0, None, 1.0, 5),
    ],
)  # fmt: skip
def test_when_rows_go(prompt, computed, rows, share, cut):
    what = Eviction(named("window"), Budget(rows, share), every=4)
    assert cut_after(what, prompt, computed) == cut
    once = Eviction(named("snapkv", window=2), Budget(rows, share), every=4)
    wanted = cut if cut == prompt else NEVER
    assert cut_after(once, prompt, computed) == wanted


def test_says_what_it_cannot_do():
    for wrong, said in (
        ({"policy": named("none")}, "evicts nothing"),
        ({"every": 0}, "every 0 tokens"),
        ({"layers": "cone"}, "layers are 'cone'"),
        ({"policy": named("streaming"), "heads": "adakv"}, "keeps the same rows in all"),
    ):
        with pytest.raises(UserError, match=said):
            Eviction(**{"policy": named("knorm"), "budget": Budget(rows=8), **wrong})  # type: ignore[arg-type]
    slots = named("streaming", positions="slot")
    for wrong, said in (
        ({"policy": dataclasses.replace(slots, score=scores.weights)}, "has positions='slot', which only sinks"),
        ({"policy": slots, "budget": Budget(rows=4)}, "give keep=5 or more"),
    ):
        with pytest.raises(UserError, match=said):
            Eviction(**{"budget": Budget(rows=8), **wrong})  # type: ignore[arg-type]
    unknown = evicting(slots, rows=8)
    with pytest.raises(ModelError, match="how llama models turn them is not known"):
        _ = dataclasses.replace(unknown, family=unknown.family._replace(rotations=None)).own_eviction
    gpu = Options(backend="gpu", layout="token_major", rows=64)
    with pytest.raises(RequestError, match="do not read parts of a sequence"):
        plans.cache_config(evicting(slots, rows=8), 2, 64, gpu, 16)
    model = evicting(named("knorm"), rows=8)
    with pytest.raises(RequestError, match=r"^Beams and embeddings do not evict"):
        plans.cache_config(model, 2, 64, Options())


def test_the_rest_of_a_prompt_meets_what_is_left_of_its_beginning():
    """`evict_at`: the first 12 tokens are compressed before the others are seen."""
    model = evicting(named("truncate"), share=0.5)
    early = [dataclasses.replace(SOME, evict_at=12)] * len(PROMPTS)
    found = engines.tokens(model, PROMPTS, early, rows=R, slots=2, packed=16)
    assert found == [expected(model, prompt, 12, context=min(12, len(prompt))) for prompt in PROMPTS]
    assert found != engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)


@pytest.mark.parametrize("name", ["tiny_llama", pytest.param("tiny_mistral", marks=pytest.mark.slow)])
def test_a_snapshot_goes_on_with_what_was_left(name, tmp_path):
    """Heads' pages and lengths, and the pages of windows, are part of the state; another eviction is another model."""
    model = evicting(named("h2o"), rows=10, every=4) if name == "tiny_llama" else tiny(name)
    options = Options(rows=R, slots=2, packed=16, segment_seconds=1e-6)
    running = job.Job(model, options)
    for request in engines.requests(PROMPTS, SOME):
        running.add(request)
    ended = [output for _ in range(9) for output in running.advance().finished]
    snapshots.save(running, tmp_path)
    resumed = snapshots.resume(model, tmp_path, options)
    assert resumed.state is not None and resumed.plan == running.plan
    while resumed.unfinished:
        ended += resumed.advance().finished
    found = {output.request.index: list(output.tokens) for output in ended}
    assert [found[i] for i in range(len(PROMPTS))] == engines.tokens(model, PROMPTS, SOME, rows=R, slots=2, packed=16)
    if model.eviction is not None:
        other = dataclasses.replace(model, eviction=dataclasses.replace(model.eviction, every=5))
        with pytest.raises(UserError, match=r"is of another model \(evict "):
            snapshots.resume(other, tmp_path, options)
