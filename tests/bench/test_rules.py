"""The timing of steps with masks, on the toy machine: all cases run, and no turn ends."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from bench.rules import CASES, PAGES, time_steps
from dsuf.checkpoint.config import load_config
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Setup
from tests.cuda.drive import ThirdMask
from tests.cuda.host import make_host_machine

CONFIG = load_config(Path(__file__).parents[1] / "golden" / "tiny" / "config.json")


def test_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(CONFIG, eos_token_id=-1)
    machine = make_host_machine(monkeypatch, config, Setup(context_tokens=4064, max_turns=2, pages=2 * PAGES))
    engine = CudaEngine(machine, "bench", "exact", captures=False, open_mask=lambda rule: ThirdMask(config.vocab_size))
    for case in CASES:
        step_ms, tokens = time_steps(engine, case, 2, 5, 6, 2)
        assert step_ms > 0 and tokens == 1.0
    assert engine.counters() == {"turns": 0, "steps": 0}
    asyncio.run(engine.close())
