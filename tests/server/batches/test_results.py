"""The client's file of results, whole, torn, foreign."""

from __future__ import annotations

import fcntl
import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.client import make_line
from jaxserve.client.batch_results import ResultsError, ResultsFile
from jaxserve.client.prompts import Prompts

PROMPTS = Prompts(
    Path("prompts.jsonl"),
    [1, 3, 4],
    [make_line("a", line_id="A"), make_line("b"), make_line("c")],
)
OTHERS = Prompts(Path("prompts.jsonl"), [1], [make_line("a")])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_results_from_beginning_to_end(path: Path) -> None:
    with ResultsFile(path, PROMPTS) as results:
        batch = results.begin()
        assert (batch.first, results.done, results.whole) == (0, 0, False)
        results.append([{"text": "é\n\u2028"}, {"error": 1}])
    with ResultsFile(path, PROMPTS) as results:
        assert results.batch == batch
        assert (results.done, results.failed) == (2, 1)
        results.append([])
        results.append([{"text": "c"}])
        assert results.whole
        results.finish()
    assert written(path) == [
        {"line": 1, "id": "A", "text": "é\n\u2028"},
        {"line": 3, "error": 1},
        {"line": 4, "text": "c"},
    ]
    assert [*path.parent.iterdir()] == [path]
    with ResultsFile(path, PROMPTS) as results:
        assert results.whole and results.failed == 1 and results.batch is None


@given(st.data())
def test_a_line_that_was_being_written_is_cut_off(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    with ResultsFile(path, PROMPTS) as results:
        results.begin()
        results.append([{"text": "é" * 5}, {"text": "b"}, {"text": "c"}])
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    with ResultsFile(path, PROMPTS) as results:
        assert results.done == whole[:cut].count(b"\n")
        results.append([{"text": text} for text in ("é" * 5, "b", "c")[results.done :]])
    assert path.read_bytes() == whole


def test_a_second_batch_is_of_what_is_missing(path: Path) -> None:
    with ResultsFile(path, PROMPTS) as results:
        first = results.begin()
        results.append([{}])
        second = results.begin()
        assert second.batch_id != first.batch_id and second.first == 1
    with ResultsFile(path, PROMPTS) as results:
        assert results.batch == second


def test_a_full_disk_is_one_line_and_what_was_there_before_counts(path: Path) -> None:
    size, way = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultsFile(path, PROMPTS) as results:
        results.begin()
        results.append([{"text": "a"}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, way))
    try:
        with (
            pytest.raises(ResultsError, match=r"^--out: .*results\.jsonl: File too large$"),
            ResultsFile(path, PROMPTS) as results,
        ):
            results.append([{"text": "b"}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, way))
    assert path.read_bytes().count(b"\n") == 1 and not path.read_bytes().endswith(b"\n")
    with ResultsFile(path, PROMPTS) as results:
        assert results.done == 1
        results.append([{"text": "b"}, {"text": "c"}])
    assert [record["text"] for record in written(path)] == ["a", "b", "c"]


def test_only_one_client_writes_it(path: Path) -> None:
    with (
        ResultsFile(path, PROMPTS) as results,
        pytest.raises(ResultsError, match=f"another client is writing {path}"),
    ):
        ResultsFile(path, PROMPTS)
    assert results.done == 0


def test_one_that_its_last_writer_removes_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def removed(file, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    with ResultsFile(path, PROMPTS) as results:
        results.begin()
        results.append([{}])
        assert path.read_bytes().count(b"\n") == 1


def test_what_is_not_ours_is_left_alone(path: Path) -> None:
    for text in ("something\n", '{"line": 2}\n', '{"line": 1}\n', "no end", "3\n", "{}\n" * 4):
        path.write_text(text)
        with pytest.raises(
            ResultsError, match=r"--out: .*results.jsonl (is there|holds something)"
        ):
            ResultsFile(path, PROMPTS)
        assert path.read_text() == text


def test_a_batch_of_other_prompts_is_not_gone_on_with(path: Path) -> None:
    with ResultsFile(path, PROMPTS) as results:
        results.begin()
    with pytest.raises(ResultsError, match=r"of other prompts .*; remove it and results.jsonl.ba"):
        ResultsFile(path, OTHERS)
    Path(f"{path}.batch").write_text("{}")
    with pytest.raises(ResultsError, match="batch is not what this client writes"):
        ResultsFile(path, PROMPTS)


def test_a_file_that_was_made_for_nothing_is_gone(path: Path) -> None:
    with ResultsFile(path, PROMPTS):
        assert path.exists()
    assert not path.exists()
