"""The unit for systemd is one, and its command is one of the server."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from jaxserve.commands import cli
from jaxserve.config import Config
from jaxserve.server import server as runner
from jaxserve.server.startup import launch

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "systemd" / "jaxserve.service"
BAD_CONFIG = 2


def parts(text: str) -> Any:
    """The sections of a unit; of settings that come several times the last."""
    found = configparser.RawConfigParser(strict=False, comment_prefixes=("#", ";"))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string(re.sub(r"\\\n\s*", "", text))
    return found


def command(text: str, **variables: str) -> list[str]:
    """As systemd splits it: a word that is $NAME is all of its words."""
    words = shlex.split(parts(text)["Service"]["ExecStart"])
    return [
        part
        for word in words
        for part in (shlex.split(variables[word[1:]]) if word.startswith("$") else [word])
    ]


def served(text: str, **variables: str) -> Config:
    """The config that its command makes. Raises UsageError, ConfigError."""
    program, name, *arguments = command(text, **variables)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts and name in cli.COMMANDS
    values = flags.FlagValues()
    given = ["jaxserve serve", *launch.with_model(arguments)]
    launch.parse_flags(given, launch.preset_path("tiny_cpu"), values)
    return launch.read_config(values)


def test_its_command_is_one_of_the_server() -> None:
    text = UNIT.read_text()
    config = served(text, MODEL="", FLAGS="")
    assert config == served(text, MODEL="tiny_cpu", FLAGS="")
    config = served(text, MODEL="opt_125m_cpu", FLAGS="--policy=bros --config.server.host=0.0.0.0")
    assert (config.scheduler.policy, config.server.host) == ("bros", "0.0.0.0")
    with pytest.raises(launch.UsageError, match="unknown field"):
        served(text.replace("batch_dir", "batch_dri"), MODEL="", FLAGS="")


def test_it_writes_where_it_may() -> None:
    """The rest is read-only to it."""
    text = UNIT.read_text()
    service, config = parts(text)["Service"], served(text, MODEL="", FLAGS="")
    assert service["ProtectSystem"] == "strict"
    state, cache = (
        f"/var/lib/{service['StateDirectory']}",
        f"/var/cache/{service['CacheDirectory']}",
    )
    assert Path(config.server.batch_dir).is_relative_to(state)
    assert Path(config.engine.compilation_cache_dir).is_relative_to(cache)
    told = dict(
        re.findall(r"(\w+)=(/\S+)", " ".join(re.findall(r"^Environment=(.+)$", text, re.M)))
    )
    assert told.keys() == {"HOME", "HF_HOME", "NUMBA_CACHE_DIR"}
    assert all(Path(path).is_relative_to(state) or path.startswith(cache) for path in told.values())


def test_it_is_started_again_as_far_as_that_helps() -> None:
    """It ends with 2 for what cannot be served."""
    service, config = (
        parts(UNIT.read_text())["Service"],
        served(UNIT.read_text(), MODEL="", FLAGS=""),
    )
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(BAD_CONFIG)
    assert config.server.exit_on_failure == "on"
    patience = config.server.grace_s + runner._MAX_FLUSH_S + runner._CLOSE_S
    assert float(service["TimeoutStopSec"]) > patience


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("", "", ""),
        ("RestartSec=5", "RestartSec=soon", "soon"),
        ("LimitNOFILE", "LimitNOFILES", "LimitNOFILES"),
        ("Type=exec", "Type=execute", "Type"),
    ],
)
def test_systemd_takes_it(tmp_path: Path, before: str, after: str, complaint: str) -> None:
    """With a program that is here."""
    text = UNIT.read_text().replace(before, after) if before else UNIT.read_text()
    (program, *_) = command(text, MODEL="", FLAGS="")
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        env={**os.environ, "SYSTEMD_LOG_COLOR": "0"},
        capture_output=True,
        text=True,
    )
    assert (complaint in done.stderr) if complaint else (done.returncode, done.stderr) == (0, "")
