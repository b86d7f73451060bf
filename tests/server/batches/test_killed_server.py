"""kill -9 in the middle of a batch of 500, restart, and the results file has 500 right lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from jaxserve.client import Client
from jaxserve.client.batch_results import ResultsFile
from jaxserve.client.cli import batch
from jaxserve.server.batches.records import BatchState
from tests.server.batches.relay import Relay
from tests.server.batches.serving import opened
from tests.server.processes import serve

COUNT, LENGTHS = 500, (1, 2, 3, 5)
NAMES = ("Tom", "Lily", "Ben", "Mia", "Sam")
BEGINNINGS = (
    *("Once upon a time", "One day", "There was a", "In the park", "The dog and", "After lunch"),
    *("It was late when", "Under the tree", "The sun was", "A bird saw", "Mom said that", "In May"),
    *("The box had", "Dad went to", "At the lake", "On the hill", "They found a", "The cat did"),
    *("Her best toy", "He ran after", "Soon the rain", "At night", "By the sea", "Then the frog"),
    "Far away",
)
PROMPTS = [f"{beginning} {name}" for beginning in BEGINNINGS for name in NAMES]
PATIENCE = 120


@pytest.mark.promise(20)
@pytest.mark.slow
def test_a_killed_server_loses_no_line_of_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, out = tmp_path / "journal", tmp_path / "results.jsonl"
    asked = [(PROMPTS[n % len(PROMPTS)], LENGTHS[n // len(PROMPTS)]) for n in range(COUNT)]
    lines = [
        {"id": f"{n}", "prompt": prompt, "sampling": {"max_tokens": length}}
        for n, (prompt, length) in enumerate(asked)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    append, midway, codes = ResultsFile.append, threading.Event(), list[int]()

    def spied(results: ResultsFile, records) -> None:
        append(results, records)
        if results.done >= COUNT // 4:
            midway.set()

    monkeypatch.setattr(ResultsFile, "append", spied)
    with Relay() as network:
        arguments = [f"--address={network.address}", str(tmp_path / "prompts.jsonl")]
        arguments += [f"--out={out}"]
        client = threading.Thread(target=lambda: codes.append(batch(arguments)), daemon=True)
        flags = (f"--config.server.batch_dir={journal}", "--config.server.batch_in_flight=24")
        with serve(*flags) as server:
            network.target = server.address
            client.start()
            assert midway.wait(PATIENCE)
            server.process.kill()
            network.cut()
        batch_id = json.loads(out.with_name(f"{out.name}.batch").read_text())["batch_id"]
        with opened(journal) as left:
            status = left.status(batch_id)
            assert status.state is BatchState.COMMITTED and COUNT // 4 <= status.done < COUNT
        with serve(*flags) as server:
            network.target = server.address
            client.join(PATIENCE)
            alone = _alone(server.address)
    assert codes == [0]
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [(each["line"], each["id"]) for each in found] == [(n + 1, f"{n}") for n in range(COUNT)]
    for each, asked_for in zip(found, asked, strict=True):
        (completion,) = each["completions"]
        prompt, length = asked_for
        text, tokens = alone[prompt]
        assert completion["token_ids"] == tokens[:length] and len(completion["token_ids"]) > 0
        assert text.startswith(completion["text"]) and completion["text"]
        assert length < LENGTHS[-1] or completion["text"] == text


def _alone(address: str) -> dict[str, tuple[str, list[int]]]:
    """What each prompt gets by a greedy call when nothing else runs, with the largest of LENGTHS:
    what it gets with a smaller one is the beginning of that."""
    with Client(address) as client:
        found = {}
        for prompt in PROMPTS:
            (completion,) = client.complete(prompt, max_tokens=LENGTHS[-1])
            found[prompt] = (completion.text, completion.token_ids)
        return found
