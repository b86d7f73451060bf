"""Floods of one API key, and how long another key waits meanwhile."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve_lab.bench.stress.attacks import MIB, Tried
from jaxserve_lab.bench.stress.http_calls import CHAT, COMPLETIONS, call, form
from jaxserve_lab.bench.stress.server_process import Victim
from jaxserve_lab.bench.stress.tenants import CROWD, QUIET

AT_MOST = 3.0  # times the other key's wait when idle
IDLE = 9  # the other key's calls before the flood
FLOOD_S = 15.0  # after which no more calls are made
MARK = "<pad>"
"""A special token of the model in the box. `wide_model` makes it swallow the blanks before it, as
`<mask>` does in some vocabularies, so that no text is too long by its bytes."""
_PATIENCE_S = 120.0
_STORY = "grandmother remembered everything everywhere "

Body = Mapping[str, Any] | bytes


@dataclass(frozen=True)
class Asked:
    """A call.

    Attributes:
        path: The URL's path.
        body: Bytes, or an object that is sent as JSON.
        headers: Headers of a body that is not JSON.
    """

    path: str
    body: Body
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Flood:
    """The calls of CROWD, and those of QUIET meanwhile.

    Attributes:
        calls: Makes the calls of CROWD, one after the other; some first make other calls.
        at_once: Number of simultaneous calls.
        quiet: Makes the calls of QUIET.
        ends: Statuses with which the calls of CROWD may end.
        steps: Steps of the engine for which QUIET may wait.
    """

    calls: Callable[[Victim], Iterable[Asked]]
    at_once: int
    quiet: Callable[[], Asked]
    ends: frozenset[int] = frozenset((400,))
    steps: int = 1

    def __call__(self, server: Victim) -> Tried:
        """Makes the calls of both, and compares."""
        tried, lock, over = Tried(), threading.Lock(), time.monotonic() + FLOOD_S
        idle = statistics.median(_waited(server, self.quiet(), tried) for _ in range(IDLE))
        wanted = list(self.calls(server))
        written = {id(asked): asked for asked in wanted}
        written = {key: _written(asked) for key, asked in written.items()}
        calls = iter([written[id(asked)] for asked in wanted])
        begun = _steps(server)

        def crowd() -> None:
            while True:
                with lock:
                    asked = next(calls, None) if time.monotonic() < over else None
                if asked is None:
                    return
                began, status = time.monotonic(), _status(server, CROWD, asked)
                with lock:
                    tried.codes[f"{CROWD} {status}"] += 1
                    if status is None or status >= 400:
                        tried.longest_s = max(tried.longest_s, time.monotonic() - began)
                    tried.expect(status in self.ends, f"a call of {CROWD} ended with {status}")

        threads = [threading.Thread(target=crowd) for _ in range(self.at_once)]
        for thread in threads:
            thread.start()
        waits: list[float] = []
        while not waits or any(thread.is_alive() for thread in threads):
            waits.append(_waited(server, self.quiet(), tried))
        for thread in threads:
            thread.join()
        ended = _steps(server)
        step = (ended[0] - begun[0]) / max(ended[1] - begun[1], 1.0)
        tried.idle_s, tried.beside_s = idle, statistics.median(waits)
        tried.worst_s = max(waits)
        most = max(AT_MOST * idle, idle + self.steps * step)
        beside = f"{QUIET} waited for {1000 * tried.beside_s:.0f} ms in the median"
        alone = f"{1000 * idle:.0f} ms alone; {1000 * most:.0f} ms are allowed"
        tried.expect(tried.beside_s <= most, f"{beside}, and {alone}")
        tried.problems = list(dict.fromkeys(tried.problems))
        return tried


def _written(asked: Asked) -> Asked:
    """A call whose JSON is encoded beforehand."""
    if isinstance(asked.body, bytes):
        return asked
    return dataclasses.replace(asked, body=json.dumps(asked.body).encode())


def _waited(server: Victim, asked: Asked, tried: Tried) -> float:
    began = time.monotonic()
    status = _status(server, QUIET, asked)
    tried.expect(status == 200, f"a call of {QUIET} ended with {status}")
    return time.monotonic() - began


def _status(server: Victim, key: str, asked: Asked) -> int | None:
    """A call's status; None without an answer."""
    try:
        arguments = (server.http_address, asked.path, asked.body, asked.headers)
        return call(*arguments, key=key, patience_s=_PATIENCE_S)[0]
    except (OSError, http.client.HTTPException):
        return None


