"""Single-pass manifold-constrained hyper-connections (mHC): four residual streams, mixed at every site.

A site (before attention, before the experts) reads 24 numbers a token off the streams: `pre` weights the collapse at
the *next* site, `post` spreads a branch's output over the streams, `comb` mixes the streams among themselves and is
made doubly stochastic by Sinkhorn rounds.
"""

from typing import NamedTuple

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, Arithmetic, matmul, sigmoid
from dsuf.reference.norm import inverse_rms
from dsuf.reference.weights import WeightSource


class Mixes(NamedTuple):
    """`pre` [rows, streams], `post` [rows, streams], `comb` [rows, from stream, to stream], float32."""

    pre: F32
    post: F32
    comb: F32


class HyperSite:
    """The mixing weights of one site: `fn` [(2 + s) · s, s · dim], `base` [(2 + s) · s], `scale` [3]."""

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig) -> None:
        self.fn: F64 = source.matrix(f"{prefix}_fn")
        self.base: F32 = source.vector(f"{prefix}_base")
        self.scale: F32 = source.vector(f"{prefix}_scale")
        self.config = config

    def mixes(self, streams: F32) -> Mixes:
        """The site's mixes for `streams` [rows, s, dim]; the norm is one factor a token, applied after the product."""
        flat = streams.reshape(len(streams), -1)
        projected = matmul(flat, self.fn) * inverse_rms(flat, self.config.norm_eps)
        return split_mixes(projected, self.scale, self.base, self.config)


def split_mixes(projected: F32, scale: F32, base: F32, config: ModelConfig) -> Mixes:
    """Turn the 24 numbers a token [rows, (2 + s) · s] into pre, post and comb."""
    s, eps = config.hc_mult, np.float32(config.hc_eps)
    affine = projected * np.repeat(scale, (s, s, s * s)) + base
    gates = sigmoid(affine[:, : 2 * s])
    comb = _sinkhorn(affine[:, 2 * s :].reshape(-1, s, s), config.hc_sinkhorn_iters, eps)
    return Mixes(gates[:, :s] + eps, gates[:, s:] * np.float32(2), comb)


def _sinkhorn(a: F32, rounds: int, eps: np.float32) -> F32:
    """Softmax over the last axis, then column and row divisions in turn; ends on columns. [rows, s, s]

    Every division is by a sum plus eps. The matrix is framed with eps on two sides, so that one reduction gives both:
    39 of them run for every site of every token.
    """
    s = a.shape[1]
    framed = np.full((len(a), s + 1, s + 1), eps, np.float32)
    c, with_row, with_column = framed[:, :s, :s], framed[:, :, :s], framed[:, :s, :]
    np.exp(a - np.maximum.reduce(a, axis=2, keepdims=True), out=c)
    c /= np.add.reduce(c, axis=2, keepdims=True)
    c += eps
    columns, rows = np.empty((len(a), 1, s), np.float32), np.empty((len(a), s, 1), np.float32)
    np.divide(c, np.add.reduce(with_row, axis=1, keepdims=True, out=columns), out=c)
    for _ in range(rounds - 1):
        np.divide(c, np.add.reduce(with_column, axis=2, keepdims=True, out=rows), out=c)
        np.divide(c, np.add.reduce(with_row, axis=1, keepdims=True, out=columns), out=c)
    return c


def collapse(streams: F32, pre: F32, arithmetic: Arithmetic) -> F32:
    """Σ_i pre[i] · streams[i] in float32, rounded once: [rows, dim]."""
    return arithmetic.act(np.add.reduce(streams * pre[:, :, None], axis=1))


def expand(branch: F32, streams: F32, mixes: Mixes, arithmetic: Arithmetic) -> F32:
    """New streams: post[j] · branch + Σ_i comb[i, j] · streams[i] (the sum is over comb's *first* index)."""
    mixed = np.matmul(mixes.comb.swapaxes(1, 2).astype(np.float64), streams.astype(np.float64)).astype(np.float32)
    return arithmetic.act(mixes.post[:, :, None] * branch[:, None, :] + mixed)
