"""What an engine has served, as a file: its format, and how it is read.

JSON lines. The first is a header: all that a simulation needs to know of the engine. The others are
lists, each beginning with what it is: a request's arrival, a step, a request's end, or how many of
these were lost. No text, no tokens and no names but those of SLO classes: requests have numbers.
Times are in seconds since `Header.began`, on the engine's clock.

A file that has become too large goes on as PATH.1, and PATH begins again, with the header and the
arrivals of the requests that are there. `sched/simulation/recording/replay.py` reads both.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.policy import Limits

FORMAT = 4
MOST = 2**53  # of whole numbers: what a float counts to
FEATURES = BatchFeatures._fields


class RecordingError(ValueError):
    """A file that is no recording, or one that says too little; one line says why."""


class Arrival(NamedTuple):
    """limit: tokens that it may write. tier: of `request.Tier`. ttft, tbt, jct: its targets, None
    for none. greedy: 0 or 1, whether it takes the most likely token, as it is. slo_class: the name
    of its class. carried: 0 or 1, whether it was there when the file began, and had written so many
    tokens."""

    number: int
    time: float
    prompt_len: int
    limit: int
    tier: int
    ttft: float | None
    tbt: float | None
    jct: float | None
    greedy: int
    slo_class: str
    carried: int = 0
    written: int = 0


class Step(NamedTuple):
    """end: when its tokens were on the host. received: the numbers of the requests that got one.
    features: as FEATURES names them. kv_used: tokens that the pool has given room to; num_hidden:
    rows with hidden caches; num_shared: blocks that several requests hold; the others are those of
    `StepStats`, after_idle 0 or 1."""

    end: float
    device_time: float
    wake_time: float
    receive_time: float
    plan_time: float
    launch_time: float
    finish_time: float
    after_idle: int
    num_live: int
    num_received: int
    num_rows: int
    num_admitted: int
    num_moves: int
    num_emitting: int
    preemptions: int
    kv_used: int
    num_hidden: int
    num_shared: int
    num_recomputed_tokens: int
    features: list[int]
    received: list[int]


class End(NamedTuple):
    """tokens: all that it wrote. reason: why it ended, stop or length where it was by itself.
    lifetime: seconds since it arrived."""

    number: int
    tokens: int
    reason: str
    preemptions: int
    lifetime: float


class Lost(NamedTuple):
    """events: how many, since the engine started, were dropped as they came too fast to be
    written."""

    events: int


Event = Arrival | Step | End | Lost
KINDS: dict[str, type[Event]] = {
    "arrival": Arrival,
    "step": Step,
    "end": End,
    "lost": Lost,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_COLUMNS = {name: list(kind._fields) for name, kind in KINDS.items()} | {"features": list(FEATURES)}


@dataclass(frozen=True)
class Header:
    """The engine, from its start on. began: when that was, ISO 8601; two files of one engine have
    the same. cost_model: what it believed at first. host_slots: of checkpoints. The others are as
    in the configuration, or in `EngineInfo`."""

    began: str
    versions: dict[str, str]
    model: str
    dtype: str
    device: str
    policy: str
    seed: int
    overlap: bool
    max_batch_tokens: int
    max_prefill_tokens: int
    max_rows: int
    max_queue: int
    max_model_len: int
    num_blocks: int
    block_size: int
    host_slots: int
    hidden_read: str | None
    rho: float | None
    cost_model: LinearCostModel
    padding: Padding

    @property
    def limits(self) -> Limits:
        """C, P and rows."""
        return Limits(self.max_batch_tokens, self.max_prefill_tokens, self.max_rows)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value))


_IS: dict[Any, Callable[[Any], bool]] = {
    int: _is_count,
    float: _is_number,
    float | None: lambda value: value is None or _is_number(value),
    str: lambda value: isinstance(value, str),
    str | None: lambda value: value is None or isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    list[int]: lambda value: isinstance(value, list) and all(map(_is_count, value)),
}


def _checks(kind: type) -> dict[str, Callable[[Any], bool]]:
    """By field, what its values have to be."""
    return {name: _IS[hint] for name, hint in get_type_hints(kind).items() if hint in _IS}


_CHECKS = {kind: tuple(_checks(kind).values()) for kind in _NAMES}
_HEADER_CHECKS = _checks(Header)


def first_line(header: Header, start: float) -> str:
    """A file's. start: when it begins."""
    content = {"recording": FORMAT, "start": start, **dataclasses.asdict(header)}
    return json.dumps(content | {"columns": _COLUMNS}, default=_plain) + "\n"


def line(event: Event) -> str:
    """An event's."""
    return json.dumps([_NAMES[type(event)], *event], separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item()


class RecordedFile:
    """One file. torn: whether its last line was cut off, and left out; known once `events` has been
    gone through. RecordingError names the file, and the line, that is no part of a recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        self.header, self.start = _header(path, next(self._lines(), ""))

    def events(self) -> Iterator[Event]:
        """All of them, in their order."""
        bad = 0
        for number, text in enumerate(self._lines(), 1):
            if bad:
                raise RecordingError(f"{self.path}, line {bad}: no part of a recording")
            if number == 1:
                continue
            try:
                yield _event(text)
            except (ValueError, TypeError, KeyError):
                bad = number  # which only the last line may be
        self.torn = bad > 0

    def _lines(self) -> Iterator[str]:
        try:
            with self.path.open(encoding="utf-8") as file:
                yield from file
        except OSError as error:
            raise RecordingError(f"{self.path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecordingError(f"{self.path}: not a recording (not text)") from error


def older(path: Path) -> Path:
    """Where a file goes on that has become too large."""
    return path.with_name(path.name + ".1")


def _header(path: Path, text: str) -> tuple[Header, float]:
    try:
        content = json.loads(text)
        version = content.pop("recording")
        if version != FORMAT or content.pop("columns") != _COLUMNS:
            raise RecordingError(f"{path}: recording format {version}, this version reads {FORMAT}")
        start = float(content.pop("start"))
        model, padding = content["cost_model"], content["padding"]
        coefficients = Coefficients(**model["coefficients"])
        content["cost_model"] = LinearCostModel(
            coefficients, model["num_layers"], model["overlapped"]
        )
        rows, tokens = tuple(padding["rows"]), tuple(padding["tokens"])
        sizes = padding["decode_group"], padding["decode_chunk"]
        content["padding"] = Padding(rows, tokens, *sizes)
        header = Header(**content)
        for name, fits in _HEADER_CHECKS.items():
            if not fits(getattr(header, name)):
                raise ValueError(f"{name} cannot be {getattr(header, name)!r:.40}")
        for name in ("num_blocks", "block_size", "max_model_len"):
            if not getattr(header, name) > 0:
                raise ValueError(f"{name} must be positive")
        _ = header.limits  # ValueError where there can be none
        return header, start
    except RecordingError:
        raise
    except KeyError as error:
        raise RecordingError(f"{path}: not a recording, {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RecordingError(f"{path}: not a recording ({error})") from error


def _event(text: str) -> Event:
    """ValueError, TypeError or KeyError if the line is none."""
    name, *values = json.loads(text)
    event = KINDS[name](*values)
    if not all(fits(value) for fits, value in zip(_CHECKS[type(event)], event, strict=True)):
        raise ValueError("a value is none of its field")
    if isinstance(event, Step) and len(event.features) != len(FEATURES):
        raise ValueError("features are missing")
    return event
