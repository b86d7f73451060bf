"""The kinds of calls of `bench soak` that are batches."""

from __future__ import annotations

import json
import time
import uuid

from jaxserve.client import ServerError
from jaxserve.client.messages import make_line
from jaxserve_lab.bench.stress.http_calls import COMPLETIONS, form
from jaxserve_lab.bench.stress.soak_caller import Caller, whole_http
from jaxserve_lab.bench.stress.soak_frontends import completion

_POLL_S = 0.1


def grpc_batch(caller: Caller) -> None:
    """Sends a batch over gRPC, follows it to its end, and deletes it."""
    client, name = caller.grpc.client, uuid.uuid4().hex
    count = caller.rng.randint(1, 6)
    lines = [
        make_line(asked.prompt, max_tokens=asked.max_tokens, **asked.sampling)
        for asked in (caller.asked(longest=24) for _ in range(count))
    ]
    began = time.monotonic()
    try:
        client.submit_batch(name, lines)
        caller.ledger.note("batches", "SubmitBatch", "ok")
        got = sum(len(page.results) for page in client.get_batch(name))
        caller.ledger.waited("a batch", time.monotonic() - began)
        caller.ledger.note("batches", "GetBatch", "ok")
        if got != count:
            caller.ledger.problem(f"batches: {got} results of {count} lines")
        client.delete_batch(name)
        caller.ledger.note("batches", "DeleteBatch", "ok")
    except ServerError as error:
        caller.ledger.problem(f"batches: a call ended with {error.code}")


def http_batch(caller: Caller) -> None:
    """The same over HTTP."""
    lines = []
    for number in range(caller.rng.randint(1, 6)):
        body = completion(caller.asked(longest=24))
        for absent in ("slo", "slo_class", "tier"):
            body.pop(absent, None)
        line = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
        lines.append(json.dumps(line))
    upload, kind = form("\n".join(lines))
    file = whole_http(caller, "batches", "/v1/files", upload, headers=kind)["id"]
    asks = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = whole_http(caller, "batches", "/v1/batches", asks)
    began, count = time.monotonic(), len(lines)
    while batch["status"] == "in_progress":
        time.sleep(_POLL_S)
        batch = whole_http(caller, "batches", f"/v1/batches/{batch['id']}")
    caller.ledger.waited("a batch", time.monotonic() - began)
    if batch["request_counts"] != {"total": count, "completed": count, "failed": 0}:
        caller.ledger.problem(f"batches: {batch['request_counts']} of {count} lines")
    for path in (f"/v1/files/{file}", f"/v1/batches/{batch['id']}"):
        whole_http(caller, "batches", path, method="DELETE")
