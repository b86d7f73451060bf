"""The console in a real browser, over the real engine under load."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes import serve

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PATIENCE_MS = 60_000
STREAMS = 20


def _generate(address: str, number: int) -> None:
    fields: dict[str, Any] = {"tier": "best_effort"} if number % 3 == 0 else {"slo": "standard"}
    length = 1 + number % 25
    body = {"prompt": "Once upon a time " * length, "max_tokens": 20 + 5 * length, **fields}
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.getresponse().read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def loaded() -> Iterator[str]:
    """Where the console is, of a server that many use."""
    over = threading.Event()
    fields = ("scheduler.max_batch_tokens=512", "engine.token_buckets=(512,)")
    flags = [f"--config.{field}" for field in (*fields, "cache.memory_gib=0.03")]
    with serve("--policy=bros", *flags) as served:
        found = re.search(r"console at http://(\S+)/", served.printed)
        assert found is not None
        address = found[1]

        def keep_busy(first: int) -> None:
            for number in itertools.count(first, STREAMS):
                if over.is_set():
                    return
                _generate(address, number)

        threads = [threading.Thread(target=keep_busy, args=(k,)) for k in range(STREAMS)]
        for thread in threads:
            thread.start()
        yield address
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 820, 1180, 1920])
def test_the_page_is_in_the_middle_whatever_its_width(
    loaded: str, browser: Any, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"http://{loaded}/")
    playwright.expect(page.locator("#state")).to_have_text("live", timeout=PATIENCE_MS)
    place = "e => { const r = e.getBoundingClientRect(); return [r.left, r.right]; }"
    left, right = page.eval_on_selector("main", place)
    assert page.eval_on_selector("header", place) == [left, right]
    seen = page.evaluate("document.documentElement.clientWidth")
    assert abs(left - (seen - right)) <= 1 and right - left == min(seen, 1180)
    sections = page.eval_on_selector_all("section", f"all => all.map({place})")
    assert all(left <= start < end <= right for start, end in sections)
    assert page.evaluate("document.documentElement.scrollWidth") <= seen, "it scrolls sideways"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_values_change_and_a_prompt_streams(
    loaded: str, browser: Any, scheme: str, request: pytest.FixtureRequest
) -> None:
    page = browser.new_page(viewport={"width": 1180, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"http://{loaded}/")
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE_MS)
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#running")).to_have_text(re.compile(r"\d\d"))  # ten at least
    expect(page.locator("#decision")).not_to_have_text(page.inner_text("#decision"))
    expect(page.locator("#attainment")).to_contain_text("standard")
    page.keyboard.press("Tab")  # the whole page can be used without a mouse
    expect(page.locator("#prompt")).to_be_focused()
    page.fill("#prompt", "The little dog")
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_have_text(re.compile("^The little dog.{40}"))
    expect(page.locator("#stop")).to_be_disabled()
    folder = request.config.getoption("--screenshots")
    if folder:
        page.screenshot(path=str(Path(folder) / f"console-{scheme}.png"), full_page=True)
    page.close()
    assert not problems
