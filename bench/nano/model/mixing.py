"""Single-pass hyper-connections: the four residual streams, read, mixed and written at every site.

A site's `pre` weights the collapse at the next site; the sum in `expand` is over the first index of `comb`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.nano.model.norm import inverse_rms
from bench.nano.model.sinkhorn import sinkhorn
from dsuf.checkpoint.config import ModelConfig


class Mixes(NamedTuple):
    """`pre` [rows, streams], `post` [rows, streams], `comb` [rows, from stream, to stream], float32."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mix(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig) -> Mixes:
    """The mixes of a site for `streams` [rows, s, dim]; the norm is one factor a row, applied after the product."""
    s, flat = config.hc_mult, streams.flatten(1).float()
    projected = torch.nn.functional.linear(flat, fn) * inverse_rms(flat, config.norm_eps)
    gates = torch.sigmoid(projected[:, : 2 * s] * scale[:2].repeat_interleave(s, output_size=2 * s) + base[: 2 * s])
    logits = (projected[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s))
    comb = sinkhorn(logits, config.hc_sinkhorn_iters, config.hc_eps)
    return Mixes(gates[:, :s] + config.hc_eps, gates[:, s:] * 2, comb)


def site(owner: nn.Module, name: str, config: ModelConfig) -> None:
    """Give `owner` the parameters of a site: `hc_NAME_fn`, `hc_NAME_base` and `hc_NAME_scale`."""
    s = config.hc_mult
    outputs, width = (2 + s) * s, s * config.dim
    owner.register_parameter(f"hc_{name}_fn", nn.Parameter(torch.randn(outputs, width) * width**-0.5))
    owner.register_parameter(f"hc_{name}_base", nn.Parameter(torch.zeros(outputs)))
    owner.register_parameter(f"hc_{name}_scale", nn.Parameter(torch.full((3,), 0.3)))


def enter_streams(h: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`h` [rows, dim] copied to `count` streams, and the weights (1, 0, …) for the first collapse."""
    pre = (torch.arange(count, device=h.device) == 0).float()
    return h[:, None].expand(-1, count, -1).contiguous(), pre.expand(len(h), -1).contiguous()


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Σ_i pre[i] · streams[i] in float32, rounded once: [rows, dim]."""
    return (streams.float() * pre[:, :, None]).sum(1).to(streams.dtype)


def expand(branch: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    """New streams [rows, s, dim]: post[j] · branch + Σ_i comb[i, j] · streams[i]."""
    mixed = (mixes.comb[:, :, :, None] * streams.float()[:, :, None, :]).sum(1)
    return (mixes.post[:, :, None] * branch.float()[:, None, :] + mixed).to(streams.dtype)


def mean_of_streams(streams: Tensor) -> Tensor:
    """What the draft head reads of a layer's input [rows, dim]."""
    return streams.float().mean(1).to(streams.dtype)
