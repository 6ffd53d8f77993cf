"""What a sequence leaves behind, so that the next token can be computed.

The *global* cache grows with the context: for each Full layer its compressed entries and index keys (890 bytes a token
at the released sizes); it lies in pages of an engine or, for a sequence that stands for itself, in stores of its own.
The rest is a *state*, a window's worth: window rows of every layer, the half-filled groups of ratio-2 compressors, the
draft head's rows, and the token ids for Engram. All of it is addressed by position, hence taking tokens back is setting
`length`.
"""

from collections.abc import Iterable

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.errors import CheckpointError
from dsuf.reference.arithmetic import F32, I64, Arithmetic
from dsuf.reference.pages import PageTable
from dsuf.reference.rows import PLAIN, GrowingRows, RowFormat, RowFormats, RowRing, RowStore

_MARKS = ("drafted", "reach", "replayed")


class SequenceCache:
    """The cache of one sequence; `length` positions are in it.

    `decoded` is the position up to which the decoder layers have run too: during a replay prefill it stays behind
    `length`, and `stream_tail` holds the encoder's output for the last positions until the decoder takes them up.
    `drafted` is the position up to which the draft head has its context rows, `reach` the one up to which rows were
    ever written, `replayed` the last length at which a replay cut windows, and `kept` the one up to which entries were
    there before and are not written again.
    """

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, table: PageTable | None = None) -> None:
        formats, window = RowFormats(arithmetic), config.window_size
        self.length = self.decoded = self.drafted = self.reach = self.replayed = self.kept = 0
        self.ids: I64 = np.empty(0, np.int64)

        def store(layer: int, kind: str, width: int, row_format: RowFormat) -> RowStore:
            rows = table.rows(layer, kind) if table else GrowingRows(row_format.row_bytes(width))
            return RowStore(width, row_format, rows, mirrored=kind == "index_keys")

        sources = config.kv_source_layers
        self.entries = {i: store(i, "entries", config.head_dim, formats.entry) for i in sources}
        self.index_keys = {i: store(i, "index_keys", config.index_head_dim, formats.index_key) for i in sources}
        self.windows = [RowRing(config.head_dim, window, formats.window) for _ in range(config.n_layers)]
        self.halves = {i: RowRing(2 * config.head_dim, 1, PLAIN) for i in sources if config.ratio(i) == 2}
        self.draft_windows = [RowRing(config.head_dim, window, formats.window) for _ in range(config.n_mtp_layers)]
        self.stream_tail: tuple[F32, F32] | None = None
        self._ratios = {i: config.ratio(i) for i in sources}

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

    @property
    def spare(self) -> int:
        """How many of the last positions can be taken back so that a cache is left as the sequence once had it.

        What a replay cut off is the same only for a prompt that ends where it did.
        """
        return max(0, min(self.slack, self.length - self.replayed))

    def global_parts(self) -> Iterable[tuple[str, bytes]]:
        """Name and bytes of each part of the global cache, for the positions that are in it."""
        for layer, ratio in self._ratios.items():
            rows = slice(self.length // ratio)
            yield f"layers.{layer}.entries", self.entries[layer].packed.get(rows).tobytes()
            yield f"layers.{layer}.index_keys", self.index_keys[layer].packed.get(rows).tobytes()

    def global_bytes(self) -> bytes:
        """The global cache as one string of bytes, to compare."""
        return b"".join(part for _, part in self.global_parts())

    @property
    def state_bytes(self) -> int:
        """Size of a state; it does not depend on the length."""
        rings = self._rings()
        return (len(_MARKS) + len(rings)) * np.dtype(np.int64).itemsize + sum(ring.packed.nbytes for ring in rings)

    def read_state(self) -> bytes:
        """All but ids and global cache that the next token depends on: marks, then rings. Where the decoder is behind
        the encoder there is more to it, hence no state."""
        rings = self._rings()
        marks = [*(getattr(self, mark) for mark in _MARKS), *(ring.floor for ring in rings)]
        return b"".join([np.array(marks, np.int64).tobytes(), *(ring.packed.tobytes() for ring in rings)])

    def load_state(self, ids: I64, payload: bytes) -> None:
        """Take over what `read_state` gave behind the positions of `ids`; raises `CheckpointError` if it is not of
        this model."""
        if len(payload) != self.state_bytes:
            raise CheckpointError(f"a state of {len(payload)} bytes does not fit this model, {self.state_bytes} do")
        rings, rows = self._rings(), np.frombuffer(payload, np.uint8)
        count = len(_MARKS) + len(rings)
        marks, rows = rows[: 8 * count].view(np.int64).tolist(), rows[8 * count :]
        for mark, value in zip(_MARKS, marks, strict=False):
            setattr(self, mark, value)
        for ring, floor in zip(rings, marks[len(_MARKS) :], strict=True):
            ring.load(rows[: ring.packed.nbytes], floor)
            rows = rows[ring.packed.nbytes :]
        self.ids, self.length, self.decoded = ids, len(ids), len(ids)

    def begin_at(self, ids: I64, kept: int) -> None:
        """Let an empty cache go on behind `ids` without a state: windows begin here, and so do the draft head's.

        The global cache of the first `kept` positions is there, those that are computed again included.
        """
        self.ids, self.kept, self.replayed = ids, kept, kept
        self.length = self.decoded = self.drafted = self.reach = len(ids)
        for ring in self._rings():
            ring.floor = len(ids)

    def _rings(self) -> list[RowRing]:
        """Every ring, in a fixed order."""
        return [*self.windows, *self.halves.values(), *self.draft_windows]

    def held_bytes(self) -> int:
        """Bytes that this cache has allocated for rows of its own."""
        stores = [*self.entries.values(), *self.index_keys.values()]
        return sum(store.held_bytes() for store in stores) + sum(ring.packed.nbytes for ring in self._rings())
