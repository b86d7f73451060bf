"""Log-probabilities that wait for a reader, in a tenth of the memory of their objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.engine.output import TokenLogprobs


@dataclass
class LogprobArrays:
    """One array of ids and one of values for all tokens, each token's own entry before its top
    ones, and the number of entries for each token."""

    _ids: array[int] = field(default_factory=lambda: array("i"))
    _values: array[float] = field(default_factory=lambda: array("d"))
    _counts: array[int] = field(default_factory=lambda: array("i"))

    def add(self, entries: Sequence[TokenLogprobs]) -> int:
        """Appends entries. Returns the bytes that they take."""
        before = len(self._ids)
        for entry in entries:
            self._counts.append(1 + len(entry.top))
            self._ids.append(entry.token_id)
            self._ids.extend([token for token, _ in entry.top])
            self._values.append(entry.logprob)
            self._values.extend([value for _, value in entry.top])
        return logprobs_bytes(len(entries), len(self._ids) - before)

    def extend(self, later: LogprobArrays) -> None:
        """Appends later entries of the same continuation."""
        self._counts += later._counts
        self._ids += later._ids
        self._values += later._values

    def entries(self) -> list[TokenLogprobs]:
        """One entry for each token."""
        entries, begin = [], 0
        for count in self._counts:
            end = begin + count
            top = tuple(zip(self._ids[begin + 1 : end], self._values[begin + 1 : end], strict=True))
            entries.append(TokenLogprobs(self._ids[begin], self._values[begin], top))
            begin = end
        return entries


def logprobs_bytes(tokens: int, values: int) -> int:
    """Bytes of the values of this many tokens, including their top ones."""
    return 12 * values + 4 * tokens
