"""Records the served requests and steps, for `jaxserve simulate --replay`.

The format is in `sched/recording.py`. The engine thread only puts events into
a queue; a separate thread writes them, so that serving never waits for a disk. Recordings show when
requests came and how much they asked for, so only their owner can read the files.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO

from jaxserve.config import ConfigError
from jaxserve.engine.shared_prefixes import SharedPrefixes
from jaxserve.engine.stats import Observer, RequestStats, StepStats
from jaxserve.file_lock import lock, private
from jaxserve.sched import recording
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.request import Request
from jaxserve.writable import check_file

log = logging.getLogger(__name__)

DEPTH = 10_000  # events that may wait to be written
MIB = 2**20
DIGITS = 9  # digits of seconds after the point
MOST_TOOLS = 1 << 12  # remembered; one that has not run for longer gets a new number

_Moved = tuple[int, int, int]  # number, and tokens generated elsewhere and cached
_Told = StepStats | RequestStats | tuple[int, Request, ProgramCall | None, _Moved | None]
_STEP_NUMBERS = [n for n in recording.Step._fields if n not in ("end", "features", "received")]


def check_path(path: str) -> None:
    """ConfigError or ValueError if nothing could be recorded there. "" records nothing."""
    if not path:
        return
    place = _place(path)
    check_file("config.engine.record", place)
    if place.exists() and not place.is_file():  # a device, which would be renamed
        raise ConfigError(f"engine.record: {place} is not a file")
    if recording.older(place).is_dir() or not os.access(place.parent, os.W_OK):
        raise ConfigError(f"engine.record: {place} cannot go on as {recording.older(place)}")
    _Hold(place).release()


def _place(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))


class _Hold:
    """Holds PATH.lock, so that no other recorder renames the file. ConfigError if it is taken."""

    def __init__(self, place: Path) -> None:
        self._path = place.with_name(place.name + ".lock")
        self._file = lock(self._path)
        if self._file is None:
            raise ConfigError(f"engine.record: another server records to {place}")

    def release(self) -> None:
        assert self._file is not None
        self._path.unlink(missing_ok=True)
        self._file.close()


class Recorder(Observer):
    """An observer that writes a recording. It renames a file of max_bytes to PATH.1, and also a
    file that exists at the start.

    Args:
        path: the file.
        header: its first line, which describes the engine.
        max_bytes: size at which a new file is begun.
        clock: the engine's clock, in seconds.
        depth: events that may wait to be written. More are lost.

    Attributes:
        lost: events lost so far.

    Raises:
        ConfigError: another recorder writes there.
    """

    def __init__(
        self,
        path: str | Path,
        header: recording.Header,
        max_bytes: int,
        clock: Callable[[], float],
        depth: int = DEPTH,
    ) -> None:
        self.lost = 0
        self._hold = _Hold(_place(path))
        self._start = clock()
        self._queue: queue.Queue[_Told | None] = queue.Queue(depth)
        self._writer = _Writer(_place(path), header, max_bytes)
        self._prefixes = SharedPrefixes(header.block_size)
        self._adapters: dict[str, int] = {}  # numbers, since names are not recorded
        # Likewise, by tenant and names, the last to run last.
        self._tools = OrderedDict[tuple[str, tuple[str, ...]], int]()
        self._num_tools = 0
        self._call: tuple[int, ProgramCall] | None = None  # of the next arrival
        self._moved: _Moved | None = None  # likewise
        self._thread = threading.Thread(target=self._run, name="jaxserve-recorder", daemon=True)
        self._thread.start()

    def on_program_call(self, number: int, call: ProgramCall) -> None:
        """Keeps the call for its arrival."""
        self._call = number, call

    def on_moved(self, number: int, generated: int, cached: int) -> None:
        """Keeps that for its arrival."""
        self._moved = number, generated, cached

    def on_arrival(self, number: int, request: Request) -> None:
        """Records the request's lengths and options, its program, and what it brings."""
        told, self._call = self._call, None
        moved, self._moved = self._moved, None
        call = told[1] if told and told[0] == number else None
        self._tell((number, request, call, moved if moved and moved[0] == number else None))

    def on_step(self, stats: StepStats) -> None:
        """Records the step's shape and times."""
        self._tell(stats)

    def on_finish(self, stats: RequestStats) -> None:
        """Records the output's length and how it ended."""
        self._tell(stats)

    def on_stop(self) -> None:
        """Returns when everything is on disk."""
        self._queue.put(None)
        self._thread.join()
        self._hold.release()

    def _tell(self, what: _Told) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.lost += 1

    def _run(self) -> None:
        try:
            self._writer.begin(0.0)
            while (what := self._queue.get()) is not None:
                self._writer.write(self._event(what), self.lost)
                if self._queue.empty():
                    self._writer.flush()
            self._writer.end(self.lost)
        except Exception as error:  # serving goes on
            log.error("nothing more is recorded: %s", error, exc_info=error)
            while self._queue.get() is not None:
                pass

    def _event(self, what: _Told) -> recording.Event:
        event = _event(what, self._start)
        match what:
            case RequestStats():
                self._prefixes.wrote(what.number, what.block_keys)
            case number, request, call, moved:
                assert isinstance(event, recording.Arrival)
                if name := request.adapter:
                    event = event._replace(
                        adapter=self._adapters.setdefault(name, len(self._adapters) + 1)
                    )
                if moved is not None:
                    since = request.moved[-1] if request.moved else 0.0
                    event = event._replace(
                        came=round(event.time + since, DIGITS),
                        elsewhere=moved[1],
                        brought=moved[2],
                    )
                if call is not None:
                    event = event._replace(
                        program=call.program,
                        program_deadline=call.deadline if call.deadline < math.inf else None,
                        named=int(call.named),
                        tool=self._tool(call),
                    )
                if request.block_keys is not None:
                    of, tokens = self._prefixes.arrived(number, request.block_keys)
                    event = event._replace(prefix_of=of, prefix_len=tokens)
        return event

    def _tool(self, call: ProgramCall) -> int:
        """The number of the tools that ran before a call."""
        if not call.tools:
            return 0
        of = call.tenant, call.tools
        number = self._tools.pop(of, 0)
        if not number:
            self._num_tools = number = self._num_tools + 1
        self._tools[of] = number
        if len(self._tools) > MOST_TOOLS:
            self._tools.popitem(last=False)
        return number