def _steps(server: Victim) -> tuple[float, float]:
    """Seconds of the steps so far, and their number."""
    page = call(server.http_address, "/metrics", key=QUIET)[1].decode()
    samples = [
        re.search(rf"^jaxserve:step_time_seconds_{name}\{{.*\}} (\S+)$", page, re.MULTILINE)
        for name in ("sum", "count")
    ]
    total, count = (0.0 if each is None else float(each[1]) for each in samples)
    return total, count


def _completion(prompt: str, **fields: Any) -> Asked:
    return Asked(COMPLETIONS, {"prompt": prompt, "max_tokens": 4, **fields})


def _chat(**fields: Any) -> Asked:
    body = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4, **fields}
    return Asked(CHAT, body)


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _tool(schema: Mapping[str, Any], name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


# Grammars that never finish compiling: remainders, and automata that multiply.
_REMAINDER = 9_999_991
_PATTERNS = [{"pattern": f"a.{{{count}}}b"} for count in range(1, 27)]


def _endless(number: int) -> dict[str, Any]:
    """A grammar unlike all others."""
    if number % 2:
        return {"type": "integer", "multipleOf": _REMAINDER - number}
    return {"type": "string", "allOf": [*_PATTERNS, {"maxLength": 1000 + number}]}


def _endless_texts(_: Victim) -> Iterator[Asked]:
    for number in range(16):
        yield _chat(response_format=_schema(_endless(number)))


def _endless_tools(_: Victim) -> Iterator[Asked]:
    for number in range(16):
        parameters = {"type": "object", "properties": {"a": _endless(number)}, "required": ["a"]}
        tool = _tool({**parameters, "additionalProperties": False}, strict=True)
        yield _chat(tools=[tool], tool_choice="required")


def _endless_lines(server: Victim) -> Iterator[Asked]:
    """Calls that each create a batch."""
    for number in range(8):
        body = {"prompt": "a", "max_tokens": 4, "response_format": _schema(_endless(number))}
        line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body}
        yield _batch(server, CROWD, line)


def _batch(server: Victim, key: str, line: Mapping[str, Any]) -> Asked:
    """Uploads a file of one line, and makes a batch of it."""
    body, headers = form(json.dumps(line))
    answer = call(server.http_address, "/v1/files", body, headers, key=key)[1]
    asked = {"input_file_id": json.loads(answer)["id"], "completion_window": "24h"}
    return Asked("/v1/batches", {**asked, "endpoint": COMPLETIONS})


def _large_grammars(_: Victim) -> Iterator[Asked]:
    """Calls whose grammars take tens of MiB each, if they are kept."""
    for number in range(24):
        schema = {"type": "integer", "multipleOf": 60_001 + 2 * number}
        yield _chat(response_format=_schema(schema))


def _costly_masks(_: Victim) -> Iterator[Asked]:
    for number in range(8):
        text = "a" * (65_000 - number)
        yield _completion("Once", guided_regex=f"a{{1,{65_500 - number}}}", max_tokens=64)
        yield _completion("Once", guided_json={"const": text}, max_tokens=64)


