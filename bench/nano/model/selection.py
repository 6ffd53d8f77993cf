"""Choosing entries for all rows of a batch, in a form whose shapes do not depend on data."""

from typing import NamedTuple

import torch
from torch import Tensor

from bench.nano.model.indexer import best, candidate_blocks, score_all
from dsuf.checkpoint.config import ModelConfig


class Chosen(NamedTuple):
    """`rows` [rows, k] number entries of the whole batch, `visible` [rows, k] says which of them may be seen;
    `candidates` [batch, length, entries] bind the Reindex layers after the candidate source."""

    rows: Tensor
    visible: Tensor
    candidates: Tensor | None


class Question(NamedTuple):
    """A layer's index queries [rows, heads, width], head weights [rows, heads] and keys [entries, width]."""

    queries: Tensor
    weights: Tensor
    keys: Tensor


@torch.no_grad()
def choose(
    question: Question, reachable: Tensor, candidates: Tensor | None, is_source: bool, config: ModelConfig
) -> Chosen:
    """The best entries of every row; `reachable` [length] counts those that a position may see.

    The candidate source leaves `candidates` where they can exclude anything, and is not bound by them itself.
    """
    batch = question.queries.shape[0] // len(reachable)
    scores = score_all(*question, batch).to(question.queries.dtype)
    entries, counts = scores.shape[2], reachable[:, None]
    scores = scores.masked_fill(torch.arange(entries, device=scores.device) >= counts, -torch.inf)
    if is_source:
        few = entries <= config.candidate_topk_blocks * config.candidate_block_size
        candidates = None if few else candidate_blocks(scores, counts, config)
    elif candidates is not None:
        scores = scores.masked_fill(~candidates, -torch.inf)
    columns = best(scores, min(config.index_topk, entries))
    visible = scores.gather(2, columns) > -torch.inf
    first = torch.arange(batch, device=scores.device)[:, None, None] * entries
    return Chosen((columns + first).flatten(0, 1), visible.flatten(0, 1), candidates)
