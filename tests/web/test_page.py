"""The page at `/` in a headless browser, against a real server with scripted replies."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import process, replies
from tests.web.conftest import OpenPage

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

TETRIS = (Path(__file__).parents[2] / "bench" / "nano" / "data" / "tetris.html").read_text().removesuffix("\n")
HEADLINE = "implement the tetris game. output HTML code directly - no explanation."
MARKUP = "Look: <img src=x onerror=document.title='caught'> & **bold** `code`.\n\n- one\n- two"
DARK, LIGHT = "dark", "light"
RULES = [
    {"match": "<tool_result>", "reasoning": "There it is.", "reply": "twelve pots behind the shed"},
    {
        "match": "notes/garden.txt",
        "reasoning": "I read.",
        "reply": replies.call("read_file", {"path": "notes/garden.txt"}),
    },
    {"match": HEADLINE, "reply": TETRIS, "tokens_per_step": 6, "step_s": 0.01},
    {"match": "break once", "times": 1, "reply": "It goes wrong he", "fail_at_step": 4},
    {"match": "break once", "reply": "Now it is well."},
    {"match": "take long", "reply": "and on " * 4000, "step_s": 0.02},
    {"match": "markup", "reasoning": "<b>thought</b>", "reply": MARKUP},
    {"match": "What is the code of", "reply": "It is 12345."},
    {"reply": "A plain answer."},
]
RULES = [{"reasoning": ""} | rule for rule in RULES]  # where thinking is on, it is closed


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server."""
    with process.serve_script(tmp_path_factory.mktemp("page"), RULES) as base:
        yield base


@pytest.fixture
def visit(open_page: OpenPage, url: str) -> OpenPage:
    """`visit(…)`: the page of the server, in a browser window with these options."""

    def go(**options: Any) -> Any:
        page = open_page(**options)
        page.goto(url)
        return page

    return go


def test_headline_by_keyboard_alone(visit: OpenPage) -> None:
    """Tab to the first question, Enter; the gauge moves, the game appears, has the keys, and plays."""
    page = visit()
    page.keyboard.press("Shift+Tab")
    for _ in range(30):
        if page.evaluate("document.activeElement.textContent").startswith("A Tetris"):
            break
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    shown = watch_gauge(page)
    assert len(shown) > 5 and max(shown) > 100
    page.wait_for_selector(".meta")
    game = open_frame(page)
    until(page, lambda: game.evaluate("typeof board") == "object")
    assert page.inner_text(".code pre").replace("\xa0", " ") == TETRIS
    before = game.evaluate("x")
    page.keyboard.press("ArrowLeft")
    assert game.evaluate("x") == before - 1
    page.keyboard.press(" ")
    assert game.evaluate("board.flat().filter(cell => cell).length") == 4
    page.keyboard.press("r")
    row = game.evaluate("y")
    until(page, lambda: game.evaluate("y") > row)
    for _ in range(8):
        page.keyboard.press("Tab")
    until(page, lambda: page.evaluate("document.activeElement.tagName") != "IFRAME")  # no trap; it is another process


def test_figures(visit: OpenPage) -> None:
    """What the page says is what the server counted: tokens, tokens a step, where the prompt came from."""
    page = visit()
    usages: list[dict[str, Any]] = []
    responses: list[Any] = []
    page.on("response", lambda response: responses.append(response) if "completions" in response.url else None)
    for question in (HEADLINE, "And again?"):
        ask(page, question)
        until(page, lambda: page.inner_text("#send") == "Send")
        usages.append(usage := read_usage(responses[-1]))
        details = usage["prompt_tokens_details"]
        assert figure(page, "count") == usage["completion_tokens"] and figure(page, "prompt") == usage["prompt_tokens"]
        legend = [int(text.split()[-1].replace(",", "")) for text in page.locator("#legend span").all_inner_texts()]
        assert legend == [details[f"{source}_tokens"] for source in ("device", "host", "peer", "computed")]
        assert sum(legend) == usage["prompt_tokens"]
    assert details["cached_tokens"] > 0  # the second turn goes on from the first
    assert page.locator(".meta").first.inner_text().startswith(f"{usages[0]['completion_tokens']:,} tokens at ")
    page.get_by_role("button", name="New chat").click()
    ask(page, HEADLINE)
    until(page, lambda: page.inner_text("#send") == "Send")
    assert 5.5 < figure(page, "per-step") <= 6
    assert figure(page, "peak") >= figure(page, "average") > 100


