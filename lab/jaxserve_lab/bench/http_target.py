"""A server's HTTP frontend as a target of measurements."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.bench.load_target import Job, Record, ThreadedTarget, book_times, clock

_PATIENCE_S = 600.0


class HttpTarget(ThreadedTarget):
    """A running server; a `Target` of jobs without SLO targets. served: the fields of EngineInfo,
    which HTTP does not have."""

    def __init__(self, address: str, served: Mapping[str, Any]) -> None:
        self._address, self._served = address, dict(served)

    def info(self) -> dict[str, Any]:
        """See `Target`."""
        return self._served

    def serve(self, job: Job, record: Record) -> None:
        """See `ThreadedTarget`; each has its own connection."""
        body = {
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},  # counts the tokens of a chunk
        }
        connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer, reported = connection.getresponse(), 0
        if answer.status != http.HTTPStatus.OK:
            full = answer.status == http.HTTPStatus.TOO_MANY_REQUESTS
            record.outcome = "rejected" if full else "failed"
            record.error = answer.read().decode()
            return
        while line := answer.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                record.outcome = "finished"
                break
            if data:
                now, event = clock(), json.loads(data)
                tokens = event["usage"]["completion_tokens"]
                book_times(record, job, [now] * (tokens - reported))
                reported = tokens
        connection.close()