def _long_prompts(_: Victim) -> Iterator[Asked]:
    """Texts, half of them far too long, and half only blanks, which the mark swallows."""
    words = "x y " * (3 * MIB // 8) + MARK
    blanks = " " * (3 * MIB // 2) + MARK
    asked = _completion(words), _completion(blanks)
    yield from itertools.islice(itertools.cycle(asked), 48)


def _longest_prompts(_: Victim) -> Iterator[Asked]:
    text = "x y " * (3 * MIB) + MARK
    asked = _completion(text), Asked("/tokenize", {"prompt": text})
    yield from itertools.islice(itertools.cycle(asked), 48)


def _predictions(_: Victim) -> Iterator[Asked]:
    likely = {"type": "content", "content": "x y " * (2 * MIB) + MARK}
    yield from itertools.repeat(_chat(prediction=likely), 48)


def _many_tools(_: Victim) -> Iterator[Asked]:
    """Chats with tools of 280 KB, more than allowed."""
    properties = {f"p{number}": {"type": "string", "description": "d" * 10} for number in range(45)}
    tools = [
        _tool({"type": "object", "properties": properties}, f"f{number}") for number in range(128)
    ]
    body = _chat(tools=tools)
    yield from itertools.repeat(body, 256)


def _unlike(_: Victim) -> Iterator[Asked]:
    """Prompts as long as allowed, no two of which begin alike."""
    for number in range(400):
        ids = [3 + (number * 7 + place * (number + 1)) % 1500 for place in range(480)]
        yield Asked(COMPLETIONS, {"prompt": ids, "max_tokens": 1})


def flood_of_caches(server: Victim) -> Tried:
    """CROWD sends prompts that all differ, and QUIET repeats its own prompt, which must be found in
    the prefix cache as before."""
    ids = [3 + place * 11 % 1500 for place in range(400)]
    again = Asked(COMPLETIONS, {"prompt": ids, "max_tokens": 1})
    alone = _found(server, again, again)
    # All of CROWD's work is done: a step runs, the next one is planned, then comes QUIET's.
    tried = Flood(_unlike, 8, lambda: again, frozenset((200,)), steps=4)(server)
    share = _found(server, again)
    tried.codes[f"{QUIET} finds {share:.0%}"] += 1
    tried.expect(share >= alone / 2, f"{QUIET} found {share:.0%} after it, and {alone:.0%} before")
    return tried


def _found(server: Victim, *asked: Asked) -> float:
    """The share of the prompt that the last of these calls found in the cache."""
    for each in asked:
        answer = call(server.http_address, each.path, each.body, key=QUIET)[1]
    usage = json.loads(answer)["usage"]
    cached: int = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return cached / usage["prompt_tokens"]


def _small() -> Asked:
    return _completion("Once upon a time")


def _held() -> Asked:
    """A call with a grammar."""
    return _chat(response_format=_schema({"type": "object", "properties": {"a": {"const": 1}}}))


def _paragraphs() -> Asked:
    """A call so long that it is encoded on a separate thread."""
    return _completion(_STORY * 48)


_REFUSED_OR_SERVED = frozenset((200, 400))
FLOODS: Mapping[str, Callable[[Victim], Tried]] = {
    "texts whose grammar never compiles": Flood(_endless_texts, 4, _held),
    "tools whose grammar never compiles": Flood(_endless_tools, 4, _held),
    "lines whose grammar never compiles": Flood(
        _endless_lines, 8, _held, frozenset((200, 400, 429))
    ),
    "grammars of 50 MiB": Flood(_large_grammars, 4, _held, _REFUSED_OR_SERVED),
    "grammars with costly masks": Flood(_costly_masks, 8, _small, frozenset((200, 400, 500))),
    "48 prompts of 1.5 MB": Flood(_long_prompts, 48, _paragraphs, _REFUSED_OR_SERVED),
    "texts of 12 MB": Flood(_longest_prompts, 4, _paragraphs),
    "predictions of 8 MB": Flood(_predictions, 4, _paragraphs),
    "32 chats with 128 tools": Flood(_many_tools, 32, _small),
    "prompts that nobody asks for again": flood_of_caches,
}
"""Floods by their names in the table."""
