"""Plots about doing right: a wish, a promise, a rescue."""

from __future__ import annotations

from . import frame
from .writer import Writer

_MAGIC = (
    "an old lamp",
    "a small golden fish",
    "a shiny stone",
    "a silver feather",
    "a strange key",
)
_NEEDS = (
    ("was ill and had to stay in bed", "{f} could be well again", "{f} jumped out of bed"),
    (
        "had lost {fhis} home in the storm",
        "{f} could have a new home",
        "there stood a little house with a green door",
    ),
    (
        "could not hear the birds sing",
        "{f} could hear again",
        "{f} heard the birds for the first time",
    ),
    (
        "had not seen {fhis} mother for a long time",
        "{f} could see {fhis} mother",
        "the door opened, and there was the mother of {f}",
    ),
    ("had nothing to eat", "{f} would never be hungry", "the table was full of good things"),
)


def wish(w: Writer) -> None:
    """A magic thing grants one wish, and the hero spends it on the friend's need."""
    need, wished, comes = w.pick(_NEEDS)
    w.set(magic=w.pick(_MAGIC), need=need, wished=wished)
    w.slots["obj"] = w.slots["magic"].split()[-1]
    frame.start(w, "{h} found {magic} {in_place}.", "[surprised|happy]", "{he} had found {magic}")
    w.say(
        '"[I am magic|Do not be afraid]," said the {obj}. "You have one wish. [Think '
        'well|Use it well]."'
    )
    w.say("{h} [could not believe it|was so surprised that {he} sat down]. One wish!")
    w.say(
        "{he} thought of [a castle|a big boat|a room full of toys]. {he} thought of [a "
        "hundred cakes|a bag of gold]."
    )
    w.say("on the way home, {h} [met|saw] {his} friend {fx}. {f} {need}.")
    w.say(
        "{h} [looked at the {obj} and was quiet for a long time|held the {obj} and thought again]."
    )
    w.say("then {he} knew what to do. " + '"I wish that {wished}," said {h}.')
    w.say("there was a [bright|warm|golden] light, and " + comes + ".")
    w.say('"{h}, was that you?" asked {f}. {h} [only smiled|nodded].')
    w.maybe(0.6, "the {obj} was gone, but {h} [did not mind|was not sad at all].")
    w.maybe(0.4, '"[You made a good wish|That was very kind]," said {elder}.')
    frame.end(
        w,
        "[the best wish is a wish for someone else|{h} was happy, because {his} friend was happy].",
    )


_PROMISES = (
    (
        "feed the hens",
        "the hens",
        "were hungry and made a lot of noise",
        "gave them corn and fresh water",
        "laid a golden brown egg",
    ),
    (
        "water the flowers",
        "the flowers",
        "were dry and let their heads hang",
        "brought water, again and again",
        "were open and full of color",
    ),
    (
        "watch the sheep",
        "the sheep",
        "were all over the hill",
        "brought them back, one by one",
        "stood safe behind the fence",
    ),
    (
        "close the gate",
        "the ponies",
        "were out on the road",
        "led them back with some carrots",
        "were safe behind the gate",
    ),
    (
        "keep the fire warm",
        "the little chicks",
        "were cold and shaking",
        "brought wood and made a new fire",
        "were warm and fell asleep",
    ),
)


def promise(w: Writer) -> None:
    """The hero plays and forgets a promise; with the friend's help it is made good, and told."""
    task, things, bad, fix, good = w.pick(_PROMISES)
    w.slots |= {"task": task, "things": things, "bad": bad}
    w.slots["game"] = w.pick(("play by the river", "pick berries", "fly a kite", "play ball"))
    frame.start(
        w,
        "{elder} had to go away for the day. {h} promised to {task}.",
        "[sorry|worried]",
        "{he} had promised to {task}, and then {he} forgot",
        where="home",
    )
    w.say(
        "[but then|just then] {his} friend {fx} came by. " + '"Come and {game} with me," said {f}.'
    )
    w.say("{h} went along, and they had so much fun that {h} forgot all about {his} promise.")
    w.say(
        "when the sun was low, {h} suddenly stood still. "
        + '"Oh no! I forgot to {task}!" {he} cried.'
    )
    w.say("{he} ran home as fast as {he} could. {things} {bad}.")
    w.say(
        '"[What have I done?|I am so sorry!]" said {h}. "[I will help you|We can still do '
        'it]," said {f}.'
    )
    w.say("{h} and {f} " + fix + ".")
    w.say("when {elder} came home, {things} " + good + ".")
    w.say(
        "{h} told {elder} [everything|what had happened]. "
        + '"[Next time, do it first|You told me the truth, and that is good]," said {elder}.'
    )
    frame.end(w, "after that, {h} always kept {his} promises.")


_RESCUES = (
    (
        "a little bird with a broken wing",
        "bird",
        "made a bed of soft grass and brought water",
        "flew up into the sky",
    ),
    (
        "a small fish in a drying pond",
        "fish",
        "carried it to the river in a bucket",
        "swam away with a happy jump",
    ),
    (
        "a baby rabbit without its mother",
        "rabbit",
        "kept it warm and gave it fresh leaves",
        "ran to its mother, who was waiting by the trees",
    ),
    (
        "a tired bee on the cold ground",
        "bee",
        "gave it a drop of honey on a spoon",
        "flew off to the flowers",
    ),
    (
        "a young seal on the beach",
        "seal",
        "poured water over it until the sea came back",
        "swam out into the waves",
    ),
    (
        "a butterfly in a spider web",
        "butterfly",
        "took the threads away, very slowly",
        "danced away over the flowers",
    ),
)


def rescue(w: Writer) -> None:
    """The hero nurses a small animal and, though it is dear by now, lets it go."""
    found, animal, care, leaves = w.pick(_RESCUES)
    w.slots |= {"found": found, "animal": animal}
    frame.start(w, "{h} found {found}.", "worried", "{he} had found {found}")
    w.say(
        '"[Poor little thing|Oh, you poor thing]," said {h}. "[I will take care of you|Do '
        'not be afraid]."'
    )
    w.say("{his} friend {fx} came to look. " + '"What should we do?" asked {f}.')
    w.maybe(
        0.6,
        "they asked {elder}. "
        '"[Be gentle|Be calm and quiet]," said {elder}, '
        '"[and it will get better|it is more afraid than you]."',
    )
    w.say("so {h} " + care + ", and {f} [did what {fhe} could|helped too].")
    if animal in ("bird", "rabbit"):
        w.say("[every day|day after day], the {animal} [grew|became a little] stronger.")
    w.say(
        "{h} [wanted to keep it|began to love the little {animal}], but {he} knew that it "
        "[wanted to be free|had its own home]."
    )
    w.say('"Goodbye, little {animal}," said {h}. The {animal} ' + leaves + ".")
    w.maybe(0.5, "{h} was a little sad and very happy at the same time.")
    if w.chance(0.5):
        w.say(
            "the next [spring|morning], {h} saw the {animal} again. "
            + '"[Look, it remembers us|It came back to say hello]!" said {f}.'
        )
    frame.end(w, "[to love someone also means to let go|even a small friend is a friend].")
