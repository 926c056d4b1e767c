"""Questions on long made-up texts, in the manner of RULER (2404.06654): deterministic, and as long as asked for.

    needle      one number hidden in other text, at a given depth (needle in a haystack)
    multikey    the same among three other numbers of the same kind
    multivalue  four numbers of one thing, all of them asked for
    variables   x = 12345, y = x, z = y, hidden apart: which are 12345? (variable tracking)
    words       a list of words: which three are the most common? (aggregation)
    middle      many short documents on people, one of whom is asked for, at a given depth ("Lost in the Middle",
                2307.03172)

A task is a context, a question on it, and answers. The context comes first, so that a cache can be compressed before
the question is seen (blind) or after (aware).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvjax.errors import RequestError
from kvjax.evaluation import filler
from kvjax.evaluation.filler import Dice

PLACED = ("needle", "multikey", "middle")
"""Kinds whose one fact stands at a given depth."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A question on a text.

    Attributes:
      kind: one of `KINDS`.
      context: the text, with what to look for in front of it.
      question: on it.
      start: how the answer begins; the model goes on from there.
      answers: strings that the answer has to contain.
      room: tokens that the answer may have.
      depth: where in the context the fact stands, 0 at the beginning and 1 at the end; None where there are several.
    """

    kind: str
    context: str
    question: str
    start: str
    answers: tuple[str, ...]
    room: int
    depth: float | None = None


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A task whose context can be made of any length.

    Attributes:
      task: with the head of the context alone.
      units: how many → so many pieces of other text.
      facts: (depth, piece) of what is hidden among them.
      joiner: between pieces.
      pads: pieces with which the length is met where a unit more would be too much, shortest first.
    """

    task: Task
    units: Callable[[int], list[str]]
    facts: Sequence[tuple[float, str]] = ()
    joiner: str = " "
    pads: Sequence[str] = filler.SHORT

    def of(self, units: int, pads: Sequence[str] = ()) -> Task:
        """The task with so many units of text."""
        pieces = _inserted([*self.units(units), *pads], self.facts)
        return dataclasses.replace(self.task, context=self.task.context + "\n\n" + self.joiner.join(pieces))


def make(
    kind: str,
    length: int,
    count: Callable[[Task], int],
    *,
    depth: float | None = None,
    sample: int = 0,
    seed: int = 0,
) -> Task:
    """A task of a kind, as long as the length allows.

    Args:
      kind: one of `KINDS`.
      length: tokens of the prompt at most; it has at least 98 % of them from 512 on.
      count: tokens of a task's prompt.
      depth: of `PLACED` kinds, 0 to 1; None draws one.
      sample: number of the task; each has other text, names and numbers.
      seed: of all of them.

    Raises:
      RequestError: an unknown kind, a depth outside 0 to 1, or a length that the bare question exceeds.
    """
    form = _kind(kind)
    if depth is not None and not 0 <= depth <= 1:
        raise RequestError(f"The depth is {depth}: give 0, the beginning, to 1, the end.")
    dice = Dice(seed, kind, length, depth, sample)
    draft = form(dice, dice.below(1001) / 1000 if depth is None else depth)
    return _fitted(draft, length, count)


def room(kind: str) -> int:
    """Tokens that the answer to a task of this kind may have. Raises RequestError for an unknown kind."""
    return _kind(kind)(Dice(0), 0.5).task.room


def _kind(kind: str) -> Callable[[Dice, float], _Draft]:
    if kind not in KINDS:
        raise RequestError(f"There is no task {kind!r}: give some of {', '.join(KINDS)}.")
    return KINDS[kind]


