"""Chats through a checkpoint's template, which may be anything."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PATIENCE = 60
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def call(address: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    method = "GET" if body is None else "POST"
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


@pytest.mark.slow
def test_a_template_that_loops_stops_neither_health_nor_sigterm(tmp_path: Path) -> None:
    source = "{% if mood %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    fields = ("server.http_port=0", f"model.path={tmp_path}")
    command = [sys.executable, "-m", "tests.server.run_fake_server", "0", *fields]
    with (
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        ThreadPoolExecutor(4) as clients,
    ):
        assert process.stdout is not None
        _, address = (process.stdout.readline().strip() for _ in range(2))
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        looping = {**chat, "chat_template_kwargs": {"mood": True}}

        status, body = call(address, "/tokenize", {**chat, "chat_template_kwargs": {"bad": 1}})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")  # type: ignore[index]
        kwargs = {"chat_template_kwargs": {"messages": []}}
        status, body = call(address, "/v1/chat/completions", {**chat, **kwargs})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs.messages")  # type: ignore[index]

        first = clients.submit(call, address, "/tokenize", looping)
        while not first.done():
            assert call(address, "/health")[0] == 200
        assert first.result()[0] == 400
        assert "more than 2 s of a processor" in json.dumps(first.result()[1])
        assert call(address, "/tokenize", chat)[0] == 200

        rest = [clients.submit(call, address, "/v1/chat/completions", looping) for _ in range(3)]
        assert call(address, "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        for each in rest:
            assert each.exception() is not None or each.result()[0] in (400, 503)
