"""What configuration the flags of serve.py name, for commands that run the engine themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxserve.config import Config
from jaxserve.configs import base
from jaxserve.server.startup import launch

DEFAULT_CONFIG = Path(base.__file__).parent / "tiny_cpu.py"


def read_config(argv: Sequence[str], own_flags: Sequence[str] = ()) -> Config:
    """argv: --config, --model, --policy, --config.x.y= and so on, nothing else. own_flags: those
    that the command has beside. launch.UsageError or ConfigError in one line."""
    values = flags.FlagValues()
    launch.parse_flags(["jaxserve.bench", *argv], str(DEFAULT_CONFIG), values, own_flags)
    for name in ("port", "http_port", "metrics_port"):
        if values[name].value is not None:
            problem = f"--{name} is for serve.py; the bench opens no port"
            raise launch.UsageError(problem)
    return launch.read_config(values)
