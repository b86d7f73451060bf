"""API keys of a server: which key a call has, and whether it is let in."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from jaxserve.config import ConfigError
from jaxserve.server.access.key_file import ApiKey, check_other, digest_of, parse_lines
from jaxserve.server.access.key_limits import RateLimited, TooManyRequests, Usage

__all__ = [
    "Caller",
    "Keys",
    "RateLimited",
    "TooManyRequests",
    "Unauthenticated",
    "authorization",
]

log = logging.getLogger(__name__)
_KEY_HEADERS = {b"authorization": b"", b"x-api-key": b"Bearer "}
_LOOK_S = 1.0  # least seconds between two looks at the file


class Unauthenticated(RuntimeError):
    """The call has no API key, or an unknown one. given: whether it has one."""

    def __init__(self, message: str, *, given: bool) -> None:
        super().__init__(message)
        self.given = given


def authorization(headers: Iterable[tuple[str | bytes, str | bytes]]) -> bytes | None:
    """The authorization among HTTP's headers or gRPC's metadata; None unless there is exactly
    one. A key in x-api-key, as Anthropic's clients send it, is one, too; clients may send the same
    key in both."""
    raw = [tuple(v if isinstance(v, bytes) else v.encode() for v in header) for header in headers]
    names = [name for name, _ in raw if name in _KEY_HEADERS]
    given = {_KEY_HEADERS[name] + value.strip() for name, value in raw if name in _KEY_HEADERS}
    return given.pop() if len(given) == 1 and len({*names}) == len(names) else None


class Caller:
    """The client of a call, as its API key identifies it. Without a key nothing is limited: either
    the server needs no keys, or the request is a line of a batch. `enter`, `take_requests` and
    `give_back_requests` are for the event loop's thread.

    Args:
        key: the caller's API key; None without one.
        usage: calls and requests that the key has open now; None starts at zero.
        name: name of the key, where `key` is None; "" where no keys are needed.

    Attributes:
        name: the key's name, or `name` where there is no key.
        key: as given.
        target_headers: the headers or metadata of the call that set SLO targets or name its
            program, unparsed. A frontend fills it in (`requests/target_headers.py`).
        arrived: when the call came, copied from `CallRecord.began`; 0 if it has no record.
        drawn: as `CallRecord.drawn`.
        travels: whether the call's answer may go on at another replica.
    """

    def __init__(
        self, key: ApiKey | None = None, usage: Usage | None = None, *, name: str = ""
    ) -> None:
        self.name = name if key is None else key.name
        self.key, self._limits = key, key or ApiKey("", "")
        self._usage = usage or Usage(time.monotonic)
        self.target_headers: Sequence[tuple[str, str]] = ()
        self.arrived = 0.0
        self.drawn: Callable[[str], bytes] = lambda _: secrets.token_bytes(16)
        self.travels = False

    @property
    def weight(self) -> float:
        """Weight of the caller's share of a full engine."""
        return float(self._limits.weight or 1)

    @property
    def most_requests(self) -> int:
        """Requests that the caller may have running at once; 0 is any number."""
        return self._limits.concurrency

    @property
    def is_admin(self) -> bool:
        """Whether the caller may act on the whole server: its key says so, or no keys are
        needed."""
        return not self.name or bool(self._limits.admin)

    def may_use(self, adapter: str) -> bool:
        """Whether the caller's requests may name this adapter."""
        return not self._limits.adapters or adapter in self._limits.adapters.split(",")

    def scoped(self, name: str) -> str:
        """The caller's id `name`, made distinct from other callers' ids: names of keys have no
        slash. It is unchanged where no keys are needed."""
        return f"{self.name}/{name}" if self.name else name

    def own(self, scoped: str) -> str:
        """The inverse of `scoped`."""
        return scoped.removeprefix(f"{self.name}/") if self.name else scoped

    def enter(self, *, rated: bool = True) -> contextlib.ExitStack:
        """Counts one more open call until the returned stack is closed. rated: whether the call
        also counts against the rate limit. Raises RateLimited if there are too many."""
        place = contextlib.ExitStack()
        self._usage.enter(self._limits, rated=rated)
        place.callback(self._usage.leave)
        return place

    def take_requests(self, count: int) -> None:
        """Counts `count` requests that go to the engine. Raises RateLimited if the key may not have
        as many now, and TooManyRequests if it never may."""
        self._usage.take_requests(self._limits, count)

    def give_back_requests(self, count: int) -> None:
        """Stops counting `count` requests, which have ended."""
        self._usage.give_back_requests(count)


