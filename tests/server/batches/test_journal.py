"""The journal: what it holds, what it refuses, and what a crash leaves of it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jaxserve.config import ConfigError
from jaxserve.server.batches import directory
from jaxserve.server.batches import journal as journal_module
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import (
    BatchConflict,
    BatchState,
    JournalFull,
    MissingLines,
    NewLine,
    OtherLines,
    Outcome,
    Position,
    UnknownBatch,
)
from tests.server.batches.serving import ROOM, START, lines, opened


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with opened(tmp_path / "journal") as journal:
        yield journal


def record(journal: Journal, batch: str, *numbers: int, failed: bool = False) -> None:
    key = journal.status(batch).key
    journal.record([Outcome(key, number, f"result {number}", failed) for number in numbers])


def waiting(
    journal: Journal, after: Mapping[str, Position] = START, limit: int = 100
) -> list[tuple[int, int]]:
    return [(work.batch, work.line) for work in journal.waiting("m", after, limit)]


def has(journal: Journal, batch: str, first: int = 0, **options) -> list[int]:
    return [each.line for each in journal.results(batch, first, max_bytes=ROOM, **options)]


def test_a_batch_from_its_first_line_to_its_last_result(journal: Journal) -> None:
    status = journal.append("b", "m", 0, lines(2), commit=False)
    assert (status.state, status.num_lines, status.model) == (BatchState.OPEN, 2, "m")
    assert waiting(journal) == [], "it may get more lines"
    assert journal.append("b", "m", 2, lines(1, 2), commit=True).state is BatchState.COMMITTED
    (first, *_) = work = journal.waiting("m", START, 100)
    assert [each.request for each in work] == ["request 0", "request 1", "request 2"]
    assert waiting(journal, after={"": first.position}) == [(status.key, 1), (status.key, 2)]
    assert waiting(journal, limit=2) == [(status.key, 0), (status.key, 1)]
    record(journal, "b", 2, 0)
    assert waiting(journal) == [(status.key, 1)]
    assert (has(journal, "b"), has(journal, "b", gapless=True)) == ([0, 2], [0])
    assert journal.status("b").state is BatchState.COMMITTED
    record(journal, "b", 1, failed=True)
    status = journal.status("b")
    assert (status.state, status.done, status.failed) == (BatchState.ENDED, 2, 1)
    assert has(journal, "b", 1, gapless=True) == [1, 2]
    assert [each.failed for each in journal.results("b", 0, max_bytes=ROOM)] == [False, True, False]


def test_a_line_has_one_result_and_the_first_one_stands(journal: Journal) -> None:
    key = journal.append("b", "m", 0, lines(2), commit=True).key
    journal.record([Outcome(key, 0, "first", False), Outcome(key, 0, "second", True)])
    journal.record([Outcome(key, 0, "third", False)])
    (result,) = journal.results("b", 0, max_bytes=ROOM)
    assert (result.result, result.failed) == ("first", False)
    status = journal.status("b")
    assert (status.done, status.failed) == (1, 0)


def test_what_is_sent_again_is_not_there_twice(journal: Journal) -> None:
    journal.append("b", "m", 0, lines(3), commit=False)
    for commit in (False, True, True):
        status = journal.append("b", "m", 0, lines(3), commit=commit)
    assert (status.num_lines, status.state) == (3, BatchState.COMMITTED)
    assert journal.append("b", "m", 1, lines(1, 1), commit=False) == status
    assert journal.append("b", "m", 3, [], commit=True) == status
    assert len(waiting(journal)) == 3


def test_lines_that_overlap_go_on_behind_what_is_there(journal: Journal) -> None:
    journal.append("b", "m", 0, lines(3), commit=False)
    journal.append("b", "m", 1, lines(4, 1), commit=True)
    assert [w.request for w in journal.waiting("m", START, 9)] == [x.request for x in lines(5)]


def test_what_does_not_fit_is_refused_and_changes_nothing(journal: Journal) -> None:
    with pytest.raises(UnknownBatch, match="no batch 'b'"):
        journal.append("b", "m", 1, lines(1), commit=False)
    with pytest.raises(BatchConflict, match="'empty' has no lines"):
        journal.append("empty", "m", 0, [], commit=True)
    with pytest.raises(UnknownBatch):
        journal.status("empty")
    before = journal.append("b", "m", 0, lines(3), commit=False)
    with pytest.raises(MissingLines, match="lines go on at 3, not at 4"):
        journal.append("b", "m", 4, lines(1), commit=False)
    with pytest.raises(OtherLines, match="line 1 of batch 'b' is there, and another one"):
        journal.append("b", "m", 0, [*lines(1), NewLine("else"), *lines(9, 2)], commit=True)
    assert journal.status("b") == before
    journal.append("b", "m", 3, [], commit=True)
    with pytest.raises(BatchConflict, match="is committed and takes no more lines"):
        journal.append("b", "m", 3, lines(1), commit=False)
    other = journal.append("other", "m", 0, lines(1), commit=False)
    for commit, more in ((True, []), (False, lines(1, 1))):
        with pytest.raises(BatchConflict, match="'other' is for the model 'm', not 'n'"):
            journal.append("other", "n", 1, more, commit=commit)
    assert journal.append("other", "n", 0, lines(1), commit=False) == other
    with pytest.raises(BatchConflict, match="is being served; cancel it first"):
        journal.delete("b")


def test_batches_are_served_in_the_order_of_their_commits(journal: Journal) -> None:
    late = journal.append("late", "m", 0, lines(1), commit=False).key
    early = journal.append("early", "m", 0, lines(2), commit=True).key
    journal.append("other", "another model", 0, lines(1), commit=True)
    work = journal.waiting("m", START, 100)
    journal.append("late", "m", 1, [], commit=True)
    assert waiting(journal) == [(early, 0), (early, 1), (late, 0)]
    assert waiting(journal, after={"": work[-1].position}) == [(late, 0)]
    assert len(journal.waiting("another model", START, 100)) == 1


def test_owners_take_turns_whoever_was_first(journal: Journal) -> None:
    for owner, count in (("alice", 9), ("bob", 2), ("alice", 1), ("carol", 3)):
        journal.append(f"of {count}", "m", 0, lines(count), commit=True, owner=owner)
    assert len(journal.waiting("m", START, 2)) == 2, "fewer than there are owners"
    read: dict[str, Position] = {}
    order = []
    while found := journal.waiting("m", read, 6):
        order += [(work.owner[0], work.line) for work in found]
        read |= {work.owner: work.position for work in found}
    turns = ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "c2"]
    assert order[:8] == [(each[0], int(each[1])) for each in turns]
    assert order[8:] == [("a", line) for line in range(3, 9)] + [("a", 0)]


def test_a_place_is_never_used_again(journal: Journal) -> None:
    """Else lines of a new batch would lie behind where the runner is."""
    journal.append("b", "m", 0, lines(3), commit=True)
    (*_, last) = journal.waiting("m", START, 100)
    journal.cancel("b")
    journal.delete("b")
    key = journal.append("b", "m", 0, lines(1), commit=True).key
    assert waiting(journal, after={"": last.position}) == [(key, 0)]


def test_a_cancelled_batch_keeps_what_it_has_and_gets_no_more(journal: Journal) -> None:
    key = journal.append("b", "m", 0, lines(3), commit=True).key
    record(journal, "b", 1)
    assert journal.cancel("b").state is BatchState.CANCELLED
    journal.record([Outcome(key, 0, "late", False)])
    assert has(journal, "b") == [1] and waiting(journal) == []
    assert journal.cancel("b") == journal.status("b")
    with pytest.raises(BatchConflict, match="is cancelled"):
        journal.append("b", "m", 3, lines(1), commit=False)


def test_results_of_a_deleted_batch_are_dropped(journal: Journal) -> None:
    old = journal.append("b", "m", 0, lines(1), commit=True).key
    journal.cancel("b")
    journal.delete("b")
    new = journal.append("b", "m", 0, lines(1), commit=True).key
    journal.record([Outcome(old, 0, "of the old one", False)])
    assert new != old and has(journal, "b") == []


def test_lines_in_error_have_their_result_at_once(journal: Journal) -> None:
    status = journal.append("b", "m", 0, [NewLine("x", "bad"), *lines(1, 1)], commit=True)
    assert (status.failed, status.done, status.state) == (1, 0, BatchState.COMMITTED)
    assert waiting(journal) == [(status.key, 1)]
    all_bad = journal.append("c", "m", 0, [NewLine("x", "bad")], commit=True)
    assert all_bad.state is BatchState.ENDED


def test_results_come_in_pages(journal: Journal) -> None:
    journal.append("b", "m", 0, lines(5), commit=True)
    record(journal, "b", *range(5))
    size = len("result 0")
    pages = [journal.results("b", 0, max_bytes=n) for n in (0, size, 2 * size, 99 * size)]
    assert [len(page) for page in pages] == [1, 1, 2, 5]


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_LINES", 3)
    with opened(tmp_path, max_bytes=200_000) as journal:
        with pytest.raises(JournalFull, match="lines: 4 in a batch; at most 3 are allowed"):
            journal.append("b", "m", 0, lines(4), commit=True)
        journal.append("b", "m", 0, [NewLine("x" * 100_000)], commit=False)
        with pytest.raises(JournalFull, match=r"at most 200,000 are allowed \(server.batch_gib\)"):
            journal.append("b", "m", 1, [NewLine("y" * 100_000)], commit=True)
        journal.delete("b")
        while journal.sweep():
            pass
        journal.append("b", "m", 0, [NewLine("y" * 100_000)], commit=True)


def test_what_is_forgotten_goes_bit_by_bit_and_its_room_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it is, others have their turn in between; and nobody sees it meanwhile."""
    monkeypatch.setattr(journal_module, "_SWEEP_S", -1.0)  # a line each time
    monkeypatch.setattr(journal_module, "_SWEEP_PAGES", 100)
    with opened(tmp_path) as journal:
        large = [NewLine("x" * 1_000_000, "an error") for _ in range(5)]
        for name, owner in (("b", "alice"), ("c", "")):
            journal.append(name, "m", 0, large, commit=False, owner=owner, note="a note")
            journal.delete(name, owner)
        journal.append("b", "m", 0, lines(2), commit=True, owner="alice")
        turns = 0
        while turns == 0 or journal.sweep() or journal.shrink():
            turns += 1
            assert journal.status("b", "alice").num_lines == 2
            assert [each.batch_id for each in journal.noted("", after=None, limit=9)] == []
            for name in ("1", "2"):
                with pytest.raises(UnknownBatch):
                    journal.status(name)
        assert turns > 2 * (5 + 5) + 10
        assert [work.line for work in journal.waiting("m", START, 9)] == [0, 1]
    assert journal.path.stat().st_size < 100_000


