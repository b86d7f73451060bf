from jaxserve.server.proto import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_STATE_UNSPECIFIED: _ClassVar[BatchState]
    BATCH_STATE_OPEN: _ClassVar[BatchState]
    BATCH_STATE_COMMITTED: _ClassVar[BatchState]
    BATCH_STATE_ENDED: _ClassVar[BatchState]
    BATCH_STATE_CANCELLED: _ClassVar[BatchState]
BATCH_STATE_UNSPECIFIED: BatchState
BATCH_STATE_OPEN: BatchState
BATCH_STATE_COMMITTED: BatchState
BATCH_STATE_ENDED: BatchState
BATCH_STATE_CANCELLED: BatchState

class BatchLine(_message.Message):
    __slots__ = ("id", "text", "token_ids", "sampling", "cache_salt", "prompt_cache_key")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    id: str
    text: str
    token_ids: _generation_pb2.TokenIds
    sampling: _generation_pb2.SamplingParams
    cache_salt: str
    prompt_cache_key: str
    def __init__(self, id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ...) -> None: ...

class SubmitBatchRequest(_message.Message):
    __slots__ = ("batch_id", "first_line", "lines", "commit")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    first_line: int
    lines: _containers.RepeatedCompositeFieldContainer[BatchLine]
    commit: bool
    def __init__(self, batch_id: _Optional[str] = ..., first_line: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[BatchLine, _Mapping]]] = ..., commit: bool = ...) -> None: ...

class SubmitBatchResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: BatchStatus
    def __init__(self, status: _Optional[_Union[BatchStatus, _Mapping]] = ...) -> None: ...

class BatchStatus(_message.Message):
    __slots__ = ("batch_id", "model", "state", "num_lines", "waiting", "running", "done", "failed")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    model: str
    state: BatchState
    num_lines: int
    waiting: int
    running: int
    done: int
    failed: int
    def __init__(self, batch_id: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[BatchState, str]] = ..., num_lines: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("batch_id", "first_line", "follow")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    first_line: int
    follow: bool
    def __init__(self, batch_id: _Optional[str] = ..., first_line: _Optional[int] = ..., follow: bool = ...) -> None: ...

class GetBatchResponse(_message.Message):
    __slots__ = ("status", "results")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    status: BatchStatus
    results: _containers.RepeatedCompositeFieldContainer[BatchResult]
    def __init__(self, status: _Optional[_Union[BatchStatus, _Mapping]] = ..., results: _Optional[_Iterable[_Union[BatchResult, _Mapping]]] = ...) -> None: ...

class BatchResult(_message.Message):
    __slots__ = ("line", "id", "completions", "error")
    LINE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    line: int
    id: str
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    error: BatchError
    def __init__(self, line: _Optional[int] = ..., id: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., error: _Optional[_Union[BatchError, _Mapping]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "finish", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    finish: _generation_pb2.Finish
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[_generation_pb2.Finish, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class BatchError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CancelBatchRequest(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    def __init__(self, batch_id: _Optional[str] = ...) -> None: ...

class CancelBatchResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: BatchStatus
    def __init__(self, status: _Optional[_Union[BatchStatus, _Mapping]] = ...) -> None: ...

class DeleteBatchRequest(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    def __init__(self, batch_id: _Optional[str] = ...) -> None: ...

class DeleteBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
