"""Engram: hashed n-grams of the last tokens look rows up in a table, which the streams take in as far as they match."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from bench.nano.model.experts import as_stored, matrix
from bench.nano.model.gather import gather
from bench.nano.model.norm import as_bf16, inverse_rms
from bench.nano.model.quantiser import dense_weight, q8, table
from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.token_map import TokenMap


class EngramRows(nn.Module):
    """Table rows of every position before every Engram layer; integer arithmetic on the device."""

    def __init__(self, config: ModelConfig, token_ids: Tensor) -> None:
        super().__init__()
        found = TokenMap(np.asarray(token_ids, np.int64), config.engram_compressed_vocab_size)
        engram = EngramHash.from_config(config, found)
        self.shifts, self.pad_id = engram.shifts, engram.pad_id
        for name in ("multipliers", "primes", "offsets"):
            self.register_buffer(name, torch.from_numpy(np.array(getattr(engram, name))), persistent=False)
        self.register_buffer("token_ids", torch.from_numpy(found.ids), persistent=False)
        self.multipliers: Tensor
        self.primes: Tensor
        self.offsets: Tensor
        self.token_ids: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [Engram layers, batch · length, columns] of sequences `ids` [batch, length]."""
        mapped = self.token_ids[ids]
        shifted = [pad(mapped, (s, 0), value=self.pad_id)[:, : ids.shape[1]] for s in range(self.shifts)]
        products = torch.stack(shifted, -1).flatten(0, 1) * self.multipliers[:, None, :]  # [layers, rows, shifts]
        hashed, hashes = products[..., 0], []
        for shift in range(1, self.shifts):
            hashed = hashed ^ products[..., shift]
            hashes.append(hashed)
        rows = torch.stack(hashes, -1)[..., None] % self.primes[:, None]
        return rows.flatten(2) + self.offsets[:, None, :]


class Engram(nn.Module):
    """The memory before one layer."""

    def __init__(self, config: ModelConfig, slot: int) -> None:
        super().__init__()
        self.config = config
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        self.embed = nn.Parameter(torch.randn(config.engram_num_embeddings[slot], config.engram_head_dim) * 0.1)
        self.wkv = matrix((config.hc_mult + 1) * config.dim, columns)
        self.q_weight = nn.Parameter(torch.ones(config.hc_mult, config.dim))
        self.k_weight = nn.Parameter(torch.ones(config.hc_mult, config.dim))

    def forward(self, streams: Tensor, rows: Tensor, quantised: bool) -> Tensor:
        """`streams` [rows, s, dim] with the memory of table `rows` [rows, columns] added."""
        stored = table(self.embed) if quantised else self.embed
        memory = gather(stored, rows).flatten(1).to(streams.dtype)
        weight = as_stored(self.wkv, dense_weight, quantised, streams.dtype)
        projected = linear(q8(memory) if quantised else memory, weight).unflatten(1, (self.config.hc_mult + 1, -1))
        keys, value, wide = projected[:, :-1].float(), projected[:, -1:].float(), streams.float()
        return (wide + self._gate(wide, keys) * value).to(streams.dtype)

    def _gate(self, streams: Tensor, keys: Tensor) -> Tensor:
        """How far each stream takes the value [rows, s, 1]: a signed square root of the match, squashed."""
        eps = self.config.norm_eps
        match = (streams * (as_bf16(self.q_weight) * as_bf16(self.k_weight)) * keys).sum(-1, keepdim=True)
        match = match * inverse_rms(streams, eps) * inverse_rms(keys, eps) * self.config.dim**-0.5
        root = match.abs().clamp(min=1e-6).sqrt()
        return torch.sigmoid(torch.where(match < 0, -root, root))
