"""Run by test_sharded.py in a process of its own with 8 virtual devices: serves the same requests
on 1, 2 and 4 shards and prints tokens and log-probabilities as JSON. "mixed" as the last argument:
KV caches on one shard against caches of both kinds on several, for which Llama gets as many KV
heads as heads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxserve.engine import build
from tests.engine import mixed_caches
from tests.engine.harness import SHAPES, engine, send, write_shape

PROMPTS = [[5, 9, 4], [7] * 21, [11, 3, 8, 60, 61, 62, 63], list(range(3, 33))]


def main(folder: Path, family: str, mixed: bool) -> None:
    SHAPES[family]["vocab_size"] = 97  # no multiple of the shards
    hybrid = {}
    if mixed:
        SHAPES["llama"]["num_key_value_heads"] = 4
        build.make_policy = mixed_caches.make
        hybrid = {"scheduler__policy": "mixed_chunks", "cache__rho": "0"}
    path = write_shape(folder, family)
    report = {}
    for shards in (1, 4) if mixed else (1, 2, 4):  # compiling for several takes long
        with engine(
            path,
            mesh__tensor=shards,
            scheduler__max_prefill_tokens=16,
            engine__row_buckets=(4,),
            engine__token_buckets=(16,),
            scheduler__max_batch_tokens=16,
            scheduler__max_rows=4,
            **(hybrid if shards > 1 else {}),
        ) as running:
            streams = [
                send(running, p, max_tokens=12, logprobs=20, ignore_eos=True)[1] for p in PROMPTS
            ]
            report[shards] = [
                {
                    "tokens": stream.wait().tokens(),
                    "top": [dict(o.logprobs[0].top) for o in stream.outputs],
                }
                for stream in streams
            ]
            if mixed and shards > 1:
                seen = running._scheduler.policy.seen  # type: ignore[attr-defined]
                assert seen.mixed and seen.projected, seen
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["mixed"])
