"""Pages dealt over chips: the map, and attention over the parts, merged, against attention over the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import LAYOUT_OF, STORAGES, Case, attend, build, in_bytes, jitted

from kvjax.pallas_kernels import AttentionSpec, Lanes
from kvjax.pallas_kernels.dealt import Deal
from kvjax.pallas_kernels.merge import merge


def deals(parts):
    return [Deal(jnp.int32(part), parts) for part in range(parts)]


@given(parts=st.integers(1, 9), rows=st.integers(1, 8), position=st.integers(0, 400))
@settings(deadline=None, max_examples=60)
def test_every_row_is_dealt_once_and_in_order(parts, rows, position):
    owners = [deal.part for deal in deals(parts) if bool(deal.owns(jnp.int32(position), rows))]
    before = [int(deal.rows_before(jnp.int32(position), rows)) for deal in deals(parts)]
    assert len(owners) == 1 and sum(before) == position
    own = int(owners[0])
    assert int(deals(parts)[own].position(jnp.int32(before[own]), rows)) == position
    page, place = divmod(position // rows, parts)
    assert own == (place if page % 2 == 0 else parts - 1 - place)


def test_causal_work_is_even():
    """After an even number of pages the positions of every part add up to the same."""
    rows, parts = 4, 8
    totals = {int(deal.position(jnp.arange(6 * rows), rows).sum()) for deal in deals(parts)}
    assert len(totals) == 1


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "decode": (Case((1, 5, 16, 33, 64, 100), (1,) * 6, dim=64, value_dim=64), {}),
    "chunks": (Case((9, 40, 70, 7, 100), (9, 17, 1, 1, 60), dim=64, value_dim=64), {}),
    "window": (Case((1, 40, 70, 7, 100), (1, 17, 1, 1, 60), dim=64, value_dim=64), {"window": 11}),
    "window wider than a page": (Case((3, 40, 70, 100), (3, 17, 1, 60), dim=64, value_dim=64), {"window": 37}),
    "soft cap": (Case((30, 61), (1, 20), dim=64, value_dim=64), {"soft_cap": 2.0}),
    "sink rows": (Case((30, 61, 100), (1, 20, 1), dim=16, value_dim=16), {"window": 9, "sink_rows": 5}),
    "ALiBi": (Case((30, 61, 100), (1, 20, 1), dim=16, value_dim=16), {"slopes": True}),
    "MLA": (Case((30, 61, 100), (1, 20, 1), kv_heads=1, dim=24, value_dim=16), {"latent": 16}),
}


REFUSED = ("sink rows", "ALiBi")  # by the TPU's kernels, see below
RUNS = [(name, backend) for name in CASES for backend in ("reference", "xla")] + [
    pytest.param(name, "tpu_interpret", marks=pytest.mark.slow) for name in CASES if name not in REFUSED
]


def dealt(table: np.ndarray, deal: Deal, nobody: int) -> tuple[np.ndarray, np.ndarray]:
    """This part's pages of every slot, and the table that all parts share, of their numbers b·M' + j."""
    (B, M), parts = table.shape, deal.parts
    pages = -(-M // parts)
    padded = np.pad(table, ((0, 0), (0, pages * parts - M)), constant_values=nobody)
    places = [j * parts + (int(deal.part) if j % 2 == 0 else parts - 1 - int(deal.part)) for j in range(pages)]
    mine = padded[:, places].reshape(-1)
    return mine, np.arange(mine.size, dtype=np.int32).reshape(B, pages)


@pytest.mark.parametrize("parts", (2, 4))
@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_parts_merged_are_the_whole(name, backend, parts):
    case, features = CASES[name]
    features = dict(features)
    slopes = {"slopes": jnp.linspace(0.1, 0.5, case.heads)} if features.pop("slopes", False) else {}
    q, k, v, table, lengths, starts = build(case)
    spec = AttentionSpec(case.dim**-0.5, **features)
    how = {"max_query": max(case.queries), **slopes}
    whole = attend((q, k, v, table, lengths, starts), spec, **how, backend="xla")

    filled = [np.concatenate([x, np.full((1, *x.shape[1:]), np.nan, x.dtype)]) for x in (k, v)]
    outs, lses = [], []
    for deal in deals(parts):
        mine, own = dealt(table, deal, k.shape[0])
        local = (q, filled[0][mine], filled[1][mine], own, lengths, starts)
        out, lse = attend(local, spec, **how, backend=backend, deal=deal)
        assert not np.isnan(np.asarray(out)).any()
        outs.append(out)
        lses.append(lse)
    out, lse = merge(jnp.stack(outs), jnp.stack(lses))
    used = starts[-1]
    np.testing.assert_allclose(out[:used], whole[0][:used], atol=2e-5)
    np.testing.assert_allclose(lse[:used], whole[1][:used], atol=1e-5)
    assert not np.asarray(out[used:]).any() and np.isneginf(np.asarray(lse[used:])).all()


PACKED = [(name, backend) for name in ("int4", "kivi4") for backend in ("reference", "xla")] + [
    pytest.param(name, "tpu_interpret", marks=pytest.mark.slow) for name in ("int8 and int4", "kivi4")
]


@pytest.mark.parametrize(("storage", "backend"), PACKED)
def test_parts_of_codes_merged_are_the_whole(storage, backend):
    """As they are read where the newest rows are elsewhere: tokens stand further back, so that some see no code yet."""
    rows, codes, layout = (128 if backend == "tpu_interpret" else 32), STORAGES[storage], LAYOUT_OF[backend]
    case = Case((300, 60, 150, 257), (1, 50, 1, 70), 4, 2, 64, 64, rows=rows)
    (q, k, v, table, lengths, starts), scales, _ = in_bytes(case, codes, layout, False)
    lanes = Lanes(2, 64, 64) if layout == "joined" else None
    how = {"spec": AttentionSpec(0.125, codes=codes, layout=layout, lanes=lanes), "max_query": 70, "backend": backend}
    fewer = jnp.asarray(np.maximum(np.asarray(lengths) - 45, 0))
    given = fewer, jnp.asarray(starts)
    whole = jitted(q, k, v, jnp.asarray(table), *given, scales=scales, **how)
    outs, lses = [], []
    for deal in deals(2):
        mine, own = dealt(np.asarray(table), deal, 0)
        held = jax.tree.map(lambda x, mine=mine: x[mine], (k, v, scales))
        out, lse = jitted(q, *held[:2], jnp.asarray(own), *given, scales=held[2], deal=deal, **how)
        outs.append(out)
        lses.append(lse)
    out, lse = merge(jnp.stack(outs), jnp.stack(lses))
    tolerance = 1e-2 if backend == "tpu_interpret" else 2e-5
    np.testing.assert_allclose(out, whole[0], atol=tolerance)
    np.testing.assert_allclose(lse, whole[1], atol=tolerance)
    # The second sequence has 15 rows for its 50 tokens, of which the first 35 see none.
    assert np.isneginf(np.asarray(lse[1:36])).all() and np.isfinite(np.asarray(lse[36:51])).all()


def test_what_dealt_pages_cannot_have_is_refused():
    case = Case((30, 61), (1, 20))
    arrays, deal = build(case), Deal(jnp.int32(0), 2)
    with pytest.raises(NotImplementedError, match="ALiBi"):
        attend(arrays, AttentionSpec(1.0), 20, "tpu_interpret", deal=deal, slopes=jnp.ones(4))
    with pytest.raises(NotImplementedError, match="sink rows"):
        attend(arrays, AttentionSpec(1.0, 8, sink_rows=2), 20, "tpu_interpret", deal=deal)
    with pytest.raises(NotImplementedError, match="join what all chips"):
        attend(arrays, AttentionSpec(1.0), 20, "xla", deal=deal, sinks=jnp.ones(4))


def test_merging_nothing_with_something():
    out = jnp.stack([jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))])
    lse = jnp.array([-jnp.inf, 3.0]).reshape(2, 1, 1)
    merged, total = jax.jit(merge)(out, lse)
    assert merged.tolist() == [[[1.0, 1.0]]] and total.tolist() == [[3.0]]
    merged, total = merge(out * jnp.nan, jnp.full((2, 1, 1), -jnp.inf), jnp.array([1.0]))
    assert merged.tolist() == [[[0.0, 0.0]]] and np.isneginf(total).all()
    assert np.isfinite(merge(out, jnp.array([1e4, 1e4 + 200]).reshape(2, 1, 1))[1]).all()
    poisoned = jnp.stack([jnp.full((1, 1, 2), jnp.nan), jnp.ones((1, 1, 2))])
    assert merge(poisoned, lse)[0].tolist() == [[[1.0, 1.0]]]
