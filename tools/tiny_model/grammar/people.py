"""Plots about others and oneself: help, friendship, fear, practice, a contest, bedtime."""

from __future__ import annotations

from . import words
from .words import rows
from .writer import Writer

# Trouble a friend is in: what {h} sees, what does not work, what works, the thanks.
_TROUBLES = rows("""
    {f} was stuck in the deep mud / {h} pulled and pulled, but the mud was too strong /
        {h} found a long branch, and {f} held on to it until {fhe} was free / clean and dry again;
    {f} had hurt {fhis} {flimb} and could not walk /
        {h} tried to carry {fhim}, but {f} was too heavy /
        {h} made a little cart from an old box and pulled {f} all the way home / safe at home;
    {f} had lost the way home / {h} did not know the way, for all the trees looked the same /
        they followed the river, step by step, until they saw the lights of the village / back home;
    {f} was cold and had nothing warm to wear / {h} made a small fire, but the wind blew it out /
        {h} took off {his} warm coat and put it around {f} / warm again;
    {f} was sitting high in a tree and could not come down /
        {h} stretched as far as {he} could, but {he} was too small /
        {h} fetched a ladder, and {f} climbed down slowly / safe on the ground;
    {f} was carrying a heavy bag up the hill / {h} pushed from behind, but the bag was too heavy /
        {h} took half of the things, and together they carried everything to the top /
        at the top of the hill;
    {f} was caught in an old net / {h} pulled at the net, but it only got tighter /
        {h} [bit|cut] through the strings one by one until {f} was free / free at last
""")


def helping(w: Writer) -> None:
    """The friend is in trouble; a first attempt fails, a second one works."""
    w.draw("trouble failed solved safe", _TROUBLES)
    w.start("""
        out: {h} heard someone call, "[Help! Help!|Please help me!]"
        worried because {he} heard someone [cry|call for help] {in_place}
    """)
    w.tell("""
        {he} ran [as fast as {he} could|quickly] to see who it was. it was {fx}.
        {trouble}.
        "[Do not be afraid|Wait], I will help you," said {h}.
        {failed}.
        60% {h} stopped and thought for a moment. "I have an idea!" {he} said.
        [then|so] {solved}.
        "Thank you, {h}!" said {f}, who was {safe}. "[You are a true friend|I will not forget \
            this]."
    """)
    if w.chance(0.5):
        w.tell("""
            a few days later, {h} was [sick|ill] and had to stay in bed.
            {f} came with [soup and flowers|a cup of tea and a book]. "Now I can help you," \
                said {f}.
        """)
    w.end("[a good friend helps when it is needed|when you help others, they will help you too].")


def new_friend(w: Writer) -> None:
    """A lonely and shy hero says hello to somebody who plays alone."""
    w.own([*words.TOYS, "kite", "boat"])
    w.start("""
        out: {h} was all alone {in_place}.
        [sad|lonely] because {he} had nobody to play with
    """)
    w.tell("""
        50% {he} had just come to live there and did not know anyone.
        {h} wished for a friend.
        [then|just then], {he} saw {fx}, who was playing with a~ {cobj}.
        {h} wanted to say hello, but {he} was too shy.
        50% "[Be brave|Just say hello]," {elder} had told {him}.
        {h} took a deep breath and walked closer. "Hello, I am {h}," {he} said.
        "Hello! My name is {f}," said {f}. "[Do you want to play with me|Would you like to play]?"
        "Yes, please!" said {h}, and {his} [face lit up|heart jumped].
        they played with the {obj} [all afternoon|until it was dark].
        60% {f} loved to {like}, and so did {h}.
        "Will you come back tomorrow?" asked {f}. "Of course," said {h}.
    """)
    w.end("{h} was not lonely any more, because now {he} had a friend.")


