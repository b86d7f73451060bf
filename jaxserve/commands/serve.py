"""Serves a model over gRPC and HTTP: flags -> config -> engine -> server.

jaxserve serve                          # the model in the box
jaxserve serve /path/to/checkpoint --config.scheduler.max_rows=16
jaxserve serve Qwen/Qwen2.5-0.5B
jaxserve serve smollm2                  # a chat model of 135M, downloaded once
jaxserve serve model.gguf
jaxserve serve opt_125m_cpu
jaxserve serve --help
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence

from jaxserve.config import TEXT, ConfigError
from jaxserve.hosts.process_exit import end_process
from jaxserve.hosts.rank import GroupError, find_rank
from jaxserve.server.access.options import access_settings
from jaxserve.server.batches.options import open_batches
from jaxserve.server.http.options import http_settings
from jaxserve.server.requests.options import server_options
from jaxserve.server.startup import launch
from jaxserve.server.startup.process import announce, complain, run_server
from jaxserve.server.telemetry.logs import log_to_stderr
from jaxserve.server.telemetry.trace_options import open_traces

_STARTED = time.monotonic()


def main(argv: Sequence[str], name: str = "jaxserve serve") -> int:
    """Serves until SIGTERM or ^C.

    Args:
        argv: the arguments, without the program's name.
        name: prefix of error messages.

    Returns:
        The exit code: 0 after SIGTERM or ^C, 1 if the engine or the group of hosts has failed, 2
            for a flag or a config that cannot be served.
    """
    log_to_stderr()
    form, rank = TEXT, None
    try:
        argv = [name, *launch.with_model(argv)]
        answer = launch.answer(argv, launch.preset_path("tiny_cpu"))
        if answer is not None:
            print(answer)
            return 0
        config = launch.read_config()
        form = config.telemetry.log_format
        log_to_stderr(form)
        config = launch.find_checkpoint(config)
        rank = find_rank(config.mesh)
        if rank is not None and not rank.leads:
            from jaxserve.engine.startup.follower_executor import (
                follow_leader,
                leave_signals_to_the_leader,
            )

            follow_leader(config, rank, leave_signals_to_the_leader)
            return 0
        launch.check_ports(config.server)
        http, access = http_settings(config), access_settings(config.server)
        options = server_options(config)
        with (
            open_batches(config.server, config.scheduler) as batches,
            open_traces(config.telemetry.otlp_endpoint, lambda: engine.info().model) as traces,
        ):
            # Imported late: jax takes seconds, and everything above should answer at once.
            from jaxserve.engine.startup.build import build_engine

            engine = build_engine(config, rank=rank, all_steps=False)
            engine.start()

            def on_ready(server: launch.Server) -> None:
                seconds = time.monotonic() - _STARTED
                chats = http is not None and http.template.own
                announce(launch.ready_text(engine.info(), server, seconds, chats=chats), form)

            code = run_server(engine, config, options, on_ready, batches, http, access, traces)
        if code and rank is not None:
            end_process(code)  # the other hosts have ended, and JAX would wait for them
        return code
    except (launch.UsageError, ConfigError, GroupError) as error:
        complain(f"{name}: {error}", form)
        code = 1 if isinstance(error, GroupError) else 2
        if rank is not None:
            end_process(code)  # JAX would wait for the other hosts
        return code
    except Exception:
        if rank is None:
            raise
        traceback.print_exc()
        end_process(1)
    finally:
        gc.enable()
