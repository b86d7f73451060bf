"""tools/clients: how the scripts of other people's clients are run, and their outcomes told."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

FOLDER = Path(__file__).parents[3] / "tools" / "clients"


sys.path.append(str(FOLDER))  # a folder of scripts, not a package
run = importlib.import_module("run_clients")

SCRIPT = f"""
import sys
sys.path.append({str(FOLDER)!r})
from checks import BASE_URL, MODEL, check, main

@check("good")
def good():
    assert BASE_URL.startswith("http://") and MODEL == "fake"
    return "so it | says"

@check("wrong")
async def wrong():
    raise ValueError("at all\\nmore")

@check("absent", needs="/v1/nothing")
def absent():
    raise AssertionError

main()
"""


def test_every_client_has_a_script_and_its_versions() -> None:
    scripts = {path.name.removesuffix("_client.py") for path in FOLDER.glob("*_client.py")}
    pins = {path.stem: path.read_text().splitlines() for path in FOLDER.glob("requirements/*.txt")}
    assert scripts == set(pins) == set(run.CLIENTS)
    for name, lines in pins.items():
        assert all(re.fullmatch(r"[a-z0-9\[\]-]+==[0-9.]+", line) for line in lines), name
        assert any(line.split("=")[0].split("[")[0] == run.CLIENTS[name] for line in lines)


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openai_client.py").write_text(SCRIPT)
    (tmp_path / "litellm_client.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "python", lambda name: Path(sys.executable))
    monkeypatch.setattr(run, "version", lambda name: "1.0")
    with Server(FakeEngine(), grace_s=0.0, http=SETTINGS) as server:
        url, info = f"http://{server.http_address}/v1", SimpleNamespace(model="fake")
        found = {name: run.outcomes(name, url, info) for name in ("openai", "litellm")}
    assert [each["outcome"] for each in found["openai"]] == [
        "works: so it | says",
        "fails: ValueError: at all",
        "not tried: no /v1/nothing",
    ]
    (ended,) = found["litellm"]
    assert ended["outcome"] == "fails: the script has ended with 1"
    page = run.with_table(f"A\n{run.BEGIN}old\n{run.END}B\n", "fake", found)
    assert page.startswith(f"A\n{run.BEGIN}Served: fake.\n") and page.endswith(f"{run.END}B\n")
    assert "old" not in page and "| openai 1.0 | good | works: so it \\| says |" in page
    assert run.with_table(page, "fake", found) == page


def test_the_page_has_a_place_for_them() -> None:
    page = run.PAGE.read_text(encoding="utf-8")
    assert page.count(run.BEGIN) == page.count(run.END) == 1