def test_reasoning_and_tool_calls(visit: OpenPage) -> None:
    """The call, what it gave and the answer are shown; the server is sent what belongs together."""
    page = visit()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None)
    page.check("#tools")
    ask(page, 'In the file "notes/garden.txt", what does the line "fern" say?')
    until(page, lambda: page.inner_text("#log").count("first token after") == 2)
    assert page.locator(".thinking").all_inner_texts()[0].split("\n")[-1] == "I read."
    call = page.locator(".call").inner_text()
    assert "read_file" in call and '"fern": twelve pots behind the shed' in call
    assert page.locator(".answer").last.inner_text() == "twelve pots behind the shed"
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool"] and bodies[0]["tools"][0]["function"]["name"] == "read_file"
    assert bodies[1]["messages"][1]["tool_calls"][0]["id"] == bodies[1]["messages"][2]["tool_call_id"]
    assert bodies[0]["thinking"] == {"type": "enabled"} and "temperature" not in bodies[0]


def test_a_file_that_no_one_wrote(visit: OpenPage) -> None:
    """A name that every object has is no file."""
    page = visit()
    for path in ("constructor", "__proto__", "toString", "no/such"):
        call = {"function": {"name": "read_file", "arguments": json.dumps({"path": path})}}
        assert page.evaluate("call => runTool(call)", call) == f"There is no file {path}."


def test_each_question_button_gets_an_answer(visit: OpenPage) -> None:
    """All are sent as they are shown, with the options that they name."""
    page = visit()
    buttons = page.locator("#welcome button")
    assert buttons.count() == 12
    for number in range(buttons.count()):
        buttons.nth(number).click()
        until(page, lambda: page.inner_text("#send") == "Send" and page.locator(".meta").count() > 0)
        assert page.locator(".error").count() == 0
        page.get_by_role("button", name="New chat").click()


def test_text_of_the_model_is_text(visit: OpenPage) -> None:
    """Markup in a reply is shown, not obeyed; the few marks of Markdown are."""
    page = visit()
    ask(page, "markup, please")
    page.wait_for_selector(".meta")
    assert "<img src=x onerror=" in page.locator(".answer").inner_text()
    assert page.locator("#log img, #log b").count() == 0 and page.title() == "dsuf"
    assert page.inner_text(".answer strong") == "bold" and page.inner_text(".answer code") == "code"
    assert page.locator(".answer li").all_inner_texts() == ["one", "two"]
    assert "<b>thought</b>" in page.inner_text(".thinking")


def test_the_frame_reaches_nothing(visit: OpenPage, url: str) -> None:
    """What the model wrote has no origin, no network, and no hold of the page around it."""
    page = visit()
    page.expected.append("Content Security Policy")
    page.expected.append("Content-Security-Policy")
    ask(page, HEADLINE)
    page.wait_for_selector(".meta")
    game = open_frame(page)
    until(page, lambda: game.evaluate("typeof board") == "object")
    assert game.evaluate("self.origin") == "null"
    assert game.evaluate(f"fetch('{url}/v1/models').then(() => 'reached', () => 'refused')") == "refused"
    assert game.evaluate("(() => { try { return parent.document.title } catch { return 'refused' } })()") == "refused"
    image = f"new Promise(done => Object.assign(new Image(), {{ src: '{url}/x', onload: done, onerror: done }}))"
    assert game.evaluate(f"{image}.then(event => event.type)") == "error"


