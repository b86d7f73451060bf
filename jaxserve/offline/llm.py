"""The engine without a server, in a few lines.

from jaxserve import LLM, SamplingParams

with LLM("path/to/checkpoint") as llm:
    for request in llm.generate(["Once upon a time"], SamplingParams(max_tokens=40)):
        print(request.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ml_collections import ConfigDict
from tqdm import tqdm

from jaxserve.config import Config
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import base, tiny_cpu
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.pool_view import PoolView, pool_view
from jaxserve.offline.outputs import CompletionOutput, EmbeddingOutput, Piece, RequestOutput
from jaxserve.sched.request import (
    NOTHING_SAMPLED,
    SLO,
    InvalidRequest,
    PoolingParams,
    Program,
    Request,
    SamplingParams,
    Tier,
)
from jaxserve.server.loop_thread import LoopThread
from jaxserve.server.requests.engine_requests import EngineRequests, RequestFields
from jaxserve.server.requests.output_streams import Delta, Stream
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, pair_prompts
from jaxserve.server.requests.templates.chat_template import ChatTemplate, load_chat_template
from jaxserve.server.tools.calls import Call, compact, from_openai, special_tokens, whole

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.stats import Observer

Prompt = str | Sequence[int]
Chat = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class _About(NamedTuple):
    """The fields that all requests of a call share, as in `RequestFields`."""

    slo: SLO
    tier: Tier
    cache_salt: str = ""
    model: str = ""
    prediction: str = ""
    pooling: PoolingParams | None = None
    program: Program | None = None


class LLM:
    """A model and its engine in this process. Requests take the same path as a server's.

    It compiles its steps when it is made, with a progress bar, or finds them in the cache. Any
    thread may call the methods, and several at once. `close` it, or use it in a `with`.

    Args:
        model: a checkpoint's directory; empty: the model in the box.
        config: a config from a preset's `get_config()`, instead.
        fields: fields of the config, such as `scheduler__max_rows=16`.

    Attributes:
        engine: the engine, started.

    Raises:
        ConfigError: If the config cannot be served; the message is one line.
    """

    def __init__(
        self, model: str | Path = "", *, config: ConfigDict | None = None, **fields: Any
    ) -> None:
        chosen = _config(str(model), config, fields)
        template = load_chat_template(chosen.model.path, chosen.server)
        from jaxserve.engine.startup.build import build_engine  # JAX takes seconds to import

        engine = build_engine(chosen)
        engine.start()
        self._begin(engine, template)

    @classmethod
    def over(cls, engine: Engine, template: ChatTemplate) -> LLM:
        """Wraps an engine that has been started; closing it stops the engine."""
        llm = cls.__new__(cls)
        llm._begin(engine, template)
        return llm

    def _begin(self, engine: Engine, template: ChatTemplate) -> None:
        self.engine = engine
        self._template = template
        self._loop = LoopThread("jaxserve-offline")
        # Its readers are in this process, and never too slow.
        self._requests = self._loop.call(lambda: EngineRequests(engine, math.inf))
        self._ended = self._loop.call(asyncio.Event)

    @property
    def system_fingerprint(self) -> str:
        """Two engines with the same fingerprint answer with the same bits, see `EngineInfo`."""
        return self.engine.info().system_fingerprint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | None = None,
        tier: Tier | None = None,
        cache_salt: str = "",
        adapter: str = "",
        prediction: str | Sequence[str] = "",
        program: Program | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt. There may be more prompts than the engine can queue. Ctrl-C
        cancels running requests.

        Args:
            prompts: one or several, as text or token ids.
            sampling: for all prompts, or one for each; None: greedy, or what the checkpoint's
                generation_config.json says.
            slo: the targets of each request.
            tier: the tier of all; None: best-effort without `slo`, since nobody reads along, and
                real-time with it.
            cache_salt: the salt of all; only requests with the same salt share computed prompts.
            adapter: name of the adapter of all, see `load_adapter`; "" for none.
            prediction: the likely output, one for all or one for each. A policy with `+spec` drafts
                from it; it changes no text.
            program: the program that all are calls of; the last one is the last if it is `over`.
            progress: whether to show a bar.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequest: If a prompt cannot be served. Then none is.
            ValueError: If the number of `sampling` or `prediction` differs from that of the
                prompts.
        """
        about = _about(slo, tier, cache_salt, adapter)._replace(program=program)
        work = self._generate(_several(prompts), sampling, about, prediction, progress)
        return self._loop.run(work)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """`generate` for chats, which the checkpoint's template turns into prompts. The text
        includes the model's thoughts and its answer.

        Args:
            messages: one chat or several; each message has a `role` and a `content`, or the
                `tool_calls` of an assistant.
            sampling: as in `generate`.
            tools: functions that the model may ask for, in OpenAI's form. Calls are part of the
                text, in the model's own format; `parse_calls` finds them.
            chat_template_kwargs: more variables for the template, such as enable_thinking.
            reasoning_effort: how much to think, for templates that read an effort or a switch
                (`none` does not think at all); ignored by other templates.
            options: options of `generate`.

        Returns:
            One output for each chat, in order; `prompt` is the template's text.

        Raises:
            InvalidRequest: If a tool is malformed, or as in `generate`.
        """
        chats: Sequence[Chat] = messages  # type: ignore[assignment]
        if messages and isinstance(messages[0], Mapping):
            chats = [messages]  # type: ignore[list-item]
        kwargs = {
            **self._template.effort_kwargs(reasoning_effort),
            **(chat_template_kwargs or {}),
        }
        shown = from_openai(tools) if tools else None
        if shown:
            sampling = self._showing_calls(sampling)
        texts = [
            self._template.render(
                list(map(_plain, chat)),
                kwargs=kwargs,
                tools=shown,
            )
            for chat in chats
        ]
        prompts = [self._template.encode(text, self.engine.encode) for text in texts]
        outputs = self.generate(prompts, sampling, **options)
        for request, text in zip(outputs, texts, strict=True):
            request.prompt = text
        return outputs

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
        """The content of a text and the calls in it, with their arguments as JSON. tools: the tools
        of the chat. Raises InvalidRequest."""
        parser = self._template.tool_format.parser(from_openai(tools))
        said = whole([*parser.feed(text), *parser.finish()])
        return said.content, said.calls

    def _showing_calls(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        """The sampling parameters, changed so that special tokens around calls are part of the
        text."""
        special = special_tokens(
            self._template.tool_format.markers, self.engine.encode, self.engine.decode
        )
        show = functools.partial(dataclasses.replace, shown_token_ids=tuple(special.values()))
        if sampling is None or isinstance(sampling, SamplingParams):
            return show(sampling or self._default_sampling())
        return [show(params) for params in sampling]

    def _default_sampling(self) -> SamplingParams:
        return SamplingParams(**self.engine.info().sampling_defaults)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        tier: Tier = Tier.REALTIME,
        cache_salt: str = "",
        adapter: str = "",
        prediction: str = "",
        program: Program | None = None,
    ) -> Iterator[Piece]:
        """Yields the output of one prompt as it is generated. Closing the iterator cancels the
        request.

        Args:
            prompt: text, or token ids.
            sampling: sampling parameters; None as in `generate`.
            slo: the request's targets.
            tier: its tier.
            cache_salt: only requests with the same salt share computed prompts.
            adapter: name of its adapter; "" for none.
            prediction: as in `generate`.
            program: the program that it is a call of; None says nothing.
        """
        about = _About(slo or SLO(), tier, cache_salt, adapter, prediction, program=program)
        return self._loop.iterate(self._stream(prompt, sampling, about))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | None = None,
        tier: Tier | None = None,
        cache_salt: str = "",
        adapter: str = "",
        prediction: str | Sequence[str] = "",
        program: Program | None = None,
        bar: bool = False,
    ) -> list[RequestOutput]:
        """`generate` for callers on an event loop of their own. See `generate` for the arguments;
        `bar` is its `progress`."""
        about = _about(slo, tier, cache_salt, adapter)._replace(program=program)
        work = self._generate(_several(prompts), sampling, about, prediction, bar)
        return await asyncio.wrap_future(self._loop.submit(work))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        slo: SLO | None = None,
        tier: Tier = Tier.REALTIME,
        cache_salt: str = "",
        adapter: str = "",
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """Makes a vector of each prompt, by the checkpoint's pooling, or else of the last token's
        hidden state.

        Args:
            prompts: one or several, as text or token ids.
            pooling: last, mean or cls, instead of the checkpoint's pooling.
            normalize: whether vectors have length 1, likewise.
            dimensions: how many of their first numbers to return; None for all.
            slo: the targets of each request.
            tier: the tier of all.
            cache_salt: as in `generate`.
            adapter: likewise.
            progress: whether to show a bar.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequest: If a prompt cannot be served. Then none is.
        """
        wanted = self.engine.info().pooling.with_own(pooling, normalize, dimensions)
        about = _About(slo or SLO(), tier, cache_salt, adapter, pooling=wanted)
        return self._loop.run(self._embed(_several(prompts), about, progress))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        tokens: Sequence[str | int] = (),
        template: str | None = None,
        progress: bool = True,
        **options: Any,
    ) -> list[float]:
        """Scores pairs of a query and a document.

        Args:
            queries: one, or as many as documents.
            documents: one or several.
            tokens: possible answers of the model; a score is the probability of the first among
                these after the template. None: the score is the cosine of the texts' vectors.
            template: the prompt of a pair, with {query} and {document} in it.
            progress: whether to show a bar.
            options: `slo`, `tier`, `cache_salt` and `adapter`, as in `embed`.

        Returns:
            One score for each pair, in order.

        Raises:
            InvalidRequest: If a pair cannot be served. Then none is.
            ValueError: If there are several queries, but not as many as documents.
        """
        texts = [documents] if isinstance(documents, str) else list(documents)
        asked = _one_each("queries", queries, str, len(texts))
        info, encode = self.engine.info(), functools.partial(self.engine.encode, special=False)
        pairs = list(zip(asked, texts, strict=True))
        if not pairs:
            return []
        made = pair_prompts(pairs, NO_TOKENS, tokens, template, info.pooling, encode)
        about = _About(**_options(**options), pooling=made.pooling)
        vectors = self._loop.run(self._embed(made.prompts, about, progress))
        return made.scores([each.embedding for each in vectors])

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter (LoRA) from a folder in PEFT's format, beside those of
        `lora__adapters=`. `lora__max_loras=` has to leave room for it.

        Raises:
            AdapterError: If the adapter cannot be used, or there is no room.
        """
        self.engine.load_adapter(name, str(path))

    def unload_adapter(self, name: str) -> None:
        """No new request may use the adapter; running requests go on. Raises UnknownAdapter."""
        self.engine.unload_adapter(name)

    def add_observer(self, observer: Observer) -> None:
        """Tells the observer of arrivals, steps, tokens and finished requests from now on. The
        engine's thread calls it (see `Observer`), so it must return quickly. It may hear of a
        call's last step after the call has returned."""
        self.engine.add_observer(observer)

    def pool_view(self) -> PoolView:
        """What each block of the pool holds now, for `figures.plots.block_pool`. Exact if an
        observer calls this; otherwise its parts may be one step apart."""
        return pool_view(self.engine)

    def close(self) -> None:
        """Cancels running requests and stops the engine. Idempotent."""
        self._template.close()
        self.engine.stop()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The methods below run on the loop.

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        about: _About,
        prediction: str | Sequence[str],
        bar: bool,
    ) -> list[RequestOutput]:
        default = sampling or self._default_sampling()
        chosen = _one_each("sampling", default, SamplingParams, len(prompts))
        likely = _one_each("prediction", prediction, str, len(prompts))
        program = about.program
        before = about._replace(program=None if program is None else program.going_on())
        shared = [before] * (len(prompts) - 1) + [about]
        wanted = [
            await self._make_request(prompt, params, of._replace(prediction=text))
            for prompt, params, text, of in zip(prompts, chosen, likely, shared, strict=False)
        ]
        outputs = [_empty(p, request) for p, request in zip(prompts, wanted, strict=True)]
        await self._serve(wanted, [output.add for output in outputs], "generating", bar)
        return outputs

    async def _embed(
        self, prompts: Sequence[Prompt], about: _About, bar: bool
    ) -> list[EmbeddingOutput]:
        wanted = [await self._make_request(prompt, NOTHING_SAMPLED, about) for prompt in prompts]
        vectors: dict[str, EmbeddingOutput] = {}

        def add(delta: Delta) -> None:
            last = delta.last
            if last is not None and last.pooled is not None:
                made = EmbeddingOutput(last.pooled, last.usage, last.timings, last.verdict)
                vectors[last.request_id] = made

        await self._serve(wanted, [add] * len(wanted), "embedding", bar)
        if len(vectors) < len(wanted):
            raise self._requests.cancelled_error()
        return [vectors[request.id] for request in wanted]

    async def _serve(
        self,
        wanted: Sequence[Request],
        readers: Sequence[Callable[[Delta], None]],
        what: str,
        bar: bool,
    ) -> None:
        """Serves requests concurrently, each with a reader."""
        with tqdm(total=len(wanted), desc=what, unit="prompt", disable=not bar) as shown:

            async def serve(request: Request, read: Callable[[Delta], None]) -> None:
                stream = await self._open(request)
                try:
                    while (delta := await stream.next()) is not None:
                        read(delta)
                finally:
                    self._end(stream)
                shown.update()

            try:
                async with asyncio.TaskGroup() as group:
                    for request, read in zip(wanted, readers, strict=True):
                        group.create_task(serve(request, read))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _stream(
        self, prompt: Prompt, sampling: SamplingParams | None, about: _About
    ) -> AsyncGenerator[Piece, None]:
        params = sampling or self._default_sampling()
        request = await self._make_request(prompt, params, about)
        stream = await self._open(request)
        try:
            while (delta := await stream.next()) is not None:
                reason = None if delta.last is None else delta.last.finish_reason
                text, tokens = "".join(delta.text), tuple(delta.token_ids)
                likely = tuple(delta.logprobs), tuple(delta.prompt_logprobs)
                yield Piece(delta.index, text, tokens, reason, *likely, delta.expected_missed)
        finally:
            self._end(stream)

    async def _make_request(
        self, prompt: Prompt, sampling: SamplingParams, about: _About
    ) -> Request:
        params = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
        params = params if about.pooling is None else {}
        fields = RequestFields(prompt, params, **about._asdict())
        return await self._requests.make_request(fields)

    async def _open(self, request: Request) -> Stream:
        """Waits for room in the queue."""
        while True:
            self._ended.clear()
            try:
                return self._requests.open_stream(request)
            except QueueFull:
                await self._ended.wait()

    def _end(self, stream: Stream) -> None:
        self._requests.end_stream(stream)
        self._ended.set()


