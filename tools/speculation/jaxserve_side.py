"""Times jaxserve with and without drafts: a child of compare.py, in jaxserve's environment."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import uuid
from collections.abc import Sequence

from measures import serve
from prompts import ASKED, DRAWN, MAX_TOKENS, STREAMS, TOGETHER

from jaxserve import LLM, SamplingParams, __version__
from jaxserve.engine.stats import StepRecorder, StepStats

SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
FREE = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, seed=1, ignore_eos=True)
# As stored in the file, or in bfloat16, which vLLM reads.
WEIGHTS: dict[str, dict[str, str]] = {
    "stored": {},
    "bfloat16": {"model__quantization": "none", "model__dtype": "bfloat16"},
}


class Side:
    """An engine, and the drafts of its last steps.

    Args:
        model: GGUF file or directory.
        policy: The scheduling policy.
        weights: One of WEIGHTS.
    """

    def __init__(self, model: str, policy: str, weights: str) -> None:
        more = WEIGHTS[weights]
        self.llm = LLM(model, scheduler__policy=policy, engine__max_model_len=1024, **more)
        self.recorder = StepRecorder()
        self.llm.engine.add_observer(self.recorder)

    def ask(self, name: str) -> dict[str, float]:
        """Tokens/s of a measure. Each time has its own salt, so that earlier outputs cannot be
        drafted from."""
        self.recorder.steps.clear()
        texts = DRAWN[name] if name in DRAWN else ASKED[name]
        chats = [[{"role": "user", "content": text}] for text in texts]
        begin, made = time.perf_counter(), 0
        if name in TOGETHER:
            several = [chats[i % len(chats)] for i in range(STREAMS)]
            sampling = FREE if name in DRAWN else SAMPLING
            answers = self.llm.chat(several, sampling, cache_salt=uuid.uuid4().hex, progress=False)
            made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        else:
            for chat in chats:
                (answer,) = self.llm.chat(
                    chat, SAMPLING, cache_salt=uuid.uuid4().hex, progress=False
                )
                made += len(answer.outputs[0].token_ids)
        seconds, steps = time.perf_counter() - begin, self.recorder.steps
        drafted = sum(step.num_draft_tokens for step in steps)
        return {
            "rate": made / seconds,
            "tokens": made,
            "steps": len(steps),
            "drafted": drafted,
            "accepted": sum(step.num_accepted for step in steps),
            "decode_ms": 1e3 * undrafted(steps),
        }


def undrafted(steps: Sequence[StepStats]) -> float:
    """Median seconds, from end to end, of decodes with the most common number of rows that follow
    decodes with as many rows, without drafts."""
    plain = [
        None
        if step.num_draft_tokens or step.num_decodes < step.num_rows
        else (step.num_rows, step.end)
        for step in steps
    ]
    times: dict[int, list[float]] = {}
    for earlier, other in itertools.pairwise(plain):
        if earlier and other and earlier[0] == other[0]:
            times.setdefault(earlier[0], []).append(other[1] - earlier[1])
    return statistics.median(max(times.values(), key=len))


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--weights", choices=WEIGHTS, default="stored")
    args = parser.parse_args(argv)
    side = Side(args.model, args.policy, args.weights)
    for name in (*ASKED, *DRAWN):
        side.ask(name)
    serve(side.ask, {"jaxserve": __version__, "policy": args.policy})
    side.llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
