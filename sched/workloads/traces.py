"""Reads published traces as they are. Whatever is not as its format says is refused with file,
line and reason."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.workloads.workload import (
    LENGTH_COLUMNS,
    Lengths,
    Workload,
    WorkloadError,
    length_of,
)

# (arrival in seconds from any start, or None; prompt tokens; output tokens)
Row = tuple[float | None, int, int]
CsvRow = Callable[[str, list[str]], Row | None]


def read_trace(path: str | Path) -> Lengths | Workload:
    """A trace by its content: `Lengths` if it has no arrivals, else a `Workload` whose first
    request arrives at 0.

    Known: `prompt_tokens,output_tokens` (lengths only); Azure's CSV, `TIMESTAMP,ContextTokens,
    GeneratedTokens` (Azure public dataset, 2023 and 2024); BurstGPT's CSV, `Timestamp,Model,Request
    tokens,Response tokens,Total tokens,Log Type`, whose failures, the rows with 0 response tokens,
    are left out; InferMax's `id,arrived_at,I,O`; and Mooncake's JSONL, an object a line with
    `timestamp` (ms), `input_length` and `output_length`. WorkloadError says what is wrong.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(_json_rows(path, file) if _is_json(path) else _csv_rows(path, file))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a text file ({error})") from error
    if not rows:
        raise WorkloadError(f"{path}: no requests in it")
    lengths = Lengths(
        np.array([prompt for _, prompt, _ in rows], np.int64),
        np.array([output for _, _, output in rows], np.int64),
    )
    times = [at for at, _, _ in rows if at is not None]
    if not times:
        return lengths
    arrival = np.array(times)
    return Workload.of(arrival - arrival[0], lengths)


def _is_json(path: str | Path) -> bool:
    return Path(path).suffix in (".jsonl", ".json")


def _csv_rows(path: str | Path, file: Iterable[str]) -> Iterator[Row]:
    reader = csv.reader(file)
    header = tuple(next(reader, []))
    if header not in _FORMATS:
        known = "; ".join(",".join(names) for names in _FORMATS)
        raise WorkloadError(f"{path}:1: unknown header {','.join(header)!r}; known: {known}")
    parse, last = _FORMATS[header], -math.inf
    for fields in reader:
        where = f"{path}:{reader.line_num}"
        if len(fields) != len(header):
            raise WorkloadError(f"{where}: {len(header)} columns expected, got {len(fields)}")
        row = parse(where, fields)
        if row is not None:
            last = _in_order(where, row[0], last)
            yield row


def _json_rows(path: str | Path, file: Iterable[str]) -> Iterator[Row]:
    last = -math.inf
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{where}: not JSON ({error.msg})") from error
        row = _mooncake(where, value)
        last = _in_order(where, row[0], last)
        yield row


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
            raise WorkloadError(f"{where}: {name} is missing")
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise WorkloadError(f"{where}: {name} must be a number, got {number!r:.40}")
        found.append(str(number))
    at = _seconds(where, "timestamp", found[0]) / 1e3
    return (
        at,
        length_of(where, "input_length", found[1]),
        length_of(where, "output_length", found[2]),
    )


def _azure(where: str, fields: list[str]) -> Row:
    try:
        at = datetime.fromisoformat(fields[0]).timestamp()
    except ValueError as error:
        raise WorkloadError(f"{where}: TIMESTAMP must be a time, got {fields[0]!r:.40}") from error
    return (
        at,
        length_of(where, "ContextTokens", fields[1]),
        length_of(where, "GeneratedTokens", fields[2]),
    )


def _burstgpt(where: str, fields: list[str]) -> Row | None:
    at = _seconds(where, "Timestamp", fields[0])
    if fields[3] == "0":
        return None
    return (
        at,
        length_of(where, "Request tokens", fields[2]),
        length_of(where, "Response tokens", fields[3]),
    )


def _infermax(where: str, fields: list[str]) -> Row:
    return (
        _seconds(where, "arrived_at", fields[1]),
        length_of(where, "I", fields[2]),
        length_of(where, "O", fields[3]),
    )


def _lengths(where: str, fields: list[str]) -> Row:
    prompt, output = (
        length_of(where, name, text) for name, text in zip(LENGTH_COLUMNS, fields, strict=True)
    )
    return None, prompt, output


def _seconds(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise WorkloadError(f"{where}: {name} must be a time from 0, got {text!r:.40}")
    return value


_FORMATS: dict[tuple[str, ...], CsvRow] = {
    LENGTH_COLUMNS: _lengths,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    (
        "Timestamp",
        "Model",
        "Request tokens",
        "Response tokens",
        "Total tokens",
        "Log Type",
    ): _burstgpt,
    ("id", "arrived_at", "I", "O"): _infermax,
}
