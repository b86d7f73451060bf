"""How what is cached of an answer gets from one replica to another, and how long that takes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.server.moves.resume_point import Handle

Pages = Mapping[bytes, np.ndarray]
"""As `Request.pages`."""
_LATELY_S = 60.0  # over which speeds are measured
_AT_ONCE = 8 << 20  # bytes that count as coming at once: a delay says little of large pages


class Transport:
    """Between replicas of one process. Methods may be called on any thread, and those that pass
    pages may block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By source, of what came lately: when, how many bytes, and in how many seconds.
        self._came: dict[str, deque[tuple[float, int, float]]] = defaultdict(deque)

    def put(self, pages: Pages) -> Handle:
        """Offers pages, which do not change any more, to another replica. Returns what that one
        needs to `get` them."""
        num_bytes = sum(page.nbytes for page in pages.values())
        return Handle(self._offer(pages), tuple(pages), num_bytes, self._here())

    def get(self, handle: Handle, seconds: float) -> Pages:
        """The pages that another replica has put. Their arrays may be in memory of the transport,
        which then has its room back when nobody refers to them.

        Args:
            handle: Of the other one's `put`.
            seconds: How long to wait.

        Raises:
            Exception: Any, if they cannot be had any more, or not in time.
        """
        began, size = time.monotonic(), 0
        try:
            found = self._fetch(handle.refs, seconds)
            size = handle.num_bytes
            return found
        finally:
            now = time.monotonic()
            with self._lock:
                self._came[handle.source].append((now, size, now - began))

    def seconds(self, handle: Handle) -> float:
        """How long `get` will take if it is as fast as those of the last _LATELY_S from there; 0
        if there were none."""
        now = time.monotonic()
        with self._lock:
            came = self._came[handle.source]
            while came and came[0][0] < now - _LATELY_S:
                came.popleft()
            each = sum(took for _, _, took in came)
            return handle.num_bytes * each / (_AT_ONCE + sum(size for _, size, _ in came))

    def _offer(self, pages: Pages) -> list[Any]:
        """`Handle.refs`."""
        return [pages]

    def _fetch(self, refs: list[Any], seconds: float) -> Pages:
        (pages,) = refs
        found: Pages = pages
        return found

    def _here(self) -> str:
        """`Handle.source` of what is offered here."""
        return ""
