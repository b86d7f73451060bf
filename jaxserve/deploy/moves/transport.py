"""How what is cached of an answer gets from one replica to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Pages = Mapping[bytes, np.ndarray]
"""As `Request.pages`."""


Handle = list[Any]
"""By which pages can be had: plain data, or what Ray can send. Whoever has no more use for it
empties it, since its other holders keep it until the answer ends."""


class Transport:
    """Between replicas of one process. Both methods may block: they are called beside the event
    loop."""

    def put(self, pages: Pages) -> Handle:
        """Offers pages, which do not change any more, to another replica. Returns what that one
        needs to `get` them."""
        return [pages]

    def get(self, handle: Handle) -> Pages:
        """The pages that another replica has put. Their arrays may be in memory of the transport,
        which then has its room back when nobody refers to them. Raises any exception if they cannot
        be had any more."""
        (pages,) = handle
        found: Pages = pages
        return found
