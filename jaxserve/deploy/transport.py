"""How what is cached of an answer gets from one replica to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Pages = Mapping[bytes, np.ndarray]
"""As `Request.pages`."""


class Transport:
    """Between replicas of one process. Both methods may block: they are called beside the event
    loop."""

    def put(self, pages: Pages) -> Any:
        """Offers pages to another replica. Returns what that one needs to `get` them: plain data,
        or what Ray can send."""
        return pages

    def get(self, handle: Any) -> Pages:
        """The pages that another replica has put, as arrays of one's own. Raises any exception if
        they cannot be had any more."""
        return {bytes(key): np.array(page) for key, page in handle.items()}
