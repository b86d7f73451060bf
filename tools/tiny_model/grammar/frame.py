"""How every story begins and ends; what happens in between is the plots' business."""

from __future__ import annotations

from . import words
from .writer import Writer

_WHO = (
    "once upon a time, there was a~ {trait} {kind} [named|called] {h}.",
    "once upon a time, there was a~ {trait} {kind} [named|called] {h} who loved to {like}.",
    "once upon a time there lived a~ {trait} {kind} [named|called] {h}.",
    "once upon a time, there was a~ {trait} {kind}. {his} name was {h}.",
    "once upon a time, in a {home} near {near}, lived a~ {trait} {kind} [named|called] {h}.",
    "long ago, there was a~ {trait} {kind} [named|called] {h}.",
    "there was once a~ {trait} {kind} [named|called] {h} who lived in a {home}.",
    "{h} was a~ {trait} {kind} who lived in a {home} near {near}.",
    "{h} was a~ {trait} {kind} who loved to {like}.",
    "{hx} lived in a {home} near {near}.",
    "in a {home} near {near} lived a~ {trait} {kind} [named|called] {h}.",
)
_MORE = (
    "{he} lived with {his} family.",
    "{he} had a good friend [named|called] {f}.",
    "{he} loved to {like}.",
    "everyone in the village knew {him}.",
    "{he} was always [busy|happy to help|full of ideas].",
)
_CONNECT = (
    "one day, ",
    "one day, ",
    "one morning, ",
    "one afternoon, ",
    "one fine day, ",
    "then one day, ",
)
_AT_NIGHT = ("one night, ", "one evening, ", "one cold night, ")
_CLOSE = (
    "that night, {h} fell asleep with a smile.",
    "{h} [went home|went to bed] happy that night.",
    "and {h} never forgot that day.",
    "it was the best day of the [week|year].",
    "from that day on, {h} and {f} were the best of friends.",
    "{h} smiled all the way home.",
    "and they were all very happy.",
    "{h} told the story to everyone {he} met.",
)
_REQUEST = (
    "tell me a story about a~ {kind}.\n",
    "tell me a story about a~ {kind} [named|called] {h}.\n",
    "write a story about a~ {trait} {kind}.\n",
    "can you tell me a story about {hx}?\n",
)


def start(w: Writer, hook: str, feeling: str, because: str, where: str = "out") -> None:
    """Introduce the hero and what sets the story going.

    `hook` is a sentence that can follow "One day, "; `because` is a clause that says the same and
    can follow "<hero> was <feeling> because ". `where` ("out", "home" or "night") keeps the first
    sentence from contradicting the hook.
    """
    if w.chance(0.05):
        request = w.fill(w.pick(_REQUEST))
        w.prefix = request[0].upper() + request[1:]
    roll = w.rng.random()
    if roll < 0.52:
        w.say(w.pick(_WHO))
        w.maybe(0.35, w.pick(_MORE))
        w.say(w.pick(_AT_NIGHT if where == "night" else _CONNECT) + hook)
    elif roll < 0.76 and where != "night":
        outing = w.pick(words.OUTINGS if where == "out" else words.AT_HOME)
        who = w.pick(("{kind} [named|called] {h} ", "{kind} [named|called] {h} ", "{kind} "))
        w.say("[one day|one day|one morning], a~ {trait} " + who + outing + ".")
        if who == "{kind} ":
            w.say("{his} name was {h}.")
        w.say(hook)
    elif roll < 0.95 or where != "out":
        w.say(f"{{h}} was [|very ]{feeling} because {because}.")
        w.maybe(0.4, "{he} was a~ {trait} {kind} who lived [in a {home} near {near}|near {near}].")
    else:
        w.say(
            "it was a [warm|cold|bright|quiet] morning {in_place}, "
            "and {hx} was [awake early|in a good mood]."
        )
        w.say(hook)


def end(w: Writer, moral: str) -> None:
    """Close the story: its own lesson most of the time, then perhaps a general ending."""
    w.maybe(0.85, moral)
    w.maybe(0.45, w.pick(_CLOSE))
    w.maybe(0.12, "The end.")
