"""Plots about things: lost, shared, broken, made as a present, hidden, baked, grown."""

from __future__ import annotations

from . import words
from .words import phrases, rows
from .writer import Writer

_LOST = (words.SMALL, words.WINDY, words.TOYS, words.SHINY, words.FLOATING)
# How one of each gets lost: what happens, where it turns up, why, what is done about it.
_LOSSES = rows("""
    {h} put a {limb} into {his} bag, and {his} {cobj} was gone / in the grass [beside|on] the path /
        there was a hole in the bag, and the {obj} had fallen out /
        That evening, {elder} sewed up the hole, and the {obj} was safe.;
    a strong wind blew {his} {cobj} away / high up in [an apple|an oak|a pine] tree /
        the wind had carried the {obj} into the branches /
        after that, {h} always held the {obj} tight when the wind blew.;
    {h} could not find {his} {cobj} / under a bench {in_place} /
        {h} had left the {obj} there the day before /
        after that, {h} always put the {obj} back in its place.;
    a bird took {his} {cobj} and flew away / in a nest at the top of a tall tree /
        the bird liked everything that shone /
        {h} gave the bird a piece of glass that shone, and the bird never took the {obj} again.;
    {his} {cobj} fell into the river and floated away /
        by the old bridge, caught between two stones /
        the water had carried the {obj} all the way down /
        after that, {h} never played too close to the river.
""")


def lost(w: Writer) -> None:
    """Something is lost; the friend finds it, and the hero sees to it that it stays."""
    things, (what, where, why, lesson) = w.pick(list(zip(_LOST, _LOSSES, strict=True)))
    w.own(things)
    w.slots |= {"what": what, "why": why, "lesson": lesson}
    w.set(where=where)
    w.start("""
        out: {what}.
        sad because [{what}|{he} had lost {his} {cobj}]
    """)
    w.maybe(0.4, "it was a present from {elder}, and {h} loved it very much.")
    w.slots["here"], w.slots["there"] = w.rng.sample(
        ("under the bed", "behind the door", "in the garden", "by the well"), 2
    )
    w.tell("""
        {h} looked {here}[, but it was not there. | and {there}. ]No {obj}.
        50% {h} sat down and [began to cry|sighed].
        "[What is wrong|Why are you so sad]?" asked {his} friend {fx}.
        "I have lost my {obj}," said {h}.
        "[Do not worry|Do not cry]. I will help you [look for it|find it]," said {f}.
        [together, they|the two friends] looked [everywhere|all over the {place}].
        40% they asked {elder}, but {ehe} had not seen the {obj}.
        [at last|then|in the end], {f} [pointed|looked up and shouted|called out].
        "Look, there it is!" The {cobj} was {where}.
        60% {why}.
        "Thank you, {f}!" said {h}, [and gave {fhim} a big hug|full of joy].
    """)
    w.end("{lesson}")


def sharing(w: Writer) -> None:
    """The hero keeps a toy or food to themselves, is lonely with it, and shares it after all."""
    food = w.chance(0.4)
    if food:
        w.slots["obj"] = w.pick(words.FOODS)
        w.set(cobj="basket of {obj}", some="some of the {obj}", use="eat the {obj} all alone")
    else:
        w.own([toy for toy in words.TOYS if toy != "blanket"])
        w.set(some="a turn with the {obj}", use="play with the {obj} all alone")
    w.start("""
        home: {elder} gave {h} a~ {cobj}.
        [happy|excited] because {he} had a~ {cobj}, a present from {elder}
    """)
    w.tell("""
        {his} friend {fx} saw it. "May I have {some}, please?" asked {f}.
        "No," said {h}. "[All of it is mine|I want it for myself]!"
        {f} [walked away with {fhis} head down|went home and felt sad].
        {h} began to {use}. but [it was no fun|something did not feel right].
        there was nobody to [laugh|talk] with, and {h} felt [lonely|bad].
        50% "[Good things are better when you share them|A friend is worth more]," said {elder}.
        {h} thought about it. then {he} [ran|hurried] to {f} with the {obj}.
        "I am sorry, {f}," {he} said. "[You can have some too|Let us share]."
    """)
    if food:
        w.say(
            "they sat down {in_place} and ate the {obj} together. they tasted "
            "[better|sweeter] than before."
        )
    else:
        w.say("they [took turns|played together] with the {obj} until the sun went down.")
    w.end("{h} learned that [sharing makes everything better|it is more fun to share].")


