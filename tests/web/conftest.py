"""A headless Chromium, and pages in it that fail a test when their scripts do."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# As root, as in a container, Chromium does not start with its sandbox; pages here come from loopback or from a string.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
DEADLINE_MS = 15_000

OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser; skips where there is none. One a module: while it is open no test may run a loop of its own."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium, so pages are not tried (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright (it is in requirements-dev.lock)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[OpenPage]:
    """`open_page(width=…, …)`: a new page in a context of its own. What a script throws, or what a policy or a missing
    file makes the console report as an error, fails the test in the end, but for what is put in `page.expected`."""
    contexts, troubles = [], []

    def open_one(*, width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(DEADLINE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.expected = []
        return page

    yield open_one
    expected = [text for context in contexts for page in context.pages for text in getattr(page, "expected", ())]
    for context in contexts:
        context.close()
    assert [trouble for trouble in troubles if not any(text in trouble for text in expected)] == []
