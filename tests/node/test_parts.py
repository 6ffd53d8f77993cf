"""Gate, pulse, signals and the lines of the start, each by itself."""

import io
import signal
import time
from pathlib import Path

import pytest

from dsuf.checkpoint.forms import NANO
from dsuf.config import Settings
from dsuf.engine_scripted import Rule
from dsuf.errors import CommandError, EngineFailed, Unavailable
from dsuf.node.drain import Signals
from dsuf.node.engines import find_cache, name_checkpoint, warm_up
from dsuf.node.gate import Gate
from dsuf.node.node import bind
from dsuf.node.pulse import SLACK_S, Pulse
from dsuf.node.startup import Startup
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits
from dsuf.welcome import describe_use
from tests.sched.rig import make_engine, make_scheduler, make_turn, read_text, serving


def test_the_shipped_checkpoint_has_a_name(tmp_path: Path) -> None:
    assert name_checkpoint(NANO) == name_checkpoint(NANO / ".." / "nano") == "dsuf-nano"
    assert name_checkpoint(tmp_path / "DeepSeek-V4.1-Flash") == "DeepSeek-V4.1-Flash"


async def test_the_gate_refuses_until_it_opens() -> None:
    gate = Gate()
    with pytest.raises(Unavailable) as refused:
        gate.submit(make_turn("a"))
    assert refused.value.retry_after_s == 5
    async with serving(make_engine(Rule(reply="in"))) as scheduler:
        gate.open(scheduler)
        assert await read_text(gate.submit(make_turn("a"))) == "in"


async def test_a_scheduler_that_stands_still_is_noticed_from_outside() -> None:
    """Its own watch reports a stuck step. Should the loop of the scheduler itself stand, the time alone tells."""
    pulse, limits, engine = Pulse(Settings(), Metrics("m")), Limits(probe_s=1, step_deadline_s=2), make_engine()
    scheduler = make_scheduler(engine, probe_s=limits.probe_s, step_deadline_s=limits.step_deadline_s)
    pulse.watch(scheduler, engine, limits)
    pulse.starting = None
    assert pulse.readiness().ready and pulse.liveness().ready
    scheduler.progressed_s = time.monotonic() - (3 + SLACK_S + 1)
    assert pulse.readiness().failing == pulse.liveness().failing == ["engine: no step or probe for 9 s"]
    scheduler.progressed_s = time.monotonic()
    pulse.lag.last_tick_s -= 7
    assert pulse.readiness().failing == ["loop: no tick for 7 s"]
    pulse.lag.last_tick_s += 7
    pulse.begin_drain()
    assert pulse.liveness().ready
    assert (pulse.readiness().ready, pulse.readiness().failing) == (False, ["draining"])


def test_the_first_signal_stops_and_gives_the_code_the_second_hurries() -> None:
    signals = Signals()
    assert not signals.stop.is_set()
    signals.receive(signal.SIGINT)
    assert signals.stop.is_set() and not signals.hurry.is_set()
    signals.receive(signal.SIGTERM)
    assert signals.hurry.is_set() and signals.exit_code == 130


async def test_the_warm_up_leaves_nothing_and_needs_a_token() -> None:
    engine = make_engine(Rule(reply="xy"))
    await warm_up(engine, (1, 2, 3))
    assert set(engine.counters().values()) == {0}
    engine.step = _no_results  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineFailed):
        await warm_up(engine, (1,))
    assert set(engine.counters().values()) == {0}


@pytest.mark.parametrize("host", ["a\0b", "\udcff", "\xfc" * 70])
def test_a_host_that_no_name_can_be_is_refused(host: str) -> None:
    with pytest.raises(CommandError, match="not a host name") as refused:
        bind(host, 0)
    assert str(refused.value).isprintable()


def test_a_user_without_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(CommandError, match="cache_dir: this user has no home folder"):
        find_cache(Settings())
    assert find_cache(Settings(cache_dir=Path("/c"))) == Path("/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert find_cache(Settings()) == Path("/x/dsuf")


async def _no_results(plan: object) -> list[object]:
    """A step that gives nothing."""
    return []


def test_keys_are_asked_for_and_never_printed() -> None:
    assert "authorization" not in describe_use("http://x", Settings())
    text = describe_use("http://x", Settings(api_keys=("sk-secret",)))
    assert "authorization: Bearer YOUR_KEY" in text and "sk-secret" not in text


def test_a_reader_of_the_output_that_has_gone_does_not_matter() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Startup(Gone()).step("model") as remarks:
        remarks.append("there")
