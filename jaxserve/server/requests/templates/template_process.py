"""The other end of `template_worker.py`: starts the worker, asks it, and starts another when it has
died."""

from __future__ import annotations

import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.limited.process import LimitedProcess, ProcessEnded
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.templates.template_limits import CPU_S, WALL_S

_MODULE = "jaxserve.server.requests.templates.template_worker"
_STOPPING = "the server is stopping"


class TemplateFailed(Exception):
    """The template could not be compiled or rendered; the message says why in one line."""


class _Asked(NamedTuple):
    """A chat to render. latest: latest start, by time.monotonic()."""

    variables: Mapping[str, Any]
    latest: float
    text: Future[str]


class TemplateProcess:
    """A process for one template, and the thread that asks it one question after the other. Tenants
    take turns, so that a tenant with many long chats does not hold up the others."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._thread: threading.Thread | None = None
        self._process: LimitedProcess | None = None
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Asked]] = OrderedDict()  # the next tenant first
        self._closed = False

    def compile(self) -> frozenset[str]:
        """Compiles the template and returns the variables that it looks up. Call it before
        rendering. Raises TemplateFailed."""
        return self._start()

    def rendered(self, several: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """The texts of chats, given as variables; None for chats that the template rejects, or if
        they take too long. Call it after `compile`."""
        try:
            texts: list[str | None] = self._ask({"several": several})["texts"]
        except TemplateFailed:
            texts = [None] * len(several)
        if self._process is None:
            self._start()
        return texts

    def render(self, variables: Mapping[str, Any], tenant: str = "") -> Future[str]:
        """A future of the text. Cancelling it before its turn costs no time. It raises
        InvalidRequest if the template fails, QueueFull if its turn has not come in WALL_S seconds
        or no process can be started, and EngineStopped once closed."""
        asked = _Asked(variables, time.monotonic() + WALL_S, Future())
        with self._changed:
            if self._closed:
                raise EngineStopped(_STOPPING)
            self._waiting.setdefault(tenant, deque()).append(asked)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jaxserve-template")
                self._thread.daemon = True
                self._thread.start()
        return asked.text

    def close(self) -> None:
        """Ends the process at once. Idempotent."""
        with self._changed:
            self._closed = True
            if self._process is not None:
                self._process.kill()
            for waiting in self._waiting.values():
                for asked in waiting:
                    asked.text.cancel()
            self._waiting.clear()
            self._changed.notify()

    # Runs on the thread.

    def _serve(self) -> None:
        while (asked := self._next()) is not None:
            if asked.text.set_running_or_notify_cancel():
                try:
                    asked.text.set_result(self._render(asked))
                except BaseException as error:
                    asked.text.set_exception(error)
            del asked  # a chat may take megabytes

    def _next(self) -> _Asked | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            tenant, waiting = self._waiting.popitem(last=False)
            asked = waiting.popleft()
            if waiting:  # to the end of the round
                self._waiting[tenant] = waiting
            return asked

    def _render(self, asked: _Asked) -> str:
        if time.monotonic() > asked.latest:
            raise QueueFull(f"other chats took the chat template more than {WALL_S:g} s")
        try:
            if self._process is not None and self._process.ended:
                self._process.end()  # it has died between two questions
                self._process = None
            if self._process is None:
                self._start()
            text: str = self._ask(asked.variables)["text"]
        except TemplateFailed as error:
            if self._closed:
                raise EngineStopped(_STOPPING) from None
            raise InvalidRequest("messages", f"the model's chat template: {error}") from None
        except OSError as error:  # out of files, memory or processes
            problem = f"there is no process for the chat template ({error.strerror})"
            raise QueueFull(f"{problem}; try again later") from None
        return text

    def _start(self) -> frozenset[str]:
        with self._changed:
            if self._closed:
                raise TemplateFailed(_STOPPING)
            self._process = LimitedProcess(_MODULE)
        return frozenset(self._ask({"source": self._source})["reads"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises TemplateFailed, and ends the process if it has not answered."""
        process = self._process
        assert process is not None
        try:
            answer = process.ask(question, WALL_S)
        except TimeoutError:
            self._process = None
            raise TemplateFailed(f"has not ended after {WALL_S:g} s") from None
        except ProcessEnded as ended:
            self._process = None
            if ended.code == -signal.SIGPROF:
                raise TemplateFailed(f"takes more than {CPU_S:g} s of a processor") from None
            raise TemplateFailed(str(ended)) from None
        if answer["last"]:
            self._process = None
            process.end()
        if "problem" in answer:
            raise TemplateFailed(answer["problem"])
        return answer
