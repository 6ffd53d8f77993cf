"""Discrete choices of a layer: index top-k, candidate blocks, experts.

Two correct programs may choose differently where rounding decides. A choice is excused if the recorded margin is within
twice the largest difference between own and recorded scores of its row: so far apart, two scores can change places.
Experts have no recorded scores; there the own margin must be small.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsuf.golden import tolerance
from dsuf.golden.device import DeviceAttention
from dsuf.golden.measure import Array, Distance
from dsuf.golden.session import Session
from dsuf.reference.arithmetic import F32, I64, Bool
from dsuf.reference.batch import Batch, Segment
from dsuf.reference.moe import Router

AGREEING_SHARE = 0.9
"""Of all rows, how many must choose as recorded, excuses or not."""


class Choice(NamedTuple):
    """Rows that chose as recorded, and rows where rounding may decide, both [rows]."""

    agrees: Bool
    excused: Bool

    @classmethod
    def pooled(cls, parts: list["Choice"]) -> "Choice":
        """The rows of all `parts` together."""
        return cls(np.concatenate([part.agrees for part in parts]), np.concatenate([part.excused for part in parts]))

    def judge(self, session: Session, case: str, name: str) -> None:
        """A row of the report."""
        total, agreeing = len(self.agrees), int(self.agrees.sum())
        excused = int((self.excused & ~self.agrees).sum())
        shown = f"{agreeing} of {total}, {excused} within rounding"
        limit = f"all but rounding, {AGREEING_SHARE:.0%} agree"
        holds = agreeing + excused == total and agreeing >= AGREEING_SHARE * total
        session.report.judge(case, session.flavour, name, shown, limit, holds)


class Scores(NamedTuple):
    """Own and recorded index scores [rows, entries], -inf where an entry cannot be chosen."""

    own: F32
    recorded: F32

    @property
    def distance(self) -> Distance:
        """The error of each row, against the larger of its own size and the usual one; infinite where the -inf differ.

        A score is a sum of both signs: the few scores of an early row can be near zero, and their rounding is not.
        """
        possible = self.recorded > -np.inf
        own, recorded = (np.where(possible, scores, 0).astype(np.float64) for scores in self)
        count = np.maximum(1, np.count_nonzero(possible, axis=1))
        mean_square = np.square(recorded).sum() / max(1, np.count_nonzero(possible))
        size = np.sqrt(np.maximum(np.square(recorded).sum(axis=1), count * mean_square))
        same = ((self.own > -np.inf) == possible).all(axis=1)
        errors = np.linalg.norm(own - recorded, axis=1) / np.maximum(size, np.finfo(np.float64).tiny)
        return Distance(np.where(same, errors, np.inf), same & (errors == 0))

    @property
    def reach(self) -> F32:
        """How far two scores of a row may have moved against each other [rows]."""
        both = (self.own > -np.inf) & (self.recorded > -np.inf)
        moved = np.abs(np.where(both, self.own, 0) - np.where(both, self.recorded, 0))
        return np.asarray(2 * moved.max(axis=1, initial=0), np.float32)


def score_entries(session: Session, layer: int, u: F32, batch: Batch, segment: Segment) -> F32:
    """Index scores [rows, entries] of `layer` for its input `u`, against the keys in the cache.

    On a device they are those of the pass that has just selected.
    """
    config, attention = session.config, session.model.layers[layer].attention
    if isinstance(attention, DeviceAttention):
        return attention.scores
    assert attention.indexer is not None, "only an index layer scores"
    rotation = batch.rotation(compressed=True)
    latent = attention.projections.query_latent(attention.arithmetic.q8(u))
    queries, weights = attention.indexer.queries(latent, rotation), attention.indexer.head_weights(u)
    entries = segment.stop // config.ratio(layer)
    keys = segment.cache.index_keys[config.kv_source(layer)].read(slice(entries))
    blocks = attention.indexer.row_blocks(len(u), entries)
    scores = np.concatenate([attention.indexer.scores(queries[rows], weights[rows], keys) for rows in blocks])
    possible = reachable(segment, config.ratio(layer))
    if segment.candidates is not None and layer != config.candidate_source_layer:
        possible = possible & segment.candidates
    return np.where(possible, scores, np.float32(-np.inf))


def reachable(segment: Segment, ratio: int) -> Bool:
    """Which entries lie behind each row of `segment` [rows, entries]."""
    return np.arange(segment.stop // ratio) < ((segment.positions + 1) // ratio)[:, None]


def compare_selection(own: I64, recorded: I64, entries: int, margin: F32, scores: Scores | None) -> Choice:
    """Selections [rows, k] as sets; `margin` [rows] is the recorded one."""
    agrees = (_mark(own, entries) == _mark(recorded, entries)).all(axis=1)
    reach = scores.reach if scores else np.zeros(len(agrees), np.float32)
    return Choice(agrees, margin <= reach)


def _mark(selection: I64, entries: int) -> Bool:
    """A mask of the selected entries [rows, entries]; -1 marks the column that is cut off."""
    mask = np.zeros((len(selection), entries + 1), np.bool_)
    np.put_along_axis(mask, selection, True, axis=1)
    return mask[:, :-1]


def compare_candidates(own: Bool, recorded: Bool, block_size: int, scores: Scores | None) -> Choice:
    """Candidates [rows, entries]; a block in place of another is excused if the best of both scores alike."""
    agrees = (own == recorded).all(axis=1)
    if scores is None:
        return Choice(agrees, np.zeros_like(agrees))
    lost = np.where(recorded & ~own, _block_best(scores.recorded, block_size), -np.inf).max(axis=1)
    gained = np.where(own & ~recorded, _block_best(scores.recorded, block_size), np.inf).min(axis=1)
    return Choice(agrees, lost - gained <= scores.reach)


def _block_best(scores: F32, block_size: int) -> F32:
    """The best score of each entry's block [rows, entries]."""
    entries = scores.shape[1]
    best = np.maximum.reduceat(scores, np.arange(0, entries, block_size), axis=1)
    return np.repeat(best, block_size, axis=1)[:, :entries]


def compare_experts(router: Router, v: F32, recorded: Array, flavour: str) -> Choice:
    """The experts that `router` chooses for its input `v` [rows, dim]."""
    scores = router.scores(v)
    agrees = (router.choose(scores) == recorded).all(axis=1)
    ranked: F32 = -np.sort(-(scores + router.bias), axis=1)
    if ranked.shape[1] == router.chosen:
        return Choice(agrees, np.zeros_like(agrees))
    margin: NDArray[np.float32] = ranked[:, router.chosen - 1] - ranked[:, router.chosen]
    return Choice(agrees, margin <= tolerance.router_margin(flavour))
