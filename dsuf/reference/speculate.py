"""One round of speculative decoding for some turns at once: draft, verify in one pass, keep, take back the rest.

At the start of a round a turn's anchor is chosen and not yet in its cache. The round drafts behind it, runs anchor and
drafts through the backbone, keeps the drafts that the rule allows and chooses one more token, the next anchor. What a
rejected token touched is addressed by position, so taking it back is shortening the cache.
"""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from dsuf.reference.accept import AcceptanceRule, keep, keep_greedy, residual
from dsuf.reference.arithmetic import F32, F64, I64, sigmoid
from dsuf.reference.cache import SequenceCache
from dsuf.reference.draft import Block, Draft
from dsuf.reference.logprobs import rate
from dsuf.reference.masking import Masking
from dsuf.reference.model import Model
from dsuf.reference.sampler import Purpose, choose, distribution, pick_by_mass, uniform
from dsuf.types import Logprob, Sampling


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """How to speculate. Drafts behind the first whose running confidence is below `confidence` are not verified."""

    rule: AcceptanceRule = "block"
    confidence: float = 0.0


class Anchor(NamedTuple):
    """A turn at the start of a round: its cache, the token that comes next, how it samples, and from what."""

    cache: SequenceCache
    token: int
    sampling: Sampling
    masking: Masking | None = None


class Round(NamedTuple):
    """What a round did for a turn: the drafts that were kept and then the next anchor, and how many were verified."""

    ids: tuple[int, ...]
    verified: int
    logprobs: tuple[Logprob, ...] = ()

    @property
    def accepted(self) -> int:
        """Drafts among `ids`."""
        return len(self.ids) - 1


class Drafter(Protocol):
    """Proposes drafts; the draft head is one. Its logits must be those that its ids were drawn from."""

    def propose(self, anchors: list[Anchor], limit: int) -> Block:
        """A block behind each anchor; only the first `limit` drafts will be looked at."""

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        """Hear of the committed positions from `start` on, by their taps."""


class HeadDrafter:
    """The model's own draft head. It drafts whole blocks, as it was trained to; what is not wanted is dropped."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, anchors: list[Anchor], limit: int) -> Block:
        """Draws each draft as its turn samples, from a stream of randomness of its own."""

        def pick(slot: int, logits: F32) -> I64:
            drawn = [
                choose(row, anchor.sampling, anchor.cache.length + 1 + slot, "draft")
                for row, anchor in zip(logits, anchors, strict=True)
            ]
            return np.array(drawn, np.int64)

        return self.draft.propose([(a.cache, a.cache.length, a.token) for a in anchors], pick)

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        """Put the context rows of positions from `start` on into `cache`."""
        self.draft.feed(cache, start, taps)


def speculate(model: Model, drafter: Drafter, anchors: list[Anchor], limit: int, how: Speculation) -> list[Round]:
    """One round for every anchor, with at most `limit` drafts each; caches then end before the next anchors."""
    block = drafter.propose(anchors, limit)
    lengths = _lengths(block, limit, how)
    starts = [anchor.cache.length for anchor in anchors]
    work = [
        (anchor.cache, np.array([anchor.token, *block.ids[i, : lengths[i]]], np.int64))
        for i, anchor in enumerate(anchors)
    ]
    for (_, rows_ids), anchor in zip(work, anchors, strict=True):
        if anchor.masking is not None:
            anchor.masking.ask(rows_ids[1:].tolist())
    output = model.forward(work)
    logits = model.logits(output, slice(None))
    rounds, first = [], 0
    for i, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
        rows = slice(first, first + lengths[i] + 1)
        targets = logits[rows]
        if anchor.masking is not None:
            targets = targets.copy()
            anchor.masking.apply(targets)
        ids = resolve(targets, block.logits[i, : lengths[i]], block.ids[i, : lengths[i]], anchor, start, how)
        anchor.cache.truncate(start + len(ids))
        drafter.feed(anchor.cache, start, output.taps[first : first + len(ids)])
        rounds.append(Round(ids, lengths[i], rate(logits[rows], ids, anchor.sampling.logprobs)))
        first = rows.stop
    return rounds


def _lengths(block: Block, limit: int, how: Speculation) -> list[int]:
    """How many drafts of each sequence are verified.

    A confidence speaks of the draft at its slot and was computed from the tokens before it, so the decision to verify a
    draft uses nothing drawn at its place or later, and the distribution stays exact.
    """
    limit = min(limit, block.ids.shape[1])
    if how.confidence <= 0:
        return [limit] * len(block.ids)
    running = np.cumprod(sigmoid(block.confidence[:, :limit]), axis=1)
    return [int(np.argmin(row)) if not row.all() else limit for row in running >= how.confidence]


def resolve(
    logits: F32, draft_logits: F32, drafts: I64, anchor: Anchor, start: int, how: Speculation
) -> tuple[int, ...]:
    """The kept drafts and the token after them.

    Row r of the target's `logits` [drafts + 1, vocabulary] and of `draft_logits` [drafts, vocabulary] is for position
    `start` + 1 + r.
    """
    sampling = anchor.sampling
    if sampling.temperature == 0:
        targets = logits.argmax(axis=1)
        kept = keep_greedy(targets, drafts)
        return (*drafts[:kept].tolist(), int(targets[kept]))
    if len(drafts) == 0:
        return (choose(logits[0], sampling, start + 1),)
    p, q = _rows(logits, sampling), _rows(draft_logits, sampling)
    uniforms = np.array([uniform(sampling.seed, start + 1 + r, "accept") for r in range(len(drafts))])
    kept = keep(how.rule, p, q, drafts, uniforms)
    purpose: Purpose = "token" if kept == len(drafts) else "residual"
    draw = uniform(sampling.seed, start + 1 + kept, purpose)
    return (*drafts[:kept].tolist(), pick_by_mass(residual(how.rule, p, q, drafts, kept), draw))


def _rows(logits: F32, sampling: Sampling) -> F64:
    """The distribution of every row [rows, vocabulary]."""
    return np.stack([distribution(row, sampling) for row in logits])
