"""Compressed sparse attention (CSA2): a window of own rows, and selected entries of a shared compressed cache.

A layer works in one of four modes. `window`: its window only. `full`: makes compressed entries and index keys, selects.
`reindex`: selects anew among the last Full layer's entries. `reuse`: takes entries and selection as published.
"""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.reference.arithmetic import F32, F64, I64, Arithmetic, Bool, matmul
from dsuf.reference.batch import Batch, Observer, Segment
from dsuf.reference.compress import Compressor
from dsuf.reference.indexer import Indexer, candidate_mask, select
from dsuf.reference.norm import rms_norm
from dsuf.reference.rope import Rope, Rotation
from dsuf.reference.rows import RowRing
from dsuf.reference.sparse import attend, window_slots
from dsuf.reference.weights import WeightSource


class Projections:
    """The query, key and output projections that every attention has, a backbone layer's and a draft stage's alike."""

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig, arithmetic: Arithmetic) -> None:
        self.config, self.arithmetic = config, arithmetic
        self.wq_a: F64 = source.linear(f"{prefix}.wq_a")
        self.q_norm: F32 = source.vector(f"{prefix}.q_norm.weight")
        self.wq_b: F64 = source.linear(f"{prefix}.wq_b")
        self.wkv: F64 = source.linear(f"{prefix}.wkv")
        self.kv_norm: F32 = source.vector(f"{prefix}.kv_norm.weight")
        grouped = source.linear(f"{prefix}.wo_a").reshape(config.o_groups, config.o_lora_rank, -1)
        self.wo_a: F64 = np.ascontiguousarray(grouped.swapaxes(1, 2))  # [groups, heads of a group · width, rank]
        self.wo_b: F64 = source.linear(f"{prefix}.wo_b")
        self.sink: F32 = source.vector(f"{prefix}.attn_sink")

    def query_latent(self, u_quantised: F32) -> F32:
        """The quantised query latent [rows, q_lora_rank]; it also feeds the indexer."""
        latent = self.arithmetic.act(matmul(u_quantised, self.wq_a))
        return self.arithmetic.q8(rms_norm(latent, self.q_norm, self.config.norm_eps, self.arithmetic))

    def queries(self, latent: F32, rotation: Rotation) -> F32:
        """Queries [rows, heads, head_dim]; no norm by head."""
        q = self.arithmetic.act(matmul(latent, self.wq_b))
        return rotation.apply(q.reshape(len(q), self.config.n_heads, self.config.head_dim), self.arithmetic)

    def keys(self, u_quantised: F32, rotation: Rotation) -> F32:
        """Window rows [rows, head_dim], before their quantiser; key and value at once."""
        k = self.arithmetic.act(matmul(u_quantised, self.wkv))
        return rotation.apply(rms_norm(k, self.kv_norm, self.config.norm_eps, self.arithmetic), self.arithmetic)

    def output(self, attended: F32, rotation: Rotation) -> F32:
        """The branch [rows, dim]: turn back, project group by group (input not quantised), then together."""
        turned = rotation.apply(attended, self.arithmetic, inverse=True)
        by_group = turned.reshape(len(turned), self.config.o_groups, -1).swapaxes(0, 1).astype(np.float64)
        low = np.matmul(by_group, self.wo_a).swapaxes(0, 1).reshape(len(turned), -1).astype(np.float32)
        return self.arithmetic.act(matmul(self.arithmetic.q8(self.arithmetic.act(low)), self.wo_b))


