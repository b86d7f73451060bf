"""Files that are no recordings, and recordings that were cut off or spoiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.recording import RecordingError, first_line
from jaxserve.simulator import replay
from tests.engine.test_recorder import HEADER, Story


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a recording"),
        ("Once upon a time", "not a recording"),
        ("{}", "not a recording, 'recording' is missing"),
        (json.dumps({"recording": 99}), "recording format 99, this version reads 4, 5, 6"),
        (
            first_line(HEADER, 0.0).replace("jaxserve", "x").replace("began", "b"),
            "not a rec",
        ),
        (first_line(HEADER, 0.0).replace('"num_blocks": 64', '"num_blocks": 0'), "num_blo"),
        (
            first_line(HEADER, 0.0).replace('"max_queue": 8', '"max_queue": "x"'),
            "max_queue must be a whole number, got 'x'",
        ),
    ],
)
def test_what_is_no_recording_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message):
        replay.read(path)
    with pytest.raises(RecordingError, match="No such file"):
        replay.read(tmp_path / "none")


@pytest.mark.parametrize(
    "line",
    [
        '["arrival",9,NaN,1,1,0,null,null,null,1]',
        '["arrival","x",0,1,1,0,null,null,null,1]',
        '["arrival",9,0,1,1,0,"x",null,null,1]',
        '["end",0,-3,"stop",0,1.0]',
        '["end",0,3,4,0,1.0]',
        '["end",1e400,3,"stop",0,1.0]',
        '["lost",99999999999999999999]',
        '["lost",true]',
    ],
)
def test_a_value_that_is_none_is_no_part_of_a_recording(line: str, tmp_path: Path) -> None:
    check_refused(tmp_path / "served.jsonl", first_line(HEADER, 0.0), line)


@pytest.mark.parametrize(
    ("place", "value"),
    [(2, "null"), (-4, "[1]"), (-3, '["x"]'), (-3, "[-1]"), (-3, 0), (-2, "-1"), (-1, "null")],
)
def test_nor_is_a_step_with_such_a_value(place: int, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path)
    story.step(0)
    story.over()
    head, text = path.read_text().splitlines()
    step = json.loads(text)
    step[place] = json.loads(str(value))
    check_refused(path, f"{head}\n", json.dumps(step))


def check_refused(path: Path, head: str, line: str) -> None:
    path.write_text(f'{head}{line}\n["lost",1]\n')
    with pytest.raises(RecordingError, match=r"served\.jsonl, line 2: not part of a recording"):
        replay.read(path)


def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path)
    story.arrive(0)
    story.arrive(1)
    for _ in range(12):
        story.step(0)
    story.over()
    whole = path.read_text()
    path.write_text(whole[:-9])
    recording = replay.read(path)
    assert recording.notes == (f"the last line of {path} is torn: left out",)
    assert len(recording.steps) == 11
    traffic = replay.traffic_of(recording)
    assert traffic.workload.output_len.tolist() == [11]
    assert traffic.notes == (
        "1 requests ended, or were still waiting, without a token: left out",
        "1 requests had not ended: they write what they had by then",
    )
    path.write_text(whole.replace('["step"', '["stop"', 1))
    with pytest.raises(RecordingError, match=r"served\.jsonl, line 4: not part of a recording"):
        replay.read(path)
