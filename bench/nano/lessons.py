"""Lessons for the indexers alone: at the longest rows, from the attention that the frozen rest pays to all entries.

A training step compares an index with attention among the entries it has chosen. What it never chooses it never learns
of, so that long rows are left to luck. A lesson looks at every entry instead. Nothing has a gradient but what the
indexers hold, so it costs little more than a forward pass; nothing of it is compiled.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from bench.nano.optimiser import ADAM_BETAS, ADAM_EPS

RATE = 1e-3
# Half of a lesson is about positions before an answer's tokens, the other half about all positions.
ANSWER_SHARE = 0.5


class Pupil(Protocol):
    """A model with indexers; see `bench.nano.model.Nano`."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters."""
        ...

    def selection_loss(self, ids: torch.Tensor, stress: torch.Tensor, *, quantised: bool) -> torch.Tensor:
        """How far the index scores are from the attention paid."""
        ...


class Lessons:
    """AdamW without decay over the indexers' parameters; its moments start anew in every piece of a training."""

    def __init__(self, model: Pupil) -> None:
        named = list(model.named_parameters())
        self.parameters = [parameter for name, parameter in named if ".indexer." in name]
        self._model, self._others = model, [parameter for name, parameter in named if ".indexer." not in name]
        self._means, self._squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        device = self.parameters[0].device
        self._count, self._loss, self._given = (torch.zeros((), device=device) for _ in range(3))

    def give(self, ids: np.ndarray, labels: np.ndarray, answers: Sequence[int], pace: float) -> None:
        """One step from a batch [rows, tokens], a row at a time; `answers` are the labels that count as such."""
        device = self._loss.device
        gradients = [torch.zeros_like(p) for p in self.parameters]
        with _alone(self._others), torch.compiler.set_stance("force_eager"):
            for row, stress in zip(ids, weigh(np.isin(labels, answers)), strict=True):
                loss = self._model.selection_loss(
                    torch.from_numpy(row[None]).to(device), torch.from_numpy(stress[None]).to(device), quantised=True
                )
                for total, part in zip(gradients, torch.autograd.grad(loss, self.parameters), strict=True):
                    total += part / len(ids)
                self._loss += loss.detach() / len(ids)
        self._given += 1
        self._step(gradients, pace)

    def read(self) -> tuple[int, float]:
        """Lessons since the last reading, and their mean loss; waits for the device."""
        given, total = float(self._given), float(self._loss)
        self._given.zero_()
        self._loss.zero_()
        return int(given), total / max(1.0, given)

    @torch.no_grad()
    def _step(self, gradients: Sequence[torch.Tensor], pace: float) -> None:
        """Move the parameters; a gradient that is not finite moves nothing."""
        sound = torch.stack([g.isfinite().all() for g in gradients]).all()
        self._count += sound
        count = self._count.clamp(min=1)
        first, second = ADAM_BETAS
        for parameter, mean, square, raw in zip(self.parameters, self._means, self._squares, gradients, strict=True):
            gradient = torch.where(sound, raw, 0.0)
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient * gradient, 1 - second)
            root = (square / (1 - second**count)).sqrt_().add_(ADAM_EPS)
            parameter.sub_(pace * RATE * sound * (mean / (1 - first**count)) / root)


def weigh(answers: np.ndarray) -> np.ndarray:
    """Of positions [rows, tokens], the `answers` among them: what each counts, float32, a row's mean being 1."""
    count = answers.sum(1, keepdims=True)
    stressed = ANSWER_SHARE * answers * answers.shape[1] / np.maximum(count, 1) + (1 - ANSWER_SHARE)
    return np.where(count > 0, stressed, 1.0).astype(np.float32)


@contextmanager
def _alone(others: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Keep `others` out of the gradient, and with them every activation."""
    frozen = [parameter for parameter in others if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
