"""Reads published traces in their own formats. Invalid rows are rejected with file, line and
reason."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.columns import (
    OPTIONAL_COLUMNS,
    Extras,
    extras_of,
    length_of,
    programs_of,
    seconds_of,
    terms_of,
)
from jaxserve.simulator.workloads.hashed_blocks import HashedPrompts, hash_ids_of
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.programs import Programs
from jaxserve.simulator.workloads.workload import Lengths, WorkloadError


@dataclass(frozen=True)
class Trace:
    """n requests as read from a file.

    Attributes:
        arrival: float64 [n], seconds from the first arrival; None if the file has no arrivals.
        lengths: Prompts and outputs.
        limit: int64 [n], max_tokens; `NO_LIMIT` if the file has none.
        terms: SLOs and sampling, as far as the file has them.
        prefixes: Shared prefixes, as far as the file has them.
        programs: Which requests wait for which, as far as the file has it.
    """

    arrival: np.ndarray | None
    lengths: Lengths
    limit: np.ndarray
    terms: SloColumns
    prefixes: Prefixes
    programs: Programs

    def first(self, count: int) -> Trace:
        """The first `count` requests. Raises WorkloadError if there are fewer."""
        lengths, which = self.lengths.first(count), np.arange(count)
        arrival = None if self.arrival is None else self.arrival[:count]
        terms, prefixes = self.terms.select(which), self.prefixes.select(which)
        programs = self.programs.select(which)
        return Trace(arrival, lengths, self.limit[:count], terms, prefixes, programs)


# (arrival in seconds from any start, or None; prompt tokens; output tokens)
Row = tuple[float | None, int, int]
# (the row; its optional columns; its prefix_of and prefix_len)
Read = tuple[Row, Extras, tuple[int, int]]


def read_trace(path: str | Path, count: int | None = None) -> Trace:
    """Reads a trace, or only its first `count` requests. Raises WorkloadError with the problem.

    Known CSV headers are `prompt_tokens,output_tokens`, and the same after `arrival_s`; Azure's
    `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure public dataset, 2023 and 2024); BurstGPT's
    `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, and the same with
    `Session ID,Elapsed time` after the first, whose failures, rows with 0 response tokens, are left
    out; and InferMax's `id,arrived_at,I,O`. JSONL is Mooncake's,
    an object a line with `timestamp` (ms), `input_length` and `output_length`, and `hash_ids` if
    there are any: one for each 512 tokens of the prompt, where equal ids after equal ids are equal
    tokens. Times without a zone are UTC. Blank lines are skipped.

    Optional columns, after those of the format, or fields of an object, are `max_tokens`, `tier`
    (realtime or best_effort), `ttft_ms`, `tbt_ms`, `jct_ms`, `max_tbt_ms`, `class`, `greedy` and
    `value`. An empty cell, or null, counts as missing.

    Of programs there are `program`, the name of the one that a request is a call of; `after`, the
    numbers of the requests of the trace, counted from 1, that it waits for, joined by `+`, in JSON
    a list; `wait_ms`, from the end of the last of these to its arrival; `tool`, the name of the
    tool that ran in that time; and `program_deadline_ms`.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            is_json = Path(path).suffix in (".jsonl", ".json")
            rows = list(islice((_json_rows if is_json else _csv_rows)(path, file), count))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a text file ({error})") from error
    if not rows:
        raise WorkloadError(f"{path}: no requests in it")
    lengths = Lengths(
        np.array([prompt for (_, prompt, _), *_ in rows], np.int64),
        np.array([output for (_, _, output), *_ in rows], np.int64),
    )
    extras = [more for _, more, _ in rows]
    source, shared = np.array([prefix for *_, prefix in rows], np.int64).T
    times = np.array([at for (at, _, _), *_ in rows if at is not None])
    return Trace(
        times - times[0] if len(times) else None,
        lengths,
        np.array([more.limit for more in extras], np.int64),
        terms_of(extras),
        Prefixes(source, shared),
        programs_of(str(path), extras),
    )


def _csv_rows(path: str | Path, file: Iterable[str]) -> Iterator[Read]:
    reader = csv.reader(file)
    header = tuple(next(reader, []))
    known = _format_of(path, header)
    own = len(known.columns)
    last = -math.inf
    for fields in reader:
        where = f"{path}:{reader.line_num}"
        if not fields:  # a blank line
            continue
        if len(fields) != len(header):
            raise WorkloadError(f"{where}: {len(header)} columns expected, got {len(fields)}")
        row = known.row(where, fields)
        if row is not None:
            last = _in_order(where, row[0], last)
            cells = dict(zip(header[own:], fields[own:], strict=True))
            yield row, extras_of(where, cells, row[2]), (NO_PREFIX, 0)


