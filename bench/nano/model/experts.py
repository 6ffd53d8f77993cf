"""Mixture of experts, all of them computed: the routing weight is zero where a row did not choose.

The experts' hidden units lie side by side as one wide SwiGLU. The weight multiplies them before the quantiser of the
second product, as in the release.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from bench.nano.model.norm import as_bf16
from bench.nano.model.quantiser import dense_weight, expert_weight, q8
from dsuf.checkpoint.config import ModelConfig


class Router(nn.Module):
    """Scores in float32; `bias` [experts] takes part in the choice only and is moved by the load, not by a gradient."""

    def __init__(self, dim: int, experts: int, chosen: int, route_scale: float) -> None:
        super().__init__()
        self.chosen, self.route_scale = chosen, route_scale
        self.weight = matrix(experts, dim)
        self.register_buffer("bias", torch.zeros(experts))
        self.bias: Tensor

    def forward(self, v: Tensor) -> Tensor:
        """Weights [rows, experts] float32, zero where not chosen; ties go to the lower expert."""
        scores = softplus(linear(v.float(), as_bf16(self.weight))).sqrt()
        biased = (scores + self.bias).detach()
        order = torch.arange(biased.shape[1], device=v.device)
        mine, other = biased[:, :, None], biased[:, None, :]
        ahead = (other > mine) | ((other == mine) & (order[None, :] < order[:, None]))
        picked = torch.where(ahead.sum(2) < self.chosen, scores, 0.0)
        return picked / (picked.sum(1, keepdim=True) + 1e-20) * self.route_scale


class Feed(NamedTuple):
    """A branch [rows, dim] and the share of rows that chose each expert [experts]."""

    branch: Tensor
    load: Tensor


class SharedExpert(nn.Module):
    """The expert of every row, stored as FP8."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = matrix(inner, dim), matrix(inner, dim), matrix(dim, inner)


class RoutedExperts(nn.Module):
    """`count` experts, stored as FP4, stacked along the first axis."""

    def __init__(self, count: int, dim: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = matrix(count, inner, dim), matrix(count, inner, dim)
        self.w2 = matrix(count, dim, inner)


class Experts(nn.Module):
    """The experts of one layer or draft stage."""

    def __init__(self, config: ModelConfig, count: int, chosen: int) -> None:
        super().__init__()
        dim, inner = config.dim, config.moe_inter_dim
        self.limit = config.swiglu_limit
        self.gate = Router(dim, count, chosen, config.route_scale)
        self.shared_experts, self.experts = SharedExpert(dim, inner), RoutedExperts(count, dim, inner)

    def forward(self, v: Tensor, quantised: bool) -> Feed:
        """The branch for normed input `v` [rows, dim]."""
        weights, count = self.gate(v), self.experts.w1.shape[0]
        shared, routed = self.shared_experts, self.experts
        x = q8(v) if quantised else v
        w1, w3, w2 = (as_stored(w, expert_weight, quantised, v.dtype) for w in (routed.w1, routed.w3, routed.w2))
        hidden = self._swiglu(linear(x, w1.flatten(0, 1)), linear(x, w3.flatten(0, 1)))
        weighted = (hidden.unflatten(1, (count, -1)) * weights[:, :, None]).flatten(1).to(v.dtype)
        out = linear(q8(weighted) if quantised else weighted, w2.transpose(0, 1).flatten(1))
        s1, s3, s2 = (as_stored(w, dense_weight, quantised, v.dtype) for w in (shared.w1, shared.w3, shared.w2))
        inner = self._swiglu(linear(x, s1), linear(x, s3)).to(v.dtype)
        everyone = linear(q8(inner) if quantised else inner, s2)
        branch = (out.float() + everyone.float()).to(v.dtype)
        return Feed(branch, (weights.detach() > 0).float().mean(0))

    def _swiglu(self, a: Tensor, b: Tensor) -> Tensor:
        """silu(a) · b in float32; b clamped on both sides, a from above only."""
        gate = a.float().clamp(max=self.limit)
        return gate * torch.sigmoid(gate) * b.float().clamp(-self.limit, self.limit)


def matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """Random weights [..., out, in] of deviation gain · in^-0.5."""
    return nn.Parameter(torch.randn(*shape) * (gain * shape[-1] ** -0.5))


def as_stored(weight: nn.Parameter, quantiser, quantised: bool, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
    """A master weight as a product reads it: through its storage format if `quantised`, in `dtype`."""
    stored: Tensor = quantiser(weight) if quantised else weight
    return stored.to(dtype)
