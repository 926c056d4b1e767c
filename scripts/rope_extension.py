"""Compares ways to scale RoPE beyond the trained length on one long text: perplexity by position, and hidden numbers.

python scripts/rope_extension.py --length 12288 --lines rope.jsonl
python scripts/rope_extension.py --rope default,yarn:4 --length 4096      # quick, within the trained length

The text is Python's own reference manual (`pydoc_data.topics`, the same on every machine with the same Python). Secret
numbers stand in it at some depths; behind it, each is asked for, and the right answer follows. All of it is scored in
one pass through the paged cache: what a token's perplexity is where, and how likely the digits of the numbers are. A
number counts as found if each of its tokens has more than half of the probability, so that greedy decoding gives it.

A scaling that is in the file of `--lines` already is not measured again, at the same length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import pydoc_data.topics
import sys
import time
from typing import Any

import numpy as np

import kvjax
from kvjax.evaluation import filler, scoring
from kvjax.llm import LLM

DEPTHS = (0.1, 0.5, 0.9)


def text_of(llm: LLM, length: int) -> tuple[list[int], int, list[tuple[float, range]]]:
    """Token ids; how many of them there are before the questions; and where the answer to each depth's question is."""
    places, tail, asked = filler.WORDS[: len(DEPTHS)], [], []
    numbers = [filler.Dice("rope", place).digits(7) for place in places]
    for place in places:
        start = f"\n\nQuestion: What is the secret number of the {place}?\nAnswer: The secret number of the {place} is"
        asked.append(_plain(llm, start))
    answers = [_plain(llm, f" {number}") for number in numbers]
    facts = [_plain(llm, f" The secret number of the {p} is {n}. ") for p, n in zip(places, numbers, strict=True)]
    room = length - sum(map(len, (*asked, *answers, *facts)))
    topics = pydoc_data.topics.topics
    prose = _plain(llm, "\n\n".join(topics[name] for name in sorted(topics)))
    if not 0 < room <= len(prose):
        raise SystemExit(f"The length is {length}: give one up to {len(prose)}, and more than the questions take.")
    ids: list[int] = []
    done = 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        ids += prose[done : (done := int(depth * room))] + fact
    ids += prose[done:room]
    for question, answer in zip(asked, answers, strict=True):
        tail += question + answer
    before, spans, at = len(ids), [], len(ids)
    for depth, question, answer in zip(DEPTHS, asked, answers, strict=True):
        spans.append((depth, range(at + len(question), at + len(question) + len(answer))))
        at += len(question) + len(answer)
    return ids + tail, before, spans


def _plain(llm: LLM, text: str) -> list[int]:
    return list(llm.tokenizer.encode(text, add_special_tokens=False))


def measured(rope: str, length: int, step: int) -> dict[str, Any]:
    """One scaling, as JSON: nats a token by position, in parts of `step` tokens, and the answers by depth."""
    # Scaled, the model serves the trained length times the factor; else no more than that, unless told to.
    llm = kvjax.load(rope=rope, layers="scanned", context=length if rope == "default" else None)
    ids, before, spans = text_of(llm, length)
    began, cpu_began = time.perf_counter(), time.process_time()
    found = scoring.logprobs(llm.model, [ids]).logprobs[0].astype(np.float64)
    took = time.perf_counter() - began, time.process_time() - cpu_began
    edges = [*range(0, before, step), before]
    return {
        "rope": rope,
        "length": length,
        "step": step,
        "python": sys.version.split()[0],
        "context": llm.context,
        # The log-probability of token i is entry i − 1: the first token has none.
        "nats": [-float(found[max(a - 1, 0) : b - 1].mean()) for a, b in itertools.pairwise(edges)],
        "edges": edges,
        "answers": {str(depth): [float(found[i - 1]) for i in span] for depth, span in spans},
        "seconds": took[0],
        "cpu_seconds": took[1],
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A line a scaling: perplexity by position, mean probability of a token of each number, and how many are found."""
    edges = lines[0]["edges"]
    spans = [f"{a:,}–{b:,}" for a, b in itertools.pairwise(edges)]
    head = ["RoPE", "context", *spans, *(f"number at {depth:.0%}" for depth in DEPTHS), "found", "CPU s"]
    rows = []
    for line in lines:
        answers = list(line["answers"].values())
        likely = [f"{math.exp(sum(answer) / len(answer)):.2f}" for answer in answers]
        sure = sum(min(answer) > math.log(0.5) for answer in answers)
        perplexities = [f"{math.exp(nats):.2f}" for nats in line["nats"]]
        counted = f"{sure} of {len(answers)}"
        rows.append(
            [line["rope"], f"{line['context']:,}", *perplexities, *likely, counted, f"{line['cpu_seconds']:.0f}"]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * (len(head) - 1)], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rope", default="default,yarn:4,ntk:4,dynamic:4,linear:4")
    parser.add_argument("--length", type=int, default=12288)
    parser.add_argument("--step", type=int, default=2048, help="tokens of a column of the table")
    parser.add_argument("--lines", type=pathlib.Path, help="file that gets a JSON line a scaling when it is measured")
    arguments = parser.parse_args()
    known: dict[tuple[str, int, int], dict[str, Any]] = {}
    if arguments.lines is not None and arguments.lines.exists():
        for line in map(json.loads, arguments.lines.read_text().splitlines()):
            known[line["rope"], line["length"], line["step"]] = line
    chosen = []
    for rope in arguments.rope.split(","):
        key = rope, arguments.length, arguments.step
        if key not in known:
            known[key] = measured(*key)
            if arguments.lines is not None:
                with arguments.lines.open("a") as file:
                    file.write(json.dumps(known[key]) + "\n")
        chosen.append(known[key])
    print(table(chosen))


if __name__ == "__main__":
    main()
