"""What a sequence leaves behind, so that the next token can be computed.

The *global* cache grows with the context: for each Full layer its compressed entries and index keys (890 bytes a token
at the released sizes). The rest is a window's worth: window rows of every layer, the half-filled groups of ratio-2
compressors, the draft head's rows, the token ids for Engram. All of it is addressed by position, hence taking tokens
back is setting `length`.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.errors import CheckpointError
from dsuf.reference.arithmetic import F32, I64, Arithmetic
from dsuf.reference.rows import PLAIN, RowFormats, RowRing, RowStore


class SequenceCache:
    """The cache of one sequence; `length` positions are in it.

    `decoded` is the position up to which the decoder layers have run too: during a replay prefill it stays behind
    `length`, and `stream_tail` holds the encoder's output for the last positions until the decoder takes them up.
    `drafted` is the position up to which the draft head has its context rows, `reach` the one up to which rows were
    ever written, and `replayed` the last length at which a replay cut the decoder's windows.
    """

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        formats, window = RowFormats(arithmetic), config.window_size
        self.length = 0
        self.decoded = 0
        self.drafted = 0
        self.reach = 0
        self.replayed = 0
        self.ids: I64 = np.empty(0, np.int64)
        self.entries = {i: RowStore(config.head_dim, formats.entry) for i in config.kv_source_layers}
        self.index_keys = {
            i: RowStore(config.index_head_dim, formats.index_key, mirrored=True) for i in config.kv_source_layers
        }
        self.windows = [RowRing(config.head_dim, window, formats.window) for _ in range(config.n_layers)]
        pairs = [i for i in config.kv_source_layers if config.ratio(i) == 2]
        self.halves = {i: RowRing(2 * config.head_dim, 1, PLAIN) for i in pairs}
        self.draft_windows = [RowRing(config.head_dim, window, formats.window) for _ in range(config.n_mtp_layers)]
        self.stream_tail: tuple[F32, F32] | None = None
        self._ratios = {i: config.ratio(i) for i in config.kv_source_layers}
        self._stream_shape = (config.hc_mult, config.dim)

    def put_ids(self, start: int, ids: I64) -> None:
        """Record the token ids of positions `start` and after; what was recorded beyond is forgotten."""
        self.ids = np.concatenate([self.ids[:start], ids])
        self.reach = max(self.reach, len(self.ids))

    def truncate(self, length: int) -> None:
        """Take back all positions from `length` on; at most `RowRing.SLACK` of them, or the windows would have gaps."""
        self.length, self.decoded, self.drafted = length, min(self.decoded, length), min(self.drafted, length)
        self.ids = self.ids[:length]

    @property
    def slack(self) -> int:
        """How many of the last positions can be taken back; none in the middle of a replayed prefill.

        Rows that were written beyond the end, and taken back, stand where the oldest rows of the windows would be.
        """
        return max(0, RowRing.SLACK - (self.reach - self.length)) if self.decoded == self.length else 0

    def global_parts(self) -> Iterable[tuple[str, bytes]]:
        """Name and bytes of each part of the global cache, for the positions that are in it."""
        for layer, ratio in self._ratios.items():
            rows = self.length // ratio
            yield f"layers.{layer}.entries", self.entries[layer].packed[:rows].tobytes()
            yield f"layers.{layer}.index_keys", self.index_keys[layer].packed[:rows].tobytes()

    def global_bytes(self) -> bytes:
        """The global cache as one string of bytes, to compare."""
        return b"".join(part for _, part in self.global_parts())

    def export_parts(self) -> Iterable[tuple[str, bytes]]:
        """Name and bytes of all but the ids that the next token depends on: the global cache, rings, marks, and the
        encoder's output where the decoder has not taken it up."""
        yield from self.global_parts()
        for name, ring in self._rings():
            yield name, ring.packed.tobytes()
        marks = [self.decoded, self.drafted, self.reach, self.replayed, *(ring.floor for _, ring in self._rings())]
        yield "marks", np.array(marks, np.int64).tobytes()
        if self.stream_tail is not None:
            yield "tail.streams", self.stream_tail[0].tobytes()
            yield "tail.pre", self.stream_tail[1].tobytes()

    def import_parts(self, ids: I64, parts: Mapping[str, bytes]) -> None:
        """Take over what `export_parts` gave for the positions of `ids`; raises `CheckpointError` if one does not
        fit."""
        length = len(ids)
        try:
            for layer, ratio in self._ratios.items():
                self.entries[layer].load(parts[f"layers.{layer}.entries"], length // ratio)
                self.index_keys[layer].load(parts[f"layers.{layer}.index_keys"], length // ratio)
            self.decoded, self.drafted, self.reach, self.replayed, *floors = np.frombuffer(
                parts["marks"], np.int64
            ).tolist()
            for (name, ring), floor in zip(self._rings(), floors, strict=True):
                ring.load(parts[name], floor)
            self.stream_tail = self._read_tail(parts) if self.decoded < length else None
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"a session's cache does not fit this model: {error}") from error
        self.length, self.ids = length, ids

    def _read_tail(self, parts: Mapping[str, bytes]) -> tuple[F32, F32]:
        """The encoder's output that waits for the decoder; raises `KeyError` or `ValueError`."""
        streams = np.frombuffer(parts["tail.streams"], np.float32).reshape(-1, *self._stream_shape)
        return streams, np.frombuffer(parts["tail.pre"], np.float32).reshape(len(streams), self._stream_shape[0])

    def _rings(self) -> list[tuple[str, RowRing]]:
        """Every ring with its name."""
        windows = [(f"layers.{i}.window", ring) for i, ring in enumerate(self.windows)]
        halves = [(f"layers.{i}.half", ring) for i, ring in self.halves.items()]
        return windows + halves + [(f"mtp.{i}.window", ring) for i, ring in enumerate(self.draft_windows)]

    def held_bytes(self) -> int:
        """Bytes that this cache has allocated for rows."""
        stores = [*self.entries.values(), *self.index_keys.values()]
        return sum(store.packed.nbytes + store.mirror.nbytes for store in stores) + sum(
            ring.packed.nbytes for _, ring in self._rings()
        )
