"""The story grammar: same seed same story, nothing unfilled, a cast that stays the same."""

import random
import re
from itertools import islice

import grammar
import pytest
from grammar.writer import Writer

FEMALE = re.compile(r"\b(she|her|herself)\b", re.IGNORECASE)
MALE = re.compile(r"\b(he|him|his|himself)\b", re.IGNORECASE)


def played(plot: str, seed: int) -> Writer:
    writer = Writer(random.Random(seed))
    writer.play(grammar.PLOTS[plot])
    return writer


def test_a_seed_gives_one_story_and_other_seeds_others():
    first = list(islice(grammar.stories(0), 50))
    assert first == list(islice(grammar.stories(0), 50))
    assert len(set(first)) == 50


def test_stories_do_not_depend_on_global_random_state():
    random.seed(1)
    expected = grammar.story(3)
    random.seed(2)
    random.random()
    assert grammar.story(3) == expected


@pytest.mark.parametrize("plot", grammar.PLOTS)
def test_text_is_clean(plot):
    for seed in range(60):
        writer = played(plot, seed)
        text = writer.text()
        assert not re.search(r"[{}\[\]|~_]|  |\.\.|,,", text), text
        assert text.count('"') % 2 == 0, text
        assert text[-1] in '.!"', text
        assert all(sentence[0].isupper() or sentence[0] == '"' for sentence in writer.sentences)
        assert 40 <= len(text.split()) <= 250, text


def test_articles_agree():
    for seed in range(1000):
        text = grammar.story(seed)
        wrong = re.findall(r"\b[Aa] [aeiouAEIOU]\w*|\b[Aa]n [^aeiouAEIOU]\w*", text)
        assert [match for match in wrong if match != "an hour"] == [], text


@pytest.mark.parametrize("plot", grammar.PLOTS)
def test_the_hero_comes_back(plot):
    for seed in range(40):
        writer = played(plot, seed)
        sentences = writer.sentences
        named = [i for i, sentence in enumerate(sentences) if writer.hero.name in sentence]
        assert named[0] == 0 or sentences[1] == f"{_his(writer)} name was {writer.hero.name}."
        assert len(named) >= 3
        assert named[-1] >= len(sentences) // 3


def test_pronouns_fit_the_cast():
    """Where all three of a story are of one gender, no pronoun of the other gender appears."""
    checked = 0
    for seed in range(600):
        writer = grammar.write(seed)
        genders = {writer.hero.gender, writer.friend.gender, writer.slots["ehe"]}
        if len(genders) > 1:
            continue
        # These speak of somebody else: a dog, a crow, a cow, a mouse.
        if re.search(r"\b(dog|crow|cow|hen|mouse|miller|farmer)\b", writer.text()):
            continue
        checked += 1
        other = MALE if genders == {"she"} else FEMALE
        assert not other.search(writer.text()), writer.text()
    assert checked > 50


@pytest.mark.parametrize("name", ["lost", "sharing", "mistake", "present", "baking", "new_friend"])
def test_the_thing_of_the_story_is_mentioned_again(name):
    for seed in range(40):
        writer = played(name, seed)
        assert writer.text().count(writer.slots["obj"]) >= 2, writer.text()


def _his(writer: Writer) -> str:
    return "Her" if writer.hero.gender == "she" else "His"
