"""The optimiser: Muon for the projections, AdamW for the rest, on one flat buffer that a CUDA graph can step.

Muon (Jordan 2024): the momentum of a matrix is made nearly orthogonal by five Newton-Schulz steps and scaled by
sqrt(max(1, rows / columns)). A parameter of three axes is a stack of matrices. All matrices of one shape lie one behind
the other, so that one batched product serves them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

MUON_RATE = 0.02
MUON_DECAY = 0.05
MUON_MOMENTUM = 0.95
ADAM_RATE = 2e-3
EMBEDDING_RATE = 5e-3
TABLE_RATE = 1e-2
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
CLIP_NORM = 1.0
BIAS_RATE = 1e-3
# Every parameter begins at a multiple of so many values: compiled code takes it that a parameter is aligned.
ALIGNED = 64
# The quintic that Jordan fitted: steepest at zero, and any singular value ends between about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
# Matrices that are no projections of a hidden state, by the last part of their name.
NOT_MUON = {"embed", "head", "gate", "proj", "weights_proj", "q_weight", "k_weight"}


class Group(NamedTuple):
    """Matrices of one shape, one behind the other from `start`; the draft's apart from the target's."""

    start: int
    count: int
    rows: int
    columns: int
    is_draft: bool

    @property
    def size(self) -> int:
        """Values in all matrices of the group."""
        return self.count * self.rows * self.columns


def name_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """All parameters by the names of the released layout."""
    return [(name.removeprefix("backbone."), parameter) for name, parameter in model.named_parameters()]


def is_draft(name: str) -> bool:
    """Whether a parameter belongs to the draft, which trains in the last stage only."""
    return name.startswith(("mtp", "draft"))


def takes_muon(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a projection."""
    last = last_part(name)
    return parameter.dim() > 1 and last not in NOT_MUON and not last.startswith("hc_")


def adam_rate(name: str) -> float:
    """The learning rate of a parameter that takes AdamW."""
    if last_part(name) != "embed" or "markov" in name:
        return ADAM_RATE
    return TABLE_RATE if "engram" in name else EMBEDDING_RATE


