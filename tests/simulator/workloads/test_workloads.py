"""Traces as published, samplers, arrivals, and the words that name them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from jaxserve.simulator.workloads.lengths import (
    DATA_SETS,
    GROUPS,
    MIXES,
    LogUniform,
    Quartered,
    mix_lengths,
    mixed_prompt_sets,
    mixed_prompts,
    sampler,
)
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.traces import Trace, read_trace
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    on_off_arrivals,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": null}
{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": null}
"""
LENGTHS = "prompt_tokens,output_tokens\n8,273\n30,129\n"
HEAD = "prompt_tokens,output_tokens\n"
INFERMAX = "id,arrived_at,I,O\n0,4.5,395,112\n1,5.0,1030,403\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def arrivals(found: Trace) -> list[float]:
    assert found.arrival is not None
    return list(found.arrival.tolist())


def test_azures_csv(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "azure.csv", AZURE))
    np.testing.assert_allclose(arrivals(found), [0.0, 4.314579, 4.541977], atol=2e-6)
    assert found.lengths.prompt_len.tolist() == [374, 396, 879]
    assert found.lengths.output_len.tolist() == [44, 109, 55]


def test_azures_csv_with_time_zones(tmp_path: Path) -> None:
    text = AZURE.replace("00,374", "00+00:00,374").replace("90,396", "90+00:00,396")
    text = text.replace("70,879", "70+00:00,879")
    assert arrivals(read_trace(write(tmp_path, "azure.csv", text)))[1] == pytest.approx(4.314579)


def test_burstgpts_csv_without_its_failures(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "burst.csv", BURSTGPT))
    assert arrivals(found) == [0.0, 113.0]
    assert found.lengths.output_len.tolist() == [18, 276]


def test_burstgpts_second_release_and_blank_lines(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n5,,2.5,ChatGPT,472,18,490,API log\n\n45,a1,9.0,ChatGPT,1087,0,1087,API log\n"
        "118,a1,3.1,GPT-4,417,276,693,Conversation log\n\n"
    )
    found = read_trace(write(tmp_path, "burst.csv", text))
    assert arrivals(found) == [0.0, 113.0]
    assert found.lengths.prompt_len.tolist() == [472, 417]
    assert found.lengths.output_len.tolist() == [18, 276]