def test_cleaning_forgets_what_is_old_and_not_being_served(tmp_path: Path) -> None:
    now = 1000.0
    with opened(tmp_path, clock=lambda: now) as journal:
        for name in ("open", "served", "ended", "cancelled"):
            journal.append(name, "m", 0, lines(1), commit=name in ("served", "ended"))
        record(journal, "ended", 0)
        journal.cancel("cancelled")
        now = 1060.0
        assert journal.clean(keep_s=61) == 0
        assert journal.clean(keep_s=59) == 3
        assert journal.status("served").num_lines == 1
        for name in ("open", "ended", "cancelled"):
            with pytest.raises(UnknownBatch):
                journal.results(name, 0, max_bytes=1)


# Opening.

HOLD = """
import sys
from pathlib import Path
from jaxserve.server.batches.journal import Journal
journal = Journal(Path(sys.argv[1]), 1)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        refusal = rf"batch_dir: {tmp_path}: in use by another server \(process {holder.pid}\); "
        with pytest.raises(ConfigError, match=refusal):
            Journal(tmp_path, ROOM)
        holder.kill()
    with opened(tmp_path):
        pass


def test_a_directory_that_does_not_serve(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batch_dir: .*file: .*batch_dir=DIR names another"):
        Journal(tmp_path / "file", ROOM)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "batches.sqlite").write_text("something else" * 100)
    with pytest.raises(ConfigError, match=r"batches\.sqlite: file is not a database"):
        Journal(broken, ROOM)
    with opened(tmp_path / "new") as journal:
        path = journal.path
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(ConfigError, match=r"another version of jaxserve \(9, not 2\)"):
        Journal(path.parent, ROOM)


def test_a_lock_in_which_nothing_can_be_written_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "a") as held:
        monkeypatch.setattr(directory, "lock", lambda path: held)
        with pytest.raises(ConfigError, match=rf"batch_dir: {tmp_path}: Invalid argument"):
            directory.lock_directory(tmp_path)
        assert held.closed


def test_nobody_else_may_look_into_it(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    ours = tmp_path / "somebody made it"
    ours.mkdir(mode=0o755)
    with opened(ours) as journal:
        journal.append("b", "model", 0, lines(1), commit=True)
        assert len([*ours.iterdir()]) == 4, "the database, its log, the log's index and the lock"
        assert not any(file.stat().st_mode & 0o077 for file in ours.iterdir())
