"""Batches on disk, in SQLite, so that a server that is killed loses none of them.

Whatever a method has reported as stored is on the disk: each call is one transaction of a
write-ahead log that is fsynced when it commits (PRAGMA synchronous=FULL,
https://sqlite.org/wal.html). Lines that are being served are not marked: a line without a result is
waiting, so it is served again after a crash. A result counts once because (batch, line) is its
primary key.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from jaxserve.server.batches.directory import LOCK, lock_directory
from jaxserve.server.batches.journal_tables import open_tables
from jaxserve.server.batches.records import (
    BatchConflict,
    BatchState,
    JournalFull,
    MissingLines,
    NewLine,
    OtherLines,
    Outcome,
    Position,
    Quota,
    Status,
    UnknownBatch,
    Work,
)

MAX_LINES = 100_000
"""Most lines of one batch."""
_BEGINNING = Position(0, -1)
_SWEEP_S, _SWEEP_PAGES = 0.05, 2000
_NOBODY = "/"  # owner of deleted batches; keys' names have no slash
_FORGET = f"UPDATE batches SET owner = '{_NOBODY}', batch_id = key, note = '', bytes = 0"
_STATUS = (
    "SELECT key, batch_id, model, state, num_lines, done, failed, changed, owner, note FROM batches"
)


class Journal:
    """The batches in a directory, which one process has open at a time. Any thread may call any
    method. Methods raise sqlite3.Error if the disk fails.

    Their `owner` is the name of the calling API key. Each key has its own ids and sees only its own
    batches. "" sees all; if several batches share an id, it gets the one without an owner, or else
    the first.

    Args:
        directory: where the journal is.
        max_bytes: size of the journal above which no more lines are accepted. Results are still
            stored, until their owner's batches take as much.
        clock: seconds since the epoch.

    Raises:
        ConfigError: If the directory is in use, cannot be written to or holds something else.
    """

    def __init__(
        self, directory: Path, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = directory / "batches.sqlite"
        self.max_bytes, self._clock = max_bytes, clock
        self._lock = threading.RLock()
        self._held = lock_directory(directory)
        try:
            self._db = open_tables(self.path)
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        """Releases the directory. Idempotent."""
        with self._lock:
            self._db.close()
            self._held.close()

    def close_unused(self) -> None:
        """Closes the journal, and removes its files if it never had a batch."""
        with self._lock:
            unused = self._db.execute("SELECT 1 FROM batches").fetchone() is None
            self._db.close()
            if unused:
                self.path.unlink(missing_ok=True)
                self.path.with_name(LOCK).unlink(missing_ok=True)  # last, while the lock is held
            self._held.close()

    def append(
        self,
        batch_id: str,
        model: str,
        first: int,
        lines: Sequence[NewLine],
        *,
        commit: bool,
        owner: str = "",
        note: str = "",
        quota: Quota | None = None,
    ) -> Status:
        """Adds lines number `first`, `first` + 1, ... to a batch, which is created if it does not
        exist and `first` is 0. Lines that the batch already has must be the same, so a call can be
        repeated.

        Args:
            batch_id: the batch's id.
            model: the model that the lines are for.
            first: number of the first of the lines.
            lines: the lines.
            commit: whether the batch is complete. It is served from then on and takes no more
                lines.
            owner: as for all methods.
            note: text to keep with a new batch.
            quota: the owner's, which results may exceed; None is unlimited.

        Raises:
            BatchRefused: As UnknownBatch, MissingLines, OtherLines, BatchConflict or JournalFull.
                Nothing has changed then.
        """
        with self._transaction() as db:
            status = self._find(batch_id, owner)
            if status is None:
                if first > 0:
                    raise UnknownBatch(batch_id)
                self._check_count(owner, quota)
                db.execute(
                    "INSERT INTO batches (owner, batch_id, model, state, bytes, changed, note)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (owner, batch_id, model, BatchState.OPEN, len(note), self._clock(), note),
                )
                status = self.status(batch_id, owner)
            if first > status.num_lines:
                problem = f"lines go on at {status.num_lines}, not at {first}"
                raise MissingLines(f"first_line: batch {batch_id!r} has {problem}")
            known = status.num_lines - first
            self._check_same(status, first, lines[:known])
            goes_on = bool(lines[known:]) or (commit and status.state is BatchState.OPEN)
            if goes_on and status.model != model:
                problem = f"is for the model {status.model!r}, not {model!r}"
                raise BatchConflict(f"batch_id: batch {batch_id!r} {problem}")
            if lines[known:]:
                self._insert(status, lines[known:], quota)
            if commit and status.state is BatchState.OPEN:
                self._commit(self.status(batch_id, owner))
            return self.status(batch_id, owner)

    def status(self, batch_id: str, owner: str = "") -> Status:
        """Status of a batch. Raises UnknownBatch."""
        batch = self._find(batch_id, owner)
        if batch is None:
            raise UnknownBatch(batch_id)
        return batch

    def noted(self, owner: str, *, after: str | None, limit: int) -> list[Status]:
        """At most `limit` batches that have a note, the latest first, starting behind the one with
        the id `after`. Raises UnknownBatch if there is no such batch."""
        with self._lock:
            before = 2**62 if after is None else self.status(after, owner).key
            rows = self._db.execute(
                f"{_STATUS} WHERE (owner = :owner OR :owner = '') AND note != '' AND key < :before"
                " ORDER BY key DESC LIMIT :limit",
                {"owner": owner, "before": before, "limit": limit},
            ).fetchall()
        return [_status(row) for row in rows]

    def results(
        self, batch_id: str, first: int, *, max_bytes: int, gapless: bool = False, owner: str = ""
    ) -> list[Outcome]:
        """Results of lines in order.

        Args:
            batch_id: the batch's id.
            first: number of the first line.
            max_bytes: total size of the results at most; the first one is always returned.
            gapless: whether to stop at the first line without a result.
            owner: as for all methods.

        Raises:
            UnknownBatch: If there is no such batch.
        """
        outcomes: list[Outcome] = []
        with self._lock:
            key = self.status(batch_id, owner).key
            rows = self._db.execute(
                "SELECT line, result, failed FROM results WHERE batch = ? AND line >= ?"
                " ORDER BY line",
                (key, first),
            )
            for line, result, failed in rows:
                if gapless and line != first + len(outcomes):
                    break
                max_bytes -= len(result)
                if outcomes and max_bytes < 0:
                    break
                outcomes.append(Outcome(key, line, result, bool(failed)))
        return outcomes

    def waiting(self, model: str, after: Mapping[str, Position], limit: int) -> list[Work]:
        """Lines without a result, of batches that are being served. They come in the order of
        service: owners take turns, each with its batches in the order in which they were committed.

        Args:
            model: only batches for this model.
            after: by owner, the position behind which to start; the beginning for other owners.
            limit: number of lines at most.
        """
        committed: dict[str, list[tuple[int, int, str]]] = {}
        with self._lock:
            rows = self._db.execute(
                "SELECT owner, key, place, batch_id FROM commits"
                " JOIN batches ON commits.batch = key WHERE state = ? AND model = ? ORDER BY place",
                (BatchState.COMMITTED, model),
            )
            for owner, *batch in rows.fetchall():
                committed.setdefault(owner, []).append(tuple(batch))
            share = -(-limit // max(len(committed), 1))
            waiting_work = [
                self._lines(owner, batches, after.get(owner, _BEGINNING), share)
                for owner, batches in committed.items()
            ]
        in_turn = (work for turn in zip_longest(*waiting_work) for work in turn if work is not None)
        return list(islice(in_turn, limit))

    def _lines(
        self, owner: str, batches: Sequence[tuple[int, int, str]], after: Position, limit: int
    ) -> list[Work]:
        """Waiting lines of one owner. batches: key, place and id of each."""
        work: list[Work] = []
        for key, place, name in batches:
            if place < after.place:
                continue
            behind = after.line if place == after.place else -1
            rows = self._db.execute(
                "SELECT line, request FROM lines WHERE batch = ?1 AND line > ?2 AND NOT"
                " EXISTS (SELECT 1 FROM results WHERE batch = ?1 AND line = lines.line)"
                " ORDER BY line LIMIT ?3",
                (key, behind, limit - len(work)),
            )
            work += [
                Work(Position(place, line), key, request, name, owner) for line, request in rows
            ]
            if len(work) == limit:
                break
        return work

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Stores results. Results of a batch that has ended, was cancelled or is gone are dropped,
        and a line that already has a result keeps it."""
        with self._transaction() as db:
            for new in outcomes:
                whole = replace(new, result=new.instead, failed=True)
                outcome = new if self._has_room(new) else whole
                cursor = db.execute(
                    "INSERT INTO results SELECT key, :line, :failed, :result FROM batches"
                    " WHERE key = :batch AND state = :served ON CONFLICT DO NOTHING",
                    {**vars(outcome), "served": BatchState.COMMITTED},
                )
                if cursor.rowcount:
                    count = "failed" if outcome.failed else "done"
                    db.execute(
                        f"UPDATE batches SET {count} = {count} + 1, bytes = bytes + ?"
                        " WHERE key = ?",
                        (len(outcome.result), outcome.batch),
                    )
            for key in {outcome.batch for outcome in outcomes}:
                self._end_if_whole(key)

    def cancel(self, batch_id: str, owner: str = "") -> Status:
        """Cancels a batch: its lines without a result never get one. Does nothing if the batch is
        over. Raises UnknownBatch."""
        with self._transaction():
            status = self.status(batch_id, owner)
            if not status.over:
                self._set_state(status.key, BatchState.CANCELLED)
            return self.status(batch_id, owner)

    def delete(self, batch_id: str, owner: str = "") -> None:
        """Deletes a batch with its results; `sweep` frees their space. Raises UnknownBatch, and
        BatchConflict for a batch that is being served."""
        with self._transaction() as db:
            status = self.status(batch_id, owner)
            if status.state is BatchState.COMMITTED:
                problem = f"batch {batch_id!r} is being served; cancel it first"
                raise BatchConflict(f"batch_id: {problem}")
            db.execute(f"{_FORGET} WHERE key = ?", (status.key,))

    def clean(self, keep_s: float) -> int:
        """Deletes, as `delete` does, the batches that are over or were never committed and have not
        changed for keep_s seconds. Returns how many."""
        with self._transaction() as db:
            cursor = db.execute(
                f"{_FORGET} WHERE state != ? AND changed < ? AND owner != '{_NOBODY}'",
                (BatchState.COMMITTED, self._clock() - keep_s),
            )
        return cursor.rowcount

    def sweep(self) -> bool:
        """Frees some of the space of deleted batches in about 50 ms, so that other calls get their
        turn: SQLite reads all that it deletes, at 14 ms per MB. Returns whether there is more to
        do."""
        until = time.monotonic() + _SWEEP_S
        with self._transaction() as db:
            for table in ("lines", "results"):
                rows = db.execute(
                    f"SELECT rowid FROM {table} WHERE batch IN"
                    f" (SELECT key FROM batches WHERE owner = '{_NOBODY}') LIMIT 10000"
                ).fetchall()
                for row in rows:
                    db.execute(f"DELETE FROM {table} WHERE rowid = ?", row)
                    if time.monotonic() > until:
                        return True
                if rows:
                    return True
            db.execute(f"DELETE FROM batches WHERE owner = '{_NOBODY}'")
        return False

    def shrink(self) -> bool:
        """Returns some of the free space to the file system, in small steps like `sweep`. Returns
        whether there is more to do."""
        with self._lock:
            free = self._pragma("freelist_count")
            # Not `execute`, which would run only the first step of the PRAGMA.
            self._db.executescript(f"PRAGMA incremental_vacuum({_SWEEP_PAGES})")
            return free > self._pragma("freelist_count") > 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._db:  # `_db` commits or rolls back the transaction
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db

    def _check_same(self, status: Status, first: int, lines: Sequence[NewLine]) -> None:
        rows = self._db.execute(
            "SELECT line, request FROM lines WHERE batch = ? AND line >= ? ORDER BY line LIMIT ?",
            (status.key, first, len(lines)),
        )
        for (number, request), line in zip(rows, lines, strict=True):
            if request != line.request:
                problem = f"line {number} of batch {status.batch_id!r} is there, and another one"
                raise OtherLines(f"batch_id: {problem}")

    def _find(self, batch_id: str, owner: str) -> Status | None:
        with self._lock:
            row = self._db.execute(
                f"{_STATUS} WHERE batch_id = :id AND (owner = :owner OR :owner = '')"
                f" AND owner != '{_NOBODY}' ORDER BY owner LIMIT 1",
                {"id": batch_id, "owner": owner},
            ).fetchone()
        return None if row is None else _status(row)

    def _check_count(self, owner: str, quota: Quota | None) -> None:
        many = "SELECT COUNT(*) FROM batches WHERE owner = ?"
        if quota is None or self._db.execute(many, (owner,)).fetchone()[0] < quota.count:
            return
        problem = f"there are {quota.count} batches of {owner_words(owner)}, as many as it may have"
        raise JournalFull(f"batch_id: {problem} (files); delete some")

    def _has_room(self, outcome: Outcome) -> bool:
        if not outcome.instead:
            return True
        whose = "SELECT owner FROM batches WHERE key = ?"
        (owner,) = self._db.execute(whose, (outcome.batch,)).fetchone() or ("",)
        used = self._used(owner) if owner else 0
        return used + len(outcome.result) <= self.max_bytes

    def _used(self, owner: str) -> int:
        """Bytes of an owner's batches."""
        used = "SELECT COALESCE(SUM(bytes), 0) FROM batches WHERE owner = ?"
        return int(self._db.execute(used, (owner,)).fetchone()[0])

    def _insert(self, status: Status, lines: Sequence[NewLine], quota: Quota | None) -> None:
        if status.state is not BatchState.OPEN:
            problem = f"batch {status.batch_id!r} is {status.state} and takes no more lines"
            raise BatchConflict(f"batch_id: {problem}")
        total = status.num_lines + len(lines)
        if total > MAX_LINES:
            raise JournalFull(f"lines: {total} in a batch; at most {MAX_LINES} are allowed")
        more = sum(len(line.request.encode()) + len(line.error or "") for line in lines)
        if quota is not None and (size := self._used(status.owner) + more) > quota.max_bytes:
            problem = f"the batches of {owner_words(status.owner)} would take {size:,} bytes"
            most = f"at most {quota.max_bytes:,} are allowed (files_mib)"
            raise JournalFull(f"lines: {problem}; {most}; delete some")
        size = self._size() + more
        if size > self.max_bytes:
            problem = f"all batches would take {size:,} bytes; at most {self.max_bytes:,} are"
            raise JournalFull(f"lines: {problem} allowed (server.batch_gib)")
        numbered = list(enumerate(lines, status.num_lines))
        self._db.executemany(
            "INSERT INTO lines VALUES (?, ?, ?)",
            [(status.key, number, line.request) for number, line in numbered],
        )
        failed = [(status.key, n, True, line.error) for n, line in numbered if line.error]
        self._db.executemany("INSERT INTO results VALUES (?, ?, ?, ?)", failed)
        self._db.execute(
            "UPDATE batches SET num_lines = ?, failed = failed + ?, bytes = bytes + ?, changed = ?"
            " WHERE key = ?",
            (total, len(failed), more, self._clock(), status.key),
        )

    def _commit(self, status: Status) -> None:
        if not status.num_lines:
            raise BatchConflict(f"commit: batch {status.batch_id!r} has no lines")
        self._set_state(status.key, BatchState.COMMITTED)
        self._db.execute("INSERT INTO commits (batch) VALUES (?)", (status.key,))
        self._end_if_whole(status.key)

    def _end_if_whole(self, key: int) -> None:
        self._set_state(key, BatchState.ENDED, "state = 'committed' AND done + failed = num_lines")

    def _set_state(self, key: int, state: BatchState, where: str = "TRUE") -> None:
        self._db.execute(
            f"UPDATE batches SET state = ?, changed = ? WHERE key = ? AND {where}",
            (state, self._clock(), key),
        )

    def _size(self) -> int:
        """Bytes in use, without those of deleted batches."""
        pages = self._pragma("page_count") - self._pragma("freelist_count")
        return pages * self._pragma("page_size")

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])


def owner_words(owner: str) -> str:
    """The owner as errors name it."""
    return f"key {owner}" if owner else "all"


def _status(row: tuple[Any, ...]) -> Status:
    key, name, model, state, *others = row
    return Status(key, name, model, BatchState(state), *others)
