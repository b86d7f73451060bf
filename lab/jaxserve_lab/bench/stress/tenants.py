"""Attacks of one API key on another, over HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from jaxserve.server.access.key_file import ApiKey, digest_of
from jaxserve_lab.bench.stress.attacks import MIB, Tried
from jaxserve_lab.bench.stress.http_calls import COMPLETIONS, call, form

LOUD, CROWD, QUIET = "loud", "crowd", "quiet"  # names of the keys, and the keys
CONCURRENCY = 2
FILES, FILE_MIB = 30, 60
CALLS, PROMPTS, N = 16, 128, 2
ROUNDS, TOKENS = 100, 384
DIFFER = 4.0  # deviations of a rank sum: one case in 16,000 without a difference
_PATIENCE_S = 60.0


def key_lines() -> str:
    """The keys as in JAXSERVE_API_KEYS. LOUD may have CONCURRENCY requests, the others any
    number."""
    limits = {LOUD: CONCURRENCY, CROWD: 0, QUIET: 0}
    keys = (ApiKey(name, digest_of(name.encode()), concurrency=n) for name, n in limits.items())
    return ";".join(key.line() for key in keys)


async def too_much_at_once(address: str) -> Tried:
    """LOUD makes calls of 256 requests each, and as many of its limit, while QUIET asks for a few
    tokens."""
    tried = Tried()
    many = {"prompt": ["Once upon a time"] * PROMPTS, "n": N, "max_tokens": 64}
    few = {"prompt": "Once upon a time", "n": CONCURRENCY, "max_tokens": 64}

    async def one(key: str, body: Mapping[str, Any]) -> int:
        began = time.monotonic()
        status = await asyncio.to_thread(_posted, address, key, body)
        tried.codes[f"{key} {status}"] += 1
        if status != HTTPStatus.OK:
            tried.longest_s = max(tried.longest_s, time.monotonic() - began)
        return status

    loud = [one(LOUD, body) for body in (many, few) * CALLS]
    quiet = one(QUIET, {**few, "n": 1, "max_tokens": 8})
    *statuses, served = await asyncio.gather(*loud, quiet)
    tried.expect(served == HTTPStatus.OK, "another key was not served")
    full, never = HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_REQUEST
    tried.expect(set(statuses[::2]) <= {full, never}, "more was served than the key may have")
    tried.expect(set(statuses[1::2]) <= {full, HTTPStatus.OK}, "a refusal was not typed")
    return tried


async def many_prompts(address: str) -> Tried:
    """CROWD makes a call of 128 requests, while QUIET makes calls of one request."""
    tried, waits = Tried(), [0.0]
    many = {"prompt": ["Once upon a time"] * PROMPTS, "max_tokens": 128, "ignore_eos": True}
    few = {"prompt": "Once upon a time", "max_tokens": 8}
    began = time.monotonic()
    crowd = asyncio.create_task(asyncio.to_thread(_posted, address, CROWD, many))
    while not crowd.done():
        asked = time.monotonic()
        status = await asyncio.to_thread(_posted, address, QUIET, few)
        tried.codes[f"{QUIET} {status}"] += 1
        waits.append(time.monotonic() - asked)
    tried.codes[f"{CROWD} {await crowd}"] += 1
    took = time.monotonic() - began
    starved = f"another key waited for {max(waits):.1f} s of the {took:.1f} s that it took"
    tried.expect(max(waits) < took / 2, starved)
    tried.expect(set(tried.codes) == {f"{CROWD} 200", f"{QUIET} 200"}, "a call was refused")
    return tried


async def unread_files(address: str) -> Tried:
    """Repeatedly asks for a large file of QUIET, which has no limit, without reading it."""
    tried, content = Tried(), "x" * (FILE_MIB * MIB)
    upload = functools.partial(call, address, "/v1/files", *form(content), key=QUIET)
    del content
    name = json.loads((await asyncio.to_thread(upload))[1])["id"]
    del upload
    host, port = address.rsplit(":", 1)
    readers = []
    for _ in range(FILES):
        reader = socket.create_connection((host, int(port)), _PATIENCE_S)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = f"GET /v1/files/{name}/content HTTP/1.1\r\nHost: localhost\r\n"
        reader.sendall(f"{head}Authorization: Bearer {QUIET}\r\n\r\n".encode())
        readers.append(reader)
    for reader in readers:
        status = (await asyncio.to_thread(reader.recv, 12)).decode().rpartition(" ")[2]
        tried.codes[status] += 1
    await asyncio.sleep(1.0)  # otherwise files would be loaded into memory
    for reader in readers:
        reader.close()
    tried.expect(tried.codes == {"200": FILES}, "a file was refused")
    return tried


async def timed_prompts(address: str) -> Tried:
    """QUIET repeats CROWD's prompts and sends new ones; their times must not differ. Those of
    CROWD's own repeated prompts must."""
    tried, drawn = Tried(), random.Random(0)
    again, anothers, new = (list[float]() for _ in range(3))
    for _ in range(ROUNDS):
        asked, other = ([drawn.randrange(100, 1000) for _ in range(TOKENS)] for _ in range(2))
        await asyncio.to_thread(_seconds, address, CROWD, asked, tried)
        turns = [(asked, anothers), (other, new)]
        drawn.shuffle(turns)
        for prompt, took in turns:
            took.append(await asyncio.to_thread(_seconds, address, QUIET, prompt, tried))
        again.append(await asyncio.to_thread(_seconds, address, CROWD, asked, tried))
    for name, took in (("its own", again), ("another's", anothers), ("new", new)):
        tried.codes[f"{name} in {1000 * statistics.median(took):.1f} ms"] = len(took)
    tried.expect(rank_sum(again, new) < -DIFFER, "what a key has asked for itself was not found")
    apart = rank_sum(anothers, new)
    tried.expect(abs(apart) < DIFFER, f"another's prompts show by {apart:.1f} deviations")
    return tried


def rank_sum(some: Sequence[float], others: Sequence[float]) -> float:
    """By how many standard deviations the rank sum of `some` exceeds that of equal distributions
    (Mann and Whitney's U, in its normal approximation)."""
    n, m = len(some), len(others)
    ranks = np.argsort(np.argsort([*some, *others], kind="stable"))
    above = float(ranks[:n].sum()) - n * (n - 1) / 2  # pairs in which the value of `some` is larger
    return (above - n * m / 2) / float(np.sqrt(n * m * (n + m + 1) / 12))


def _seconds(address: str, key: str, prompt: list[int], tried: Tried) -> float:
    """Seconds until the first token."""
    began = time.perf_counter()
    status = _posted(address, key, {"prompt": prompt, "max_tokens": 1})
    tried.expect(status == HTTPStatus.OK, f"a call ended with {status}")
    return time.perf_counter() - began


def _posted(address: str, key: str, body: Mapping[str, Any]) -> int:
    return call(address, COMPLETIONS, body, key=key, patience_s=_PATIENCE_S)[0]
