"""Engram: hashed n-gram memory, added to the streams before some layers.

The last four token ids (mapped to a smaller vocabulary) are hashed into 24 rows of a table. Their concatenation makes
four keys and a value; each stream takes the value in proportion to its match with its key. Rows depend on ids alone.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, matmul, sigmoid
from dsuf.reference.norm import inverse_rms
from dsuf.reference.weights import WeightSource, dequantise_rows


class Engram:
    """The memory before layer `layer`."""

    def __init__(self, source: WeightSource, layer: int, config: ModelConfig, arithmetic: Arithmetic) -> None:
        prefix = f"layers.{layer}.engram"
        self.config, self.arithmetic = config, arithmetic
        self.table, self.table_scale = source.tensor(f"{prefix}.embed.weight"), source.tensor(f"{prefix}.embed.scale")
        self.wkv: F64 = source.linear(f"{prefix}.wkv")
        q_weight, k_weight = source.vector(f"{prefix}.q_weight"), source.vector(f"{prefix}.k_weight")
        self.match_weight: F32 = q_weight * k_weight  # [streams, dim]

    def forward(self, streams: F32, table_rows: I64) -> F32:
        """`streams` [rows, s, dim] with the memory of `table_rows` [rows, columns] added."""
        memory = dequantise_rows(self.table[table_rows], self.table_scale[table_rows]).reshape(len(table_rows), -1)
        projected = self.arithmetic.act(matmul(self.arithmetic.q8(memory), self.wkv))
        projected = projected.reshape(len(streams), self.config.hc_mult + 1, -1)
        keys, value = projected[:, :-1], projected[:, -1:]
        return self.arithmetic.act(streams + self._gate(streams, keys) * value)

    def _gate(self, streams: F32, keys: F32) -> F32:
        """How far each stream takes the value [rows, s, 1]: a signed square root of the match, squashed."""
        match = np.add.reduce((streams * self.match_weight * keys).astype(np.float64), axis=-1, keepdims=True)
        eps = self.config.norm_eps
        match = match.astype(np.float32) * inverse_rms(streams, eps) * inverse_rms(keys, eps)
        match = match * np.float32(self.config.dim**-0.5)
        return sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(match), np.float32(1e-6))), match))