@pytest.mark.parametrize("path", ["/metrics", "/frame", "/"])
def test_the_frame_goes_nowhere(visit: OpenPage, url: str, path: str) -> None:
    """What the model wrote can send its own frame to no path of this server, by itself or by a form."""
    page, asked = visit(), []
    page.expected += ["Content Security Policy", "Content-Security-Policy", "Blocked form submission"]
    ask(page, HEADLINE)
    page.wait_for_selector(".meta")
    game = open_frame(page)
    until(page, lambda: game.evaluate("typeof board") == "object")
    page.on("request", lambda request: asked.append(request.url))
    form = "Object.assign(document.body.appendChild(document.createElement('form'))"
    game.evaluate(f"{form}, {{ action: '{url}{path}' }}).submit()")
    game.evaluate(f"void (location.href = '{url}{path}')")
    page.wait_for_timeout(500)
    assert asked == []


def test_links_within_what_the_model_wrote(visit: OpenPage) -> None:
    """They scroll; its scripts go on, and it is laid out by the rules that it asks for."""
    page = visit()
    text = '<!DOCTYPE html><html><body><a href="#end">go</a><div style="height: 3000px"></div><p id="end">end</p>'
    page.evaluate("text => showResult(text)", text + "<script>n = 7</script></body></html>")
    frame = open_frame(page)
    frame.click("a")
    until(page, lambda: frame.evaluate("scrollY") > 2000)
    assert frame.evaluate("[n, document.compatMode]") == [7, "CSS1Compat"]


def test_a_failure_is_told_and_asked_again(visit: OpenPage) -> None:
    """A stream that breaks leaves nothing in the conversation but the way to ask again."""
    page = visit()
    page.expected.append("ERR_")
    ask(page, "break once")
    page.wait_for_selector("[role=alert]")
    page.get_by_role("button", name="Ask again").click()
    until(page, lambda: page.locator(".answer").last.inner_text() == "Now it is well.")
    assert page.locator("[role=alert]").count() == 0


def test_stop(visit: OpenPage) -> None:
    """Escape ends a reply, and the next question is answered."""
    page = visit()
    ask(page, "take long")
    until(page, lambda: figure(page, "count") > 3)
    page.keyboard.press("Escape")
    assert "Stopped." in page.locator("[role=alert]").inner_text()
    ask(page, "And now?")
    until(page, lambda: page.locator(".answer").last.inner_text() == "A plain answer.")


def test_a_new_chat_ends_the_reply_of_the_old_one(visit: OpenPage) -> None:
    """In the midst of a second turn: nothing of the old chat is shown or sent any more, and the new one answers."""
    page = visit()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if "completions" in request.url else None)
    ask(page, "Hello")
    page.wait_for_selector(".meta")
    ask(page, "take long, please")
    until(page, lambda: "and on" in page.inner_text("#log"))
    page.get_by_role("button", name="New chat").click()
    until(page, lambda: page.inner_text("#send") == "Send")
    assert page.inner_text("#log") == "" and page.is_visible("#welcome")
    ask(page, "Hello again")
    page.wait_for_selector(".meta, .error")
    assert page.locator(".error").count() == 0 and page.inner_text(".answer") == "A plain answer."
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Hello again"}]


def test_a_key_is_asked_for_where_one_is_needed(open_page: OpenPage, tmp_path: Path) -> None:
    """The field for it appears with the refusal, and what is entered there is sent."""
    with process.serve(tmp_path / "log", *script(tmp_path), DSUF_API_KEYS="open-sesame") as base:
        page = open_page()
        page.expected.append("401")
        page.goto(base)
        page.get_by_label("Key").fill("open-sesame")
        page.get_by_label("Key").press("Tab")
        until(page, lambda: "engine" in page.inner_text("#server"))
        ask(page, "Hello?")
        until(page, lambda: page.locator(".answer").last.inner_text() == "A plain answer.")


