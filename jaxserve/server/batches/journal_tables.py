"""The journal's tables."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from jaxserve.config import ConfigError

_VERSION = 2  # version of the tables
_LOG_BYTES = 64 << 20  # the write-ahead log's size after a checkpoint
_BATCHES = """
CREATE TABLE batches (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    num_lines INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL,
    changed REAL NOT NULL,
    note TEXT NOT NULL,
    UNIQUE (owner, batch_id)
);
"""
_OTHERS = """
CREATE TABLE commits (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    batch INTEGER NOT NULL UNIQUE REFERENCES batches ON DELETE CASCADE
);
CREATE TABLE lines (
    batch INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    line INTEGER NOT NULL,
    request TEXT NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE TABLE results (
    batch INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    line INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY (batch, line)
);
"""
# Version 1 had no owners, or had them in a table of their own, and ids were shared. Foreign keys
# are off meanwhile (https://sqlite.org/lang_altertable.html#otheralter).
_FROM_1 = f"""
CREATE TABLE IF NOT EXISTS owners (batch INTEGER PRIMARY KEY, owner TEXT NOT NULL);
ALTER TABLE batches RENAME TO version_1;
{_BATCHES}
INSERT INTO batches
    SELECT key, COALESCE(owner, ''), batch_id, model, state, num_lines, done, failed,
    (SELECT COALESCE(SUM(LENGTH(request)), 0) FROM lines WHERE batch = key)
    + (SELECT COALESCE(SUM(LENGTH(result)), 0) FROM results WHERE batch = key), changed, ''
    FROM version_1 LEFT JOIN owners ON owners.batch = key;
DROP TABLE version_1;
DROP TABLE owners;
"""


def open_tables(path: Path) -> sqlite3.Connection:
    """Opens the database for any thread, and creates it, readable by its owner only, if it is
    missing. Each statement is its own transaction unless it begins one. Raises ConfigError if the
    file is something else."""
    db = None
    try:
        path.touch(0o600)  # SQLite gives its log the same mode
        path.chmod(0o600)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, 1, _VERSION):
            problem = f"{path} is of another version of jaxserve ({version}, not {_VERSION})"
            raise ConfigError(f"server.batch_dir: {problem}")
        if version == 0:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        if version != _VERSION:
            made = _BATCHES + _OTHERS if version == 0 else _FROM_1
            # Otherwise references to the table would be renamed with it.
            db.execute("PRAGMA legacy_alter_table = ON")
            db.executescript(f"BEGIN; {made} PRAGMA user_version = {_VERSION}; COMMIT;")
            db.execute("PRAGMA legacy_alter_table = OFF")
        db.execute("PRAGMA foreign_keys = ON")
        _take_notes(db, path.parent / "files")
    except BaseException as error:
        if db is not None:
            db.close()
        if isinstance(error, (sqlite3.Error, OSError)):
            raise ConfigError(f"server.batch_dir: {path}: {error}") from None
        raise
    return db


def _take_notes(db: sqlite3.Connection, directory: Path) -> None:
    """Takes in the notes of version 1, which were files."""
    for path in directory.glob("batch-*.json"):
        with contextlib.suppress(UnicodeDecodeError):
            note = path.read_text(encoding="utf-8")
            db.execute("UPDATE batches SET note = ? WHERE batch_id = ?", (note, path.stem))
        path.unlink()
