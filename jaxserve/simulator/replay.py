"""Turns a recording into input for simulations: the traffic, and the system that served it.

The traffic is what was served: cancelled requests write only what they had written, and output
lengths of refused requests are unknown. The system is fitted to the steps.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.sched.cache.block_sizes import tokens_in
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.cost_model_fit import FitError
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.served_steps import ServedSteps, fit_device, fit_host
from jaxserve.sched.cost.step_residuals import fit_scatter
from jaxserve.sched.recording import (
    FEATURES,
    Arrival,
    End,
    Event,
    Header,
    Lost,
    RecordedFile,
    RecordingError,
    Step,
    older,
)
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.simulator.program_records import ProgramRecords
from jaxserve.simulator.results import BatchRecords, RequestRecords, SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.workloads.guessable import Guessable
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.programs import NO_PROGRAM, NO_TOOL, Programs
from jaxserve.simulator.workloads.workload import Lengths, Workload

LEAST_LEFT = 1e-6  # seconds of a target that has passed
_NUMBERS = tuple(name for name in Step._fields if name not in ("features", "received"))


@dataclass(frozen=True)
class Recording:
    """What an engine served over s steps and t tokens.

    Attributes:
        header: The engine.
        start: When the recording begins, seconds since `Header.began`.
        arrivals: By request number.
        ends: By request number; without requests that have not ended.
        steps: The steps as cost models are fitted to them.
        columns: [s], the other numbers of `recording.Step`, by field.
        token_request: int64 [t], the request of each token.
        token_step: int64 [t], the step that each token came from.
        notes: What was left out, one line each.
    """

    header: Header
    start: float
    arrivals: dict[int, Arrival]
    ends: dict[int, End]
    steps: ServedSteps
    columns: dict[str, np.ndarray]
    token_request: np.ndarray
    token_step: np.ndarray
    notes: tuple[str, ...] = ()

    def part(self, first: int, behind: int) -> Recording:
        """Cuts out requests `first` to `behind` - 1, with the steps from the arrival of `first` to
        that of `behind`, if there is one. For recordings in which no other requests run at that
        time."""
        steps = self.within(first, behind)
        mine = steps[self.token_step]
        kept = [n for n in self.arrivals if first <= n < behind]
        found = self.prefixes(kept)
        return dataclasses.replace(
            self,
            start=self.arrivals[first].time,
            arrivals={
                n: self.arrivals[n]._replace(prefix_of=kept[of] if tokens else 0, prefix_len=tokens)
                for n, of, tokens in zip(
                    kept, found.prefix_of.tolist(), found.prefix_len.tolist(), strict=True
                )
            },
            ends={n: one for n, one in self.ends.items() if first <= n < behind},
            steps=self.steps.select(steps),
            columns={name: column[steps] for name, column in self.columns.items()},
            token_request=self.token_request[mine],
            token_step=(np.cumsum(steps) - 1)[self.token_step[mine]],
        )

    def prefixes(self, numbers: Sequence[int]) -> Prefixes:
        """The prefixes that these requests, ascending, share with earlier ones among them."""
        index = {number: i for i, number in enumerate(self.arrivals)}
        of, tokens = np.full(len(index), NO_PREFIX, np.int64), np.zeros(len(index), np.int64)
        for i, one in enumerate(self.arrivals.values()):
            if one.prefix_len and one.prefix_of in index:
                of[i], tokens[i] = index[one.prefix_of], one.prefix_len
        return Prefixes(of, tokens).select(np.array([index[n] for n in numbers], np.int64))

    def within(self, first: int, behind: int) -> np.ndarray:
        """Mask of the steps that `part` keeps, bool [s]."""
        until = self.arrivals[behind].time if behind in self.arrivals else np.inf
        end = self.columns["end"]
        return np.asarray((end > self.arrivals[first].time) & (end <= until))


def read(path: str | Path) -> Recording:
    """Reads a recording, with PATH.1 if the same engine wrote it: a server renames the file that it
    finds at its start. RecordingError names the file and the problem."""
    notes, before = list[str](), older(Path(path))
    files = [newest := RecordedFile(Path(path))]
    if before.exists():
        try:
            file = RecordedFile(before)
        except RecordingError as error:  # of another version, for example
            notes.append(f"{error}: left out")
        else:
            if file.header == newest.header:
                files.insert(0, file)
            else:
                notes.append(f"{before} is of another start of the server: left out")
    reader = _Reader()
    for file in files:
        reader.on_events(file.events())
        if file.torn:
            notes.append(f"the last line of {file.path} is torn: left out")
    if reader.lost:
        notes.append(f"{reader.lost} events came too fast to be written: they are not in it")
    return reader.recording(newest.header, files[0].start, notes)


def of_events(header: Header, events: Iterable[Event], *notes: str) -> Recording:
    """The recording of these events, from the start of the engine on."""
    reader = _Reader()
    reader.on_events(events)
    return reader.recording(header, 0.0, list(notes))


class _Reader:
    """Takes events one by one, since there may be too many to keep."""

    def __init__(self) -> None:
        self.lost = 0
        self._arrivals: dict[int, Arrival] = {}
        self._ends: dict[int, End] = {}
        self._numbers, self._features = array("d"), array("d")
        self._received, self._received_by = array("q"), array("q")
        self._steps = 0

    def on_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Arrival():  # PATH repeats unfinished requests
                    self._arrivals.setdefault(event.number, event)
                case End():
                    self._ends[event.number] = event
                case Lost():
                    self.lost = max(self.lost, event.events)
                case Step():
                    self._numbers.extend([getattr(event, name) for name in _NUMBERS])
                    self._features.extend(event.features)
                    self._received.extend(event.received)
                    self._received_by.extend([self._steps] * len(event.received))
                    self._steps += 1

    def recording(self, header: Header, start: float, notes: list[str]) -> Recording:
        """The recording of all events taken."""
        numbers = np.array(self._numbers).reshape(self._steps, len(_NUMBERS))
        columns = dict(zip(_NUMBERS, numbers.T, strict=True))
        features = np.array(self._features).reshape(self._steps, len(FEATURES))
        steps = ServedSteps(
            features=BatchFeatures(*features.T),
            **{
                field.name: columns.pop(field.name)
                for field in dataclasses.fields(ServedSteps)
                if field.name not in ("features", "after_idle")
            },
            after_idle=columns.pop("after_idle") > 0,
        )
        return Recording(
            header,
            start,
            dict(sorted(self._arrivals.items())),
            self._ends,
            steps,
            columns,
            np.array(self._received, np.int64),
            np.array(self._received_by, np.int64),
            tuple(notes),
        )


def system_of(recording: Recording, name: str = "recorded") -> System:
    """The engine as a system: its limits, pool and shapes, with costs fitted to its steps and their
    scatter. Raises RecordingError if there are too few steps."""
    header, steps = recording.header, recording.steps
    try:
        model = fit_device(steps, header.cost_model)
    except FitError as error:
        raise RecordingError(f"the recording says too little: {error}") from error
    host, took = fit_host(steps, model), steps.device_time > 0
    off = np.abs(model.batch_time(steps.features)[took] / steps.device_time[took] - 1.0)
    return System(
        name,
        model,
        kv_tokens=int(tokens_in(header.num_blocks, header.block_size)),
        max_batch_tokens=header.max_batch_tokens,
        max_prefill_tokens=header.max_prefill_tokens,
        max_rows=header.max_rows,
        block_size=header.block_size,
        padding=header.padding,
        host=host,
        about={
            "source": f"fitted to {len(steps)} recorded steps",
            "model": header.model,
            "dtype": header.dtype,
            "device": header.device,
            "versions": header.versions,
            "mean_error": float(off.mean()),
        },
        rho=header.rho,
        projects=header.hidden_read == "projected",
        scatter=fit_scatter(steps, model, host),
        transport=header.transport,
    )


@dataclass(frozen=True)
class Traffic:
    """A recording as a workload.

    Attributes:
        workload: The requests that wrote at least one token.
        notes: What was left out or changed, one line each.
    """

    workload: Workload
    notes: tuple[str, ...]


def traffic_of(recording: Recording) -> Traffic:
    """The requests, from the first arrival on. Requests that are older than the recording arrive at
    its start, with their generated tokens as part of their prompts and without TTFT or JCT targets.
    Those of other engines come when they moved, likewise, with the cached blocks that they brought
    and what was left of their targets. Raises RecordingError if no request wrote a token."""
    seen = np.unique(recording.token_request, return_counts=True)
    tokens = dict(zip(*(column.tolist() for column in seen), strict=True))
    outputs = {number: _output(recording, number, tokens) for number in recording.arrivals}
    there = [one for number, one in recording.arrivals.items() if outputs[number] > 0]
    if not there:
        raise RecordingError("there is no request in it that wrote a token")
    notes = []
    silent = len(recording.arrivals) - len(there)
    if silent:
        notes.append(f"{silent} requests ended, or were still waiting, without a token: left out")
    unended = sum(one.number not in recording.ends for one in there)
    if unended:
        notes.append(f"{unended} requests had not ended: they write what they had by then")
    early = [one.carried > 0 for one in there]
    if any(early):
        notes.append(f"{sum(early)} requests are older than the recording: they come at its start")
    moved = sum(one.came is not None for one in there)
    if moved:
        notes.append(f"{moved} requests came from other engines: they go on where they were")
    count = np.array([outputs[one.number] for one in there], np.int64)
    return Traffic(_workload(recording, there, count), tuple(notes))


def engine_of(header: Header) -> EngineOptions:
    """How the engine served that wrote a recording."""
    return EngineOptions(
        limits=header.limits,
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        host_tokens=header.host_slots // 2,
        max_queue=header.max_queue,
        overlap=header.overlap,
        prefix_caching=header.prefix_caching,
        retention=header.retention,
        groups=header.states or header.groups,
    )


def again(
    recording: Recording,
    system: System,
    *,
    seed: int | None = None,
    checked: bool | None = None,
    record_rows: bool = False,
) -> SimulationResult:
    """Simulates the traffic on `system`, with the policy, limits and pool that served it.

    Args:
        recording: The recording.
        system: Where to simulate it.
        seed: None for the recording's seed.
        checked: See `RunOptions`.
        record_rows: See `RunOptions`.
    """
    header = recording.header
    return simulate(
        header.policy,
        traffic_of(recording).workload,
        system,
        engine=engine_of(header),
        run=RunOptions(
            seed=header.seed if seed is None else seed, checked=checked, record_rows=record_rows
        ),
    )


def served(recording: Recording) -> SimulationResult:
    """The traffic as it was served, in the form of a simulation's result. Raises RecordingError if
    no request wrote a token."""
    known = np.array(list(recording.arrivals), np.int64)
    found = np.isin(recording.token_request, known)  # arrivals that were not lost
    mine, at = recording.token_request[found], recording.token_step[found]
    numbers, count = np.unique(mine, return_counts=True)
    if not len(numbers):
        raise RecordingError("there is no request in it that wrote a token")
    there = [recording.arrivals[number] for number in numbers.tolist()]
    workload = _workload(recording, there, count)
    origin = min(_begin(recording, one) for one in there)
    order = np.argsort(mine, kind="stable")
    times = recording.columns["end"][at[order]] - origin + recording.header.transport
    ends = [recording.ends.get(number) for number in numbers.tolist()]
    preemptions = _counts(ends, "preemptions")
    drafts = None
    if recording.header.drafters:
        drafts = (_counts(ends, "drafted"), _counts(ends, "accepted"))
    served_by, failed = np.zeros(len(there), np.int64), np.zeros(len(there), bool)
    requests = RequestRecords(workload, preemptions, served_by, times, count, failed, drafts=drafts)
    kv_tokens = int(tokens_in(recording.header.num_blocks, recording.header.block_size))
    programs = None
    if workload.programs.closed:
        programs = ProgramRecords.from_times(workload, requests.finish)
    batches = _batches(recording, origin)
    return SimulationResult(requests, batches, None, kv_tokens, False, programs=programs)


def _batches(recording: Recording, origin: float) -> BatchRecords:
    columns, steps = recording.columns, recording.steps
    return BatchRecords(
        start=columns["end"] - steps.device_time - origin,
        duration=steps.device_time,
        num_tokens=steps.features.num_tokens.astype(np.int64),
        num_decodes=steps.features.num_decodes.astype(np.int64),
        num_prefills=steps.features.num_prefills.astype(np.int64),
        kv_used=columns["kv_used"].astype(np.int64),
        preemptions=columns["preemptions"].astype(np.int64),
        num_hidden=columns["num_hidden"].astype(np.int64),
        num_recomputed=columns["num_recomputed_tokens"].astype(np.int64),
        saved_slots=steps.features.saved_slots.astype(np.int64),
        loaded_slots=steps.features.loaded_slots.astype(np.int64),
        num_shared=columns["num_shared"].astype(np.int64),
        replica=np.zeros(len(steps), np.int64),
    )


def _counts(ends: list[End | None], name: str) -> np.ndarray:
    """A number for each request, 0 while it has not ended."""
    return np.array([0 if end is None else getattr(end, name) for end in ends], np.int64)


def _output(recording: Recording, number: int, tokens: dict[int, int]) -> int:
    """Tokens that a request wrote in the recording."""
    end = recording.ends.get(number)
    if end is None:
        return tokens.get(number, 0)
    arrival = recording.arrivals[number]
    return end.tokens - arrival.written - arrival.elsewhere


def _workload(recording: Recording, there: list[Arrival], output_len: np.ndarray) -> Workload:
    """there: in order of arrival."""
    # Whoever moved is behind who came meanwhile.
    time = np.maximum.accumulate([_begin(recording, one) for one in there])
    early = np.array([one.carried > 0 for one in there])
    elsewhere = np.array([one.elsewhere for one in there], np.int64)
    written = np.array([one.written for one in there], np.int64) + elsewhere
    moved = np.array([one.came is not None for one in there])
    targets = {
        name: np.array([getattr(one, name) or np.inf for one in there]) for name in ALL_TARGETS
    }
    gone = np.where(moved, time - [one.time for one in there], 0.0)
    for name in ("ttft", "jct"):
        targets[name] = np.where(early, np.inf, np.maximum(targets[name] - gone, LEAST_LEFT))
    targets["ttft"][elsewhere > 0] = np.inf
    tier = np.array([one.tier for one in there], np.int8)
    greedy = np.array([one.greedy > 0 for one in there])
    names = [one.slo_class for one in there]
    classes = tuple(dict.fromkeys(names))
    slo_class = np.array([classes.index(name) for name in names], np.int64)
    value = np.array([one.value for one in there])
    terms = SloColumns(
        tier, **targets, slo_class=slo_class, greedy=greedy, classes=classes, value=value
    )
    prompt = np.array([one.prompt_len for one in there], np.int64) + written
    limit = np.array([one.limit for one in there], np.int64) - written
    prefixes = recording.prefixes([one.number for one in there])
    ends = [recording.ends.get(one.number) for one in there]
    guessed, right = (_counts(ends, name) for name in ("guessed", "right"))
    wrote = np.maximum(np.array([1 if end is None else end.tokens for end in ends]), 1)
    guessable = Guessable(
        np.minimum(guessed / wrote, 1.0), np.minimum(right / np.maximum(guessed, 1), 1.0)
    )
    return Workload.create(
        time - time.min(),
        Lengths(prompt, output_len),
        limit=limit,
        terms=terms,
        prefixes=_within_lengths(prefixes, prompt, output_len),
        guessable=guessable,
        adapter=np.array([one.adapter for one in there], np.int64),
        brought=np.where(early, 0, [one.brought for one in there]),
        programs=_programs(recording, there),
    )


def _programs(recording: Recording, there: list[Arrival]) -> Programs:
    """The recorded programs. there: requests in order of arrival.

    A call waits for the calls of its program that had ended when it came and for which no other of
    these had waited: for those that it joins, and for the one before in a chain. If it goes on with
    the text of one of them, it waits for that one alone: others are of other branches.
    """
    latest = dict[int, list[int]]()  # of each program, calls for which none that has ended waited
    going = dict[int, list[int]]()  # and those that have not ended
    parents, ends = dict[int, list[int]](), np.full(len(there), np.inf)
    place = {one.number: i for i, one in enumerate(there)}
    wait, program = np.zeros(len(there)), np.full(len(there), NO_PROGRAM, np.int64)
    deadline, tool = np.full(len(there), np.inf), np.full(len(there), NO_TOOL, np.int64)
    alone, number = _single_calls(there), dict[int, int]()
    for i, one in enumerate(there):
        if (end := recording.ends.get(one.number)) is not None:
            ends[i] = one.time + end.lifetime
        if not one.program or one.program in alone:
            continue
        program[i] = number.setdefault(one.program, len(number))
        now = _begin(recording, one)
        deadline[i] = one.program_deadline or np.inf
        running, last = going.setdefault(one.program, []), latest.setdefault(one.program, [])
        for call in sorted(running, key=lambda call: float(ends[call])):
            if ends[call] <= now:
                running.remove(call)
                mine = set(parents.get(call, ()))
                last[:] = [other for other in last if other not in mine] + [call]
        source = place.get(one.prefix_of, -1) if one.prefix_len else -1
        found = [source] if source in last else sorted(last)
        if found:
            parents[i] = found
            wait[i], tool[i] = max(0.0, now - float(ends[found].max())), one.tool - 1
        running.append(i)
    later = dict[int, float]()
    for i in reversed(np.flatnonzero(program != NO_PROGRAM).tolist()):
        # A class's deadline no longer counts once a call has said another one.
        deadline[i] = later[program[i]] = max(deadline[i], later.get(program[i], 0.0))
    edges = [(parent, child) for child, found in parents.items() for parent in found]
    parent, child = np.array(edges, np.int64).reshape(-1, 2).T
    nothing = Programs.none(len(there))
    return dataclasses.replace(
        nothing,
        program=program,
        wait=wait,
        tool=tool,
        deadline=deadline,
        parent=parent,
        child=child,
        tools=tuple(f"tool {one}" for one in range(1, int(tool.max(initial=NO_TOOL)) + 2)),
    )


def _single_calls(there: list[Arrival]) -> set[int]:
    """The programs that no call names, and that have one call: requests by themselves. All
    continuations of a call come at the same time."""
    times = dict[int, set[float]]()
    for one in there:
        if not one.named:
            times.setdefault(one.program, set()).add(one.time)
    return {program for program, all_times in times.items() if len(all_times) == 1}


def _within_lengths(prefixes: Prefixes, prompt: np.ndarray, output: np.ndarray) -> Prefixes:
    """Limits prefixes to the lengths of the texts, some of which are cut."""
    source = prefixes.prefix_of
    longest = np.where(source >= 0, (prompt + output)[source], 0)
    tokens = np.minimum(np.minimum(prefixes.prefix_len, prompt), longest)
    return Prefixes(np.where(tokens > 0, source, NO_PREFIX), tokens)


def _begin(recording: Recording, arrival: Arrival) -> float:
    return max(recording.start, arrival.time if arrival.came is None else arrival.came)
