"""The reference model: a turn prefilled on one node goes on at another over real connections, as if it had always been
there. In exact mode as a cold run, in replay mode as on the node that kept it."""

import numpy as np
import pytest

from dsuf.kv.giver import LocalGiver
from dsuf.kv.sessions import Restored
from dsuf.kv.taker import Taker
from dsuf.kv.transport.hello import Terms
from dsuf.kv.transport.peer import PeerGiver, over_tcp
from dsuf.kv.transport.server import PeerServer
from dsuf.kv.transport.streams import Address
from dsuf.reference.model import Model, PrefillMode
from tests.kv.test_reference import PROMPT, Node
from tests.kv.transport.rig import FAR, NEAR, SECRET
from tests.reference.conftest import model, small_checkpoint
from tests.reference.rig import make_turn

__all__ = ["model", "small_checkpoint"]


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize(
    "shared",
    [300, *(pytest.param(n, marks=pytest.mark.full) for n in (290, 297, 200))],
    ids=lambda shared: f"shared{shared}",
)
async def test_the_next_turn_elsewhere_is_as_here(model: Model, mode: PrefillMode, shared: int) -> None:
    """The next turn repeats the first `shared` tokens of the one before and goes on otherwise."""
    far, near = Node(model, mode), Node(model, mode)
    terms = Terms(far.engine.layout.fingerprint)
    server = PeerServer(FAR, LocalGiver(far.sessions, far.compute), terms, SECRET)
    address = Address(NEAR, FAR, "127.0.0.1", await server.listen("127.0.0.1", 0), terms, SECRET)
    peer = PeerGiver(FAR, over_tcp(address))
    taker = Taker(near.sessions, peer, near.metrics, deadline_s=20)
    _, reply, _ = await far.run(make_turn("first", PROMPT[:280], max_tokens=12))
    before = np.concatenate([PROMPT[:280], reply])
    after = np.concatenate([before, PROMPT[280:290]])[:shared]
    turn = make_turn("next", np.concatenate([after, PROMPT[40:55]]), max_tokens=12)
    start = await taker.take(turn, compute=False)
    there = await near.run(turn, start)
    far.sessions.pool.forget_all()
    here = await far.run(turn)
    assert there[1:] == here[1:]
    assert there[0].peer_tokens == there[0].start == here[0].host_tokens
    assert there[0].start > 0 or mode == "exact"
    if mode == "exact":
        near.sessions.flush()
        cold = await near.run(turn)
        assert cold[0] == Restored()
        assert there[1:] == cold[1:]
    await peer.close()
    await server.close()
    for node in (far, near):
        await node.close()
