"""What one key of a server does to another: over HTTP, to a server that has both."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from jaxserve.bench.stress.attacks import MIB, Tried
from jaxserve.bench.stress.http_calls import COMPLETIONS, call, form
from jaxserve.server.access.key_file import ApiKey, digest_of

LOUD, CROWD, QUIET = "loud", "crowd", "quiet"  # names of the keys, and the keys
CONCURRENCY = 2
FILES, FILE_MIB = 30, 60
CALLS, PROMPTS, N = 16, 128, 2
_PATIENCE_S = 60.0


def key_lines() -> str:
    """As the environment's JAXSERVE_API_KEYS has them. LOUD may have CONCURRENCY requests, the
    others any number."""
    limits = {LOUD: CONCURRENCY, CROWD: 0, QUIET: 0}
    keys = (ApiKey(name, digest_of(name.encode()), concurrency=n) for name, n in limits.items())
    return ";".join(key.line() for key in keys)


async def too_much_at_once(address: str) -> Tried:
    """LOUD's calls of 256 requests each, and as many of what it may have at once, while QUIET asks
    for a few tokens."""
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
    """CROWD's call of 128 requests, and QUIET's of one, again and again while that runs."""
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
    """A large file of QUIET's, which has no limit, is asked for again and again, and not read."""
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
    await asyncio.sleep(1.0)  # what else would come into memory
    for reader in readers:
        reader.close()
    tried.expect(tried.codes == {"200": FILES}, "a file was refused")
    return tried


def _posted(address: str, key: str, body: Mapping[str, Any]) -> int:
    return call(address, COMPLETIONS, body, key=key, patience_s=_PATIENCE_S)[0]
