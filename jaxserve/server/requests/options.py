"""What the config says of how calls are treated, whichever door they come through."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.errors import ConfigError
from jaxserve.server.requests.output_streams import BUFFER_BYTES

MAX_GRACE_S = 86_400
MAX_SHARE = 1000
TEXT, JSON = "text", "json"  # what logs can be
_KIB = 1 << 10
_SECONDS = (("server", "write_timeout_s"), ("engine", "stall_s"))


@dataclass(frozen=True)
class ServerOptions:
    """As `server`, `telemetry` and `engine.stall_s` of configs/base.py have them, with 0 max_calls
    for any number of them. exit_on_failure: whether the server stops once the engine has failed or
    stalled.
    """

    max_calls: int = 0
    stream_buffer_bytes: int = BUFFER_BYTES
    write_timeout_s: float = 30.0
    stall_s: float = 0.0
    exit_on_failure: bool = False
    refuse_late: float = 0.0
    request_log: bool = False
    log_prompts: bool = False
    reflection: bool = True


def check_options(config: Any) -> None:
    """Raises ConfigError for a field that is out of range."""
    server = config.server
    if not 0 <= server.grace_s <= MAX_GRACE_S:
        raise ConfigError(f"server.grace_s: must be 0 to {MAX_GRACE_S}, got {server.grace_s}")
    if server.max_calls < 0:
        raise ConfigError(f"server.max_calls: must be at least 0, got {server.max_calls}")
    if not 64 <= server.stream_buffer_kib <= _KIB**2:
        limits = f"must be 64 to {_KIB**2}, got {server.stream_buffer_kib}"
        raise ConfigError(f"server.stream_buffer_kib: {limits}")
    for section, name in _SECONDS:
        value = config[section][name]
        least = 0 if name == "stall_s" else 0.1
        if not (math.isfinite(value) and least <= value <= MAX_GRACE_S):
            raise ConfigError(f"{section}.{name}: must be {least} to {MAX_GRACE_S}, got {value}")
    telemetry = config.telemetry
    if telemetry.log_format not in (TEXT, JSON):
        given = repr(telemetry.log_format)
        raise ConfigError(f"telemetry.log_format: must be {TEXT} or {JSON}, got {given}")
    if telemetry.log_prompts and not telemetry.request_log:
        problem = "needs telemetry.request_log, whose lines they are in"
        raise ConfigError(f"telemetry.log_prompts: {problem}")
    if not 0 <= server.refuse_late <= MAX_SHARE:
        limits = f"must be 0 to {MAX_SHARE}, got {server.refuse_late}"
        raise ConfigError(f"server.refuse_late: {limits}")
    if server.exit_on_failure not in ("on", "off"):
        given = repr(server.exit_on_failure)
        raise ConfigError(f"server.exit_on_failure: must be on or off, got {given}")


def server_options(config: Any) -> ServerOptions:
    """What a config says that `check_options` has let through."""
    server = config.server
    return ServerOptions(
        max_calls=server.max_calls or config.scheduler.max_queue + config.scheduler.max_rows,
        stream_buffer_bytes=server.stream_buffer_kib * _KIB,
        write_timeout_s=server.write_timeout_s,
        stall_s=config.engine.stall_s,
        exit_on_failure=server.exit_on_failure == "on",
        refuse_late=server.refuse_late,
        request_log=config.telemetry.request_log,
        log_prompts=config.telemetry.log_prompts,
        reflection=server.reflection,
    )
