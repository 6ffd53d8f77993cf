"""One layer at a time: each gets the recorded input and the recorded choices, so that errors do not add up.

What a layer publishes for later ones (entries, index keys, candidates) is compared and then replaced by what is
recorded. A layer's own choices are compared apart.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from dsuf.golden import tolerance
from dsuf.golden.choices import (
    Choice,
    Scores,
    compare_candidates,
    compare_experts,
    compare_selection,
    reachable,
    score_entries,
)
from dsuf.golden.folder import Case
from dsuf.golden.measure import Array, Distance, count_equal
from dsuf.golden.session import Session
from dsuf.reference.arithmetic import F32
from dsuf.reference.batch import Segment
from dsuf.reference.cache import SequenceCache
from dsuf.reference.model import enter_streams, mean_of_streams

OUTPUTS = (
    "window_kv", "compressed_latent_pre_rope", "compressed_kv", "index_k", "attn_in", "attn_out", "ffn_in",
    "router_weights", "ffn_out", "h_out", "pre_mix_out",
)  # fmt: skip
"""What a layer's pass shows of itself."""


class RecordedLayer:
    """Observes one layer of a recorded run: forces its choices if asked to, and puts its entries into the cache."""

    def __init__(self, case: Case, cache: SequenceCache, layer: int, *, forces: bool) -> None:
        self.seen: dict[str, Array] = {}
        self._prefix = f"layers.{layer}."
        self._case, self._cache, self._layer, self._forces = case, cache, layer, forces

    def see(self, name: str, value: NDArray[np.generic]) -> None:
        """Keep `value`; behind the compressor, exchange its rows in the cache for the recorded ones."""
        self.seen[recorded_name(name).removeprefix(self._prefix)] = value
        if name.endswith("compressed_latent_pre_rope"):
            self._exchange("compressed_kv", len(value))
            self._exchange("index_k", len(value))

    def force(self, name: str) -> NDArray[np.generic] | None:
        """The recorded choice."""
        name = recorded_name(name)
        return self._case[name] if self._forces and name in self._case else None

    def _exchange(self, output: str, rows: int) -> None:
        store = (self._cache.entries if output == "compressed_kv" else self._cache.index_keys)[self._layer]
        self.seen[output] = store.read(slice(rows))
        if rows and self._prefix + output in self._case:
            store.write(0, self._case.single(self._prefix + output))  # a quantiser leaves its own rows as they are


def recorded_name(name: str) -> str:
    """The name in a trace of what the model calls `name`."""
    return name.replace(".ffn.router_", ".router_")


