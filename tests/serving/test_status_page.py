"""The status page in a real browser: it shows what runs while it runs, and asks nobody but its own server."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from patience import HANG_S
from playwright.sync_api import Browser, sync_playwright
from server_case import Case, running_server

from kv_execution.runtime import PagedRuntime

pytestmark = pytest.mark.slow
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TEXT = "id => document.getElementById(id).textContent"
RUNS = """() => {
  const number = id => parseFloat(document.getElementById(id).textContent);
  return number("running") === 1 && number("decode_rate") > 0 && number("pages") > 0 && number("active_requests") === 1;
}"""
IDLE = "() => document.getElementById('running').textContent === '0' && parseFloat(pages.textContent) === 0"

INK = {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser is installed: one of {', '.join(NAMES)} has to be")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path)
        yield opened
        opened.close()


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A server whose answers take a few seconds."""
    slow, original = threading.Event(), PagedRuntime.dispatch

    def dispatch(self: PagedRuntime, plan: object) -> object:
        slow.wait(0.05)
        return original(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedRuntime, "dispatch", dispatch)
    with running_server(tmp_path) as running:
        yield running


def test_the_figures_follow_a_request_and_come_from_the_server_alone(
    browser: Browser, case: Case, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": 800, "height": 560})
    page.set_default_timeout(HANG_S * 1000)
    seen = threading.Event()

    def ask_until_seen() -> None:
        while not seen.is_set():
            case.post("/v1/completions", prompt=[5, 6, 7], max_tokens=100, ignore_eos=True)

    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(urlsplit(request.url)))
    page.goto(case.server.url)
    page.wait_for_function(IDLE)
    assert [page.evaluate(TEXT, id) for id in ("model", "readiness", "running")] == ["tiny", "ready", "0"]
    with ThreadPoolExecutor(1) as client:
        asking = client.submit(ask_until_seen)
        try:
            page.wait_for_function(RUNS)
            page.wait_for_function("() => document.getElementById('line').points.length > 4")
        finally:
            seen.set()
        for scheme, ink in INK.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.body).color") == ink
            page.screenshot(path=tmp_path / f"{scheme}.png")
        asking.result()
    page.wait_for_function(IDLE)
    assert {each.netloc for each in asked} == {urlsplit(case.server.url).netloc}
    assert {each.path for each in asked} == {"/", "/status"}
    assert said == []
    case.server.drain()
    page.wait_for_function("() => readiness.textContent === 'not reachable'")
    page.close()
