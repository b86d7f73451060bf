"""Keys of a server in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.commands.keys import main
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE
from tests.server.grpc.test_grpc_shutdown import fake_server
from tests.server.processes import refused


def knows(address: str, secret: str) -> bool:
    with Client(address, api_key=secret) as client:
        try:
            return client.info(timeout=PATIENCE).model == "fake"
        except ServerError as error:
            assert error.code == "UNAUTHENTICATED"
            return False


def test_keys_come_and_go_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    path.write_text(key("alice").line() + "\n")
    with fake_server(0, f"server.api_keys={path}") as server:
        assert knows(server.client.address, "alice") and not knows(server.client.address, "bob")
        assert main(["new", "bob", f"--file={path}"]) == 0
        bob = capsys.readouterr().out.strip()
        while not knows(server.client.address, bob):
            time.sleep(0.1)  # within a second
        assert main(["revoke", "alice", f"--file={path}"]) == 0
        while knows(server.client.address, "alice"):
            time.sleep(0.1)
        assert knows(server.client.address, bob)
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == os.EX_OK


def test_serve_py_refuses_what_cannot_be_used_in_one_line() -> None:
    """All that there is: test_keys.py, test_tls.py, ../http/test_cors.py."""
    line = refused(JAXSERVE_API_KEYS="alice jx-secret")
    assert line.startswith("serve.py: JAXSERVE_API_KEYS, line 1: alice: ")
    assert "jx-secret" not in line
