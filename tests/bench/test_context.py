"""Contexts of 131,072 tokens: the text does not depend on how they are cut, and what the host does
for a step does not grow with them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.stats import Observer, StepStats
from jaxserve_lab.bench import context as bench
from tests.engine import harness
from tests.engine.harness import SHAPES, engine, send

LONGEST = 131072
WRITTEN = 64


class Calls(Observer):
    """How many functions the engine's thread calls for each step, those of C included. rows: of
    the steps that count, all of them decodes."""

    def __init__(self, rows: int) -> None:
        self.of_decodes: list[int] = []
        self._rows, self._calls = rows, 0

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += event in ("call", "c_call")

    def on_step(self, stats: StepStats) -> None:
        if stats.num_decodes == stats.num_rows == self._rows:
            self.of_decodes.append(self._calls)
        self._calls = 0
        sys.setprofile(self._count)

    def on_stop(self) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("rows", [1, 8])
def test_what_the_host_does_for_a_step_does_not_grow_with_the_context(
    rows: int, tmp_path: Path
) -> None:
    found = []
    for context in (1024, 16384):
        made, device = bench.engine_without_device(tmp_path, "goodput", 8, 16384)
        calls = Calls(rows)
        made.add_observer(calls)
        made.start()
        try:
            prompt = np.random.default_rng(0).integers(7, bench.VOCAB, context - WRITTEN).tolist()
            bench.serve(made, prompt, 1, 1)
            bench.serve(made, prompt, rows, WRITTEN)
        finally:
            made.stop()
        # Some may come some steps later than the others, and are alone at the end.
        found.append([Counter(a).most_common(1)[0][0] for a in (calls.of_decodes, device.sent)])
    (short, sent), (long, also_sent) = found
    assert sent == also_sent
    assert long == pytest.approx(short, rel=0.02)


@pytest.mark.slow
def test_131072_tokens_are_the_same_text_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 512 beside another request and blocks of 16, and in chunks of 2,048 and blocks
    of 64."""
    monkeypatch.setattr(harness, "TIMEOUT", 1800)
    more = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {**SHAPES["llama"], **more, "head_dim": 8, "max_position_embeddings": LONGEST}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "rope_theta": 1e6}))
    prompt = np.random.default_rng(0).integers(3, 96, LONGEST - WRITTEN).tolist()
    texts = []
    for chunk, block, beside in ((512, 16, 1), (2048, 64, 0)):
        fields: dict[str, Any] = {
            "cache__block_size": block,
            "cache__num_blocks": 2 * (LONGEST + 16384) // block,
            "scheduler__max_batch_tokens": chunk,
            "scheduler__max_prefill_tokens": chunk,
            "scheduler__max_rows": 8,
            "engine__row_buckets": (8,),
            "engine__token_buckets": (chunk,),
        }
        with engine(tmp_path, **fields) as made:
            others = [
                send(made, prompt[:8000], max_tokens=400, ignore_eos=True)[1] for _ in range(beside)
            ]
            options = {"temperature": 0.7, "seed": 1, "max_tokens": WRITTEN, "ignore_eos": True}
            _, stream = send(made, prompt, **options)
            texts.append(stream.wait().tokens())
            for other in others:
                other.wait()
    assert texts[0] == texts[1]
    assert len(texts[0]) == WRITTEN and len(set(texts[0])) > 8