class Attention:
    """The attention of one backbone layer."""

    def __init__(
        self,
        source: WeightSource,
        layer: int,
        config: ModelConfig,
        arithmetic: Arithmetic,
        rope: Rope,
        *,
        own_keys: bool,
    ) -> None:
        self.layer, self.config, self.arithmetic, self.own_keys = layer, config, arithmetic, own_keys
        self.mode, self.ratio = config.mode(layer), config.ratio(layer)
        self.rope, self.compressed = rope, self.ratio > 0
        self.projections = Projections(source, f"layers.{layer}.attn", config, arithmetic)
        indexed = self.mode in ("full", "reindex")
        self.indexer = Indexer(source, layer, config, arithmetic) if indexed else None
        self.compressor = Compressor(source, layer, config, arithmetic, rope) if self.mode == "full" else None

    def forward(self, u: F32, batch: Batch, observer: Observer, *, write_entries: bool = True) -> F32:
        """The branch [rows, dim] for normed input `u` [rows, dim]; fills the caches of its sequences."""
        rotation = batch.rotation(compressed=self.compressed)
        u_quantised = self.arithmetic.q8(u)
        latent = self.projections.query_latent(u_quantised)
        keys = self.projections.keys(u_quantised, rotation)
        windows = [self._window(segment, keys[segment.rows]) for segment in batch.segments]
        if self.compressor is not None and write_entries:
            self._write_entries(u, batch, observer)
        if self.indexer is not None:
            self._publish(self.indexer, u, latent, batch, rotation, observer)
        values, slots = self._gather(batch, windows)
        q = self.projections.queries(latent, rotation)
        attended = attend(q, values, slots, self.projections.sink, self.arithmetic)
        observer.see(f"layers.{self.layer}.window_kv", windows[-1][-len(batch.segments[-1].positions) :])
        return self.projections.output(attended, rotation)

    def write_window(self, u: F32, segment: Segment) -> None:
        """Put window rows of `segment`'s positions into its cache, for input `u`, without attending from them."""
        keys = self.projections.keys(self.arithmetic.q8(u), self.rope.rotation(segment.positions))
        segment.cache.windows[self.layer].write(segment.start, keys)

    def write_entries(self, u: F32, segment: Segment) -> None:
        """Put the compressed entries and index keys of `segment`'s positions into its cache, for input `u`."""
        assert self.compressor is not None, "only a Full layer makes entries"
        self.compressor.write(segment.cache, segment.start, self.compressor.project(u))

    def _write_entries(self, u: F32, batch: Batch, observer: Observer) -> None:
        assert self.compressor is not None
        projected = self.compressor.project(u)
        for segment in batch.segments:
            latents = self.compressor.write(segment.cache, segment.start, projected[segment.rows])
            observer.see(f"layers.{self.layer}.compressed_latent_pre_rope", latents)

    def _window(self, segment: Segment, keys: F32) -> F64:
        """Window rows from the oldest any row of `segment` needs up to its last; the new ones are also kept."""
        return extend_window(segment.cache.windows[self.layer], segment.start, keys, self.arithmetic, self.config)

    def _gather(self, batch: Batch, windows: list[F64]) -> tuple[F64, I64]:
        """All rows that the batch may attend to [n, head_dim], and the slots of each row of the batch [rows, slots]."""
        values, slots, offset = [], [], 0
        width = max(segment.selection.shape[1] for segment in batch.segments) if self.compressed else 0
        for segment, window in zip(batch.segments, windows, strict=True):
            first, floor = segment.stop - len(window), segment.cache.windows[self.layer].floor
            own = [window_slots(segment.positions, first, floor, self.config.window_size)]
            values.append(window)
            if width:
                padded = np.full((len(own[0]), width), -1, np.int64)
                padded[:, : segment.selection.shape[1]] = segment.selection
                own.append(np.where(padded < 0, -1, padded + len(window)))
                values.append(segment.entries)
            joined = np.concatenate(own, axis=1)
            slots.append(np.where(joined < 0, -1, joined + offset) if offset else joined)
            offset = sum(map(len, values))
        return np.concatenate(values), np.concatenate(slots)

    def _publish(
        self, indexer: Indexer, u: F32, latent: F32, batch: Batch, rotation: Rotation, observer: Observer
    ) -> None:
        """Select for every row, and leave selection and entries with each segment for the layers that reuse them."""
        queries, weights = indexer.queries(latent, rotation), indexer.head_weights(u)
        forced = observer.force(f"layers.{self.layer}.index_topk")
        for segment in batch.segments:
            if forced is None:
                rows = segment.rows
                selection = self._select(indexer, queries[rows], weights[rows], segment, observer)
            else:
                selection = np.asarray(forced[segment.rows], np.int64)
            self._take_entries(segment, selection)
            observer.see(f"layers.{self.layer}.index_topk", selection)

    def _take_entries(self, segment: Segment, selection: I64) -> None:
        """Unpack the entries that `selection` names: all of them for many rows, only the selected ones for few."""
        store = segment.cache.entries[self.config.kv_source(self.layer)]
        reachable = segment.stop // self.ratio
        if selection.size < reachable:
            named = selection >= 0
            segment.entries = store.read(selection[named])
            selection = np.where(named, np.cumsum(named).reshape(named.shape) - 1, -1)
        else:
            segment.entries = store.read(slice(reachable))
        segment.selection = selection

    def _select(self, indexer: Indexer, queries: F32, weights: F32, segment: Segment, observer: Observer) -> I64:
        """The selection [rows, k] of `segment`; the candidate source leaves its candidates there too."""
        c, entries = self.config, segment.stop // self.ratio
        reachable, blocks = (segment.positions + 1) // self.ratio, -(-entries // c.candidate_block_size)
        filters = self.layer == c.candidate_source_layer and blocks > c.candidate_topk_blocks
        if filters:
            segment.candidates = np.zeros((len(queries), entries), bool)
        if entries <= c.index_topk and not filters:
            within = np.broadcast_to(np.arange(entries), (len(queries), entries))
            return np.where(within < reachable[:, None], within, -1)
        keys = segment.cache.index_keys[self._key_layer(segment)].first(entries)
        found = np.full((len(queries), min(c.index_topk, entries)), -1, np.int64)
        for rows in indexer.row_blocks(len(queries), entries):
            limit = int(reachable[rows].max())
            allowed = np.arange(limit) < reachable[rows, None]
            scores = np.where(allowed, indexer.scores(queries[rows], weights[rows], keys[:limit]), np.float32(-np.inf))
            allowed = self._restrict(segment, rows, scores, allowed, reachable[rows], filters=filters)
            found[rows] = select(scores, allowed, min(c.index_topk, entries))
        return found

    def _restrict(
        self, segment: Segment, rows: slice, scores: F32, allowed: Bool, reachable: I64, *, filters: bool
    ) -> Bool:
        """What may be selected: the candidate source records candidates and is free, Reindex layers keep to them."""
        c = self.config
        if segment.candidates is None:
            return allowed
        if filters:
            mask = candidate_mask(scores, reachable, c.candidate_topk_blocks, c.candidate_block_size)
            segment.candidates[rows, : mask.shape[1]] = mask
        restricted = self.mode == "reindex" and c.kv_source(self.layer) == c.candidate_source_layer
        return allowed & segment.candidates[rows, : allowed.shape[1]] if restricted else allowed

    def _key_layer(self, segment: Segment) -> int:
        """The layer whose index keys are scored: the own source, unless the released decode is asked for.

        The released code has one slot for index keys, which a ratio-2 layer fills only when a group completes. In a
        decode step that completes none, it and the Reindex layers after it score against the keys published last.
        """
        source = self.config.kv_source(self.layer)
        if self.own_keys or segment.stop - segment.start > 1 or self.config.ratio(source) == 1 or segment.stop % 2 == 0:
            return source
        published = [i for i in self.config.kv_source_layers if i < source and self.config.ratio(i) == 1]
        return published[-1] if published else self.config.kv_source_layers[-1]


def extend_window(ring: RowRing, start: int, keys: F32, arithmetic: Arithmetic, config: ModelConfig) -> F64:
    """The rows before `start` that a window still holds, then `keys` quantised; keeps `keys`."""
    before = ring.read(max(ring.floor, start - config.window_size + 1), max(ring.floor, start))
    ring.write(start, keys)
    return np.concatenate([before, arithmetic.q8(keys).astype(np.float64)])
