"""The CUDA engine's model as the comparisons handle the reference's: the same calls, computed by kernels.

Every class here stands in for the one of the reference that it extends, and takes over what the comparisons call of it.
A pass is launched kernel by kernel with an observer between, which reads what a layer makes of its input and exchanges
choices; nothing is computed on the host but what the device's own logits and scores mean.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.arena import Arena, read_array, write_array
from dsuf.cuda.launches import Pass
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.prefill import plan_parts
from dsuf.cuda.step import entries_of
from dsuf.cuda.workspace import Workspace, plan_workspace
from dsuf.golden.device_cache import DeviceCache, device_cache, read_values, round_bf16
from dsuf.golden.watch import DeviceRouter, Watch
from dsuf.reference.arithmetic import F32, I64, OFFICIAL
from dsuf.reference.attention import Attention
from dsuf.reference.batch import NO_OBSERVER, Batch, Observer, Segment
from dsuf.reference.cache import SequenceCache
from dsuf.reference.engram import Engram
from dsuf.reference.layer import Layer
from dsuf.reference.model import Model, Output
from dsuf.reference.moe import Moe
from dsuf.reference.rope import Rope

ROWS, SLOTS = 512, 8
"""The longest pass, and how many sequences are kept: the one begun longest ago gives way to the next."""


class DeviceModel(Model):
    """The backbone of the checkpoint in a folder, loaded on this machine's GPU."""

    def __init__(self, directory: Path) -> None:
        """Load; raises `CheckpointError`, `CommandError` or `DeviceError`."""
        setup = Setup(context_tokens=ROWS, max_turns=SLOTS, prefill_rows=ROWS, ring_rows=2 * ROWS)
        self.machine = Machine.load(directory, setup)
        self.config, self.arithmetic = self.machine.config, OFFICIAL
        self.hash = EngramHash.from_config(self.config, TokenMap.from_tokenizer(directory / "tokenizer.json"))
        self.scratch = Arena(plan_workspace("golden", self.config, ROWS, ROWS, ROWS))
        self.work = Workspace(self.scratch, "golden")
        self.window_rope, self.compressed_rope = Rope(self.config, compressed=False), Rope(self.config, compressed=True)
        self.embedding = read_values(self.machine.arena["embed.weight"], self.config.vocab_size)
        self.layers = [DeviceLayer(self, layer) for layer in range(self.config.n_layers)]
        self.engrams = {layer: DeviceEngram(self, layer) for layer in self.config.engram_layer_ids}
        self.begun = 0
        self.segment = Segment(self.new_cache(), 0, 0)

    def new_cache(self, table: object = None) -> DeviceCache:
        """An empty cache for one sequence, in a slot and pages of the machine; there are no other tables."""
        self.begun += 1
        return DeviceCache(self.machine, self.begun % SLOTS, -(-(ROWS + 8) // 128))

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """A batch of one segment, whose rows the device is told of."""
        (self.segment,) = segments
        cache = device_cache(self.segment.cache)
        ids, rows = cache.ids[self.segment.start : self.segment.stop], len(self.segment.positions)
        facts = {"row_slot": np.full(rows, cache.slot), "row_position": self.segment.positions, "row_id": ids}
        for name, values in (facts | {"live": np.array([rows])}).items():
            write_array(self.work[name], values)
        self.machine.model.place(self.launches())
        return Batch(segments, self.window_rope, self.compressed_rope)

    def launches(self, watch: Watch | None = None) -> Pass:
        """A pass over the rows of the last batch."""
        machine, rows = self.machine, len(self.segment.positions)
        entries = entries_of(max(8, self.segment.stop))
        kernels = machine.prefiller.kernels
        return Pass(kernels, 0, self.work, machine.turns, rows, entries, fresh=True, observer=watch)

    def watch(self, layer: int, observer: Observer) -> Watch:
        """Shows `observer` what `layer` makes of the rows of the last batch."""
        router = self.layers[layer].moe.router
        assert isinstance(router, DeviceRouter)
        narrowed = self.narrowed(layer)
        return Watch(self.config, layer, self.segment, self.work, router, observer, narrowed=narrowed)

    def put(self, streams: F32, pre: F32) -> None:
        """Let a layer begin with these."""
        write_array(self.work["streams"], round_bf16(streams))
        write_array(self.work["ffn.pre"], pre)

    def filtered(self, layer: int) -> bool:
        """Whether `layer` reads the candidate source's entries, of which there are more than candidates."""
        config = self.config
        entries = entries_of(max(8, self.segment.stop)).get(config.ratio(layer), 0)
        candidates = config.candidate_topk_blocks * config.candidate_block_size
        return candidates < entries and config.kv_source(layer) == config.candidate_source_layer

    def narrowed(self, layer: int) -> bool:
        """Whether `layer` chooses among candidates only."""
        return self.config.mode(layer) == "reindex" and self.filtered(layer)

    def put_candidates(self, layer: int) -> None:
        """Let `layer` choose among the candidates that stand with the segment."""
        if not self.narrowed(layer) or self.segment.candidates is None:
            return
        count, size = self.config.candidate_topk_blocks, self.config.candidate_block_size
        reachable = (self.segment.positions + 1) // self.config.ratio(layer)
        mask = self.segment.candidates & (np.arange(self.segment.candidates.shape[1]) < reachable[:, None])
        blocks = np.full((len(mask), count), -1)
        for row, marked in enumerate(mask):
            found = np.unique(np.flatnonzero(marked) // size)
            blocks[row, : len(found)] = found
        write_array(self.work["blocks"], blocks)
        write_array(self.work["inside"], mask.sum(axis=1))

    def take_candidates(self, layer: int) -> None:
        """Let the candidates that the source layer has marked stand with the segment."""
        known = self.segment.candidates is not None
        if known or layer != self.config.candidate_source_layer or not self.filtered(layer):
            return
        count, size = self.config.candidate_topk_blocks, self.config.candidate_block_size
        rows = len(self.segment.positions)
        blocks = read_array(self.work["blocks"]).reshape(-1)[: rows * count].reshape(rows, count)
        entries = np.arange(self.segment.stop // self.config.ratio(layer))
        self.segment.candidates = (entries[None, :, None] // size == blocks[:, None, :]).any(axis=2)

    def forward(self, work: Sequence[tuple[SequenceCache, I64]], observer: Observer = NO_OBSERVER) -> Output:
        """Append ids to one sequence, all layers on all of them."""
        ((cache, ids),) = work
        start = cache.length
        cache.put_ids(start, ids)
        output = self._run_rows(cache, start, len(cache.ids))
        cache.length = cache.decoded = len(cache.ids)
        return output

    def _run_rows(self, cache: SequenceCache, start: int, stop: int) -> Output:
        self.batch([Segment(cache, start, stop)])
        todo = self.launches()
        self.machine.model.forward(todo)
        rows = stop - start
        taps = read_values(self.work["taps"], rows).reshape(rows, -1)
        return Output(read_values(self.work["streams"], rows), read_values(self.work["ffn.pre"], rows), taps)

    def prefill_replay(self, cache: SequenceCache, ids: I64, *, last: bool) -> Output | None:
        """Append `ids`, part of a prompt, as the engine's replay does."""
        start, output, window = cache.length, None, self.config.window_size
        cache.put_ids(start, ids)
        stop = cache.length = len(cache.ids)
        for part in plan_parts(start, stop, cache.decoded, last=last, mode="replay", window=window, most=ROWS):
            if part.kind == "encode":
                self.batch([Segment(cache, part.start, part.stop)])
                self.machine.model.encode(self.launches())
                continue
            if part.start > cache.decoded:
                self.machine.prefiller.cut_windows(device_cache(cache).slot, part.start, 0)
            output, cache.decoded = self._run_rows(cache, part.start, part.stop), part.stop
        return output

    def logits(self, output: Output, rows: I64 | slice) -> F32:
        """Logits of some rows of `output`."""
        streams, pre = output.streams[rows], output.pre[rows]
        self.put(streams, pre)
        write_array(self.work["live"], np.array([len(pre)]))
        self.segment = Segment(self.segment.cache, 0, len(pre))
        self.machine.model.head(self.launches())
        return read_values(self.work["logits"], len(pre))


class DeviceMoe(Moe):
    """Stands for the experts of a layer: only their router is asked for."""

    def __init__(self, router: DeviceRouter) -> None:
        self.router = router


class DeviceEngram(Engram):
    """The memory before a layer; which table rows it reads follows from the batch's own tokens."""

    def __init__(self, model: DeviceModel, layer: int) -> None:
        self.model, self.layer = model, layer

    def forward(self, streams: F32, table_rows: I64) -> F32:
        """`streams` with the memory of the last batch's rows added."""
        model = self.model
        write_array(model.work["streams"], round_bf16(streams))
        model.machine.model.engrams[self.layer].run(model.launches())
        return read_values(model.work["streams"], len(streams))


class DeviceAttention(Attention):
    """The attention of a layer."""

    def __init__(self, model: DeviceModel, layer: int) -> None:
        self.model, self.layer = model, layer
        self.scores: F32 = np.empty((0, 0), np.float32)

    def forward(self, u: F32, batch: Batch, observer: Observer, *, write_entries: bool = True) -> F32:
        """The branch for normed input `u`."""
        model, watch = self.model, self.model.watch(self.layer, observer)
        todo = model.launches(watch)
        write_array(model.work["input"], round_bf16(u))
        todo.quantize("input", model.config.dim)
        model.put_candidates(self.layer)
        model.machine.model.layers[self.layer].attention.run(todo)
        self.finish(watch)
        return read_values(model.work["branch"], len(u))

    def finish(self, watch: Watch) -> None:
        """Show the window rows, and keep what was scored and marked."""
        model, segment = self.model, self.model.segment
        rows = device_cache(segment.cache).window_rows(self.layer, segment.start, segment.stop)
        watch.observer.see(f"layers.{self.layer}.window_kv", rows)
        if watch.scores.size:
            self.scores = watch.scores
        model.take_candidates(self.layer)


class DeviceLayer(Layer):
    """A backbone layer."""

    def __init__(self, model: DeviceModel, layer: int) -> None:
        self.model, self.layer, config = model, layer, model.config
        bias = read_array(model.machine.arena[f"layers.{layer}.ffn.gate.bias"])
        self.moe = DeviceMoe(DeviceRouter(bias, config.n_activated_experts, config.route_scale))
        self.attention = DeviceAttention(model, layer)

    def attention_input(self, streams: F32, pre: F32) -> F32:
        """The normed collapse that attention reads."""
        self.model.put(streams, pre)
        self.model.machine.model.layers[self.layer].collapse(self.model.launches(), "ffn.pre", "attn_norm")
        return read_values(self.model.work["input"], len(streams))

    def forward(
        self, streams: F32, pre: F32, batch: Batch, observer: Observer, *, write_entries: bool = True
    ) -> tuple[F32, F32]:
        """Streams and collapse weights after this layer."""
        model, watch = self.model, self.model.watch(self.layer, observer)
        model.put(streams, pre)
        model.put_candidates(self.layer)
        layer = model.machine.model.layers[self.layer]
        layer.run(model.launches(watch), layer.attention.run)
        assert isinstance(self.attention, DeviceAttention)
        self.attention.finish(watch)
        rows = len(streams)
        return read_values(model.work["streams"], rows), read_values(model.work["ffn.pre"], rows)
