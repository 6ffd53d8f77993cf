"""The examples in the pages about the API are executed against a server process, and give what stands there.

In what is expected "…" stands for anything: for a value, for a part of a text, as a name for further names, and as a
line for further lines.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsuf.api.server import ROUTES
from tests.clients import process
from tests.clients.examples import RULES

pytestmark = pytest.mark.clients

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("api", "chat", "messages", "responses", "completions")
BASE_URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """What to run, in which language, and what comes of it."""

    language: str
    text: str
    expected: str


def find_examples(page: str) -> list[Example]:
    """Each block of code of a page with the block behind it, which holds what is expected."""
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
    assert len(blocks) % 2 == 0, "every example is followed by what comes of it"
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [Example(language, text, expected) for (language, text), (_, expected) in pairs]


EXAMPLES = [
    pytest.param(example, id=f"{page}-{number}")
    for page in PAGES
    for number, example in enumerate(find_examples(page))
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose script knows the questions of the pages."""
    with process.serve_script(tmp_path_factory.mktemp("docs"), RULES) as url:
        yield url


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_gives_what_stands_behind_it(url: str, example: Example) -> None:
    text = example.text.replace(BASE_URL, url)
    assert url in text
    if example.language == "python":
        got = run_python(text)
    elif shutil.which("curl") is None:
        pytest.skip("no curl")
    else:
        shell = subprocess.run(["sh", "-euc", text], capture_output=True, text=True, timeout=60, check=True)
        got = shell.stdout
    if example.expected.lstrip().startswith("{"):
        assert fits(json.loads(example.expected), json.loads(got)), got
    else:
        assert fit_lines(example.expected.splitlines(), [line for line in got.splitlines() if line]), got


def test_every_route_is_in_the_table() -> None:
    """Canonical paths; aliases are told by their pattern."""

    page = (DOCS / "api.md").read_text()
    pages = {"/", "/frame"}
    assert [
        route.path for route in ROUTES if f"{route.method} {route.path}`" not in page and route.path not in pages
    ] == []
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))


def run_python(text: str) -> str:
    """What the example prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, "example", "exec"), {})
    return output.getvalue()


def fits(expected: Any, got: Any) -> bool:
    """Whether `got` is what is expected."""
    if expected == "…":
        return True
    if isinstance(expected, dict) and isinstance(got, dict):
        named = expected.keys() - {"…"}
        whole = "…" in expected or named == got.keys()
        return whole and named <= got.keys() and all(fits(expected[name], got[name]) for name in named)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(fits, expected, got))
    if isinstance(expected, str) and isinstance(got, str):
        pattern = ".*".join(re.escape(part) for part in expected.split("…"))
        return re.fullmatch(pattern, got, re.DOTALL) is not None
    return type(expected) is type(got) and bool(expected == got)


def fit_lines(expected: list[str], got: list[str]) -> bool:
    """The same of lines, of which those with JSON are compared as JSON."""
    if not expected or not got:
        return expected in ([], ["…"]) and (not got or expected == ["…"])
    if expected[0] == "…":
        return fit_lines(expected[1:], got) or fit_lines(expected, got[1:])
    return fit_line(expected[0], got[0]) and fit_lines(expected[1:], got[1:])


def fit_line(expected: str, got: str) -> bool:
    """The same of one line."""
    head = "data: {"
    if not (expected.startswith(head) and got.startswith(head)):
        return expected == got
    return fits(json.loads(expected.removeprefix("data: ")), json.loads(got.removeprefix("data: ")))
