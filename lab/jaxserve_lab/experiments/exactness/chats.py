"""The chats, and what an engine answers in each way of serving them: tokens, and the bits of all
log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.offline.llm import LLM
from jaxserve.offline.outputs import RequestOutput
from jaxserve.sched.request import SamplingParams

Chat = list[dict[str, str]]
Answers = list[dict[str, list[Any]]]  # of each chat: its tokens, and bits as integers

LOGPROBS = 3
TOPICS = "rain", "the sea", "bread", "trains", "a clock", "bees", "winter", "glass", "maps", "salt"
QUESTIONS = (
    "Why is {} important?",
    "Write a short poem about {}.",
    "Explain {} to a child.",
    "List three facts about {}.",
    "What would happen without {}?",
)
WORDS = (
    "the river a small town under the hill was quiet and people told stories about an old machine "
    "that could count every star and write letters to the moon while rain fell"
)

ALONE, RESTARTED = "alone", "server restarted"
SCARCE = 384  # blocks: too few for all requests at once
# What the engine is given for each way of serving the same chats.
WAYS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "all at once": {},
    "prompts in chunks of 37": {"scheduler__max_prefill_tokens": 37},
    "beginning found": {"cache__prefix_caching": True},
    "preempted": {
        "scheduler__policy": "vllm",
        "scheduler__max_batch_tokens": 1024,  # it computes prompts whole
        "cache__num_blocks": SCARCE,
    },
    "with drafts": {"scheduler__policy": "sarathi+spec"},
    RESTARTED: {},
}
FIELDS: dict[str, Any] = {
    "cache__memory_gib": 1.0,
    "cache__prefix_caching": False,
    "scheduler__max_queue": 1000,
    "scheduler__max_rows": 64,
    "scheduler__policy": "sarathi",
}


def chats(count: int) -> list[Chat]:
    """The same ones every time: a quarter has up to 100 words before its question, a quarter up to
    420."""
    rng, words, made = random.Random(1), WORDS.split(), list[Chat]()
    for i in range(count):
        text = QUESTIONS[i % len(QUESTIONS)].format(TOPICS[i // len(QUESTIONS) % len(TOPICS)])
        if i % 2:
            most = 100 if i % 4 == 1 else 420
            text = f"{' '.join(rng.choices(words, k=rng.randint(10, most)))}. {text}"
        made.append([{"role": "user", "content": text}])
    return made


def answers(
    model: str, way: str, count: int, tokens: int, fields: Mapping[str, Any]
) -> tuple[Answers, int]:
    """What a new engine answers, and how often it preempted.

    Args:
        model: As for `LLM`.
        way: Of WAYS.
        count: Chats.
        tokens: Of each answer.
        fields: Of the config, for this model.
    """
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, logprobs=LOGPROBS, ignore_eos=True
    )
    asked = chats(count)
    given = {**FIELDS, **WAYS[way], **fields}
    if "cache__num_blocks" in given:
        del given["cache__memory_gib"]
    with LLM(model, **given) as llm:
        if way in (ALONE, RESTARTED):
            found = [llm.chat(chat, sampling, progress=False)[0] for chat in asked]
        else:
            found = llm.chat(asked, sampling, progress=False)
        if given["cache__prefix_caching"]:
            found = llm.chat(asked, sampling, progress=False)
            assert sum(llm.engine.stats().prefix_cache_hits.values()), "nothing was found"
        return [_answer(one) for one in found], llm.engine.stats().preemptions


def _answer(found: RequestOutput) -> dict[str, list[Any]]:
    (output,) = found.outputs
    assert output.logprobs is not None
    numbers = [
        value for entry in output.logprobs for value in (entry.logprob, *dict(entry.top).values())
    ]
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    return {"tokens": list(output.token_ids), "bits": bits.tolist()}