# What is broken, what the hero did, how it came, and how it is mended.
_BREAKS = rows("""
    vase / was [running|dancing] in the house / {he} bumped into the table / glued all the parts;
    window / was playing with a ball outside / {he} threw the ball too hard / put in new glass;
    clock / was jumping on the bed / {he} fell against the wall / put the parts back in place;
    teapot / wanted to help in the kitchen / {he} was in a hurry / glued all the parts;
    fence / was rolling a big barrel down the hill / {he} could not stop it / nailed it together;
    chair / was standing on a chair to look outside / one leg broke / made a new leg of wood
""")


def mistake(w: Writer) -> None:
    """The hero breaks something, hides, owns up, and mends it with the elder."""
    w.draw("obj doing how fix", _BREAKS)
    w.start("""
        home: {h} {doing}. then {how}, and [crash!|bang!] The {obj} was broken.
        [worried|sorry|sad] because {he} had broken the {obj}
    """)
    w.tell("""
        60% it was the {obj} that {elder} [loved most|liked so much].
        {h} was afraid, so {he} hid [behind the door|under the bed|behind a big tree].
        {his} heart was heavy, and {he} could not [play|eat|sleep].
        50% "[Tell the truth|You must say it]," said {his} friend {fx}. "[It will be all right|I \
            will come with you]."
        [at last|in the end], {h} went to {elder}.
        "I broke the {obj}," {he} said [softly|with tears in {his} eyes]. "I am very sorry."
        {elder} was [quiet for a moment|surprised]. then {ehe} [smiled|took {his} {limb}].
        "Thank you for telling me the truth," said {elder}. "[We can fix it together|Come, we will \
            fix it]."
        together they {fix}, and soon the {obj} was [as good as new|almost like new].
        40% {h} promised to be more careful.
    """)
    w.end("{h} learned that [it is best to tell the truth|the truth makes your heart light].")


# What is made, of what, how, and why it suits the friend.
_GIFTS = rows("""
    a~ {color} scarf / wool / knitted all day long / was cold in winter;
    a wooden boat / wood / cut and painted with care / loved the river;
    a~ {color} kite / paper and string / glued the paper to the sticks / loved the wind;
    a picture / paper and paint / painted the whole afternoon / loved {color} flowers;
    a necklace / shells and string / put shell after shell on the string / loved the sea;
    a~ {color} blanket / old cloth / sewed the pieces together / liked to be warm;
    a little lamp / an old jar and a candle / painted stars on the jar / was afraid of the dark
""")


def present(w: Writer) -> None:
    """Without money the hero makes a birthday present that suits the friend."""
    w.draw("gift stuff making because", _GIFTS)
    w.slots["color"] = w.pick(words.COLORS)
    w.slots["obj"] = w.slots["gift"].split()[-1]
    w.start("""
        home: {h} remembered that it was the birthday of {his} friend {fx}. but {h} had no money \
            for a present.
        worried because it was the birthday of {his} friend {fx}, and {he} had no present
    """)
    w.tell("""
        {h} thought and thought. "What does {f} like?" {he} asked {himself}.
        then {he} remembered that {f} {because}.
        "I know! I will make {gift}," said {h}.
        {he} found {stuff} [at home|in an old box]. {elder} [helped a little|showed {him} how to \
            begin].
        {h} {making} until the {obj} was ready.
        50% it was not perfect, but it was made with love.
        at the party, {f} opened the box and [laughed with joy|could not believe it].
        "[What a beautiful {obj}|This is the best present of all]!" said {f}. "Did you make it \
            yourself?"
        "Yes," said {h}, and {he} [felt very proud|smiled].
    """)
    w.end("[the best presents come from the heart|a present made with love is the best present].")


# Who took the things, why, what is given instead, and what was found.
_THIEVES = rows("""
    a tiny hedgehog / was hungry and could not find food / a bowl of food / little footprints;
    a mother mouse / was making a warm bed for her babies / some soft wool / a hole in the wall;
    a young crow / wanted to make his nest pretty / a box of shiny things / a black feather;
    a small kitten / was lost and all alone / a cup of milk and a warm bed / a few white hairs;
    a shy squirrel / was afraid of the long winter / a bag of nuts / some empty shells
""")
_TAKEN = phrases("the bread / a big apple / a sock / a spoon / the cheese / a cookie / a button")


