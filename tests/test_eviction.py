"""Which rows stay: as in kvpress and the authors' own classes (scripts/make_eviction_goldens.py), and as properties."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvjax import eviction
from kvjax.errors import UserError
from kvjax.eviction import Budget, Policy, Rows, rotation, selection
from kvjax.models.positions import Rope, apply_rope, cos_sin, inverse_frequencies, rope_table

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = np.load(ROOT / "tests" / "goldens" / "eviction.npz")
LAYERS, N, K, S, H, WINDOW = 3, 4, 2, 72, 16, 8
RATIOS = (0.3, 0.5, 0.75)
ROPE = Rope("default", 10_000.0, H)
FREQUENCIES = tuple(inverse_frequencies(ROPE, S)[0].tolist())


# --- the rows of the golden model -----------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@functools.cache
def attention(layer: int) -> np.ndarray:
    """Causal weights (N, S, S) of the golden model's queries, in float64."""
    positions = jnp.arange(S)
    q = apply_rope(jnp.asarray(GOLDEN["queries"][layer]).swapaxes(0, 1), *cos_sin(rope_table(ROPE, S), positions))
    keys = np.repeat(GOLDEN["keys"][layer], N // K, axis=0).astype(np.float64)
    z = np.einsum("tnh,nsh->nts", np.asarray(q, np.float64), keys) * H**-0.5
    return softmax(np.where(np.tri(S, dtype=bool), z, -np.inf))


add_queries = jax.jit(eviction.add_queries)


@functools.cache
def golden_rows(policy: Policy, layer: int) -> Rows:
    watched = S - policy.watch if isinstance(policy.watch, int) else {"none": S, "all": 0, "last": S - 1}[policy.watch]
    weights = attention(layer)[:, watched:].sum(1).reshape(K, N // K, S).mean(1)
    seen = np.tri(S, dtype=np.int32)[watched:].sum(0)
    queries = jnp.asarray(GOLDEN["queries"][layer]).swapaxes(0, 1)
    moments = eviction.no_moments(N, H)
    for chunk in (slice(0, 30), slice(30, S)):
        moments = add_queries(moments, queries[chunk], jnp.arange(S)[chunk] >= policy.sinks)
    return Rows(
        keys=jnp.asarray(GOLDEN["keys"][layer]),
        values=jnp.asarray(GOLDEN["values"][layer]),
        lengths=jnp.full(K, S, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(S), (K, S)),
        next=jnp.int32(S),
        weights=jnp.asarray(weights, jnp.float32),
        seen=jnp.broadcast_to(jnp.asarray(seen), (K, S)),
        moments=moments,
    )


POLICIES = {
    "streaming": eviction.named("streaming"),
    "tova": eviction.named("tova"),
    "snapkv": eviction.named("snapkv", window=WINDOW),
    "observed": eviction.named("observed"),
    "knorm": eviction.named("knorm"),
    "keydiff": eviction.named("keydiff"),
    "expected_attention": eviction.named("expected_attention", frequencies=FREQUENCIES),
    "expected_attention_mean": eviction.named(
        "expected_attention", frequencies=FREQUENCIES, future=64, sinks=2, covariance=False, value_norm=False
    ),
}


select = jax.jit(eviction.select, static_argnums=0, static_argnames="most")
scored = jax.jit(eviction.scored, static_argnums=0)
masked = jax.jit(eviction.kept_mask, static_argnums=0)
rerotate = jax.jit(eviction.rerotate, static_argnums=(2, 3))
pyramid = jax.jit(eviction.pyramid, static_argnums=(0, 2, 3, 4))
divided = jax.jit(eviction.adakv, static_argnums=(0, 3))


@pytest.mark.parametrize("name", POLICIES)
def test_kept_rows_are_those_of_kvpress(name):
    policy = POLICIES[name]
    for layer in range(LAYERS):
        rows = golden_rows(policy, layer)
        for ratio in RATIOS:
            kept, counts = select(policy, rows, Budget(share=1 - ratio).count(S))
            expected = GOLDEN[f"{name}/{ratio}/{layer}"]
            assert counts.tolist() == [expected.shape[1]] * K
            np.testing.assert_array_equal(kept[:, : expected.shape[1]], expected, err_msg=f"{ratio} {layer}")
            assert np.all(kept[:, expected.shape[1] :] == S)


def test_pyramid_keeps_the_rows_of_kvpress():
    policy = POLICIES["snapkv"]
    for ratio in RATIOS:
        counts = eviction.pyramid(Budget(share=1 - ratio), S, LAYERS, window=WINDOW)
        for layer in range(LAYERS):
            kept, _ = select(policy, golden_rows(policy, layer), counts[layer])
            expected = GOLDEN[f"pyramid/{ratio}/{layer}"]
            np.testing.assert_array_equal(kept[:, : int(counts[layer])], expected)


def test_pyramid_counts_are_those_of_kvpress():
    for (n, ratio, *shape), expected in zip(GOLDEN["pyramid_cases"], GOLDEN["pyramid_counts"], strict=True):
        layers, window, beta = map(int, shape)
        counts = pyramid(Budget(share=1 - ratio), int(n), layers, window, beta)
        # float32 against float64: beyond some thousand tokens what lies near a half may be rounded the other way.
        np.testing.assert_allclose(counts, expected[:layers], atol=1 if n > 4096 else 0, rtol=0, err_msg=f"{n} {ratio}")


@pytest.mark.parametrize("floor", [0.2, 0.9])
@pytest.mark.parametrize("name", ["snapkv", "knorm", "expected_attention"])
def test_adakv_keeps_the_rows_of_kvpress(name, floor):
    policy = POLICIES[name]
    for layer in range(LAYERS):
        rows = golden_rows(policy, layer)
        for ratio in RATIOS:
            count = Budget(share=1 - ratio).count(S)
            counts = divided(policy, rows, count, floor)
            mask = masked(policy, rows, counts)
            expected = np.unpackbits(GOLDEN[f"adakv_{floor}_{name}/{ratio}/{layer}"], axis=1)[:, :S]
            assert int(counts.sum()) == K * int(count)
            np.testing.assert_array_equal(mask, expected.astype(bool), err_msg=f"{ratio} {layer}")


# --- the authors' classes, step by step -----------------------------------------------------------------------------

PROMPT, DIM = 24, 8


def replay(policy: Policy, count: int) -> np.ndarray:
    """Rows left after the prompt and after each single query that attends to what was left: (steps, heads, count)."""
    queries, new = GOLDEN["replay_queries"], GOLDEN["replay_keys"]
    heads, total, _ = new.shape
    held = [np.zeros(0, int)] * heads  # positions of the rows that are left
    summed = [np.zeros(0)] * heads
    left, start = [], 0
    for stop in (PROMPT, *range(PROMPT + 1, total + 1)):
        held = [np.append(h, np.arange(start, stop)) for h in held]
        summed = [np.append(w, np.zeros(stop - start)) for w in summed]
        weights = []
        for head in range(heads):
            z = queries[head, start:stop].astype(np.float64) @ new[head, held[head]].T * DIM**-0.5
            visible = held[head][None] <= np.arange(start, stop)[:, None]
            found = softmax(np.where(visible, z, -np.inf))
            weights.append(found[-1] if policy.watch == "last" else summed[head] + found.sum(0))
        rows = padded(held, weights, stop)
        kept, counts = select(policy, rows, jnp.int32(count), most=count)
        assert counts.tolist() == [count] * heads
        held = [h[k] for h, k in zip(held, np.asarray(kept), strict=True)]
        summed = [np.asarray(w)[k].astype(float) for w, k in zip(weights, np.asarray(kept), strict=True)]
        left.append(np.stack(held))
        start = stop
    return np.stack(left)


def padded(held: list[np.ndarray], weights: list[np.ndarray], stop: int) -> Rows:
    """Rows of a capacity of 32, NaN behind the lengths."""
    capacity, lengths = 32, np.array([len(h) for h in held], np.int32)
    positions = np.zeros((len(held), capacity), np.int32)
    summed = np.full((len(held), capacity), np.nan, np.float32)
    for head, length in enumerate(lengths):
        positions[head, :length], summed[head, :length] = held[head], weights[head]
    empty = jnp.full((len(held), capacity, DIM), jnp.nan, jnp.float32)
    places = jnp.asarray(lengths), jnp.asarray(positions)
    return Rows(empty, empty, *places, jnp.int32(stop), jnp.asarray(summed))


@pytest.mark.parametrize(
    "name, policy",
    [
        ("h2o", eviction.named("h2o", recent=6, recent_share=0)),
        ("streaming", eviction.named("streaming", sinks=4)),
        ("tova", eviction.named("tova", recent=0)),
    ],
    ids=["h2o", "streaming", "tova"],
)
def test_rows_left_while_decoding_are_those_of_the_authors(name, policy):
    np.testing.assert_array_equal(replay(policy, 10), GOLDEN[f"replay_{name}"])


# --- properties -----------------------------------------------------------------------------------------------------

CAPACITY, HEADS, DIMS = 24, 2, 4
EVERY = {name: eviction.named(name) for name in eviction.POLICIES if name not in ("expected_attention", "duo")} | {
    "duo": eviction.named("duo", heads=[], sinks=2, recent=3),
    "snapkv": eviction.named("snapkv", window=3),
    "expected_attention": eviction.named("expected_attention", frequencies=(1.0, 0.1)),
    "own": Policy("own", lambda rows: -rows.keys[:, :, 0], sinks=1, recent=2),
}


def random_rows(
    seed: int, lengths: tuple[int, int], coarse: bool = False, behind: float | None = None, unequal: bool = False
) -> Rows:
    """Random rows; of few different values where `coarse`, so that scores are often equal.

    Behind the lengths they are `behind`. Heads are `unequal` where one has much larger numbers.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.integers(-1, 2, shape) if coarse else rng.standard_normal(shape)).astype(np.float32)

    keys, values, weights = (draw(HEADS, CAPACITY, *rest) for rest in ((DIMS,), (DIMS,), ()))
    for x in (keys, values, weights):
        x[0] *= 9 if unequal else 1
    seen = rng.integers(1, 9, (HEADS, CAPACITY)).astype(np.int32)
    spread = draw(4, DIMS, 9)
    moments = eviction.Moments(jnp.int32(9), jnp.asarray(draw(4, DIMS)), jnp.asarray(spread @ spread.swapaxes(1, 2)))
    positions = np.sort(rng.permuted(np.tile(np.arange(99, dtype=np.int32), (2, 1)), axis=1)[:, :CAPACITY], axis=1)
    if behind is not None:
        for head, length in enumerate(lengths):
            for x in (keys, values, weights):
                x[head, length:] = behind
            positions[head, length:] = seen[head, length:] = -(2**31)
    return Rows(
        keys=jnp.asarray(keys),
        values=jnp.asarray(values),
        lengths=jnp.asarray(lengths, jnp.int32),
        positions=jnp.asarray(positions),
        next=jnp.int32(99),
        weights=jnp.asarray(np.abs(weights)),
        seen=jnp.asarray(seen),
        moments=moments,
    )


LENGTH = st.integers(0, CAPACITY)


@functools.partial(jax.jit, static_argnums=0)
def selected(policy: Policy, rows: Rows, wanted: jax.Array):
    found = jnp.zeros((HEADS, CAPACITY)) if policy.score is None else eviction.scored(policy, rows)
    return *eviction.select(policy, rows, wanted), eviction.kept_mask(policy, rows, wanted), found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(EVERY)), LENGTH, LENGTH, LENGTH, LENGTH, st.booleans(), st.integers(0, 99))
def test_what_select_promises(name, first, second, count, other, coarse, seed):
    policy = EVERY[name]
    lengths = (first, first) if policy.together else (first, second)
    wanted = jnp.int32(count) if policy.together else jnp.asarray([count, other], jnp.int32)
    kept, counts, mask, found = map(np.asarray, selected(policy, random_rows(seed, lengths, coarse), wanted))
    for head, length in enumerate(lengths):
        n = int(counts[head])
        assert n == (
            length if policy.score is None else min((count, count if policy.together else other)[head], length)
        )
        own = kept[head, :n].tolist()
        assert own == sorted(set(own)) and all(0 <= row < length for row in own)
        assert own == np.flatnonzero(mask[head]).tolist()
        assert kept[head, n:].tolist() == [CAPACITY] * (CAPACITY - n)
        if policy.score is None:
            continue
        sinks = min(policy.sinks, n)
        recent = min(max(policy.recent, int(n * policy.recent_share)), n - sinks)
        must = {*range(sinks), *range(length - recent, length)}
        assert must <= set(own)
        # A plain sort of what may choose: by score, and by index where scores are equal.
        free = sorted(set(range(length)) - must, key=lambda row: (-found[head, row], row))
        assert own == sorted(must | set(free[: n - len(must)]))
    poisoned = random_rows(seed, lengths, coarse, behind=np.nan)
    np.testing.assert_array_equal(selected(policy, poisoned, wanted)[0], kept)
    if policy.together:
        np.testing.assert_array_equal(kept[0], kept[1])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name, policy in EVERY.items() if policy.score and not policy.together]),
    *(LENGTH, LENGTH, LENGTH),
    st.sampled_from([0.0, 0.7]),
    st.booleans(),
    st.integers(0, 99),
)
@example("knorm", 24, 24, 10, 0.7, False, 3)  # without the floor, all 20 rows would be one head's
@example("h2o", 20, 24, 10, 0.7, True, 3)
def test_what_adakv_promises(name, first, second, count, floor, coarse, seed):
    policy, lengths = EVERY[name], (first, second)
    rows = random_rows(seed, lengths, coarse, unequal=True)
    counts = divided(policy, rows, jnp.int32(count), floor).tolist()
    found = np.asarray(scored(policy, rows))
    kept, free = [], []
    for head, length in enumerate(lengths):
        n = min(count, length)
        sinks = min(policy.sinks, n)
        recent = min(max(policy.recent, int(n * policy.recent_share)), n - sinks)
        must = {*range(sinks), *range(length - recent, length)}
        rest = sorted(set(range(length)) - must, key=lambda row: (-found[head, row], row))
        safe = max(0, min(count * round(10 * floor) // 10, length) - len(must))
        kept.append(len(must) + safe)
        free += [(-found[head, row], head, row) for row in rest[safe:]]
    for _, head, _ in sorted(free)[: min(HEADS * count, sum(lengths)) - sum(kept)]:
        kept[head] += 1
    assert counts == kept and sum(counts) == min(HEADS * count, sum(lengths))
    poisoned = random_rows(seed, lengths, coarse, behind=np.nan, unequal=True)
    assert divided(policy, poisoned, jnp.int32(count), floor).tolist() == counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=2, max_size=2), st.sampled_from([3, 7]))
def test_both_ways_to_find_places(mask, most):
    expected = [([i for i, kept in enumerate(row) if kept] + [7] * 7)[:most] for row in mask]
    for way in PLACES:
        np.testing.assert_array_equal(way(jnp.asarray(mask), most), expected)


PLACES = [jax.jit(way, static_argnums=1) for way in (selection.scattered_places, selection.sorted_places)]


def test_gather_compacts_and_fills_with_zeros():
    rows, poisoned = (random_rows(0, (20, 11), behind=behind) for behind in (None, np.nan))
    kept, _ = select(EVERY["knorm"], poisoned, jnp.asarray([7, 3]), most=8)
    compact = eviction.gather(poisoned.keys, kept)
    assert compact.shape == (HEADS, 8, DIMS)
    np.testing.assert_array_equal(compact[1, :3], rows.keys[1, kept[1, :3]])
    np.testing.assert_array_equal(compact[1, 3:], 0)
    fewer, counts = select(EVERY["knorm"], poisoned, jnp.asarray([7, 3]), most=5)  # no more than there is room for
    assert counts.tolist() == [5, 3] and fewer.shape == (HEADS, 5)
    np.testing.assert_array_equal(fewer, select(EVERY["knorm"], poisoned, jnp.asarray([5, 3]), most=5)[0])


# --- counts, moments, positions -------------------------------------------------------------------------------------


def test_budgets_count_in_whole_numbers():
    lengths = np.arange(5000)
    for percent in (1, 10, 12.5, 20, 25, 33, 50, 70, 90, 100):
        counts = Budget(share=percent / 100).count(jnp.asarray(lengths))
        np.testing.assert_array_equal(counts, lengths * int(percent * 10) // 1000)
    assert Budget(share=0.3).count(10_000_000) == 3_000_000
    assert Budget(rows=64).count(jnp.asarray([10, 64, 100])).tolist() == [10, 64, 64]


def test_budget_is_kvpress_count_unless_rounding_takes_a_row():
    for ratio in (0.1, 0.25, 0.3, 0.5, 0.75, 0.8, 0.875, 0.9):
        for n in range(2000):
            theirs, ours = int(n * (1 - ratio)), n * round(1000 * (1 - ratio)) // 1000
            assert theirs == ours or (theirs == ours - 1 and n * (1 - ratio) > ours - 1e-9)


def test_moments_are_numpys():
    queries = np.random.default_rng(0).standard_normal((50, 3, 4)) + 5
    watched = np.arange(50) % 3 > 0
    found = eviction.no_moments(3, 4)
    for start in range(0, 50, 7):
        part = slice(start, start + 7)
        queries_of = jnp.where(watched[part, None, None], jnp.asarray(queries[part], jnp.float32), jnp.nan)
        found = add_queries(found, queries_of, jnp.asarray(watched[part]))
    assert int(found.queries) == watched.sum()
    np.testing.assert_allclose(found.mean, queries[watched].mean(0), rtol=1e-5)
    expected = [np.cov(queries[watched, head].T, bias=True) for head in range(3)]
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-4, atol=1e-5)


def test_rerotated_keys_are_those_of_kvpress():
    policy = POLICIES["streaming"]
    rows = golden_rows(policy, 0)
    kept, _ = select(policy, rows, jnp.int32(S // 2), most=S // 2)
    shift = jnp.arange(S // 2)[None] - eviction.gather(rows.positions, kept)
    found = rerotate(eviction.gather(rows.keys, kept), shift, FREQUENCIES)
    np.testing.assert_allclose(found, GOLDEN["rerotated"], rtol=0, atol=2e-5 * np.abs(GOLDEN["rerotated"]).max())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 6])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rerotating_equals_rotating_elsewhere(interleaved, dim, kind):
    """RoPE of the models at other positions, near and 10 million away, dims that are not rotated, a factor on cos."""
    rope = Rope(kind, 10_000.0, dim, factor=4.0, original_length=64)
    table, frequencies = rope_table(rope, 2**24), tuple(inverse_frequencies(rope, 2**24)[0].tolist())
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2, 8)), jnp.float32)
    before, after = (
        jnp.asarray([0, 5, 300, 10_000_000, 70_000, 9_999_000]),
        jnp.asarray([0, 9, 4, 12, 16_000_000, 9_999_900]),
    )
    cached, expected = (apply_rope(keys, *cos_sin(table, at), interleaved).swapaxes(0, 1) for at in (before, after))
    shift = jnp.broadcast_to(after - before, (2, 6))
    np.testing.assert_allclose(rerotate(cached, shift, frequencies, interleaved), expected, atol=2e-5)
    assert rerotate(cached.astype(jnp.bfloat16), shift, frequencies, interleaved).dtype == jnp.bfloat16


@pytest.mark.parametrize("start", [0, 77, 9_999_999])
def test_mean_rotation_is_the_mean(start):
    angles = (start + np.arange(512))[:, None] * np.asarray(FREQUENCIES)
    cos, sin = rotation.mean_rotation(FREQUENCIES, jnp.int32(start), 512)
    np.testing.assert_allclose(cos, np.cos(angles).mean(0), atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angles).mean(0), atol=2e-6)


# --- what is refused, and the guide ---------------------------------------------------------------------------------


def test_same_options_are_the_same_policy():
    for name in eviction.POLICIES:
        options = {"heads": [(True, False)]} if name == "duo" else {}
        one, two = eviction.named(name, **options), eviction.named(name, **options)
        assert one == two and hash(one) == hash(two) and one.name == name
    assert eviction.named("snapkv", window=32) != eviction.named("snapkv")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: eviction.named("lru"), "'lru' is not one of none, truncate"),
        (lambda: eviction.named("snapkv", windw=3), "no option 'windw': its options are window, kernel, pool"),
        (lambda: eviction.named("window", size=3), "no option 'size': it has none"),
        (lambda: eviction.named("expected_attention", frequencies=()), "needs the frequencies"),
        (lambda: eviction.named("expected_attention", frequencies=(1.0,), future=0), "future=0"),
        (lambda: eviction.named("snapkv", kernel=4), "kernel is 4"),
        (lambda: eviction.named("snapkv", pool="sum"), "pool is 'sum'"),
        (lambda: eviction.named("snapkv", window=0), "recent|watch is 0"),
        (lambda: eviction.named("streaming", sinks=-1), "sinks is -1"),
        (lambda: eviction.named("h2o", recent_share=1.5), "recent_share is 1.5"),
        (lambda: Policy("mine", None, watch="some"), "watch is 'some'"),
        (lambda: eviction.named("streaming", positions="cache"), "positions is 'cache', 'token' or 'slot' is needed"),
        (lambda: Budget(), "give one of rows and share"),
        (lambda: Budget(rows=1, share=0.5), "give one of rows and share"),
        (lambda: Budget(rows=0), "rows=0"),
        (lambda: Budget(share=1.5), "share=1.5"),
        (lambda: eviction.pyramid(Budget(rows=9), 20, 4, beta=0), "beta=0"),
        (lambda: eviction.adakv(EVERY["tova"], random_rows(0, (5, 5)), jnp.int32(2)), "'tova' keeps the same rows"),
        (lambda: eviction.adakv(EVERY["none"], random_rows(0, (5, 5)), jnp.int32(2)), "AdaKV divides"),
        (lambda: eviction.adakv(EVERY["knorm"], random_rows(0, (5, 5)), jnp.int32(2), 1.5), "floor=1.5"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize(
    "name, without, words",
    [
        ("h2o", "weights", "Rows.weights, which is None"),
        ("observed", "seen", "Rows.seen, which is None"),
        ("expected_attention", "moments", "Rows.moments, which is None"),
    ],
)
def test_rows_without_what_is_read(name, without, words):
    rows = random_rows(0, (5, 5)).replace(**{without: None})
    with pytest.raises(ValueError, match=words):
        eviction.select(EVERY[name], rows, jnp.int32(2))


def test_misuse_is_named():
    rows = random_rows(0, (5, 5))
    with pytest.raises(ValueError, match="one count for all"):
        eviction.select(EVERY["tova"], rows, jnp.asarray([2, 2]))
    with pytest.raises(ValueError, match="Expected attention has no frequencies"):
        eviction.select(eviction.named("expected_attention"), rows, jnp.int32(2))
    with pytest.raises(ValueError, match="never evicts"):
        eviction.scored(EVERY["none"], rows)
    flat = dataclasses.replace(EVERY["own"], score=lambda rows: rows.keys[0, :, 0])
    with pytest.raises(ValueError, match="scored"):
        eviction.select(flat, rows, jnp.int32(2))


def test_the_guides_example(capsys):
    text = (ROOT / "docs" / "eviction.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)), {})
    assert capsys.readouterr().out.splitlines() == re.search(r"```text\n(.*?)```", text, re.S)[1].splitlines()  # type: ignore[index]
