"""The engine's errors, with messages meant for the client or operator who caused them."""

from __future__ import annotations


class AdapterError(ValueError):
    """An adapter cannot be loaded; the message names the file, tensor or field, in one line."""


class QueueFull(RuntimeError):
    """The bounded queue (`scheduler.max_queue`) holds no more requests; try again later."""


class EngineStopped(RuntimeError):
    """The engine is shutting down or has failed and takes no requests."""


class NotFinite(ArithmeticError):
    """The model computed NaN or infinite numbers for a request."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN or infinite numbers for this request; serve it in a dtype with "
            "more range (model.dtype)"
        )


class HostLost(EngineStopped):
    """One of the hosts that serve the model together is gone. The message says which."""
