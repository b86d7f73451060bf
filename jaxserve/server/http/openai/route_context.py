"""What every route has: the engine, its model's name, and requests made of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.sched.request import Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.schema import Generation
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.engine_requests import MAX_REQUEST_ID, EngineRequests, RequestFields
from jaxserve.server.requests.templates.chat_template import ChatTemplate


class RouteContext:
    """engine: what serves. requests: the way to it, which other frontends use, too."""

    def __init__(
        self, engine: EngineClient, requests: EngineRequests, template: ChatTemplate
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.template = template
        self.model = requests.info().model

    def check_model(self, model: str | None) -> None:
        """Raises ApiError for a model that is not the one here."""
        if model not in (None, "", self.model):
            problem = f"there is no model {model!r:.80} here; this server has {self.model!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")

    async def make_requests(
        self,
        body: Generation,
        prompts: Sequence[str | Sequence[int]],
        sampling: Mapping[str, Any],
        caller: Caller,
    ) -> list[Request]:
        """One request a prompt, of that caller, each checked. Raises InvalidRequest, EngineStopped
        and ApiError."""
        self.check_model(body.model)
        self.requests.check_open()
        slo, slo_class = request_options.requested_targets(body)
        tier = request_options.requested_tier(body)
        name = body.request_id or ""
        wanted = []
        with request_options.naming_grammar_fields(body):
            for place, prompt in enumerate(prompts):
                await asyncio.sleep(0)  # others come in between: each may take milliseconds
                fields = RequestFields(
                    prompt,
                    sampling,
                    _numbered(name, place),
                    slo,
                    tier,
                    slo_class,
                    bool(body.serve_late),
                    caller,
                )
                wanted.append(await self.requests.make_request(fields))
        return wanted


def _numbered(name: str, place: int) -> str:
    """The first prompt has the call's own id."""
    if not name or not place:
        return name
    ending = f"-{place}"
    return name[: MAX_REQUEST_ID - len(ending)] + ending