def test_times_without_a_zone_do_not_depend_on_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Berlin an hour is missing that night."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text = f"{head}2024-03-31 01:30:00,8,8\n2024-03-31 03:30:00,8,8\n"
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert arrivals(read_trace(write(tmp_path, "azure.csv", text))) == [0.0, 7200.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    """What comes behind is not even looked at."""
    path = write(tmp_path, "long.csv", LENGTHS + "no numbers\n")
    assert len(read_trace(path, 2).lengths) == 2
    assert len(WorkloadSpec(str(path), num_requests=1).make_workload().arrival) == 1
    with pytest.raises(WorkloadError, match="3 requests are asked for, of 2"):
        WorkloadSpec(str(write(tmp_path, "a.csv", LENGTHS)), num_requests=3).make_workload()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sharegpt.json", '[{"id": "x", "conversations": [{"from": "human", "value": "Hi"}]}]'),
        ("sharegpt.json", '[\n  {"id": "x", "conversations": []}\n]\n'),
        ("lmsys.jsonl", '{"conversation_id": "x", "conversation": [{"role": "user"}]}\n'),
        ("batch.jsonl", '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'),
        ("more.jsonl", MOONCAKE + "{oops\n"),
    ],
)
def test_what_is_known_is_said_of_what_is_not(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(WorkloadError, match="known is an object a line with timestamp") as said:
        read_trace(write(tmp_path, name, text))
    assert "texts have no lengths until a tokenizer has counted them" in str(said.value)


def test_mooncakes_jsonl(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert arrivals(found) == [0.0, 3.052]
    assert found.lengths.prompt_len.tolist() == [6758, 7319]


def test_lengths_alone_and_the_authors_own(tmp_path: Path) -> None:
    for text in (LENGTHS, LENGTHS.replace("\n", "\r\n")):
        found = read_trace(write(tmp_path, "lengths.csv", text))
        assert found.arrival is None
        assert found.lengths.output_len.tolist() == [273, 129]
        assert found.first(1).lengths.prompt_len.tolist() == [8]
    timed = "arrival_s,prompt_tokens,output_tokens\n2.5,8,273\n2.75,30,129\n"
    assert arrivals(read_trace(write(tmp_path, "timed.csv", timed))) == [0.0, 0.25]
    assert arrivals(read_trace(write(tmp_path, "own.csv", INFERMAX))) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", AZURE.replace(",396,", ",396.5,"), "a.csv:3: ContextTokens must be a whole"),
        ("a.csv", AZURE.replace(",109", ",0"), "a.csv:3: GeneratedTokens must be 1 to"),
        ("a.csv", AZURE.replace(",879,55", ",879"), "a.csv:4: 3 columns expected, got 2"),
        ("a.csv", AZURE.replace("18:15:51", "quarter past"), "a.csv:4: TIMESTAMP must be a time"),
        ("a.csv", AZURE.replace("18:15:51", "18:14:51"), r"a.csv:4: arrives .* before the row"),
        ("b.csv", BURSTGPT.replace("118,", "-1,"), "b.csv:4: Timestamp must be a time from 0"),
        ("b.csv", BURSTGPT.replace("472", "x"), "b.csv:2: Request tokens must be a whole"),
        ("m.jsonl", MOONCAKE.replace("3052", '"3052"'), "m.jsonl:2: timestamp must be a number"),
        ("m.jsonl", MOONCAKE.replace("7319", "73.5"), "m.jsonl:2: input_length must be a whole"),
        ("m.jsonl", MOONCAKE.replace('"output_length": 490, ', ""), "m.jsonl:2: output_length is"),
        ("m.jsonl", MOONCAKE + "{oops\n", "m.jsonl:3: not JSON"),
        ("m.jsonl", "[1, 2]\n", "m.jsonl:1: a JSON object expected"),
        ("c.csv", "when,what\n1,2\n", "c.csv:1: unknown header 'when,what'; known: "),
        ("c.csv", "id,arrived_at,I,O\n", "c.csv: no requests in it"),
        ("c.csv", "id,arrived_at,I,O\n0,nan,3,4\n", "c.csv:2: arrived_at must be a time"),
        ("l.csv", "", "l.csv:1: unknown header ''"),
        ("l.csv", HEAD, "l.csv: no requests in it"),
        ("l.csv", HEAD + "1,2\n3\n", "l.csv:3: 2 columns expected, got 1"),
        ("l.csv", HEAD + "1,x\n", "l.csv:2: output_tokens must be a whole number, got 'x'"),
        ("l.csv", HEAD + "-1,2\n", "l.csv:2: prompt_tokens must be a whole number"),
        ("l.csv", HEAD + "1_0,2\n", "l.csv:2: prompt_tokens must be a whole number"),
        ("l.csv", HEAD + "٣,2\n", "l.csv:2: prompt_tokens must be a whole number"),
        ("l.csv", HEAD + "1,\n", "l.csv:2: output_tokens must be a whole number, got ''"),
        ("l.csv", HEAD + "1,0\n", "l.csv:2: output_tokens must be 1 to 2147483647, got 0"),
        ("l.csv", HEAD + "1,2147483648\n", "l.csv:2: output_tokens must be 1 to"),
        ("l.csv", HEAD + f"1,{'9' * 5000}\n", "l.csv:2: output_tokens must be 1 to"),
    ],
)
def test_malformed_rows_are_refused_with_file_line_and_reason(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(WorkloadError, match=problem):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match=r"binary\.csv: not a text file"):
        read_trace(tmp_path / "binary.csv")


def test_the_six_mixes() -> None:
    assert len(MIXES) == len(set(MIXES)) == 6
    for name in MIXES:
        found = mix_lengths(name, 400, np.random.default_rng(0))
        allowed = [GROUPS[part] for part in name.split("+")]
        pairs = set(zip(found.prompt_len.tolist(), found.output_len.tolist(), strict=True))
        assert pairs == {(i, o) for inputs, outputs in allowed for i in inputs for o in outputs}
        first, (inputs, outputs) = GROUPS[name.split("+")[0]], GROUPS[name.split("+")[1]]
        mine = np.isin(found.prompt_len, inputs) & np.isin(found.output_len, outputs)
        if not (set(first[0]) & set(inputs) and set(first[1]) & set(outputs)):
            assert mine.sum() == 200


