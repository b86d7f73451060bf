"""Plots about others and oneself: help, friendship, fear, practice, a contest, bedtime."""

from __future__ import annotations

from . import frame, words
from .writer import Writer

# Trouble a friend is in: (what {h} sees, what does not work, what works, the thanks).
_TROUBLES = (
    (
        "{f} was stuck in the deep mud",
        "{h} pulled and pulled, but the mud was too strong",
        "{h} found a long branch, and {f} held on to it until {fhe} was free",
        "clean and dry again",
    ),
    (
        "{f} had hurt {fhis} {flimb} and could not walk",
        "{h} tried to carry {fhim}, but {f} was too heavy",
        "{h} made a little cart from an old box and pulled {f} all the way home",
        "safe at home",
    ),
    (
        "{f} had lost the way home",
        "{h} did not know the way, for all the trees looked the same",
        "they followed the river, step by step, until they saw the lights of the village",
        "back home",
    ),
    (
        "{f} was cold and had nothing warm to wear",
        "{h} made a small fire, but the wind blew it out",
        "{h} took off {his} warm coat and put it around {f}",
        "warm again",
    ),
    (
        "{f} was sitting high in a tree and could not come down",
        "{h} stretched as far as {he} could, but {he} was too small",
        "{h} fetched a ladder, and {f} climbed down slowly",
        "safe on the ground",
    ),
    (
        "{f} was carrying a heavy bag up the hill",
        "{h} pushed from behind, but the bag was too heavy",
        "{h} took half of the things, and together they carried everything to the top",
        "at the top of the hill",
    ),
    (
        "{f} was caught in an old net",
        "{h} pulled at the net, but it only got tighter",
        "{h} [bit|cut] through the strings one by one until {f} was free",
        "free at last",
    ),
)


def helping(w: Writer) -> None:
    """The friend is in trouble; a first attempt fails, a second one works."""
    trouble, failed, solved, safe = w.pick(_TROUBLES)
    frame.start(
        w,
        '{h} heard someone call, "[Help! Help!|Please help me!]"',
        "worried",
        "{he} heard someone [cry|call for help] {in_place}",
    )
    w.say("{he} ran [as fast as {he} could|quickly] to see who it was. it was {fx}.")
    w.say(trouble + ".")
    w.say('"[Do not be afraid|Wait], I will help you," said {h}.')
    w.say(failed + ".")
    w.maybe(0.6, "{h} stopped and thought for a moment. " + '"I have an idea!" {he} said.')
    w.say("[then|so] " + solved + ".")
    w.say(
        '"Thank you, {h}!" said {f}, who was '
        + safe
        + ". "
        + '"[You are a true friend|I will not forget this]."'
    )
    if w.chance(0.5):
        w.say("a few days later, {h} was [sick|ill] and had to stay in bed.")
        w.say(
            "{f} came with [soup and flowers|a cup of tea and a book]. "
            + '"Now I can help you," said {f}.'
        )
    frame.end(
        w, "[a good friend helps when it is needed|when you help others, they will help you too]."
    )


def new_friend(w: Writer) -> None:
    """A lonely and shy hero says hello to somebody who plays alone."""
    w.own([*words.TOYS, "kite", "boat"])
    frame.start(
        w,
        "{h} was all alone {in_place}.",
        "[sad|lonely]",
        "{he} had nobody to play with",
    )
    w.maybe(0.5, "{he} had just come to live there and did not know anyone.")
    w.say("{h} wished for a friend.")
    w.say("[then|just then], {he} saw {fx}, who was playing with a~ {cobj}.")
    w.say("{h} wanted to say hello, but {he} was too shy.")
    w.maybe(0.5, '"[Be brave|Just say hello]," {elder} had told {him}.')
    w.say("{h} took a deep breath and walked closer. " + '"Hello, I am {h}," {he} said.')
    w.say(
        '"Hello! My name is {f}," said {f}. "[Do you want to play with me|Would you like to play]?"'
    )
    w.say('"Yes, please!" said {h}, and {his} [face lit up|heart jumped].')
    w.say("they played with the {obj} [all afternoon|until it was dark].")
    w.maybe(0.6, "{f} loved to {like}, and so did {h}.")
    w.say('"Will you come back tomorrow?" asked {f}. "Of course," said {h}.')
    frame.end(w, "{h} was not lonely any more, because now {he} had a friend.")


