"""Asks a server about many prompts concurrently, and waits as long as it needs for each."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from jaxserve.client.answers import Answers
from jaxserve.client.batch_run import PATIENCE_S
from jaxserve.client.client import Client
from jaxserve.client.errors import ServerError
from jaxserve.client.records import error_record

Ask = Callable[[str, float | None], dict[str, Any]]
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0


class ServerAway(ServerError):
    """The server has been unreachable for too long."""


class ManyPrompts:
    """Asks about prompts concurrently, and writes an answer or an error for each.

    Args:
        client: the connection to the server.
        ask: makes the call for a prompt, with this timeout, and returns the answer's record.
        timeout: seconds for each prompt, retries included; None is unlimited, except that a server
            may be away for PATIENCE_S.
        concurrency: prompts at once.
    """

    def __init__(self, client: Client, ask: Ask, timeout: float | None, concurrency: int) -> None:
        self._client, self._ask, self._timeout = client, ask, timeout
        self._concurrency = concurrency
        self._stopping = threading.Event()
        self._bar: Any = None

    def run(self, prompts: Mapping[int, str], answers: Answers) -> int:
        """Returns how many prompts failed. Raises ServerAway, and OSError if answers cannot be
        written. The answers up to then are written."""
        left = [line for line in prompts if line not in answers.done]
        with (
            tqdm(
                total=len(prompts), initial=len(answers.done), unit="prompt", file=sys.stderr
            ) as self._bar,
            ThreadPoolExecutor(max_workers=self._concurrency) as pool,
            # Ctrl-C only interrupts the main thread, so no answer is half-written, lost, or written
            # twice.
            ThreadPoolExecutor(max_workers=1) as writer,
        ):
            futures = {line: pool.submit(self._answer, prompts[line]) for line in left}
            try:
                return writer.submit(self._write, futures, answers).result()
            except BaseException:
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                self._client.close()  # ends running calls
                raise

    def _write(self, futures: dict[int, Future[dict[str, Any]]], answers: Answers) -> int:
        failed = 0
        try:
            for line, future in futures.items():
                record = future.result()
                failed += "error" in record
                answers.write(line, record)
        except (ServerError, CancelledError):
            for line, future in futures.items():
                there = future.done() and not future.cancelled() and future.exception() is None
                if there and line not in answers.done:
                    answers.write(line, future.result())
            raise
        return failed

    def _answer(self, prompt: str) -> dict[str, Any]:
        """The record to write for a prompt. Raises ServerError if the server is away or the run was
        stopped."""
        try:
            record = self._answered(prompt)
        except ServerAway:
            raise
        except ServerError as error:
            if self._stopping.is_set():
                raise
            record = error_record(error.code, str(error))
        self._bar.set_postfix_str("", refresh=False)
        self._bar.update()
        return {"prompt": prompt, **record}

    def _answered(self, prompt: str) -> dict[str, Any]:
        """The answer to a prompt, with retries while the server is busy or away and there is
        time."""
        began, wait_s = time.monotonic(), _FIRST_WAIT_S
        away_since: float | None = None
        end = math.inf if self._timeout is None else began + self._timeout
        while True:
            left = end - time.monotonic()
            try:
                return self._ask(prompt, None if math.isinf(left) else left)
            except ServerError as error:
                if not error.passing or self._stopping.is_set():
                    raise
                now, busy = time.monotonic(), error.code == "RESOURCE_EXHAUSTED"
                away_since = None if busy else now if away_since is None else away_since
                until = end if away_since is None else min(end, away_since + PATIENCE_S)
                pause_s = error.retry_s or random.uniform(wait_s / 2, wait_s)  # spread out
                if now + pause_s >= until:
                    raise error if busy else ServerAway(error.code, str(error)) from None
                self._bar.set_postfix_str(f"waiting: {error}")
                self._stopping.wait(pause_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
