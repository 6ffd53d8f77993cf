"""The draft head for training: blocks after chosen anchors, each token's predecessor as it really was.

Taps, embedding and head are the backbone's and take no gradient from here.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear, log_softmax

from bench.nano.model.experts import as_stored, matrix
from bench.nano.model.gather import gather
from bench.nano.model.layer import Stage
from bench.nano.model.mixing import collapse, enter_streams
from bench.nano.model.norm import as_bf16, rms_norm
from bench.nano.model.quantiser import dense_weight, q8
from dsuf.checkpoint.config import ModelConfig


class Anchors(NamedTuple):
    """Where drafts begin, as rows of the batch: `rows` [anchors], their `positions`, `floor` [anchors]: the first
    position of the context; `length` of every sequence."""

    rows: Tensor
    positions: Tensor
    floor: Tensor
    length: int


class Drafted(NamedTuple):
    """What a draft pass yields for every row of every block."""

    logits: Tensor  # [anchors, block, vocabulary] float32, Markov bias included
    confidence: Tensor  # [anchors, block] float32, before any sigmoid
    loads: tuple[Tensor, ...]  # of the stages' experts


class MarkovHead(nn.Module):
    """A bias by the token before, of low rank."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Parameter(torch.randn(vocabulary, rank) * 0.1), matrix(vocabulary, rank, gain=0.1)


class ConfidenceHead(nn.Module):
    """How likely a draft is to be accepted, from the row's state and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = matrix(1, width, gain=0.1)


class Intake(nn.Module):
    """What the first stage has besides: it takes in the backbone's taps."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.main_proj = matrix(config.dim, len(config.dspark_target_layer_ids) * config.dim)
        self.main_norm = nn.Parameter(torch.ones(config.dim))

    def forward(self, taps: Tensor, quantised: bool) -> Tensor:
        """Context rows [rows, dim], quantised, of `taps` [rows, targets · dim]."""
        taps = taps.detach()
        low = linear(q8(taps) if quantised else taps, as_stored(self.main_proj, dense_weight, quantised, taps.dtype))
        normed = rms_norm(low, self.main_norm, self.eps)
        return q8(normed) if quantised else normed


class Choice(nn.Module):
    """What the last stage has besides: it makes tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.norm = nn.Parameter(torch.ones(config.dim))
        self.markov_head = MarkovHead(config.vocab_size, config.dspark_markov_rank)
        self.confidence_head = ConfidenceHead(config.dim + config.dspark_markov_rank)

    def forward(self, streams: Tensor, pre: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [rows, vocabulary] and confidence [rows] given the token `previous` [rows] to each choice."""
        hidden = collapse(streams, pre)
        markov = gather(as_bf16(self.markov_head.embed), previous)
        own = linear(rms_norm(hidden, self.norm, self.eps).float(), as_bf16(head.detach()))
        logits = own + linear(markov, as_bf16(self.markov_head.head))
        joined = torch.cat([hidden.float(), markov], 1)
        return logits, linear(joined, as_bf16(self.confidence_head.proj))[:, 0]


class DraftHead(nn.Module):
    """The stages with what stands before the first and after the last."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(config) for _ in range(config.n_mtp_layers))
        self.intake, self.choice = Intake(config), Choice(config)


class Draft:
    """Runs a draft head; `rotary` is the table of window layers."""

    def __init__(self, config: ModelConfig, mtp: DraftHead, rotary: Tensor) -> None:
        self.config, self.mtp, self.rotary = config, mtp, rotary

    def run(
        self, ids: Tensor, taps: Tensor, rotation: Tensor, anchors: Anchors, embed: Tensor, head: Tensor,
        quantised: bool,
    ) -> Drafted:  # fmt: skip
        """Blocks after `anchors` of flat `ids` [rows]; `taps` [rows, targets · dim] and `rotation` are of all rows."""
        c, size = self.config, self.config.dspark_block_size
        block = torch.arange(size, device=ids.device)
        place = (anchors.positions[:, None] + block).flatten()
        entered = torch.where(block == 0, ids[anchors.rows][:, None], c.dspark_noise_token_id).flatten()
        streams, pre = enter_streams(embed.detach()[entered].bfloat16().to(taps.dtype), c.hc_mult)
        context, turned = self.mtp.intake(taps, quantised), self.rotary[place]
        near, mask = self._window(anchors)
        loads = []
        for stage in self.mtp.stages:
            rows = gather(stage.attn.keys(context, rotation, quantised), near)
            u, mixes = stage.enter(streams, pre)
            branch = stage.look(u, rows, mask, turned, size, quantised)
            streams, pre, load = stage.leave(streams, branch, mixes, quantised)
            loads.append(load)
        within = (anchors.positions[:, None] + block).clamp(max=anchors.length - 1) - anchors.positions[:, None]
        previous = ids[(anchors.rows[:, None] + within).flatten()]
        logits, confidence = self.mtp.choice(streams, pre, head, previous)
        return Drafted(logits.unflatten(0, (-1, size)), confidence.unflatten(0, (-1, size)), tuple(loads))

    def _window(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Rows [anchors, window] of the context before each anchor, and which of them exist."""
        back = torch.arange(-self.config.window_size, 0, device=anchors.rows.device)
        return (anchors.rows[:, None] + back).clamp(min=0), anchors.positions[:, None] + back >= anchors.floor[:, None]


class DraftLoss(NamedTuple):
    """Means over judged rows, float32 scalars."""

    distance: Tensor
    confidence: Tensor
    accepted: Tensor


def judge(drafted: Drafted, target: Tensor, judged: Tensor) -> DraftLoss:
    """How far drafts are from the `target` logits [anchors, block, vocabulary]; by rows `judged` [anchors, block]."""
    share = judged.float() / judged.sum().clamp(min=1)
    p, log_q = torch.softmax(target.detach(), -1), log_softmax(drafted.logits, -1)
    overlap = torch.minimum(p, log_q.detach().exp()).sum(-1)
    confidence = binary_cross_entropy_with_logits(drafted.confidence, overlap.clamp(max=1), reduction="none")
    distance = -(p * log_q).sum(-1)
    return DraftLoss((distance * share).sum(), (confidence * share).sum(), (overlap * share).sum())
