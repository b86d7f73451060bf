"""The table of docs/exactness.md comes out of its command, and every chat of a real model has the
same bits in every way."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve_lab.experiments.common.page import BEGIN, END
from jaxserve_lab.experiments.exactness import cli
from jaxserve_lab.experiments.exactness.chats import ALONE, WAYS, Answers, chats
from jaxserve_lab.experiments.exactness.models import MODELS

SERVED = next(iter(MODELS))


def test_what_differs_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One chat has another text with drafts, and another other bits."""
    page = tmp_path / "exactness.md"
    page.write_text(f"before\n{BEGIN.format('exactness', 'chats')}stale\n{END}\nafter\n")

    def served(model: str, way: str, count: int, tokens: int) -> Answers:
        found: Answers = [{"tokens": [i] * tokens, "bits": [i]} for i in range(count)]
        if way == "with drafts":
            found[0] = {"tokens": [7] * tokens, "bits": [0]}
            found[1]["bits"] = [8]
        return found

    monkeypatch.setattr(cli, "_served", served)
    given = ["--chats=5", "--tokens=2", f"--models={SERVED}", f"--out={page}"]
    assert cli.main(given) == 1, "not all are the same"
    text = page.read_text()
    assert text.startswith("before\n<!-- begin") and "stale" not in text
    assert text.count("5, 5") == len(WAYS) - 2 and text.count("4, 3") == 1
    assert cli.main([*given, f"--ways={ALONE};all at once"]) == 0
    with pytest.raises(SystemExit):
        cli.main(["--ways=upside down"])
    assert "there is no 'upside down'" in capsys.readouterr().err


def test_chats_are_the_same_every_time() -> None:
    assert chats(50) == chats(50) and len({str(chat) for chat in chats(50)}) == 50
    assert chats(50)[:7] == chats(7)


@pytest.mark.slow
def test_every_way_gives_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """50 chats of the model that most people begin with, as it is served."""
    assert cli.main(["--tokens=16", f"--models={SERVED}", "--out="]) == 0
    assert capsys.readouterr().out.count("50, 50") == len(WAYS) - 1
