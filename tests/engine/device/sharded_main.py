"""Run by test_sharded.py in a process of its own with 4 virtual devices: serves the same requests
on one shard and on several, and prints tokens and log-probabilities as JSON, by shards.

OPT on four shards has caches of both kinds: it absorbs decodes and projects chunks, so it takes
both ways over the shards, and q, k and v are apart. Llama has fewer KV heads than four. Each has
adapters, cut as the projections that they change. One layer each, since compiling takes long; tests
of the models and of the kernels have more of them on shards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.engine.startup.choices import policy_choice
from jaxserve.sched.request import PoolingParams, PoolingType
from tests.engine import mixed_caches
from tests.engine.harness import SHAPES, engine, pool, send, vector, write_shape
from tests.engine.lora import peft

PROMPTS = [[5, 9, 4], [7] * 21, [11, 3, 8, 60, 61, 62, 63], list(range(3, 33))]
WANTED = [(prompt, name) for prompt in PROMPTS for name in ("", "one", "two")]
SHARDS = (1, 4)
MIXED = ("opt", 4)


def serve(folder: Path, family: str) -> dict[int, Any]:
    """What it has written, by shards."""
    SHAPES[family] |= {"num_hidden_layers": 1, "vocab_size": 97}  # no multiple of the shards
    path = write_shape(folder, family)
    adapters = {
        "one": str(peft.write(folder / family / "one", path)),
        "two": str(peft.write(folder / family / "two", path, rank=70, seed=2, lora_alpha=35)),
    }
    report: dict[int, Any] = {}
    for shards in SHARDS:
        mixed = (family, shards) == MIXED
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
            asked = {"max_tokens": 12, "logprobs": 20, "prompt_logprobs": 20, "ignore_eos": True}
            streams = [send(running, p, adapter=name, **asked)[1] for p, name in WANTED]
            mean = PoolingParams(PoolingType.MEAN)
            vectors = [vector(pool(running, p, mean, name)).tolist() for p, name in WANTED]
            report[shards] = [
                {
                    "vector": found,
                    "tokens": stream.wait().tokens(),
                    "prompt": len(prompt),
                    "top": [
                        dict(entry.top)
                        for output in stream.outputs
                        for entry in (*output.prompt_logprobs, *output.logprobs)
                    ],
                }
                for (prompt, name), stream, found in zip(WANTED, streams, vectors, strict=True)
            ]
            widths = {layout.lora for layout in running.executor.buckets.all()}
            assert widths == ({0, 64, 256} if shards > 1 else {0, 256})
            if mixed:
                seen = running._scheduler.policy.seen  # type: ignore[attr-defined]
                assert seen.mixed and seen.projected, seen
    return report


if __name__ == "__main__":
    policy_choice.make_policy = mixed_caches.make
    print(json.dumps(serve(Path(sys.argv[1]), sys.argv[2])))
