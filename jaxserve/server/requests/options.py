"""How every frontend treats calls, from the config."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.config import Config
from jaxserve.server.requests.output_streams import BUFFER_BYTES
from jaxserve.server.requests.pooling.scoring import NO_TOKENS, Scoring, load_scoring

_HOUR_S = 3600.0


@dataclass(frozen=True)
class ResponseLimits:
    """Limits on stored responses.

    Attributes:
        count: most responses.
        bytes: bytes of all of them; 0 stores none.
        keep_s: seconds after which a response is deleted.
        key_share: share of both that an API key may have.
    """

    count: int = 10_000
    bytes: int = 256 << 20
    keep_s: float = 86_400.0
    key_share: float = 0.25


@dataclass(frozen=True)
class ServerOptions:
    """How every frontend treats calls, mostly as in the config's `server` and `telemetry`.

    Attributes:
        max_calls: calls open at once; 0 is any number.
        stream_buffer_bytes: output that may wait for the reader of one call.
        write_timeout_s: seconds that a client may take to read a message.
        stall_s: seconds without a finished step after which an engine with requests counts as
            stalled; 0 never.
        exit_on_failure: whether the server stops once the engine has failed or stalled.
        refuse_late: as `server.refuse_late`; 0 refuses nobody.
        request_log: whether to log a line for each call.
        log_prompts: whether those lines include prompts and generated texts.
        reflection: whether to offer gRPC server reflection.
        lora_root: as `lora.root`; "" loads no adapters over HTTP.
        responses: limits on stored responses.
        scoring: how pairs of texts are scored.
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
    lora_root: str = ""
    responses: ResponseLimits = field(default_factory=ResponseLimits)
    scoring: Scoring = NO_TOKENS


def server_options(config: Config) -> ServerOptions:
    """The options in a config. Raises ConfigError if a file cannot be used."""
    server = config.server
    return ServerOptions(
        max_calls=server.max_calls or config.scheduler.max_queue + config.scheduler.max_rows,
        stream_buffer_bytes=server.stream_buffer_kib << 10,
        write_timeout_s=server.write_timeout_s,
        stall_s=config.engine.stall_s,
        exit_on_failure=server.exit_on_failure == "on",
        refuse_late=server.refuse_late,
        request_log=config.telemetry.request_log,
        log_prompts=config.telemetry.log_prompts,
        reflection=server.reflection,
        lora_root=config.lora.root,
        responses=ResponseLimits(
            server.response_count,
            server.response_mib << 20,
            server.response_keep_hours * _HOUR_S,
            server.response_key_share,
        ),
        scoring=load_scoring(server.score_template, server.score_tokens),
    )
