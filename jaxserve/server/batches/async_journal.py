"""The journal's calls beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DiskThread:
    """Makes calls that wait for the disk, one after the other, on a thread of their own: so they
    hold up neither the event loop nor those who wait for its other threads."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-batches")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns, or raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*arguments))
