"""Plain English that means little: sentences out of a small grammar, names and words. All of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Dice:
    """Random choices that stay the same across versions of Python: only `random()` is promised to."""

    def __init__(self, *seed: object):
        self._random = random.Random("/".join(map(str, seed)))

    def below(self, n: int) -> int:
        """A whole number from 0 to n − 1."""
        return int(self._random.random() * n)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in random order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def digits(self, count: int) -> str:
        """A number of so many digits; the first is not 0."""
        return str(1 + self.below(9)) + "".join(str(self.below(10)) for _ in range(count - 1))


_WHO = (
    *("the baker", "an old teacher", "the tall gardener", "my neighbour", "the girl from the mill", "a quiet clerk"),
    *("the ferryman", "our cousin", "the postman", "a young carpenter", "the widow next door", "the station master"),
    *("the night nurse", "a visiting uncle", "the shepherd", "the new librarian", "a tired driver", "the piano tuner"),
)
_DID = (
    *("walked slowly", "looked for a warm coat", "told a long story", "repaired the wooden gate", "counted the boats"),
    *("waited for the rain to stop", "wrote a short letter", "carried two heavy baskets", "sang an old tune"),
    *(
        "painted the window frames",
        "drank a cup of tea",
        "watched the birds",
        "swept the stone floor",
        "read the paper",
    ),
    *("picked a few ripe plums", "forgot the umbrella", "lit a small lamp", "sorted the seeds", "polished the bell"),
)
_WHERE = (
    *("near the river", "behind the church", "at the edge of the village", "on the narrow bridge", "in the kitchen"),
    *("under the chestnut trees", "beside the canal", "on the way to the market", "in front of the school"),
    *("at the foot of the hill", "in the empty hall", "by the garden wall", "along the sandy road", "in the back room"),
)
_WHEN = (
    *("in the early morning", "after lunch", "before it grew dark", "on a windy afternoon", "late in the evening"),
    *("when the clock struck four", "one day in autumn", "while the others were asleep", "on the first warm day"),
    *("during the holidays", "at the end of the week", "as soon as the snow had melted", "a little before noon"),
)
_AND = (
    *("and nobody was surprised", "because there was nothing else to do", "and the dog came along", "as people do"),
    *("but it did not take long", "and then went home", "which was a pleasant thing to see", "and smiled"),
    *("although the weather was cold", "and it was soon forgotten", "without saying a word", "as in other years"),
)
SHORT = (
    *("Yes.", "It rained.", "Time went by.", "The air was still.", "It was a quiet day.", "Nobody was in a hurry."),
    *("The road was wet and empty.", "A dog barked somewhere behind the barn."),
)
"""Sentences of many lengths, shortest first, to fill up a text."""

WORDS = _split(
    """apple anchor basket beetle bottle bridge button candle canvas carpet castle cellar cheese cherry circle coffee
    copper corner cotton cradle cushion daisy desert dragon drawer engine feather fiddle finger flower forest fountain
    garden garlic ginger guitar hammer harbor helmet honey island jacket jungle kettle kitten ladder lantern lemon
    letter lizard magnet market marble meadow mirror mitten monkey mountain mustard napkin needle oyster paddle palace
    paper parrot pebble pencil pepper pillow pirate planet pocket potato pumpkin puzzle quarry rabbit ribbon river
    rocket saddle sailor salmon school shadow shovel silver spider spoon stable statue summer table temple ticket tiger
    timber tomato tower trumpet tunnel turtle valley velvet village violin wagon walnut window winter wizard zebra
    almond bamboo banner barrel beacon blanket border branch bucket butter camera cannon chapel cloud comet compass
    cricket crystal curtain diamond dinner doctor donkey eagle elbow falcon farmer fence flute fossil galaxy glacier
    glove goblet grape hazel herring hollow igloo insect ivory jewel kernel lagoon lavender leather lobster mantle
    maple medal melon mosaic nutmeg ocean olive onion orchid otter pantry peach pearl piano pigeon plum pony
    poppy prairie raven reef robin saffron scarf sheep signal squirrel tulip umbrella vessel whistle willow yarn"""
)
"""Nouns, all different."""

FIRST_NAMES = _split(
    """Ada Bruno Clara Dario Edith Felix Greta Henry Ingrid Jonas Karla Leon Mabel Nora Oscar Paula Quentin Rosa Simon
    Thea Ulric Vera Walter Xenia Yara Zeno Agnes Boris Cora Derek Elsa Frank Gloria Hugo Irene Jasper"""
)
LAST_NAMES = _split(
    """Abbott Barlow Carver Dalton Easton Fuller Gibbs Harlow Irwin Jarvis Keller Lawson Mercer Norton Osborne Palmer
    Quincy Rowland Sutton Thorne Upton Vaughn Walsh Yates Archer Benson Conway Draper Ellis Fenton"""
)
TOWNS = _split(
    """Lisbon Oslo Vienna Dublin Prague Athens Warsaw Madrid Berlin Zurich Naples Geneva Bergen Krakow Hamburg Seville
    Toronto Chicago Boston Denver Seattle Havana Bogota Lima Nairobi Cairo Tunis Delhi Kyoto Osaka Manila Jakarta Sydney
    Auckland Bangkok Seoul"""
)
TRADES = _split(
    """baker carpenter dentist engineer farmer florist gardener lawyer mechanic miner nurse painter pilot plumber
    printer sailor surgeon tailor teacher waiter"""
)


def sentence(dice: Dice) -> str:
    """One sentence of 10 to 25 words."""
    who, did, where, when = (dice.pick(words) for words in (_WHO, _DID, _WHERE, _WHEN))
    end = f" {dice.pick(_AND)}" if dice.below(2) else ""
    order = dice.below(3)
    if order == 0:
        text = f"{when}, {who} {did} {where}{end}"
    elif order == 1:
        text = f"{who} {did} {where} {when}{end}"
    else:
        text = f"{where}, {who} {did} {when}{end}"
    return text[0].upper() + text[1:] + "."


def sentences(count: int, *seed: object) -> list[str]:
    """The first `count` of an endless sequence."""
    dice = Dice(*seed)
    return [sentence(dice) for _ in range(count)]
