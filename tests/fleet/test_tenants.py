"""Keys with tenants over a fleet: what one leaves behind on any node is found by itself alone, on every node."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.fleet.conftest import Start
from tests.fleet.rig import TOTALS, Chat, opening

pytestmark = [pytest.mark.needs_redis, pytest.mark.timeout(400)]

KEYS = "sk-a1 tenant=a\nsk-a2 tenant=a\nsk-b tenant=b\n"


@pytest.mark.full
async def test_two_tenants_over_two_nodes_share_no_prefix(start: Start, tmp_path: Path) -> None:
    """The same prompt with the keys of two tenants and of a user of one, on both nodes."""
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    fleet = await asyncio.to_thread(start, 2, "--api-key-file", str(keys))
    found: list[dict[str, int]] = []

    async def ask(key: str, node: int, **fields: str) -> str:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session:
            chat = Chat(session, opening(1, 300), **fields)
            details = await chat.ask(fleet.node_url(node))
        found.append({name: details[name] for name in TOTALS if details[name]})
        await asyncio.sleep(1.0)  # the news that a node has it
        return chat.replies[0]

    replies = [await ask("sk-a1", 1), await ask("sk-b", 2), await ask("sk-b", 1), await ask("sk-a2", 2)]
    replies += [await ask("sk-a1", 2, user_id="u"), await ask("sk-a2", 1, user_id="u"), await ask("sk-b", 1)]
    assert len(set(replies)) == 1
    first, other_tenant, its_own, same_tenant, user, its_own_too, again = found
    # Nothing of another tenant, or of another user, on the node that keeps it or by way of the directory.
    assert first.keys() == other_tenant.keys() == user.keys() == {"computed_tokens"}, found
    # What is a tenant's own comes from the other node, or was here.
    assert its_own["peer_tokens"] > 250 and same_tenant["peer_tokens"] > 250 and its_own_too["peer_tokens"] > 250, found
    assert "peer_tokens" not in again and again["computed_tokens"] < 250, found
