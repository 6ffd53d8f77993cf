"""Looking rows up in a table, with a gradient that is added up in float32.

Thousands of rows may read the same entry, and sums in BF16 would lose most of them.
"""

from typing import Any

import torch
from torch import Tensor


def gather(table: Tensor, rows: Tensor) -> Tensor:
    """`table` [n, width] at `rows` [...], in its dtype: [..., width]."""
    result: Tensor = _Gather.apply(table, rows)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size, ctx.dtype = table.shape[0], table.dtype
        return table[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        flat = gradient.float().reshape(-1, gradient.shape[-1])
        total = torch.zeros(ctx.size, flat.shape[1], dtype=torch.float32, device=flat.device)
        return total.index_add(0, rows.reshape(-1), flat).to(ctx.dtype), None
