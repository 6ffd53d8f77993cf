"""Caches that cannot be filled in time: a turn waits for a while, what is kept stays, and nobody waits for ever."""

import pytest

from tests.toy import ToyEngine, make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import Node, Reply, serving

LONG_S = 14.0
"""Of a step: more than two deadlines of a session cache."""


def resume_behind(engine: ToyEngine, first: float, later: float) -> tuple[Reply, Reply, Node]:
    """A turn that goes on from what is kept in the host arena, whose first resume takes `first` seconds and those
    after it `later`; then the same turn again, without delay."""

    async def main() -> tuple[Reply, Reply, Node]:
        async with serving(engine, chunk_tokens=16) as node:
            await node.run(make_turn("a", range(1, 81)))
            await node.forget_device()
            waits_s = iter([first])
            engine.before = lambda call: next(waits_s, later) if call == "resume" else 0.0
            turn = make_turn("b", range(1, 101))
            late = await node.run(turn)
            engine.before = lambda call: 0.0
            await node.forget_device()
            again = await node.run(make_turn("c", range(1, 91)))
            assert late.tokens == engine.cold_tokens(turn)
            return late, again, node

    result: tuple[Reply, Reply, Node] = run_virtually(main)
    return result


@pytest.mark.parametrize("replay", [0, 8])
def test_a_cache_that_waits_behind_a_long_step_stays_good(replay: int) -> None:
    late, again, node = resume_behind(ToyEngine(replay_tokens=replay), LONG_S, 0.0)
    assert late.usage.cached_tokens == again.usage.cached_tokens == 80
    assert node.read_metric("dsuf_session_cache_withdrawn_total") == 0


@pytest.mark.parametrize("replay", [0, 8])
def test_an_engine_that_never_resumes_in_time_computes_in_the_end(replay: int) -> None:
    late, again, node = resume_behind(ToyEngine(replay_tokens=replay), 6.0, 6.0)
    assert late.usage.cached_tokens == 0
    assert again.usage.cached_tokens == 80, "nothing was said against what is kept"
    assert node.read_metric("dsuf_session_cache_withdrawn_total") == 0