@pytest.mark.parametrize("name", ["lilo", "lilo+lilo", "lilo+xiso", "lilo+liso+siso"])
def test_other_mixes_are_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="two different groups"):
        mix_lengths(name, 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        # Mean, standard deviation (BROS Table 2).
        ("sharegpt", (222.76, 256.36), (234.51, 268.50)),
        ("lmsys", (90.50, 148.52), (237.04, 228.21)),
        ("best-effort", (784.14, 151.17), (80.96, 28.23)),
    ],
)
def test_samplers_have_the_printed_moments(
    name: str, prompt: tuple[float, float], output: tuple[float, float]
) -> None:
    found = sampler(name)(100_000, np.random.default_rng(0))
    for values, (mean, deviation) in ((found.prompt_len, prompt), (found.output_len, output)):
        assert values.mean() == pytest.approx(mean, rel=0.05)
        assert values.std() == pytest.approx(deviation, rel=0.2)  # the tail is cut


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        # Max, median, mean (Apt-Serve Table 7).
        ("wikitext", (1840, 871, 914), (992, 552, 521)),
        ("arxiv", (19600, 6853, 7812), (9754, 226, 420)),
        ("bookcorpus", (23706, 14781, 16944), (299, 221, 185)),
    ],
)
def test_long_samplers_have_the_printed_quartiles(
    name: str, prompt: tuple[int, int, int], output: tuple[int, int, int]
) -> None:
    found = sampler(name)(100_000, np.random.default_rng(0))
    for values, (high, median, mean) in ((found.prompt_len, prompt), (found.output_len, output)):
        assert values.max() <= high
        assert np.median(values) == pytest.approx(median, rel=0.03)
        assert values.mean() == pytest.approx(mean, rel=0.02)


def shares(values: np.ndarray) -> tuple[float, ...]:
    """Within [1, 512], (512, 4096], above."""
    counts = np.histogram(values, [0.5, 512.5, 4096.5, np.inf])[0]
    return tuple((counts / len(values)).tolist())


def test_mixed_prompts_are_as_figure_8_of_accelgen_prints_them() -> None:
    found = mixed_prompts().sample(100_000, np.random.default_rng(0))
    assert shares(found.prompt_len) == pytest.approx((0.34, 0.52, 0.14), abs=0.01)
    assert 90_000 < found.prompt_len.max() <= 100_000
    printed = mixed_prompts(printed_outputs=True).sample(100_000, np.random.default_rng(0))
    # What is above 4K is cut to 2,048.
    assert shares(printed.output_len) == pytest.approx((0.51, 0.49, 0.0), abs=0.01)
    assert (printed.output_len == 2048).mean() == pytest.approx(0.13, abs=0.01)
    named = WorkloadSpec("mixed-prompts", num_requests=30, rate=8.0).make_workload()
    assert len(named) == 30 and named.prompt_len.max() > 4096


def test_mixed_prompts_take_their_share_from_books() -> None:
    rng = np.random.default_rng(0)
    for books in (0.0, 0.8, 1.0):
        long = mixed_prompts(books, 6000).sample(20_000, rng).prompt_len
        assert (long > 4096).mean() == pytest.approx(0.4 * books, abs=0.02)
        assert long.max() <= 6000
    with pytest.raises(WorkloadError, match="at least 1"):
        mixed_prompts().sample(0, rng)


def test_log_uniform_lengths_double_as_often_anywhere() -> None:
    found = LogUniform(64, 1024).sample(40_000, np.random.default_rng(0))
    counts = np.histogram(found, [64, 128, 256, 512, 1025])[0]
    assert counts / len(found) == pytest.approx([0.25] * 4, abs=0.01)