def _event(what: _Told, start: float) -> recording.Event:
    """The event as recorded. start: when the recording began."""
    match what:
        case StepStats():
            numbers = {name: getattr(what, name) for name in _STEP_NUMBERS}
            features = [int(feature) for feature in what.features]
            return recording.Step(
                end=round(what.end - start, DIGITS),
                **{name: round(value, DIGITS) for name, value in numbers.items()},
                features=features,
                received=list(what.received),
            )
        case RequestStats():
            lifetime = round(what.e2e, DIGITS)
            drafts = (what.drafted, what.accepted, what.guessed, what.right)
            reason = what.finish_reason
            return recording.End(
                what.number, what.output_tokens, reason, what.preemptions, lifetime, *drafts
            )
        case number, request, _, _:
            return recording.Arrival(
                number,
                round(request.arrival - start, DIGITS),
                len(request.prompt),
                request.sampling.max_tokens,
                int(request.tier),
                request.slo.ttft,
                request.slo.tbt,
                request.slo.jct,
                int(request.sampling.is_plain_greedy),
                request.slo_class,
                max_tbt=request.slo.max_tbt,
                value=request.value,
            )


class _Writer:
    """The file, and the requests whose arrivals must be repeated in the next file."""

    def __init__(self, path: Path, header: recording.Header, max_bytes: int) -> None:
        self._path, self._header, self._max_bytes = path, header, max_bytes
        self._live: dict[int, recording.Arrival] = {}
        self._file: IO[str] | None = None
        self._most_live = header.max_queue + header.max_rows
        self._size, self._time, self._lost = 0, 0.0, 0

    def begin(self, start: float) -> None:
        """Starts a new file; the present one becomes the older one."""
        if self._file is not None:
            self._file.close()
        if self._path.exists():
            with contextlib.suppress(PermissionError):  # it may belong to another user
                self._path.chmod(0o600)  # it may have been readable for everybody
            self._path.replace(recording.older(self._path))
        self._file = private(self._path, "w")
        self._size = 0
        self._put(recording.first_line(self._header, start))
        for number, arrival in self._live.items():
            self._live[number] = arrival._replace(carried=1)
            self._put(recording.line(self._live[number]))

    def write(self, event: recording.Event, lost: int) -> None:
        """Writes an event. lost: number of events lost so far."""
        if lost != self._lost:
            self._lost = lost
            self._put(recording.line(recording.Lost(lost)))
        text = recording.line(event)
        if self._size + len(text) > self._max_bytes:
            self.begin(self._time)
        self._put(text)
        match event:
            case recording.Arrival():
                self._live[event.number] = event
                if len(self._live) > self._most_live:  # the end of the oldest one was lost
                    del self._live[next(iter(self._live))]
            case recording.End():
                self._live.pop(event.number, None)
            case recording.Step():
                self._time = event.end
                for number in event.received:
                    arrival = self._live.get(number)  # None if the arrival was lost
                    if arrival is not None:
                        self._live[number] = arrival._replace(written=arrival.written + 1)

    def flush(self) -> None:
        """Makes everything written so far readable."""
        assert self._file is not None
        self._file.flush()

    def end(self, lost: int) -> None:
        """Writes the number of lost events; then the file is complete."""
        if lost != self._lost:
            self._put(recording.line(recording.Lost(lost)))
        assert self._file is not None
        self._file.close()

    def _put(self, text: str) -> None:
        assert self._file is not None
        self._size += self._file.write(text)