_FEARS = (
    (
        "the dark",
        "turned off the lamp",
        "the dark is only the world closing its eyes",
        "looked at the stars",
        "the night was full of stars",
    ),
    (
        "the thunder",
        "heard a loud bang in the sky",
        "thunder is only the clouds clapping",
        "counted after each flash",
        "the storm moved far away",
    ),
    (
        "the water",
        "saw the deep lake",
        "the water will carry you if you are calm",
        "put in one foot, and then the other",
        "{he} was swimming",
    ),
    (
        "high places",
        "stood at the bottom of the ladder",
        "just look up and take one small step",
        "climbed one step, and then another",
        "{he} was at the top",
    ),
    (
        "the big dog next door",
        "heard the dog bark",
        "he only wants to play",
        "held out a {limb}, very slowly",
        "the dog wagged his tail",
    ),
    (
        "the first day of school",
        "stood in front of the school",
        "everyone is new on the first day",
        "walked in and sat down next to {f}",
        "the whole class was singing",
    ),
    (
        "the old bridge",
        "stood in front of the bridge",
        "hold on and do not look down",
        "took one step, and then another",
        "{he} was on the other side",
    ),
)


def fear(w: Writer) -> None:
    """What the elder says, and the friend at hand, help the hero face a fear in small steps."""
    what, when, words_of_elder, does, then = w.pick(_FEARS)
    w.set(obj=what, does=does, then=then)
    frame.start(
        w,
        "{h} " + when + " and began to shake. {he} was afraid of {obj}.",
        "[afraid|scared]",
        "{he} " + when,
        where="home",
    )
    w.say("{h} wanted to [run away|hide]. " + '"I cannot do it," {he} said.')
    w.say(
        f'{{elder}} took {{him}} by the {{limb}}. "[Do not be afraid|Listen]," {{ehe}} said, '
        f'"{words_of_elder}."'
    )
    w.say('"I will stay with you," said {his} friend {fx}.')
    w.say("{h} closed {his} eyes for a moment and [took a deep breath|counted to three].")
    w.say("then {he} {does}. {his} heart beat fast, but {he} did not stop.")
    w.say("[soon|after a while], {then}, and {h} began to [laugh|smile].")
    w.say('"[Look at me! I did it|I am not afraid any more]!" said {h}.')
    w.maybe(0.6, '"[I knew you could do it|I am proud of you]," said {elder}.')
    w.maybe(0.4, "the next time, it was {h} who helped someone who was afraid of {obj}.")
    frame.end(
        w,
        "{h} learned that being brave means to [try even when you are afraid|take one small step].",
    )


_SKILLS = (
    (
        "ride a bike",
        "fell into the grass",
        "look ahead and not at your feet",
        "rode all the way down the road",
    ),
    ("swim", "swallowed some water", "move your legs like a frog", "swam across the pond"),
    ("whistle", "only blew air", "make your mouth round and small", "whistled a whole song"),
    (
        "skate on the ice",
        "fell on the cold ice",
        "bend your knees a little",
        "skated in a big circle",
    ),
    ("play the drum", "lost the beat", "listen first and then play", "played a whole song"),
    ("catch a ball", "dropped the ball", "keep your eyes on the ball", "caught the ball ten times"),
    (
        "write {his} name",
        "made all the letters too big",
        "go slowly, one letter at a time",
        "wrote {his} name on the wall",
    ),
    (
        "tie a knot",
        "got the string all mixed up",
        "make a loop and pull it through",
        "tied the knot with {his} eyes closed",
    ),
)


def practice(w: Writer) -> None:
    """The hero fails at a skill, gets advice, practises, and succeeds."""
    skill, fails, advice, success = w.pick(_SKILLS)
    w.set(skill=skill, mine=skill.replace("{his}", "my"), fails=fails, success=success)
    frame.start(
        w,
        "{h} [wanted to|decided to] learn to {skill}.",
        "[sad|angry]",
        "{he} could not {skill}",
        where="home",
    )
    w.maybe(0.5, "{his} friend {fx} could do it so well!")
    w.say("{h} tried, but {he} {fails}. {he} tried again, and again {he} {fails}.")
    w.say('"I will never learn to {mine}," said {h}[ and sat down| with tears in {his} eyes].')
    w.say(
        '{elder} [smiled|came closer]. "'
        + f"[Here is a secret|Try this]: {advice},"
        + '" said {elder}.'
    )
    w.say("so {h} got up and tried once more. it was a little better!")
    w.say(
        "[every day after that|all week long], {h} practiced[ in the morning and in the "
        "evening|, even in the rain]."
    )
    w.say("and one day, {h} {success}!")
    w.say('"[You did it|Well done], {h}!" shouted {f}.')
    w.say('"I only had to [keep trying|try one more time]," said {h} [proudly|with a big smile].')
    frame.end(w, "{h} learned that [nobody can do everything at first|you should never give up].")


