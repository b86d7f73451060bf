"""What `jaxserve batch` says where it does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.client.cli import batch
from jaxserve.server.server import Server
from tests.server.batches.prompt_files import command, write


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", 6)


def test_a_refusal_is_one_line_and_leaves_nothing_behind(
    server: Server, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(command(server.address, prompts)) == 1
    assert "takes no batches: server.batch_dir" in capsys.readouterr().err.splitlines()[-1]
    assert batch(command("127.0.0.1:1", prompts)) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err
    assert [*prompts.parent.glob("results*")] == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "the following arguments are required: FILE, --out"),
        (["prompts.jsonl"], "the following arguments are required: --out"),
        (["prompts.jsonl", "--out=-"], "a batch needs a file for its results"),
        (["prompts.jsonl", "--out=prompts.jsonl"], "be written over the prompts"),
        (["x.batch", "--out=x"], "be written over the prompts"),
        (["prompts.jsonl", "--out=."], "--out: . is a folder"),
        (["prompts.jsonl", "--out=no/such"], "--out: there is no folder no"),
        (["prompts.jsonl", "--out=/dev/null"], "--out: /dev/null is not a file"),
        (["prompts.jsonl", "--out=x", "--tier=realtime"], "unrecognized arguments: --tier"),
        (["prompts.jsonl", "--out=x", "hi"], "unrecognized arguments: hi"),
        (
            ["hi", "--out=x", "--timeout=0"],
            "--timeout must be more than 0 and at most 1e+09 s",
        ),
        (["hi", "--out=x", "--timeout=nan"], "seconds, got nan"),
        (["hi", "--out=x", "--timeout=inf"], "seconds, got inf"),
    ],
)
def test_flags_that_do_not_go_together(
    prompts: Path,
    flags: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(prompts.parent)
    Path("x.batch").touch()
    with pytest.raises(SystemExit) as caught:
        batch(flags)
    assert caught.value.code == 2
    problem, _ = capsys.readouterr().err.splitlines()
    assert complaint in problem


def test_prompts_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    assert batch(command("localhost:1", path)) == 1
    assert "prompts.jsonl: No such file or directory" in capsys.readouterr().err
    path.write_text('{"prompt": 1}')
    assert batch(command("localhost:1", path)) == 1
    error = capsys.readouterr().err
    assert error == f"jaxserve batch: {path}, line 1: prompt: must be a string\n"
    path.write_bytes(b'{"prompt": "\xff"}')
    assert batch(command("localhost:1", path)) == 1
    assert "is not UTF-8" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]
