"""What sentence-transformers' files say, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.request import USUAL_POOLING, PoolingParams, PoolingType
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.sentence_transformers import load_pooling

OLD, NEW = "sentence_transformers.models", "sentence_transformers.base.modules.some"


def write(folder: Path, kinds: list[str], config: Any, prefix: str = OLD) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"{prefix}.{kind}", "path": paths.get(kind, "3")} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_without_such_files(tmp_path: Path) -> None:
    assert load_pooling(tmp_path) == load_pooling("") == USUAL_POOLING
    assert PoolingParams(PoolingType.LAST, normalize=True) == USUAL_POOLING


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, PoolingType.LAST),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, PoolingType.MEAN),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, PoolingType.CLS),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, PoolingType.LAST),
        ({"pooling_mode": "mean"}, PoolingType.MEAN),
    ],
)
def test_both_spellings(tmp_path: Path, config: dict[str, Any], expected: PoolingType) -> None:
    for prefix in (OLD, NEW):
        plain = write(tmp_path, ["Transformer", "Pooling"], config, prefix)
        assert load_pooling(plain) == PoolingParams(expected, normalize=False)
        long = write(tmp_path, ["Transformer", "Pooling", "Normalize"], config, prefix)
        assert load_pooling(long) == PoolingParams(expected, normalize=True)


@pytest.mark.parametrize(
    ("kinds", "config", "said"),
    [
        (["Pooling"], {"pooling_mode_max_tokens": True}, "1_Pooling/config.json: pooling.*max"),
        (["Pooling"], {}, "pooling"),
        (["Pooling"], {"pooling_mode": ["mean", "cls"]}, "mean, cls|known"),
        (["Pooling"], {"pooling_mode": 10**400}, "known: lasttoken, mean, cls"),
        (["Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        (["Pooling"], [1], "does not hold a JSON object"),
        (["Transformer", "Dense"], {}, "module .*Dense.* is not supported"),
    ],
)
def test_what_is_refused(tmp_path: Path, kinds: list[str], config: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_pooling(write(tmp_path, kinds, config))


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [1],
        ["a"],
        [{"type": "a.Pooling"}],
        [{"type": 1, "path": "a"}],
        [{"type": "a.Pooling", "path": "../elsewhere"}],
        [{"type": "a.Pooling", "path": "/etc"}],
    ],
)
def test_modules_that_are_none(tmp_path: Path, modules: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"modules\.json: must be a list of modules"):
        load_pooling(tmp_path)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "modules.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_pooling(tmp_path)
