"""The measurement of streams that move between replicas."""

from __future__ import annotations

import pytest

from jaxserve.deploy.moves.transport import Transport
from jaxserve_lab.experiments.moves import cli, replicas
from jaxserve_lab.experiments.moves.cli import Found, report, speeds


def test_the_report_has_medians_and_the_parts_of_the_pause() -> None:
    parts = {part: [number / 1000] * 3 for number, part in enumerate(cli._PARTS, start=1)}
    some = [0.01, 0.03, 0.02]
    found = Found(some, some, some, parts, some, some, [0.3, 0.4, 0.5], [1.0, 3.0, 2.0])
    first, pause, which, before, along, again = report(found)
    assert first == "time between tokens 20.0 ms (10.0 to 30.0); 1.000 of it if the stream can move"
    assert "20.0 ms (10.0 to 30.0)" in pause and "are 80 ms" in pause
    assert [f"{number}.0" in which for number in range(1, 6)] == [True] * 5
    assert (
        before.count("20.0 ms") == 2
        and "400.0 ms" in along
        and "2000.0 ms (1000.0 to 3000.0)" in again
    )


def test_a_transport_is_timed() -> None:
    (line,) = speeds(Transport(), (1,))
    assert line.startswith("1 MiB: put") and "a plain copy" in line


def test_too_few_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--tokens=40"])
    assert "--tokens: must be more than 40" in capsys.readouterr().err


@pytest.mark.slow
def test_the_measurement_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Briefly, with another shape; the text is the same, moved or not."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
    for name, value in small.items():
        monkeypatch.setitem(replicas.SHAPE, name, value)
    monkeypatch.setattr(cli, "BEHIND", 2000)
    assert cli.main(["--tokens=100", "--rounds=1"]) == 0
    told = capsys.readouterr().out
    assert "pause with the cache sent ahead" in told and "pause with computing again" in told
