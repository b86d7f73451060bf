"""The fields of a response that repeat the call's options."""

from __future__ import annotations

from typing import Any

from jaxserve.sched.request import SamplingParams, Tier
from jaxserve.server.http.openai.request_options import SERVED_AS
from jaxserve.server.http.openai.responses.chat_request import is_strict
from jaxserve.server.http.openai.responses.schema import NamedTool, ResponseRequest


def asked_fields(
    response_id: str,
    created: int,
    body: ResponseRequest,
    tier: Tier,
    sampling: SamplingParams,
    model: str,
    *,
    strict: bool,
) -> dict[str, Any]:
    """The fields of a response that are known before it is generated.

    Args:
        response_id: its id.
        created: when it was begun, in seconds of time.time().
        body: the call's body.
        tier: the request's tier.
        sampling: its sampling parameters.
        model: name of the model or adapter.
        strict: whether tools that do not say so are strict.
    """
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    form = None if text is None or text.format is None else _given(text.format)
    tools = [{**_tool(tool), "strict": is_strict(tool, strict)} for tool in body.tools or ()]
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": SERVED_AS[tier],
        "temperature": sampling.temperature,
        "text": {
            "format": form or {"type": "text"},
            "verbosity": None if text is None else text.verbosity,
        },
        "tool_choice": _given(choice) if isinstance(choice, NamedTool) else choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _given(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = value.model_dump(by_alias=True, exclude_none=True)
    return fields


def _tool(tool: Any) -> dict[str, Any]:
    return {"description": None, "parameters": None, **_given(tool)}