def recall(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that the text contains, in upper or lower case: RULER's `string_match_all`."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


# --- lengths ----------------------------------------------------------------------------------------------------------
def _inserted(units: Sequence[str], facts: Sequence[tuple[float, str]]) -> list[str]:
    """The units with each fact where its depth says, by characters."""
    total, passed = sum(map(len, units)), 0
    pieces: list[str] = []
    left = sorted(facts, key=lambda fact: fact[0])
    for unit in units:
        while left and passed + len(unit) / 2 >= left[0][0] * total and left[0][0] < 1:
            pieces.append(left.pop(0)[1])
        pieces.append(unit)
        passed += len(unit)
    return pieces + [piece for _, piece in left]


def _fitted(draft: _Draft, length: int, count: Callable[[Task], int]) -> Task:
    least, probe = count(draft.of(0)), 32
    if least > length:
        raise RequestError(
            f"A {draft.task.kind} task has {least} tokens without any text around it, and the length is {length}: "
            "give a greater length."
        )
    each = max(1.0, (count(draft.of(probe)) - least) / probe)
    units = int((length - least) / each)
    while (over := count(draft.of(units)) - length) > 0:
        units -= max(1, int(over / each))
    while count(draft.of(units + 1)) <= length:
        units += 1
    pads: list[str] = []
    for pad in reversed(draft.pads):
        while count(draft.of(units, [*pads, pad])) <= length:
            pads.append(pad)
    return draft.of(units, pads)


# --- kinds ------------------------------------------------------------------------------------------------------------
_NUMBERS = "The text below hides some secret numbers. Remember them."


def _prose(dice: Dice) -> Callable[[int], list[str]]:
    seed = dice.below(2**30)
    return lambda count: filler.sentences(count, seed)


def _secret(place: str, number: str) -> str:
    return f"The secret number of the {place} is {number}."


def _needle(dice: Dice, depth: float, others: int = 0) -> _Draft:
    place, *more = dice.sample(filler.WORDS, 1 + others)
    number = dice.digits(7)
    task = Task(
        kind="multikey" if others else "needle",
        context=_NUMBERS,
        question=f"What is the secret number of the {place}?",
        start=f"The secret number of the {place} is",
        answers=(number,),
        room=16,
        depth=depth,
    )
    hidden = [(dice.below(1001) / 1000, _secret(word, dice.digits(7))) for word in more]
    return _Draft(task, _prose(dice), [(depth, _secret(place, number)), *hidden])


def _multikey(dice: Dice, depth: float) -> _Draft:
    return _needle(dice, depth, others=3)


def _spread(dice: Dice, count: int) -> list[float]:
    """Depths, one in each of `count` equal parts."""
    return [(i + dice.below(1000) / 1000) / count for i in range(count)]


def _multivalue(dice: Dice, depth: float) -> _Draft:
    place, numbers = dice.pick(filler.WORDS), [dice.digits(5) for _ in range(4)]
    task = Task(
        kind="multivalue",
        context=_NUMBERS,
        question=f"What are all the secret numbers of the {place}? There are four.",
        start=f"The four secret numbers of the {place} are",
        answers=tuple(numbers),
        room=48,
    )
    facts = [f"One of the secret numbers of the {place} is {number}." for number in numbers]
    return _Draft(task, _prose(dice), list(zip(_spread(dice, 4), facts, strict=True)))


def _variables(dice: Dice, depth: float) -> _Draft:
    names = [word.upper() for word in dice.sample(filler.WORDS, 3)]
    number = dice.digits(5)
    task = Task(
        kind="variables",
        context="The text below sets some variables, each in a line such as VAR X = 1. Remember their values.",
        question=f"Which three variables have the value {number}, some of them by way of others?",
        start=f"The three variables with the value {number} are VAR",
        answers=tuple(names),
        room=32,
    )
    values = [number, *(f"VAR {name}" for name in names)]
    facts = [f"VAR {name} = {value}." for name, value in zip(names, values, strict=False)]
    return _Draft(task, _prose(dice), list(zip(_spread(dice, 3), facts, strict=True)))


def _words(dice: Dice, depth: float) -> _Draft:
    common = dice.sample(filler.WORDS, 3)
    rare = dice.sample([word for word in filler.WORDS if word not in common], len(filler.WORDS) - 3)
    seed = dice.below(2**30)

    def units(count: int) -> list[str]:
        """A quarter of the places for each common word: with an eighth, small models find none. The others in turn."""
        listed = [word for word in common for _ in range(count // 4)]
        listed += [rare[i % len(rare)] for i in range(count - len(listed))]
        return Dice(seed).sample(listed, count)

    task = Task(
        kind="words",
        context="Below is a list of words. Some of them appear much more often than the others. Remember those.",
        question="Which three words appear most often in the list?",
        start="The three words that appear most often are",
        answers=tuple(common),
        room=24,
    )
    return _Draft(task, units, joiner=", ", pads=())


def _middle(dice: Dice, depth: float) -> _Draft:
    towns = dice.sample(filler.TOWNS, len(filler.TOWNS))
    asked, town = _name(dice), towns[0]
    seed = dice.below(2**30)

    def units(count: int) -> list[str]:
        names = Dice(seed)
        found: list[str] = []
        while len(found) < count:
            if (name := _name(names)) != asked:
                found.append(_document(names, name, names.pick(towns[1:])))
        return found

    task = Task(
        kind="middle",
        context="Below are short documents on some people.",
        question=f"In which town does {asked} live?",
        start=f"{asked} lives in",
        answers=(town,),
        room=12,
        depth=depth,
    )
    return _Draft(task, units, [(depth, _document(dice, asked, town))], joiner="\n")


def _name(dice: Dice) -> str:
    first, last = dice.pick(filler.FIRST_NAMES), dice.pick(filler.LAST_NAMES)
    return f"{first} {dice.pick('ABCDEFGHIJKLMNOPRSTW')}. {last}"


def _document(dice: Dice, name: str, town: str) -> str:
    return f"Document: {name} lives in {town} and works as a {dice.pick(filler.TRADES)}. {filler.sentence(dice)}"


KINDS: dict[str, Callable[[Dice, float], _Draft]] = {
    "needle": _needle,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "variables": _variables,
    "words": _words,
    "middle": _middle,
}
