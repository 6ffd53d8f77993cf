"""The compressor of a Full layer: one latent a group of positions, from which entries and index keys are made.

Ratio 2: the two positions of a group are weighted channel by channel with a softmax over their gates. Ratio 1: a plain
projection. The latent *before* rotation makes the index key; rotated at the group's first position and quantised it is
the compressed entry.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, Arithmetic, matmul
from dsuf.reference.cache import SequenceCache
from dsuf.reference.norm import rms_norm
from dsuf.reference.rope import Rope
from dsuf.reference.weights import WeightSource


class Compressor:
    """Writes compressed entries and index keys of one Full layer."""

    def __init__(
        self, source: WeightSource, layer: int, config: ModelConfig, arithmetic: Arithmetic, rope: Rope
    ) -> None:
        prefix = f"layers.{layer}.attn"
        self.layer, self.ratio = layer, config.ratio(layer)
        self.config, self.arithmetic, self.rope = config, arithmetic, rope
        self.wkv: F64 = source.matrix(f"{prefix}.compressor.wkv.weight")
        self.wgate: F64 | None = source.matrix(f"{prefix}.compressor.wgate.weight") if self.ratio == 2 else None
        self.norm: F32 = source.vector(f"{prefix}.compressor.norm.weight")
        self.wk: F64 = source.matrix(f"{prefix}.indexer.wk.weight")
        self.k_norm: F32 = source.vector(f"{prefix}.indexer.k_norm.weight")

    def project(self, u: F32) -> F32:
        """What a position contributes [rows, head_dim], or [rows, 2 · head_dim] (kv, then gate) at ratio 2."""
        if self.wgate is None:
            return self.arithmetic.act(matmul(u, self.wkv))
        return np.concatenate([matmul(u, self.wkv), matmul(u, self.wgate)], axis=1)

    def latents(self, projected: F32) -> F32:
        """Latents [groups, head_dim] of projected positions in whole groups."""
        if self.ratio == 1:
            return rms_norm(projected, self.norm, self.config.norm_eps, self.arithmetic)
        groups = projected.reshape(-1, 2, projected.shape[1])
        kv, gate = groups[:, :, : self.config.head_dim], groups[:, :, self.config.head_dim :]
        weight = np.exp(gate - np.maximum.reduce(gate, axis=1, keepdims=True))
        weight = weight / np.add.reduce(weight, axis=1, keepdims=True)
        pooled = self.arithmetic.act(np.add.reduce(weight * kv, axis=1))
        return rms_norm(pooled, self.norm, self.config.norm_eps, self.arithmetic)

    def write(self, cache: SequenceCache, start: int, projected: F32) -> F32:
        """Put the groups that `projected` (positions from `start` on) completes into `cache`, except those that it had
        before; returns their latents."""
        if self.ratio == 2:
            projected, start = self._with_open_half(cache, start, projected)
        complete, first = len(projected) // self.ratio, start // self.ratio
        latents = self.latents(projected[: complete * self.ratio])
        kept = max(0, cache.kept // self.ratio - first)
        if complete > kept:
            self._put(cache, first + kept, latents[kept:])
        return latents

    def _put(self, cache: SequenceCache, first: int, latents: F32) -> None:
        """Write the entries and index keys of groups from `first` on."""
        norm, arithmetic = self.k_norm, self.arithmetic
        rotation = self.rope.rotation(np.arange(first, first + len(latents)) * self.ratio)
        keys = rms_norm(arithmetic.act(matmul(latents, self.wk)), norm, self.config.norm_eps, arithmetic)
        cache.entries[self.layer].write(first, rotation.apply(latents, arithmetic))
        cache.index_keys[self.layer].write(first, rotation.apply(keys, arithmetic))

    def _with_open_half(self, cache: SequenceCache, start: int, projected: F32) -> tuple[F32, int]:
        """Prepend the waiting first half of a group, and keep what may be one later."""
        half = cache.halves[self.layer]
        if start % 2:
            projected, start = np.concatenate([half.read(start - 1, start).astype(np.float32), projected]), start - 1
        half.write(start, projected)
        return projected, start
