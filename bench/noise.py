"""A model of noise for the reference engine: random logits that depend on the tokens before alone, and cost nothing.

Whatever an engine then says is kept in form by masks only. Tokens that end something are likelier than others, as
replies would find no end else. Drafts are, in part, what the model itself would say.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.node.engines import Model
from dsuf.reference.arithmetic import F32, OFFICIAL
from dsuf.reference.draft import Block
from dsuf.reference.engine import ReferenceEngine
from dsuf.reference.sampler import choose
from dsuf.reference.speculate import Anchor, Speculation

_CLOSERS = ('"', "}", "]", "<", "/", "</", ">")
_SHARPNESS, _CLOSING = 2.0, 6.0
_RIGHT = 0.6


class _Cache:
    """The tokens of a turn, in place of rows; as much of a cache as an engine without sessions asks for."""

    state_bytes, spare, slack = 0, 0, 0

    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    decoded = length

    def truncate(self, length: int) -> None:
        """Keep the first `length`."""
        del self.ids[length:]

    def held_bytes(self) -> int:
        """Nothing."""
        return 0


class _Output(NamedTuple):
    """Of each row the number that its logits come of."""

    keys: list[int]
    taps: NDArray[np.float32]


class NoiseModel:
    """Stands for `Model`; `favoured` are the ids that end something."""

    def __init__(self, config: ModelConfig, favoured: Sequence[int]) -> None:
        self.config, self.arithmetic = config, OFFICIAL
        self._favour = np.zeros(config.vocab_size, np.float32)
        self._favour[list(favoured)] = _CLOSING

    def new_cache(self, _: object = None) -> _Cache:
        """An empty cache."""
        return _Cache()

    def forward(self, work: Sequence[tuple[_Cache, NDArray[np.int64]]]) -> _Output:
        """Append ids to each cache."""
        keys = []
        for cache, ids in work:
            for token in ids.tolist():
                cache.ids.append(token)
                keys.append(hash(tuple(cache.ids[-12:])) & 0xFFFFFFFF)
        return _Output(keys, np.zeros((len(keys), 1), np.float32))

    def logits(self, output: _Output, rows: slice) -> F32:
        """Logits [rows, vocabulary]."""
        return np.stack([self.draw(key) for key in output.keys[rows]])

    def draw(self, key: int) -> F32:
        """The logits of one row."""
        noise = np.random.default_rng(key).standard_normal(self.config.vocab_size, np.float32)
        return np.asarray(noise * np.float32(_SHARPNESS) + self._favour, np.float32)


class NoiseDrafter:
    """Drafts from the model's own logits, some of them spoilt."""

    def __init__(self, model: NoiseModel) -> None:
        self.model = model

    def propose(self, anchors: list[Anchor], limit: int) -> Block:
        """A block behind each anchor."""
        blocks = [self._propose(anchor, limit) for anchor in anchors]
        ids, logits = (np.stack(part) for part in zip(*blocks, strict=True))
        return Block(ids, logits, np.zeros(ids.shape, np.float32), ())

    def _propose(self, anchor: Anchor, limit: int) -> tuple[NDArray[np.int64], F32]:
        known = [*cast(_Cache, anchor.cache).ids, anchor.token]
        ids, rows = [], []
        for slot in range(limit):
            key = hash(tuple(known[-12:])) & 0xFFFFFFFF
            row = self.model.draw(key if key % 100 < 100 * _RIGHT else key + 1)
            token = choose(row, anchor.sampling, anchor.cache.length + 1 + slot, "draft")
            known.append(token)
            ids.append(token)
            rows.append(row)
        return np.array(ids, np.int64), np.stack(rows)

    def feed(self, cache: object, start: int, taps: object) -> None:
        """Nothing is learnt from rows."""


def open_noise(model: Model, *, max_turns: int = 16, context_tokens: int = 4096) -> ReferenceEngine:
    """A reference engine of noise with the vocabulary and the masks of `model`."""
    vocabulary = model.vocabulary
    closers = [ids[0] for text in _CLOSERS if len(ids := vocabulary.encode(text)) == 1]
    favoured = [*closers, vocabulary.eos_id, vocabulary.thinking_end_id, vocabulary.dsml_id]
    noise: Any = NoiseModel(model.config, favoured)
    return ReferenceEngine(
        noise, "noise", "noise", context_tokens=context_tokens, max_turns=max_turns, prefill="exact",
        drafter=NoiseDrafter(noise), speculation=Speculation(), open_mask=model.masks.open,
    )  # fmt: skip
