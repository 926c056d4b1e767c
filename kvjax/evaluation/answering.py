"""Tasks to prompts, and prompts to scores, many at once through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.errors import RequestError
from kvjax.evaluation.tasks import Task, recall
from kvjax.job import Report
from kvjax.llm import LLM
from kvjax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A task as the model gets it.

    Attributes:
      ids: token ids.
      context: how many of them there are before the question.
    """

    ids: tuple[int, ...]
    context: int

    def compress_at(self, aware: bool) -> int:
        """Tokens that are in the cache when it is compressed: all (question-aware), or those before the question."""
        return len(self.ids) if aware else self.context


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said to a task.

    Attributes:
      text: the answer, without the beginning that it was given.
      score: 0 to 1, the share of the right answers that it contains.
      tokens: of the prompt and the answer.
      evicted_at: of the prompt, after which rows are evicted if they are.
    """

    text: str
    score: float
    tokens: int
    evicted_at: int


def prompt(llm: LLM, task: Task, *, chat: bool = False) -> Prompt:
    """The prompt of a task; context and the rest are encoded apart, so that a token never belongs to both.

    Args:
      llm: the model.
      task: the task.
      chat: whether the task is a user's message in the model's chat template, whose answer has begun, or plain text.
    """
    if not chat:
        head, tail = task.context, f"\n\nQuestion: {task.question}\nAnswer: {task.start}"
    else:
        question = f"\n\n{task.question}"
        whole = llm.tokenizer.apply_chat_template([{"role": "user", "content": task.context + question}])
        split = whole.rindex(question)
        head, tail = whole[:split], whole[split:] + task.start
    ids = llm.tokenizer.encode(head, add_special_tokens=not chat)
    return Prompt((*ids, *llm.tokenizer.encode(tail, add_special_tokens=False)), len(ids))


def answers(
    llm: LLM,
    tasks: Sequence[Task],
    *,
    chat: bool = False,
    aware: bool = True,
    on_report: Callable[[Report], None] | None = None,
) -> list[Answer]:
    """Greedy answers to tasks, generated as one batch job.

    Args:
      llm: the model.
      tasks: what is asked.
      chat: as `prompt` has it.
      aware: whether a model that evicts rows does so when it has seen the question, or before.
      on_report: as `LLM.generate` has it.

    Raises:
      RequestError: a prompt and its answer exceed the context, or the memory for K and V.
    """
    asked = [prompt(llm, task, chat=chat) for task in tasks]
    cuts = [one.compress_at(aware) for one in asked]
    params = [SamplingParams(max_new_tokens=task.room, evict_at=cut) for task, cut in zip(tasks, cuts, strict=True)]
    found = []
    answered = llm.generate([one.ids for one in asked], params, on_report=on_report) if asked else []
    for task, cut, done in zip(tasks, cuts, answered, strict=True):
        if done.finish_reason == "too_long":
            raise RequestError(f"kv_bytes is too small for a {task.kind} task: raise it, or give smaller lengths.")
        tokens = len(done.prompt_tokens) + len(done.tokens)
        found.append(Answer(done.text, recall(done.text, task.answers), tokens, cut))
    return found
