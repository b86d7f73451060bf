from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_REALTIME: _ClassVar[Tier]
    TIER_BEST_EFFORT: _ClassVar[Tier]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class SloProblemKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLO_PROBLEM_KIND_UNSPECIFIED: _ClassVar[SloProblemKind]
    SLO_PROBLEM_KIND_TTFT_UNREACHABLE: _ClassVar[SloProblemKind]
    SLO_PROBLEM_KIND_TBT_UNREACHABLE: _ClassVar[SloProblemKind]
    SLO_PROBLEM_KIND_JCT_UNREACHABLE: _ClassVar[SloProblemKind]
    SLO_PROBLEM_KIND_JCT_BEFORE_TTFT: _ClassVar[SloProblemKind]
    SLO_PROBLEM_KIND_MAX_TBT_UNREACHABLE: _ClassVar[SloProblemKind]

class PoolingType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TYPE_UNSPECIFIED: _ClassVar[PoolingType]
    POOLING_TYPE_LAST: _ClassVar[PoolingType]
    POOLING_TYPE_MEAN: _ClassVar[PoolingType]
    POOLING_TYPE_CLS: _ClassVar[PoolingType]
TIER_UNSPECIFIED: Tier
TIER_REALTIME: Tier
TIER_BEST_EFFORT: Tier
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
SLO_PROBLEM_KIND_UNSPECIFIED: SloProblemKind
SLO_PROBLEM_KIND_TTFT_UNREACHABLE: SloProblemKind
SLO_PROBLEM_KIND_TBT_UNREACHABLE: SloProblemKind
SLO_PROBLEM_KIND_JCT_UNREACHABLE: SloProblemKind
SLO_PROBLEM_KIND_JCT_BEFORE_TTFT: SloProblemKind
SLO_PROBLEM_KIND_MAX_TBT_UNREACHABLE: SloProblemKind
POOLING_TYPE_UNSPECIFIED: PoolingType
POOLING_TYPE_LAST: PoolingType
POOLING_TYPE_MEAN: PoolingType
POOLING_TYPE_CLS: PoolingType

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_ms", "tbt_ms", "jct_ms", "max_tbt_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    JCT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tbt_ms: float
    jct_ms: float
    max_tbt_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., jct_ms: _Optional[float] = ..., max_tbt_ms: _Optional[float] = ...) -> None: ...

