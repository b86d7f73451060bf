"""The console of a server that wants a key, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PATIENCE_MS = 60_000


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    access = Access(Keys(fixed=[key("alice")]))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        engine.run()
        yield server


@pytest.fixture
def context() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_context()
        browser.close()


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(server: Server, context: Any) -> None:
    page, address = context.new_page(), f"http://{server.http_address}/"
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(address)
    expect(page.locator("#state")).to_have_text("needs an API key")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#refused")).to_have_text("")
    page.keyboard.type("mallory")
    page.keyboard.press("Enter")
    expect(page.locator("#refused")).to_have_text("The server does not know that key.")
    page.fill("#key", "alice")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("connected")
    expect(page.locator("#gate")).to_be_hidden()
    expect(page.locator("#about")).to_contain_text("fake on cpu")
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(page.locator("article .text")).to_have_text(re.compile("w0 w1 w2"))
    page.goto(f"{address}#operations")
    expect(page.locator("#state")).to_have_text("live")
    page.goto(address)
    page.reload()
    expect(page.locator("#state")).to_have_text("connected")
    assert page.url == address and not context.cookies()
    assert page.evaluate("localStorage.length") == 0
    other = context.new_page()
    other.goto(address)
    expect(other.locator("#state")).to_have_text("needs an API key")
    assert not problems
