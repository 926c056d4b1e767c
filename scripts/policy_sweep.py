"""Compares eviction policies and budgets by perplexity and retrieval, all on one prefill: many in the time of few.

python scripts/policy_sweep.py --lines sweep.jsonl
python scripts/policy_sweep.py --policies "snapkv:window=32 tova" --keep 0.5 --samples 1      # a few minutes

`kvjax eval` computes every prompt again for every policy and compiles the engine for each budget. Here K and V of each
prompt, and the weights that policies watch, are computed once, in plain arrays; policies choose rows of them by the
functions that the engine calls (`kvjax.eviction`), and greedy answers go on from what is left, every head with a number
of rows of its own. tests/test_evicting.py shows that the engine gives the tokens of plain arrays; what bytes and time a
policy takes is the engine's to say. Rows that decode steps write stay here; the engine evicts again after 32.

Question-aware runs evict when the whole prompt is in the cache, question-blind ones before the question is. Perplexity
is that of `kvjax eval`: windows, in each of which rows are evicted once, before the tokens that count.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import kvjax
from kvjax.evaluation import answering, perplexity, report, tasks, variants
from kvjax.eviction import Rows, adakv, gather, pyramid, select
from kvjax.eviction_options import eviction_of
from kvjax.eviction_rule import Eviction
from kvjax.llm import LLM

POLICIES = (
    "truncate window streaming h2o tova snapkv:window=32 snapkv:window=32+adakv snapkv:window=32+pyramid observed "
    "knorm keydiff"
)
KINDS = "needle,multikey,multivalue,middle,variables"
WATCHED = 32
"""Last queries whose weights are summed up for SnapKV."""


class Prefix(struct.PyTreeNode):
    """K and V of the first tokens of one text, and what two cuts of it watch: the first after all its tokens.

    Attributes:
      keys: (L, K, S, H).
      values: (L, K, S, H).
      weights: of "all" queries before the cut, its "last" and its last `WATCHED`: (2, L, K, S) each, a cut a place.
    """

    keys: jax.Array
    values: jax.Array
    weights: dict[str, jax.Array]


class Held(struct.PyTreeNode):
    """What is left of texts: rows of each head at the front.

    Attributes:
      keys: (L, B, K, S, H), S no more than the fullest head needs.
      values: the same.
      counts: (L, B, K) int32.
    """

    keys: jax.Array
    values: jax.Array
    counts: jax.Array


def _probabilities(q: jax.Array, k: jax.Array, scale: float, visible: jax.Array) -> jax.Array:
    """q (T, N, H), k (K, S, H), visible (K or 1, T, S) → (K, G, T, S) float32."""
    K, G = k.shape[0], q.shape[1] // k.shape[0]
    grouped = q.reshape(q.shape[0], K, G, q.shape[2])
    scores = jnp.einsum("tkgh,ksh->kgts", grouped, k, precision="highest") * scale
    return jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)


def _mixed(p: jax.Array, v: jax.Array) -> jax.Array:
    """p (K, G, T, S), v (K, S, H) → (T, N, H)."""
    out = jnp.einsum("kgts,ksh->tkgh", p, v, precision="highest")
    return out.reshape(out.shape[0], -1, out.shape[3])


def _logits(model: Any, params: Any, hidden: jax.Array) -> jax.Array:
    return model.family.unembed(params, model.config, hidden)


class Sweep:
    """The compiled functions of a model; `size` is S, tokens of a prefix, and `room` those that may follow."""

    def __init__(self, llm: LLM, size: int, room: int):
        self.model, self.size, self.room = llm.model, size, room
        specs = llm.model.family.kv_specs(llm.model.config, "float32")
        self.layers, self.heads, self.width = len(specs), specs[0].kv_heads, specs[0].key_dim
        self.prefix = jax.jit(self._prefix)
        self.scored = jax.jit(self._scored)
        self.kept = jax.jit(self._kept, static_argnums=0)
        self.answered = jax.jit(self._answered)

    def _prefix(self, params: Any, ids: jax.Array, cuts: jax.Array) -> tuple[Prefix, jax.Array]:
        """ids (S,), padded behind the first cut; cuts (2,) → what is cached, and hidden (S, D)."""
        S = self.size
        query = jnp.arange(S, dtype=jnp.int32)
        causal = (query[None, :] <= query[:, None])[None]
        before = query[None, :] < cuts[:, None]  # (2, S)
        watched = {
            "all": before,
            "last": query[None, :] == cuts[:, None] - 1,
            str(WATCHED): before & (query[None, :] >= cuts[:, None] - WATCHED),
        }

        def attend(cache: Prefix, layer: Any, q: Any, k: Any, v: Any, scale: float, **features: Any) -> Any:
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
            p = _probabilities(q, k, scale, causal)
            mean = p.mean(axis=1)  # (K, S, S)
            weights = {
                name: cache.weights[name]
                .at[:, layer]
                .set(jnp.einsum("ct,kts->cks", mask.astype(jnp.float32), mean, precision="highest"))
                for name, mask in watched.items()
            }
            cache = Prefix(cache.keys.at[layer].set(k), cache.values.at[layer].set(v), weights)
            return cache, _mixed(p, v)

        rows = jnp.zeros((self.layers, self.heads, S, self.width))
        none = {name: jnp.zeros((2, self.layers, self.heads, S)) for name in watched}
        return self.model.family.forward(params, self.model.config, ids, query, Prefix(rows, rows, none), attend)

    def _kept(
        self, eviction: Eviction, prefix: Prefix, which: jax.Array, cut: jax.Array, budget: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The rows that stay at a cut, of `budget` (L,) rows: keys and values (L, K, S, H), counts (L, K)."""
        policy, S = eviction.policy, self.size
        place = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (self.heads, S))
        watch = None if policy.watch == "none" else prefix.weights[str(policy.watch)][which]

        def of_layer(x: Any) -> Any:
            keys, values, weights, count = x
            seen = None if weights is None else jnp.maximum(cut - place, 1)  # causal: queries from the row on
            lengths = jnp.full((self.heads,), cut, jnp.int32)
            rows = Rows(keys, values, lengths, place, cut, weights, seen)
            if eviction.heads == "adakv":
                count = adakv(policy, rows, count)
            kept, counts = select(policy, rows, count)
            return gather(keys, kept), gather(values, kept), counts

        return jax.lax.map(of_layer, (prefix.keys, prefix.values, watch, budget))

    def _scored(
        self, params: Any, held: tuple[jax.Array, jax.Array, jax.Array], first: jax.Array, ids: jax.Array, targets: Any
    ) -> jax.Array:
        """(T,) log-probabilities of targets (T,) after ids (T,), at positions from `first` on, behind what is left."""
        T, S = ids.shape[0], self.size
        own = jnp.arange(T, dtype=jnp.int32)
        old = jnp.arange(S, dtype=jnp.int32)

        def attend(cache: Any, layer: Any, q: Any, k: Any, v: Any, scale: float, **features: Any) -> Any:
            keys, values, counts = (x[layer] for x in cache)
            k, v = (jnp.concatenate([a, b.swapaxes(0, 1)], axis=1) for a, b in ((keys, k), (values, v)))
            left = jnp.broadcast_to((old[None, :] < counts[:, None])[:, None], (self.heads, T, S))
            causal = jnp.broadcast_to(own[None, :] <= own[:, None], (self.heads, T, T))
            p = _probabilities(q, k, scale, jnp.concatenate([left, causal], axis=2))
            return cache, _mixed(p, v)

        _, hidden = self.model.family.forward(params, self.model.config, ids, first + own, held, attend)
        logits = _logits(self.model, params, hidden)
        return jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)

    def _answered(
        self, params: Any, held: Held, first: jax.Array, given: jax.Array, known: jax.Array, steps: jax.Array
    ) -> jax.Array:
        """Greedy tokens (B, room) of texts behind what is left of them.

        Args:
          params: of the model.
          held: B texts.
          first: (B,) position of the first token that follows.
          given: (B, room) tokens that follow, `known` (B,) of them; then the model's own.
          known: see `given`.
          steps: how many tokens each text gets in all, at most `room`.
        """
        L, B, K, old, H = held.keys.shape
        place, later = jnp.arange(old, dtype=jnp.int32), jnp.arange(self.room, dtype=jnp.int32)
        left = place < held.counts[..., None]  # (L, B, K, S)

        def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            new, tokens = carry
            here = jnp.broadcast_to(later <= i, (B, K, self.room))

            def attend(cache: Any, layer: Any, q: Any, k: Any, v: Any, scale: float, **features: Any) -> Any:
                # What was left is only read: an array that a loop writes to may be copied by each of its steps.
                new_k, new_v = (x.at[layer, :, :, i].set(y) for x, y in zip(cache, (k, v), strict=True))
                grouped = q.reshape(B, K, -1, H) * scale
                dot = functools.partial(jnp.einsum, precision="highest")
                scores = [dot("bkgh,bksh->bkgs", grouped, keys[layer]) for keys in (held.keys, new_k)]
                visible = jnp.concatenate([left[layer], here], axis=2)[:, :, None]
                p = jax.nn.softmax(jnp.where(visible, jnp.concatenate(scores, axis=3), -jnp.inf), axis=3)
                out = dot("bkgs,bksh->bkgh", p[..., :old], held.values[layer])
                out += dot("bkgs,bksh->bkgh", p[..., old:], new_v[layer])
                return (new_k, new_v), out.reshape(B, -1, H)

            now = tokens[:, i]
            new, hidden = self.model.family.forward(params, self.model.config, now, first + i, new, attend)
            found = jnp.argmax(_logits(self.model, params, hidden), axis=1).astype(jnp.int32)
            following = jnp.where(i + 1 < known, tokens.at[:, i + 1].get(mode="clip"), found)
            return new, tokens.at[:, i + 1].set(following, mode="drop")

        none = jnp.zeros((L, B, K, self.room, H))
        _, tokens = jax.lax.fori_loop(0, steps, step, ((none, none), given))
        return tokens


