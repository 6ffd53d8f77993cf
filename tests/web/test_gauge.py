"""The page's gauge on replies whose tokens come at known times, and are marked late where the browser is busy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.web.conftest import OpenPage

pytestmark = [pytest.mark.full, pytest.mark.timeout(60)]

PAGE = Path(__file__).parents[2] / "dsuf" / "web" / "index.html"
STEP_TOKENS = 6
FRAME_MS = 16

# Plays a reply on a clock of its own: every event is marked when it came or, within a stall, behind it, where all that
# waits is taken at `drain` ms each; a frame is painted in between. Gives the gauge's and the peak's last values.
PLAY = """([arrivals, stalls, drain, frame]) => {
  let now = 0, painted = 0;
  const shown = [];
  const paint = until => {
    for (; painted + frame <= until; painted += frame) {
      if (stalls.some(([from, to]) => painted + frame > from && painted + frame < to)) continue;
      now = painted + frame;
      paintSpeed();
      shown.push(Number(document.getElementById("gauge").getAttribute("aria-valuenow")));
    }
  };
  performance.now = () => now;
  beginSpeed();
  let free = 0;
  for (const [came, tokens] of arrivals) {
    const stall = stalls.find(([from, to]) => came > from && came < to);
    const marked = Math.max(stall ? stall[1] : came, free);
    if (marked > came) free = marked + drain;
    paint(marked);
    now = marked;
    markSpeed({ completion_tokens: tokens, prompt_tokens: 9 });
  }
  const end = now;
  speed.running = false;
  paintSpeed();
  const figure = id => Number(document.getElementById(id).textContent.replace(",", ""));
  return { end, shown, peak: figure("peak"), average: figure("average") };
}"""

Stalls = Sequence[tuple[float, float]]


def steps(*parts: tuple[float, float]) -> list[tuple[float, int]]:
    """When each step's tokens come, in ms, and how many there are by then: parts of (seconds, tokens/s)."""
    came, start_ms, tokens = list[tuple[float, int]](), 500.0, 1
    came.append((start_ms, tokens))
    for seconds, rate in parts:
        every_ms = STEP_TOKENS / rate * 1e3
        for number in range(1, round(seconds * 1e3 / every_ms) + 1):
            tokens += STEP_TOKENS
            came.append((start_ms + number * every_ms, tokens))
        start_ms = came[-1][0]
    return came


@pytest.fixture
def play(open_page: OpenPage) -> Any:
    """`play(arrivals, stalls, drain)` in the page, which needs no server for this."""
    page = open_page()
    page.expected += ["server_info", "ERR_"]  # its requests go nowhere
    page.goto(PAGE.as_uri())
    return lambda arrivals, stalls=(), drain=0.0: page.evaluate(PLAY, [arrivals, stalls, drain, FRAME_MS])


@pytest.mark.parametrize("rate", [60, 180, 1700])
def test_a_steady_reply_has_a_steady_gauge(play: Any, rate: float) -> None:
    """Peak and average are its speed, and what is shown behind the first second never leaves it far."""
    told = play(steps((6, rate)))
    assert told["peak"] == pytest.approx(rate, rel=0.1) and told["average"] == pytest.approx(rate, rel=0.03)
    settled = told["shown"][len(told["shown"]) // 2 :]
    assert min(settled) > 0.85 * rate and max(settled) < 1.15 * rate


@pytest.mark.parametrize("drain", [0.0, 3.0, 12.0])
@pytest.mark.parametrize(
    "stalls",
    [[(2000, 2300)], [(3000, 3700)], [(505, 900)], [(1500, 1650), (2500, 3100), (4000, 4400)]],
    ids=["short", "long", "at the first token", "several"],
)
def test_a_stall_makes_no_peak(play: Any, stalls: Stalls, drain: float) -> None:
    """However late the browser marks what came meanwhile, and however long that takes it: 180 tokens/s stay so."""
    told = play(steps((8, 180)), stalls, drain)
    assert 0.95 * told["average"] <= told["peak"] <= 1.12 * 180


def test_a_burst_makes_a_peak(play: Any) -> None:
    """Three seconds at more than twice the speed are seen, with and without a stall; a pause is no peak."""
    for stalls in ([], [(2000, 2600)]):
        told = play(steps((3, 100), (3, 240), (3, 100)), stalls)
        assert 0.9 * 240 <= told["peak"] <= 1.1 * 240
    paused = steps((3, 100)) + [(came + 5000, tokens + 300) for came, tokens in steps((3, 100))]
    told = play(paused)
    assert min(told["shown"][80:]) < 25 and told["peak"] <= 1.1 * 100


def test_a_short_reply_has_its_average_as_peak(play: Any) -> None:
    """There is no second of it to find another."""
    told = play(steps((0.6, 300)))
    assert told["peak"] == told["average"] == pytest.approx(300, rel=0.1)
