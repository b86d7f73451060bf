"""Thousands of calls at once, from several processes, since a single one would send them more
slowly than the server refuses them.

    python -m jaxserve_lab.bench.stress.crowd ADDRESS CALLS

prints a line once it is connected, makes the calls when it reads a line, and prints a JSON object
of how they ended; it cancels accepted calls when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

import grpc

from jaxserve.client.connection import NO_PROXY
from jaxserve.client.messages import make_request

GENERATE = "/jaxserve.v1.Generation/Generate"
RETRY_KEY = "grpc-retry-pushback-ms"
_PATIENCE_S = 240.0  # the last accepted call waits long


async def crowd(address: str, processes: int, calls: int) -> tuple[Counter[str], int, float]:
    """How that many calls of each process ended; how many of them had a retry hint; the seconds of
    the slowest refusal. Accepted calls continue until all have ended."""
    command = (sys.executable, "-m", "jaxserve_lab.bench.stress.crowd", address, str(calls))
    pipe = asyncio.subprocess.PIPE
    running = [
        await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        for _ in range(processes)
    ]

    async def line(process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        return await process.stdout.readline()

    def write(text: bytes) -> None:
        for process in running:
            assert process.stdin is not None
            process.stdin.write(text)

    try:
        await asyncio.gather(*map(line, running))
        write(b"go\n")
        results = [json.loads(each) for each in await asyncio.gather(*map(line, running))]
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(process.wait() for process in running))
    codes: Counter[str] = Counter()
    for each in results:
        codes.update(each["codes"])
    return codes, sum(each["hints"] for each in results), max(each["longest_s"] for each in results)


async def one_process(address: str, calls: int) -> None:
    """Runs the command."""
    raw = make_request("Once upon a time", max_tokens=400, ignore_eos=True).SerializeToString()
    codes: Counter[str] = Counter()
    hints, longest, served = 0, 0.0, []
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address, options=(NO_PROXY,)) as channel:
        await channel.channel_ready()

        async def one() -> None:
            nonlocal hints, longest
            began = time.monotonic()
            call: Any = channel.unary_stream(GENERATE)(raw, timeout=_PATIENCE_S)
            try:
                await call.read()  # the first message of an accepted call
                codes["served"] += 1
                served.append(call)
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1
                hints += RETRY_KEY in dict(error.trailing_metadata() or ())
                longest = max(longest, time.monotonic() - began)

        print(flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        await asyncio.gather(*(one() for _ in range(calls)))
        print(json.dumps({"codes": codes, "hints": hints, "longest_s": longest}), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        for call in served:
            call.cancel()


if __name__ == "__main__":
    asyncio.run(one_process(sys.argv[1], int(sys.argv[2])))