def _format_of(path: str | Path, header: tuple[str, ...]) -> _Format:
    for known in _FORMATS:
        more = header[len(known.columns) :]
        if header[: len(known.columns)] == known.columns and set(more) <= set(OPTIONAL_COLUMNS):
            if len(set(more)) < len(more):
                raise WorkloadError(f"{path}:1: a column comes twice in {','.join(header)!r}")
            return known
    headers = "; ".join(",".join(known.columns) for known in _FORMATS)
    raise WorkloadError(
        f"{path}:1: unknown header {','.join(header)!r:.200}; known: {headers}; each may be "
        f"followed by {','.join(OPTIONAL_COLUMNS)}"
    )


def _json_rows(path: str | Path, file: Iterable[str]) -> Iterator[Read]:
    last, prompts = -math.inf, HashedPrompts()
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if number == 1 and line.lstrip()[:1] == "[":
            raise WorkloadError(f"{where}: a JSON object expected, not an array; {_KNOWN_JSON}")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise WorkloadError(f"{where}: not JSON ({why}); {_KNOWN_JSON}") from error
        row = _mooncake(where, value)
        last = _in_order(where, row[0], last)
        ids = value.get("hash_ids")
        found = () if ids is None else hash_ids_of(where, ids, row[1])
        extras = extras_of(where, _json_extras(where, value), row[2])
        yield row, extras, prompts.add(found, row[1])


def _in_order(where: str, at: float | None, last: float) -> float:
    if at is not None and at < last:
        raise WorkloadError(f"{where}: arrives {last - at:g} s before the row above it")
    return last if at is None else at


def _mooncake(where: str, value: Any) -> Row:
    """Mooncake's request traces (FAST'25 release): timestamps in milliseconds."""
    if not isinstance(value, dict):
        raise WorkloadError(f"{where}: a JSON object expected, got {value!r:.40}")
    found = []
    for name in ("timestamp", "input_length", "output_length"):
        if name not in value:
            raise WorkloadError(f"{where}: {name} is missing; {_KNOWN_JSON}")
        found.append(_number(where, name, value[name]))
    at = seconds_of(where, "timestamp", found[0]) / 1e3
    return (
        at,
        length_of(where, "input_length", found[1]),
        length_of(where, "output_length", found[2]),
    )


def _json_extras(where: str, value: Mapping[str, Any]) -> dict[str, str]:
    """An object's optional fields, as cells."""
    cells = {}
    for name in OPTIONAL_COLUMNS:
        found = value.get(name)
        if found is None:
            continue
        if isinstance(found, bool) and name == "greedy":
            cells[name] = str(found).lower()
        elif name == "after":
            parts = found if isinstance(found, list) else [found]
            cells[name] = "+".join(_number(where, name, one) for one in parts)
        elif name not in ("tier", "class", "greedy", "program", "tool"):
            cells[name] = _number(where, name, found)
        elif isinstance(found, str):
            cells[name] = found
        else:
            raise WorkloadError(f"{where}: {name} must be a text, got {found!r:.40}")
    return cells


def _number(where: str, name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WorkloadError(f"{where}: {name} must be a number, got {value!r:.40}")
    return str(value)


def _moment(where: str, name: str, text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except ValueError as error:
        raise WorkloadError(f"{where}: {name} must be a time, got {text!r:.40}") from error


@dataclass(frozen=True)
class _Format:
    """A CSV format.

    Attributes:
        columns: The header, or its beginning.
        prompt, output: Indices of the columns with the lengths.
        at: Index of the column with the arrival, None for none.
        moment: Parses the arrival.
        failures: Whether rows without output are failed requests, and skipped.
    """

    columns: tuple[str, ...]
    prompt: int
    output: int
    at: int | None = None
    moment: Callable[[str, str, str], float] = seconds_of
    failures: bool = False

    def row(self, where: str, fields: Sequence[str]) -> Row | None:
        """Parses a row; None for a failed request."""
        at = None
        if self.at is not None:
            at = self.moment(where, self.columns[self.at], fields[self.at])
        if self.failures and fields[self.output] == "0":
            return None
        prompt, output = (
            length_of(where, self.columns[i], fields[i]) for i in (self.prompt, self.output)
        )
        return at, prompt, output


# Conversations and batch files (ShareGPT, LMSYS, OpenAI) have texts, but no lengths in tokens.
_KNOWN_JSON = (
    "known is an object a line with timestamp (ms), input_length and output_length, in tokens "
    "(Mooncake's JSONL); texts have no lengths until a tokenizer has counted them: write a CSV of "
    "prompt_tokens,output_tokens"
)
_BURSTGPT = ("Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
_FORMATS = (
    _Format(("prompt_tokens", "output_tokens"), 0, 1),
    _Format(("arrival_s", "prompt_tokens", "output_tokens"), 1, 2, 0),
    _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), 1, 2, 0, _moment),
    _Format(("Timestamp", *_BURSTGPT), 2, 3, 0, failures=True),
    _Format(("Timestamp", "Session ID", "Elapsed time", *_BURSTGPT), 4, 5, 0, failures=True),
    _Format(("id", "arrived_at", "I", "O"), 2, 3, 1),
)
