"""Load tests of programs: what is sent when, with which prompts, and what is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench import cli, runs
from jaxserve.bench.load_target import EngineTarget, _said, clock
from jaxserve.bench.report import text
from jaxserve.client.messages import make_request
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import Program, Request
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.bench.test_cli import SMALL, bench, model
from tests.server.fake_engine import INFO
from tests.simulator.workloads.test_programs import closed, programs

__all__ = ["bench", "model"]  # fixtures
Tell = Callable[[Output], None]


class Echo:
    """Answers each request at once, with tokens of its own, unless told to hold or to refuse it.

    hold: numbers of requests, in order of their coming, whose answer waits for the next request.
    """

    def __init__(self, hold: tuple[int, ...] = (), refuse: tuple[int, ...] = ()) -> None:
        self.requests: list[Request] = []
        self.log: list[str] = []
        self._hold, self._refuse, self._held = hold, refuse, list[tuple[int, Tell]]()

    def check(self, request: Request) -> None:
        pass

    def cancel(self, request_id: str) -> None:
        pass

    def info(self) -> Any:
        return dataclasses.replace(INFO, vocab_size=96, max_model_len=64, pool_tokens=64)

    def submit(self, request: Request, on_output: Tell) -> None:
        number = len(self.requests)
        self.requests.append(request)
        self.log.append(f"came {number}")
        held, self._held = self._held, []
        if number in self._refuse:
            raise QueueFull("full")
        self._held = [(number, on_output)]
        if number not in self._hold:
            held, self._held = [*held, (number, on_output)], []
        for which, tell in held:
            self.log.append(f"ended {which}")
            count = self.requests[which].sampling.max_tokens
            ids = tuple(range(50 + which, 50 + which + count))
            times = (clock(),) * count
            name = self.requests[which].id
            tell(Output(name, 0, ids, finish_reason=FinishReason.LENGTH, token_times=times))


def exact(work: Workload) -> Workload:
    """Nobody may write more than it does."""
    return dataclasses.replace(work, limit=work.output_len)


def test_a_call_has_the_answer_in_its_prompt_and_says_its_program() -> None:
    made = programs([0, 0, 1], [(0, 1)], told=np.ones(3, bool))
    lengths = Lengths(np.array([3, 7, 4]), np.array([2, 1, 1]))
    prefixes = Prefixes(np.array([-1, 0, 0]), np.array([0, 5, 2]))
    echo = Echo()
    work = Workload.create(np.zeros(3), lengths, prefixes=prefixes, programs=made)
    found = runs.load(EngineTarget(echo), exact(work), 0)
    first, other, second = (request.prompt for request in echo.requests)
    assert second[:5] == (*first, 50, 51) and len(second) == 7
    assert other[:2] == first[:2]
    said = [request.program for request in echo.requests]
    assert all(one is not None for one in said)
    assert [(one.expected_calls, one.over) for one in said if one] == [
        (1, False), (0, True), (0, True)
    ]  # fmt: skip
    names = [one.id for one in said if one]
    assert names[0] == names[2] != names[1]
    assert found["programs"]["finished"] == 2 and found["programs"]["calls"] == 3
    assert found["requests"]["finished"] == 3
    again = Echo()
    runs.load(EngineTarget(again), exact(work), 0)
    assert again.requests[0].program != said[0], "another run is of other programs"
    assert again.requests[0].prompt == first


def test_a_join_is_sent_when_all_have_ended() -> None:
    """The answer of the second branch waits for a request by itself, which comes later."""
    made = programs([0, 0, 0, 0, -1], [(0, 1), (0, 2), (1, 3), (2, 3)])
    echo = Echo(hold=(2,))
    runs.load(EngineTarget(echo), exact(closed(made, [0.0, 0.0, 0.0, 0.0, 0.02])), 0)
    assert echo.log[-3:] == ["ended 3", "came 4", "ended 4"]
    assert echo.log.index("ended 2") < echo.log.index("came 4")
    assert echo.log.index("ended 2") > echo.log.index("came 3")


def test_a_refused_call_ends_its_program() -> None:
    made = programs([0, 1, 0, 1], [(0, 2), (1, 3)])
    echo = Echo(refuse=(1,))
    found = runs.load(EngineTarget(echo), exact(closed(made)), 0)
    assert len(echo.requests) == 3
    assert found["requests"] == {"finished": 2, "rejected": 1, "failed": 0}
    assert found["programs"]["given_up"] == 1 and found["programs"]["finished"] == 1


def test_so_many_programs_are_in_progress() -> None:
    made = closed(programs([0, 1, 2, 3, 0, 1], [(0, 4), (1, 5)], at_once=2))
    echo = Echo(hold=(0,))
    runs.load(EngineTarget(echo), exact(made), 0)
    # The first answer waits for the second program; then both go on, and others take their places.
    names = [request.program.id.split("-")[1] for request in echo.requests if request.program]
    assert names == ["0", "1", "0", "1", "2", "3"]


def test_the_command_serves_programs_of_a_trace(
    bench: Callable[..., dict[str, Any]], model: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "prompt_tokens,output_tokens,program,after,wait_ms,tool,program_deadline_ms\n"
        "9,5,a,,,,60000\n9,5,b,,,,0.001\n9,5,a,1,2,grep,\n9,5,c,,,,\n9,5,b,2,,,\n"
    )
    found = bench("load", model, *SMALL, f"--lengths={path}", "--programs=2", "--scale=1.5")
    results = found["results"]
    assert found["workload"]["prompt_tokens"] == 5 * 6
    assert results["requests"] == {"finished": 5, "rejected": 0, "failed": 0}
    about = results["programs"]
    assert (about["begun"], about["finished"], about["given_up"], about["calls"]) == (3, 3, 0, 5)
    assert about["attainment"] == 0.5
    assert about["tool_time_s"] == pytest.approx(0.002 / 3)
    said = text(found)
    assert "3 begun, 3 finished, 0 given up; 5 calls" in said and "programs in time" in said


def test_what_a_call_says_reaches_a_server() -> None:
    assert _said(None) is None
    assert _said(Program("a", 1.5, 3)) == {
        "id": "a", "deadline_ms": 1500.0, "expected_calls": 3, "over": False
    }  # fmt: skip
    assert make_request([1], program=_said(Program("a", over=True))).program.over


def test_closed_sessions_are_known_by_name() -> None:
    args = cli.parse(["load", "--lengths=closed-agent", "--programs=24", "--scale=16"])
    workload, _ = cli._prepare(args)
    assert workload["programs"] == 24 and workload["num_requests"] >= 1000