def mystery(w: Writer) -> None:
    """Things vanish from the kitchen; the thief is a small animal in need, and is helped."""
    w.draw("thief reason gift clue", _THIEVES)
    w.slots |= {"small": w.slots["thief"].split()[-1], "obj": w.pick(_TAKEN)}
    w.start("""
        home: {h} saw that {obj} was gone from the kitchen. the next day, something else was gone.
        [curious|puzzled] because every night something was gone from the kitchen
    """)
    w.tell("""
        "Did you take {obj}?" {h} asked {his} friend {fx}. "No, it was not me," said {f}.
        "[Then who was it?|How strange!]" said {h}. "[Let us find out|We must find out]."
        {h} looked at the floor and found {clue}.
        that night, {h} and {f} hid behind [the curtain|the big chair|the door] and waited.
        the house was dark and quiet. then they heard a [soft|small|strange] sound.
        {h} lit the lamp, and there stood {thief}!
        "Please do not be angry," said the {small}. The {small} {reason}.
        {h} was not angry at all. "You only had to ask," {he} said.
        {h} gave the {small} {gift}, and {f} [helped|was happy too].
    """)
    w.end(
        "[now the mystery was solved, and they had a new friend|"
        "after that, nothing was ever missing again, and the {small} came to visit every day].",
    )


# What is missing, who has it, what they want, and what the hero does for them.
_MISSING = rows("""
    butter / the farmer / the farmer needed help with the hay / carried the hay;
    eggs / the hen / the hen wanted some corn / brought her corn;
    flour / the miller / the miller needed help with the heavy bags / carried the bags;
    honey / the bees / the bees wanted more flowers / planted flowers for them;
    milk / the cow / the cow wanted some fresh grass / brought her fresh grass
""")


def baking(w: Writer) -> None:
    """An ingredient is missing; whoever has it wants a favor first. Then all eat."""
    flavor = w.pick(words.FLAVORS)
    w.draw("missing giver favor deed", _MISSING)
    w.set(cake=f"{flavor} [cake|pie]")
    w.slots["obj"] = w.slots["cake"].split()[-1]
    w.slots["guest"] = w.pick(("{elder}", "{f}"))
    w.slots["who"] = "{his} friend {fx}" if w.slots["guest"] == "{f}" else "{elder}"
    w.slots["were"] = "were" if w.slots["missing"] == "eggs" else "was"
    w.start("""
        home: {h} wanted to bake a~ {cake} for {who}.
        [excited|happy] because {he} was going to bake a~ {cake} for {who}
    """)
    w.tell("""
        {he} took out a big bowl and a wooden spoon. but there {were} no {missing}!
        "[Oh no|Oh dear]," said {h}. "I cannot bake a~ {obj} without {missing}."
        so {he} went to {giver} and asked for {missing}. but first, {favor}.
        {h} {deed}, and {giver} gave {him} {missing}.
        50% "Thank you very much," said {h} and [ran|hurried] home.
        {h} mixed everything together and put the {obj} into the oven.
        soon the whole house smelled [sweet|wonderful|of {cake}].
        {guest} came in and [smiled|clapped]. "[How good it smells|What a surprise]!" said {guest}.
        they sat down [at the table|in the garden] and ate the {obj} [until not a crumb was \
            left|together].
    """)
    w.end("{h} [was proud|was happy], because {he} had made the {obj} {himself}.")


def planting(w: Writer) -> None:
    """A seed takes its time; the hero waters it, waits, and is right to."""
    plant = w.slots["obj"] = w.pick(("sunflower", "pumpkin", "apple tree", "rose", "bean"))
    w.start("""
        home: {elder} gave {h} a tiny seed. "Plant it and wait," said {elder}.
        [curious|excited] because {elder} had given {him} a tiny seed
    """)
    w.tell("""
        {h} made a hole in the ground, put in the seed and gave it water.
        the next morning, {he} ran outside to look, but there was nothing to see.
        "Why does it not grow?" asked {h}. "[You must be patient|Good things take time]," said \
            {elder}.
        so {h} [gave the seed water every day|came back every morning with water] and waited.
        50% {his} friend {fx} came by and laughed. "There is nothing there," said {f}. But {h} did \
            not give up.
        [after many days|at last|one rainy morning], a small green leaf came out of the ground!
        {h} jumped for joy. the plant grew and grew, until it was [as tall as {h}|taller than {h}].
        it was a~ {obj}! "[How beautiful|How wonderful]!" said {elder}.
    """)
    if plant in ("pumpkin", "apple tree", "bean"):
        w.say(
            "in the autumn, they [made a big meal|had plenty to eat], and there was enough "
            "for everyone."
        )
    else:
        w.say("the bees came to visit, and the whole garden was full of [color|life].")
    w.end("{h} learned that [it is good to be patient|good things need time and care].")
