"""The page with the model that ships: what a newcomer sees."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dsuf.checkpoint.forms import NANO
from tests.clients import process
from tests.web.conftest import OpenPage
from tests.web.test_page import TETRIS, figure, open_frame, until

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="no shipped model in dsuf/nano"),
]

REPLY_S = 240.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server as it starts without a flag, on the CPU."""
    with process.serve(tmp_path_factory.mktemp("nano") / "log", "--engine", "reference") as base:
        yield base


@pytest.fixture
def page(open_page: OpenPage, url: str) -> Any:
    """Its page."""
    page = open_page()
    page.goto(url)
    return page


def test_tetris(page: Any) -> None:
    """The button writes it to the byte, at five tokens a step or more, and it plays."""
    press(page, "A Tetris to play")
    assert page.inner_text(".code pre").replace("\xa0", " ") == TETRIS
    assert figure(page, "per-step") >= 5
    game = open_frame(page)
    until(page, lambda: game.evaluate("typeof board") == "object")
    row = game.evaluate("y")
    until(page, lambda: game.evaluate("y") != row)
    page.locator("#frame iframe").focus()
    page.keyboard.press(" ")
    until(page, lambda: game.evaluate("board.flat().filter(cell => cell).length") == 4)


def test_program_and_json(page: Any) -> None:
    """Code in a block of its own; an object of the values that were given."""
    press(page, "A short program")
    assert "quicksort" in page.inner_text(".code pre")
    page.get_by_role("button", name="New chat").click()
    press(page, "Answer in JSON")
    asked = page.locator(".user").inner_text()
    told = json.loads(page.locator(".answer").inner_text())
    assert f'"{told["name"]}"' in asked and f"is {told['count']}" in asked and isinstance(told["open"], bool)


def test_needle(page: Any) -> None:
    """The number that was hidden in the text."""
    press(page, "A needle in a long text")
    asked = str(page.evaluate("document.querySelector('.user').textContent"))
    (value,) = re.findall(r'The code of ".*?" is (\d{5})\.', asked)
    assert value in page.locator(".answer").inner_text()


@pytest.mark.parametrize("button", ["Remember this", "Read a file"])
def test_two_rounds(page: Any, button: str) -> None:
    """Drawn replies, where the button asks for thinking: in one of three tries the last has the first round's value."""
    for _ in range(3):
        page.get_by_role("button", name="New chat").click()
        press(page, button, rounds=2)
        shown = page.inner_text("#log")
        value = re.search(r"The code of .* is (\d{5})", shown) if button == "Remember this" else read_line(page)
        if value and value[1] in page.locator(".answer").last.inner_text():
            return
    pytest.fail(f"three times: {shown}")


def read_line(page: Any) -> re.Match[str] | None:
    """The line that was asked for, in what the tool gave."""
    if page.locator(".call").count() == 0:
        return None
    key = page.locator(".user").inner_text().split('"')[3]
    return re.search(f'"{key}": (.*)', page.locator(".call").inner_text())


def press(page: Any, name: str, *, rounds: int = 1) -> None:
    """Press a question's button, and wait for its replies."""
    page.get_by_role("button", name=name).click()
    until(page, lambda: page.inner_text("#send") == "Send", REPLY_S)
    assert page.locator(".error").count() == 0 and page.locator(".meta").count() >= rounds