def _config(model: str, config: ConfigDict | None, fields: Mapping[str, Any]) -> Config:
    from jaxserve.server.startup.launch import find_checkpoint  # imports the whole server

    if config is None:
        named = model or fields.get("model__preset")
        config = base.get_config() if named else tiny_cpu.get_config()
    chosen = {"model__path": model, "model__preset": "", **fields} if model else fields
    return find_checkpoint(config_from_config_dict(config, chosen))


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn in the form for templates, from any form of OpenAI's clients."""
    fields = {name: value for name, value in turn.items() if value is not None}
    content = fields.get("content", "")
    if not isinstance(content, str):
        if not all(isinstance(part.get("text"), str) for part in content):
            raise InvalidRequest("messages", "only parts of text are served")
        content = "".join(part["text"] for part in content)
    calls = [{**call, "function": dict(call["function"])} for call in fields.get("tool_calls", ())]
    for call in calls:
        arguments = call["function"].get("arguments") or ""
        call["function"]["arguments"] = (
            arguments if isinstance(arguments, str) else compact(arguments)
        )
    fields.pop("tool_calls", None)
    return {**fields, "content": content, **({"tool_calls": calls} if calls else {})}


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(field: str, values: T | Sequence[T], kind: type[T], count: int) -> Sequence[T]:
    """One value for each prompt: a single value is repeated. Raises ValueError if the number is
    wrong."""
    if isinstance(values, kind):
        return [values] * count
    several: Sequence[T] = values  # type: ignore[assignment]
    if len(several) != count:
        raise ValueError(f"{field}: {len(several)} of them for {count} prompts")
    return several


def _about(slo: SLO | None, tier: Tier | None, cache_salt: str, adapter: str) -> _About:
    if tier is None:
        tier = Tier.BEST_EFFORT if slo is None else Tier.REALTIME
    return _About(slo or SLO(), tier, cache_salt, adapter)


def _options(
    slo: SLO | None = None, tier: Tier = Tier.REALTIME, cache_salt: str = "", adapter: str = ""
) -> dict[str, Any]:
    return {"slo": slo or SLO(), "tier": tier, "cache_salt": cache_salt, "model": adapter}


def _empty(prompt: Prompt, request: Request) -> RequestOutput:
    outputs = [CompletionOutput(index) for index in range(request.sampling.n)]
    text = prompt if isinstance(prompt, str) else None
    asked = request.sampling.prompt_logprobs is not None
    return RequestOutput(request.id, text, request.prompt, outputs, [None] if asked else None)
