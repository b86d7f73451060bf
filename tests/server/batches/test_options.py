"""What the config says of batches, and what serve.py makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import Config, ConfigError, SchedulerConfig, ServerConfig
from jaxserve.server.batches.options import batch_directory, open_batches


def test_each_port_has_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    state = Path("/home/me/.local/state/jaxserve")
    assert batch_directory(ServerConfig()) == state / "batches-50051"
    assert batch_directory(ServerConfig(port=7)) == state / "batches-7"
    assert batch_directory(ServerConfig(batch_dir="~/x", port=0)) == Path("/home/me/x")
    assert batch_directory(ServerConfig(port=0)) is None, "its next run would not find it"
    assert batch_directory(ServerConfig(batch_dir="")) is None
    with pytest.raises(ConfigError, match=r"batch_dir: there is no home directory for ~nobody-at-"):
        batch_directory(ServerConfig(batch_dir="~nobody-at-home/x"))


@pytest.mark.parametrize("home", ["a file", "nobody's"])
def test_without_a_home_that_can_be_written_a_server_starts_and_takes_no_batches(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless it was told where they are to be."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "a file"))
    if home == "nobody's":
        monkeypatch.setattr(Path, "expanduser", no_home)
    with open_batches(ServerConfig(), SchedulerConfig()) as batches:
        assert batches is None
    (record,) = caplog.records
    assert record.message.startswith("no batches are taken: ")
    assert "--config.server.batch_dir=DIR names another" in record.message
    with (
        pytest.raises(ConfigError, match=r"^server\.batch_dir: "),
        open_batches(ServerConfig(batch_dir="~/x"), SchedulerConfig()),
    ):
        pass


def no_home(path: Path) -> Path:
    raise RuntimeError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_in_flight": -1}, r"batch_in_flight: must be 0 to scheduler.max_queue \(256\)"),
        ({"batch_in_flight": 257}, "batch_in_flight: must be .* got 257"),
        ({"batch_keep_days": 0.0}, "batch_keep_days: must be more than 0, got 0"),
        ({"batch_keep_days": float("nan")}, "batch_keep_days: must be more than 0, got nan"),
        ({"batch_gib": -1.0}, "batch_gib: must be more than 0, got -1"),
    ],
)
def test_fields_out_of_range(fields: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\." + words):
        Config(server=ServerConfig(**fields))


def test_what_is_in_range_is_what_the_server_gets(tmp_path: Path) -> None:
    given, scheduler = ServerConfig(batch_dir=str(tmp_path), batch_keep_days=2.0), SchedulerConfig()
    with open_batches(given, scheduler) as batches:
        assert batches is not None
        assert (batches.in_flight, batches.keep_s) == (64, 2 * 86_400)
        with (
            pytest.raises(ConfigError, match="in use by another server"),
            open_batches(given, scheduler),
        ):
            pass
    with open_batches(given, SchedulerConfig(max_queue=0)) as batches:
        assert batches is not None and batches.in_flight == 1
    few = Config().with_fields(
        server__batch_dir=str(tmp_path), server__batch_in_flight=9, scheduler__max_queue=9
    )
    with open_batches(few.server, few.scheduler) as batches:
        assert batches is not None and batches.in_flight == 9
    with open_batches(ServerConfig(batch_dir=""), scheduler) as batches:
        assert batches is None
