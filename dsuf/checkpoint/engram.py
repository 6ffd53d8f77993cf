"""Which rows of the Engram tables a position reads: hashes of the last tokens, as 2-, 3- and 4-grams.

All of it is integer arithmetic that follows from the configuration; nothing is stored in a checkpoint.
"""

from itertools import count, islice
from math import isqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.token_map import TokenMap
from dsuf.errors import CheckpointError

NO_TOKEN = -1
"""Stands in for the token of a position before the start of the sequence, or of a picture."""

_SEED_STEP = 10007


class EngramHash:
    """The hash of one model.

    A layer is counted among the Engram layers; shifts are 0 .. max_ngram_size - 1 positions back. `multipliers`
    [layers, shifts] int64; `primes` [layers, shifts - 1, heads] int64, the rows of each sub-table, those of 2-grams
    first; `offsets` [layers, (shifts - 1) * heads] int64, each sub-table's first row; `pad_id`, the Engram id that
    fills a history.
    """

    def __init__(
        self, ids: NDArray[np.int64], pad_token: int, multipliers: NDArray[np.int64], primes: NDArray[np.int64]
    ) -> None:
        """Use `from_config`. `ids` maps tokens to Engram ids, `pad_token` is a token."""
        self.multipliers = multipliers
        self.primes = primes
        flat = primes.reshape(len(primes), -1)
        self.offsets: NDArray[np.int64] = np.cumsum(flat, axis=1) - flat
        self.pad_id = int(ids[pad_token])
        self._ids = np.append(ids, self.pad_id)  # NO_TOKEN indexes the last element

    @classmethod
    def from_config(cls, config: ModelConfig, token_map: TokenMap) -> Self:
        """The hash for `config`; raises `CheckpointError` where its table sizes or `token_map` are of another model."""
        if token_map.size != config.engram_compressed_vocab_size or len(token_map.ids) < config.vocab_size:
            raise CheckpointError(
                f"tokenizer: {len(token_map.ids)} tokens with {token_map.size} Engram ids, the configuration says "
                f"{config.vocab_size} with {config.engram_compressed_vocab_size}"
            )
        primes = table_primes(config)
        rows = primes.sum(axis=(1, 2)).tolist()
        if tuple(rows) != config.engram_num_embeddings:
            stated = list(config.engram_num_embeddings)
            raise CheckpointError(f"config: engram_num_embeddings is {stated}, the hash has {rows}")
        return cls(token_map.ids, config.engram_pad_id, _multipliers(config), primes)

    @property
    def shifts(self) -> int:
        """Tokens of the longest n-gram."""
        return int(self.multipliers.shape[1])

    def history(
        self, ids: NDArray[np.int64], before: NDArray[np.int64] | None = None, alive: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Engram ids [T, shifts] of each position and those before it: column s is s positions back.

        `ids` [T] are tokens, `before` [shifts - 1] the tokens that precede them, oldest first, `NO_TOKEN` where there
        is none (the default: a sequence starts here). `alive` [T] is false at a picture's positions. At the first
        position without a token, looking back, that column and all further ones hold `pad_id`.
        """
        tokens = self._line(ids, before, alive)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self.shifts)[:, ::-1]
        known = np.logical_and.accumulate(windows != NO_TOKEN, axis=1)
        return self._ids[np.where(known, windows, NO_TOKEN)]

    def carry(
        self, ids: NDArray[np.int64], before: NDArray[np.int64] | None = None, alive: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """The `before` [shifts - 1] for the positions that follow `ids`; arguments as for `history`."""
        return self._line(ids, before, alive)[-(self.shifts - 1) :].copy()

    def rows(self, layer: int, history: NDArray[np.int64]) -> NDArray[np.int64]:
        """Table rows [T, (shifts - 1) * heads] of Engram layer number `layer` for a `history` [T, shifts].

        A multiplier times an Engram id stays below 2^63, so int64 is exact.
        """
        products = history * self.multipliers[layer]  # [T, shifts]
        hashes: NDArray[np.int64] = np.bitwise_xor.accumulate(products, axis=1)[:, 1:, None]  # [T, shifts - 1, 1]
        rows: NDArray[np.int64] = (hashes % self.primes[layer]).reshape(len(history), self.offsets.shape[1])
        rows += self.offsets[layer]
        return rows

    def _line(
        self, ids: NDArray[np.int64], before: NDArray[np.int64] | None, alive: NDArray[np.bool_] | None
    ) -> NDArray[np.int64]:
        """Tokens before and at the positions in one line [shifts - 1 + T], `NO_TOKEN` where there is none."""
        if before is None:
            before = np.full(self.shifts - 1, NO_TOKEN, np.int64)
        here = ids if alive is None else np.where(alive, ids, NO_TOKEN)
        return np.concatenate([before, here]).astype(np.int64, copy=False)


def _multipliers(config: ModelConfig) -> NDArray[np.int64]:
    """Odd numbers [layers, shifts] from NumPy's own generator, small enough that no product overflows."""
    bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size)
    draws = [
        np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=shape[1], dtype=np.int64)
        for layer in config.engram_layer_ids
    ]
    return np.array(draws, np.int64).reshape(shape) * 2 + 1


def table_primes(config: ModelConfig) -> NDArray[np.int64]:
    """Rows of each sub-table [layers, shifts - 1, heads]: ever larger primes from `engram_vocab_size` on."""
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
    found = islice(filter(_is_prime, count(config.engram_vocab_size)), int(np.prod(shape)))
    return np.array(list(found), np.int64).reshape(shape)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