class Keys:
    """The API keys that a server knows. With neither `path` nor `fixed`, no keys are needed.
    `caller` may be called from any thread.

    Args:
        path: key file, with lines as `parse_lines` reads them. It is read again when it has
            changed. If that fails, the keys read before stay valid.
        fixed: keys that are always valid.
        clock: seconds.
        classes: names of the SLO classes that keys may name; None lets them name any.

    Raises:
        ConfigError: If the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None = None,
        fixed: Sequence[ApiKey] = (),
        clock: Callable[[], float] = time.monotonic,
        classes: Collection[str] | None = None,
    ) -> None:
        self._path, self._fixed, self._clock, self._classes = path, list(fixed), clock, classes
        self.needed = path is not None or bool(fixed)
        self._lock = threading.Lock()
        self._by_digest: Mapping[str, tuple[ApiKey, Usage]] = {}
        self._seen, self._looked = _signature(path), clock()
        try:
            self._take(self._read())
        except (OSError, ValueError) as error:
            raise ConfigError(f"server.api_keys: {_told(error)}") from None
        if self.needed and not self._by_digest:
            log.warning("server.api_keys: %s has no keys yet: every call is refused", path)

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller of a call with this authorization header, `Bearer KEY` (RFC 6750 section 2.1);
        None means that the call has no such header. Raises Unauthenticated."""
        if not self.needed:
            return Caller()
        self._look()
        if authorization is None:
            problem = "this server wants an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            raise Unauthenticated(problem, given=False)
        scheme, _, secret = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            problem = "authorization: must be Bearer and an API key"
            raise Unauthenticated(problem, given=False)
        # This lookup need not take constant time. Its time could only tell something of a hash. No
        # key can be computed from a hash, and nobody can choose a key whose hash begins like
        # another one.
        key = self._by_digest.get(digest_of(secret.strip()))
        if key is None:
            raise Unauthenticated("authorization: the API key is not one of ours", given=True)
        return Caller(*key)

    def _look(self) -> None:
        """Reads the file again if it has changed."""
        if self._path is None:
            return
        with self._lock:
            now = self._clock()
            if now - self._looked < _LOOK_S:
                return
            self._looked = now
            signature = _signature(self._path)
            if signature == self._seen:
                return
            self._seen = signature
            try:
                self._take(self._read())
            except (OSError, ValueError) as error:
                log.warning("server.api_keys: %s; the keys from before hold", _told(error))
            else:
                log.info("server.api_keys: %s has %d keys", self._path, len(self._by_digest))

    def _read(self) -> list[ApiKey]:
        keys = list(self._fixed)
        if self._path is not None:
            text = self._path.read_text(encoding="utf-8")
            for key in parse_lines(text, str(self._path)):
                check_other(keys, key)
                keys.append(key)
        for key in keys:
            self._check_class(key)
        return keys

    def _check_class(self, key: ApiKey) -> None:
        known = self._classes
        if known is not None and key.slo_class and key.slo_class not in known:
            problem = f"there is no {key.slo_class!r}; this server has {', '.join(known) or 'none'}"
            raise ValueError(f"key {key.name}: class: {problem}")

    def _take(self, keys: Sequence[ApiKey]) -> None:
        # A key that keeps its name keeps its usage, even if its limits have changed.
        kept = {key.name: usage for key, usage in self._by_digest.values()}
        self._by_digest = {
            key.digest: (key, kept.get(key.name) or Usage(self._clock)) for key in keys
        }


def _signature(path: Path | None) -> tuple[int, ...] | None:
    """Identifies the file's current version; None if there is no file."""
    if path is None:
        return None
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _told(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "the file is not UTF-8"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
