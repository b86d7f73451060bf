"""The words of the story grammar: who there is, where they live, what they own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of character: noun, group ("child", "animal", "bird", "fairy"), limb and home."""

    noun: str
    group: str
    limb: str
    home: str


def _words(text: str) -> list[str]:
    return text.split()


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


CHILDREN = {
    "she": Kind("girl", "child", "hand", "house"),
    "he": Kind("boy", "child", "hand", "house"),
}
ANIMALS = (
    Kind("fox", "animal", "paw", "den"),
    Kind("rabbit", "animal", "paw", "burrow"),
    Kind("bear", "animal", "paw", "cave"),
    Kind("mouse", "animal", "paw", "hole"),
    Kind("hedgehog", "animal", "paw", "nest of leaves"),
    Kind("squirrel", "animal", "paw", "hollow tree"),
    Kind("frog", "animal", "hand", "house of reeds"),
    Kind("cat", "animal", "paw", "basket"),
    Kind("puppy", "animal", "paw", "kennel"),
    Kind("turtle", "animal", "hand", "hut"),
    Kind("badger", "animal", "paw", "den"),
    Kind("otter", "animal", "paw", "den"),
    Kind("mole", "animal", "paw", "tunnel"),
    Kind("beaver", "animal", "paw", "lodge"),
    Kind("pig", "animal", "hoof", "barn"),
    Kind("goat", "animal", "hoof", "barn"),
    Kind("lamb", "animal", "hoof", "barn"),
    Kind("elephant", "animal", "trunk", "hut"),
    Kind("lion", "animal", "paw", "cave"),
    Kind("monkey", "animal", "hand", "tree house"),
    Kind("wolf", "animal", "paw", "den"),
)
BIRDS = (
    Kind("duck", "bird", "wing", "nest"),
    Kind("owl", "bird", "wing", "nest"),
    Kind("robin", "bird", "wing", "nest"),
    Kind("penguin", "bird", "wing", "house of snow"),
    Kind("crow", "bird", "wing", "nest"),
)
FAIRY = {
    "she": (
        Kind("princess", "fairy", "hand", "castle"),
        Kind("witch", "fairy", "hand", "cottage"),
        Kind("dragon", "fairy", "claw", "cave"),
        Kind("robot", "fairy", "hand", "workshop"),
    ),
    "he": (
        Kind("prince", "fairy", "hand", "castle"),
        Kind("knight", "fairy", "hand", "castle"),
        Kind("wizard", "fairy", "hand", "tower"),
        Kind("dragon", "fairy", "claw", "cave"),
        Kind("robot", "fairy", "hand", "workshop"),
        Kind("giant", "fairy", "hand", "cave"),
    ),
}

TRAITS = _words(
    "little little little little kind brave clever shy curious cheerful gentle quiet young small "
    "playful careful"
)

# Where a story takes place, with the preposition that goes with it.
PLACES = (
    ("forest", "in"),
    ("garden", "in"),
    ("park", "in"),
    ("meadow", "in"),
    ("village", "in"),
    ("valley", "in"),
    ("market", "at"),
    ("beach", "on"),
    ("hill", "on"),
    ("farm", "on"),
)
NEAR = (
    "the river",
    "the sea",
    "a big forest",
    "a green hill",
    "an old mill",
    "a quiet lake",
    "the mountains",
    "a field of flowers",
    "a tall oak tree",
    "a stone bridge",
)

COLORS = _words("red blue green yellow white purple orange golden silver")
SMALL = _words("key coin marble ring whistle button shell")
WINDY = _words("kite hat scarf umbrella balloon")
TOYS = _words("ball doll drum book blanket puzzle flute wooden_horse teddy_bear paintbrush")
SHINY = _words("key ring coin bell spoon")
FLOATING = _words("boat ball hat basket paper_ship")
FOODS = _words("apples berries nuts cookies pancakes carrots pears cherries")
FLAVORS = _words("apple honey carrot berry lemon nut cherry chocolate")
LIKES = (
    "sing",
    "paint",
    "read",
    "climb trees",
    "play in the grass",
    "tell jokes",
    "count the stars",
    "dance",
    "look at the clouds",
    "collect stones",
    "listen to stories",
    "build little houses",
)
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
