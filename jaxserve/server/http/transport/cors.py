"""Which pages of other sites may call (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "POST", "DELETE")
_TOLD = ("Retry-After", "WWW-Authenticate", "x-request-id")  # beside the body


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application for pages of these origins, too; none: only for its own. Browsers ask before
    they send a key, so this stands before whoever wants one. Cookies are never taken."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_TOLD,
    )
