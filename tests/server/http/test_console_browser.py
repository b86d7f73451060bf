"""The console in a real browser: operations over the real engine under load, the chat over a fake
one that thinks, and of a server that wants a key."""

from __future__ import annotations

import dataclasses
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

from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import CLASSES, SETTINGS
from tests.server.http.openai.test_reasoning import QWEN, says
from tests.server.processes import serve

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
PATIENCE_MS = 60_000
STREAMS = 20
ASKED = (
    {"tier": "best_effort"},
    {"slo": "standard"},
    {"slo": "interactive"},
    {"slo": {"ttft_ms": 40, "tbt_ms": 25, "jct_ms": 900}},  # some of which are missed
)
ANSWER = """<think>
Hm. So.
</think>

Here are **two**:

1. `a`
2. <b>b</b> <script>alert(1)</script> <img src=x onerror=alert(1)> [c](javascript:alert(1))
"""


def _generate(address: str, number: int) -> int:
    """The status of one of many calls."""
    length = 1 + number % 25
    body = {"prompt": "Once upon a time " * length, "max_tokens": 20 + 5 * length}
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, **ASKED[number % len(ASKED)]}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


@pytest.fixture(scope="module")
def loaded() -> Iterator[str]:
    """Where the console is, of a server that many use."""
    over = threading.Event()
    fields = ("scheduler.max_batch_tokens=512", "engine.token_buckets=(512,)")
    flags = [f"--config.{field}" for field in (*fields, "cache.memory_gib=0.03")]
    with serve(*flags) as served:
        found = re.search(r"console at http://(\S+)/", served.printed)
        assert found is not None
        address = found[1]

        def keep_busy(first: int) -> None:
            for number in itertools.count(first, STREAMS + 1):
                if over.is_set():
                    return
                if _generate(address, number) == 429:
                    over.wait(1.0)  # it is asked to come later

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
        playwright.expect.set_options(timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    template, options = ChatTemplate(QWEN), ServerOptions(refuse_late=0.75)
    http = dataclasses.replace(SETTINGS, template=template)
    given: dict[str, Any] = {"http": http, "slo_classes": CLASSES, "options": options}
    with Server(engine, grace_s=0.0, **given) as server:
        yield server
    template.close()


def opened(browser: Any, address: str, width: int = 1280, **options: Any) -> tuple[Any, list[str]]:
    """A page, and what its scripts complain of."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"http://{address}")
    return page, problems


PLACE = "e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]; }"


@pytest.mark.parametrize("width", [390, 820, 1280, 1920])
def test_each_view_fits_whatever_its_width(loaded: str, browser: Any, width: int) -> None:
    page, problems = opened(browser, f"{loaded}/", width)
    expect = playwright.expect
    expect(page.locator("#state")).to_have_text("connected")
    wide = page.evaluate("document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide, "it scrolls sideways"
    assert page.eval_on_selector("#prompt", PLACE)[3] <= 900, "the message is below the fold"
    assert page.locator("#settings").is_visible() == (width >= 1000)
    page.goto(f"http://{loaded}/#operations")
    expect(page.locator("#state")).to_have_text("live")
    assert page.evaluate("document.documentElement.scrollWidth") <= wide, "it scrolls sideways"
    panels = page.eval_on_selector_all("#operations-view > section", f"all => all.map({PLACE})")
    left, right = min(p[0] for p in panels), max(p[1] for p in panels)
    assert left == wide - right <= 24, "the whole width is used"
    columns = {round(panel[0]) for panel in panels}
    assert len(columns) == (1 if width <= 820 else 2 if width < 1500 else 3)
    page.close()
    assert not problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_operations_are_live(
    loaded: str, browser: Any, scheme: str, request: pytest.FixtureRequest
) -> None:
    page, problems = opened(browser, f"{loaded}/#operations", color_scheme=scheme)
    expect = playwright.expect
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#running")).to_have_text(re.compile(r"\d\d"))  # ten at least
    expect(page.locator("#decision")).not_to_have_text(page.inner_text("#decision"))
    expect(page.locator("#attainment")).to_contain_text("standard")
    expect(page.locator("#latency")).to_contain_text("best-effort")
    expect(page.locator("#newcomer")).to_contain_text("Estimate")
    folder = request.config.getoption("--screenshots")
    if folder and scheme == "light":
        expect(page.locator("#attainment")).to_contain_text("own targets")
        page.screenshot(path=str(Path(folder) / "console-light.png"), full_page=True)
    page.close()
    assert not problems


def test_a_model_that_cannot_chat_goes_on_with_a_text(loaded: str, browser: Any) -> None:
    page, problems = opened(browser, f"{loaded}/")
    expect = playwright.expect
    expect(page.locator("#mode")).to_contain_text("no chat template")
    expect(page.locator("#prompt")).to_have_value("Once upon a time")
    expect(page.locator("#system")).to_be_hidden()
    page.fill("#max_tokens", "30")
    page.press("#prompt", "Enter")
    expect(page.locator("article .text")).to_have_text(re.compile("^.{40}"))
    expect(page.locator("article[aria-busy=false] .measures")).to_contain_text("cut off")
    expect(page.locator("#mode")).to_be_visible()
    page.close()
    assert not problems


def test_a_chat_has_thoughts_markdown_and_a_verdict(
    server: Server, engine: FakeEngine, browser: Any
) -> None:
    says(engine.run(), ANSWER)
    page, problems = opened(browser, f"{server.http_address}/")
    expect, last = playwright.expect, page.locator("article:last-child")
    expect(page.locator("#prompt")).to_be_focused()
    page.fill("#ttft_ms", "400")
    page.focus("#prompt")
    page.keyboard.type("Two,")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("please")
    page.keyboard.press("Enter")
    expect(last.locator(".said")).to_have_text("Two,\nplease")
    expect(last.locator(".verdict")).to_have_text("Targets met")
    expect(last.locator(".measures")).to_contain_text("TTFT200 ms of 400 ms")
    expect(last.locator("strong")).to_have_text("two")
    expect(last.locator("li")).to_have_count(2)
    expect(last.locator("li").last).to_have_text(ANSWER.splitlines()[-1].removeprefix("2. "))
    assert page.locator("article :is(script, img, b, a)").count() == 0
    expect(last.locator(".thoughts")).to_be_hidden()
    last.locator("summary").press("Enter")
    expect(last.locator(".thoughts")).to_have_text("Hm. So.")
    said, prompt = (page.eval_on_selector(which, PLACE) for which in (".text", "#prompt"))
    assert said[3] < prompt[2], "answers are above the message"
    page.fill("#ttft_ms", "100")
    last.get_by_role("button", name="Regenerate").click()
    expect(last.locator(".verdict")).to_have_text("Missed: TTFT")
    expect(last.locator(".measures .missed")).to_contain_text("200 ms of 100 ms")
    page.fill("#prompt", "More")
    page.press("#prompt", "Enter")
    expect(page.locator("article[aria-busy=false]")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    assert not problems
    page.close()


def test_an_error_is_shown_where_it_arose(server: Server, engine: FakeEngine, browser: Any) -> None:
    engine.wait_s = Wait(seconds=90.0, alone=0.1)
    says(engine.run(), "Fine.")
    page, _ = opened(browser, f"{server.http_address}/", 390)
    expect, last = playwright.expect, page.locator("article:last-child")
    page.get_by_role("button", name="Settings").click()
    page.fill("#ttft_ms", "400")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(last.get_by_role("alert")).to_contain_text("the first token is expected in 90000 ms")
    engine.wait_s = Wait(seconds=0.1, alone=0.1)
    last.get_by_role("button", name="Try again").click()
    expect(last.locator(".text")).to_have_text("Fine.")
    expect(last.get_by_role("alert")).to_be_hidden()
    page.close()


def test_an_answer_is_stopped_by_a_key(engine: FakeEngine, server: Server, browser: Any) -> None:
    page, problems = opened(browser, f"{server.http_address}/")
    expect = playwright.expect
    page.fill("#ttft_ms", "400")
    page.fill("#prompt", "Count")
    page.press("#prompt", "Enter")
    engine.give_up()
    engine.step(3)
    expect(page.locator("article .text")).to_have_text("w0 w1 w2")
    expect(page.locator("article .verdict")).to_contain_text("Targets given up after")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    engine.wait(lambda: engine.cancelled)
    expect(page.locator("article .measures")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.close()
    assert not problems


def test_the_feed_is_read_while_its_view_is_open(server: Server, browser: Any) -> None:
    page, problems = opened(browser, f"{server.http_address}/")
    expect, feeds, ended = playwright.expect, [], []
    feed = re.compile("console/events")
    page.on("request", lambda one: feed.search(one.url) and feeds.append(one))
    page.on("requestfailed", lambda one: feed.search(one.url) and ended.append(one))
    expect(page.locator("#state")).to_have_text("connected")
    link = page.get_by_role("link", name="Operations")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("live")
    expect(link).to_have_attribute("aria-current", "page")
    assert page.url.endswith("#operations") and len(feeds) == 1 and not ended
    expect(page.locator("#prompt")).to_be_hidden()
    with page.expect_event("requestfailed"):
        page.go_back()
    expect(page.locator("#state")).to_have_text("connected")
    assert len(feeds) == len(ended) == 1
    page.close()
    assert not problems


@pytest.fixture
def keyed(engine: FakeEngine) -> Iterator[Server]:
    access = Access(Keys(fixed=[key("alice")]))
    with Server(engine, grace_s=0.0, http=SETTINGS, access=access) as server:
        engine.run()
        yield server


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(keyed: Server, browser: Any) -> None:
    context, address = browser.new_context(), f"http://{keyed.http_address}/"
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    expect = playwright.expect
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
    context.close()
