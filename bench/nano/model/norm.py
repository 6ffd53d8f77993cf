"""Root-mean-square norm and rotary positions, in float32 with one rounding at the end."""

import torch
from torch import Tensor

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.rope import Rope


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x²) + eps) over the last axis [..., 1] of a float32 `x`."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `x` [..., n] in its dtype; `weight` [n] is rounded to BF16 as it is stored."""
    wide = x.float()
    return (wide * inverse_rms(wide, eps) * as_bf16(weight)).to(x.dtype)


def as_bf16(weight: Tensor) -> Tensor:
    """A float32 `weight` that a checkpoint stores as BF16: its rounded value, still float32."""
    return weight.bfloat16().float()


def rotary_table(config: ModelConfig, *, compressed: bool, length: int) -> Tensor:
    """Cosines and sines [length, 2, rope_head_dim / 2] of positions from 0 on, float32."""
    positions = torch.arange(length).numpy()
    rotation = Rope(config, compressed=compressed).rotation(positions)
    return torch.stack([torch.from_numpy(rotation.cos), torch.from_numpy(rotation.sin)], 1)


def rotate(x: Tensor, rotation: Tensor, *, inverse: bool = False) -> Tensor:
    """`x` [rows, channels] or [rows, heads, channels] with its last channels turned (or back)."""
    half = rotation.shape[-1]
    cos, sin = rotation[:, 0], rotation[:, 1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    still, tail = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    pairs = tail.float().unflatten(-1, (half, 2))
    real, imaginary = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], -1)
