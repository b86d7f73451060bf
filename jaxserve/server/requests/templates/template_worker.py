"""The process that renders a checkpoint's chat template, which is untrusted code.

Jinja's sandbox protects Python's internals, but does not stop endless loops or large allocations,
so the process has limits. It imports little but Jinja, and starts in some 60 ms.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.limited.limits import (
    MAX_ANSWER,
    frame,
    limit_memory,
    limit_time,
    memory_pages,
    read_question,
)
from jaxserve.server.requests.templates import template_limits as limits
from jaxserve.server.tools.arguments import as_object

_TOO_MUCH = f"needs more than {limits.MEMORY >> 20} MiB of memory"


class GenerationBlock(Extension):
    """`{% generation %}`, by which templates mark the model's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's content, as if the tags were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers, for which templates are written. Constants are not folded:
    folding could cost time and memory even in a branch that is never taken."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, GenerationBlock],
        optimized=False,
        finalize=_at_run_time,
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


@pass_context
def _at_run_time(context: Context, value: Any) -> Any:
    """Returns the value. Jinja computes nothing at compile time that needs a context."""
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """A `tojson` that, unlike Jinja's own, does not escape <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class Worker:
    """Compiles the template of the first question, and renders it for the later ones."""

    def __init__(self) -> None:
        self._render: Callable[[Mapping[str, Any]], str] | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer: `reads`, the variables that the template looks up; `text` of a chat; `texts`
        of several chats, null for those that it rejects; or an error as `problem`."""
        try:
            if "several" in question:
                return {
                    "texts": [
                        self.answer(variables).get("text") for variables in question["several"]
                    ]
                }
            if self._render is not None:
                _read_arguments(question["messages"])
                text = self._render(question)
                text.encode()  # raises for half a surrogate pair
                return {"text": text}
            made, source = template_environment(), question["source"]
            reader = meta.TrackingCodeGenerator(made)
            reader.optimizer = None
            reader.visit(made.parse(source))
            self._render = made.from_string(source).render
            return {"reads": sorted(reader.undeclared_identifiers - made.globals.keys())}
        except MemoryError:
            return {"problem": _TOO_MUCH}
        except Exception as error:  # a template may raise anything
            said = (str(error) or type(error).__name__)[: limits.MAX_PROBLEM]
            return {"problem": said.encode("utf-8", "replace").decode()}


def _read_arguments(messages: list[dict[str, Any]]) -> None:
    """Turns the arguments of calls into objects, as templates want them."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = as_object(function["arguments"])


def serve_renders(connection: socket.socket) -> None:
    """Answers until the other side closes the connection, or until so much memory was used that a
    new process should go on; `last` says so."""
    worker, last = Worker(), False
    while not last:
        limit_time(limits.CPU_S)
        try:
            question = read_question(connection)
            if question is None:
                return
            answer = worker.answer(question)
            last = memory_pages()[1] > limits.KEPT
            reply = frame({**answer, "last": last})
        except MemoryError:
            last, reply = True, frame({"problem": _TOO_MUCH, "last": True})
        if len(reply) > MAX_ANSWER:
            problem = f"writes more than {MAX_ANSWER >> 20} MiB"
            last, reply = True, frame({"problem": problem, "last": True})
        limit_time(0)
        connection.sendall(reply)


if __name__ == "__main__":
    limit_memory(limits.MEMORY)
    serve_renders(socket.socket(fileno=0))
