"""Plots about doing right: a wish, a promise, a rescue."""

from __future__ import annotations

from .words import phrases, rows
from .writer import Writer

_MAGIC = phrases(
    "an old lamp / a small golden fish / a shiny stone / a silver feather / a strange key"
)
# Of the friend: what is wrong, what the hero wishes, and what comes of it.
_NEEDS = rows("""
    was ill and had to stay in bed / {f} could be well again / {f} jumped out of bed;
    had lost {fhis} home in the storm / {f} could have a new home /
        there stood a little house with a green door;
    could not hear the birds sing / {f} could hear again / {f} heard the birds for the first time;
    had not seen {fhis} mother for a long time / {f} could see {fhis} mother /
        the door opened, and there was the mother of {f};
    had nothing to eat / {f} would never be hungry / the table was full of good things
""")


def wish(w: Writer) -> None:
    """A magic thing grants one wish, and the hero spends it on the friend's need."""
    w.draw("need wished comes", _NEEDS)
    w.slots["magic"] = w.pick(_MAGIC)
    w.slots["obj"] = w.slots["magic"].split()[-1]
    w.start("""
        out: {h} found {magic} {in_place}.
        [surprised|happy] because {he} had found {magic}
    """)
    w.tell("""
        "[I am magic|Do not be afraid]," said the {obj}. "You have one wish. [Think well|Use it \
            well]."
        {h} [could not believe it|was so surprised that {he} sat down]. One wish!
        {he} thought of [a castle|a big boat|a room full of toys]. {he} thought of [a hundred \
            cakes|a bag of gold].
        on the way home, {h} [met|saw] {his} friend {fx}. {f} {need}.
        {h} [looked at the {obj} and was quiet for a long time|held the {obj} and thought again].
        then {he} knew what to do. "I wish that {wished}," said {h}.
        there was a [bright|warm|golden] light, and {comes}.
        "{h}, was that you?" asked {f}. {h} [only smiled|nodded].
        60% the {obj} was gone, but {h} [did not mind|was not sad at all].
        40% "[You made a good wish|That was very kind]," said {elder}.
    """)
    w.end(
        "[the best wish is a wish for someone else|{h} was happy, because {his} friend was happy].",
    )


# What is promised, and of what it is about: which things, how it goes wrong, what helps, the end.
_PROMISES = rows("""
    feed the hens / the hens / were hungry and made a lot of noise /
        gave them corn and fresh water / laid a golden brown egg;
    water the flowers / the flowers / were dry and let their heads hang /
        brought water, again and again / were open and full of color;
    watch the sheep / the sheep / were all over the hill / brought them back, one by one /
        stood safe behind the fence;
    close the gate / the ponies / were out on the road / led them back with some carrots /
        were safe behind the gate;
    keep the fire warm / the little chicks / were cold and shaking /
        brought wood and made a new fire / were warm and fell asleep
""")


def promise(w: Writer) -> None:
    """The hero plays and forgets a promise; with the friend's help it is made good, and told."""
    w.draw("task things bad fix good", _PROMISES)
    w.slots["game"] = w.pick(("play by the river", "pick berries", "fly a kite", "play ball"))
    w.start("""
        home: {elder} had to go away for the day. {h} promised to {task}.
        [sorry|worried] because {he} had promised to {task}, and then {he} forgot
    """)
    w.tell("""
        [but then|just then] {his} friend {fx} came by. "Come and {game} with me," said {f}.
        {h} went along, and they had so much fun that {h} forgot all about {his} promise.
        when the sun was low, {h} suddenly stood still. "Oh no! I forgot to {task}!" {he} cried.
        {he} ran home as fast as {he} could. {things} {bad}.
        "[What have I done?|I am so sorry!]" said {h}. "[I will help you|We can still do it]," \
            said {f}.
        {h} and {f} {fix}.
        when {elder} came home, {things} {good}.
        {h} told {elder} [everything|what had happened]. "[Next time, do it first|You told me the \
            truth, and that is good]," said {elder}.
    """)
    w.end("after that, {h} always kept {his} promises.")


# Who is found, which animal that is, what helps, and how it leaves.
_RESCUES = rows("""
    a little bird with a broken wing / bird / made a bed of soft grass and brought water /
        flew up into the sky;
    a small fish in a drying pond / fish / carried it to the river in a bucket /
        swam away with a happy jump;
    a baby rabbit without its mother / rabbit / kept it warm and gave it fresh leaves /
        ran to its mother, who was waiting by the trees;
    a tired bee on the cold ground / bee / gave it a drop of honey on a spoon /
        flew off to the flowers;
    a young seal on the beach / seal / poured water over it until the sea came back /
        swam out into the waves;
    a butterfly in a spider web / butterfly / took the threads away, very slowly /
        danced away over the flowers
""")


def rescue(w: Writer) -> None:
    """The hero nurses a small animal and, though it is dear by now, lets it go."""
    w.draw("found animal care leaves", _RESCUES)
    w.start("""
        out: {h} found {found}.
        worried because {he} had found {found}
    """)
    w.tell("""
        "[Poor little thing|Oh, you poor thing]," said {h}. "[I will take care of you|Do not be \
            afraid]."
        {his} friend {fx} came to look. "What should we do?" asked {f}.
        60% they asked {elder}. "[Be gentle|Be calm and quiet]," said {elder}, "[and it will get \
            better|it is more afraid than you]."
        so {h} {care}, and {f} [did what {fhe} could|helped too].
    """)
    if w.slots["animal"] in ("bird", "rabbit"):
        w.say("[every day|day after day], the {animal} [grew|became a little] stronger.")
    w.tell("""
        {h} [wanted to keep it|began to love the little {animal}], but {he} knew that it [wanted \
            to be free|had its own home].
        "Goodbye, little {animal}," said {h}. The {animal} {leaves}.
        50% {h} was a little sad and very happy at the same time.
        50% the next [spring|morning], {h} saw the {animal} again. "[Look, it remembers us|It came \
            back to say hello]!" said {f}.
    """)
    w.end("[to love someone also means to let go|even a small friend is a friend].")