# Of what, when, what the elder says, what the hero does, and how it goes on.
_FEARS = rows("""
    the dark / turned off the lamp / the dark is only the world closing its eyes /
        looked at the stars / the night was full of stars;
    the thunder / heard a loud bang in the sky / thunder is only the clouds clapping /
        counted after each flash / the storm moved far away;
    the water / saw the deep lake / the water will carry you if you are calm /
        put in one foot, and then the other / {he} was swimming;
    high places / stood at the bottom of the ladder / just look up and take one small step /
        climbed one step, and then another / {he} was at the top;
    the big dog next door / heard the dog bark / he only wants to play /
        held out a {limb}, very slowly / the dog wagged his tail;
    the first day of school / stood in front of the school / everyone is new on the first day /
        walked in and sat down next to {f} / the whole class was singing;
    the old bridge / stood in front of the bridge / hold on and do not look down /
        took one step, and then another / {he} was on the other side
""")


def fear(w: Writer) -> None:
    """What the elder says, and the friend at hand, help the hero face a fear in small steps."""
    w.draw("obj when advice does then", _FEARS)
    w.start("""
        home: {h} {when} and began to shake. {he} was afraid of {obj}.
        [afraid|scared] because {he} {when}
    """)
    w.tell("""
        {h} wanted to [run away|hide]. "I cannot do it," {he} said.
        {elder} took {him} by the {limb}. "[Do not be afraid|Listen]," {ehe} said, "{advice}."
        "I will stay with you," said {his} friend {fx}.
        {h} closed {his} eyes for a moment and [took a deep breath|counted to three].
        then {he} {does}. {his} heart beat fast, but {he} did not stop.
        [soon|after a while], {then}, and {h} began to [laugh|smile].
        "[Look at me! I did it|I am not afraid any more]!" said {h}.
        60% "[I knew you could do it|I am proud of you]," said {elder}.
        40% the next time, it was {h} who helped someone who was afraid of {obj}.
    """)
    w.end(
        "{h} learned that being brave means to [try even when you are afraid|take one small step].",
    )


# What is learned, how it fails, what the elder says, and how it works.
_SKILLS = rows("""
    ride a bike / fell into the grass / look ahead and not at your feet /
        rode all the way down the road;
    swim / swallowed some water / move your legs like a frog / swam across the pond;
    whistle / only blew air / make your mouth round and small / whistled a whole song;
    skate on the ice / fell on the cold ice / bend your knees a little / skated in a big circle;
    play the drum / lost the beat / listen first and then play / played a whole song;
    catch a ball / dropped the ball / keep your eyes on the ball / caught the ball ten times;
    write {his} name / made all the letters too big / go slowly, one letter at a time /
        wrote {his} name on the wall;
    tie a knot / got the string all mixed up / make a loop and pull it through /
        tied the knot with {his} eyes closed
""")


def practice(w: Writer) -> None:
    """The hero fails at a skill, gets advice, practises, and succeeds."""
    w.draw("skill fails advice success", _SKILLS)
    w.slots["mine"] = w.slots["skill"].replace("{his}", "my")
    w.start("""
        home: {h} [wanted to|decided to] learn to {skill}.
        [sad|angry] because {he} could not {skill}
    """)
    w.tell("""
        50% {his} friend {fx} could do it so well!
        {h} tried, but {he} {fails}. {he} tried again, and again {he} {fails}.
        "I will never learn to {mine}," said {h}[ and sat down| with tears in {his} eyes].
        {elder} [smiled|came closer]. "[Here is a secret|Try this]: {advice}," said {elder}.
        so {h} got up and tried once more. it was a little better!
        [every day after that|all week long], {h} practiced[ in the morning and in the evening|, \
            even in the rain].
        and one day, {h} {success}!
        "[You did it|Well done], {h}!" shouted {f}.
        "I only had to [keep trying|try one more time]," said {h} [proudly|with a big smile].
    """)
    w.end("{h} learned that [nobody can do everything at first|you should never give up].")


