"""`jaxserve embed`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.client.cli import embed
from jaxserve.sched.request import SLO, PoolingType
from jaxserve.server.server import Server
from tests.server.fake_engine import INFO, FakeEngine


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with Server(engine.run(), grace_s=0.0) as server:
        yield f"--address={server.address}"


def test_a_text(address: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pooling=mean", "--no-normalize", "--dimensions=2", "--ttft_ms=500"]
    assert embed([address, "Once", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == [4.0, 0.0]
    (asked,) = engine.requests
    assert asked.pooling is not None and asked.pooling.pooling is PoolingType.MEAN
    assert asked.slo == SLO(ttft=0.5)


def test_a_file_of_texts_and_its_answers_later(
    address: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "vectors.jsonl"
    texts.write_text("Once\n\nupon a\n" + "x" * 5000 + "\n")
    assert embed([address, f"--file={texts}", f"--out={out}"]) == 1
    assert "1 of 3 prompts failed" in capsys.readouterr().err
    first, second, failed = map(json.loads, out.read_text().splitlines())
    assert [first["line"], second["line"], failed["line"]] == [1, 3, 4]
    assert (first["prompt"], len(first["embedding"])) == ("Once", INFO.d_model)
    assert first["usage"]["prompt_tokens"] == 4
    assert failed["error"]["code"] == "INVALID_ARGUMENT"
    before = len(engine.requests)
    assert embed([address, f"--file={texts}", f"--out={out}", "--resume"]) == 1
    assert len(engine.requests) == before, "what was there is kept"


@pytest.mark.parametrize("flags", [[], ["a", "--file=b"], ["a", "--out=b"], ["--pooling=max", "a"]])
def test_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        embed(flags)
    assert error.value.code == 2
