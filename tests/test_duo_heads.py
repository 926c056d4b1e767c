"""scripts/duo_heads.py: which heads look far back."""

import importlib.util
import pathlib

import jax.numpy as jnp
import numpy as np
from engines import tiny

from kvjax.eviction.duo import retrieval_heads

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "duo_heads.py"


def script():
    spec = importlib.util.spec_from_file_location("duo_heads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_heads_move_by_what_they_no_longer_see():
    """Nothing where all is sink or recent; and what is behind the answer, or padding, counts for nothing."""
    model, duo_heads = tiny("tiny_llama", stacked=True), script()
    ids = np.asarray([(7 * i * i) % 60 + 1 for i in range(40)], np.int32)

    def moved(ids, sinks, recent):
        given = jnp.asarray(ids), jnp.int32(28), jnp.int32(32)
        return np.asarray(duo_heads.heads_moved(model, sinks, recent, model.params, *given))

    assert moved(ids, 2, 40).max() == moved(ids, 32, 1).max() == 0
    some = moved(ids, 2, 5)
    assert some.shape == (3, 2) and some.min() > 0.01
    padded = np.where(np.arange(40) < 32, ids, 9)
    np.testing.assert_allclose(moved(padded, 2, 5), some, rtol=1e-5)
    nearly = moved(ids, 2, 20)
    assert nearly.mean() < some.mean()


def test_ranks_are_read_as_heads(tmp_path):
    duo_heads, path = script(), tmp_path / "heads.tsv"
    ranks = duo_heads.ranks(np.asarray([[0.3, 0.1], [0.9, 0.2]]))
    assert ranks.tolist() == [[0.5, 0.0], [0.75, 0.25]]
    np.savetxt(path, ranks, fmt="%.4f", delimiter="\t")
    assert retrieval_heads(path) == ((True, False), (True, False))
    assert retrieval_heads(path, 0.75) == ((False, False), (True, False))
