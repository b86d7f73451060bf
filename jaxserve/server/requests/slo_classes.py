"""SLO classes: named targets in the config, and how a request combines a class with its own
targets. Also what a request says of its program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.config import ConfigError
from jaxserve.sched.request import NO_CLASS, SLO, InvalidRequest, Program, Tier
from jaxserve.sched.slo.classes import SloClassError, parse_terms
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.access.key_file import BEST_EFFORT, SLO_CLASS_NAME, ApiKey
from jaxserve.server.requests.target_headers import MAX_MS, header_targets

MAX_CLASSES = 100  # each is a row of several metrics
_NO_TARGETS = SLO()
_PROGRAM = ("program", "program.deadline", "expected_calls", "program.over")


@dataclass(frozen=True)
class ServiceLevel:
    """What a request asks for, or a class of requests.

    Attributes:
        slo: targets.
        tier: the tier.
        slo_class: name of the class.
        value: as in `Request`; only a class can set it, not a request.
        program_deadline: the class's deadline of programs, in seconds; None without one.
    """

    slo: SLO = _NO_TARGETS
    tier: Tier = Tier.REALTIME
    slo_class: str = NO_CLASS
    value: float = 1.0
    program_deadline: float | None = None

    def with_own(self, slo: SLO, tier: Tier | None) -> ServiceLevel:
        """The level with a request's own targets in place of the class's, and its tier unless that
        is None."""
        own = {name: getattr(slo, name) for name in ALL_TARGETS}
        targets = {name: target for name, target in own.items() if target is not None}
        merged = dataclasses.replace(self.slo, **targets)
        return dataclasses.replace(self, slo=merged, tier=self.tier if tier is None else tier)


def own_targets(milliseconds: Mapping[str, float]) -> SLO:
    """A request's own targets in seconds. milliseconds: targets by the frontends' names, such as
    `ttft_ms`. Raises InvalidRequest, naming the target, for a time that is not positive."""
    for name, value in milliseconds.items():
        if not (math.isfinite(value) and value / 1000 > 0):
            raise InvalidRequest(f"slo.{name}", f"must be a positive, finite time, got {value}")
    return SLO(**{name.removesuffix("_ms"): value / 1000 for name, value in milliseconds.items()})


def said_program(
    name: str | None,
    deadline_ms: float | None,
    expected_calls: int | None,
    over: bool | None,
    names: tuple[str, str, str, str],
) -> Program | None:
    """What a request says of its program; None if it says nothing.

    Args:
        name: the program's id; None if it is not said.
        deadline_ms: its deadline, in milliseconds from its first call; None likewise.
        expected_calls: calls to come after this one; None likewise.
        over: whether this one is the last; None likewise.
        names: the frontend's names of these fields.

    Raises:
        InvalidRequest: If a field is out of range, or there is no id; it names the field.
    """
    if name is None:
        said = (deadline_ms is not None, expected_calls is not None, bool(over))
        for field_name, there in zip(names[1:], said, strict=True):
            if there:
                raise InvalidRequest(field_name, f"is of a program: {names[0]} has to name it")
        return None
    if deadline_ms is not None and not (deadline_ms / 1000 > 0 and deadline_ms <= MAX_MS):
        limits = f"a number of milliseconds, above 0 and at most {MAX_MS:,}"
        raise InvalidRequest(names[1], f"must be {limits}, got {deadline_ms}")
    deadline = None if deadline_ms is None else deadline_ms / 1000
    try:
        return Program(name, deadline, expected_calls, bool(over))
    except InvalidRequest as error:
        renamed: Mapping[str, str] = dict(zip(_PROGRAM, names, strict=True))
        raise error.renamed(renamed[error.field_name]) from None


def check_deadline(program: Program | None, caller: Caller | None, name: str) -> None:
    """Raises InvalidRequest if a program's deadline is tighter than its API key may ask for. name:
    the deadline's, at this frontend."""
    key = None if caller is None else caller.key
    if program is None or program.deadline is None or key is None:
        return
    asked, least = 1000 * program.deadline, key.min_program_ms
    if asked < least:
        problem = f"{asked:g} ms is tighter than key {key.name} may ask for"
        raise InvalidRequest(name, f"{problem}, {least} ms (min_program_ms)")


