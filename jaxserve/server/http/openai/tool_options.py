"""Which tools a chat may call, and the request fields that follow from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.sched.request import Grammar, InvalidRequest
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, ChosenTool, TokenizeRequest
from jaxserve.server.tools.call_grammar import call_grammar
from jaxserve.server.tools.calls import Tool, objects_only
from jaxserve.server.tools.parser import CallParser
from jaxserve.server.tools.registry import ToolFormat
from jaxserve.server.tools.rules import held_schema, unenforced

_SEARCH_S = 2.0


@dataclass(frozen=True)
class ToolUse:
    """The tools that a chat may call.

    Attributes:
        tools: those that may be called.
        places: index of each tool in the body's `tools`.
        forced: whether the answer consists of calls only.
        parallel: whether it may have several calls.
        otherwise: grammar of an answer without calls, if it is allowed; None for any text.
    """

    tools: tuple[Tool, ...]
    places: tuple[int, ...]
    forced: bool
    parallel: bool
    otherwise: Grammar | None = None

    @property
    def held(self) -> bool:
        """Whether the text is held to a grammar."""
        free = self.otherwise is None and not any(tool.strict for tool in self.tools)
        return self.forced or not free

    @property
    def unenforced(self) -> list[str]:
        """Places in the body of the schemas' keywords that forced calls are not held to."""
        return [
            f"tools.{self.places[place]}.function.parameters.{where}"
            for place, where in unenforced(self.tools, forced=self.forced)
        ]

    def note(self) -> dict[str, Any]:
        """The note for `call_parser`, as JSON."""
        return {
            "tools": {tool.name: tool.parameters for tool in self.tools},
            "most": None if self.parallel else 1,
            "alone": self.otherwise is not None,
            "forced": self.forced,
        }


def call_parser(form: ToolFormat, note: Mapping[str, Any]) -> CallParser:
    """The parser that finds the calls in an answer. note: of the chat's `ToolUse`."""
    tools = [Tool(name, parameters=schema) for name, schema in note["tools"].items()]
    forced = note.get("forced", False)  # notes of older batches lack it
    return form.parser(tools, note["most"], alone=note["alone"], forced=forced)


def shown_tools(body: ChatRequest | TokenizeRequest) -> list[Tool] | None:
    """The tools that the chat template gets; None for a chat without tools."""
    if not body.tools:
        return None
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        return []
    return [tool.plain() for tool in body.tools]


def tool_use(body: ChatRequest) -> ToolUse | None:
    """The tools that may be called; None for none. Raises InvalidRequest for an impossible
    `tool_choice`."""
    choice, shown = body.tool_choice, shown_tools(body)
    if shown is None:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "needs tools")
        return None
    if choice == "none":
        return None
    parallel = body.parallel_tool_calls is not False
    places: Sequence[int] = range(len(shown))
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        places = [place for place in places if shown[place].name == name]
        if not places:
            problem = f"there is no tool {name!r:.80} among the tools"
            raise InvalidRequest("tool_choice.function.name", problem)
        parallel = False
    forced = choice == "required" or isinstance(choice, ChosenTool)
    chosen = tuple(shown[place] for place in places)
    otherwise = request_options.requested_grammar(body)
    return ToolUse(chosen, tuple(places), forced, parallel, otherwise)


def tool_sampling(context: RouteContext, use: ToolUse) -> dict[str, Any]:
    """The SamplingParams fields that hold the text to calls. Raises InvalidRequest, which names the
    tool whose schema a grammar cannot hold."""
    if not use.held:
        return {}
    grammar = _grammar(context.template.tool_format, use, context.special_markers)
    # A stop string in an argument would cut a call that has to be whole.
    unstopped = {"stop": (), "stop_token_ids": ()} if use.forced else {}
    return {"grammar": grammar, **unstopped}


async def check_calls(context: RouteContext, use: ToolUse, grammar: Grammar, tenant: str) -> None:
    """Prepares the grammar of a text with calls.

    Args:
        context: what the routes need.
        use: the tools.
        grammar: as in `tool_sampling`.
        tenant: the chat's tenant.

    Raises:
        InvalidRequest: If the grammar cannot be made; names the tool that is at fault.
    """
    try:
        await context.requests.check_grammar(grammar, tenant=tenant)
    except InvalidRequest as error:
        await _blame(context, use, tenant)
        raise InvalidRequest("tools", f"as a grammar: {error.problem}") from None


def _grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Grammar:
    try:
        return call_grammar(
            form,
            use.tools,
            forced=use.forced,
            parallel=use.parallel,
            special=special,
            otherwise=use.otherwise,
        )
    except InvalidRequest as error:
        if use.otherwise is not None and error.field_name == use.otherwise.field_name:
            raise
        if error.field_name.startswith("grammar."):
            problem = f"as a grammar it {error.problem}"
            raise InvalidRequest("tools", problem) from None
        name, _, rest = error.field_name.removeprefix("tools.").partition(".")
        where = f"tools.{use.places[int(name)]}.{rest}"
        raise error.renamed(where) from None


async def _blame(context: RouteContext, use: ToolUse, tenant: str) -> None:
    """Raises InvalidRequest for the first tool whose schema alone cannot become a grammar."""
    until = time.monotonic() + _SEARCH_S
    for place, tool in zip(use.places, use.tools, strict=True):
        if time.monotonic() > until:
            return
        if not (use.forced or tool.strict):
            continue
        try:
            held = held_schema(tool, use.tools, forced=use.forced)
            grammar = Grammar.json_schema(objects_only(held))
            await context.requests.check_grammar(grammar, tenant=tenant)
        except InvalidRequest as error:
            where = f"tools.{place}.function.parameters"
            raise error.renamed(where) from None
