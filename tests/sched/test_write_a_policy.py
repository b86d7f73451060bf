"""What docs/write-a-policy.md shows works, from a file and from a cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched import registry
from jaxserve.sched.registry import make_policy, policies, register
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from jaxserve.simulator.simulate.cli import main as simulate
from tests.sched.driver import Drive

PAGE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
EXAMPLES = dict(zip(("aged", "one_by_one"), BLOCKS, strict=True))


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    policies()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield


def test_the_first_example_has_about_thirty_lines() -> None:
    assert len(EXAMPLES["aged"].splitlines()) <= 30


@pytest.mark.parametrize("name", EXAMPLES)
def test_from_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLES[name])
    drive = Drive(f"{path}:{name}", c=64, p=64)
    rows = [drive.add(prompt, 5) for prompt in (20, 3, 9)]
    drive.to_the_end()
    order = {"aged": [rows[1], rows[2], rows[0]], "one_by_one": rows}
    if name == "aged":
        assert drive.first_plan_rows() == sorted(rows, key=order[name].index)
    else:
        assert drive.ended == order[name]


def test_the_order_of_the_first_example_ages(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLES["aged"])
    drive = Drive(f"{path}:aged", c=16, p=16, rows=1)
    long, short = drive.add(16, 2), drive.add(4, 2, arrival=10.0)
    assert drive.step(now=10.0) == {long: 16}, "ten seconds are worth a thousand tokens"
    assert short not in drive.plans[0]


@pytest.mark.slow
def test_the_load_of_the_page_shows_what_the_first_example_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = re.findall(r"^    jaxserve simulate (.*sarathi.*)$", PAGE.read_text(), re.M)
    (said,) = re.findall(r"first token is ([0-9.]+) of `sarathi`'s", PAGE.read_text())
    (tmp_path / "aged.py").write_text(EXAMPLES["aged"])
    monkeypatch.chdir(tmp_path)
    assert simulate([*line.split(), "--jobs=1", "--json"]) == 0
    (ratios,) = json.loads(capsys.readouterr().out)["ratios"]
    assert (ratios["policy"], ratios["to"]) == ("aged.py:aged", "sarathi")
    assert ratios["mean"]["mean_ttft_s"] == pytest.approx(float(said), abs=0.02)
    assert float(said) < 0.9


def test_from_a_cell_and_again() -> None:
    cell = "@register('mine', 'a', 'b')\ndef mine():\n    return make_policy('sarathi')\n"
    scope: dict[str, Any] = {"register": register, "make_policy": make_policy}
    exec(cell, scope)
    exec(cell.replace("sarathi", "vllm"), scope)  # the cell is changed and run again
    made = make_policy("mine+ef", watermark=0.5)
    assert isinstance(made, UnifiedPolicy)
    assert not made.chunked and made.hypothetical and made.watermark == 0.5


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "nobody", "no policy 'nobody'"),
        (EXAMPLES["one_by_one"].replace("(Policy)", ""), "one_by_one", "is not derived from"),
        (
            EXAMPLES["one_by_one"].replace("def plan", "def plant"),
            "one_by_one",
            "'one_by_one' cannot be made: TypeError: Can't instantiate .* plan$",
        ),
        (
            EXAMPLES["one_by_one"] + "    def __init__(self, x): ...\n",
            "one_by_one",
            "TypeError: .*'x'",
        ),
        ("1 / 0", "mine", r"policy file .*mine\.py: ZeroDivisionError"),
        (EXAMPLES["aged"].replace('"aged"', '"vllm"'), "vllm", "two policies are named 'vllm'"),
        (EXAMPLES["aged"].replace('"aged"', '"a+b"'), "a+b", "without \\+ : , and ="),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, name: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        make_policy(f"{path}:{name}")
    with pytest.raises(ValueError, match=r"there is no policy file .*other\.py"):
        make_policy(f"{tmp_path}/other.py:mine")


def test_a_file_with_one_policy_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLES["aged"])
    for name in (str(path), f"{path}+ef:watermark=0.5"):  # run again, too
        policy = make_policy(name)
        assert type(policy).__name__ == "UnifiedPolicy"
    assert policy.watermark == 0.5
    with pytest.raises(ValueError, match="policy 'aged' has no parameter 'watermrk'"):
        make_policy(f"{path}:watermrk=1")
    path.write_text("\n".join(EXAMPLES.values()))
    with pytest.raises(ValueError, match=r"has aged, one_by_one; name one, .*mine\.py:aged$"):
        make_policy(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match=r"mine\.py: registers no policy"):
        make_policy(str(path))
