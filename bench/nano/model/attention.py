"""Compressed sparse attention: a window of own rows, and entries of a compressed cache that several layers share.

The window is taken in chunks of its own size, each against itself and the chunk before. Selected entries are gathered
once for all layers that use the selection.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from bench.nano.model.experts import as_stored, matrix
from bench.nano.model.norm import as_bf16, rms_norm, rotate
from bench.nano.model.quantiser import dense_weight, q4_entry, q8
from dsuf.checkpoint.config import ModelConfig


class Seen(NamedTuple):
    """What rows see of a compressed cache. Dense: `entries` [batch, n, head_dim] and `visible` [rows, n]; sparse: the
    gathered `entries` [rows, k, head_dim] and `visible` [rows, k], which of them are real."""

    entries: Tensor
    visible: Tensor


class Projections(nn.Module):
    """Query, key and output projections of a backbone layer or a draft stage."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.wq_a, self.q_norm = matrix(c.q_lora_rank, c.dim), nn.Parameter(torch.ones(c.q_lora_rank))
        self.wq_b = matrix(c.n_heads * c.head_dim, c.q_lora_rank)
        self.wkv, self.kv_norm = matrix(c.head_dim, c.dim), nn.Parameter(torch.ones(c.head_dim))
        self.wo_a = matrix(c.o_groups, c.o_lora_rank, c.n_heads // c.o_groups * c.head_dim)
        self.wo_b = matrix(c.dim, c.o_groups * c.o_lora_rank)
        self.attn_sink = nn.Parameter(torch.zeros(c.n_heads))

    def latent(self, u: Tensor, quantised: bool) -> Tensor:
        """The query latent [rows, q_lora_rank] for (quantised) input; quantised itself."""
        low = linear(u, as_stored(self.wq_a, dense_weight, quantised, u.dtype))
        normed = rms_norm(low, self.q_norm, self.config.norm_eps)
        return q8(normed) if quantised else normed

    def queries(self, latent: Tensor, rotation: Tensor, quantised: bool) -> Tensor:
        """Queries [rows, heads, head_dim]."""
        q = linear(latent, as_stored(self.wq_b, dense_weight, quantised, latent.dtype))
        return rotate(q.unflatten(1, (self.config.n_heads, -1)), rotation)

    def keys(self, u: Tensor, rotation: Tensor, quantised: bool) -> Tensor:
        """Window rows [rows, head_dim] for (quantised) input, quantised; key and value at once."""
        k = linear(u, as_stored(self.wkv, dense_weight, quantised, u.dtype))
        k = rotate(rms_norm(k, self.kv_norm, self.config.norm_eps), rotation)
        return q8(k) if quantised else k

    def output(self, attended: Tensor, rotation: Tensor, quantised: bool) -> Tensor:
        """The branch [rows, dim] of `attended` [rows, heads, head_dim]: turned back, by group, then together."""
        c = self.config
        turned = rotate(attended, rotation, inverse=True).flatten(1).unflatten(1, (c.o_groups, -1))
        grouped = as_stored(self.wo_a, dense_weight, quantised, turned.dtype)
        low = torch.bmm(turned.transpose(0, 1), grouped.transpose(1, 2)).transpose(0, 1).flatten(1)
        return linear(q8(low) if quantised else low, as_stored(self.wo_b, dense_weight, quantised, low.dtype))


class Compressor(nn.Module):
    """One latent for each group of `ratio` positions of a Full layer."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.wkv, self.norm = matrix(config.head_dim, config.dim), nn.Parameter(torch.ones(config.head_dim))
        self.wgate = matrix(config.head_dim, config.dim) if ratio == 2 else None

    def forward(self, u: Tensor) -> Tensor:
        """Latents [rows / ratio, head_dim], unrotated, for input `u` [rows, dim]."""
        if self.wgate is None:
            return rms_norm(linear(u, self.wkv.bfloat16().to(u.dtype)), self.norm, self.eps)
        kv, gate = (linear(u.float(), as_bf16(w)).unflatten(0, (-1, 2)) for w in (self.wkv, self.wgate))
        pooled = (torch.softmax(gate, 1) * kv).sum(1).to(u.dtype)
        return rms_norm(pooled, self.norm, self.eps)


def make_entries(latents: Tensor, rotation: Tensor, quantised: bool) -> Tensor:
    """Compressed entries [entries, head_dim] of `latents`, turned by their first positions and quantised."""
    turned = rotate(latents, rotation)
    return q4_entry(turned) if quantised else turned


def window_mask(batch: int, length: int, window: int, floor: Tensor) -> Tensor:
    """Which of the 2 · window rows around its chunk a row sees [batch · length, 2 · window].

    `floor` [batch, length]: positions below it are hidden from a row.
    """
    t = torch.arange(length, device=floor.device)
    key = (t // window - 1)[:, None] * window + torch.arange(2 * window, device=floor.device)
    near = (key <= t[:, None]) & (key > t[:, None] - window)
    return (near & (key >= floor[:, :, None])).flatten(0, 1)


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, seen: Seen | None) -> tuple[Tensor, Tensor | None]:
    """Outputs [rows, heads, width] of queries `q`, and the attention paid to `seen`, summed over heads, no gradient.

    `keys` [rows, width] are the window rows of all sequences, `mask` as of `window_mask`.
    """
    rows, heads, width = q.shape
    window = mask.shape[1] // 2
    chunks = keys.unflatten(0, (-1, window))
    around = torch.cat([pad(chunks, (0, 0, 0, 0, 1, 0))[:-1], chunks], 1)
    by_chunk = q.reshape(rows // window, window * heads, width)
    near = _product(by_chunk, around.transpose(1, 2)).view(rows, heads, -1).masked_fill(~mask[:, None], -torch.inf)
    scores = near * width**-0.5
    if seen is not None:
        grouped = q.reshape(len(seen.entries), -1, width)
        far = _product(grouped, seen.entries.transpose(1, 2)).view(rows, heads, -1)
        scores = torch.cat([scores, far.masked_fill(~seen.visible[:, None], -torch.inf) * width**-0.5], 2)
    paid, total = _exponents(scores, sink)
    own = paid[:, :, : 2 * window].to(q.dtype).reshape(rows // window, window * heads, -1)
    out = _product(own, around).view(rows, heads, width)
    if seen is None:
        return (out / total).to(q.dtype), None
    others = paid[:, :, 2 * window :]
    out = out + _product(others.to(q.dtype).reshape(*grouped.shape[:2], -1), seen.entries).view(rows, heads, width)
    return (out / total).to(q.dtype), (others / total).detach().sum(1)


def _exponents(scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Of `scores` [rows, heads, n]: exponents relative to the largest, and their sum with the sink's [rows, heads, 1].

    As in the release they are rounded for the product with the values before the division.
    """
    largest = scores.detach().amax(2, keepdim=True)
    paid = (scores - largest).exp()
    return paid, paid.sum(2, keepdim=True) + (sink[:, None] - largest).clamp(max=80).exp()


def attend_block(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Outputs [blocks · size, heads, width] of `q` of the same shape, every row of a block over all its `keys`.

    `keys` [blocks, n, width] begin with a context of which `mask` [blocks, context] tells what exists.
    """
    rows, heads, width = q.shape
    grouped = q.reshape(len(keys), -1, width)
    mask = pad(mask, (0, keys.shape[1] - mask.shape[1]), value=True)[:, None]
    scores = _product(grouped, keys.transpose(1, 2)).masked_fill(~mask, -torch.inf) * width**-0.5
    paid, total = _exponents(scores.view(rows, heads, -1), sink)
    out = _product(paid.to(q.dtype).view(*grouped.shape[:2], -1), keys)
    return (out.view(rows, heads, width) / total).to(q.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product as float32; a GPU rounds it to the inputs' dtype on the way."""
    return torch.bmm(a, b).float() if a.is_cuda else torch.bmm(a.float(), b.float())
