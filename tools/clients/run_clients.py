"""Runs other people's clients against a server, and writes the results into docs/clients.md.

    python tools/clients/run_clients.py
    python tools/clients/run_clients.py --only=langchain,litellm --model=smollm2

Each client has a script here, its versions in requirements/, and its own environment in
.venv-clients/, made if it is missing or its requirements have changed. The server is in this
process, on a free port, with SmolLM2, or with the model in the box if SmolLM2 is not available.
With --only the page is not changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import Config, ConfigError
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import base, tiny_cpu
from jaxserve.engine.startup.build import build_engine
from jaxserve.server.http.options import http_settings
from jaxserve.server.server import Server
from jaxserve.server.startup.launch import find_checkpoint

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
ENVIRONMENTS, PAGE = ROOT / ".venv-clients", ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- begin: make clients-test -->\n", "<!-- end -->\n"
CLIENTS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "ollama": "ollama",
    "langchain": "langchain-openai",
    "llamaindex": "llama-index-llms-openai-like",
    "instructor": "instructor",
    "pydantic_ai": "pydantic-ai-slim",
    "litellm": "litellm",
}
"""By name, the package whose version is shown."""
TIMEOUT_S = 1200
FIELDS = {
    "server__http_port": 0,
    "model__dtype": "float32",  # texts do not depend on the batch
    "engine__max_model_len": 2048,
    "scheduler__max_rows": 4,
    "cache__memory_gib": 0.3,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a check has failed."""
    args = parse(argv)
    names = args.only.split(",") if args.only else list(CLIENTS)
    for name in names:
        prepare(name)
    config = served(args.model)
    engine = build_engine(config)
    engine.start()
    with Server(engine, grace_s=0.0, http=http_settings(config)) as server:
        info = engine.info()
        results = {name: outcomes(name, f"http://{server.http_address}/v1", info) for name in names}
        left = engine.stats().running
    if not args.only:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(page, info.model, results), encoding="utf-8")
    failed = sum(o["outcome"].startswith("fails") for checks in results.values() for o in checks)
    print(f"{failed} checks failed; {left} requests are left running")
    return int(failed > 0 or left > 0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join(CLIENTS)
    parser.add_argument("--only", default="", help=f"names, separated by commas, of {known}")
    parser.add_argument("--model", default="", help="default: smollm2 if available")
    args = parser.parse_args(argv)
    for name in filter(None, args.only.split(",")):
        if name not in CLIENTS:
            parser.error(f"--only: must be of {known}; got {name}")
    return args


def served(model: str) -> Config:
    """The configuration of the server."""
    try:
        fields = {"model__path": model or "smollm2", **FIELDS}
        return find_checkpoint(config_from_config_dict(base.get_config(), fields))
    except ConfigError as error:
        if model:
            raise
        print(f"using the model in the box: {error}", file=sys.stderr)
        less = {**FIELDS, "engine__max_model_len": 0}
        return find_checkpoint(config_from_config_dict(tiny_cpu.get_config(), less))


def python(name: str) -> Path:
    """The Python of a client's environment."""
    return ENVIRONMENTS / name / "bin" / "python"


def prepare(name: str) -> None:
    """Makes a client's environment if it is missing."""
    wanted = HERE / "requirements" / f"{name}.txt"
    ready = ENVIRONMENTS / name / "requirements.txt"
    if ready.exists() and ready.read_text() == wanted.read_text():
        return
    print(f"installing {name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / name)], check=True)
    pip = [str(python(name)), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", "-r", str(wanted)], check=True)
    ready.write_text(wanted.read_text())


def outcomes(name: str, url: str, info: Any) -> list[dict[str, str]]:
    """The outcomes of a client's checks."""
    script = HERE / f"{name}_client.py"
    env = {**os.environ, "BASE_URL": url, "MODEL": info.model}
    env = {key: value for key, value in env.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [str(python(name)), str(script)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(), -1
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"what"')]
    if code not in (0, 1) or not results:
        outcome = f"fails: the script has ended with {code}"
        results.append({"what": "all checks", "outcome": outcome})
    for result in results:
        print(f"{name}: {result['what']}: {result['outcome']}", flush=True)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return results


def version(name: str) -> str:
    """The version of a client."""
    code = f"import importlib.metadata as m; print(m.version({CLIENTS[name]!r}))"
    command = [str(python(name)), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def with_table(page: str, model: str, found: dict[str, list[dict[str, str]]]) -> str:
    """The page with these outcomes."""
    rows = "".join(
        f"| {CLIENTS[name]} {version(name)} | {_cell(each['what'])} | {_cell(each['outcome'])} |\n"
        for name, checks in found.items()
        for each in checks
    )
    head = f"Served: {model}.\n\n| client | check | outcome |\n|---|---|---|\n"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{head}{rows}{END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
