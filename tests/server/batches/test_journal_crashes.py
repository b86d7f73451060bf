"""Crashes of the journal: its files as they are at some point, opened again."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import BatchConflict, NewLine, Outcome, UnknownBatch
from tests.server.batches.serving import ROOM, START, lines, opened

State = dict[str, tuple]
BATCHES = ("a", "b")


def state(journal: Journal) -> State:
    found: State = {}
    for name in BATCHES:
        try:
            status = journal.status(name)
        except UnknownBatch:
            continue
        results = tuple((o.line, o.result) for o in journal.results(name, 0, max_bytes=ROOM))
        found[name] = (status.state, status.num_lines, status.done, status.failed, results)
        failed = sum(o.failed for o in journal.results(name, 0, max_bytes=ROOM))
        assert (status.done, status.failed) == (len(results) - failed, failed)
    return found


_batch = st.sampled_from(BATCHES)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), _batch, st.integers(1, 4)),
        st.tuples(st.just("commit"), _batch),
        st.tuples(st.just("record"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("cancel"), _batch),
        st.tuples(st.just("delete"), _batch),
    ),
    min_size=1,
    max_size=12,
)


def perform(journal: Journal, operation: tuple) -> None:
    kind, *arguments = operation
    try:
        if kind == "append":
            name, count = arguments
            first = journal.status(name).num_lines if name in state(journal) else 0
            new = [NewLine(x.request, "bad" if count == 4 else None) for x in lines(count, first)]
            journal.append(name, "m", first, new, commit=False)
        elif kind == "commit":
            journal.append(
                arguments[0], "m", journal.status(arguments[0]).num_lines, [], commit=True
            )
        elif kind == "record":
            count, failed = arguments
            work = journal.waiting("m", START, count)
            journal.record([Outcome(w.batch, w.line, f"of {w.request}", failed) for w in work])
        else:
            getattr(journal, kind)(*arguments)
    except (UnknownBatch, BatchConflict):
        pass


def after_a_crash(source: Path, target: Path, torn: float | None = None) -> State:
    """What a journal says that has the files as they are now. torn: how much of the log."""
    target.mkdir()
    for path in source.glob("batches.sqlite*"):
        if not path.name.endswith("-shm"):  # an index of the log, which is made anew
            shutil.copy(path, target)
    log = target / "batches.sqlite-wal"
    if torn is not None and log.exists():
        with log.open("r+b") as file:
            file.truncate(int(torn * log.stat().st_size))
    with opened(target) as journal:
        found = state(journal)
        for name, (_, _, _, _, results) in found.items():
            assert [line for line, _ in results] == sorted({line for line, _ in results}), name
    return found


@pytest.mark.promise(20)
@settings(max_examples=25)
@given(_operations, st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_a_torn_log_gives_the_state_after_some_operation(
    operations: list[tuple], cuts: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "journal") as journal:
        states = [state(journal)]
        for operation in operations:
            perform(journal, operation)
            states.append(state(journal))
        crashed = [after_a_crash(journal.path.parent, Path(folder) / "whole")]
        assert crashed == states[-1:], "what was reported is there"
        for number, cut in enumerate(cuts):
            # The tables are of the log's, too.
            target = Path(folder) / str(number)
            assert after_a_crash(journal.path.parent, target, cut) in [{}, *states]


@pytest.mark.promise(20)
@settings(max_examples=10)
@given(_operations)
def test_a_crash_within_an_operation_leaves_it_done_or_undone(operations: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "journal") as journal:
        for operation in operations[:-1]:
            perform(journal, operation)
        before, crashed = state(journal), []

        def crash(statement: str) -> None:
            if not statement.startswith("SELECT"):
                target = Path(folder) / str(len(crashed))
                crashed.append(after_a_crash(journal.path.parent, target))

        journal._db.set_trace_callback(crash)
        perform(journal, operations[-1])
        journal._db.set_trace_callback(None)
        assert all(found in (before, state(journal)) for found in crashed)
