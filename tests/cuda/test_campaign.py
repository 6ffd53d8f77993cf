"""The short twin of the campaign of steps, on the toy machine: nothing lost, no token different from a replay."""

import time
from pathlib import Path

import pytest

from bench.campaigns.steps import Campaign, Spoken, measure
from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from tests.cuda.drive import make_turn
from tests.cuda.host import make_host_machine, use_host_driver
from tests.cuda.test_protocol import say

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["exact", "replay"])
async def test_steps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred steps; the replies are the toy's own, and the campaign sees one that is not."""
    monkeypatch.setattr("bench.campaigns.steps.PAUSE_STEPS", 60)
    monkeypatch.setattr("bench.campaigns.steps.REPLY_TOKENS", 60)
    setup = Setup(context_tokens=700, max_turns=4, pages=20, prefill_rows=64)
    engine = CudaEngine(make_host_machine(monkeypatch, CONFIG, setup), "weights", mode, captures=False)
    campaign, pauses = Campaign(engine, 1, 300), []
    await campaign.run(200, lambda: pauses.append(campaign.steps))
    assert campaign.steps >= 200
    await campaign.run(400, until_s=time.monotonic())
    assert campaign.steps < 260
    assert len(pauses) >= 2 and len(campaign.spoken) > 15
    for spoken in campaign.spoken:
        assert spoken.ids == say(list(spoken.turn.prompt.ids), spoken.turn.sampling.max_tokens)
    assert await campaign.replay(5) == 0
    campaign.spoken[:] = [spoken._replace(ids=[*spoken.ids[:-1], 0]) for spoken in campaign.spoken]
    assert await campaign.replay(2) == 2
    await engine.close()


async def test_engines_share_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two beside each other do half each, and one row says what both did."""
    monkeypatch.setattr("bench.campaigns.steps.PAUSE_STEPS", 30)
    monkeypatch.setattr("bench.campaigns.steps.REPLY_TOKENS", 20)
    monkeypatch.setattr("bench.campaigns.steps.REPLAYED", 6)
    monkeypatch.setattr("bench.campaigns.steps.free_bytes", lambda: 7 << 30)
    setup = Setup(context_tokens=700, max_turns=4, pages=20, prefill_rows=64)
    driver = use_host_driver(monkeypatch)
    machines = [make_host_machine(monkeypatch, CONFIG, setup, driver) for _ in range(2)]
    engines = [CudaEngine(machine, "weights", "replay", captures=False) for machine in machines]
    row = await measure(engines, 120, 1, 60.0)
    assert row["engines"] == 2 and 120 <= int(str(row["steps"])) < 200
    assert (row["replayed"], row["different"], row["device_growth_bytes"], row["holds"]) == (6, 0, 0, True)
    for engine in engines:
        await engine.close()


async def test_some_turns_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory does not grow with what was heard: early and late ones."""
    monkeypatch.setattr("bench.campaigns.steps.KEPT", 5)
    setup = Setup(context_tokens=700, max_turns=4, pages=20, prefill_rows=64)
    engine = CudaEngine(make_host_machine(monkeypatch, CONFIG, setup), "weights", "exact", captures=False)
    campaign = Campaign(engine, 1, 300)
    for number in range(100):
        campaign._keep(Spoken(make_turn([5], 1), [number]))
    kept = sorted(spoken.ids[0] for spoken in campaign.spoken)
    assert campaign.heard == 100 and len(kept) == 5 and kept[0] < 60 and kept[-1] > 40
    await engine.close()
