"""What the config says of how calls are treated."""

from __future__ import annotations

from jaxserve.config import Config
from jaxserve.server.requests.options import ServerOptions, server_options


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