class SloClass(_message.Message):
    __slots__ = ("name", "targets", "tier", "program_deadline_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    targets: Slo
    tier: Tier
    program_deadline_ms: float
    def __init__(self, name: _Optional[str] = ..., targets: _Optional[_Union[Slo, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., program_deadline_ms: _Optional[float] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("id", "deadline_ms", "expected_calls", "over")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CALLS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    id: str
    deadline_ms: float
    expected_calls: int
    over: bool
    def __init__(self, id: _Optional[str] = ..., deadline_ms: _Optional[float] = ..., expected_calls: _Optional[int] = ..., over: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "stop_token_ids", "stop", "ignore_eos", "n", "grammar", "prompt_logprobs", "deterministic")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    n: int
    grammar: Grammar
    prompt_logprobs: int
    deterministic: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ..., n: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., deterministic: bool = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "json_object")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: Choice
    json_object: JsonObject
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., json_object: _Optional[_Union[JsonObject, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling", "slo", "tier", "slo_class", "serve_late", "cache_salt", "prompt_cache_key", "prediction", "model", "program")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    SERVE_LATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling: SamplingParams
    slo: Slo
    tier: Tier
    slo_class: str
    serve_late: bool
    cache_salt: str
    prompt_cache_key: str
    prediction: str
    model: str
    program: Program
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., slo_class: _Optional[str] = ..., serve_late: bool = ..., cache_salt: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ..., prediction: _Optional[str] = ..., model: _Optional[str] = ..., program: _Optional[_Union[Program, _Mapping]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "preemptions", "cached_tokens", "accepted_draft_tokens", "rejected_draft_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    cached_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., rejected_draft_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "ttft_ms", "total_ms", "tbt_ms", "max_tbt_ms", "preprocess_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    ttft_ms: float
    total_ms: float
    tbt_ms: float
    max_tbt_ms: float
    preprocess_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., tbt_ms: _Optional[float] = ..., max_tbt_ms: _Optional[float] = ..., preprocess_ms: _Optional[float] = ...) -> None: ...

class SloProblem(_message.Message):
    __slots__ = ("kind", "target_ms", "limit_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    kind: SloProblemKind
    target_ms: float
    limit_ms: float
    def __init__(self, kind: _Optional[_Union[SloProblemKind, str]] = ..., target_ms: _Optional[float] = ..., limit_ms: _Optional[float] = ...) -> None: ...

class TargetsMet(_message.Message):
    __slots__ = ("ttft_ms", "tbt_ms", "jct_ms", "max_tbt_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_MS_FIELD_NUMBER: _ClassVar[int]
    JCT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: bool
    tbt_ms: bool
    jct_ms: bool
    max_tbt_ms: bool
    def __init__(self, ttft_ms: bool = ..., tbt_ms: bool = ..., jct_ms: bool = ..., max_tbt_ms: bool = ...) -> None: ...

class SloVerdict(_message.Message):
    __slots__ = ("slo_class", "tier", "targets", "ttft_met", "tbt_met", "jct_met", "met", "problems", "targets_met")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TBT_MET_FIELD_NUMBER: _ClassVar[int]
    JCT_MET_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_MET_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    tier: Tier
    targets: Slo
    ttft_met: bool
    tbt_met: bool
    jct_met: bool
    met: bool
    problems: _containers.RepeatedCompositeFieldContainer[SloProblem]
    targets_met: TargetsMet
    def __init__(self, slo_class: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., targets: _Optional[_Union[Slo, _Mapping]] = ..., ttft_met: bool = ..., tbt_met: bool = ..., jct_met: bool = ..., met: bool = ..., problems: _Optional[_Iterable[_Union[SloProblem, _Mapping]]] = ..., targets_met: _Optional[_Union[TargetsMet, _Mapping]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "usage", "timings", "slo")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    timings: Timings
    slo: SloVerdict
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., slo: _Optional[_Union[SloVerdict, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "text", "logprobs", "finish", "prompt_logprobs", "expected_missed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_MISSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: Finish
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    expected_missed: bool
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., expected_missed: bool = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "pooling", "normalize", "slo", "tier", "slo_class", "serve_late", "cache_salt", "prompt_cache_key", "dimensions", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    SERVE_LATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    pooling: PoolingType
    normalize: bool
    slo: Slo
    tier: Tier
    slo_class: str
    serve_late: bool
    cache_salt: str
    prompt_cache_key: str
    dimensions: int
    model: str
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., pooling: _Optional[_Union[PoolingType, str]] = ..., normalize: bool = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., slo_class: _Optional[str] = ..., serve_late: bool = ..., cache_salt: _Optional[str] = ..., prompt_cache_key: _Optional[str] = ..., dimensions: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "embeddings")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, request_id: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("index", "values", "usage", "timings", "slo")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    timings: Timings
    slo: SloVerdict
    def __init__(self, index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., slo: _Optional[_Union[SloVerdict, _Mapping]] = ...) -> None: ...

class ScoredToken(_message.Message):
    __slots__ = ("text", "id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    id: int
    def __init__(self, text: _Optional[str] = ..., id: _Optional[int] = ...) -> None: ...

class ScoredTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[ScoredToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[ScoredToken, _Mapping]]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "queries", "documents", "tokens", "slo", "tier", "slo_class", "serve_late", "cache_salt", "template", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    SERVE_LATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    queries: _containers.RepeatedScalarFieldContainer[str]
    documents: _containers.RepeatedScalarFieldContainer[str]
    tokens: ScoredTokens
    slo: Slo
    tier: Tier
    slo_class: str
    serve_late: bool
    cache_salt: str
    template: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., queries: _Optional[_Iterable[str]] = ..., documents: _Optional[_Iterable[str]] = ..., tokens: _Optional[_Union[ScoredTokens, _Mapping]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., slo_class: _Optional[str] = ..., serve_late: bool = ..., cache_salt: _Optional[str] = ..., template: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "scores", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("score", "slo")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    score: float
    slo: SloVerdict
    def __init__(self, score: _Optional[float] = ..., slo: _Optional[_Union[SloVerdict, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "model", "family", "num_params", "dtype", "vocab_size", "max_model_len", "policy", "num_blocks", "block_size", "pool_tokens", "pool_bytes", "device", "mesh_tensor", "attention_backend", "hidden_read", "rho", "num_layers", "cost_model", "slo_classes", "prefix_caching", "retention", "cache_dtype", "speculates", "d_model", "pooling", "normalize", "sampling_defaults", "causal", "system_fingerprint", "not_deterministic")
    class SamplingDefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MESH_TENSOR_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_READ_FIELD_NUMBER: _ClassVar[int]
    RHO_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COST_MODEL_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASSES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SPECULATES_FIELD_NUMBER: _ClassVar[int]
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NOT_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    family: str
    num_params: int
    dtype: str
    vocab_size: int
    max_model_len: int
    policy: str
    num_blocks: int
    block_size: int
    pool_tokens: int
    pool_bytes: int
    device: str
    mesh_tensor: int
    attention_backend: str
    hidden_read: str
    rho: float
    num_layers: int
    cost_model: str
    slo_classes: _containers.RepeatedCompositeFieldContainer[SloClass]
    prefix_caching: bool
    retention: str
    cache_dtype: str
    speculates: bool
    d_model: int
    pooling: PoolingType
    normalize: bool
    sampling_defaults: _containers.ScalarMap[str, float]
    causal: bool
    system_fingerprint: str
    not_deterministic: str
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., family: _Optional[str] = ..., num_params: _Optional[int] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., policy: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., device: _Optional[str] = ..., mesh_tensor: _Optional[int] = ..., attention_backend: _Optional[str] = ..., hidden_read: _Optional[str] = ..., rho: _Optional[float] = ..., num_layers: _Optional[int] = ..., cost_model: _Optional[str] = ..., slo_classes: _Optional[_Iterable[_Union[SloClass, _Mapping]]] = ..., prefix_caching: bool = ..., retention: _Optional[str] = ..., cache_dtype: _Optional[str] = ..., speculates: bool = ..., d_model: _Optional[int] = ..., pooling: _Optional[_Union[PoolingType, str]] = ..., normalize: bool = ..., sampling_defaults: _Optional[_Mapping[str, float]] = ..., causal: bool = ..., system_fingerprint: _Optional[str] = ..., not_deterministic: _Optional[str] = ...) -> None: ...
