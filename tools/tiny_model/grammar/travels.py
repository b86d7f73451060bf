"""Plots about the world outside: weather, a journey, building something together."""

from __future__ import annotations

from .words import phrases, rows
from .writer import Writer

# How it comes, gets worse and ends, and what the friends do then.
_WEATHER = rows("""
    a thick fog came, and nobody could see the path / everything was white and quiet /
        the fog was gone and the sun was warm / sat in the warm sun;
    dark clouds came, and it began to rain / the water came higher and higher /
        a big rainbow stood in the sky / jumped in the puddles;
    it began to snow, and everything turned white / soon the path could not be seen /
        the sun came out and the snow shone / built a big snowman;
    there was thunder, and the sky turned black / the rain beat on the leaves /
        the sky was blue again / danced on the wet grass;
    a storm came, and the trees began to bend / leaves and branches flew through the air /
        the wind was gone and the air was still / picked up the branches
""")
_SHELTERS = phrases(
    "a hollow tree / a small cave / an old barn / an empty hut / a little stone house"
)


def weather(w: Writer) -> None:
    """Bad weather catches both friends far from home; they sit it out together."""
    w.draw("comes worse after play", _WEATHER)
    w.slots["shelter"] = w.pick(_SHELTERS)
    w.slots["inside"] = w.slots["shelter"].split()[-1]
    w.start("""
        home: {h} and {his} friend {fx} went for a long walk.
        [worried|cold] because {he} was far from home with {his} friend {fx}
    """)
    w.tell("""
        [suddenly|then], {comes}.
        "[We must find a dry place!|Where can we go?]" said {f}. {worse}.
        60% "[Take my {limb}|Stay close to me]," said {h}. "[We will be all right|I will not let \
            go]."
        they [ran|walked] on until {h} saw {shelter}.
        inside the {inside} it was dry. they sat close together to keep warm.
        60% {h} had [a piece of bread|an apple|a cookie] in {his} bag, and they shared it.
        [to forget the cold|to pass the time], {f} [told a funny story|sang a song], and {h} \
            laughed.
        [after an hour|at last|in the evening], {after}.
        the two friends went outside and {play}.
        when they came home, {elder} was [waiting at the door|so glad to see them]. "[There you \
            are|I was so worried]!" said {elder}.
    """)
    w.end("[with a friend, no storm is too bad|a friend makes you warm, even when it is cold].")


# Where to, what is there, and what is brought home.
_GOALS = rows("""
    the sea / the water was blue and went on for ever / a white shell;
    the top of the mountain / {he} could see the whole world below / a small gray stone;
    the big city / there were lights and people everywhere / a picture of a tower;
    the end of the river / the river ran into a wide blue lake / a smooth stone;
    the house of {his} cousin / {his} cousin was standing at the door / a jar of honey;
    the field where the flowers grow / there were flowers as far as {he} could see / a yellow flower
""")
# What the elder gives along, who needs it, and what is done with it.
_MEETINGS = rows("""
    blanket / a lamb who was shaking with cold / put the blanket around the lamb / lamb;
    bread / a duck who had not eaten all day /
        broke the bread in two and gave half to the duck / duck;
    lamp / a mole who had lost a shoe in a dark cave / lit the lamp and found the shoe / mole;
    rope / a goat who had fallen into a hole / let down the rope and pulled the goat out / goat;
    string / a donkey whose heavy bag was open / tied the bag with the string / donkey;
    umbrella / a mouse who was sitting in the rain / held the umbrella over the mouse / mouse
""")


def journey(w: Writer) -> None:
    """On the way to a place of wonder the hero helps an animal, which then shows a short way."""
    w.draw("goal sight keepsake", _GOALS)
    w.draw("item other deed animal", _MEETINGS)
    w.start("""
        home: {h} wanted to see {goal}.
        [excited|curious] because {he} was going to see {goal} for the first time
    """)
    w.tell("""
        {he} [packed a small bag|put a few things into a bag]. "Take this {item} with you," said \
            {elder}. "[You may need it|It may help you]."
        {h} said goodbye and [set off|began to walk]. {he} walked [past the fields|through the \
            {place}] and [over a bridge|up a hill].
        on the way, {he} met {other}.
        "[Please help me!|Can you help me?]" said the {animal}. {h} remembered the {item}.
        {he} {deed}. "[Thank you|You are so kind]!" said the {animal}.
        "Where are you going?" asked the {animal}. "I want to see {goal}," said {h}.
        "I know a short way," said the {animal}, and they [went on together|walked side by side].
        50% they slept under the stars and [talked|laughed] until late.
        [the next day|at last|in the evening], they were there. {sight}.
        "[It is even more beautiful than I thought|How wonderful]," [said|whispered] {h}.
        {h} took home {keepsake} and gave it to {elder}.
    """)
    w.end("{h} learned that [the way is better with a friend|it is good to help on the way].")


# What, why, how it fails, how it is mended, and what it is good for.
_BUILDS = rows("""
    bridge over the stream / could not cross the stream / fell into the water /
        put big stones under it / walked across it;
    tree house / had no place to play / was crooked and fell down /
        tied the boards with a strong rope / climbed up into it;
    boat / could not reach the island / let the water in / filled the holes with wax /
        sailed to the island in it;
    snow house / wanted to play in the snow / fell in on one side / made the walls thicker /
        sat inside it with a candle;
    house for the birds / wanted to help the birds in winter / fell from the tree /
        used longer nails / watched the birds move into it;
    swing / had nothing to play with / broke at once / took a stronger rope /
        flew high into the air with it
""")


def building(w: Writer) -> None:
    """What the two build fails; they quarrel, make up, and build it again, better."""
    w.draw("what why fails fix use", _BUILDS)
    w.slots["obj"] = w.slots["what"].split(" over ")[0].split(" for ")[0]
    w.start("""
        home: {h} and {his} friend {fx} {why}. "Let us build a {what}," said {h}.
        [busy|happy] because {he} was building a {what} with {his} friend {fx}
    """)
    w.tell("""
        they [looked for wood and rope|brought everything they needed] and [worked all day|began \
            to work].
        {h} [carried the heavy things|held everything in place], and {f} [had the ideas|used the \
            hammer].
        but when they tried the {obj}, it {fails}.
        "It is your fault!" said {f}. "No, it is yours!" said {h}. [for a while, they did not \
            speak|they were both angry].
        then {h} [looked at {f} and began to laugh|said that {he} was sorry]. {f} \
            [laughed|smiled] too.
        50% they asked {elder}, and {ehe} [gave them good advice|showed them how to do it better].
        this time they {fix}.
        the {obj} was strong, and it did not break. they {use}.
        "[We did it|Together we can do anything]!" [they shouted|said {f}].
    """)
    w.end("[two heads are better than one|working together is better than fighting].")
