"""The indexer: which compressed entries a row attends to, and the loss that teaches it.

The choice takes no gradient. What is learned is that the softmax of the index scores resembles the attention that the
layers which use the choice pay to its entries; the inputs are detached, so nothing else learns from it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from bench.nano.model.experts import as_stored, matrix
from bench.nano.model.gather import gather
from bench.nano.model.norm import rms_norm, rotate
from bench.nano.model.quantiser import dense_weight, q4_index
from dsuf.checkpoint.config import ModelConfig

_NEVER = -1e30  # a score that no softmax sees, and with which a row without any entry still has a softmax


class Queries(nn.Module):
    """Index queries and head weights of a Full or Reindex layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = matrix(self.heads * self.width, config.q_lora_rank)
        self.weights_proj = matrix(self.heads, config.dim)

    def ask(self, u: Tensor, latent: Tensor, rotation: Tensor, quantised: bool) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, width] and weights [rows, heads] for input `u` and its (quantised) query latent."""
        latent, u = latent.detach(), u.detach()
        q = linear(latent, as_stored(self.wq_b, dense_weight, quantised, u.dtype)).unflatten(1, (self.heads, -1))
        q = rotate(q, rotation)
        weights = linear(u, self.weights_proj.to(torch.bfloat16).to(u.dtype)) * (self.width * self.heads) ** -0.5
        return q4_index(q) if quantised else q, weights


class Indexer(Queries):
    """A Full layer's: it makes the keys, too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.eps = config.norm_eps
        self.wk = matrix(self.width, config.head_dim)
        self.k_norm = nn.Parameter(torch.ones(self.width))

    def keys(self, latents: Tensor, rotation: Tensor, quantised: bool) -> Tensor:
        """Index keys [entries, width] of unrotated `latents` [entries, head_dim]."""
        latents = latents.detach()
        k = linear(latents, self.wk.to(torch.bfloat16).to(latents.dtype))
        k = rotate(rms_norm(k, self.k_norm, self.eps), rotation)
        return q4_index(k) if quantised else k


def score_all(queries: Tensor, weights: Tensor, keys: Tensor, batch: int) -> Tensor:
    """Scores [batch, length, entries] of every row against all `keys` of its sequence, visible or not, float32."""
    queries, keys = queries.unflatten(0, (batch, -1)), keys.unflatten(0, (batch, -1))
    weights = weights.unflatten(0, (batch, -1)).float()
    total = None
    for head in range(queries.shape[2]):
        by_head = torch.bmm(queries[:, :, head], keys.transpose(1, 2)).float().relu() * weights[:, :, head, None]
        total = by_head if total is None else total + by_head
    assert total is not None
    return total


def score_chosen(queries: Tensor, weights: Tensor, keys: Tensor, chosen: Tensor) -> Tensor:
    """Scores [rows, k] of every row against the keys numbered `chosen` [rows, k], float32."""
    by_head = torch.bmm(queries, gather(keys, chosen).transpose(1, 2)).float().relu()
    return (by_head * weights.float()[:, :, None]).sum(1)


def best(scores: Tensor, count: int) -> Tensor:
    """Columns [..., count] of the best scores; on a CPU ties go to the lower column, on a GPU as its routine likes."""
    if scores.is_cuda:
        return scores.topk(count, sorted=False).indices
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def candidate_blocks(scores: Tensor, reachable: Tensor, config: ModelConfig) -> Tensor:
    """Entries [batch, length, entries] inside the best blocks, for masked `scores`; the newest block is always in.

    `reachable` [batch, length, 1] counts the entries that a row may see.
    """
    size = config.candidate_block_size
    blocks = scores.unflatten(2, (-1, size)).amax(3)
    newest = torch.arange(blocks.shape[2], device=scores.device) == (reachable - 1) // size
    chosen = best(torch.where(newest, torch.inf, blocks), config.candidate_topk_blocks)
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter(2, chosen, True)
    return kept.repeat_interleave(size, 2)


def divergence(target: Tensor, scores: Tensor, visible: Tensor, stress: Tensor | None = None) -> Tensor:
    """Mean over rows of the KL divergence between attention `target` [..., k] and the softmax of `scores`.

    A row counts with the mass that it pays to its entries, at most 1, times its `stress` [...] where that is given;
    `visible` [..., k] tells real entries.
    """
    learned = log_softmax(torch.where(visible, scores, _NEVER), -1)
    mass = target.sum(-1, keepdim=True)
    known = (target / mass.clamp(min=1e-9)).clamp(min=1e-9).log()
    by_row = (target * torch.where(visible, known - learned, 0.0)).sum(-1)
    return by_row.mean() if stress is None else (by_row * stress).mean()
