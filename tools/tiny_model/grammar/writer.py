"""A small text writer: templates with [choices|like this] and {slots}, and a cast to fill them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from . import frame, words
from .words import Kind

T = TypeVar("T")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])~ (\w)")
_SENTENCE = re.compile(r"(?<=[.!?] )[a-z]")
_PRONOUNS = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
}


@dataclass(frozen=True)
class Character:
    """Somebody in a story.

    Attributes:
        name: What others call them.
        gender: "she" or "he".
        kind: What they are.
    """

    name: str
    gender: str
    kind: Kind

    def slots(self, prefix: str) -> dict[str, str]:
        """The template slots of this character: {h}, {he}, {him}, ... with `prefix` before them."""
        subject, obj, possessive, self_ = _PRONOUNS[self.gender]
        out = {"he": subject, "him": obj, "his": possessive, "himself": self_}
        out |= {"kind": self.kind.noun, "limb": self.kind.limb, "home": self.kind.home}
        return {prefix + key: value for key, value in out.items()}


class Writer:
    """Writes one story: holds the random numbers, the filled slots and the sentences so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.slots: dict[str, str] = {}
        self.sentences: list[str] = []
        self.prefix = ""
        self.hero = self._cast_hero()
        self.friend = self._cast_friend()
        self.slots |= self.hero.slots("") | {"h": self.hero.name}
        self.slots |= self.friend.slots("f") | {"f": self.friend.name}
        self.slots |= {"hx": _presented(self.hero), "fx": _presented(self.friend)}
        self._set_scene()

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each equally likely; there is at least one."""
        return items[self.rng.randrange(len(items))]

    def chance(self, probability: float) -> bool:
        """True with that probability, 0 to 1; uses up one random number either way."""
        return self.rng.random() < probability

    def fill(self, text: str) -> str:
        """Fill the slots, expand the choices (innermost first), and set a/an and capitals."""
        while "{" in text:  # a slot may itself hold a template
            text = text.format_map(self.slots)
        while match := _CHOICE.search(text):
            chosen = self.pick(match.group(1).split("|"))
            text = text[: match.start()] + chosen + text[match.end() :]
        text = _ARTICLE.sub(lambda m: _article(m.group(1), m.group(2)), text)
        return _SENTENCE.sub(lambda m: m.group().upper(), text)

    def say(self, template: str) -> None:
        """Add one or more sentences."""
        text = self.fill(template)
        self.sentences.append(text[0].upper() + text[1:])

    def maybe(self, probability: float, template: str) -> None:
        """`say`, with that probability, 0 to 1."""
        if self.chance(probability):
            self.say(template)

    def tell(self, lines: str) -> None:
        """`say` each line; one that begins with `60% ` with that probability only."""
        for line in lines.strip().splitlines():
            head, rare, tail = " ".join(line.split()).partition("% ")
            if rare:
                self.maybe(int(head) / 100, tail)
            else:
                self.say(head)

    def draw(self, names: str, rows: Sequence[Sequence[str]]) -> None:
        """Fill the slots of these names with one of the rows, templates."""
        self.slots |= zip(names.split(), self.pick(rows), strict=True)

    def start(self, lines: str) -> None:
        """Introduce the hero and what sets the story going.

        Of two lines the first is `out: `, `home: ` or `night: `, so that the first sentence does
        not contradict it, and a sentence that can follow "One day, ". The second says the same:
        a feeling, ` because `, and a clause.
        """
        first, why = (" ".join(line.split()) for line in lines.strip().splitlines())
        where, _, hook = first.partition(": ")
        if self.chance(0.05):
            request = self.fill(self.pick(frame.REQUEST))
            self.prefix = request[0].upper() + request[1:]
        roll = self.rng.random()
        if roll < 0.52:
            self.say(self.pick(frame.WHO))
            self.maybe(0.35, self.pick(frame.MORE))
            self.say(self.pick(frame.AT_NIGHT if where == "night" else frame.CONNECT) + hook)
        elif roll < 0.76 and where != "night":
            outing = self.pick(words.OUTINGS if where == "out" else words.AT_HOME)
            who = self.pick(("{kind} [named|called] {h} ", "{kind} [named|called] {h} ", "{kind} "))
            self.say("[one day|one day|one morning], a~ {trait} " + who + outing + ".")
            if who == "{kind} ":
                self.say("{his} name was {h}.")
            self.say(hook)
        elif roll < 0.95 or where != "out":
            self.say("{h} was [|very ]" + why + ".")
            home = "[in a {home} near {near}|near {near}]"
            self.maybe(0.4, f"{{he}} was a~ {{trait}} {{kind}} who lived {home}.")
        else:
            self.say(
                "it was a [warm|cold|bright|quiet] morning {in_place}, "
                "and {hx} was [awake early|in a good mood]."
            )
            self.say(hook)

    def end(self, moral: str) -> None:
        """Close the story: its own lesson most of the time, then perhaps a general ending."""
        self.maybe(0.85, moral)
        self.maybe(0.45, self.pick(frame.CLOSE))
        self.maybe(0.12, "The end.")

    def set(self, **slots: str) -> None:
        """Fill slots by name, each with a template that is expanded now, by the slots as they
        are before."""
        self.slots |= {name: self.fill(value) for name, value in slots.items()}

    def own(self, nouns: Sequence[str]) -> None:
        """Choose the thing the story is about: {obj} and {cobj}, with its colour."""
        noun = self.pick(nouns).replace("_", " ")
        adjective = self.pick(words.COLORS if self.chance(0.75) else ("little", "old", "shiny"))
        self.slots |= {"obj": noun, "cobj": f"{adjective} {noun}"}

    def text(self) -> str:
        """The sentences as one paragraph, below a request for the story where it has one."""
        return self.prefix + " ".join(self.sentences)

    def _cast_hero(self) -> Character:
        gender = self.pick(("she", "he"))
        roll = self.rng.random()
        if roll < 0.42:
            return self._named(gender, words.CHILDREN[gender])
        if roll < 0.90:
            return self._named(gender, self.pick(words.ANIMALS + words.BIRDS))
        return self._named(gender, self.pick(words.FAIRY[gender]))

    def _cast_friend(self) -> Character:
        while True:
            gender = self.pick(("she", "he"))
            if self.hero.kind.group == "child" and self.chance(0.8):
                friend = self._named(gender, words.CHILDREN[gender])
            else:
                friend = self._named(gender, self.pick(words.ANIMALS + words.BIRDS))
            if friend.name != self.hero.name and friend.kind.noun != self.hero.kind.noun:
                return friend
            if friend.name != self.hero.name and friend.kind.group == "child":
                return friend

    def _named(self, gender: str, kind: Kind) -> Character:
        if self.chance(0.10):
            return Character(words.invent_name(self.pick), gender, kind)
        people = words.GIRLS if gender == "she" else words.BOYS
        animals = words.SHE_ANIMALS if gender == "she" else words.HE_ANIMALS
        human = kind.group in ("child", "fairy")
        return Character(self.pick(people if human or self.chance(0.2) else animals), gender, kind)

    def _set_scene(self) -> None:
        place, preposition = self.pick(words.PLACES)
        trait = self.pick(words.TRAITS)
        self.slots |= {
            "place": place,
            "in_place": f"{preposition} the {place}",
            "trait": trait,
            "near": self.pick(words.NEAR),
            "like": self.pick(words.LIKES),
        }
        self._cast_elder()
        self.own(words.TOYS)

    def _cast_elder(self) -> None:
        """Somebody older and wiser: of the family for a child, an old neighbour otherwise."""
        gender = self.pick(("she", "he"))
        if self.hero.kind.group == "child" or self.chance(0.35):
            kin = (
                ("mother", "grandmother", "aunt") if gender == "she" else ("father", "grandfather")
            )
            elder = f"{{his}} {self.pick(kin)}"
        else:
            nouns = ("owl", "turtle", "badger", "crow", "bear", "goat")
            mine = (self.hero.kind.noun, self.friend.kind.noun)
            elder = "the old " + self.pick([noun for noun in nouns if noun not in mine])
        subject, obj, possessive, _ = _PRONOUNS[gender]
        self.slots |= {"elder": elder, "ehe": subject, "ehim": obj, "ehis": possessive}


def _presented(character: Character) -> str:
    """Children go by their name alone, the others by name and kind."""
    child = character.kind.group == "child"
    return character.name if child else f"{character.name} the {character.kind.noun}"


def _article(article: str, letter: str) -> str:
    return f"{article}n {letter}" if letter.lower() in "aeiou" else f"{article} {letter}"