class TraceComparison:
    """The comparison of one trace, layer after layer."""

    def __init__(self, session: Session, case: Case) -> None:
        self.session, self.case = session, case
        self.model, self.config = session.model, session.config
        self.ids = case.whole("input_ids")
        self.cache = self.model.new_cache()
        self.cache.put_ids(0, self.ids)
        self.segment = Segment(self.cache, 0, len(self.ids))
        self.batch = self.model.batch([self.segment])
        self.distances: dict[str, list[Distance]] = defaultdict(list)
        self.choices: dict[str, list[Choice]] = defaultdict(list)
        self.hashes: list[tuple[int, int]] = []

    def run(self) -> None:
        """Compare all layers, then print what they have together."""
        h = self.model.embedding[self.ids]
        self.session.report.judge_equal(self.case.name, self.session.flavour, "h_embed", h, self.case.single("h_embed"))
        streams, pre = enter_streams(self.case.single("h_embed"), self.config.hc_mult)
        for layer in range(self.config.n_layers):
            self._compare_layer(layer, streams, pre)
            streams = self.case.single(f"layers.{layer}.h_out")
            pre = self.case.single(f"layers.{layer}.pre_mix_out")
        self._judge_pooled()

    def _compare_layer(self, layer: int, streams: F32, pre: F32) -> None:
        found: dict[str, Distance] = {}
        if layer in self.config.engram_layer_ids:
            streams = self._compare_engram(layer, streams, found)
        self._compare_taps(layer, streams, found)
        if self.config.mode(layer) in ("full", "reindex"):
            self._compare_selection(layer, streams, pre, found)
        observer = RecordedLayer(self.case, self.cache, layer, forces=True)
        self.model.layers[layer].forward(streams, pre, self.batch, observer)
        self._compare_experts(layer, observer)
        for output in OUTPUTS:
            if output in observer.seen and f"layers.{layer}.{output}" in self.case:
                own = observer.seen[output]
                found[output] = Distance.between(own, self.case[f"layers.{layer}.{output}"])
        self._judge_layer(layer, found)

    def _compare_engram(self, layer: int, streams: F32, found: dict[str, Distance]) -> F32:
        """The streams after a layer's Engram: as recorded, if they are."""
        rows = self.model.hash.rows(self.config.engram_layer_ids.index(layer), self.model.hash.history(self.ids))
        if f"layers.{layer}.engram_hash_ids" in self.case:
            self.hashes.append(count_equal(rows, self.case[f"layers.{layer}.engram_hash_ids"]))
        own = self.model.engrams[layer].forward(streams, rows)
        name = f"layers.{layer}.h_after_engram"
        if name not in self.case:
            return own
        found["h_after_engram"] = Distance.between(own, self.case[name])
        return self.case.single(name)

    def _compare_taps(self, layer: int, streams: F32, found: dict[str, Distance]) -> None:
        """The draft head's input, which is recorded with the whole text."""
        text, name = self.session.folder.cases.get("text_full"), f"main_hidden.{self.session.flavour}"
        targets = self.config.dspark_target_layer_ids
        if text is None or name not in text or layer not in targets or not np.array_equal(text["input_ids"], self.ids):
            return
        recorded = np.split(text[name], len(targets), axis=1)[targets.index(layer)]
        found["main_hidden"] = Distance.between(mean_of_streams(streams, self.model.arithmetic), recorded)

    def _compare_selection(self, layer: int, streams: F32, pre: F32, found: dict[str, Distance]) -> None:
        """An index layer's scores, candidates and top-k, chosen freely from recorded index keys."""
        case, name, segment = self.case, f"layers.{layer}.", self.segment
        attention, u = self.model.layers[layer].attention, self.model.layers[layer].attention_input(streams, pre)
        observer = RecordedLayer(case, self.cache, layer, forces=False)
        attention.forward(u, self.batch, observer)
        scores = None
        if f"{name}index_score" in case:
            own = score_entries(self.session, layer, u, self.batch, segment)
            scores = Scores(own, case.single(f"{name}index_score"))
            found["index_score"] = scores.distance
        if f"{name}candidates" in case:
            self._compare_candidates(layer, scores)
        if f"{name}index_topk" in case:
            recorded = case.whole(f"{name}index_topk")
            margin = (
                case.single(f"{name}index_margin") if f"{name}index_margin" in case else np.ones(len(u), np.float32)
            )
            entries = segment.stop // self.config.ratio(layer)
            choice = compare_selection(observer.seen["index_topk"], recorded, entries, margin, scores)
            self.choices["index_topk"].append(choice)

    def _compare_candidates(self, layer: int, scores: Scores | None) -> None:
        """The candidate blocks; the recorded mask also holds what is not reachable yet."""
        past = reachable(self.segment, self.config.ratio(layer))
        recorded = (self.case[f"layers.{layer}.candidates"] != 0) & past
        own = past if self.segment.candidates is None else self.segment.candidates & past
        self.choices["candidates"].append(compare_candidates(own, recorded, self.config.candidate_block_size, scores))
        if self.segment.candidates is not None:
            self.segment.candidates = recorded

    def _compare_experts(self, layer: int, observer: RecordedLayer) -> None:
        """The experts that the router would have chosen by itself."""
        name, router = f"layers.{layer}.router_indices", self.model.layers[layer].moe.router
        if name in self.case:
            choice = compare_experts(router, observer.seen["ffn_in"], self.case[name], self.session.flavour)
            self.choices["router_indices"].append(choice)

    def _judge_layer(self, layer: int, found: dict[str, Distance]) -> None:
        """A row for the output of `layer` that is nearest to its limit, or over it."""
        flavour, limits = self.session.flavour, {}
        for output, distance in found.items():
            self.distances[output].append(distance)
            limits[output] = tolerance.layer_tolerance(flavour, output, pooled=False, fused=self.session.on_device)
        holds = all(limits[output].allows(distance) for output, distance in found.items())
        worst = max(
            found,
            key=lambda output: (
                not limits[output].allows(found[output]),
                found[output].largest / limits[output].ceiling,
            ),
        )
        item = f"layer {layer} {self.config.mode(layer)}"
        shown = f"{found[worst]} {worst}"
        self.session.report.judge(self.case.name, flavour, item, shown, f"{limits[worst]}", holds)

    def _judge_pooled(self) -> None:
        """A row for each output over all layers, then the choices."""
        report, flavour, name = self.session.report, self.session.flavour, self.case.name
        if self.hashes:
            equal, total = (sum(column) for column in zip(*self.hashes, strict=True))
            report.judge(name, flavour, "engram_hash_ids", f"{equal} of {total} equal", "all equal", equal == total)
        for output, distances in self.distances.items():
            limit = tolerance.layer_tolerance(flavour, output, pooled=True, fused=self.session.on_device)
            report.judge_rows(name, flavour, f"all layers: {output}", Distance.pooled(distances), limit)
        if flavour == "official" and not self.session.on_device:
            share = float(Distance.pooled(self.distances["h_out"]).equal.mean())
            limit_text = f"{tolerance.EQUAL_SHARE:.0%} of rows equal to the bit"
            report.judge(
                name, flavour, "all layers: h_out", f"{share:.1%} equal", limit_text, share >= tolerance.EQUAL_SHARE
            )
        for choice, parts in self.choices.items():
            Choice.pooled(parts).judge(self.session, name, f"all layers: {choice}")
