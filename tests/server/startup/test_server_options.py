"""What the config says of how calls are treated."""

from __future__ import annotations

import math

import pytest

from jaxserve.config import Config, ConfigError
from jaxserve.server.requests.options import ServerOptions, server_options


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("server.grace_s", -1.0, "must be 0 to 86400, got -1"),
        ("server.max_calls", -1, "must be at least 0, got -1"),
        ("server.stream_buffer_kib", 63, "must be 64 to 1048576, got 63"),
        ("server.write_timeout_s", 0.0, "must be 0.1 to 86400, got 0"),
        ("server.write_timeout_s", math.nan, "must be 0.1 to 86400, got nan"),
        ("engine.stall_s", -1.0, "must be 0 to 86400, got -1"),
        ("engine.stall_s", math.inf, "must be 0 to 86400, got inf"),
        ("telemetry.log_format", "xml", "must be text or json, got 'xml'"),
        ("telemetry.log_prompts", True, "needs telemetry.request_log, whose lines they are in"),
        ("server.refuse_late", -0.5, "must be 0 to 1000, got -0.5"),
        ("server.refuse_late", math.nan, "must be 0 to 1000, got nan"),
        ("server.exit_on_failure", "yes", "must be on or off, got 'yes'"),
    ],
)
def test_what_is_out_of_range_is_one_line(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}: {words}") as error:
        Config().with_fields(**{path.replace(".", "__"): value})
    assert "\n" not in str(error.value)


def test_the_defaults_bound_all_that_can_grow() -> None:
    config = Config()
    assert server_options(config) == ServerOptions(
        max_calls=config.scheduler.max_queue + config.scheduler.max_rows,
        stream_buffer_bytes=1 << 20,
        write_timeout_s=30.0,
        stall_s=60.0,
        exit_on_failure=True,
        refuse_late=0.75,
        request_log=False,
        reflection=True,
    )
    assert server_options(config.with_fields(server__max_calls=7)).max_calls == 7


def test_the_process_stays_where_the_config_says_so() -> None:
    config = Config().with_fields(server__exit_on_failure="off")
    assert not server_options(config).exit_on_failure
