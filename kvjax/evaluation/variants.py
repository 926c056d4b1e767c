"""Ways to keep fewer bytes of K and V, measured alike: perplexity of a text, answers to tasks, bytes a token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from kvjax import plans, storages
from kvjax.errors import RequestError, UserError
from kvjax.evaluation import answering, scoring, tasks
from kvjax.evaluation.perplexity import Perplexity, perplexity
from kvjax.evaluation.tasks import Task
from kvjax.eviction_options import eviction_of
from kvjax.eviction_rule import Eviction
from kvjax.job import Report
from kvjax.llm import LLM

Place = tuple[str, int, float | None]
"""(kind, length, depth)."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to keep K and V.

    Attributes:
      kv: how rows are stored (`kvjax.storages`).
      policy: which rows are evicted, as `kvjax.load(evict=…)` has it; "none" keeps all.
      budget: the share of the rows that is kept; 1.0 for a policy that says itself what is kept or read.
    """

    kv: str
    policy: str = "none"
    budget: float = 1.0

    @property
    def name(self) -> str:
        return self.kv if self.policy == "none" else f"{self.kv} {self.policy} {self.budget:g}"

    def check(self) -> None:
        """Raises RequestError for what there is not."""
        storages.resolve(self.kv, "float32")
        if self.policy == "none" and self.budget != 1.0:
            raise RequestError(
                f"Nothing is evicted, and the budget is {self.budget:g}: give a policy, or a budget of 1."
            )
        self.eviction()

    def eviction(self) -> Eviction | None:
        """What is evicted. Raises ModelError."""
        if self.policy == "none":
            return None
        return eviction_of(self.policy, None if self.budget == 1.0 else float(self.budget))

    def of(self, llm: LLM) -> LLM:
        """The model with K and V kept so; parameters are shared."""
        self.check()
        storage = storages.resolve(self.kv, llm.model.dtype)
        model = dataclasses.replace(llm.model, storage=storage, eviction=self.eviction())
        # Texts and tasks begin alike by chance only; what the index kept of those that ended would count as in use.
        options = dataclasses.replace(llm.options, share_prefixes=False)
        return LLM(model, llm.tokenizer, options, llm.description)


def compared(kvs: Sequence[str], policies: Sequence[str], shares: Sequence[float]) -> list[Variant]:
    """Every storage alone, then with every policy: with each share of the rows, or once, if it needs none."""

    def of_policy(kv: str, policy: str) -> list[Variant]:
        own = Variant(kv, policy)
        try:
            own.eviction()
        except UserError:  # most need one; what else is wrong each of them says again
            return [Variant(kv, policy, share) for share in shares]
        return [own]

    with_policies = [variant for kv in kvs for policy in policies for variant in of_policy(kv, policy)]
    return [*map(Variant, kvs), *with_policies]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kind of task at one length, and one depth where it has one.

    Attributes:
      kind: of the tasks.
      length: tokens of their prompts, at most.
      depth: of the fact in the context; None where depths are drawn.
      score: 0 to 1, mean of `tasks.recall`.
      samples: tasks.
      texts: the answers.
      bytes_per_token: of K and V: the pages that prompt and answer fill, as the cache allocates them, over their
        tokens; where rows are evicted, what is left of the prompt, and the answer.
    """

    kind: str
    length: int
    depth: float | None
    score: float
    samples: int
    texts: tuple[str, ...]
    bytes_per_token: float


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a job of tasks took.

    Attributes:
      peak_pages: as `kvjax.job.Report` has them.
      peak_bytes: also.
      computed: tokens passed through the model in `seconds`, prompts included.
      generated: tokens of the answers that ended in them.
      seconds: from the first report on, which the job's programs are compiled before; 0.0 if there was one only.
      cpu_seconds: of this process in them, on all cores: other processes disturb them less.
    """

    peak_pages: int
    peak_bytes: int
    computed: int
    generated: int
    seconds: float
    cpu_seconds: float


class _Meter:
    """Reads a Usage off a job's reports."""

    def __init__(self) -> None:
        self._reports: list[tuple[Report, float, float]] = []

    def __call__(self, report: Report) -> None:
        self._reports.append((report, time.perf_counter(), time.process_time()))

    def usage(self) -> Usage:
        (first, began, cpu_began), (last, ended, cpu_ended) = self._reports[0], self._reports[-1]
        generated = sum(len(output.tokens) for report, *_ in self._reports[1:] for output in report.finished)
        took = ended - began, cpu_ended - cpu_began
        return Usage(last.peak_pages, last.peak_bytes, last.computed - first.computed, generated, *took)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a variant.

    Attributes:
      variant: which.
      perplexity: of the text, or None.
      cells: of the tasks.
      row_bytes: bytes that the cache allocates for K and V of a token in all layers, scales included.
      usage: of the tasks' job, or None.
    """

    variant: Variant
    perplexity: Perplexity | None
    cells: tuple[Cell, ...]
    row_bytes: float
    usage: Usage | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the pages in use over the tokens in them: of the text if there is one, else of the tasks."""
        if self.perplexity is not None:
            return self.perplexity.scores.bytes_per_token
        return sum(c.bytes_per_token * c.samples for c in self.cells) / sum(c.samples for c in self.cells)

    def score(self, kind: str | None = None, length: int | None = None) -> float | None:
        """Mean score of the tasks, of all kinds and lengths or of one; None without tasks."""
        chosen = [c for c in self.cells if kind in (None, c.kind) and length in (None, c.length)]
        total = sum(cell.samples for cell in chosen)
        return sum(cell.score * cell.samples for cell in chosen) / total if total else None


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which tasks to answer.

    Attributes:
      kinds: of `tasks.KINDS`.
      lengths: tokens of a prompt.
      depths: how many depths of the `tasks.PLACED` kinds, from the beginning to the end; one is the middle.
      samples: tasks of each kind and length, and of each depth where there is one.
      seed: of all texts, names and numbers.
      chat: whether a task is a message in the chat template, or plain text.
      aware: whether rows are evicted when the question is in the cache, or before the question is.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int = 5
    samples: int = 3
    seed: int = 0
    chat: bool = False
    aware: bool = True

    @property
    def depth_values(self) -> tuple[float, ...]:
        return (0.5,) if self.depths == 1 else tuple(i / (self.depths - 1) for i in range(self.depths))

    def places(self) -> Iterable[Place]:
        """Of every cell."""
        for kind in self.kinds:
            for length in self.lengths:
                for depth in self.depth_values if kind in tasks.PLACED else (None,):
                    yield kind, length, depth

    def make(self, llm: LLM) -> dict[Place, list[Task]]:
        """The tasks of every cell, sized in tokens of the model's prompts. Raises RequestError, also for the sizes."""
        for name, value in (
            ("depths", self.depths),
            ("samples", self.samples),
            *(("lengths", n) for n in self.lengths),
        ):
            if value < 1:
                raise RequestError(f"{name} has {value}: give at least 1.")

        room = max((tasks.room(kind) for kind in self.kinds), default=0)
        if self.lengths and max(self.lengths) + room > llm.context:
            longest = f"Tasks of {max(self.lengths)} tokens, with {room} for the answer,"
            raise RequestError(
                f"{longest} exceed the context of {llm.context}: give smaller lengths, or a larger context."
            )

        def count(task: Task) -> int:
            return len(answering.prompt(llm, task, chat=self.chat).ids)

        return {
            (kind, length, depth): [
                tasks.make(kind, length, count, depth=depth, sample=i, seed=self.seed) for i in range(self.samples)
            ]
            for kind, length, depth in self.places()
        }


