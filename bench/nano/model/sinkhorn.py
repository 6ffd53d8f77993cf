"""Sinkhorn rounds of a small matrix a row, with their gradient: one kernel each way on a GPU, plain code elsewhere.

Traced op by op they would be most of a layer's graph. Backwards every division is undone with the sum it divided by, so
forward only has to leave those sums.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of PyTorch comes without it
    triton = None

_ROWS = 64  # matrices a program handles


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """Softmax over the last axis of `logits` [rows, s, s] float32, then column and row divisions; ends on columns.

    Each of `rounds` rounds divides by sum + eps; the first row division is the softmax, to which eps is added.
    """
    result: Tensor = _sinkhorn_op(logits.contiguous(), rounds, eps)[0]
    return result


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def _sinkhorn_op(logits: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor]:
    """The matrix, and the sums [rows, 2 · rounds - 1, s] of all its divisions in order."""
    rows, s, _ = logits.shape
    sums = logits.new_empty(rows, 2 * rounds - 1, s)
    if logits.is_cuda:
        out = torch.empty_like(logits)
        _forward[(triton.cdiv(rows, _ROWS),)](logits, out, sums, rows, eps, rounds, s, _ROWS)
        return out, sums
    c = torch.softmax(logits, 2) + eps
    for step in range(2 * rounds - 1):
        total = c.sum(1 + step % 2) + eps
        sums[:, step] = total
        c = c / total.unsqueeze(1 + step % 2)
    return c, sums


@torch.library.custom_op("nano::sinkhorn_gradient", mutates_args=())
def _gradient_op(gradient: Tensor, out: Tensor, sums: Tensor, eps: float) -> Tensor:
    """Gradient by the logits."""
    rows, s, _ = out.shape
    gradient = gradient.contiguous()
    if out.is_cuda:
        by_logits = torch.empty_like(out)
        _backward[(triton.cdiv(rows, _ROWS),)](gradient, out, sums, by_logits, rows, eps, sums.shape[1], s, _ROWS)
        return by_logits
    c = out
    for step in reversed(range(sums.shape[1])):
        axis = 1 + step % 2
        total = sums[:, step].unsqueeze(axis)
        gradient = (gradient - (gradient * c).sum(axis, keepdim=True)) / total
        c = c * total
    p = c - eps
    return p * (gradient - (gradient * p).sum(2, keepdim=True))


@_sinkhorn_op.register_fake
def _(logits: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), logits.new_empty(logits.shape[0], 2 * rounds - 1, logits.shape[1])


@_gradient_op.register_fake
def _(gradient: Tensor, out: Tensor, sums: Tensor, eps: float) -> Tensor:
    return torch.empty_like(out)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output)
    ctx.eps = inputs[2]


def _backpropagate(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return _gradient_op(gradient, *ctx.saved_tensors, ctx.eps), None, None


_sinkhorn_op.register_autograd(_backpropagate, setup_context=_keep)


if triton is not None:

    @triton.jit
    def _places(s: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0) * block + tl.arange(0, block)
        at = row[:, None, None] * (s * s) + tl.arange(0, s)[None, :, None] * s + tl.arange(0, s)[None, None, :]
        return row, at

    @triton.jit
    def _forward(logits, out, sums, rows, eps, rounds: tl.constexpr, s: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row, at = _places(s, block)
        inside = at < rows * s * s
        a = tl.load(logits + at, mask=inside, other=0.0)
        c = tl.exp(a - tl.max(a, axis=2)[:, :, None])
        c = c / tl.sum(c, axis=2)[:, :, None] + eps
        place = sums + row[:, None] * ((2 * rounds - 1) * s) + tl.arange(0, s)[None, :]
        there = (row < rows)[:, None]
        total = tl.sum(c, axis=1) + eps
        tl.store(place, total, mask=there)
        c = c / total[:, None, :]
        for step in range(1, rounds):
            total = tl.sum(c, axis=2) + eps
            tl.store(place + (2 * step - 1) * s, total, mask=there)
            c = c / total[:, :, None]
            total = tl.sum(c, axis=1) + eps
            tl.store(place + 2 * step * s, total, mask=there)
            c = c / total[:, None, :]
        tl.store(out + at, c, mask=inside)

    @triton.jit
    def _backward(  # type: ignore[no-untyped-def]
        gradient, out, sums, by_logits, rows, eps, steps: tl.constexpr, s: tl.constexpr, block: tl.constexpr
    ):
        row, at = _places(s, block)
        inside = at < rows * s * s
        g = tl.load(gradient + at, mask=inside, other=0.0)
        c = tl.load(out + at, mask=inside, other=0.0)
        place = sums + row[:, None] * (steps * s) + tl.arange(0, s)[None, :]
        there = (row < rows)[:, None]
        for back in range(steps // 2):
            step = steps - 1 - 2 * back
            total = tl.load(place + step * s, mask=there, other=1.0)[:, None, :]
            g = (g - tl.sum(g * c, axis=1)[:, None, :]) / total
            c = c * total
            total = tl.load(place + (step - 1) * s, mask=there, other=1.0)[:, :, None]
            g = (g - tl.sum(g * c, axis=2)[:, :, None]) / total
            c = c * total
        total = tl.load(place, mask=there, other=1.0)[:, None, :]
        g = (g - tl.sum(g * c, axis=1)[:, None, :]) / total
        p = c * total - eps
        tl.store(by_logits + at, p * (g - tl.sum(g * p, axis=2)[:, :, None]), mask=inside)
