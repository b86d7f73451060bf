"""Tries grammars in other processes (`grammar_worker.py`), where they cannot harm the engine."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.limited.process import LimitedProcess, ProcessEnded
from jaxserve.sched.request import Grammar, InvalidRequest

_STOPPING = "the engine is shutting down"
_MODULE = "jaxserve.engine.text.grammar_worker"
MIB = 1 << 20
PROCESSES = 2
"""Grammars compiled at a time, so that a slow one does not delay others."""
BURST = 50
"""Masks whose time a text may use in advance: the first masks of a usual schema take longest."""
_MEMORY = 256 * MIB  # in addition to the tokenizer's memory
_FROM_OUTSIDE = -signal.SIGKILL, -signal.SIGTERM  # as if the machine has run out of memory
_START_S, _WALL_S = 60.0, 60.0  # long, since the machine may be busy


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of grammars.

    Attributes:
        compile_s: CPU seconds to compile one.
        kept_mib: MiB of memory for all compiled grammars that are kept; a quarter for one.
        mask_ms: CPU milliseconds per mask of a text, on average.
    """

    compile_s: float = 2.0
    kept_mib: float = 128.0
    mask_ms: float = 1.0

    @property
    def kept(self) -> int:
        """Most bytes of all kept grammars."""
        return int(self.kept_mib * MIB)

    @property
    def most(self) -> int:
        """Most bytes of one grammar."""
        return self.kept // 4

    def mask_s(self, masks: int) -> float:
        """CPU seconds that this many masks of a text may take."""
        return (BURST + masks) * self.mask_ms / 1e3

    @property
    def mask_problem(self) -> str:
        """The error message for a grammar whose masks take longer."""
        most = f"more than {self.mask_ms:g} ms of a processor each"
        return f"takes too long for each token: {most} (engine.grammar_mask_ms)"


class GrammarProcesses:
    """Processes that try grammars, started with the first one. Thread-safe.

    Args:
        definition: see `Grammars`.
        vocab_size: see `Grammars`.
        eos_ids: see `Grammars`.
        limits: limits of grammars.
    """

    def __init__(
        self, definition: str, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits
    ) -> None:
        self._limits = limits
        self._first = {
            **{"definition": definition, "vocab_size": vocab_size, "eos_ids": list(eos_ids)},
            **{"cpu_s": limits.compile_s, "memory": _MEMORY},
        }
        self._changed = threading.Condition()
        self._idle: list[LimitedProcess] = []
        self._all: set[LimitedProcess] = set()
        self._closed = False
        self._end = weakref.finalize(self, _kill, self._all)

    def size(self, grammar: Grammar) -> int:
        """Bytes of the compiled grammar. Raises InvalidRequest for a grammar that exceeds the
        limits, EngineStopped once closed, and QueueFull if no process can be started."""
        process = self._take()
        try:
            found = self._asked(process, grammar)
        finally:
            self._give_back(process)
        problem, limits = found.get("problem"), self._limits
        if problem is None and found["bytes"] > limits.most:
            most = f"at most {limits.most / MIB:g} are allowed (a quarter of engine.grammar_mib)"
            problem = f"takes {found['bytes'] / MIB:.1f} MiB when compiled; {most}"
        if problem is None and found["mask_s"] > limits.mask_s(found["masks"]):
            problem = limits.mask_problem
        if problem is not None:
            raise InvalidRequest(grammar.field_name, problem)
        return int(found["bytes"])

    def close(self) -> None:
        """Ends the processes at once. Idempotent."""
        with self._changed:
            self._closed = True
            self._end()
            self._changed.notify_all()

    def _asked(self, process: LimitedProcess, grammar: Grammar) -> dict[str, Any]:
        cpu_s = self._limits.compile_s
        try:
            question = {"kind": grammar.kind, "text": grammar.text}
            found = process.ask(question, _WALL_S + 10 * cpu_s)
        except (TimeoutError, ProcessEnded):  # it reports the exits of its children itself
            if self._closed:
                raise EngineStopped(_STOPPING) from None
            raise QueueFull("the process for grammars gave no answer; try again later") from None
        if (code := found.get("died")) is None:
            return found
        if code in _FROM_OUTSIDE:  # perhaps before it had the question; ask another one
            process.kill()
            process.end()
            raise QueueFull("the process that tried the grammar was killed; try again later")
        if code == -signal.SIGPROF:
            most = f"more than {cpu_s:g} s of a processor to be compiled (engine.grammar_compile_s)"
        else:
            most = (
                f"more than {_MEMORY // MIB} MiB of memory to be compiled, or breaks its compiler"
            )
        return {"problem": f"takes {most}"}

    def _take(self) -> LimitedProcess:
        """A process that is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or len(self._all) < PROCESSES)
            while self._idle and not self._closed:
                process = self._idle.pop()
                if not process.ended:
                    return process
                process.end()  # it has died while it was idle
                self._all.discard(process)
            if self._closed:
                raise EngineStopped(_STOPPING)
            try:
                process = LimitedProcess(_MODULE)
            except OSError as error:
                problem = f"there is no process for grammars ({error.strerror})"
                raise QueueFull(f"{problem}; try again later") from None
            self._all.add(process)
        try:
            process.ask(self._first, _START_S)
        except (TimeoutError, ProcessEnded):
            self._give_back(process)
            if self._closed:
                raise EngineStopped(_STOPPING) from None
            raise QueueFull("the process for grammars did not start; try again later") from None
        return process

    def _give_back(self, process: LimitedProcess) -> None:
        with self._changed:
            if process.ended:
                process.end()
                self._all.discard(process)
            else:
                self._idle.append(process)
            self._changed.notify()


def _kill(processes: set[LimitedProcess]) -> None:
    for process in processes:
        process.kill()
