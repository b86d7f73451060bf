"""Between the messages of jaxserve.v1.Batches and the journal's own types."""

from __future__ import annotations

from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.batches.batch_lines import Completion, Line, Result
from jaxserve.server.batches.batch_operations import Progress
from jaxserve.server.batches.records import BatchState, Outcome
from jaxserve.server.grpc import message_conversion
from jaxserve.server.proto import batches_pb2 as pb

STATES = {
    BatchState.OPEN: pb.BATCH_STATE_OPEN,
    BatchState.COMMITTED: pb.BATCH_STATE_COMMITTED,
    BatchState.ENDED: pb.BATCH_STATE_ENDED,
    BatchState.CANCELLED: pb.BATCH_STATE_CANCELLED,
}
MAX_ID = 128


Call = pb.SubmitBatchRequest | pb.GetBatchRequest | pb.CancelBatchRequest | pb.DeleteBatchRequest


def check_call(message: Call) -> None:
    """Raises InvalidRequest for what protobuf itself lets through: unknown fields, an overlong
    batch_id, a first_line below 0."""
    shell = type(message)()
    shell.CopyFrom(message)
    if isinstance(shell, pb.SubmitBatchRequest):
        del shell.lines[:]  # each is looked at by itself
    message_conversion.check_unknown_fields("request", shell)
    message_conversion.check_length("batch_id", message.batch_id, MAX_ID)
    counts = isinstance(message, pb.SubmitBatchRequest | pb.GetBatchRequest)
    if counts and message.first_line < 0:
        raise InvalidRequest("first_line", f"must be at least 0, got {message.first_line}")


def line_from_message(message: pb.BatchLine) -> tuple[Line, InvalidRequest | None]:
    """A line, and what is wrong with it that its message shows. Of an overlong id, which its result
    would have too, the beginning."""
    prompt: str | tuple[int, ...] = ""
    sampling: dict[str, Any] = {}
    problem = None
    try:
        message_conversion.check_unknown_fields("line", message)
        message_conversion.check_length("id", message.id, MAX_ID)
        sampling = message_conversion.sampling_from_message(message.sampling)
        found = message_conversion.prompt_from_message(message)
        prompt = found if isinstance(found, str) else tuple(found)
    except InvalidRequest as error:
        problem = error
    name = message.id[:MAX_ID]
    return Line(prompt, sampling, name), problem


def status_message(progress: Progress) -> pb.BatchStatus:
    """Where a batch is."""
    told = progress.status
    return pb.BatchStatus(
        batch_id=told.batch_id,
        model=told.model,
        state=STATES[told.state],
        num_lines=told.num_lines,
        waiting=progress.waiting,
        running=progress.running,
        done=told.done,
        failed=told.failed,
    )


def result_message(outcome: Outcome) -> pb.BatchResult:
    """What became of a line."""
    found = Result.from_json(outcome.result)
    message = pb.BatchResult(
        line=outcome.line,
        id=found.name,
        completions=[_completion(each) for each in found.completions],
    )
    if found.error is not None:
        message.error.code, message.error.message = found.error.code, found.error.message
    return message


def _completion(found: Completion) -> pb.Completion:
    return pb.Completion(
        index=found.index,
        text=found.text,
        token_ids=found.token_ids,
        logprobs=[message_conversion.logprobs_message(entry) for entry in found.logprobs],
        prompt_logprobs=[
            message_conversion.logprobs_message(entry) for entry in found.prompt_logprobs
        ],
        finish=message_conversion.finish_message(found.finish_reason, found.usage, found.timings),
    )