_CONTESTS = (
    (
        "race",
        "run",
        "ran around the field every morning",
        "had fallen over a root",
        "stopped to help",
    ),
    (
        "boat race",
        "sail {his} little boat",
        "built a little boat and tried it on the pond",
        "had lost the sail of {fhis} boat",
        "gave {fhim} a new sail",
    ),
    (
        "song contest",
        "sing",
        "sang the same song every evening",
        "had forgotten the words",
        "sang the words softly to help",
    ),
    (
        "painting contest",
        "paint",
        "painted a picture every day",
        "had no more paint",
        "gave {fhim} half of the colors",
    ),
    (
        "kite contest",
        "fly {his} kite",
        "flew the kite in the wind every day",
        "had lost {fhis} kite in a tree",
        "climbed up to help",
    ),
    (
        "cake contest",
        "bake",
        "baked a little cake every day",
        "had dropped the eggs",
        "gave {fhim} two eggs",
    ),
)


def contest(w: Writer) -> None:
    """The hero gives up the lead to help the friend; half of the time they win together."""
    event, verb, training, trouble, deed = w.pick(_CONTESTS)
    w.set(event=event, verb=verb, trouble=trouble, deed=deed)
    w.slots["prize"] = w.pick(("a golden cup", "a big cake", "a silver bell", "a basket of apples"))
    frame.start(
        w,
        "{h} heard about the big {event}. the prize was {prize}.",
        "excited",
        "there was going to be a big {event}, and the prize was {prize}",
        where="home",
    )
    w.say(
        '"I want to win," said {h}. {he} [wanted to {verb} better than anyone|could already '
        "{verb} quite well]."
    )
    w.say("so {h} " + training + ".")
    w.say("on the day of the {event}, everyone came to watch. {fx} was there too.")
    w.say("{h} was doing very well. then {he} saw that {f} {trouble}.")
    w.say("{h} [wanted to win so much|thought of the prize]. but {f} looked so [sad|unhappy].")
    w.say("so {h} {deed}. " + '"Thank you," said {f}.')
    if w.chance(0.5):
        w.say("because of this, {h} did not win. but when it was over, everyone clapped for {him}.")
        w.say(
            "{elder} gave {h} a flower. "
            + '"[You have the kindest heart|You won something better]," {ehe} said.'
        )
    else:
        w.say("in the end, they both did so well that they won together!")
        w.say('"We will share the prize," said {h}, and {f} [laughed|danced with joy].')
    frame.end(w, "{h} learned that [being kind is better than winning|a friend is the best prize].")


_SLEEP = (
    ("the moon was too bright", "closed the curtain", "the room was soft and dark"),
    ("the wind made strange sounds", "closed the window", "the sounds were gone"),
    ("{his} feet were cold", "brought a warm blanket", "{his} feet were warm"),
    (
        "{he} was thinking of tomorrow",
        "sat down beside {him} and sang a soft song",
        "{his} thoughts became quiet",
    ),
    ("{he} was hungry", "brought a cup of warm milk and some bread", "{his} belly was full"),
    (
        "{he} had had a bad dream",
        "held {his} {limb} and told {him} a story",
        "the bad dream was forgotten",
    ),
)


def bedtime(w: Writer) -> None:
    """The hero cannot sleep until the elder finds out why and does something about it."""
    why, help_, then = w.pick(_SLEEP)
    w.set(why=why)
    frame.start(
        w,
        "{h} went to bed, but {he} could not sleep.",
        "tired",
        "{he} could not sleep",
        where="night",
    )
    w.maybe(0.6, "{he} turned to the left, and {he} turned to the right.")
    first = w.rng.sample(
        ("count sheep", "sing a song", "think of {f}", "close {his} eyes very tight"), 2
    )
    w.say(
        f"{{h}} tried to {first[0]}, but it did not help. {{he}} tried to {first[1]}, but "
        f"that did not help."
    )
    w.say('"Why are you still awake?" asked {elder}.')
    w.say('"I cannot sleep," said {h}. It was because {why}.')
    w.say("{elder} " + help_ + ".")
    w.say("[soon|after a while], " + then + ". {h} [yawned|felt calm and safe].")
    w.maybe(0.6, '"Good night, {h}," said {elder}. "Good night," [whispered|said] {h}.')
    w.maybe(0.6, "outside, the [stars|moon and the stars] were shining over the {place}.")
    w.say("and before {elder} was out of the door, {h} was [asleep|fast asleep].")
    w.maybe(
        0.5, "{he} dreamed of {f} and of all the things they would do [tomorrow|in the morning]."
    )
    w.maybe(0.2, "The end.")
