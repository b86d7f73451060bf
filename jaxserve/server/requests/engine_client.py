"""The interface that the server needs of an engine; `jaxserve.engine.engine.Engine` has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxserve.engine.adapters import Adapter, AdapterLoad
from jaxserve.engine.output import Output
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer
from jaxserve.sched.request import Grammar, Request, Thinking
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.ttft_estimator import Wait

if TYPE_CHECKING:  # slow to import
    from jaxserve.engine.text.detokenizer import Detokenizer


class EngineClient(Protocol):
    """Every method may be called from any thread."""

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for a request that the model cannot serve. Takes up to a second if
        the grammar was not checked before."""

    def with_keys(self, request: Request) -> Request:
        """The request with the keys of its prompt's blocks, so that `expected_wait` and `submit`
        need not compute them: 0.7 ms for 8,192 tokens."""

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Takes in a request that has passed `check`, and returns at once. on_output gets every
        `Output` on the engine's thread and must not block. If `submit` raises, on_output is never
        called.

        Raises:
            InvalidRequest: If a request with the same id is running.
            QueueFull: If the queue is full.
            EngineStopped: After `drain`, `stop` or a failure.
        """

    def cancel(self, request_id: str) -> None:
        """Idempotent; a final Output with CANCELLED follows for each unfinished continuation."""

    def note_tools(self, request_id: str, tools: Mapping[str, str]) -> None:
        """Notes that a request's answer asks for tools; returns at once. A later request that
        answers them belongs to the same program.

        Args:
            request_id: The request.
            tools: Names of the tools, by the ids of the calls.
        """

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for all requests submitted from now on; returns at once. Does
        nothing if `EngineInfo.prefix_caching` is false."""

    def adapters(self) -> list[Adapter]:
        """The adapters that requests may name at this moment."""

    def load_adapter(self, name: str, path: str, root: Path | None = None) -> Adapter:
        """Loads an adapter from a folder, and blocks until it is loaded. If `root` is given, the
        folder has to be under it. Raises AdapterError if the adapter cannot be used or has no room,
        and EngineStopped."""

    def unload_adapter(self, name: str) -> None:
        """No new request may name the adapter; running requests go on. Raises UnknownAdapter."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens the model expects unless the text has them
        itself. Other threads run meanwhile. Raises InvalidRequest if the model has no tokenizer,
        and for a text that is too long to be served; at once if its bytes alone show that."""

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        """Compiles the grammar, in up to a second, so that `submit` need not. thinking: what comes
        before the text that it holds. Raises InvalidRequest, which says what is wrong with the
        grammar."""

    def knows_grammar(self, grammar: Grammar) -> bool:
        """Whether `check_grammar` has nothing to do, since the grammar was compiled or refused
        before."""

    def max_text_bytes(self) -> int | None:
        """UTF-8 bytes of the longest text that may be served; None if there is no known limit."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; "" if the model has no tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The text of a single token, as it is shown to people; empty without a tokenizer."""

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Makes the text of a continuation of the prompt, as its tokens come."""

    def info(self) -> EngineInfo:
        """Describes what is served; does not change while the engine runs."""

    def expected_wait(self, request: Request) -> Wait:
        """How long the request would wait for its first token if it were submitted now; takes
        microseconds."""

    def backlog(self) -> Backlog:
        """The work that was waiting at the last step, with the step's time by `time.monotonic`.
        Predicted waits and routers' snapshots are computed from it."""

    def export(
        self, request_id: str, seconds: float, most_bytes: int, sent: Collection[bytes] = ()
    ) -> dict[bytes, np.ndarray]:
        """What is cached of a running request, for `Request.pages` of another engine.

        Args:
            request_id: the request.
            seconds: how long to wait.
            most_bytes: of all of it, with what was sent before.
            sent: keys of what was sent before.

        Raises:
            TimeoutError: it takes longer.
            EngineStopped: the engine has ended.
        """

    def recompute_seconds(self, keys: Sequence[bytes]) -> float:
        """Predicted seconds to compute blocks with these keys again, as far as they are not
        cached."""

    def stats(self) -> EngineStats:
        """A snapshot, taken while the engine runs: its counts may be one step apart."""

    def block_map(self) -> np.ndarray:
        """The use of each block, uint8 [num_blocks] of `sched.pool_map.BlockUse`, taken while the
        engine runs."""

    def live_counts(self) -> dict[tuple[str, str, bool], int]:
        """Continuations by (SLO class, tier, whether they hold cache), likewise."""

    def adapter_load(self) -> AdapterLoad:
        """Adapters with running and waiting requests, likewise."""

    def drain(self, grace_s: float) -> bool:
        """Stops admission, blocks until all requests have finished or the grace (seconds) has
        passed, then cancels the rest. True if nothing had to be cancelled."""

    def stop(self) -> None:
        """Ends the engine's thread; running requests are cancelled. Idempotent."""

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None:
        """Calls `listener` with the error once the engine has failed, on the engine's thread; at
        once if it has failed already."""

    def add_observer(self, observer: Observer) -> None:
        """Tells the observer of every step, token and finished request from now on, on the engine's
        thread."""