class Text:
    """A prompt with its prefill.

    Attributes:
      prompt: the task's.
      task: what is asked.
      kind: of it.
      prefix: K and V.
      next: the token that the model says after all of the prompt.
    """

    def __init__(self, sweep: Sweep, llm: LLM, task: tasks.Task):
        self.task, self.kind = task, task.kind
        self.prompt = answering.prompt(llm, task)
        n = len(self.prompt.ids)
        ids = np.zeros(sweep.size, np.int32)
        ids[:n] = self.prompt.ids
        cuts = jnp.asarray([n, self.prompt.context], jnp.int32)
        self.prefix, hidden = sweep.prefix(llm.model.params, ids, cuts)
        self.next = int(jnp.argmax(_logits(llm.model, llm.model.params, hidden[n - 1 : n])[0]))


class Window:
    """A window of the text with its prefill up to the tokens that count.

    Attributes:
      before: log-probabilities of its first tokens, which come before anything is evicted.
      rest: the tokens behind the cut.
      first: of the tokens that count.
      prefix: K and V.
    """

    def __init__(self, sweep: Sweep, llm: LLM, ids: Sequence[int], first: int):
        S, model = sweep.size, llm.model
        held = jnp.asarray(ids[:S], jnp.int32)
        self.prefix, hidden = sweep.prefix(model.params, held, jnp.asarray([S, S], jnp.int32))
        logits = _logits(model, model.params, hidden)
        targets = jnp.asarray(ids[1 : S + 1], jnp.int32)
        found = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
        self.before, self.rest, self.first = np.asarray(found, np.float64), list(ids[S:]), first


