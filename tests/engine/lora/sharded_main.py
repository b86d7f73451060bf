"""Run by test_sharded.py in a process of its own with 2 virtual devices: serves the same requests
with adapters on one shard and on two, and prints the tokens as JSON, by shards.

OPT on two shards has caches of both kinds, so that q, k and v are apart. Llama's two KV heads are
one for each. Steps on two shards are there for few columns of adapters and for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.engine.startup.choices import policy_choice
from tests.engine import mixed_caches
from tests.engine.harness import SHAPES, engine, send, write_shape
from tests.engine.lora import peft

PROMPTS = [[5, 9, 4], [7] * 21, [11, 3, 8, 60, 61, 62, 63], list(range(3, 33))]
WANTED = [(prompt, name) for prompt in PROMPTS for name in ("one", "", "two")]
SHARDS = (1, 2)


def serve(folder: Path, family: str) -> dict[int, Any]:
    """What it has written, by shards."""
    SHAPES[family] |= {"num_hidden_layers": 1}
    path = write_shape(folder, family)
    adapters = {
        "one": str(peft.write(folder / family / "one", path)),
        "two": str(peft.write(folder / family / "two", path, rank=70, seed=2, lora_alpha=35)),
    }
    report: dict[int, Any] = {}
    for shards in SHARDS:
        mixed = (family, shards) == ("opt", 2)
        hybrid = {"scheduler__policy": "mixed_chunks", "cache__rho": "0"} if mixed else {}
        with engine(
            path,
            mesh__tensor=shards,
            scheduler__max_prefill_tokens=16,
            engine__row_buckets=(4,),
            engine__token_buckets=(16,),
            scheduler__max_batch_tokens=16,
            scheduler__max_rows=4,
            lora__max_rank=128,
            lora__adapters=adapters,
            **hybrid,
        ) as running:
            sampling: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
            streams = [send(running, p, adapter=name, **sampling)[1] for p, name in WANTED]
            report[shards] = [stream.wait().tokens() for stream in streams]
            widths = {layout.lora for layout in running.executor.buckets.all()}
            assert widths == ({0, 64, 256} if shards > 1 else {0, 256})
            if mixed:
                seen = running._scheduler.policy.seen  # type: ignore[attr-defined]
                assert seen.hidden, seen
    return report


if __name__ == "__main__":
    policy_choice.make_policy = mixed_caches.make
    print(json.dumps(serve(Path(sys.argv[1]), sys.argv[2])))
