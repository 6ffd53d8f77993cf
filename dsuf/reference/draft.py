"""DSpark: the draft head that proposes a block of tokens in one pass.

Three stages, each an attention and experts like a backbone layer. Its context are rows made of the backbone's taps (the
mean over streams of some layers' inputs), one a position; its block is the anchor token followed by noise tokens, at
positions that all see the context and each other. A small sequential head then makes each choice depend on the last.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dsuf.reference.arithmetic import F32, F64, I64, matmul
from dsuf.reference.attention import Projections
from dsuf.reference.batch import NO_OBSERVER, Batch, Segment
from dsuf.reference.cache import SequenceCache
from dsuf.reference.hyper import collapse
from dsuf.reference.layer import TransformerBlock
from dsuf.reference.model import Model, enter_streams
from dsuf.reference.norm import rms_norm
from dsuf.reference.sparse import attend
from dsuf.reference.weights import WeightSource


class Block(NamedTuple):
    """Draft blocks of some sequences: the choices, the logits they were taken from, and raw confidences."""

    ids: I64  # [sequences, block]
    logits: F32  # [sequences, block, vocabulary], Markov bias included
    confidence: F32  # [sequences, block], before any sigmoid
    stages: tuple[F32, ...]  # streams after each stage [sequences · block, s, dim]


Pick = Callable[[int, F32], I64]
"""Chooses the ids [sequences] of a slot of every block, from that slot's logits [sequences, vocabulary]."""


def pick_greedy(slot: int, logits: F32) -> I64:
    """The arg-max, the lowest id on ties."""
    return np.asarray(logits.argmax(axis=1))


class Stage(TransformerBlock):
    """One of the draft head's transformer blocks; it has a window and no compressed entries."""

    def __init__(self, source: WeightSource, index: int, model: Model) -> None:
        prefix, config = f"mtp.{index}", model.config
        experts, chosen = config.dspark_n_routed_experts, config.dspark_n_activated_experts
        super().__init__(source, prefix, config, model.arithmetic, experts, chosen)
        self.index = index
        self.projections = Projections(source, f"{prefix}.attn", config, model.arithmetic)

    def forward(self, streams: F32, pre: F32, batch: Batch) -> tuple[F32, F32]:
        """Streams and collapse weights after this stage, rows in blocks of one sequence each."""
        return self.run(streams, pre, lambda u: self._attend(u, batch), NO_OBSERVER)

    def _attend(self, u: F32, batch: Batch) -> F32:
        """Every row of a block attends to the sequence's context window and to the whole block, later rows included."""
        rotation = batch.rotation(compressed=False)
        u_quantised = self.arithmetic.q8(u)
        q = self.projections.queries(self.projections.query_latent(u_quantised), rotation)
        keys = self.arithmetic.q8(self.projections.keys(u_quantised, rotation)).astype(np.float64)
        values, slots, offset = [], [], 0
        for segment in batch.segments:
            context = self._context(segment)
            values += [context, keys[segment.rows]]
            rows, known = segment.stop - segment.start, len(context)
            # Unused window slots stay in the list, so that a block of slots begins where it does in a full window.
            own = np.full(self.config.window_size + rows, -1, np.int64)
            own[:known], own[self.config.window_size :] = np.arange(known), known + np.arange(rows)
            slots.append(np.tile(np.where(own < 0, -1, own + offset), (rows, 1)))
            offset += known + rows
        attended = attend(q, np.concatenate(values), np.concatenate(slots), self.projections.sink, self.arithmetic)
        return self.projections.output(attended, rotation)

    def _context(self, segment: Segment) -> F64:
        """The context rows of the window that ends before the block."""
        ring = segment.cache.draft_windows[self.index]
        return ring.read(max(ring.floor, segment.start - self.config.window_size), segment.start)


class Draft:
    """The draft head of `model`: it shares the backbone's embedding and head."""

    def __init__(self, source: WeightSource, model: Model) -> None:
        config, last = model.config, model.config.n_mtp_layers - 1
        self.model, self.config, self.arithmetic = model, config, model.arithmetic
        self.main_proj: F64 = source.linear("mtp.0.main_proj")
        self.main_norm: F32 = source.vector("mtp.0.main_norm.weight")
        self.stages = [Stage(source, index, model) for index in range(config.n_mtp_layers)]
        self.norm: F32 = source.vector(f"mtp.{last}.norm.weight")
        self.markov_embed: F32 = source.vector(f"mtp.{last}.markov_head.embed.weight")
        self.markov_head: F64 = source.matrix(f"mtp.{last}.markov_head.head.weight")
        self.confidence: F64 = source.matrix(f"mtp.{last}.confidence_head.proj.weight")

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        """Put context rows for positions `start` and after, from their `taps` [rows, targets · dim], into `cache`.

        A `start` beyond what was fed before leaves a gap, from which the context begins anew.
        """
        arithmetic = self.arithmetic
        projected = arithmetic.act(matmul(arithmetic.q8(taps), self.main_proj))
        context = arithmetic.q8(rms_norm(projected, self.main_norm, self.config.norm_eps, arithmetic))
        rotation = self.model.window_rope.rotation(np.arange(start, start + len(taps)))
        for stage, ring in zip(self.stages, cache.draft_windows, strict=True):
            ring.write(start, stage.projections.keys(context, rotation))
            if start > cache.drafted:
                ring.floor = start
        cache.drafted = start + len(taps)

    def propose(self, anchors: list[tuple[SequenceCache, int, int]], pick: Pick = pick_greedy) -> Block:
        """Draft blocks after the anchor token of each sequence, given as (cache, anchor position, anchor id).

        The context reaches to the position before the anchor. `pick` chooses each draft.
        """
        size = self.config.dspark_block_size
        batch = self.model.batch([Segment(cache, position, position + size) for cache, position, _ in anchors])
        ids = np.full((len(anchors), size), self.config.dspark_noise_token_id, np.int64)
        ids[:, 0] = [anchor for _, _, anchor in anchors]
        streams, pre = enter_streams(self.model.embedding[ids.ravel()], self.config.hc_mult)
        after = []
        for stage in self.stages:
            streams, pre = stage.forward(streams, pre, batch)
            after.append(streams)
        return self._choose(collapse(streams, pre, self.arithmetic), ids[:, 0], pick, tuple(after))

    def _choose(self, hidden: F32, previous: I64, pick: Pick, stages: tuple[F32, ...]) -> Block:
        """Choose left to right: the head's logits plus a bias from the token chosen before."""
        normed = rms_norm(hidden, self.norm, self.config.norm_eps, self.arithmetic)
        by_row = (len(previous), self.config.dspark_block_size, -1)
        logits = matmul(normed, self.model.head).reshape(by_row)
        hidden = hidden.reshape(by_row)
        ids, confidence = [], []
        for slot in range(self.config.dspark_block_size):
            markov = self.markov_embed[previous]
            logits[:, slot] += matmul(markov, self.markov_head)
            confidence.append(matmul(np.concatenate([hidden[:, slot], markov], axis=1), self.confidence)[:, 0])
            previous = pick(slot, logits[:, slot])
            ids.append(previous)
        return Block(np.stack(ids, axis=1), logits, np.stack(confidence, axis=1), stages)