def nats(sweep: Sweep, llm: LLM, windows: Sequence[Window], eviction: Eviction | None) -> float:
    """Mean −log p of a token of the text, as `kvjax.evaluation.perplexity` counts them."""
    S, found = sweep.size, []
    for window in windows:
        held = left_of(sweep, window.prefix, 0, S, eviction)
        ids, targets = np.zeros(S, np.int32), np.zeros(S, np.int32)
        ids[: len(window.rest)], targets[: len(window.rest) - 1] = window.rest, window.rest[1:]
        after = np.asarray(sweep.scored(llm.model.params, held, jnp.int32(S), ids, targets), np.float64)
        values = np.concatenate([window.before, after[: len(window.rest) - 1]])
        found.append(values[window.first - 1 :])
    return -float(np.concatenate(found).mean())


def left_of(
    sweep: Sweep, prefix: Prefix, which: int, cut: int, eviction: Eviction | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values (L, K, S, H) and counts (L, K) of what is left at a cut."""
    L = sweep.layers
    if eviction is None:
        return prefix.keys, prefix.values, jnp.full((L, sweep.heads), cut, jnp.int32)
    budget = jnp.broadcast_to(eviction.kept(jnp.int32(cut)), (L,))
    if eviction.layers == "pyramid":
        budget = pyramid(eviction.budget, jnp.int32(cut), L, max(eviction.policy.recent, 1))
    same = eviction_key(eviction)
    return sweep.kept(same, prefix, jnp.int32(which), jnp.int32(cut), budget)


def eviction_key(eviction: Eviction) -> Eviction:
    """The same without its budget, which is an argument of the compiled function."""
    return Eviction(eviction.policy, kvjax.eviction.Budget(rows=1), eviction.every, heads=eviction.heads)


def scores(
    sweep: Sweep, llm: LLM, texts: Sequence[Text], eviction: Eviction | None, aware: bool
) -> list[tuple[float, str]]:
    """Score and answer to each task."""
    B, room = len(texts), sweep.room
    held, cuts = [], [text.prompt.compress_at(aware) for text in texts]
    for text, cut in zip(texts, cuts, strict=True):
        held.append(left_of(sweep, text.prefix, int(not aware), cut, eviction))
    # No more rows than the fullest head has, in steps of 64, so that few shapes get compiled.
    used = max(int(counts.max()) for _, _, counts in held)
    used = min(sweep.size, -(-used // 64) * 64)
    keys, values = (jnp.stack([one[i][:, :, :used] for one in held], axis=1) for i in range(2))
    both = Held(keys, values, jnp.stack([counts for _, _, counts in held], axis=1))
    # What follows a cut is the rest of the prompt, or the first token of the answer, which the whole prompt has given.
    rests = [text.prompt.ids[cut:] or (text.next,) for text, cut in zip(texts, cuts, strict=True)]
    given = np.zeros((B, room + 1), np.int32)
    for b, rest in enumerate(rests):
        given[b, : len(rest)] = rest
    known = np.asarray(list(map(len, rests)), np.int32)
    most = max(len(rest) + text.task.room for rest, text in zip(rests, texts, strict=True))
    assert most <= room, f"{most} tokens in a room of {room}"
    first = np.asarray(cuts, np.int32)
    tokens = np.asarray(sweep.answered(llm.model.params, both, first, given, known, jnp.int32(most - 1)))
    found = []
    for b, (text, rest) in enumerate(zip(texts, rests, strict=True)):
        begin = 0 if cuts[b] == len(text.prompt.ids) else len(rest)
        answer = tokens[b, begin : begin + text.task.room].tolist()
        stop = next((i for i, token in enumerate(answer) if token in llm.model.eos), len(answer))
        said = llm.text_bytes(answer[:stop]).decode(errors="replace")
        found.append((tasks.recall(said, text.task.answers), said))
    return found


def measure(arguments: argparse.Namespace, known: dict[tuple[str, float], dict[str, Any]]) -> None:
    """Adds what is missing to `known`, and to the file of `--lines`."""
    todo = [("none", 1.0)]
    todo += [(policy, keep) for keep in map(float, arguments.keep.split(",")) for policy in arguments.policies.split()]
    todo = [one for one in todo if one not in known]
    if not todo:
        return
    llm = kvjax.load(layers="scanned", kv_dtype="float32")
    grid = variants.Grid(tuple(arguments.tasks.split(",")), (arguments.length,), arguments.depths, arguments.samples)
    made = [task for some in grid.make(llm).values() for task in some]
    sweep = Sweep(llm, arguments.length, 96)
    ids = llm.encode(pathlib.Path(arguments.text).read_text(encoding="utf-8")) if arguments.text else ()
    size = 2 * arguments.length
    spans = list(perplexity.windows(len(ids), size, arguments.length))
    windows = [Window(sweep, llm, ids[a:b], first - a) for a, b, first in spans if b - a > arguments.length + 1]
    texts = [Text(sweep, llm, task) for task in made]
    blind = set(map(float, arguments.blind.split(",")))
    print(f"{len(texts)} tasks and {len(windows)} windows computed", flush=True)
    for policy, keep in todo:
        eviction = eviction_of(policy, keep if policy != "none" else None)
        line: dict[str, Any] = {"policy": policy, "keep": keep, "length": arguments.length}
        line["nats"] = nats(sweep, llm, windows, eviction) if windows else None
        for name in ("aware", "blind") if keep in blind else ("aware",):
            answers = scores(sweep, llm, texts, eviction, name == "aware")
            line[name] = [
                {"task": text.kind, "depth": text.task.depth, "score": score, "answer": said}
                for text, (score, said) in zip(texts, answers, strict=True)
            ]
        known[policy, keep] = line
        if arguments.lines is not None:
            with arguments.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(
            policy, keep, line["nats"], [_mean(line[name]) for name in ("aware", "blind") if name in line], flush=True
        )


def _mean(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(answer["score"] for answer in answers)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A line a policy and budget, against the first line, which keeps every row."""
    full = lines[0]
    counted = collections.Counter(answer["task"] for answer in full["aware"])
    kinds = list(counted)
    head = ["policy", "rows", "perplexity", "change", "aware, of full", "blind, of full"]
    head += [f"{kind} ({counted[kind]})" for kind in kinds]
    rows = []
    for line in lines:
        row = [line["policy"], f"{line['keep']:.1%}"]
        row += ["", ""] if line["nats"] is None else [
            f"{math.exp(line['nats']):.2f}", f"{math.exp(line['nats'] - full['nats']) - 1:+.2%}"
        ]  # fmt: skip
        row += [f"{_mean(line[name]) / _mean(full[name]):.0%}" if name in line else "" for name in ("aware", "blind")]
        for kind in kinds:
            both = [_mean([a for a in line[name] if a["task"] == kind]) for name in ("aware", "blind") if name in line]
            row.append(" / ".join(f"{100 * score:.0f}" for score in both))
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * (len(head) - 1)], *rows])


