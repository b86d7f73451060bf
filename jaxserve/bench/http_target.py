"""Any server with OpenAI's completions over HTTP as a target of measurements."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from jaxserve.bench.load_target import BenchError, Job, Record, ThreadedTarget, book_times, clock

KEY = "OPENAI_API_KEY"
"""The environment variable with the key that goes along, as for OpenAI's clients."""
MOST = 1 << 20  # bytes of a line, or of an answer that is no stream
MOST_TOKENS = 1 << 20
"""Most tokens of a prompt or of an answer that a server's own count is believed to have."""
_PATIENCE_S = 600.0
_EXTRAS: dict[str, Any] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
"""What OpenAI's API does not have, but vLLM, SGLang, llama.cpp and jaxserve."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        base: The URL's parts; its path comes before every path.
    """

    base: SplitResult

    @classmethod
    def parse(cls, url: str) -> Address:
        """From a URL as clients have it, with /v1 or without. BenchError if it is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no port
            known = False
        if not known or parts.query or parts.fragment or " " in parts.netloc:
            raise BenchError(f"must be a URL such as http://localhost:8000, got {url!r:.80}")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts._replace(path=path))

    def connect(self, patience_s: float = _PATIENCE_S) -> http.client.HTTPConnection:
        """A connection of its own. patience_s: seconds without a byte that end it."""
        host, port = self.base.hostname or "", self.base.port
        if self.base.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=patience_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=patience_s)

    def get(self, path: str) -> bytes | None:
        """The answer's body, at most MOST bytes; None if there is nothing at that path. BenchError
        if nobody answers."""
        connection = self.connect(30.0)
        try:
            connection.request("GET", self.base.path + path, headers=headers())
            answer = connection.getresponse()
            body = answer.read(MOST)
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"no answer from {self.base.geturl()}: {error}") from error
        finally:
            connection.close()
        return body if answer.status == http.HTTPStatus.OK else None


def headers() -> dict[str, str]:
    """Those of every call: the key, if the environment has one."""
    key = os.environ.get(KEY, "")
    return {"Authorization": f"Bearer {key}"} if key else {}


class HttpTarget(ThreadedTarget):
    """A running server; a `Target` of jobs without SLO targets.

    Args:
        address: Where it is.
        served: The fields of EngineInfo, as far as they are known: HTTP does not have them.
        model: The model's name; "" to leave it out.
        say: Makes a prompt of a job's token ids: the ids, or a text.
    """

    def __init__(
        self,
        address: Address,
        served: Mapping[str, Any],
        *,
        model: str = "",
        say: Callable[[tuple[int, ...]], Any] = list,
    ) -> None:
        self._address, self._served, self._say = address, dict(served), say
        self._common: dict[str, Any] = {"stream": True, **({"model": model} if model else {})}
        self._extras = dict(_EXTRAS)

    def info(self) -> dict[str, Any]:
        """See `Target`."""
        return self._served

    def probe(self) -> None:
        """Sends a short request, and leaves out from then on what the server does not take.
        BenchError if it does not serve that either."""
        job = Job((1, 1, 1, 1), 2, 2)
        for _ in range(len(_EXTRAS) + 1):
            record = Record(sent=clock())
            self._call(job, record, _Nobody())
            refused = [name for name in self._extras if name in record.error]
            if record.outcome == "finished" or not refused:
                break
            del self._extras[refused[0]]
        if record.outcome != "finished":
            raise BenchError(f"a short completion was {record.outcome}: {record.error:.300}")

    def serve(self, job: Job, record: Record) -> None:
        """See `ThreadedTarget`; each has its own connection."""
        body = {
            "prompt": self._say(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            **self._common,
            **self._extras,
        }
        connection = self._address.connect()
        try:
            path = self._address.base.path + "/v1/completions"
            sent = {"Content-Type": "application/json", **headers()}
            connection.request("POST", path, json.dumps(body), sent)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                full = answer.status == http.HTTPStatus.TOO_MANY_REQUESTS
                record.outcome = "rejected" if full else "failed"
                record.error = answer.read(MOST).decode(errors="replace")
                return
            self._read(answer, job, record)
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse, job: Job, record: Record) -> None:
        tokens = StreamedTokens()
        while line := answer.readline(MOST):
            now = clock()
            book_times(record, job, [now] * tokens.take(line))
            if tokens.error:
                record.outcome, record.error = "failed", tokens.error
                return
            if tokens.ended:
                record.outcome = "finished"
                break
        record.prompt_tokens, record.cached_tokens = tokens.prompt, tokens.cached


class StreamedTokens:
    """Counts the tokens of a streamed completion or chat: by its own usage where each event has
    one, else one for each event with text.

    Attributes:
        prompt, cached: Tokens of the prompt, and those of them that were in a cache; 0 until known.
        ended: Whether its last line came.
        only_usage: Whether the last line has usage and nothing else.
        error: What it ended with, if that is an error.
    """

    def __init__(self) -> None:
        self._said, self._events = 0, 0
        self.prompt = self.cached = 0
        self.ended = self.only_usage = False
        self.error = ""

    def take(self, line: bytes) -> int:
        """How many tokens the line adds."""
        data, self.only_usage = line.strip(), False
        if not data.startswith(b"data:"):
            return 0
        data = data.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self.ended = True
            return 0
        try:
            return self._event(json.loads(data))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self.error = f"an event is not like OpenAI's: {data[:80]!r}"
            return 0

    def _event(self, event: Any) -> int:
        if "error" in event:
            self.error = str(event["error"])[:300]
            return 0
        self._events += any(map(_has_text, event.get("choices") or ()))
        usage = event.get("usage") or {}
        self.only_usage = bool(usage) and not event.get("choices")
        self.prompt = _believed(usage.get("prompt_tokens") or self.prompt)
        details = usage.get("prompt_tokens_details") or {}
        self.cached = _believed(details.get("cached_tokens") or self.cached)
        said = usage.get("completion_tokens")
        now = self._events if said is None else _believed(said)
        before, self._said = self._said, max(self._said, now)
        return self._said - before


def _believed(count: Any) -> int:
    """A count of tokens; ValueError for one that cannot be."""
    if not (type(count) is int and 0 <= count <= MOST_TOKENS):
        raise ValueError("no count of tokens")
    return count


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether it brings a token: of a completion or of a chat, of an answer or of a thought."""
    delta = choice.get("delta") or choice
    named = ("text", "content", "reasoning", "reasoning_content", "tool_calls")
    return any(delta.get(name) for name in named)


class _Nobody:
    def release(self) -> None:
        """See `Done`."""
