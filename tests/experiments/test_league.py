"""`jaxserve bench league` at toy size: resumed, with a policy of one's own, and its page
in docs/."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.bench import cli as bench
from jaxserve.sched import registry
from jaxserve_lab.experiments.league import cli, collect, store
from jaxserve_lab.experiments.league.code import code_of
from jaxserve_lab.experiments.league.runs import LeagueCase, LeagueNumbers, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NUMBERS = DOCS / "figures" / "league.csv"
QUICK = ("league", "--quick", "--jobs=1")
RUNS = 34  # of the toy league

MINE = """
from jaxserve.sched.policies.vllm import vllm
from jaxserve.sched.registry import register

@register("mine", "vllm under another name", "a test")
def mine():
    return vllm()
"""


@pytest.fixture(scope="module")
def league(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy league in it."""
    folder = tmp_path_factory.mktemp("league")
    assert bench.main([*QUICK, f"--out={folder}"]) == 0
    return folder


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "figures" / "league.csv").open(newline="")))


def refuse(case: object, *_: object) -> None:
    raise AssertionError(f"{case} was done again")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of the tests' own files are not known to other tests."""
    registry.policies()  # those in the box are, however late they are imported
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture
def nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has to be run is a mistake."""
    for name in ("run", "saturate", "optimum", "latency"):
        monkeypatch.setattr(collect, name, refuse)
    monkeypatch.setattr(collect.planning_time, "measure", refuse)


def same(folder: Path, other: Path) -> bool:
    names = ("league.md", "figures/league.csv", "figures/league.json", "figures/league-opt.png")
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_toy_league(league: Path) -> None:
    text = (league / "league.md").read_text()
    for part in ("Who wins where", "All policies", "The setting"):
        assert f"\n## {part}\n" in text
    assert "nan" not in text and str(league) not in text
    # Two workloads at four loads, two policies, two seeds; and an overload that lasts, once.
    rows = rows_of(league)
    assert len(rows) == RUNS == len({tuple(row.values())[:8] for row in rows})
    # All policies meet the same requests: as many, at the same rate.
    for row in rows:
        twins = [r for r in rows if (r["workload"], r["load"]) == (row["workload"], row["load"])]
        assert len({(r["rate"], r["count"]) for r in twins}) == 1
    # Who waits is in the runs.
    assert all(float(row["overtaken"]) >= 0 and 0 <= float(row["paused"]) <= 1 for row in rows)
    assert all(float(row["with_gap"]) <= float(row["attainment"]) for row in rows)
    # Best-effort requests have a floor, and parts an index, where there are some.
    mixed = [row for row in rows if row["workload"] == "three-classes"]
    assert all(0.2 < float(row["fair_tenants"]) <= 1 and row["floor"] for row in mixed)
    assert not any(row["fair_tenants"] or row["floor"] for row in rows if row not in mixed)
    assert (league / "figures" / "league-opt.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_is_done_twice(league: Path, tmp_path: Path, nothing_new: None) -> None:
    shutil.copytree(league, tmp_path, dirs_exist_ok=True)
    (tmp_path / "league.md").unlink()
    assert bench.main([*QUICK, f"--out={tmp_path}"]) == 0
    assert same(league, tmp_path)


def test_it_says_how_long_it_will_take() -> None:
    scale = collect.Scale()
    whole = scale.runs(len(collect.entrants()))
    told = collect.ahead(scale, whole, whole, 2)
    assert told.startswith(f"league: {whole:,} of {whole:,} runs") and "some 45 minutes" in told
    assert "a minute or so on 8 processes" in collect.ahead(scale, whole // 9, whole, 8)


def test_a_league_that_was_killed_or_interrupted_goes_on(
    league: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(league, tmp_path, dirs_exist_ok=True)
    runs = tmp_path / "figures" / "league.csv"
    lines = runs.read_text().splitlines(keepends=True)
    runs.write_text("".join(lines[:20]) + lines[20][:20])  # killed in the middle of a row
    left = [2]

    def interrupted(case: LeagueCase) -> LeagueNumbers:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run(case)

    monkeypatch.setattr(collect, "run", interrupted)
    monkeypatch.setattr(cli, "DOCS", str(tmp_path))  # whose runs are known, too, while they are new
    assert bench.main([*QUICK, f"--out={tmp_path}"]) == 130
    assert len(rows_of(tmp_path)) == 19 + 2
    told = f"league: {RUNS - 19} of {RUNS} runs are to be done: a minute or so on "
    assert capsys.readouterr().err.startswith(told)
    left[0] = RUNS - 21
    assert bench.main([*QUICK, f"--out={tmp_path}"]) == 0
    assert left == [0] and same(league, tmp_path)


def test_other_code_has_its_runs_done_again(
    league: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(league, tmp_path, dirs_exist_ok=True)
    done: list[str] = []

    def code(policy: str) -> str:
        return "new" if policy == "sarathi" else code_of(policy)

    def count(case: LeagueCase) -> LeagueNumbers:
        done.append(case.policy)
        return run(case)

    monkeypatch.setattr(store, "code_of", code)
    monkeypatch.setattr(collect, "run", count)
    assert bench.main([*QUICK, f"--out={tmp_path}"]) == 0
    assert done == ["sarathi"] * (RUNS // 2)
    assert {row["code"] for row in rows_of(tmp_path)} == {"new", code_of("aptserve")}
    monkeypatch.setattr(collect, "run", refuse)
    numbers = league / "figures" / "league.csv"
    again = tmp_path / "again"
    # Asked for, numbers are taken whatever code they came from.
    assert bench.main([*QUICK, f"--out={again}", f"--numbers={numbers}"]) == 0


def test_runs_that_come_out_the_same_vouch_for_all_others(
    league: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(league, tmp_path, dirs_exist_ok=True)
    done: list[LeagueCase] = []

    def count(case: LeagueCase) -> LeagueNumbers:
        done.append(case)
        return run(case)

    monkeypatch.setattr(store, "code_of", lambda policy: f"renamed {policy}")
    monkeypatch.setattr(collect, "run", count)
    argv = [*QUICK, f"--out={tmp_path}", "--reproduce=3"]
    assert bench.main(argv) == 0
    assert len(done) == 3
    assert {row["code"] for row in rows_of(tmp_path)} == {"renamed sarathi", "renamed aptserve"}
    assert bench.main(argv[:-1]) == 0 and len(done) == 3
    # One that comes out otherwise is named, and nothing is kept as it is.
    monkeypatch.setattr(store, "code_of", lambda policy: f"changed {policy}")
    monkeypatch.setattr(collect, "run", lambda case: replace(run(case), goodput=1e9))
    assert bench.main(argv) == 1
    assert "comes out otherwise now" in capsys.readouterr().err
    assert {row["code"] for row in rows_of(tmp_path)} == {"renamed sarathi", "renamed aptserve"}


def test_a_policy_of_ones_own_is_a_row(
    league: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path / 'mine.py'}:mine"
    done: list[str] = []

    def count(case: LeagueCase) -> LeagueNumbers:
        done.append(case.policy)
        return run(case)

    monkeypatch.setattr(collect, "run", count)
    numbers = league / "figures" / "league.csv"
    out = tmp_path / "out"
    assert bench.main([*QUICK, f"--out={out}", f"--numbers={numbers}", f"--policy={name}"]) == 0
    assert done == [name] * (RUNS // 2)
    rows = [line for line in (out / "league.md").read_text().splitlines() if "| `" in line[:3]]
    assert any(line.startswith("| `mine.py:mine`") for line in rows)
    # The others are measured by themselves alone, so their rows of the first tables stay.
    before = (league / "league.md").read_text()
    after = [line for line in rows if line.startswith(("| `aptserve`", "| `sarathi`"))]
    assert after and all(line in before for line in after)


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--quick --workloads=arxiv", "none of them runs"),
        ("--policy=nothing_like_it", "nothing_like_it"),
        ("--workloads=sharegpt,poems", "poems"),
        ("--azure=/nowhere", "/nowhere"),
        ("--numbers=/nowhere/league.csv", "/nowhere/league.csv"),
        ("--jobs=0", "--jobs"),
    ],
)
def test_a_wrong_flag_is_a_line(flag: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(["league", *flag.split()])
    assert end.value.code == 2 and word in capsys.readouterr().err


def test_files_that_hold_something_else_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "figures").mkdir()
    runs = tmp_path / "figures" / "league.csv"
    for text, word in (("a,b\n1,2\n", "not the runs"), ("", "not the facts")):
        runs.write_text(text)
        (tmp_path / "figures" / "league.json").write_text("[]")
        assert bench.main([*QUICK, f"--out={tmp_path}"]) == 1
        assert word in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_is_what_its_numbers_say(tmp_path: Path, nothing_new: None) -> None:
    assert bench.main(["league", f"--out={tmp_path}", f"--numbers={NUMBERS}"]) == 0
    assert (tmp_path / "league.md").read_text() == (DOCS / "league.md").read_text()


def test_the_policies_page_advises_what_the_league_does() -> None:
    lines = (DOCS / "league.md").read_text().splitlines()
    advice = next(line for line in lines if line.startswith("**")).strip("*")
    assert advice in " ".join((DOCS / "policies.md").read_text().split())


def test_words_that_the_numbers_do_not_carry_are_refused(
    tmp_path: Path, nothing_new: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """All policies change places with each other."""
    rows = list(csv.reader(NUMBERS.open(newline="")))
    policies = sorted({row[3] for row in rows[1:]})
    for row in rows[1:]:
        row[3] = policies[-1 - policies.index(row[3])]
    with (tmp_path / "league.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    shutil.copy(NUMBERS.with_suffix(".json"), tmp_path / "league.json")
    numbers = tmp_path / "league.csv"
    assert bench.main(["league", f"--out={tmp_path}", f"--numbers={numbers}"]) == 1
    assert "the numbers do not carry" in capsys.readouterr().err
