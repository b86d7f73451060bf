"""Times jaxserve with and without drafts: a child of compare.py, in jaxserve's environment."""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Sequence

from measures import serve
from prompts import ASKED, MAX_TOKENS, STREAMS

from jaxserve import LLM, SamplingParams, __version__
from jaxserve.engine.stats import StepRecorder

SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)


class Side:
    """An engine, and what its last steps drafted.

    Args:
        model: GGUF file or directory.
        policy: its scheduling policy.
    """

    def __init__(self, model: str, policy: str) -> None:
        self.llm = LLM(model, scheduler__policy=policy, engine__max_model_len=1024)
        self.recorder = StepRecorder()
        self.llm.engine.add_observer(self.recorder)

    def ask(self, name: str) -> dict[str, float]:
        """Tokens/s of a measure. Each time with a salt of its own: what was written the last time
        is nobody's to draft from."""
        self.recorder.steps.clear()
        chats = [[{"role": "user", "content": text}] for text in ASKED[name]]
        begin, made = time.perf_counter(), 0
        if name == "mixed":
            several = [chats[i % len(chats)] for i in range(STREAMS)]
            answers = self.llm.chat(several, SAMPLING, cache_salt=uuid.uuid4().hex, progress=False)
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
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy", required=True)
    args = parser.parse_args(argv)
    side = Side(args.model, args.policy)
    for name in ASKED:
        side.ask(name)
    serve(side.ask, {"jaxserve": __version__, "policy": args.policy})
    side.llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
