"""The layers in a row: what each publishes for those after it, and the losses of the selections on the way."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.nano.mode import Mode
from bench.nano.model.attention import Seen, window_mask
from bench.nano.model.engram import EngramRows
from bench.nano.model.gather import gather
from bench.nano.model.indexer import divergence, score_all, score_chosen
from bench.nano.model.layer import Layer
from bench.nano.model.mixing import enter_streams, mean_of_streams
from bench.nano.model.norm import rotary_table
from bench.nano.model.selection import Question, choose
from dsuf.checkpoint.config import ModelConfig

_ROOM = 64  # positions beyond the longest sequence, for the blocks of a draft


class Pass(NamedTuple):
    """Final `streams` [rows, s, dim], collapse weights `pre` [rows, s], the draft head's `taps` [rows, targets · dim],
    `index_loss` [selecting layers], and the `loads` of all routers."""

    streams: Tensor
    pre: Tensor
    taps: Tensor
    index_loss: Tensor
    loads: tuple[Tensor, ...]


class Ground(NamedTuple):
    """What follows from the shape of a batch: rotations of its rows [rows, 2, width / 2] and of entries by ratio, the
    window masks of encoder and decoder, entries that a position can reach [length] by ratio, Engram rows."""

    window: Tensor
    compressed: Tensor
    entries: dict[int, Tensor]
    masks: tuple[Tensor, Tensor]
    reachable: dict[int, Tensor]
    tables: Tensor


class Publication:
    """A selection and the attention that the layers which use it have paid to its entries."""

    def __init__(self, question: Question, seen: Seen, chosen: Tensor | None) -> None:
        self.question, self.seen, self.chosen = question, seen, chosen
        self.paid: list[Tensor] = []

    def loss(self, batch: int, heads: int, stress: Tensor | None) -> Tensor:
        """How far the index scores are from the attention paid; its mean over heads and layers."""
        target = torch.stack(self.paid).sum(0) / (heads * len(self.paid))
        return divergence_of(self.question, target, self.seen.visible, self.chosen, batch, stress)


def divergence_of(
    question: Question, target: Tensor, visible: Tensor, chosen: Tensor | None, batch: int, stress: Tensor | None
) -> Tensor:
    """The divergence of `target` [rows, k] from the scores of `question` for all entries or the `chosen` ones."""
    if chosen is None:
        return divergence(target, score_all(*question, batch).flatten(0, 1), visible, stress)
    return divergence(target, score_chosen(*question, chosen), visible, stress)


class Backbone(nn.Module):
    """Layers with their rotary tables, for sequences of at most `max_length` positions."""

    def __init__(self, config: ModelConfig, token_ids: Tensor, max_length: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.n_layers))
        self.engram_rows = EngramRows(config, token_ids)
        for name, compressed in (("window_table", False), ("compressed_table", True)):
            made = rotary_table(config, compressed=compressed, length=max_length + _ROOM)
            self.register_buffer(name, made, persistent=False)
        self.window_table: Tensor
        self.compressed_table: Tensor

    def forward(
        self, h: Tensor, ids: Tensor, mode: Mode, replay_from: Tensor | None, stress: Tensor | None = None
    ) -> Pass:
        """Run embeddings `h` [rows, dim] of `ids` [batch, length] through all layers.

        `stress` [rows] weighs rows in the losses of the selections.
        """
        c, ground = self.config, self._ground(ids, replay_from)
        streams, pre = enter_streams(h, c.hc_mult)
        taps, loads, published, candidates = [], [], [], None
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                streams = layer.engram(streams, ground.tables[c.engram_layer_ids.index(index)], mode.quantised)
            if index in c.dspark_target_layer_ids:
                taps.append(mean_of_streams(streams))
            u, mixes = layer.enter(streams, pre)
            rotation = ground.compressed if c.ratio(index) else ground.window
            latent, q, keys = layer.attn.project(u, rotation, mode.quantised)
            if c.mode(index) == "full":
                entries, index_keys = layer.attn.compress(u, ground.entries[c.ratio(index)], mode.quantised)
            if c.mode(index) in ("full", "reindex"):
                question = Question(*layer.attn.ask(u, latent, rotation, mode.quantised), index_keys)
                reachable = ground.reachable[c.ratio(index)]
                publication, candidates = self._publish(index, question, entries, reachable, candidates, mode)
                published.append(publication)
            mask = ground.masks[index > c.decoder_start]
            seen = published[-1].seen if c.ratio(index) else None
            branch, paid = layer.attn.look(q, keys, mask, seen, rotation, mode.quantised)
            if paid is not None:
                published[-1].paid.append(paid)
            streams, pre, load = layer.leave(streams, branch, mixes, mode.quantised)
            loads.append(load)
        index_loss = torch.stack([publication.loss(len(ids), c.n_heads, stress) for publication in published])
        return Pass(streams, pre, torch.cat(taps, 1), index_loss, tuple(loads))

    def _ground(self, ids: Tensor, replay_from: Tensor | None) -> Ground:
        batch, length = ids.shape
        t = torch.arange(length, device=ids.device)
        whole = torch.zeros_like(ids)
        cut = whole if replay_from is None else torch.where(t >= replay_from[:, None], replay_from[:, None], whole)
        mask = window_mask(batch, length, self.config.window_size, whole)
        masks = mask, mask if replay_from is None else window_mask(batch, length, self.config.window_size, cut)
        return Ground(
            self.window_table[:length].repeat(batch, 1, 1),
            self.compressed_table[:length].repeat(batch, 1, 1),
            {ratio: self.compressed_table[:length:ratio].repeat(batch, 1, 1) for ratio in (1, 2)},
            masks,
            {ratio: (t + 1) // ratio for ratio in (1, 2)},
            self.engram_rows(ids),
        )

    def _publish(
        self, index: int, question: Question, entries: Tensor, reachable: Tensor, candidates: Tensor | None, mode: Mode
    ) -> tuple[Publication, Tensor | None]:
        """The selection of layer `index`, or all entries if `mode.dense`."""
        batch = question.queries.shape[0] // len(reachable)
        if mode.dense:
            by_sequence = entries.unflatten(0, (batch, -1))
            visible = torch.arange(by_sequence.shape[1], device=entries.device) < reachable[:, None]
            return Publication(question, Seen(by_sequence, visible.repeat(batch, 1)), None), None
        c = self.config
        bound = candidates if c.kv_source(index) == c.candidate_source_layer else None
        chosen = choose(question, reachable, bound, index == c.candidate_source_layer, c)
        seen = Seen(gather(entries, chosen.rows), chosen.visible)
        return Publication(question, seen, chosen.rows), chosen.candidates
