"""Which peers to ask for the beginning of a prompt, in which order, and for how long: pure functions.

A pull can only help: one is tried where it should take less time than computing what it would bring, and all tries of a
turn together take no longer than computing that would have taken. So sharing costs at most a factor of two, when all
goes wrong. A fleet that would rather wait than compute again gives its nodes more patience: a multiple of that time.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dsuf.kv.directory.contract import Candidate, Member
from dsuf.kv.handoff import WAIT_S
from dsuf.types import CacheLayout

MOST_TRIES = 3
PATIENCE_SHARE = 0.5
BYTES_FACTOR = 2.0
"""For the bytes, of the time of a pull: so many times what they should take, up to half of it."""
UNKNOWN_BUDGET_S = 2.0
"""What computing takes at least where nobody knows: a peer that has the cache, or is about to, is sure to be faster."""
UNKNOWN_TOKEN_S = 1e-3
"""What a prompt token is taken to cost before any was computed."""
FORGET_S = 30.0
"""In so much time half of what makes a peer seem slow is forgotten: else one that was slow once, and is asked for
nothing since, could never show that it is not."""
LEAST_BUDGET_S = 0.05
"""A shorter one would run out within a pause of the loop on either side."""


ORDER_FACTOR = 3.0
LEAST_ORDER_S = 30.0
"""Another node may have other prompts to compute first."""
MOST_COPYING_S = 5.0
LEAST_SILENCE_S = 2.0
"""An event loop may stand still for a moment."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer's bytes cost: seconds until the first one, and bytes a second from then on."""

    wait_s: float = 0.01
    bytes_s: float = 3e8

    def predict_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`."""
        return self.wait_s + size_bytes / self.bytes_s

    def forget(self, seconds: float) -> "Speed":
        """What is left of it after `seconds`, where it is worse than what is taken of strangers."""
        left, usual = 0.5 ** (seconds / FORGET_S), Speed()
        wait_s = usual.wait_s + max(0.0, self.wait_s - usual.wait_s) * left
        byte_s = 1 / usual.bytes_s + max(0.0, 1 / self.bytes_s - 1 / usual.bytes_s) * left
        return Speed(wait_s=min(self.wait_s, wait_s), bytes_s=max(self.bytes_s, 1 / byte_s))

    def learn(self, size_bytes: int, seconds: float, *, share: float = 0.3) -> "Speed":
        """With a pull of `size_bytes` that took `seconds` counted in: small ones teach the wait, others the rate."""
        moving_s = seconds - self.wait_s
        if moving_s < self.wait_s or not size_bytes:
            return msgspec.structs.replace(self, wait_s=self.wait_s + share * (max(seconds, 1e-4) - self.wait_s))
        return msgspec.structs.replace(self, bytes_s=self.bytes_s + share * (size_bytes / moving_s - self.bytes_s))


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A peer to ask: what a turn need not compute with its help, at most where that is `coming`; how long that may
    take, and how long the bytes should."""

    member: Member
    tokens: int
    budget_s: float
    bytes_s: float = 0.0
    coming: bool = False

    def bear_s(self, left_s: float) -> float:
        """How much of what is `left_s` the peer may wait for what it is about to keep; the rest is for the bytes.

        It answers at once where it is about to keep nothing. So waiting is right as long as computing takes longer.
        """
        return max(PATIENCE_SHARE * left_s, left_s - BYTES_FACTOR * self.bytes_s)


def plan_pulls(
    candidates: Sequence[Candidate], *, prompt: int, here: int, layout: CacheLayout, token_s: float,
    speed: Callable[[Member], Speed], patience: float = 1.0,
) -> tuple[Pull, ...]:  # fmt: skip
    """The pulls worth trying for a prompt of `prompt` tokens that could begin to compute at position `here` without,
    best first.

    `token_s` is what computing a token of the prompt takes here now, 0 where that is not known yet. The budget of the
    first pull is what computing its tokens would take, `patience` times; later ones share it.
    """
    token_s, least_s = token_s or UNKNOWN_TOKEN_S, LEAST_BUDGET_S if token_s else UNKNOWN_BUDGET_S
    found = []
    for candidate in candidates:
        tokens = candidate.most(prompt, layout.page_tokens, layout.replay_tokens) - here
        if tokens < layout.page_tokens:
            continue
        size_bytes = layout.pages_for(tokens) * layout.page_bytes + layout.state_bytes
        saved_s, cost_s = patience * tokens * token_s, speed(candidate.member).predict_s(size_bytes)
        if cost_s < saved_s:
            pull = Pull(
                member=candidate.member, tokens=tokens, budget_s=max(least_s, saved_s), bytes_s=cost_s,
                coming=candidate.coming,
            )  # fmt: skip
            found.append((saved_s - cost_s, pull))
    found.sort(key=lambda pair: -pair[0])
    return tuple(pull for _, pull in found[:MOST_TRIES])


def budget_order(tokens: int, token_s: float) -> float:
    """Seconds in all that other nodes may take for computing `tokens` of a prompt, which here would take `token_s` each
    (0: not known). They may be slower than this node, whose streams they spare, but not without end.
    """
    return max(LEAST_ORDER_S, ORDER_FACTOR * tokens * (token_s or UNKNOWN_TOKEN_S))


def bear_silence(tokens: int, token_s: float) -> float:
    """Seconds in all for which other nodes may give no sign of life while they compute `tokens` of a prompt: no more
    than computing them here takes, so that one which stands still costs no more than that."""
    return max(LEAST_SILENCE_S, tokens * (token_s or UNKNOWN_TOKEN_S))


def bear_copying(tokens: int, token_s: float, patience: float = 1.0) -> float:
    """Seconds in all for which a prompt of `tokens` waits for what this node itself is about to keep of it."""
    return min(MOST_COPYING_S, max(WAIT_S, patience * tokens * (token_s or UNKNOWN_TOKEN_S)))


def rank_providers(members: Sequence[Member], given: Mapping[str, int]) -> list[Member]:
    """The nodes that could compute a prompt for this one, of those that do nothing else, the one with least to do
    first. `given` are the prompts that this node has with each now: more recent than what they told of themselves.
    """
    able = [member for member in members if member.role == "prefill" and not member.draining]
    return sorted(able, key=lambda member: (max(member.load, given.get(member.node, 0)), member.node))
