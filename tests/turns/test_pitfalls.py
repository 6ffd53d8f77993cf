"""Known pitfalls of other servers, each through scheduler, sessions and engine together."""

import asyncio

import pytest

from tests.toy import ToyEngine, make_turn
from tests.turns.clock import run_virtually
from tests.turns.node import Node, serving

PROMPT = list(range(1, 42))


async def read_to_stop(node: Node, name: str, wanted: int) -> tuple[list[int], int]:
    """Read a reply up to its token number `wanted`, where a stop string ends; its tokens, and how many are counted."""
    ticket = node.scheduler.submit(make_turn(name, PROMPT, max_tokens=60))
    tokens: list[int] = []
    async for result in ticket:
        for token in result.ids:
            tokens.append(token)
            if len(tokens) == wanted:
                ticket.cancel("stop", wanted)
                break
    return tokens, ticket.usage.completion_tokens


@pytest.mark.parametrize("offset", range(1, 14))
def test_pitfall_07_stop_strings_with_several_tokens_a_step(offset: int) -> None:
    """Tokens, usage and what the next turn takes over end at the same token, with and without drafts.

    What an engine with five drafts a step can spare at least is ten positions.
    """

    async def main(drafts: int) -> tuple[list[int], int, int]:
        engine = ToyEngine(pages=200, max_drafts=5, spare=10)
        async with serving(engine, drafts=drafts) as node:
            tokens, counted = await read_to_stop(node, "a", offset)
            await node.rest()
            reply = await node.run(make_turn("b", [*PROMPT, *tokens, 7, 7, 7]))
            return tokens, counted, reply.usage.cached_tokens

    plain, drafted = (run_virtually(lambda: main(drafts)) for drafts in (0, 5))
    assert plain == drafted
    assert plain[1:] == (offset, len(PROMPT) + offset)