def requested_level(
    classes: Mapping[str, ServiceLevel],
    slo: SLO,
    tier: Tier | None,
    slo_class: str,
    caller: Caller | None,
) -> ServiceLevel:
    """The service level of a request. The request's own fields come first, then its call's headers,
    then its class, then its API key's defaults for requests without a class; all within the key's
    limits.

    Args:
        classes: the server's classes, by name.
        slo: the request's own targets.
        tier: the request's tier; None without one.
        slo_class: the class that it names; "" without one. NO_CLASS is no class, whatever the key
            says.
        caller: the client; None for the server's own requests.

    Raises:
        InvalidRequest: If there is no such class, a header is not a time, or the tier is too high
            or a target too tight for the key.
    """
    key = None if caller is None else caller.key
    said = header_targets(() if caller is None else caller.target_headers)
    named = slo_class not in ("", NO_CLASS)
    level = find_slo_class(classes, slo_class)
    if key is not None and not named:
        level = _default_level(classes, key) if not slo_class else _with_tier(level, key)
    level = level.with_own(said.slo, None).with_own(slo, tier)
    if key is None:
        return level
    if level.program_deadline is not None:
        longer = max(level.program_deadline, key.min_program_ms / 1000)
        level = dataclasses.replace(level, program_deadline=longer)
    of_headers = {name: where for name, where in said.names.items() if getattr(slo, name) is None}
    return _permitted(level, key, said=named or tier is not None, of_headers=of_headers)


def _default_level(classes: Mapping[str, ServiceLevel], key: ApiKey) -> ServiceLevel:
    """The level of a request that names no class. Targets tighter than the key allows are loosened,
    since the client has not asked for them."""
    level = _with_tier(find_slo_class(classes, key.slo_class), key)
    targets = {name: getattr(level.slo, name) for name in ALL_TARGETS}
    loose = {n: max(t, getattr(key, _bound(n)) / 1000) for n, t in targets.items() if t is not None}
    return dataclasses.replace(level, slo=SLO(**loose))


def _with_tier(level: ServiceLevel, key: ApiKey) -> ServiceLevel:
    tier = Tier[key.default_tier.upper()] if key.default_tier else None
    return level.with_own(_NO_TARGETS, tier)


def _bound(target: str) -> str:
    """The key's limit for a target; both TBT targets have the same limit."""
    return f"min_{target.removeprefix('max_')}_ms"


def _permitted(
    asked: ServiceLevel, key: ApiKey, *, said: bool, of_headers: Mapping[str, str]
) -> ServiceLevel:
    """The requested level, limited to what the API key allows.

    Args:
        asked: the requested level, combined with its class.
        key: the API key.
        said: whether the request names a tier or a class. If not, a tier that is too high is
            lowered. A class's value is lowered to the key's.
        of_headers: the headers that set targets, by target; other targets come from the body or the
            class.

    Raises:
        InvalidRequest: If the tier is too high, or a target too tight.
    """
    if key.tier == BEST_EFFORT and asked.tier is Tier.REALTIME:
        if said:
            raise InvalidRequest("tier", f"key {key.name} may ask for {BEST_EFFORT} only")
        asked = dataclasses.replace(asked, tier=Tier.BEST_EFFORT)
    asked = dataclasses.replace(asked, value=min(asked.value, key.max_value or 1))
    for name in ALL_TARGETS:
        bound = _bound(name)
        target, least = getattr(asked.slo, name), getattr(key, bound)
        if target is not None and 1000 * target < least:
            problem = f"{1000 * target:g} ms is tighter than key {key.name} may ask for"
            where = of_headers.get(name, f"slo.{name}_ms")
            raise InvalidRequest(where, f"{problem}, {least} ms ({bound})")
    return asked


def slo_classes(texts: Mapping[str, object]) -> dict[str, ServiceLevel]:
    """The classes of `server.slo_classes` by name, in alphabetical order. Raises ConfigError,
    naming the class."""
    by_name = dict(sorted(texts.items()))
    if len(by_name) > MAX_CLASSES:
        problem = f"has {len(by_name)} classes; at most {MAX_CLASSES} are allowed"
        raise ConfigError(f"server.slo_classes: {problem}")
    return {name: _parsed(name, text) for name, text in by_name.items()}


def _parsed(name: str, text: object) -> ServiceLevel:
    where = f"server.slo_classes.{name}"
    if not SLO_CLASS_NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, '_' and '-'")
    if name == NO_CLASS:
        raise ConfigError(f"{where}: is what requests without a class are counted as")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: must be text, as 'ttft=1s:tbt=100ms', got {text!r:.40}")
    try:
        slo, tier, value, deadline = parse_terms(where, text)
        return ServiceLevel(slo, tier, name, value, deadline)
    except SloClassError as error:
        raise ConfigError(str(error)) from None


def find_slo_class(classes: Mapping[str, ServiceLevel], name: str) -> ServiceLevel:
    """The class with that name; empty for "" and NO_CLASS. Raises InvalidRequest, which lists the
    classes."""
    if name in ("", NO_CLASS):
        return ServiceLevel()
    if name not in classes:
        known = ", ".join(classes) or "none"
        raise InvalidRequest("slo_class", f"there is no {name!r:.80}; this server has {known}")
    return classes[name]