def measure(
    llm: LLM,
    variants: Sequence[Variant],
    *,
    text: Sequence[int] = (),
    window: int = 1024,
    stride: int = 512,
    grid: Grid | None = None,
    on_start: Callable[[str], None] = lambda what: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Measures variants of a model's cache, all on the same text and the same tasks.

    Args:
      llm: the model.
      variants: what to compare.
      text: token ids of the text whose perplexity is measured; none for no perplexity.
      window: tokens of a window, as `perplexity` has it.
      stride: between windows.
      grid: of tasks; None for none.
      on_start: told what is about to be measured.
      on_result: given each result as soon as it is there.

    Raises:
      RequestError: a variant, text or grid that there cannot be; before anything has run, where it can be known.
    """
    if not len(text) and (grid is None or not grid.kinds or not grid.lengths):
        raise RequestError("There is nothing to measure: give a text, or tasks with lengths.")
    if not variants:
        raise RequestError("There are no variants to measure: give at least one.")
    for variant in variants:
        variant.check()
    on_start("making tasks")
    made = grid.make(llm) if grid is not None else {}
    results = []
    for variant in variants:
        own = variant.of(llm)
        found = None
        if len(text):
            on_start(f"{variant.name}: perplexity")
            # Each window's tokens that count are predicted from what is left of those that do not.
            at = None if own.model.eviction is None else max(1, min(window, len(text)) - stride)
            found = perplexity(own.model, text, own.options, window=window, stride=stride, compress_at=at)
        if made:
            on_start(f"{variant.name}: tasks")
        row_bytes = scoring.bytes_per_row(own.model, own.options)
        meter = _Meter()
        cells = tuple(_cells(own, made, grid, row_bytes, meter))
        results.append(Result(variant, found, cells, row_bytes, meter.usage() if made else None))
        on_result(results[-1])
    return results


def _cells(
    llm: LLM,
    made: dict[Place, list[Task]],
    grid: Grid | None,
    row_bytes: float,
    on_report: Callable[[Report], None],
) -> Iterable[Cell]:
    """All tasks of all cells go through the engine as one job."""
    if grid is None:
        return
    everything = [task for some in made.values() for task in some]
    answered = iter(answering.answers(llm, everything, chat=grid.chat, aware=grid.aware, on_report=on_report))
    rows, eviction = plans.rows_of(llm.model, llm.options), llm.model.eviction
    for (kind, length, depth), some in made.items():
        mine = [next(answered) for _ in some]
        held = sum(_held(eviction, answer, rows) for answer in mine)
        yield Cell(
            kind,
            length,
            depth,
            sum(answer.score for answer in mine) / len(mine),
            len(mine),
            tuple(answer.text for answer in mine),
            row_bytes * held / sum(answer.tokens for answer in mine),
        )


def _held(eviction: Eviction | None, answer: answering.Answer, rows: int) -> float:
    """Rows in the pages, of so many each, that a head has at the end; in the mean, where some keep every row."""
    every = -(-answer.tokens // rows) * rows
    if eviction is None:
        return every
    left = answer.tokens - answer.evicted_at + int(eviction.kept(jnp.int32(answer.evicted_at)))
    whole = float(np.mean(eviction.policy.whole)) if eviction.policy.whole else 0.0
    return whole * every + (1 - whole) * -(-left // rows) * rows