def plot(lines: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Writes a PNG: perplexity and retrieval against the share of the rows that stay, a line a policy."""
    panels = [
        ("perplexity", "nats"),
        ("question-aware retrieval, %", "aware"),
        ("question-blind retrieval, %", "blind"),
    ]
    panels = [(label, name) for label, name in panels if lines[0].get(name) is not None]
    figure = report.figure_class()(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for axis, (label, name) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, policy in enumerate(dict.fromkeys(line["policy"] for line in lines[1:])):
            some = [line for line in lines if line["policy"] in (policy, "none") and line.get(name) is not None]
            some.sort(key=lambda line: line["keep"])
            values = [math.exp(line[name]) if name == "nats" else 100 * _mean(line[name]) for line in some]
            axis.plot(
                [100 * line["keep"] for line in some], values, ".-" if number < 10 else ".--", label=policy, alpha=0.8
            )
        axis.set(xlabel="rows of each head that stay, %", ylabel=label)
        axis.grid(alpha=0.3)
        if name == "nats":  # what forgets the beginning is tens of times off, and would flatten all the others
            axis.set_yscale("log")
    axis.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=POLICIES, help="names as --evict of kvjax generate, with blanks")
    parser.add_argument("--keep", default="0.5,0.25,0.125", help="shares of the rows that stay")
    parser.add_argument("--blind", default="1,0.5", help="of those, the shares for which it is asked blindly, too")
    parser.add_argument("--tasks", default=KINDS)
    parser.add_argument("--length", type=int, default=512, help="tokens of a task, and of a window before its cut")
    parser.add_argument("--depths", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument(
        "--text", help="file for the perplexity, in windows of twice the length; none for no perplexity"
    )
    parser.add_argument("--lines", type=pathlib.Path, help="file that gets a JSON line a variant, and is gone on with")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG to draw quality against the share in")
    arguments = parser.parse_args()
    known: dict[tuple[str, float], dict[str, Any]] = {}
    if arguments.lines is not None and arguments.lines.exists():
        for line in map(json.loads, arguments.lines.read_text(encoding="utf-8").splitlines()):
            known[line["policy"], line["keep"]] = line
    measure(arguments, known)
    print(table(list(known.values())))
    if arguments.plot is not None:
        plot(list(known.values()), arguments.plot)


if __name__ == "__main__":
    main()
