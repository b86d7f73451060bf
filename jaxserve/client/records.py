"""Completions as JSON, for files of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.client.client import Completion
from jaxserve.client.verdicts import verdict_record
from jaxserve.server.proto import generation_pb2 as pb


def completion_records(completions: Sequence[Completion]) -> dict[str, Any]:
    """`{"completions": [...]}`, one entry each."""
    return {"completions": [_record(completion) for completion in completions]}


def error_record(code: str, message: str) -> dict[str, Any]:
    """What stands there instead of completions."""
    return {"error": {"code": code, "message": message}}


def _record(completion: Completion) -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(completion.prompt_logprobs),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "preemptions": usage.preemptions,
        },
        "timings": {
            "queue_ms": timings.queue_ms,
            "ttft_ms": timings.ttft_ms,
            "tbt_ms": timings.tbt_ms if timings.HasField("tbt_ms") else None,
            "total_ms": timings.total_ms,
        },
        "slo": None if completion.slo is None else verdict_record(completion.slo),
    }


def _logprobs(entries: Sequence[pb.TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "top": [[top.token_id, top.logprob] for top in entry.top],
        }
        for entry in entries
    ]
