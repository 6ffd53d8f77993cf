"""A model of a few hundred weights with the small model's interface, for tests of the loop alone."""

from typing import NamedTuple

import torch

from bench.nano.mode import Mode

VOCABULARY = 32
METRICS = ("ce",)


class Outcome(NamedTuple):
    """As the model's."""

    loss: torch.Tensor
    metrics: torch.Tensor
    loads: tuple[torch.Tensor, ...]
    right: torch.Tensor
    draft_right: torch.Tensor


class StandIn(torch.nn.Module):
    """Predicts the next token from the present one; the draft is right wherever the target is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(0.1 * torch.randn(VOCABULARY, width))
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].w1 = torch.nn.Parameter(torch.randn(2, 16, width) * width**-0.5)
        self.layers[0].w2 = torch.nn.Parameter(torch.randn(2, width, 16) / 4)
        self.layers[0].attn = torch.nn.Module()
        self.layers[0].attn.indexer = torch.nn.Module()
        self.layers[0].attn.indexer.k_norm = torch.nn.Parameter(torch.zeros(width))
        self.head = torch.nn.Parameter(0.1 * torch.randn(VOCABULARY, width))
        self.mtp = torch.nn.Parameter(torch.randn(8, width))
        self.register_buffer("bias", torch.zeros(2))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """The part that a test compiles."""
        return self.embed[ids]

    def selection_loss(self, ids: torch.Tensor, stress: torch.Tensor, *, quantised: bool) -> torch.Tensor:
        """Least where the indexer holds the mean embedding."""
        assert quantised
        apart = (self.embedded(ids.long()) - self.layers[0].attn.indexer.k_norm).square().mean(-1)
        return (apart * stress).mean()

    def forward(self, ids: torch.Tensor, weights: torch.Tensor, mode: Mode, anchors: torch.Tensor) -> Outcome:
        x = self.embedded(ids.long())
        for up, down in zip(self.layers[0].w1, self.layers[0].w2, strict=True):
            x = x + torch.relu(x @ up.T) @ down.T
        logits = x @ self.head.T
        targets = torch.roll(ids.long(), -1, dims=1)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)
        whole = loss + (x.detach() @ self.mtp.T).square().mean() if mode.draft else loss
        right = logits.argmax(-1) == targets
        right[:, -1] = False
        places = (anchors[:, None] + torch.arange(5, device=anchors.device)).clamp(max=right.numel() - 1)
        loads = (torch.tensor([0.9, 0.1], device=ids.device),)
        return Outcome(whole, loss.detach().view(1), loads, right, right.flatten()[places] & mode.draft)
