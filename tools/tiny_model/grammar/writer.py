"""A small text writer: templates with [choices|like this] and {slots}, and a cast to fill them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from .texts import WORDS, Paragraph, rows

T = TypeVar("T")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa])~ (?=(\w))")
_SENTENCE = re.compile(r"(?<=[.!?] )[a-z]")
_WHEN = re.compile(r"(?:(\d+)% |(yes|no): )?(.*)")
_PRONOUNS = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
}


class Character(NamedTuple):
    """A character of a story.

    Attributes:
        name: What others call them.
        gender: "she" or "he".
        group: "child", "animal" or "fairy".
        noun: What they are.
        limb: Their hand, paw or the like.
        home: Where they live.
    """

    name: str
    gender: str
    group: str
    noun: str
    limb: str
    home: str

    def slots(self, prefix: str, name: str) -> dict[str, str]:
        """The template slots of this character: {he}, {him}, ... with `prefix` before them, {name}
        and, with its kind but for children, {namex}."""
        own = dict(zip(("he", "him", "his", "himself"), _PRONOUNS[self.gender], strict=True))
        own |= {"kind": self.noun, "limb": self.limb, "home": self.home}
        full = self.name if self.group == "child" else f"{self.name} the {self.noun}"
        return {prefix + key: value for key, value in own.items()} | {
            name: self.name,
            f"{name}x": full,
        }


class Writer:
    """Writes one story: holds the random numbers, the filled slots and the sentences so far.

    The methods that `play` calls write a plot's paragraphs. They get the other words of the head,
    names of slots, and the paragraph's lines.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self.prefix = ""
        self._chosen = True
        self.hero = self._cast_hero()
        self.friend = self._cast_friend()
        self.slots = self.hero.slots("", "h") | self.friend.slots("f", "f") | {"things": "toys"}
        place, preposition = self.pick(WORDS["place"])
        self.slots |= {"place": place, "in_place": f"{preposition} the {place}"}
        for name in ("trait", "near", "like"):
            self.draw([name])
        self._cast_elder()
        self.own(["things"])

    def pick(self, items: Sequence[T]) -> T:
        """One of the items, each equally likely; there is at least one."""
        return items[self.rng.randrange(len(items))] if len(items) > 1 else items[0]

    def word(self, name: str) -> str:
        """One of the words of that name."""
        return self.pick(WORDS[name])[0]

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
        text = _ARTICLE.sub(lambda m: m[1] + ("n " if m[2].lower() in "aeiou" else " "), text)
        return _SENTENCE.sub(lambda m: m.group().upper(), text)

    def say(self, template: str) -> None:
        """Add one or more sentences; none for an empty template."""
        if text := self.fill(template):
            self.sentences.append(text[0].upper() + text[1:])

    def maybe(self, probability: float, template: str) -> None:
        """`say`, with that probability, 0 to 1."""
        if self.chance(probability):
            self.say(template)

    def play(self, plot: Iterable[Paragraph]) -> None:
        """Write the story of a plot."""
        for head, lines in plot:
            if meant := self._meant(head):
                verb, *names = meant.split()
                getattr(self, verb)(names, lines)

    def _meant(self, text: str) -> str:
        """The text after `60% ` with that probability; after `yes: ` or `no: ` if that was the last
        such outcome; any other text as it is."""
        share, answer, rest = _WHEN.fullmatch(text).groups()  # type: ignore[union-attr]
        if share:
            self._chosen = self.chance(int(share) / 100)
        always = not (share or answer)
        return rest if always or self._chosen == (answer != "no") else ""

    def tell(self, _: Sequence[str], lines: Sequence[str]) -> None:
        """`say` each line that applies."""
        for line in lines:
            if meant := self._meant(line):
                self.say(meant)

    def draw(self, names: Sequence[str], lines: Sequence[str] = ()) -> None:
        """Fill the slots of these names with one of the rows, templates; without lines, with one of
        the words of that name."""
        self.slots |= zip(names, self.pick(rows(*lines) if lines else WORDS[names[0]]), strict=True)

    def sample(self, names: Sequence[str], lines: Sequence[str]) -> None:
        """Fill each slot with a different row."""
        drawn = self.rng.sample(rows(*lines), len(names))
        self.slots |= {name: row[0] for name, row in zip(names, drawn, strict=True)}

    def settle(self, names: Sequence[str], _: Sequence[str]) -> None:
        """Expand these slots once, for the whole story."""
        self.slots |= {name: self.fill(self.slots[name]) for name in names}

    def own(self, names: Sequence[str], lines: Sequence[str] = ()) -> None:
        """Choose the thing the story is about, {obj} and {cobj}, with its colour: one of the rows,
        or of the words whose name is in the slot."""
        noun = self.pick(rows(*lines) if lines else WORDS[self.slots[names[0]]])[0]
        adjective = self.word("color" if self.chance(0.75) else "look")
        self.slots |= {"obj": noun, "cobj": f"{adjective} {noun}"}

    def start(self, _: Sequence[str], lines: Sequence[str]) -> None:
        """Introduce the hero and the event that starts the story.

        Of two lines the first is `out: `, `home: ` or `night: `, so that the first sentence does
        not contradict it, and a sentence that can follow "One day, ". The second says the same:
        a feeling, ` because `, and a clause.
        """
        first, why = lines
        where, _, hook = first.partition(": ")
        if self.chance(0.05):
            request = self.fill(self.word("request"))
            self.prefix = request[0].upper() + request[1:] + "\n"
        roll = self.rng.random()
        if roll < 0.52:
            self.say(self.word("who"))
            self.maybe(0.35, self.word("more"))
            self.say(f"{self.word('one night' if where == 'night' else 'one day')} {hook}")
        elif roll < 0.76 and where != "night":
            outing = self.word(where)
            name = self.pick(
                ("{kind} [named|called] {h} ", "{kind} [named|called] {h} ", "{kind} ")
            )
            self.say("[one day|one day|one morning], a~ {trait} " + name + outing + ".")
            if name == "{kind} ":
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

    def end(self, _: Sequence[str], lines: Sequence[str]) -> None:
        """Close the story: its own lesson most of the time, then perhaps a general ending."""
        self.maybe(0.85, lines[0])
        self.maybe(0.45, self.word("close"))
        self.maybe(0.12, "The end.")

    def text(self) -> str:
        """The sentences as one paragraph, below a request for the story where it has one."""
        return self.prefix + " ".join(self.sentences)

    def _cast_hero(self) -> Character:
        gender, roll = self.pick(("she", "he")), self.rng.random()
        return self._cast(gender, "child" if roll < 0.42 else "animal" if roll < 0.90 else "fairy")

    def _cast_friend(self) -> Character:
        while True:
            gender, hero = self.pick(("she", "he")), self.hero
            child = hero.group == "child" and self.chance(0.8)
            friend = self._cast(gender, "child" if child else "animal")
            if friend.name != hero.name and (friend.noun != hero.noun or friend.group == "child"):
                return friend

    def _cast(self, gender: str, group: str) -> Character:
        kind = self.pick(WORDS[group if group == "animal" else f"{gender} {group}"])
        if self.chance(0.10):
            name = "".join(self.word(f"name {part}") for part in ("start", "middle", "end"))
        else:
            of = "person" if group != "animal" or self.chance(0.2) else "animal"
            name = self.word(f"{gender} {of} name")
        noun, limb, home = kind
        return Character(name, gender, group, noun, limb, home)

    def _cast_elder(self) -> None:
        """An older and wiser character: of the family for a child, otherwise an old neighbour."""
        gender = self.pick(("she", "he"))
        if self.hero.group == "child" or self.chance(0.35):
            elder = f"{{his}} {self.word(f'{gender} kin')}"
        else:
            mine = (self.hero.noun, self.friend.noun)
            elder = "the old " + self.pick([row for row in WORDS["old"] if row[0] not in mine])[0]
        subject, obj, possessive, _ = _PRONOUNS[gender]
        self.slots |= {"elder": elder, "ehe": subject, "ehim": obj, "ehis": possessive}
