"""The indexer: which compressed entries a query attends to.

    score(t, j) = Σ_heads w[h] · max(0, iq[h] · ik_j),   w = weights_proj · u / sqrt(index width · index heads)

Only complete groups can be chosen, j < (t+1) // ratio; the best `index_topk` of them are. The candidate source also
keeps its best *blocks* of entries; the Reindex layers after it choose inside those.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, Bool, matmul
from dsuf.reference.rope import Rotation
from dsuf.reference.weights import WeightSource

BLOCK_ELEMENTS = 1 << 22
"""Head scores held at once; rows are taken in blocks, so that a long prompt does not need a square of memory."""


class Indexer:
    """Index queries and scores of one Full or Reindex layer."""

    def __init__(self, source: WeightSource, layer: int, config: ModelConfig, arithmetic: Arithmetic) -> None:
        prefix = f"layers.{layer}.attn.indexer"
        self.config, self.arithmetic = config, arithmetic
        self.wq_b: F64 = source.linear(f"{prefix}.wq_b")
        self.weights_proj: F64 = source.matrix(f"{prefix}.weights_proj.weight")

    def queries(self, qr_quantised: F32, rotation: Rotation) -> F32:
        """Index queries [rows, heads, width] from the quantised query latent."""
        q = self.arithmetic.act(matmul(qr_quantised, self.wq_b))
        q = q.reshape(len(q), self.config.index_n_heads, self.config.index_head_dim)
        return self.arithmetic.q4_index(rotation.apply(q, self.arithmetic))

    def head_weights(self, u: F32) -> F32:
        """The weight of each index head [rows, heads]."""
        scale = np.float32(self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5)
        return self.arithmetic.act(self.arithmetic.act(matmul(u, self.weights_proj)) * scale)

    def scores(self, queries: F32, weights: F32, keys: F64) -> F32:
        """Scores [rows, entries] against `keys` [entries, width]; rounded by head, by weighting and after the sum."""
        rows, heads, width = queries.shape
        act = self.arithmetic.act
        by_head = act(np.matmul(queries.reshape(-1, width).astype(np.float64), keys.T).astype(np.float32))
        by_head = np.maximum(by_head, np.float32(0)).reshape(rows, heads, len(keys))
        return act(np.add.reduce(act(by_head * weights[:, :, None]), axis=1, dtype=np.float64).astype(np.float32))

    def row_blocks(self, rows: int, entries: int) -> list[slice]:
        """Slices of `rows` small enough that their head scores fit `BLOCK_ELEMENTS`."""
        step = max(1, BLOCK_ELEMENTS // max(1, entries * self.config.index_n_heads))
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def select(scores: F32, allowed: Bool, count: int) -> I64:
    """The `count` best allowed entries of each row, ascending, then -1 [rows, count]; ties go to the lower entry."""
    masked = np.where(allowed, scores, np.float32(-np.inf))
    chosen = allowed if scores.shape[1] <= count else _best(masked, count) & allowed
    return _positions(chosen, count)


def _best(scores: F32, count: int) -> Bool:
    """A mask of exactly `count` entries a row: all above the count-th best, then the first of its equals."""
    threshold = np.partition(scores, scores.shape[1] - count, axis=1)[:, -count, None]
    above, level = scores > threshold, scores == threshold
    missing = count - np.count_nonzero(above, axis=1)[:, None]
    best: Bool = above | (level & (np.cumsum(level, axis=1) <= missing))
    return best


def _positions(chosen: Bool, count: int) -> I64:
    """Column numbers of the true entries of each row, ascending, padded with -1 to `count`."""
    found = np.full((len(chosen), count), -1, np.int64)
    rows, columns = np.nonzero(chosen)
    first = np.concatenate([[0], np.cumsum(np.count_nonzero(chosen, axis=1))])
    found[rows, np.arange(len(rows)) - first[rows]] = columns
    return found


def candidate_mask(scores: F32, reachable: I64, blocks: int, block_size: int) -> Bool:
    """Entries inside the `blocks` best blocks of each row [rows, entries].

    `scores` [rows, entries] are masked (-inf where not reachable), `reachable` [rows] counts reachable entries. A block
    is as good as its best entry; the newest reachable entry's block is always in, a block without any never.
    """
    rows, entries = scores.shape
    count = -(-entries // block_size)
    padded = np.full((rows, count * block_size), -np.inf, np.float32)
    padded[:, :entries] = scores
    best = padded.reshape(rows, count, block_size).max(axis=2)
    possible = best > -np.inf
    newest = (reachable - 1) // block_size
    some = reachable > 0
    best[some, newest[some]] = np.inf
    kept = possible if count <= blocks else _best(best, blocks) & possible
    kept = kept | (best == np.inf)
    return np.asarray(np.repeat(kept, block_size, axis=1)[:, :entries])