def last_part(name: str) -> str:
    """`gate` of `layers.3.ffn.gate` and of `layers.3.ffn.gate.weight`."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz of a stack [n, rows, columns]: the singular vectors stay, the singular values go near 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The norm in fp32: squares of small gradients vanish in bf16.
    x = (x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-20)).to(
        torch.bfloat16 if matrices.is_cuda else torch.float32
    )
    a, b, c = QUINTIC
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimiser:
    """Masters, gradients and state of all parameters, each kind in one flat fp32 tensor.

    `step` makes no decision on the host: the factor on the learning rates and whether the draft trains are device
    tensors, so that it can be captured once.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], biases: Sequence[torch.Tensor]) -> None:
        """Lay out all parameters; `biases` are the routers' [experts], in the order of the loads that `step` gets."""
        named = list(parameters)
        adam = [(n, p) for n, p in named if not takes_muon(n, p)]
        muon = sorted(((n, p) for n, p in named if takes_muon(n, p)), key=lambda item: _sort_key(*item))
        self.order = [name for name, _ in adam + muon]
        device = named[0][1].device
        self.adam_size = sum(_room(p) for _, p in adam)
        total = self.adam_size + sum(_room(p) for _, p in muon)
        self.masters, self.gradients, self.momentum = (torch.zeros(total, device=device) for _ in range(3))
        self.squares = torch.zeros(self.adam_size, device=device)
        self.rates = torch.cat([torch.full((_room(p),), adam_rate(n), device=device) for n, p in adam])
        self.groups = _group(muon, self.adam_size)
        self._bind(adam + muon)
        self.biases = list(biases)
        self.pace, self.draft_on, self.count = (torch.zeros((), device=device) for _ in range(3))

    def _bind(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Make every parameter and its gradient a view of the flat tensors."""
        at = 0
        for _, parameter in named:
            views = [t[at : at + parameter.numel()].view(parameter.shape) for t in (self.masters, self.gradients)]
            views[0].copy_(parameter.data)
            parameter.data, parameter.grad = views
            at += _room(parameter)

    def set_pace(self, pace: float, draft_on: bool) -> None:
        """The factor on all learning rates of the next steps, and whether the draft gets gradients."""
        self.pace.fill_(pace)
        self.draft_on.fill_(float(draft_on))

    @torch.no_grad()
    def step(self, loads: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """One step from `gradients`; returns their norm. A gradient that is not finite moves nothing.

        `loads` are the experts' shares of the tokens, [experts] for each router.
        """
        norm = self.gradients.norm()
        sound = torch.isfinite(norm)
        scale = torch.where(sound, torch.clamp(CLIP_NORM / (norm + 1e-12), max=1.0), 0.0)
        self.gradients.copy_(torch.where(sound, self.gradients * scale, 0.0))
        self.count += sound
        pace = self.pace * sound
        self._step_adam(pace)
        for group in self.groups:
            self._step_muon(group, pace)
        if loads:
            self._balance(loads, pace)
        return norm

    def _step_adam(self, pace: torch.Tensor) -> None:
        first, second = ADAM_BETAS
        part = slice(0, self.adam_size)
        gradient, mean = self.gradients[part], self.momentum[part]
        mean.lerp_(gradient, 1 - first)
        self.squares.lerp_(gradient * gradient, 1 - second)
        count = self.count.clamp(min=1)
        root = (self.squares / (1 - second**count)).sqrt_().add_(ADAM_EPS)
        self.masters[part].sub_(pace * self.rates * (mean / (1 - first**count)) / root)

    def _step_muon(self, group: Group, pace: torch.Tensor) -> None:
        part = slice(group.start, group.start + group.size)
        shape = (group.count, group.rows, group.columns)
        gradient, mean = self.gradients[part].view(shape), self.momentum[part].view(shape)
        mean.lerp_(gradient, 1 - MUON_MOMENTUM)
        turned = orthogonalise(torch.lerp(gradient, mean, MUON_MOMENTUM))
        rate = pace * MUON_RATE
        # Without gradients the draft would only decay.
        decay = rate * MUON_DECAY * (self.draft_on if group.is_draft else 1.0)
        size = math.sqrt(max(1.0, group.rows / group.columns))
        self.masters[part].view(shape).mul_(1 - decay).sub_(turned * (rate * size))

    def _balance(self, loads: Sequence[torch.Tensor], pace: torch.Tensor) -> None:
        """Move each router's bias towards equal loads by a fixed step (model.md section 9: the choice only)."""
        for load, bias in zip(loads, self.biases, strict=True):
            bias.add_(torch.sign(load.mean() - load) * (BIAS_RATE * (pace > 0)))

    def state(self) -> dict[str, torch.Tensor]:
        """What a resume needs; views, not copies. The masters are in `order`."""
        state = {"masters": self.masters, "momentum": self.momentum, "squares": self.squares, "count": self.count}
        return state | {f"bias.{i}": bias for i, bias in enumerate(self.biases)}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take the state of a run with the same sizes."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name].to(tensor.device, tensor.dtype).view(tensor.shape))


def _room(parameter: torch.Tensor) -> int:
    """Values that a parameter takes up in the flat tensors."""
    return -(-parameter.numel() // ALIGNED) * ALIGNED


def _sort_key(name: str, parameter: torch.Tensor) -> tuple[bool, int, int]:
    return is_draft(name), int(parameter.shape[-2]), int(parameter.shape[-1])


def _group(muon: Sequence[tuple[str, torch.Tensor]], start: int) -> list[Group]:
    """Runs of equal shape, with nothing between them, among parameters that are sorted by it."""
    groups: list[Group] = []
    for name, parameter in muon:
        rows, columns = parameter.shape[-2:]
        count = parameter.numel() // (rows * columns)
        last = groups[-1] if groups else None
        alike = last and (last.rows, last.columns, last.is_draft) == (rows, columns, is_draft(name))
        if last and alike and last.start + last.size == start:
            groups[-1] = last._replace(count=last.count + count)
        else:
            groups.append(Group(start, count, rows, columns, is_draft(name)))
        start += _room(parameter)
    return groups
