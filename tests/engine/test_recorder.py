"""What is written of what was served, and what is not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import Config, ConfigError
from jaxserve.engine import recorder as module
from jaxserve.engine.output import FinishReason
from jaxserve.engine.recorder import Recorder, check_path
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.stats import RequestStats
from jaxserve.sched.cost.cost_model import BatchFeatures, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.recording import Header, first_line, older
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.simulator import replay
from tests.cost_models import FLAT
from tests.engine.harness import engine, send
from tests.server.fake_engine import step_stats
from tests.simulator.grouped import simulate

HEADER = Header(
    began="2026-01-01T00:00:00+00:00",
    versions={"jaxserve": "0"},
    model="none",
    dtype="float32",
    device="none",
    policy="sarathi",
    seed=0,
    overlap=True,
    max_batch_tokens=64,
    max_prefill_tokens=64,
    max_rows=8,
    max_queue=8,
    max_model_len=64,
    num_blocks=64,
    block_size=4,
    host_slots=0,
    hidden_read=None,
    rho=None,
    cost_model=FLAT,
    padding=Padding((8,), (64,)),
)
TARGETS = SLO(ttft=0.5, jct=4.0, max_tbt=7.0)


class Story:
    """Tells a recorder of requests that come, get a token a step, and end. A second a step."""

    def __init__(
        self,
        path: Path,
        max_bytes: int = 10**9,
        depth: int = module.DEPTH,
        header: Header = HEADER,
    ) -> None:
        self.now = 100.0
        self.recorder = Recorder(path, header, max_bytes, lambda: self.now, depth)

    def arrive(
        self, number: int, adapter: str = "", moved: tuple[float, int, int] | None = None
    ) -> None:
        """moved: how long ago it came to another engine, and what this one is told."""
        params = SamplingParams(max_tokens=50, temperature=float(number % 2))
        name, tier = ("interactive", "offline")[number % 2], Tier(number % 2)
        prompt = (7,) * (number + 1)
        request = Request(
            f"secret-{number}", prompt, params, TARGETS, tier, slo_class=name, value=3.0
        )
        request = dataclasses.replace(request, adapter=adapter, arrival=self.now)
        if moved is not None:
            since, *told = moved
            request = dataclasses.replace(request, arrival=self.now - since, moved=(0.1, since))
            self.recorder.on_moved(number, *told)
        self.recorder.on_arrival(number, request)

    def step(self, *received: int, **drafts: Any) -> None:
        self.now += 1.0
        n = len(received)
        features = BatchFeatures(n, 8, np.int64(9 * n), n, 0, 0, 0)
        told = dataclasses.replace(
            step_stats(n), features=features, received=received, end=self.now, device_time=0.9
        )
        told = dataclasses.replace(told, **drafts)
        self.recorder.on_step(told)

    def end(
        self, number: int, tokens: int, reason: FinishReason = FinishReason.STOP, **drafts: int
    ) -> None:
        stats = RequestStats(number, reason, Tier.REALTIME, number + 1, tokens, 2, 0.1, 0.2, 7.5)
        self.recorder.on_finish(dataclasses.replace(stats, **drafts))

    def over(self) -> None:
        self.recorder.on_stop()


def test_what_is_told_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path)
    story.arrive(0)
    story.step(0)
    story.arrive(1)
    for _ in range(11):
        story.step(0, 1)
    story.end(0, 12)
    story.end(1, 11, FinishReason.CANCELLED)
    story.over()
    recording = replay.read(path)
    assert recording.header == HEADER
    assert recording.notes == ()
    assert recording.ends[1].reason == "cancelled" and recording.ends[0].lifetime == 7.5
    assert recording.steps.device_time.tolist() == [0.9] * 12
    assert recording.steps.features.decode_kv.tolist() == [9] + [18] * 11
    traffic = replay.traffic_of(recording)
    assert traffic.notes == ()
    workload = traffic.workload
    assert workload.arrival.tolist() == [0.0, 1.0]
    assert workload.prompt_len.tolist() == [1, 2]
    assert workload.output_len.tolist() == [12, 11]
    assert workload.limit.tolist() == [50, 50]
    assert workload.max_tbt.tolist() == [7.0, 7.0]
    assert workload.greedy.tolist() == [True, False]
    assert workload.tier.tolist() == [0, 1]
    assert workload.value.tolist() == [3.0, 3.0]
    assert [workload.terms.classes[i] for i in workload.terms.slo_class] == [
        "interactive",
        "offline",
    ]
    assert workload.ttft.tolist() == [0.5, 0.5] and np.isinf(workload.tbt).all()
    served = replay.served(recording)
    assert served.requests.ttft.tolist() == [1.0, 1.0]
    assert served.requests.preemptions.tolist() == [2, 2]
    assert served.batches.start[0] == pytest.approx(0.1)
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("max_bytes", [10**9, 4000])
def test_what_comes_from_another_engine_goes_on_where_it_was(
    max_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path, max_bytes)
    story.arrive(0)
    story.step(0)
    story.arrive(1, moved=(3.0, 20, 12))  # it came before the engine began
    story.arrive(2, moved=(0.2, 0, 0))  # it had no token yet
    story.arrive(3)
    for _ in range(11):
        story.step(0, 1, 2, 3)
    story.end(1, 31)
    story.end(2, 11)
    story.end(3, 11)
    story.end(0, 12)
    story.over()
    recording = replay.read(path)
    carried = sum(one.carried for one in recording.arrivals.values())
    traffic = replay.traffic_of(recording)
    assert "2 requests came from other engines" in " ".join(traffic.notes)
    workload, steps = traffic.workload, len(recording.steps)
    assert carried == 4 * (steps < 12), "the last file begins with who was there"
    if carried:
        assert workload.prompt_len[1] == 2 + 20 + 11 - steps
        assert workload.limit[1] == 50 - 20 - 11 + steps
        assert workload.output_len.tolist() == [steps] * 4
        assert not workload.brought.any() and np.isinf(workload.ttft).all()
        return
    assert workload.arrival.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert workload.prompt_len.tolist() == [1, 2 + 20, 3, 4]
    assert workload.output_len.tolist() == [12, 11, 11, 11]
    assert workload.limit.tolist() == [50, 30, 50, 50]
    assert workload.brought.tolist() == [0, 12, 0, 0]
    assert workload.ttft == pytest.approx([0.5, np.inf, 0.3, 0.5])
    assert workload.jct == pytest.approx([4.0, 1.0, 3.8, 4.0])
    served = replay.served(recording).requests
    assert served.output_len.tolist() == [12, 11, 11, 11]
    assert served.ttft.tolist() == [1.0] * 4


def test_drafts_are_told_and_say_how_well_a_request_can_be_guessed(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path, header=dataclasses.replace(HEADER, drafters=("lookup",)))
    for number in (0, 1):
        story.arrive(number)
    story.step(0, 1)
    story.step(0, 0, 0, 1, num_draft_tokens=4, accepted={"lookup": 2})
    for number, drafts in ((0, {"drafted": 3, "accepted": 2, "guessed": 3, "right": 2}), (1, {})):
        story.end(number, 4 - 2 * number, **drafts)
    story.over()
    recording = replay.read(path)
    assert recording.header.drafters == ("lookup",)
    assert recording.columns["num_draft_tokens"].tolist() == [0, 4]
    assert recording.columns["num_accepted"].tolist() == [0, 2]
    workload = replay.traffic_of(recording).workload
    assert workload.output_len.tolist() == [4, 2]
    assert workload.guess_share.tolist() == [0.75, 0.0]
    assert workload.guess_right.tolist() == [pytest.approx(2 / 3), 0.0]
    served = replay.served(recording)
    assert served.requests.drafts is not None
    assert [one.tolist() for one in served.requests.drafts] == [[3, 0], [2, 0]]
    summary = served.summary()
    assert (summary["drafted_tokens"], summary["accepted_tokens"]) == (3, 2)
    (gaps, _) = served.requests.tbt
    assert gaps.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])


def test_a_large_file_goes_on_as_another_and_the_new_one_says_who_is_there(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story, steps = Story(path, max_bytes=4000), 40
    story.arrive(0)
    for number in range(1, steps):
        story.arrive(number)
        story.step(0, number)
        story.end(number, 1)
    story.step(0)
    story.end(0, steps)
    story.over()
    assert path.stat().st_size <= 4000 and older(path).stat().st_size <= 4000
    whole = replay.read(path)
    assert whole.start > 0, "there were more than two files"
    count = len(whole.steps)
    assert 5 < count < steps
    traffic = replay.traffic_of(whole)
    assert any("older than the recording" in note for note in traffic.notes)
    first = traffic.workload.select(np.array([0]))
    assert first.output_len[0] == count
    assert first.prompt_len[0] == 1 + steps - count, "what it had written counts as its prompt"
    assert first.limit[0] == 50 - (steps - count)
    assert np.isinf(first.ttft[0]) and np.isinf(first.jct[0])
    assert len(traffic.workload) == count
    assert replay.served(whole).requests.output_len.tolist() == traffic.workload.output_len.tolist()
    # By itself, the newer one has less.
    older(path).unlink()
    assert len(replay.read(path).steps) < count


def test_requests_whose_ends_were_lost_do_not_pile_up(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path, max_bytes=4000)
    for number in range(60):
        story.arrive(number)
        story.step(number)
    story.over()
    lines = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    carried = [values for name, *values in lines if name == "arrival" and values[10]]
    assert 0 < len(carried) <= HEADER.max_queue + HEADER.max_rows
    older(path).unlink()
    replay.traffic_of(replay.read(path))


def test_a_recording_knows_what_experts_take_and_older_ones_of_none(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    priced = dataclasses.replace(FLAT.coefficients, per_expert=1e-5)
    model = LinearCostModel(priced, 1, num_experts=8, experts_per_token=2)
    path.write_text(first_line(dataclasses.replace(HEADER, cost_model=model), 0.0))
    assert replay.read(path).header.cost_model == model
    older_header = json.loads(first_line(HEADER, 0.0))
    del older_header["cost_model"]["num_experts"]
    del older_header["cost_model"]["experts_per_token"]
    del older_header["cost_model"]["coefficients"]["per_expert"]
    path.write_text(json.dumps(older_header) + "\n")
    assert replay.read(path).header == HEADER


@pytest.mark.parametrize(
    ("earlier", "note"),
    [
        (
            first_line(dataclasses.replace(HEADER, began="earlier"), 0.0),
            " is of another start of the server: left out",
        ),
        (
            json.dumps({"recording": 0}),
            ": recording format 0, this version reads 4, 5, 6, 7, 8, 9, 10, 11, 12: left out",
        ),
    ],
)
def test_the_file_that_was_there_is_kept_and_left_out(
    tmp_path: Path, earlier: str, note: str
) -> None:
    path = tmp_path / "served.jsonl"
    path.write_text(earlier)
    story = Story(path)
    story.arrive(0)
    story.step(0)
    story.over()
    recording = replay.read(path)
    assert len(recording.steps) == 1 and recording.notes == (f"{older(path)}{note}",)
    assert older(path).read_text() == earlier


def test_nobody_else_may_read_any_of_it(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    path.write_text("of an older version")
    path.chmod(0o644)
    mask = os.umask(0)
    try:
        story = Story(path, max_bytes=3000)
        modes = {}
        for file in tmp_path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # the writer renames it meanwhile
                modes[file.name] = file.stat().st_mode & 0o777
        story.arrive(0)
        for _ in range(30):
            story.step(0)
        story.over()
    finally:
        os.umask(mask)
    modes |= {f.name: f.stat().st_mode & 0o777 for f in tmp_path.iterdir()}
    assert set(modes) >= {"served.jsonl", "served.jsonl.1", "served.jsonl.lock"}
    assert set(modes.values()) == {0o600}


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    ("version", "lacks"),
    [(11, 3), (10, 5), (9, 7), (8, 8), (7, 8), (6, 10), (5, 11), (4, 12)],
)
def test_recordings_of_the_last_formats_are_read(tmp_path: Path, version: int, lacks: int) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path)
    story.arrive(0)
    story.step(0)
    story.over()
    header, *events = map(json.loads, path.read_text().splitlines())
    header["recording"] = version
    assert events[0][-12:] == [7.0, 3.0, 0, 0, 0, 0, None, 1, 0, None, 0, 0]
    less = {"arrival": lacks, "step": 2, "end": 4, "features": 1}
    if version >= 8:
        less |= {"step": 0, "end": 0, "features": max(9 - version, 0)}
    else:
        del header["drafters"]
    for line in events:
        if line[0] == "step":
            at = header["columns"]["step"].index("features") + 1
            del line[at][len(line[at]) - less["features"] :]
        del line[len(line) - less[line[0]] :]
    for name, fewer in less.items():
        columns = header["columns"][name]
        del columns[len(columns) - fewer :]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *events)))
    recording = replay.read(path)
    assert recording.columns["num_draft_tokens"].tolist() == [0]
    workload = replay.traffic_of(recording).workload
    assert not workload.adapter.any()
    assert (workload.ttft.tolist(), workload.value.tolist()) == (
        [0.5],
        [3.0 if version > 5 else 1.0],
    )
    assert workload.guess_share.tolist() == [0.0]
    assert workload.max_tbt.tolist() == [np.inf if version == 4 else 7.0]


def test_adapters_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    story = Story(path)
    names = ["", "law", "sql", "law", ""]
    for number, name in enumerate(names):
        story.arrive(number, name)
    story.step(*range(len(names)))
    for number in range(len(names)):
        story.end(number, 1)
    story.over()
    assert not any(name in path.read_text() for name in ("law", "sql"))
    workload = replay.traffic_of(replay.read(path)).workload
    assert workload.adapter.tolist() == [0, 1, 2, 1, 0]


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_path("~/served.jsonl")
    Story(Path("~/served.jsonl")).over()
    assert replay.read(tmp_path / "served.jsonl").header == HEADER


def test_what_comes_too_fast_is_counted_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, slow, writing = tmp_path / "served.jsonl", threading.Event(), threading.Event()
    event = module._event

    def stuck(*args: Any) -> Any:
        writing.set()
        assert slow.wait(60)
        return event(*args)

    monkeypatch.setattr(module, "_event", stuck)
    story = Story(path, depth=4)
    story.arrive(0)
    assert writing.wait(60)
    for _ in range(20):
        story.step(0)  # four of them find room
    assert story.recorder.lost == 16
    slow.set()
    story.over()
    recording = replay.read(path)
    assert len(recording.steps) == 4
    assert recording.notes == ("16 events came too fast to be written: they are not in it",)


def test_a_disk_that_is_full_does_not_stop_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module._Writer, "write", full)
    story = Story(tmp_path / "served.jsonl", depth=4)
    for number in range(100):
        story.arrive(number)
    story.over()
    assert "nothing more is recorded: [Errno 28] No space left on device" in caplog.text


def test_two_do_not_record_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    first = Story(path)
    first.arrive(0)
    for again in (lambda: Story(path), lambda: check_path(str(path))):
        with pytest.raises(ConfigError, match=f"^engine.record: another server records to {path}$"):
            again()
    Story(tmp_path / "other.jsonl").over()
    first.step(0)
    first.over()
    assert len(replay.read(path).steps) == 1 and not older(path).exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.jsonl", "served.jsonl"]
    Story(path).over()  # now it is free


def _no_folder(path: Path) -> str:
    return str(path / "none" / "file")


def _older_is_a_folder(path: Path) -> str:
    older(path / "served").mkdir()
    return str(path / "served")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (str, "--config.engine.record: .* is a folder"),
        (_no_folder, "--config.engine.record: there is no folder .*none"),
        (lambda path: os.devnull, f"engine.record: {os.devnull} is not a file"),
        (_older_is_a_folder, r"engine.record: .*served cannot go on as .*served\.1"),
    ],
)
def test_where_nothing_can_be_written_is_said_first(
    where: Callable[[Path], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        check_path(where(tmp_path))
    check_path("")
    check_path(str(tmp_path / "file"))


def test_an_engine_says_it_before_it_loads_anything(tmp_path: Path) -> None:
    config = Config().with_fields(
        model__path=str(tmp_path / "no model"), engine__record=str(tmp_path / "none" / "file")
    )
    with pytest.raises(ConfigError, match=r"--config\.engine\.record: there is no folder"):
        build_engine(config, progress=False)


def test_a_real_engine_records_what_it_serves(shapes: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    with engine(shapes["opt"], engine__record=str(path)) as running:
        name, stream = send(running, [3] * 9, max_tokens=40, ignore_eos=True)
        _, other = send(running, [4] * 5, max_tokens=20, ignore_eos=True, n=2, temperature=1.0)
        other.wait()
        stream.wait()
        assert name not in path.read_text()
    recording = replay.read(path)
    assert recording.notes == replay.traffic_of(recording).notes == ()
    workload = replay.traffic_of(recording).workload
    assert workload.prompt_len.tolist() == [9, 5, 5]
    assert workload.output_len.tolist() == [40, 20, 20]
    assert workload.greedy.tolist() == [True, False, False]
    served = replay.served(recording)
    assert served.requests.ttft.min() > 0
    times = np.array([t for output in stream.outputs for t in output.token_times])
    assert np.diff(served.requests.token_times[:40]) == pytest.approx(np.diff(times), abs=1e-6)
    system = replay.system_of(recording)
    assert system.host.plan + system.host.plan_row > 0 and system.padding is not None
    assert system.cost_model.batch_time(recording.steps.features).min() > 0


def test_what_prompts_share_is_read_again(tmp_path: Path) -> None:
    """By keys of their blocks alone: an answer goes on a prompt, and another begins as both."""
    path, keys = tmp_path / "served.jsonl", [bytes([i]) * 16 for i in range(9)]
    story = Story(path)

    def arrive(number: int, prompt: int, *chain: bytes) -> None:
        request = Request(f"{number}", (7,) * prompt, block_keys=chain)
        story.recorder.on_arrival(number, dataclasses.replace(request, arrival=story.now))

    def end(number: int, *chain: bytes) -> None:
        stats = RequestStats(number, FinishReason.STOP, Tier.REALTIME, 9, 6, 0, 0.1, 0.2, 7.5)
        story.recorder.on_finish(dataclasses.replace(stats, block_keys=chain))

    arrive(0, 9, *keys[:2])  # two blocks of four tokens, and one more token
    for _ in range(6):
        story.step(0)
    end(0, *keys[:3])
    arrive(1, 17, *keys[:3], keys[5])
    arrive(2, 6, keys[0])
    arrive(3, 18, *keys[:3], keys[5])
    arrive(4, 5, keys[8])
    story.step(1, 2, 3, 4)
    story.over()
    recording = replay.read(path)
    workload = replay.traffic_of(recording).workload
    assert workload.prefix_len.tolist() == [0, 12, 4, 16, 0]
    assert workload.prefix_of.tolist() == [-1, 0, 1, 1, -1]
    assert b"\x00" * 8 not in path.read_bytes(), "no key is written that guesses could be tried on"
    part = replay.traffic_of(recording.part(1, 5)).workload
    assert part.prefix_of.tolist() == [-1, 0, 0, -1]
    assert part.prefix_len.tolist() == [0, 4, 16, 0]


def test_what_waits_for_what_is_read_again(tmp_path: Path) -> None:
    """A plan, two branches of two calls, one of which takes longer, and a report."""
    path = tmp_path / "served.jsonl"
    story, came, lasted = Story(path), dict[int, float](), dict[int, float]()

    alone = ProgramCall(2, False, "", (), None, np.inf), ProgramCall(3, True, "", (), None, 90.0)
    programs = dict(zip((3, 4), alone, strict=True))
    tools = {5: ("grep",), 6: ("grep", "cat"), 7: ("grep",)}

    def arrive(number: int, after: float, *chain: int) -> None:
        """So long after what was told last, with a chain of blocks."""
        story.now += after
        came[number] = story.now
        keys = tuple(bytes([one]) * 16 for one in chain)
        request = Request(f"{number}", (7,) * (4 * len(chain) + 1), arrival=story.now)
        usual = ProgramCall(1, True, "", tools.get(number, ()), 1.0, 60.0 if number < 2 else 90.0)
        request = dataclasses.replace(request, block_keys=keys)
        call = programs.get(number, usual)
        story.recorder.on_program_call(number, call)
        story.recorder.on_arrival(number, request)

    def end(number: int, *chain: int) -> None:
        """Now: with all of its blocks."""
        story.step(number)
        lasted[number] = story.now - came[number]
        keys = tuple(bytes([one]) * 16 for one in chain)
        stats = RequestStats(number, FinishReason.STOP, Tier.REALTIME, 9, 1, 0, 0.1, 0.2, 7.5)
        stats = dataclasses.replace(stats, e2e=lasted[number], block_keys=keys)
        story.recorder.on_finish(stats)

    for tell, *told in (
        (arrive, 0, 0.0, 1),  # the plan
        (end, 0, 1, 2),
        (arrive, 1, 2.0, 10),  # the branches
        (arrive, 2, 0.5, 20),
        (arrive, 3, 0.0, 30),
        (arrive, 4, 0.0, 40),
        (end, 1, 10, 11),
        (arrive, 5, 3.0, 10, 11, 12),  # goes on with the first
        (end, 5, 10, 11, 12, 13),
        (end, 2, 20, 21),
        (arrive, 6, 1.0, 20, 21, 22),  # goes on with the second; the first has ended, too
        (end, 6, 20, 21, 22, 23),
        (arrive, 7, 0.25, 1, 2, 3),  # the report goes on with the plan
        *((end, number) for number in (7, 3, 4)),
    ):
        tell(*told)  # type: ignore[operator]
    story.over()
    workload = replay.traffic_of(replay.read(path)).workload
    columns = workload.programs
    assert columns.program.tolist() == [0, 0, 0, -1, 1, 0, 0, 0]
    assert list(zip(columns.parent.tolist(), columns.child.tolist(), strict=True)) == [
        (0, 1), (0, 2), (1, 5), (2, 6), (5, 7), (6, 7)
    ]  # fmt: skip
    assert columns.wait.tolist() == pytest.approx([0, 2.0, 2.5, 0, 0, 3.0, 1.0, 0.25])
    assert columns.deadline.tolist() == [90.0] * 3 + [np.inf] + [90.0] * 4
    assert columns.tool.tolist() == [-1, -1, -1, -1, -1, 0, 1, 0]
    assert columns.tools == ("tool 1", "tool 2")
    assert b"run" not in path.read_bytes() and b"grep" not in path.read_bytes()
    served = replay.served(replay.read(path)).programs
    assert served is not None and served.number.tolist() == [0, 1]
    assert served.makespan.tolist() == pytest.approx([came[7] + lasted[7] - came[0], lasted[4]])
    # On a slower system each comes later, after those that it waits for.
    slow = LinearCostModel(dataclasses.replace(FLAT.coefficients, token_bias=9.0), 1)
    again = simulate("sarathi", workload, slow, kv_tokens=999).requests
    late = again.workload.programs
    ends = again.finish[late.parent] + late.wait[late.child]
    assert (again.arrival[late.child] >= ends - 1e-9).all() and again.finished.all()


def test_tools_without_end_take_bounded_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_TOOLS", 3)
    story = Story(tmp_path / "served.jsonl")
    for number, name in enumerate("abcabcdea"):
        story.recorder.on_program_call(number, ProgramCall(1, True, "", (name,), 1.0, np.inf))
        story.recorder.on_arrival(number, Request(f"{number}", (7,), arrival=story.now))
    story.over()
    found = replay.read(tmp_path / "served.jsonl").arrivals
    assert [one.tool for one in found.values()] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert len(story.recorder._tools) == 3


def test_programs_that_no_call_names_are_replayed(tmp_path: Path, shapes: dict[str, Path]) -> None:
    """A chat that calls a tool, its next turn, and a request by itself."""
    path = tmp_path / "served.jsonl"
    with engine(shapes["opt"], engine__record=str(path)) as on:
        name, stream = send(on, [5, 6, 7], max_tokens=4)
        stream.wait()
        on.note_tools(name, {"call_1": "search"})
        send(on, [1, 2, 3], max_tokens=2, n=2, continues=(("tool", "call_1"),))[1].wait()
        send(on, [8, 9], max_tokens=2, n=3)[1].wait()
    programs = replay.traffic_of(replay.read(path)).workload.programs
    assert programs.program.tolist() == [0] * 3 + [-1] * 3
    assert (programs.parent.tolist(), programs.child.tolist()) == ([0, 0], [1, 2])
    assert programs.tool.tolist() == [-1, 0, 0, -1, -1, -1] and programs.tools == ("tool 1",)
    assert programs.wait[1] == programs.wait[2] > 0
