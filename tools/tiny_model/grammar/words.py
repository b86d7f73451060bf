"""The words of the story grammar: who there is, where they live, what they own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of character.

    Attributes:
        noun: What it is called.
        group: "child", "animal", "bird" or "fairy".
        limb: Its hand, paw or the like.
        home: Where it lives.
    """

    noun: str
    group: str
    limb: str
    home: str


def _words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    """Phrases with slashes between them."""
    return [" ".join(phrase.split()) for phrase in text.split("/")]


def rows(text: str) -> list[list[str]]:
    """Rows of `phrases` with semicolons between them."""
    return [phrases(row) for row in text.split(";")]


GIRLS = _words(
    "Mia Lily Emma Nora Ella Rosa Zoe Ada Ivy Clara Maya Lucy Anna Sara Ruby Hana Leila Ines "
    "Freya Tara Alice Mina Sofia Greta Elsa"
)
BOYS = _words(
    "Tom Ben Max Leo Sam Finn Noah Jack Omar Theo Luca Eli Hugo Ravi Kai Milo Otto Paul Emil "
    "Yusuf Tim Oscar Ivan Felix Anton"
)
# Animals keep one gender per name, as children do, so that a name alone settles the pronoun.
SHE_ANIMALS = _words(
    "Hazel Clover Daisy Poppy Willow Fern Olive Dot Coco Juno Misty Bella Luna Nutmeg Pepper "
    "Penny Maple Rosie Tilly Honey"
)
HE_ANIMALS = _words(
    "Rusty Pip Bramble Button Moss Biscuit Acorn Teddy Basil Whiskers Bo Ziggy Pebble Sunny "
    "Rolo Bruno Barney Oliver Chip Scout"
)

_START = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "W", "Z", "Br", "Tr")
_MIDDLE = ("a", "e", "i", "o", "u", "ee", "oo", "or", "ar", "el", "in", "al")
_END = ("b", "bo", "ck", "do", "la", "lin", "m", "mi", "n", "na", "p", "ra", "ri", "t", "x", "zo")


def invent_name(choose: Callable[[Sequence[str]], str]) -> str:
    """A name that is in no list, so that the model learns to copy whatever name it is given."""
    return choose(_START) + choose(_MIDDLE) + choose(_END)


def _kinds(group: str, text: str) -> list[Kind]:
    return [Kind(noun, group, limb, home) for noun, limb, home in rows(text)]


_GIRL, _BOY = _kinds("child", "girl / hand / house; boy / hand / house")
CHILDREN = {"she": _GIRL, "he": _BOY}
ANIMALS = _kinds(
    "animal",
    """
    fox / paw / den; rabbit / paw / burrow; bear / paw / cave; mouse / paw / hole;
    hedgehog / paw / nest of leaves; squirrel / paw / hollow tree; frog / hand / house of reeds;
    cat / paw / basket; puppy / paw / kennel; turtle / hand / hut; badger / paw / den;
    otter / paw / den; mole / paw / tunnel; beaver / paw / lodge; pig / hoof / barn;
    goat / hoof / barn; lamb / hoof / barn; elephant / trunk / hut; lion / paw / cave;
    monkey / hand / tree house; wolf / paw / den
    """,
)
BIRDS = _kinds(
    "bird",
    """
    duck / wing / nest; owl / wing / nest; robin / wing / nest; penguin / wing / house of snow;
    crow / wing / nest
    """,
)
FAIRY = {
    "she": _kinds(
        "fairy",
        """
        princess / hand / castle; witch / hand / cottage; dragon / claw / cave;
        robot / hand / workshop
        """,
    ),
    "he": _kinds(
        "fairy",
        """
        prince / hand / castle; knight / hand / castle; wizard / hand / tower;
        dragon / claw / cave; robot / hand / workshop; giant / hand / cave
        """,
    ),
}

TRAITS = _words(
    "little little little little kind brave clever shy curious cheerful gentle quiet young small "
    "playful careful"
)

# Where a story takes place, with the preposition that goes with it.
PLACES = rows("""
    forest / in; garden / in; park / in; meadow / in; village / in; valley / in; market / at;
    beach / on; hill / on; farm / on
""")
NEAR = phrases("""
    the river / the sea / a big forest / a green hill / an old mill / a quiet lake /
    the mountains / a field of flowers / a tall oak tree / a stone bridge
""")

COLORS = _words("red blue green yellow white purple orange golden silver")
SMALL = _words("key coin marble ring whistle button shell")
WINDY = _words("kite hat scarf umbrella balloon")
TOYS = _words("ball doll drum book blanket puzzle flute wooden_horse teddy_bear paintbrush")
SHINY = _words("key ring coin bell spoon")
FLOATING = _words("boat ball hat basket paper_ship")
FOODS = _words("apples berries nuts cookies pancakes carrots pears cherries")
FLAVORS = _words("apple honey carrot berry lemon nut cherry chocolate")
LIKES = phrases("""
    sing / paint / read / climb trees / play in the grass / tell jokes / count the stars / dance /
    look at the clouds / collect stones / listen to stories / build little houses
""")
OUTINGS = (
    "went for a walk {in_place}",
    "was playing {in_place}",
    "woke up early and went outside",
    "was walking home",
    "sat under a tree {in_place}",
    "was looking for flowers {in_place}",
    "was sitting {in_place} and looking at the sky",
)
AT_HOME = (
    "woke up early and looked out of the window",
    "was sitting at the table",
    "was at home and did not know what to do",
    "had just finished breakfast",
)
