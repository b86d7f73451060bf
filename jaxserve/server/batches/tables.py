"""The journal's tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from jaxserve.engine.errors import ConfigError

_VERSION = 1  # of the tables
_TABLES = """
CREATE TABLE batches (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    state TEXT NOT NULL,
    num_lines INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    changed REAL NOT NULL
);
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
# Beside version 1, whose servers leave it alone: batches that some key owns.
_OWNERS = """
CREATE TABLE IF NOT EXISTS owners (
    batch INTEGER PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    owner TEXT NOT NULL
)
"""


def open_tables(path: Path) -> sqlite3.Connection:
    """The database, made if it is not there, for its owner's eyes only, for any thread, each
    statement its own transaction unless it begins one. Raises ConfigError for a file that is
    something else."""
    try:
        path.touch(0o600)  # SQLite gives its log the same mode
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"server.batch_dir: {path}: {error}") from None
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            problem = f"{path} is of another version of jaxserve ({version}, not {_VERSION})"
            raise ConfigError(f"server.batch_dir: {problem}")
        if version == 0:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        if version == 0:
            db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        db.execute(_OWNERS)
    except sqlite3.Error as error:
        db.close()
        raise ConfigError(f"server.batch_dir: {path}: {error}") from None
    except BaseException:
        db.close()
        raise
    return db
