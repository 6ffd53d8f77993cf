"""The whole model: a batch of sequences of one length in, a loss and what was learned about it out."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from bench.nano.mode import Mode
from bench.nano.model.backbone import Backbone, Pass
from bench.nano.model.draft import Anchors, Draft, Drafted, DraftHead, judge
from bench.nano.model.experts import Router
from bench.nano.model.gather import gather
from bench.nano.model.mixing import collapse
from bench.nano.model.norm import as_bf16, rms_norm
from dsuf.checkpoint.config import ModelConfig

METRICS = ("text", "index", "draft", "accepted", "confidence")
"""Names of `Outcome.metrics`: cross-entropy by weight, mean KL divergence of the selecting layers, the drafts'
cross-entropy to the target's distribution, their overlap with it, and the confidence's cross-entropy."""


class Outcome(NamedTuple):
    """`loss` to be minimised; `metrics` by `METRICS`; for every router the share of rows that chose each expert, in the
    order of `Nano.routers`; where the arg-max is the next token [batch, length] (not in the last column), and where a
    draft's arg-max is the token it stands for [anchors, block] (not beyond the end; None without drafts)."""

    loss: Tensor
    metrics: Tensor
    loads: tuple[Tensor, ...]
    right: Tensor
    draft_right: Tensor | None


class Nano(nn.Module):
    """The model of sizes `config`. `token_ids` [vocabulary] are the Engram ids of tokens; activations are in `dtype`.

    Parameters are float32 and named as in the release, without `.weight`; the experts of a layer are stacked.
    """

    def __init__(
        self, config: ModelConfig, token_ids: Tensor, dtype: torch.dtype = torch.bfloat16, max_length: int = 8192
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.dim) * 0.5)
        self.backbone = Backbone(config, token_ids, max_length)
        self.norm = nn.Parameter(torch.ones(config.dim))
        self.head = nn.Parameter(torch.randn(config.vocab_size, config.dim) * config.dim**-0.5)
        self.mtp = DraftHead(config)

    def routers(self) -> list[Router]:
        """Every router, the backbone's first."""
        return [block.ffn.gate for block in [*self.backbone.layers, *self.mtp.stages]]

    def forward(self, ids: Tensor, weights: Tensor, mode: Mode, anchors: Tensor | None = None) -> Outcome:
        """The loss over `ids` [batch, length]; `weights` [batch, length] float32 belong to the next tokens.

        `anchors` [n] number rows (batch · length) after which to draft; needed if `mode.draft`.
        """
        ids = ids.long()
        done = self._run(ids, mode, None)
        logits = self._predict(done)
        text, right = judge_text(logits, ids, weights)
        loss, loads, draft_right = text + done.index_loss.sum(), done.loads, None
        figures = [text, done.index_loss.mean(), *[torch.zeros_like(text)] * 3]
        if mode.draft and anchors is not None:
            drafted = self._draft(ids, done, anchors, mode, None)
            near = block_rows(anchors, ids, weights, self.config.dspark_block_size)
            part = judge(drafted, logits[near.rows], near.judged)
            loss, loads = loss + part.distance + part.confidence, loads + drafted.loads
            figures[2:] = [part.distance, part.accepted, part.confidence]
            draft_right = near.inside & (drafted.logits.detach().argmax(2) == near.targets)
        return Outcome(loss, torch.stack(figures).detach(), loads, right, draft_right)

    def selection_loss(self, ids: Tensor, stress: Tensor, *, quantised: bool) -> Tensor:
        """How far the index scores of `ids` [batch, length] are from the attention paid to all visible entries.

        `stress` [batch, length] float32 weighs positions. Only what the indexers hold gets a gradient from it.
        """
        ids = ids.long()
        h = gather(self.embed, ids.flatten()).bfloat16().to(self.dtype)
        mode = Mode(dense=True, quantised=quantised, draft=False)
        return self.backbone(h, ids, mode, None, stress.flatten()).index_loss.sum()

    @torch.no_grad()
    def logits(self, ids: Tensor, mode: Mode, replay_from: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocabulary] float32.

        With `replay_from` [batch] as after bounded replay: rows from there on see no window row before it in the
        decoder, its first layer apart.
        """
        return self._predict(self._run(ids.long(), mode, replay_from)).unflatten(0, ids.shape)

    @torch.no_grad()
    def draft(self, ids: Tensor, mode: Mode, anchors: Tensor, replay_from: Tensor | None = None) -> Drafted:
        """Drafts after `anchors` [n], rows of the batch, with the true token before each; arguments as for `logits`."""
        ids = ids.long()
        return self._draft(ids, self._run(ids, mode, replay_from), anchors, mode, replay_from)

    def _run(self, ids: Tensor, mode: Mode, replay_from: Tensor | None) -> Pass:
        h = gather(self.embed, ids.flatten()).bfloat16().to(self.dtype)
        return self.backbone(h, ids, mode, replay_from)

    def _predict(self, done: Pass) -> Tensor:
        """Logits [rows, vocabulary] float32."""
        return predict(done.streams, done.pre, self.norm, self.head, self.config.norm_eps)

    def _draft(self, ids: Tensor, done: Pass, anchors: Tensor, mode: Mode, replay_from: Tensor | None) -> Drafted:
        length = ids.shape[1]
        floor = torch.zeros_like(anchors) if replay_from is None else replay_from[anchors // length]
        begun = Anchors(anchors, anchors % length, floor, length)
        rotary = self.backbone.window_table
        draft, rotation = Draft(self.config, self.mtp, rotary), rotary[:length].repeat(len(ids), 1, 1)
        return draft.run(ids.flatten(), done.taps, rotation, begun, self.embed, self.head, mode.quantised)


def predict(streams: Tensor, pre: Tensor, norm: Tensor, head: Tensor, eps: float) -> Tensor:
    """Logits [rows, vocabulary] float32 of final `streams` [rows, s, dim]."""
    return linear(rms_norm(collapse(streams, pre), norm, eps).float(), as_bf16(head))


class Near(NamedTuple):
    """Of every row of every block [anchors, block]: its row in the batch, the token it stands for, whether that lies
    `inside` the sequence, and whether the row is `judged`: up to the first target without weight."""

    rows: Tensor
    targets: Tensor
    inside: Tensor
    judged: Tensor


def block_rows(anchors: Tensor, ids: Tensor, weights: Tensor, size: int) -> Near:
    """Where the blocks of `size` after `anchors` lie in the batch `ids` [batch, length] with `weights` of the same."""
    block, length = torch.arange(size, device=ids.device), ids.shape[1]
    inside = (anchors % length)[:, None] + block < length - 1
    rows = torch.where(inside, anchors[:, None] + block, anchors[:, None])
    targets = ids.flatten()[(rows + 1).clamp(max=ids.numel() - 1)]
    weighed = (weights.flatten()[rows] > 0) & inside
    return Near(rows, targets, inside, weighed.cumprod(1).bool())


def judge_text(logits: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the next tokens by `weights` [batch, length], and where the arg-max is right."""
    following = torch.roll(ids, -1, 1)
    inside = torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - 1
    share = torch.where(inside, weights, 0.0).flatten()
    losses = cross_entropy(logits, following.flatten(), reduction="none")
    right = (logits.detach().argmax(1).view(ids.shape) == following) & inside
    return (losses * share).sum() / share.sum().clamp(min=1), right