def test_a_server_that_restarts_beneath_the_page(
    open_page: OpenPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked meanwhile is told as unanswered and asked again; the conversation goes on."""
    port = process.find_port()
    monkeypatch.setattr(process, "find_port", lambda: port)
    page = open_page()
    page.expected.append("ERR_")
    with process.serve(tmp_path / "log", *script(tmp_path)) as base:
        page.goto(base)
        ask(page, "Hello?")
        page.wait_for_selector(".meta")
    ask(page, "Are you there?")
    assert "No answer" in page.wait_for_selector("[role=alert]").inner_text()
    with process.serve(tmp_path / "log", *script(tmp_path)):
        page.get_by_role("button", name="Ask again").click()
        until(page, lambda: page.locator(".meta").count() == 2)
    assert page.locator(".answer").all_inner_texts().count("A plain answer.") == 2


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_cut_off(visit: OpenPage, width: int) -> None:
    """Neither before nor after a game is the page wider than the window; the game fits into it."""
    page = visit(width=width, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ask(page, HEADLINE)
    page.wait_for_selector(".meta")
    until(page, lambda: open_frame(page).evaluate("typeof board") == "object")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    inner = open_frame(page).evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inner[0] <= inner[1]
    box = page.locator("#frame iframe").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 300


def test_dark_and_light(visit: OpenPage) -> None:
    """The system's choice holds until the button changes it."""
    grounds = {}
    for scheme in (DARK, LIGHT):
        page = visit(color_scheme=scheme)
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds[DARK] != grounds[LIGHT]
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[DARK]


@pytest.mark.parametrize("options", [{}, {"color_scheme": DARK}, {"width": 360, "height": 740}], ids=str)
def test_accessibility(visit: OpenPage, options: dict[str, Any]) -> None:
    """axe finds no serious fault: at the start, behind a game, behind a tool call."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit(**options)
    assert faults(axe.run(page)) == []
    ask(page, HEADLINE)
    page.wait_for_selector(".meta")
    page.check("#tools")
    ask(page, 'In the file "notes/garden.txt", what does the line "fern" say?')
    until(page, lambda: page.inner_text("#log").count("first token after") == 3)
    page.locator("#files summary").click()
    assert faults(axe.run(page)) == []


def faults(results: Any) -> list[str]:
    """What axe calls serious or critical."""
    found = results.response["violations"]
    return [
        f"{fault['id']}: {[node['html'] for node in fault['nodes']]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


def ask(page: Any, text: str) -> None:
    """Type a question and send it."""
    page.fill("#text", text)
    page.press("#text", "Enter")


def script(folder: Path) -> tuple[str, ...]:
    """Flags for a server with the replies of above."""
    (folder / "script.json").write_text(json.dumps({"rules": RULES}))
    return "--engine", "scripted", "--script", str(folder / "script.json")


def open_frame(page: Any) -> Any:
    """The frame with the result."""
    until(page, lambda: len(page.frames) == 3)
    return page.frames[2]


def figure(page: Any, name: str) -> float:
    """A figure of the panel; 0 while there is none."""
    text = page.inner_text(f"#{name}").replace(",", "")
    return 0.0 if text == "–" else float(text)


def watch_gauge(page: Any) -> set[int]:
    """The values that the gauge shows while a reply is written."""
    seen: set[int] = set()
    deadline_s = time.monotonic() + 30
    while page.inner_text("#send") == "Stop" or not seen:
        seen.add(int(page.get_attribute("#gauge", "aria-valuenow")))
        assert time.monotonic() < deadline_s
        page.wait_for_timeout(50)
    return seen


def read_usage(response: Any) -> dict[str, Any]:
    """The last usage of a stream that was read to its end."""
    lines = [line for line in response.text().splitlines() if line.startswith("data: {")]
    return [usage for line in lines[-3:] if (usage := json.loads(line.removeprefix("data: ")).get("usage"))][-1]


def until(page: Any, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for `condition`. The page's policy keeps the browser from doing so itself."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        page.wait_for_timeout(50)
