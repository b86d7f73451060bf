"""Classes in words and drawn by share, and what traces and flags say of each request."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.classes import (
    SloClass,
    SloClassError,
    draw_terms,
    parse_classes,
    with_targets,
)
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.traces import read_trace
from jaxserve.simulator.workloads.workload import WorkloadError

WORDS = "chat:0.7:ttft=500ms:tbt=50ms,batch:0.3:tier=best_effort:jct=60s"
INF = math.inf


def test_classes_in_words() -> None:
    chat, batch = parse_classes(WORDS)
    assert chat == SloClass("chat", 0.7, SLO(ttft=0.5, tbt=0.05), Tier.REALTIME)
    assert batch == SloClass("batch", 0.3, SLO(jct=60.0), Tier.BEST_EFFORT)
    assert parse_classes("all:1") == (SloClass("all", 1.0),)
    (warm,) = parse_classes("warm:1:greedy=false")
    assert not warm.greedy and parse_classes("cold:1:greedy=true")[0].greedy
    assert parse_classes("dear:1:value=2.5") == (SloClass("dear", 1.0, value=2.5),)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True),
            st.floats(0.01, 1.0),
            *(st.none() | st.floats(1e-9, 1e18) for _ in range(4)),
            st.sampled_from(Tier),
            st.booleans(),
            st.floats(1e-3, 1e3),
        ),
        min_size=1,
        max_size=5,
        unique_by=lambda one: one[0],
    )
)
def test_words_of_a_class_make_the_same_class(parts: list[tuple]) -> None:  # type: ignore[type-arg]
    total = sum(part[1] for part in parts)
    classes = tuple(
        SloClass(name, share / total, SLO(*targets), tier, greedy, value)
        for name, share, *targets, tier, greedy, value in parts
    )
    assert parse_classes(",".join(map(str, classes))) == classes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "a class is NAME:SHARE"),
        ("chat", "a class is NAME:SHARE.* got 'chat'"),
        ("chat:half", "class chat: its share must be a number, got 'half'"),
        ("chat:nan", r"class chat: a share is in \(0, 1\], got nan"),
        ("chat:0,b:1", r"class chat: a share is in \(0, 1\], got 0"),
        ("a:0.5,b:0.4", "must add up to 1, not 0.9"),
        ("a:0.5,a:0.5", "two classes are named 'a'"),
        ("a b:1", "a name has letters"),
        (":1", "a name has letters"),
        ("a:1:ttft=5", "class a: ttft: must be a time such as 200ms or 1.5s, got '5'"),
        ("a:1:ttft=0ms", "class a: ttft: must be a time"),
        ("a:1:tbt=-1s", "class a: tbt: must be a time"),
        (
            "a:1:speed=5ms",
            "may have tier=, greedy=, value=, ttft=, tbt=, jct= and max_tbt=, got 'speed=5ms'",
        ),
        (
            "a:1:ttft",
            "class a: may have tier=, greedy=, value=, ttft=, tbt=, jct= and max_tbt=, got 'ttft'",
        ),
        ("a:1:ttft=1s:ttft=2s", "class a: may have .* and max_tbt=, each once, got 'ttft=2s'"),
        ("a:1:value=0", "class a: value: must be a number between 0.001 and 1000, got '0'"),
        ("a:1:value=nan", "class a: value: must be a number"),
        ("a:1:value=much", "class a: value: must be a number between .*, got 'much'"),
        ("a:1:greedy=1", "class a: greedy: must be true or false, got '1'"),
        ("a:1:tier=gold", "class a: tier: must be one of realtime, best_effort, got 'gold'"),
    ],
)
def test_wrong_words_are_refused(words: str, problem: str) -> None:
    with pytest.raises(SloClassError, match=problem):
        parse_classes(words)


def test_classes_are_drawn_with_their_shares() -> None:
    words = "a:0.6:ttft=1s,b:0.3:tier=best_effort:jct=5s,c:0.1:tbt=20ms"
    terms = draw_terms(parse_classes(words), 100_000, np.random.default_rng(0))
    shares = np.bincount(terms.slo_class) / len(terms)
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.005)
    for index, (tier, ttft, tbt, jct) in enumerate(
        [(0, 1.0, INF, INF), (1, INF, INF, 5.0), (0, INF, 0.02, INF)]
    ):
        mine = terms.select(terms.slo_class == index)
        for column, value in ((mine.tier, tier), (mine.ttft, ttft), (mine.tbt, tbt)):
            assert set(column.tolist()) == {value}
        assert set(mine.jct.tolist()) == {jct}


def test_targets_are_for_those_that_have_none() -> None:
    own = SloColumns(
        np.zeros(3, np.int8),
        np.array([0.2, INF, INF]),
        np.full(3, INF),
        np.array([INF, 9.0, INF]),
        np.full(3, INF),
        np.zeros(3, np.int64),
        np.array([True, False, True]),
    )
    filled = with_targets(own, SLO(ttft=1.0, tbt=0.1))
    assert filled.ttft.tolist() == [0.2, INF, 1.0]
    assert filled.tbt.tolist() == [INF, INF, 0.1]
    assert filled.jct.tolist() == [INF, 9.0, INF]
    assert filled.max_tbt.tolist() == [INF] * 3
    assert filled.max_tbt_that_counts.tolist() == [INF, INF, 2.0]
    assert filled.greedy.tolist() == [True, False, True]


def test_a_spec_draws_classes_from_a_generator_of_its_own() -> None:
    words = {"lengths": "sharegpt", "num_requests": 200, "arrivals": "gamma", "rate": 2.0}
    plain = WorkloadSpec(**words, cv=2.0).make_workload(3)  # type: ignore[arg-type]
    spec = WorkloadSpec(**words, cv=2.0, classes=parse_classes(WORDS))  # type: ignore[arg-type]
    drawn, again, other = spec.make_workload(3), spec.make_workload(3), spec.make_workload(4)
    for name in ("arrival", "prompt_len", "output_len", "limit"):
        assert (getattr(plain, name) == getattr(drawn, name)).all()
    assert drawn.classes == ("chat", "batch") and plain.classes == ("default",)
    assert (drawn.slo_class == again.slo_class).all()
    assert (drawn.slo_class != other.slo_class).any()


def test_a_spec_sets_limits() -> None:
    def limit(**more: object) -> list[int]:
        spec = WorkloadSpec("lilo+siso", 20, **more)  # type: ignore[arg-type]
        return list(spec.make_workload().limit.tolist())

    made = WorkloadSpec("lilo+siso", 20).make_workload()
    longest = int((made.prompt_len + made.output_len).max())
    assert limit() == (longest - made.prompt_len).tolist()
    assert limit(max_tokens="length") == made.output_len.tolist()
    assert limit(max_tokens=2000) == [2000] * 20
    with pytest.raises(WorkloadError, match="more than its max_tokens of 9"):
        limit(max_tokens=9)
    with pytest.raises(WorkloadError, match="max_tokens must be at least 1"):
        limit(max_tokens=0)


HEAD = "prompt_tokens,output_tokens,max_tokens,tier,ttft_ms,tbt_ms,jct_ms,class,greedy,value\n"
ROWS = (
    "8,20,64,realtime,200,50,,chat,true,2.5\n9,30,,best_effort,,,60000,batch,false,\n10,5,,,,,,,,\n"
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def check(trace: Path) -> None:
    made = WorkloadSpec(str(trace)).make_workload()
    assert made.limit.tolist() == [64, 30, 29]  # the longest has 9 + 30 tokens
    assert made.tier.tolist() == [0, 1, 0]
    assert made.ttft.tolist() == [0.2, INF, INF]
    assert made.tbt.tolist() == [0.05, INF, INF]
    assert made.jct.tolist() == [INF, 60.0, INF]
    assert [made.classes[i] for i in made.slo_class] == ["chat", "batch", "default"]
    assert made.greedy.tolist() == [True, False, True]
    assert made.value.tolist() == [2.5, 1.0, 1.0]
    asked = WorkloadSpec(str(trace), slo=SLO(ttft=3.0), max_tokens=40).make_workload()
    assert asked.ttft.tolist() == [0.2, INF, 3.0] and asked.limit.tolist() == [64, 40, 40]
    with pytest.raises(WorkloadError, match="has tiers, targets, classes, values or sampling"):
        WorkloadSpec(str(trace), classes=parse_classes(WORDS)).make_workload()


def test_traces_say_what_requests_ask_for(tmp_path: Path) -> None:
    check(write(tmp_path, "lengths.csv", HEAD + ROWS))
    lines = (HEAD + ROWS).splitlines()
    timed = ["arrival_s," + lines[0], *(f"{i}.5,{row}" for i, row in enumerate(lines[1:]))]
    check(write(tmp_path, "timed.csv", "\n".join(timed) + "\n"))
    records = [
        {
            "max_tokens": 64,
            "tier": "realtime",
            "ttft_ms": 200,
            "tbt_ms": 50.0,
            "class": "chat",
            "value": 2.5,
        },
        {
            "max_tokens": None,
            "tier": "best_effort",
            "jct_ms": 6e4,
            "class": "batch",
            "greedy": False,
        },
        {},
    ]
    sizes = [(8, 20), (9, 30), (10, 5)]
    text = "".join(
        json.dumps({"timestamp": 0, "input_length": i, "output_length": o, **more}) + "\n"
        for (i, o), more in zip(sizes, records, strict=True)
    )
    check(write(tmp_path, "mooncake.jsonl", text))


def test_the_optional_columns_come_in_any_order_and_number(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens,class,max_tokens\n"
        "2023-11-16 18:15:46,374,44,a,\n2023-11-16 18:15:50,396,109,b,200\n"
    )
    longest = read_trace(
        write(tmp_path, "gaps.csv", "prompt_tokens,output_tokens,max_tbt_ms\n8,9,700\n8,9,\n")
    )
    assert longest.terms.max_tbt.tolist() == [0.7, INF]
    found = read_trace(write(tmp_path, "azure.csv", azure))
    assert found.terms.classes == ("a", "b") and found.limit.tolist() == [0, 200]
    assert found.arrival is not None


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("l.csv", HEAD + "8,20,19,,,,,,,\n", "l.csv:2: max_tokens is 19, less than the 20 tokens"),
        ("l.csv", HEAD + "8,20,x,,,,,,,\n", "l.csv:2: max_tokens must be a whole number, got 'x'"),
        ("l.csv", HEAD + "8,20,,gold,,,,,,\n", "l.csv:2: tier: must be one of realtime, best_effo"),
        ("l.csv", HEAD + "8,20,,,-1,,,,,\n", "l.csv:2: ttft_ms must be a time from 0, got '-1'"),
        ("l.csv", HEAD + "8,20,,,,0,,,,\n", "l.csv:2: tbt_ms must be a positive time, got '0'"),
        ("l.csv", HEAD + "8,20,,,,,inf,,,\n", "l.csv:2: jct_ms must be a time from 0, got 'inf'"),
        ("l.csv", HEAD + "8,20,,,,,,a b,,\n", "l.csv:2: class: a name has letters"),
        ("l.csv", HEAD + "8,20,,,,,,,no,\n", "l.csv:2: greedy: must be true or false, got 'no'"),
        ("l.csv", HEAD + "8,20,,,,,,,,1e9\n", "l.csv:2: value: must be a number between 0.001 and"),
        ("l.csv", "prompt_tokens,output_tokens,tier,tier\n", "l.csv:1: a column comes twice"),
        ("l.csv", "prompt_tokens,output_tokens,slo\n", "l.csv:1: unknown header .* followed by"),
        ("m.jsonl", '{"max_tokens": "9"}', "m.jsonl:1: max_tokens must be a number, got '9'"),
        ("m.jsonl", '{"greedy": 1}', "m.jsonl:1: greedy must be a text, got 1"),
        ("m.jsonl", '{"tier": 1}', "m.jsonl:1: tier must be a text, got 1"),
    ],
)
def test_malformed_columns_are_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    if name.endswith("jsonl"):
        text = '{"timestamp": 0, "input_length": 5, "output_length": 6, ' + text[1:] + "\n"
    with pytest.raises(WorkloadError, match=problem):
        read_trace(write(tmp_path, name, text))
