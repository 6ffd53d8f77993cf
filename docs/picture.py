"""Draw docs/at-work.svg: a real start of the server and a real streamed reply, each line at the time when it came.

    .venv/bin/python docs/picture.py

The words are the small model's; the times are those of the machine that drew it.
"""

import html
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PORT = 18571
COLUMNS = 112
LINE_PX, LEFT_PX, CHARACTER_PX = 19, 16, 8.1
ASK = r"""curl -sN http://127.0.0.1:%d/v1/chat/completions -H 'content-type: application/json' -d '{
    "model": "deepseek-flash", "stream": true, "temperature": 0, "thinking": {"type": "disabled"},
    "messages": [{"role": "user", "content": "What is dsuf?"}]}' | grep --line-buffered -o '"content":"[^"]*"'"""


class Line(NamedTuple):
    """A line of the terminal, and when it came, in seconds from the start."""

    at_s: float
    text: str


def record() -> Iterator[Line]:
    """Start the server, ask once, stop it; yields what a person would see."""
    began = time.monotonic()
    yield Line(0.0, f"$ bin/serve --port {PORT} --log-level error &")
    command = [ROOT / "bin" / "serve", "--port", str(PORT), "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for text in process.stdout:
            yield Line(time.monotonic() - began, text.rstrip().replace(str(Path.home()), "~"))
            if text.startswith("ready"):
                break
        yield from ask(began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask(began: float) -> Iterator[Line]:
    """One request with curl; yields its lines."""
    command = ASK % PORT
    yield Line(time.monotonic() - began, "")
    for number, text in enumerate(command.splitlines()):
        yield Line(time.monotonic() - began, ("> " if number else "$ ") + text.strip())
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            yield Line(time.monotonic() - began, text.rstrip())


def draw(lines: list[Line]) -> str:
    """The SVG: a dark terminal whose lines appear one after the other, and stay."""
    width, height = int(COLUMNS * CHARACTER_PX) + 2 * LEFT_PX, LINE_PX * (len(lines) + 1) + LEFT_PX
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.text if len(line.text) <= COLUMNS else line.text[: COLUMNS - 1] + "…"
        kind = "typed" if text.startswith(("$", ">")) else "said"
        rows.append(
            f'<text class="{kind}" x="{LEFT_PX}" y="{number * LINE_PX + LEFT_PX // 2}" '
            f'style="animation-delay:{line.at_s:.2f}s" xml:space="preserve">{html.escape(text)}</text>'
        )
    style = (
        # Visible by itself: a viewer without animation shows all lines at once.
        "text{font:13px ui-monospace,Menlo,Consolas,monospace;animation:show .05s backwards}"
        "@keyframes show{from{opacity:0}}.said{fill:#d8dee4}.typed{fill:#7ee787}"
        "@media (prefers-reduced-motion:reduce){text{animation:none}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="A terminal: bin/serve starts, curl receives a streamed reply"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def main() -> int:
    """Record and write the picture."""
    os.chdir(ROOT)
    lines = list(record())
    (ROOT / "docs" / "at-work.svg").write_text(draw(lines))
    print(f"docs/at-work.svg: {len(lines)} lines, {lines[-1].at_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
