"""How calls are treated at every frontend, from the config."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import Config
from jaxserve.server.requests.output_streams import BUFFER_BYTES


@dataclass(frozen=True)
class ServerOptions:
    """How calls are treated at every frontend, mostly as in the config's `server` and `telemetry`.

    Attributes:
        max_calls: calls open at once; 0 is any number.
        stream_buffer_bytes: output that may wait for the reader of one call.
        write_timeout_s: seconds that a client may take to read a message.
        stall_s: seconds without a finished step, though there are requests, after which the engine
            counts as stalled; 0 never.
        exit_on_failure: whether the server stops once the engine has failed or stalled.
        refuse_late: as `server.refuse_late`; 0 refuses nobody.
        request_log: whether to log a line for each call.
        log_prompts: whether those lines have prompts and generated texts.
        reflection: whether to offer gRPC server reflection.
        lora_root: as `lora.root`; "" loads no adapters over HTTP.
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


def server_options(config: Config) -> ServerOptions:
    """The options that a config has."""
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
    )