# What it is, what one does there, the training, the friend's trouble, and what the hero does then.
_CONTESTS = rows("""
    race / run / ran around the field every morning / had fallen over a root / stopped to help;
    boat race / sail {his} little boat / built a little boat and tried it on the pond /
        had lost the sail of {fhis} boat / gave {fhim} a new sail;
    song contest / sing / sang the same song every evening / had forgotten the words /
        sang the words softly to help;
    painting contest / paint / painted a picture every day / had no more paint /
        gave {fhim} half of the colors;
    kite contest / fly {his} kite / flew the kite in the wind every day /
        had lost {fhis} kite in a tree / climbed up to help;
    cake contest / bake / baked a little cake every day / had dropped the eggs /
        gave {fhim} two eggs
""")


def contest(w: Writer) -> None:
    """The hero gives up the lead to help the friend; half of the time they win together."""
    w.draw("event verb training trouble deed", _CONTESTS)
    w.slots["prize"] = w.pick(("a golden cup", "a big cake", "a silver bell", "a basket of apples"))
    w.start("""
        home: {h} heard about the big {event}. the prize was {prize}.
        excited because there was going to be a big {event}, and the prize was {prize}
    """)
    w.tell("""
        "I want to win," said {h}. {he} [wanted to {verb} better than anyone|could already {verb} \
            quite well].
        so {h} {training}.
        on the day of the {event}, everyone came to watch. {fx} was there too.
        {h} was doing very well. then {he} saw that {f} {trouble}.
        {h} [wanted to win so much|thought of the prize]. but {f} looked so [sad|unhappy].
        so {h} {deed}. "Thank you," said {f}.
    """)
    if w.chance(0.5):
        w.tell("""
            because of this, {h} did not win. but when it was over, everyone clapped for {him}.
            {elder} gave {h} a flower. "[You have the kindest heart|You won something better]," \
                {ehe} said.
        """)
    else:
        w.tell("""
            in the end, they both did so well that they won together!
            "We will share the prize," said {h}, and {f} [laughed|danced with joy].
        """)
    w.end("{h} learned that [being kind is better than winning|a friend is the best prize].")


# Why the hero cannot sleep, what the elder does, and what comes of it.
_SLEEP = rows("""
    the moon was too bright / closed the curtain / the room was soft and dark;
    the wind made strange sounds / closed the window / the sounds were gone;
    {his} feet were cold / brought a warm blanket / {his} feet were warm;
    {he} was thinking of tomorrow / sat down beside {him} and sang a soft song /
        {his} thoughts became quiet;
    {he} was hungry / brought a cup of warm milk and some bread / {his} belly was full;
    {he} had had a bad dream / held {his} {limb} and told {him} a story /
        the bad dream was forgotten
""")


def bedtime(w: Writer) -> None:
    """The hero cannot sleep until the elder finds out why and does something about it."""
    w.draw("why help then", _SLEEP)
    w.start("""
        night: {h} went to bed, but {he} could not sleep.
        tired because {he} could not sleep
    """)
    w.maybe(0.6, "{he} turned to the left, and {he} turned to the right.")
    w.slots["one"], w.slots["other"] = w.rng.sample(
        ("count sheep", "sing a song", "think of {f}", "close {his} eyes very tight"), 2
    )
    w.tell("""
        {h} tried to {one}, but it did not help. {he} tried to {other}, but that did not help.
        "Why are you still awake?" asked {elder}.
        "I cannot sleep," said {h}. It was because {why}.
        {elder} {help}.
        [soon|after a while], {then}. {h} [yawned|felt calm and safe].
        60% "Good night, {h}," said {elder}. "Good night," [whispered|said] {h}.
        60% outside, the [stars|moon and the stars] were shining over the {place}.
        and before {elder} was out of the door, {h} was [asleep|fast asleep].
        50% {he} dreamed of {f} and of all the things they would do [tomorrow|in the morning].
        20% The end.
    """)
