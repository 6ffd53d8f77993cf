"""Take the pictures of the page: docs/page.webp, animated at true speed, and two screenshots of it.

    .venv/bin/python docs/page.py [--base-url http://127.0.0.1:8000]

Asks a running server for the Tetris by the page's own button, in a headless Chromium, and plays a little. Frames stand
as long as they stood; what is shown is as fast as it was.
"""

import argparse
import base64
import itertools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
WIDE = {"width": 1200, "height": 750}
PHONE = {"width": 390, "height": 844}
FRAME_S = 0.12
LAST_MS = 3000
QUALITY = 82
REPLY_S = 300.0
# Where a piece should go: all turns and columns, and of those the one that leaves the fewest holes and lies lowest.
PLAN = """(() => {
  let best = null, turned = shape;
  for (let turns = 0; turns < 4; turns++) {
    for (let left = -2; left < COLUMNS; left++) {
      if (!fits(turned, left, y)) continue;
      let row = y;
      while (fits(turned, left, row + 1)) row++;
      const after = board.map(line => line.slice());
      turned.forEach((line, j) => line.forEach((cell, i) => { if (cell) after[row + j][left + i] = cell; }));
      let cost = -9 * after.filter(line => !line.includes(0)).length - row;
      for (let i = 0; i < COLUMNS; i++) {
        const top = after.findIndex(line => line[i]);
        if (top >= 0) cost += 8 * after.slice(top).filter(line => !line[i]).length + (ROWS - top) ** 2 / 8;
      }
      if (!best || cost < best.cost) best = { cost, turns, left };
    }
    turned = turned.map((_, i) => turned.map(line => line[i]).reverse());
  }
  return best;
})()"""


class Shot(NamedTuple):
    """A frame as PNG, and when it was shown, in seconds."""

    at_s: float
    png: bytes


class Recorder:
    """Collects what the browser shows, a frame each `FRAME_S` at most, while it is on."""

    def __init__(self, page: Any) -> None:
        self.shots: list[Shot] = []
        self._session = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._take)

    def start(self) -> None:
        """Begin."""
        self._session.send("Page.startScreencast", {"format": "png", "everyNthFrame": 6})

    def stop(self) -> None:
        """End; the last frame stays."""
        self._session.send("Page.stopScreencast")

    def _take(self, event: dict[str, Any]) -> None:
        at_s = event["metadata"]["timestamp"]
        if not self.shots or at_s - self.shots[-1].at_s >= FRAME_S:
            self.shots.append(Shot(at_s, base64.b64decode(event["data"])))
        self._session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})


def main() -> int:
    """Take all pictures; the exit code says whether there was a game to be seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    url = parser.parse_args().base_url
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        shots = film(browser, url)
        save_animation(DOCS / "page.webp", shots)
        photograph(browser, url)
        browser.close()
    return 0


def film(browser: Any, url: str) -> list[Shot]:
    """From the empty page to some pieces of a game; a screenshot of its end is kept as well."""
    page = browser.new_page(viewport=WIDE, color_scheme="light")
    page.goto(url)
    page.wait_for_timeout(300)
    recorder = Recorder(page)
    recorder.start()
    page.wait_for_timeout(1200)
    game = ask(page)
    print(page.inner_text(".meta"))
    play(page, game, pieces=16)
    page.screenshot(path=DOCS / "page.png")
    recorder.stop()
    return recorder.shots


def photograph(browser: Any, url: str) -> None:
    """The same on a phone, in the dark."""
    page = browser.new_page(viewport=PHONE, color_scheme="dark", is_mobile=True, has_touch=True, device_scale_factor=2)
    page.goto(url)
    play(page, ask(page), pieces=6)
    page.screenshot(path=DOCS / "page-phone.png")


def ask(page: Any) -> Any:
    """Press the button for the Tetris; the frame of the game, once it is written."""
    page.get_by_role("button", name="A Tetris to play").click()
    wait(page, lambda: page.locator(".meta, .error").count() > 0)
    wait(page, lambda: len(page.frames) == 3 and page.frames[2].evaluate("typeof board") == "object")
    return page.frames[2]


def play(page: Any, game: Any, *, pieces: int) -> None:
    """Let some pieces fall where they fit."""
    page.locator("#frame iframe").focus()
    wait(page, lambda: game.evaluate("document.hasFocus()"))
    for _ in range(pieces):
        best, place = game.evaluate(PLAN), game.evaluate("x")
        if best is None:
            return
        for _ in range(best["turns"]):
            press(page, "ArrowUp")
        place = game.evaluate("x")
        for _ in range(abs(best["left"] - place)):
            press(page, "ArrowLeft" if best["left"] < place else "ArrowRight")
        press(page, " ")
    page.wait_for_timeout(400)


def press(page: Any, key: str) -> None:
    """A key, at the pace of a quick hand."""
    page.keyboard.press(key)
    page.wait_for_timeout(90)


def wait(page: Any, condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; the reply may take minutes on a slow machine."""
    deadline_s = time.monotonic() + REPLY_S
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit("no game came of it: does this server's model know the Tetris?")
        page.wait_for_timeout(100)


def save_animation(path: Path, shots: list[Shot]) -> None:
    """The frames as an animated WebP, each as long as it stood."""
    animation = cv2.Animation()
    animation.frames = [cv2.imdecode(np.frombuffer(shot.png, np.uint8), cv2.IMREAD_COLOR) for shot in shots]
    lasts = [round(1000 * (later.at_s - shot.at_s)) for shot, later in itertools.pairwise(shots)]
    animation.durations = [*lasts, LAST_MS]
    cv2.imwriteanimation(str(path), animation, [cv2.IMWRITE_WEBP_QUALITY, QUALITY])
    print(f"{path.name}: {len(shots)} frames, {sum(lasts) / 1000:.1f} s, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
