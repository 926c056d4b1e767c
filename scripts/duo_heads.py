"""Finds out which kv heads of a model look far back, and writes the file that `--evict duo:heads=FILE` reads.

python scripts/duo_heads.py --out heads.tsv                       # the default model, some minutes on a CPU
kvjax eval --tasks needle --evict duo:heads=heads.tsv,sinks=16,recent=64,threshold=0.5

DuoAttention's authors train a gate for each head (2410.10819, section 2.2). Here nothing is trained: the model reads
tasks with their right answers, and each kv head is asked how far its output at the answers moves if it sees no more
than the first `sinks` and the newest `recent` rows, ‖o − o'‖ / ‖o‖ in the mean of its query heads and the answers'
tokens. The file has the heads' ranks by that, from 0 to 1, so that `threshold=0.75` lets a quarter keep every row.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.errors import UserError
from kvjax.evaluation import answering, variants
from kvjax.llm import LLM

KINDS = ("needle", "multikey", "variables")


def heads_moved(
    model: Any, sinks: int, recent: int, params: Any, ids: jax.Array, first: jax.Array, last: jax.Array
) -> jax.Array:
    """(L, K) float32: how far outputs of heads that stream move on the queries first … last − 1 of ids (S,), padded."""
    S, specs = ids.shape[0], model.family.kv_specs(model.config, "float32")
    place = jnp.arange(S, dtype=jnp.int32)
    query, key = place[:, None], place[None, :]
    causal = key <= query
    streamed = causal & ((key < sinks) | (key > query - recent))
    asked = (place >= first) & (place < last)

    def attend(moved: jax.Array, layer: Any, q: Any, k: Any, v: Any, scale: float, **features: Any) -> Any:
        K = k.shape[1]
        grouped = q.reshape(S, K, -1, q.shape[-1])
        scores = jnp.einsum("tkgh,skh->kgts", grouped, k, precision="highest") * scale

        def output(visible: jax.Array) -> jax.Array:
            p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            return jnp.einsum("kgts,skh->tkgh", p, v, precision="highest")

        whole = output(causal)
        change = jnp.linalg.norm(whole - output(streamed), axis=-1) / jnp.linalg.norm(whole, axis=-1)
        mean = jnp.sum(jnp.where(asked[:, None, None], change, 0), axis=0).mean(axis=1) / asked.sum(dtype=jnp.float32)
        return moved.at[layer].set(mean), whole.reshape(S, q.shape[1], -1)

    none = jnp.zeros((len(specs), specs[0].kv_heads))
    return model.family.forward(params, model.config, ids, place, none, attend)[0]


def measured(llm: LLM, length: int, samples: int, sinks: int, recent: int) -> np.ndarray:
    """(L, K) float64: the mean of all tasks."""
    run = jax.jit(functools.partial(heads_moved, llm.model, sinks, recent))
    # Other texts than those that `kvjax eval` makes by default.
    grid = variants.Grid(KINDS, (length,), depths=3, samples=samples, seed=1)
    found = []
    for task in (task for some in grid.make(llm).values() for task in some):
        prompt = answering.prompt(llm, task).ids
        answer = llm.tokenizer.encode(" " + ", ".join(task.answers), add_special_tokens=False)
        ids = np.zeros(length + 64, np.int32)
        both = [*prompt, *answer]
        ids[: len(both)] = both
        # The token before an answer's is the one that looks for it.
        found.append(run(llm.model.params, jnp.asarray(ids), jnp.int32(len(prompt) - 1), jnp.int32(len(both) - 1)))
    return np.asarray(jnp.stack(found), np.float64).mean(axis=0)


def ranks(moved: np.ndarray) -> np.ndarray:
    """The share of the heads that move less than each."""
    order = np.argsort(np.argsort(moved, axis=None, kind="stable"), kind="stable")
    return order.reshape(moved.shape) / moved.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as for kvjax.load; the embedded one without it")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the file, L lines of K numbers")
    parser.add_argument("--length", type=int, default=512, help="tokens of a task")
    parser.add_argument("--samples", type=int, default=2, help="tasks of each kind and depth")
    parser.add_argument("--sinks", type=int, default=16)
    parser.add_argument("--recent", type=int, default=64)
    arguments = parser.parse_args()
    try:
        llm = kvjax.load(arguments.model) if arguments.model else kvjax.load(layers="scanned")
        moved = measured(llm, arguments.length, arguments.samples, arguments.sinks, arguments.recent)
    except UserError as error:
        raise SystemExit(str(error)) from error
    np.savetxt(arguments.out, ranks(moved), fmt="%.4f", delimiter="\t")
    far = np.sort(moved, axis=None)
    print(f"{moved.size} heads; moved by {far[0]:.2f} (least), {np.median(far):.2f} (half), {far[-1]:.2f} (most)")


if __name__ == "__main__":
    main()
