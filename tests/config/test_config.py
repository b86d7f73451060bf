"""The configuration is one tree: what it is made of, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
from ml_collections import ConfigDict

from jaxserve.config import Config, ConfigError
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.config.tree import DEFAULTS, field_docs
from jaxserve.configs import base


def test_config_dict_has_the_defaults_and_makes_the_tree_again() -> None:
    assert config_from_config_dict(base.get_config()) == Config()


def test_other_values_leave_the_rest_and_the_first_tree_as_they_are() -> None:
    first = Config()
    other = first.with_fields(scheduler__max_rows=7, scheduler__params={"watermark": "0.1"})
    assert (other.scheduler.max_rows, other.scheduler.params) == (7, {"watermark": "0.1"})
    assert other.with_fields(scheduler__max_rows=32, scheduler__params={}) == first == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.scheduler.max_rows = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="rows: there is no such field; fields are named section"):
        first.with_fields(rows=7)


def test_it_crosses_to_other_processes() -> None:
    config = Config().with_fields(server__slo_classes={"mine": "ttft=1s"})
    assert pickle.loads(pickle.dumps(config)) == config


def test_types_are_those_of_base_py() -> None:
    for path, wrong in (("model.seed", True), ("model.path", 3), ("engine.overlap", 1)):
        config = ConfigDict(base.get_config().to_dict(), type_safe=False)
        section, field = path.split(".")
        config[section][field] = wrong
        with pytest.raises(ConfigError, match=f"{path}: must be"):
            config_from_config_dict(config)


def test_every_field_has_a_docstring() -> None:
    found = {
        f"{section}.{name}": text
        for section in Config().as_dict()
        for name, text in field_docs(section).items()
    }
    assert list(found) == list(DEFAULTS)
    assert [path for path, text in found.items() if not text] == []


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
