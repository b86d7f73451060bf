"""What the server needs of an engine; `jaxserve.engine.engine.Engine` is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxserve.engine.adapters import Adapter, AdapterLoad
from jaxserve.engine.output import Output
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer
from jaxserve.sched.request import Grammar, Request, Thinking
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.ttft_estimator import Wait

if TYPE_CHECKING:  # the library takes long to import
    from jaxserve.engine.text.detokenizer import Detokenizer


class EngineClient(Protocol):
    """Every method may be called from any thread."""

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for a request that the model cannot serve. It may take up to a
        second where the grammar was not checked before."""

    def with_keys(self, request: Request) -> Request:
        """The request with the keys of its prompt's blocks, which `expected_wait` and `submit`
        would each make otherwise: 0.7 ms for 8,192 tokens."""

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Takes in a request that `check` has let pass, and returns at once. on_output gets every
        `Output`, on the engine's thread, and must not block; if this raises it is never called.

        Raises:
            InvalidRequest: a request of the same id is running.
            QueueFull: the queue holds no more.
            EngineStopped: after `drain`, `stop` or a failure.
        """

    def cancel(self, request_id: str) -> None:
        """Idempotent; a final Output with CANCELLED follows for each unfinished continuation."""

    def reset_prefix_cache(self) -> None:
        """Who is submitted after this finds nothing of what was computed before; it returns at
        once. Nothing happens where `EngineInfo.prefix_caching` is false."""

    def adapters(self) -> list[Adapter]:
        """Those that requests may name, at this moment."""

    def load_adapter(self, name: str, path: str, root: Path | None = None) -> Adapter:
        """Loads an adapter from a folder, which is under the root if there is one; it takes as long
        as that takes. Raises AdapterError where it cannot be used or has no room, and
        EngineStopped."""

    def unload_adapter(self, name: str) -> None:
        """No request may name it any more; those that do go on. Raises UnknownAdapter."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens the model expects unless the text has them
        itself. Other threads run meanwhile. Raises InvalidRequest where the model has no tokenizer,
        and for a text that is too long to be served, at once where its bytes alone say so."""

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        """Gets it ready, in up to a second, so that `submit` need not. thinking: what comes before
        the text that it holds. Raises InvalidRequest, which says what is wrong with it."""

    def knows_grammar(self, grammar: Grammar) -> bool:
        """Whether `check_grammar` has nothing to compile, as it was compiled or refused already."""

    def max_text_bytes(self) -> int | None:
        """UTF-8 of the longest text that may be served; None: any text may, as far as is known."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, without special tokens; "" where the model has no tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """One token by itself, as it is shown to people; nothing where there is no tokenizer."""

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """The text of a continuation of the prompt, as its tokens come."""

    def info(self) -> EngineInfo:
        """What is served, the same from start to stop."""

    def expected_wait(self, request: Request) -> Wait:
        """How long it would wait for its first token if it were submitted now; in microseconds."""

    def backlog(self) -> Backlog:
        """What there was to do at the last step, with its time on `time.monotonic`'s clock; waits
        and routers' snapshots are made of it."""

    def stats(self) -> EngineStats:
        """A snapshot, taken while the engine runs: its counts may be one step apart."""

    def block_map(self) -> np.ndarray:
        """What each block holds, uint8 [num_blocks] of `sched.pool_map.BlockUse`, taken while the
        engine runs."""

    def live_counts(self) -> dict[tuple[str, str, bool], int]:
        """Continuations by (SLO class, tier, whether they hold cache), likewise."""

    def adapter_load(self) -> AdapterLoad:
        """Whose requests run and wait, likewise."""

    def drain(self, grace_s: float) -> bool:
        """Stops admission, blocks until all is finished or the grace (seconds) has passed, then
        cancels the rest; True if nothing had to be cancelled."""

    def stop(self) -> None:
        """Ends the engine's thread; what still runs is cancelled. Idempotent."""

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None:
        """Calls `listener` with the error once the engine has failed, on the engine's thread; at
        once if it has failed already."""

    def add_observer(self, observer: Observer) -> None:
        """Has the observer told of every step, token and end from now on, on the engine's
        thread."""
