"""What a fuzz of the frontends sends: right calls with something wrong in them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from jaxserve.server.http.anthropic.schema import MessagesRequest
from jaxserve.server.http.ollama.schema import OllamaChatRequest
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jaxserve.server.proto import batches_pb2, generation_pb2

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
OLLAMA = "/api/chat"

TEXTS = st.one_of(
    st.sampled_from(["\ud800", "a\udfff", "\udc80\ud800"]),
    st.sampled_from(
        [
            *("\x00", "\x1b[31m\r\n", "\U0010ffff"),
            *("\x7f\x9f", "\u2028", "e\u0301", "\u00e9", "\u202e\u05d0\u0661", "\ufeff", "\ufffe"),
            *("\U0001f468\u200d\U0001f469", "a\u0300" * 2000, "", " ", "../../etc/passwd", "%s{0}"),
            *(
                "None",
                "NaN",
                "-1",
                "1e400",
                "\u0661",
                "a" * 129,
                "a" * 70_000,
                '"',
                "\\",
                "\\ud800",
            ),
        ]
    ),
    st.text(st.characters(codec=None), max_size=20),
)
NUMBERS = st.sampled_from(
    [
        *(0, 1, -1, 2, 17, 127, 300, -(2**31), 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(10**400)),
        *(10**400, 0.0, -0.0, 1e-320, 1e308, -1e308, 0.1, 1.5, math.nan, math.inf, -math.inf),
        *(True, False),
    ]
)
DEPTHS = (1, 3, 40, 127, 129, 900, 60_000)
NESTED = st.sampled_from([f"NEST{depth}" for depth in DEPTHS])
VALUES = st.one_of(
    TEXTS,
    NUMBERS,
    NESTED,
    st.none(),
    st.lists(TEXTS | NUMBERS | st.none(), max_size=4),
    st.dictionaries(TEXTS, TEXTS | NUMBERS, max_size=3),
    st.sampled_from([[0] * 3000, [[]], [[0], []], ["a"] * 200, [{}] * 20, {"a": {"b": [{}]}}]),
).map(copy.deepcopy)  # they are changed, too

_MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": [1]}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]}
_GENERATION: Mapping[str, Any] = {
    "max_tokens": 2,
    "stop": ["zz"],
    "logit_bias": {"5": 1},
    "slo": {"ttft_ms": 1e6, "max_tbt_ms": 1e6},
    "metadata": {"a": "b"},
    "stop_token_ids": [3],
    "request_id": "fuzz",
    "temperature": 0.5,
    "seed": 1,
}
_BODIES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {**_GENERATION, "prompt": ["a", "b"], "logprobs": 1}),
    CHAT: (
        ChatRequest,
        {
            **_GENERATION,
            "messages": [_MESSAGE, {"role": "assistant", "tool_calls": [_CALL]}, _MESSAGE],
            "chat_template_kwargs": {},
        },
    ),
    MESSAGES: (
        MessagesRequest,
        {
            **{name: value for name, value in _GENERATION.items() if name != "stop"},
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, _USE]},
                {"role": "user", "content": [_RESULT]},
            ],
            "stop_sequences": ["zz"],
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    ),
    OLLAMA: (
        OllamaChatRequest,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "tool_name": "f", "content": "a"},
            ],
            "options": {"num_predict": 2, "stop": ["zz"], "num_ctx": 5, "top_k": 4},
            "stream": False,
            "keep_alive": "5m",
            "format": {"type": "object"},
            "think": True,
            "slo": {"ttft_ms": 1e6},
        },
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "a", "add_special_tokens": True}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5, 6]}),
}
_FORMS: Mapping[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": {"type": "object", "properties": {"a": {"enum": ["b", 1]}}},
    "guided_regex": "a+|b",
    "guided_choice": ["a"],
    "stream_options": {"include_usage": True},
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place within a value that something else may be put in: its container and its key."""
    found: list[tuple[Any, Any]] = []
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        found.append((value, key))
        if isinstance(each, dict | list):
            found += _places(each)
    return found


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A right body, but for one place or a few."""
    kind, right = _BODIES[path]
    body = json.loads(json.dumps(right))
    if draw(st.booleans()) and issubclass(kind, CompletionRequest | ChatRequest):
        name = draw(st.sampled_from(sorted(_FORMS)))
        body[name] = json.loads(json.dumps(_FORMS[name]))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        if draw(st.integers(0, 3)):
            container, key = draw(st.sampled_from(_places(body)))
            if isinstance(container, dict) and draw(st.integers(0, 4)) == 0:
                container[draw(TEXTS)] = draw(VALUES)
            elif isinstance(container[key], str) and draw(st.integers(0, 3)):
                container[key] = draw(TEXTS)
            else:
                container[key] = draw(VALUES)
        else:
            body[draw(st.sampled_from(sorted(kind.model_fields)))] = draw(VALUES)
    return body


@st.composite
def raw_bodies(draw: st.DrawFn, path: str) -> bytes:
    """Its JSON, with bytes that are no Unicode where it has such text, and now and then broken."""
    body = draw(bodies(path))
    if draw(st.integers(0, 3)):
        raw = json.dumps(body).encode()
    else:
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    for depth in DEPTHS:
        raw = raw.replace(b'"NEST%d"' % depth, b"[" * depth + b"]" * depth)
    return draw(broken(raw)) if draw(st.integers(0, 9)) == 0 else raw


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """Something cut out, put in or twice there."""
    start = draw(st.integers(0, len(raw)))
    end = draw(st.integers(start, min(len(raw), start + 20)))
    put = draw(
        st.binary(max_size=8) | st.sampled_from([b"\xed\xa0\x80", b"\xc0\xaf", b"\x00", b""])
    )
    return raw[:start] + put * draw(st.integers(0, 2)) + raw[end:]


@st.composite
def batch_files(draw: st.DrawFn) -> bytes:
    """Lines of which most are nearly right."""
    lines = []
    for number in range(draw(st.integers(0, 4))):
        line: dict[str, Any] = {
            "custom_id": str(number),
            "method": "POST",
            "url": COMPLETIONS,
            "body": draw(bodies(COMPLETIONS)),
        }
        if draw(st.booleans()):
            line[draw(st.sampled_from(sorted(line)))] = draw(VALUES)
        raw = json.dumps(line).encode()
        lines.append(draw(broken(raw)) if draw(st.integers(0, 9)) == 0 else raw)
    return b"\n".join(lines)


# gRPC.


def _filled(message: Any, draw: st.DrawFn, depth: int = 0) -> None:
    """Some of its fields get values that their types can have."""
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(0, 2)):
            continue
        name, entry = field.name, field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            getattr(message, name)[draw(_value(entry.fields_by_name["key"]))] = draw(
                _value(entry.fields_by_name["value"])
            )
        elif entry is not None:
            value = getattr(message, name)
            target = value.add() if field.is_repeated else value
            target.SetInParent()
            if depth < 4:
                _filled(target, draw, depth + 1)
        elif field.is_repeated:
            getattr(message, name).extend(draw(st.lists(_value(field), max_size=4)))
        else:
            setattr(message, name, draw(_value(field)))


def _value(field: Any) -> st.SearchStrategy[Any]:
    if field.type == field.TYPE_STRING:
        return TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.type == field.TYPE_DOUBLE:
        return NUMBERS.filter(lambda n: isinstance(n, float) or abs(n) < 2**65).map(float)
    bits = 63 if field.type in (field.TYPE_INT64, field.TYPE_UINT64) else 31
    numbers = [0, 1, -1, 2, 100, 2**bits - 1, -(2**bits)]
    if field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
        numbers = [n for n in numbers if n >= 0]
    return st.sampled_from(numbers)


_MESSAGES: Mapping[str, Callable[[], Any]] = {
    "Generation/Generate": generation_pb2.GenerateRequest,
    "Generation/GetServerInfo": generation_pb2.GetServerInfoRequest,
    "Batches/SubmitBatch": batches_pb2.SubmitBatchRequest,
    "Batches/GetBatch": batches_pb2.GetBatchRequest,
    "Batches/CancelBatch": batches_pb2.CancelBatchRequest,
    "Generation/Embed": generation_pb2.EmbedRequest,
    "Generation/Score": generation_pb2.ScoreRequest,
    "Batches/DeleteBatch": batches_pb2.DeleteBatchRequest,
}
METHODS = sorted(_MESSAGES)


@st.composite
def messages(draw: st.DrawFn, method: str) -> bytes:
    """A message of that method, with hostile values, and now and then broken."""
    message = _MESSAGES[method]()
    _filled(message, draw)
    if method == "Batches/GetBatch":
        message.follow = False  # it waits for ever for a batch that nobody commits
    if method == "Generation/Generate" and draw(st.booleans()):
        message.text = "a"
        message.sampling.max_tokens = 2
    if method == "Generation/Embed" and draw(st.booleans()):
        del message.inputs[:]
        message.inputs.add(text="a")
    if method == "Generation/Score" and draw(st.booleans()):
        message.ClearField("queries")
        message.queries.append("a")
    raw: bytes = message.SerializeToString()
    return draw(broken(raw)) if draw(st.integers(0, 4)) == 0 else raw
