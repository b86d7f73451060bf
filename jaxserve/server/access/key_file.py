"""API keys as lines of text: a name, the key's hash, and its limits.

    alice sha256:9f86d0...  rate=60 concurrency=4

Only its owner has the key itself. It has 256 random bits, so its SHA-256 reveals nothing, and needs
neither a salt nor a slow hash as passwords do.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.config import LORA_NAME

NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
LIMITS = {
    "rate": "calls a minute at most (any number)",
    "concurrency": "calls, and requests of them, at once at most (any number)",
    "files_mib": "MiB of its files, and of its batches, at most (a share of server.batch_gib)",
    "files": "files, and batches, that it has at most (server.batch_key_files)",
    "tier": "best_effort: it may ask for no more; realtime (that)",
    "class": "SLO class of its requests that name none (none)",
    "default_tier": "realtime or best_effort, for those that say neither tier nor class (class's)",
    "weight": "its share of a full engine, in those of a key that says nothing (1)",
    "max_value": "most that its requests are worth, where their class says more (1)",
    "min_ttft_ms": "ms to the first token, the tightest target that it may ask for (any)",
    "min_tbt_ms": "the same between two tokens, P99 or longest (any)",
    "min_jct_ms": "the same to the last one (any)",
    "min_program_ms": "ms to the end of a program, its tightest deadline (any)",
    "adapters": "names of the adapters that it may use, by commas, or - for none (all)",
    "admin": "1: it may act on the whole server: reset its cache, load adapters (not)",
}
"""The limits of a key, each with its default in parentheses."""
REALTIME, BEST_EFFORT = TIERS = ("realtime", "best_effort")
SLO_CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_LIMIT = 1_000_000
NO_ADAPTERS = "-"
_PREFIX = "jx-"  # not like a flag; a leaked key is easy to recognise
_KEY_BYTES = 32
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_FIELDS = {name: name for name in LIMITS} | {"class": "slo_class"}


@dataclass(frozen=True)
class ApiKey:
    """An API key and its limits.

    Attributes:
        name: its name, unique among the server's keys.
        digest: SHA-256 of the key, in hex.
        rate: calls per minute at most; 0 is any number.
        concurrency: calls, and requests of them, open at once at most; 0 is any number.
        files_mib: MiB that its files may take, and its batches as much again; 0 is the server's
            default.
        files: how many files it may have, and how many batches; 0 is the server's default.
        tier: the highest tier that its requests may ask for, one of TIERS.
        slo_class: SLO class of its requests that name none; "" is none.
        default_tier: tier of its requests that name neither a tier nor a class, one of TIERS; "" is
            the tier of `slo_class`.
        weight: weight of its share of a full engine; 0 is 1.
        max_value: upper bound on the value of its requests (`Request.value`), which their class
            sets; 0 is 1.
        min_ttft_ms: tightest TTFT target that it may ask for, in ms; 0 is any.
        min_tbt_ms: the same for the time between tokens, the 99th percentile or the longest.
        min_jct_ms: the same for the last token.
        min_program_ms: tightest deadline of a program that it may ask for, in ms; 0 is any.
        adapters: names of the adapters that it may use, separated by commas; "" is all, NO_ADAPTERS
            none.
        admin: 1 if it may act on the whole server; else 0.
    """

    name: str
    digest: str
    rate: int = 0
    concurrency: int = 0
    files_mib: int = 0
    files: int = 0
    tier: str = REALTIME
    slo_class: str = ""
    default_tier: str = ""
    weight: int = 0
    max_value: int = 0
    min_ttft_ms: int = 0
    min_tbt_ms: int = 0
    min_jct_ms: int = 0
    min_program_ms: int = 0
    adapters: str = ""
    admin: int = 0

    @property
    def limits(self) -> dict[str, int | str]:
        """The limits that differ from their defaults, by name."""
        values = {name: getattr(self, field) for name, field in _FIELDS.items()}
        return {
            name: limit for name, limit in values.items() if limit != getattr(ApiKey, _FIELDS[name])
        }

    def line(self) -> str:
        """The key's line in a key file; the inverse of `parse_line`."""
        limits = (f"{name}={limit}" for name, limit in self.limits.items())
        return " ".join((self.name, f"sha256:{self.digest}", *limits))


def make_key(name: str, digest: str, limits: Mapping[str, Any]) -> ApiKey:
    """The key with these limits, by their names in key files. Raises ValueError if they contradict
    each other."""
    key = ApiKey(name, digest, **{_FIELDS[limit]: value for limit, value in limits.items()})
    if key.tier == BEST_EFFORT and key.default_tier == REALTIME:
        raise ValueError(f"default_tier: {REALTIME} contradicts tier={BEST_EFFORT}")
    return key


def new_secret() -> str:
    """A new random API key."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(secret: bytes) -> str:
    """SHA-256 of a key in hex; nothing else of the key is stored."""
    return hashlib.sha256(secret).hexdigest()


def check_name(name: str) -> str:
    """Returns the name if it is valid for a key, else raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"a name has 1 to 64 of A-Z a-z 0-9 . _ @ -, got {name!r}")
    return name


def check_limit(name: str, text: str) -> int | str:
    """Parses the limit `name`: a number, a tier, or names. Raises ValueError."""
    if name.endswith("tier"):
        if text not in TIERS:
            raise ValueError(f"{name}: must be {' or '.join(TIERS)}, got {text!r:.80}")
        return text
    if name.endswith("class"):
        if not SLO_CLASS_NAME.fullmatch(text):
            raise ValueError(f"{name}: must be 1 to 64 of A-Z a-z 0-9 _ -, got {text!r:.80}")
        return text
    if name.endswith("adapters"):
        if text != NO_ADAPTERS and not all(map(LORA_NAME.fullmatch, text.split(","))):
            raise ValueError(f"{name}: must be names separated by commas, or -, got {text!r:.80}")
        return text
    if name.endswith("admin"):
        if text != "1":
            raise ValueError(f"{name}: must be 1, got {text!r:.80}")
        return 1
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= MAX_LIMIT):
        raise ValueError(f"{name}: must be 1 to {MAX_LIMIT}, got {text!r:.80}")
    return int(text)


def parse_line(text: str) -> ApiKey | None:
    """The key of a line; None for an empty line or a comment (#). Raises ValueError."""
    words = text.partition("#")[0].split()
    if not words:
        return None
    if len(words) < 2:
        raise ValueError("a line is a name, sha256:HASH, and limits")
    name, hashed, *limits = words
    match = _HASH.fullmatch(hashed)
    if match is None:  # not shown: it may be a key
        raise ValueError(f"{check_name(name)}: the second word must be sha256: and 64 hex digits")
    values: dict[str, Any] = {}
    for word in limits:
        limit, _, value = word.partition("=")
        if limit not in LIMITS or limit in values:
            raise ValueError(f"{limit!r} is not a limit, or there twice: {', '.join(LIMITS)}")
        values[limit] = check_limit(limit, value)
    return make_key(check_name(name), match[1], values)


def parse_lines(text: str, source: str) -> list[ApiKey]:
    """The keys in a text, in which no name or hash may occur twice. source: where the text is from,
    for errors. Raises ValueError."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            key = parse_line(line)
            if key is not None:
                check_other(keys, key)
                keys.append(key)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    return keys


def check_other(keys: list[ApiKey], key: ApiKey) -> None:
    """Raises ValueError if one of `keys` has the name or the hash of `key`."""
    for other in keys:
        if other.name == key.name:
            raise ValueError(f"there are two keys named {key.name}")
        if other.digest == key.digest:
            raise ValueError(f"{key.name} and {other.name} have the same hash")
