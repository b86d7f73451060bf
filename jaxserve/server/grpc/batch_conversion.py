"""Between the messages of jaxserve.v1.Batches and the journal's own types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.batches.batch_lines import Completion, Line, Result
from jaxserve.server.batches.batch_operations import Progress
from jaxserve.server.batches.records import BatchState, Outcome
from jaxserve.server.grpc import message_conversion
from jaxserve.server.proto import batches_pb2 as pb

STATES = {state: pb.BatchState.Value(f"BATCH_STATE_{state.name}") for state in BatchState}
MAX_ID = 128
_SAME = ("batch_id", "model", "num_lines", "done", "failed")


Call = pb.SubmitBatchRequest | pb.GetBatchRequest | pb.CancelBatchRequest | pb.DeleteBatchRequest


def check_call(message: Call) -> None:
    """Raises InvalidRequest for what protobuf itself lets through: unknown fields, an overlong
    batch_id, a first_line below 0."""
    shell = type(message)()
    shell.CopyFrom(message)
    if isinstance(shell, pb.SubmitBatchRequest):
        del shell.lines[:]  # each line is checked by itself
    message_conversion.check_unknown_fields("request", shell)
    message_conversion.check_length("batch_id", message.batch_id, MAX_ID)
    if isinstance(message, pb.SubmitBatchRequest | pb.GetBatchRequest) and message.first_line < 0:
        raise InvalidRequest("first_line", f"must be at least 0, got {message.first_line}")


def line_from_message(message: pb.BatchLine) -> tuple[Line, InvalidRequest | None]:
    """A line, and the error in its message, if any. An overlong id is cut off, since the result
    contains it, too."""
    prompt: str | tuple[int, ...] = ""
    sampling: dict[str, Any] = {}
    problem = None
    try:
        message_conversion.check_unknown_fields("line", message)
        message_conversion.check_length("id", message.id, MAX_ID)
        message_conversion.cache_key_of(message)
        sampling = message_conversion.sampling_from_message(message.sampling)
        found = message_conversion.prompt_from_message(message)
        prompt = found if isinstance(found, str) else tuple(found)
    except InvalidRequest as error:
        problem = error
    name = message.id[:MAX_ID]
    return Line(prompt, sampling, name, message.cache_salt), problem


def status_message(progress: Progress) -> pb.BatchStatus:
    """The message for a batch's status."""
    status, state = progress.status, STATES[progress.status.state]
    same = {name: getattr(status, name) for name in _SAME}
    return pb.BatchStatus(state=state, waiting=progress.waiting, running=progress.running, **same)


def result_message(outcome: Outcome) -> pb.BatchResult:
    """The message for a line's result."""
    result = Result.from_json(outcome.result)
    return pb.BatchResult(
        line=outcome.line,
        id=result.name,
        completions=map(_completion, result.completions),
        error=None if result.error is None else pb.BatchError(**asdict(result.error)),
    )


def _completion(completion: Completion) -> pb.Completion:
    return pb.Completion(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=map(message_conversion.logprobs_message, completion.logprobs),
        prompt_logprobs=map(message_conversion.logprobs_message, completion.prompt_logprobs),
        finish=message_conversion.finish_message(
            completion.finish_reason, completion.usage, completion.timings
        ),
    )
