"""The CUDA engine's model as the comparisons handle the reference's: the same calls, computed by kernels.

Every class here stands in for the one of the reference that it extends, and takes over what the comparisons call of it.
A pass is launched kernel by kernel with an observer between, which reads what a layer makes of its input and exchanges
choices; nothing is computed on the host but what the device's own logits and scores mean.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.arena import Arena, Array, read_array, write_array
from dsuf.cuda.launches import Pass
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.prefill import plan_parts
from dsuf.cuda.step import entries_of
from dsuf.cuda.workspace import Workspace, plan_workspace
from dsuf.golden.device_cache import DeviceCache
from dsuf.reference.arithmetic import F32, I64, OFFICIAL
from dsuf.reference.attention import Attention
from dsuf.reference.batch import NO_OBSERVER, Batch, Observer, Segment
from dsuf.reference.cache import SequenceCache
from dsuf.reference.engram import Engram
from dsuf.reference.layer import Layer
from dsuf.reference.model import Model, Output
from dsuf.reference.moe import Moe, Router
from dsuf.reference.rope import Rope

ROWS, SLOTS = 512, 8
"""The longest pass, and how many sequences are kept: the one begun longest ago gives way to the next."""


def round_bf16(values: F32) -> NDArray[np.uint16]:
    """BF16 bits of `values`."""
    bits: NDArray[np.uint16] = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def read_values(array: Array, rows: int) -> NDArray[Any]:
    """The first `rows` rows of `array`; BF16 as float32."""
    found = read_array(array.rows(0, rows))
    return found.view(ml_dtypes.bfloat16).astype(np.float32) if array.kind == "bf16" else found


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

    def launches(self, watch: "Watch | None" = None) -> Pass:
        """A pass over the rows of the last batch."""
        machine, rows = self.machine, len(self.segment.positions)
        entries = entries_of(max(8, self.segment.stop))
        kernels = machine.prefiller.kernels
        return Pass(kernels, 0, self.work, machine.turns, rows, entries, fresh=True, observer=watch)

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


def device_cache(cache: SequenceCache) -> DeviceCache:
    """`cache`, which is one on the device."""
    assert isinstance(cache, DeviceCache)
    return cache


class Watch:
    """Shows an observer of the reference's kind what a pass on the device computes, and takes its choices over."""

    def __init__(self, model: DeviceModel, layer: int, observer: Observer) -> None:
        self.model, self.layer, self.observer = model, layer, observer
        self.rows = len(model.segment.positions)
        self.logits: F32 = np.empty((0, 0), np.float32)
        self.chosen: I64 = np.empty((0, 0), np.int64)
        self.scores: F32 = np.empty((0, 0), np.float32)
        self.latents: F32 = np.empty((0, 0), np.float32)

    def see(self, name: str, array: Array) -> None:
        """Keep or pass on what the device made."""
        ending = name.rpartition(".")[2]
        special: Mapping[str, Callable[[Array], None]] = {
            "router_logits": self._keep_logits, "router_indices": self._keep_chosen, "index_score": self._keep_scores,
            "compressed_latent_pre_rope": self._keep_latents, "entries": self._show_latents,
        }  # fmt: skip
        if ending in special:
            special[ending](array)
        elif ending not in ("router_weights", "index_topk"):
            self.observer.see(name, read_values(array, self.rows))

    def force(self, name: str) -> NDArray[Any] | None:
        """What the observer forces, in the form that the device has it."""
        ending = name.rpartition(".")[2]
        if ending == "router_indices":
            forced = self.observer.force(name)
            if forced is not None:
                self.chosen = np.asarray(forced, np.int64)
            self.observer.see(name, self.chosen)
            return self.chosen.astype(np.int32) if forced is not None else None
        if ending == "router_weights":
            weights = self.model.layers[self.layer].moe.router.weights(router_scores(self.logits), self.chosen)
            self.observer.see(name, weights)
            return weights
        return self._force_selection(name)

    def _keep_logits(self, array: Array) -> None:
        experts = self.model.config.n_routed_experts
        self.logits = read_array(array).reshape(-1)[: self.rows * experts].reshape(self.rows, experts)

    def _keep_chosen(self, array: Array) -> None:
        picks = self.model.config.n_activated_experts
        self.chosen = read_array(array).reshape(-1)[: self.rows * picks].reshape(self.rows, picks).astype(np.int64)
        router = self.model.layers[self.layer].moe.router
        assert isinstance(router, DeviceRouter)
        router.logits, router.own = self.logits, self.chosen

    def _keep_latents(self, array: Array) -> None:
        ratio, start = self.model.config.ratio(self.layer), self.model.segment.start
        self.latents = read_values(array, self.rows)[(ratio - 1 - start) % ratio :: ratio]

    def _show_latents(self, array: Array) -> None:
        """Only now are the entries there that the latents became."""
        self.observer.see(f"layers.{self.layer}.compressed_latent_pre_rope", self.latents)

    def _keep_scores(self, array: Array) -> None:
        """Scores by entry, -inf where a row may not see one or its block is no candidate."""
        model, config, segment = self.model, self.model.config, self.model.segment
        ratio, size = config.ratio(self.layer), config.candidate_block_size
        bound, count = entries_of(max(8, segment.stop))[ratio], segment.stop // ratio
        narrow = model.narrowed(self.layer)
        width = config.candidate_topk_blocks * size if narrow else bound
        packed = read_array(array).reshape(-1)[: self.rows * width].reshape(self.rows, width)
        scores = packed.view(ml_dtypes.bfloat16).astype(np.float32)
        if narrow:
            blocks = read_array(model.work["blocks"]).reshape(-1)[: self.rows * (width // size)].reshape(self.rows, -1)
            places = (blocks[:, :, None] * size + np.arange(size)).reshape(self.rows, width)
            spread = np.full((self.rows, bound + size), -np.inf, np.float32)
            np.put_along_axis(spread, np.where(places < 0, bound, places), scores, axis=1)
            known = np.zeros_like(spread, np.bool_)
            np.put_along_axis(known, np.where(places < 0, bound, places), True, axis=1)
            scores = np.where(known, spread, -np.inf)
        reachable = (segment.positions + 1) // ratio
        self.scores = np.where(np.arange(count) < reachable[:, None], scores[:, :count], np.float32(-np.inf))

    def _force_selection(self, name: str) -> NDArray[Any] | None:
        """The selection in entries of the sequence to the observer, in rows of the store to the device."""
        config, cache = self.model.config, device_cache(self.model.segment.cache)
        first = cache.first_row(config.kv_source(self.layer))
        own = read_array(self.model.work["selected"]).reshape(-1)[: self.rows * config.index_topk]
        own = own.reshape(self.rows, config.index_topk).astype(np.int64)
        forced = self.observer.force(name)
        if forced is None:
            self.observer.see(name, np.where(own < 0, -1, own - first))
            return None
        wanted = np.full_like(own, -1)
        wanted[:, : forced.shape[1]] = forced
        self.observer.see(name, wanted)
        return np.where(wanted < 0, -1, wanted + first).astype(np.int32)


def router_scores(logits: F32) -> F32:
    """sqrt(softplus(logits)), as the router scores experts."""
    scores: F32 = np.sqrt(np.maximum(logits, np.float32(0)) + np.log1p(np.exp(-np.abs(logits))))
    return scores


class DeviceRouter(Router):
    """The device's scores and choice in the pass that was watched last."""

    def __init__(self, bias: F32, chosen: int, route_scale: float) -> None:
        self.bias, self.chosen, self.route_scale = bias, chosen, np.float32(route_scale)
        self.logits: F32 = np.empty((0, 0), np.float32)
        self.own: I64 = np.empty((0, 0), np.int64)

    def scores(self, v: F32) -> F32:
        """What the device's logits score."""
        return router_scores(self.logits)

    def choose(self, scores: F32) -> I64:
        """What the device chose by itself."""
        return self.own


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
        history = read_array(model.work["history"].rows(0, len(streams)))
        slot = model.config.engram_layer_ids.index(self.layer)
        assert np.array_equal(model.hash.rows(slot, history), table_rows), "the device hashes other tokens"
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
        model, watch = self.model, Watch(self.model, self.layer, observer)
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
        model, watch = self.model, Watch(self.model, self.layer, observer)
        model.put(streams, pre)
        model.put_candidates(self.layer)
        layer = model.machine.model.layers[self.layer]
        layer.run(model.launches(watch), layer.attention.run)
        assert isinstance(self.attention, DeviceAttention)
        self.attention.finish(watch)
        rows = len(streams)
        return read_values(model.work["streams"], rows), read_values(model.work["ffn.pre"], rows)