def test_every_data_set_says_where_it_comes_from_and_keeps_to_its_limits() -> None:
    for name, data in (DATA_SETS | mixed_prompt_sets(9000)).items():
        found = data.sample(2000, np.random.default_rng(1))
        assert data.source, name
        if data.total is not None:
            assert (found.prompt_len + found.output_len).max() <= data.total
    with pytest.raises(WorkloadError, match="no distribution"):
        Quartered(10, 90, 100).sample(5, np.random.default_rng(0))


def test_on_off_arrivals_have_their_rate_and_their_pauses() -> None:
    arrival = on_off_arrivals(4.0, 2.0, 6.0, 60_000, np.random.default_rng(0))
    assert (np.diff(arrival) >= 0).all()
    assert len(arrival) / arrival[-1] == pytest.approx(4.0, rel=0.05)
    gaps = np.diff(arrival)
    # A pause after every 2 s at 16 requests/s, 6 s long on average.
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-1 / 6) / 32, rel=0.1)
    assert gaps.std() / gaps.mean() > 2


def test_words_make_workloads(tmp_path: Path) -> None:
    fixed = WorkloadSpec("fixed:1024x128x32").make_workload()
    assert (len(fixed), fixed.arrival.max()) == (32, 0.0)
    assert set(fixed.prompt_len.tolist()) == {1024}
    poisson = WorkloadSpec("sharegpt", num_requests=50, rate=2.0).make_workload(seed=1)
    assert len(poisson) == 50 and poisson.arrival[0] > 0
    again = WorkloadSpec("sharegpt", num_requests=50, rate=2.0).make_workload(seed=1)
    assert (poisson.arrival == again.arrival).all()
    assert (poisson.prompt_len == again.prompt_len).all()
    azure = str(write(tmp_path, "azure.csv", AZURE))
    assert WorkloadSpec(azure).make_workload().arrival[1] == pytest.approx(4.314579)
    assert WorkloadSpec(azure, rate=1.0).make_workload().arrival[-1] == pytest.approx(2.0)
    assert WorkloadSpec(azure, arrivals="all").make_workload().arrival.max() == 0.0
    assert len(WorkloadSpec(azure, num_requests=2).make_workload()) == 2
    bursty = WorkloadSpec("lilo+siso", 300, "gamma", rate=2.0, cv=4.0).make_workload()
    gaps = np.diff(bursty.arrival)
    assert gaps.std() / gaps.mean() > 2
    assert (
        len(WorkloadSpec("alpaca", 9, "on_off", rate=2.0, on_s=1.0, off_s=1.0).make_workload()) == 9
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lengths": "fixed:3x4"}, "fixed:IxOxB"),
        ({"lengths": "fixed:0x4x2"}, "prompt_len must be at least 1"),
        ({"lengths": "fixed:3x4x2", "num_requests": 5}, "already"),
        ({"lengths": "nowhere.csv"}, "no workload or file 'nowhere.csv'"),
        ({"lengths": "sharegpt", "arrivals": "replay"}, "no arrivals to replay"),
        ({"lengths": "sharegpt", "arrivals": "poisson"}, "needs a rate"),
        ({"lengths": "sharegpt", "arrivals": "gamma", "rate": 1.0}, "needs cv"),
        ({"lengths": "sharegpt", "rate": 1.0, "cv": 2.0}, "only that does"),
        ({"lengths": "sharegpt", "arrivals": "all", "rate": 1.0}, "has no rate"),
        ({"lengths": "sharegpt", "arrivals": "never"}, "must be one of all, replay"),
        ({"lengths": "sharegpt", "rate": -1.0}, "rate must be a positive"),
    ],
)
def test_wrong_words_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        WorkloadSpec(**fields).make_workload()  # type: ignore[arg-type]


def test_lengths_are_cut_to_a_limit() -> None:
    lengths = Lengths(np.array([5, 90, 200, 1]), np.array([7, 20, 3, 500]))
    made = Workload.create(all_at_once(4), lengths)
    lengths = made.within(100).lengths
    np.testing.assert_array_equal(lengths.prompt_len, [5, 90, 99, 1])
    np.testing.assert_array_equal(lengths.output_len, [7, 10, 1, 99])
    with pytest.raises(WorkloadError, match="at least 2"):
        made.within(1)
