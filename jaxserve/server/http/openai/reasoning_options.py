"""How much a model thinks in a chat, and the request fields that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.text.thinking import ThoughtCount, ThoughtSpan
from jaxserve.sched.request import InvalidRequest, Thinking
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, TokenizeRequest
from jaxserve.server.http.openai.tool_options import ToolUse
from jaxserve.server.reasoning.registry import Calls
from jaxserve.server.requests.templates.chat_template import ChatTemplate

_FIELD = "thinking_token_budget"


def template_kwargs(
    template: ChatTemplate, body: ChatRequest | TokenizeRequest
) -> Mapping[str, Any]:
    """Further variables for the template. Those in `chat_template_kwargs` take precedence."""
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    return {**template.effort_kwargs(effort), **(body.chat_template_kwargs or {})}


@dataclass(frozen=True)
class ThoughtUse:
    """The thought with which a chat's answer may begin.

    Attributes:
        thinking: the engine's form of it.
        span: where it is, to count its tokens.
    """

    thinking: Thinking
    span: ThoughtSpan

    def count(self) -> ThoughtCount:
        """Counts the thought's tokens in a continuation."""
        return ThoughtCount(self.span)

    def sampling(self, *, held: bool) -> dict[str, Any]:
        """The SamplingParams fields that the thought needs. held: whether there is a grammar for
        the text after the thought."""
        limited = self.thinking.budget is not None
        return {"thinking": self.thinking} if held or limited else {}


def thought_use(
    context: RouteContext, body: ChatRequest, use: ToolUse | None, prompt: str
) -> ThoughtUse | None:
    """The thought of the answer; None if it has none.

    Args:
        context: what the routes need.
        body: the call's body.
        use: the tools that may be called; None for none.
        prompt: the prompt's text, as the template has rendered it.

    Raises:
        InvalidRequest: If the budget is out of range, or the model has no thoughts that it could
            limit.
    """
    form, budget = context.template.reasoning_format, thinking_budget(context.template, body)
    if form is None:
        if body.thinking_token_budget is not None:
            problem = "the model's chat template has no sign that it thinks"
            raise InvalidRequest(_FIELD, f"{problem}; see server.reasoning_format")
        return None
    calls = Calls.NONE if use is None else Calls.ONLY if use.forced else Calls.SOME
    span = form.span(prompt, calls)
    if span is None:
        return None
    thinking = span.thinking(context.engine.encode, budget)
    return ThoughtUse(thinking, ThoughtSpan(thinking, context.engine.token_bytes))


def thinking_budget(template: ChatTemplate, body: ChatRequest) -> int | None:
    """The most tokens that may be thought; None for any number. It is 0 if the model should not
    think but its prompt cannot say so. Raises InvalidRequest."""
    budget = body.thinking_token_budget
    if budget is None:
        silent = body.reasoning_effort == "none" and not template.effort_kwargs("none")
        return 0 if silent else None
    if budget < -1:
        raise InvalidRequest(_FIELD, f"must be at least 0, or -1 for no limit; got {budget}")
    return None if budget == -1 else budget
