"""The backbone: forty layers over some positions of some sequences, and the logits of the rows that are asked for.

Two ways to prefill. `exact` runs every layer on every token. `replay` uses that nothing above the last Full layer is
needed of most prompt tokens: the encoder runs on all, that layer's entries are written for all, and the decoder runs on
the last window of tokens alone, with its windows cut at the start of that tail.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import NO_TOKEN, EngramHash
from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, matmul
from dsuf.reference.batch import NO_OBSERVER, Batch, Observer, Segment
from dsuf.reference.cache import SequenceCache
from dsuf.reference.engram import Engram
from dsuf.reference.hyper import collapse
from dsuf.reference.layer import Layer
from dsuf.reference.norm import rms_norm
from dsuf.reference.pages import PageTable
from dsuf.reference.rope import Rope
from dsuf.reference.weights import WeightSource

PrefillMode = Literal["exact", "replay"]


class Output(NamedTuple):
    """What a pass leaves: final streams, their collapse weights, and the draft head's input; rows as in its batch."""

    streams: F32  # [rows, s, dim]
    pre: F32  # [rows, s]
    taps: F32  # [rows, targets · dim]


class Model:
    """A loaded backbone. `own_keys=False` scores as the released decode loop does, for comparison only."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, engram_hash: EngramHash, arithmetic: Arithmetic, *,
        own_keys: bool = True, progress: Callable[[int], None] = lambda layer: None,
    ) -> None:  # fmt: skip
        self.config, self.arithmetic, self.hash = config, arithmetic, engram_hash
        self.window_rope, self.compressed_rope = Rope(config, compressed=False), Rope(config, compressed=True)
        self.embedding: F32 = source.vector("embed.weight")
        self.head: F64 = source.matrix("head.weight")
        self.norm: F32 = source.vector("norm.weight")
        self.engrams = {i: Engram(source, i, config, arithmetic) for i in config.engram_layer_ids}
        self.layers: list[Layer] = []
        for index in range(config.n_layers):
            rope = self.compressed_rope if config.ratio(index) else self.window_rope
            self.layers.append(Layer(source, index, config, arithmetic, rope, own_keys=own_keys))
            progress(index)

    def new_cache(self, table: PageTable | None = None) -> SequenceCache:
        """An empty cache for one sequence, with its global rows in the pages of `table` or in stores of its own."""
        return SequenceCache(self.config, self.arithmetic, table)

    def forward(self, work: Sequence[tuple[SequenceCache, I64]], observer: Observer = NO_OBSERVER) -> Output:
        """Append ids to each sequence of `work`, all layers on all of them; one batch, rows in order of `work`."""
        batch = self._begin(work)
        streams, pre = self._enter(batch, observer)
        output = self._run(range(self.config.n_layers), streams, pre, batch, observer)
        for segment in batch.segments:
            segment.cache.length = segment.cache.decoded = segment.stop
        return output

    def prefill_replay(self, cache: SequenceCache, ids: I64, *, last: bool) -> Output | None:
        """Append `ids`, part of a prompt, by the encoder alone; with `last`, run the decoder on the tail too.

        Returns the tail's output with `last`, else None. Any division of a prompt into parts gives the same.
        """
        batch = self._begin([(cache, ids)])
        streams, pre = self._enter(batch, NO_OBSERVER)
        first = self.config.decoder_start
        streams, pre, _ = self._run(range(first), streams, pre, batch, NO_OBSERVER)
        segment = batch.segments[0]
        boundary = self.layers[first]
        if first in self.engrams:
            streams = self.engrams[first].forward(streams, self._table_rows(first, batch))
        boundary.attention.write_entries(boundary.attention_input(streams, pre), segment)
        cache.length = segment.stop
        self._keep_tail(cache, streams, pre)
        return self._decode_tail(cache) if last else None

    def logits(self, output: Output, rows: I64 | slice) -> F32:
        """Logits [len(rows), vocabulary] of some rows of `output`, float32."""
        collapsed = collapse(output.streams[rows], output.pre[rows], self.arithmetic)
        return matmul(rms_norm(collapsed, self.norm, self.config.norm_eps, self.arithmetic), self.head)

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """A batch of `segments` with this model's rotations."""
        return Batch(segments, self.window_rope, self.compressed_rope)

    def _begin(self, work: Sequence[tuple[SequenceCache, I64]]) -> Batch:
        for cache, ids in work:
            cache.put_ids(cache.length, ids)
        return self.batch([Segment(cache, cache.length, cache.length + len(ids)) for cache, ids in work])

    def _enter(self, batch: Batch, observer: Observer) -> tuple[F32, F32]:
        """Embeddings copied to every stream, and the collapse that picks stream 0."""
        ids = np.concatenate([segment.cache.ids[segment.start : segment.stop] for segment in batch.segments])
        h = self.embedding[ids]
        observer.see("h_embed", h)
        return enter_streams(h, self.config.hc_mult)

    def _run(
        self, layers: range, streams: F32, pre: F32, batch: Batch, observer: Observer, *, tail: bool = False
    ) -> Output:
        """Run `layers`; in a replayed `tail` the first one's Engram and entries are already done."""
        taps = []
        for index in layers:
            done = tail and index == layers.start
            if index in self.engrams and not done:
                streams = self.engrams[index].forward(streams, self._table_rows(index, batch))
                observer.see(f"layers.{index}.h_after_engram", streams)
            if index in self.config.dspark_target_layer_ids:
                taps.append(mean_of_streams(streams, self.arithmetic))
            streams, pre = self.layers[index].forward(streams, pre, batch, observer, write_entries=not done)
        return Output(streams, pre, np.concatenate(taps, axis=1) if taps else np.empty((len(pre), 0), np.float32))

    def _table_rows(self, layer: int, batch: Batch) -> I64:
        """Engram table rows [rows, columns] of every row of `batch` before `layer`."""
        slot, found = self.config.engram_layer_ids.index(layer), []
        reach = self.config.engram_max_ngram_size - 1
        for segment in batch.segments:
            before = np.full(reach, NO_TOKEN, np.int64)
            known = segment.cache.ids[max(0, segment.start - reach) : segment.start]
            before[reach - len(known) :] = known
            history = self.hash.history(segment.cache.ids[segment.start : segment.stop], before)
            found.append(self.hash.rows(slot, history))
        return np.concatenate(found)

    def _keep_tail(self, cache: SequenceCache, streams: F32, pre: F32) -> None:
        """Keep the encoder's output for the positions that the decoder may still be run on or read windows of."""
        if cache.stream_tail is not None:
            streams = np.concatenate([cache.stream_tail[0], streams])
            pre = np.concatenate([cache.stream_tail[1], pre])
        kept = min(2 * self.config.window_size - 1, cache.length - cache.decoded)
        cache.stream_tail = streams[len(streams) - kept :], pre[len(pre) - kept :]

    def _decode_tail(self, cache: SequenceCache) -> Output:
        """Run the decoder on the last window of positions, or on all that it has not seen if those are fewer."""
        assert cache.stream_tail is not None
        streams, pre = cache.stream_tail
        window, first = self.config.window_size, self.config.decoder_start
        start = max(cache.decoded, cache.length - window)
        oldest = cache.length - len(streams)
        self._cut_windows(cache, first, oldest, start)
        if start > cache.decoded:
            cache.replayed = cache.length
        lead = start - oldest
        if lead:
            boundary = self.layers[first]
            u = boundary.attention_input(streams[:lead], pre[:lead])
            boundary.attention.write_window(u, Segment(cache, oldest, start))
        batch = self.batch([Segment(cache, start, cache.length)])
        layers = range(first, self.config.n_layers)
        output = self._run(layers, streams[lead:], pre[lead:], batch, NO_OBSERVER, tail=True)
        cache.decoded, cache.stream_tail = cache.length, None
        return output

    def _cut_windows(self, cache: SequenceCache, first: int, oldest: int, start: int) -> None:
        """Forget the decoder's windows where the tail leaves a gap to what was decoded before.

        The boundary layer's window needs the encoder only, so it is kept whole: its rows go back a window further.
        """
        if oldest > cache.decoded:
            cache.windows[first].floor = oldest
        if start > cache.decoded:
            for ring in cache.windows[first + 1 :]:
                ring.floor = start


def enter_streams(h: F32, count: int) -> tuple[F32, F32]:
    """`h` [rows, dim] copied to `count` streams, and the weights (1, 0, …) for the first collapse."""
    pre = np.zeros((len(h), count), np.float32)
    pre[:, 0] = 1
    return np.repeat(h[:, None, :], count, axis=1), pre


def mean_of_streams(streams: F32, arithmetic: Arithmetic) -> F32:
    """The mean over streams in float32, rounded once: what the draft head reads of a layer's input."""
    return arithmetic.act(np.add.reduce(streams, axis=1) / np.float32(streams.shape[1]))
