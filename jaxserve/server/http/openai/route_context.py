"""What every route needs: the engine, its model's name, and requests built from bodies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jaxserve.engine.adapters import UnknownAdapter
from jaxserve.sched.request import Request
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.schema import Generation, Targeted, predicted_text
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.engine_requests import EngineRequests, RequestFields
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, Scoring
from jaxserve.server.requests.slo_classes import check_deadline
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.tools.calls import special_tokens

Continues = tuple[tuple[str, str], ...]


class RouteContext:
    """What every route needs.

    Args:
        engine: the engine.
        requests: the way to the engine, shared with other frontends.
        template: makes prompts of chats.
        lora_root: folder that adapters may be loaded from; "" loads none.
        scoring: how pairs of texts are scored by default.

    Attributes:
        engine, requests, template, lora_root, scoring: as given.
        model: name of the model that is served.
        sampling_defaults: as in `EngineInfo`.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: EngineRequests,
        template: ChatTemplate,
        lora_root: str = "",
        scoring: Scoring = NO_TOKENS,
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.template = template
        self.model, self.lora_root = requests.info().model, lora_root
        self.sampling_defaults = requests.info().sampling_defaults
        self.scoring = scoring

    def adapter_of(self, model: str | None, caller: Caller) -> str:
        """The adapter with this name; "" for the base model, also if no model is named. Raises
        ApiError if the caller has no such model."""
        try:
            return self.requests.adapter_named(model or "", caller)
        except UnknownAdapter:
            problem = f"there is no model {model!r:.80} here; this server has {self.model!r}"
            raise ApiError(404, problem, param="model", code="model_not_found") from None

    @functools.cached_property
    def special_markers(self) -> dict[str, int]:
        """Ids of the markers around tool calls and thoughts that are special tokens of the model.
        By default, such tokens have no text."""
        thinks = self.template.reasoning_format
        markers = (*self.template.tool_format.markers, *(() if thinks is None else thinks.markers))
        return special_tokens(markers, self.engine.encode, self.engine.decode)

    async def make_requests(
        self,
        body: Targeted,
        prompts: Sequence[str | Sequence[int]],
        sampling: Mapping[str, Any],
        caller: Caller,
        continues: Continues = (),
    ) -> list[Request]:
        """Builds and checks one request per prompt.

        Args:
            body: the call's body.
            prompts: the prompts, each text or token ids.
            sampling: `SamplingParams` fields by name, for all of them.
            caller: the client.
            continues: what they continue, as `Request.continues`, beside the body's cache key.

        Raises:
            InvalidRequest: If a request cannot be served.
            EngineStopped: If new requests are refused.
            ApiError: If the body names another model.
        """
        shared = self.shared_fields(body, sampling, caller, continues)
        naming: AbstractContextManager[None] = nullcontext()
        if isinstance(body, Generation):
            naming = request_options.naming_grammar_fields(body)
        with naming:
            return await self.requests.make_requests(shared, prompts)

    def shared_fields(
        self,
        body: Targeted,
        sampling: Mapping[str, Any],
        caller: Caller,
        continues: Continues = (),
    ) -> RequestFields:
        """The fields that all prompts of a call share.

        Args:
            body, sampling, caller, continues: as for `make_requests`.

        Raises:
            Exception: Likewise.
        """
        adapter = self.adapter_of(body.model, caller)
        self.requests.check_open()
        program = request_options.requested_program(body)
        check_deadline(program, caller, request_options.PROGRAM_FIELDS[1])
        slo, slo_class = request_options.requested_targets(body)
        tier = request_options.requested_tier(body)
        if body.prompt_cache_key:
            continues = (*continues, ("key", body.prompt_cache_key))
        return RequestFields(
            prompt="",
            sampling=sampling,
            request_id=body.request_id or "",
            slo=slo,
            tier=tier,
            slo_class=slo_class,
            serve_late=bool(body.serve_late),
            cache_salt=body.cache_salt or "",
            caller=caller,
            prediction=predicted_text(body),
            model=adapter,
            program=program,
            continues=continues,
        )
