"""What a pass on the device computes, as the comparisons see what the reference computes."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Array, read_array
from dsuf.cuda.step import entries_of
from dsuf.cuda.workspace import Workspace
from dsuf.golden.device_cache import device_cache, read_values
from dsuf.reference.arithmetic import F32, I64
from dsuf.reference.batch import Observer, Segment
from dsuf.reference.moe import Router


class Watch:
    """Shows an observer of the reference's kind what a pass on the device computes, and takes its choices over."""

    def __init__(
        self, config: ModelConfig, layer: int, segment: Segment, work: Workspace, router: "DeviceRouter",
        observer: Observer, *, narrowed: bool,
    ) -> None:  # fmt: skip
        """Of `layer` over `segment`; it is `narrowed` where it chooses among candidates only."""
        self.config, self.layer, self.segment, self.work, self.router = config, layer, segment, work, router
        self.observer, self.narrowed = observer, narrowed
        self.rows = len(segment.positions)
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
            weights = self.router.weights(router_scores(self.logits), self.chosen)
            self.observer.see(name, weights)
            return weights
        return self._force_selection(name)

    def _keep_logits(self, array: Array) -> None:
        experts = self.config.n_routed_experts
        self.logits = read_array(array).reshape(-1)[: self.rows * experts].reshape(self.rows, experts)

    def _keep_chosen(self, array: Array) -> None:
        picks = self.config.n_activated_experts
        self.chosen = read_array(array).reshape(-1)[: self.rows * picks].reshape(self.rows, picks).astype(np.int64)
        self.router.logits, self.router.own = self.logits, self.chosen

    def _keep_latents(self, array: Array) -> None:
        ratio, start = self.config.ratio(self.layer), self.segment.start
        self.latents = read_values(array, self.rows)[(ratio - 1 - start) % ratio :: ratio]

    def _show_latents(self, array: Array) -> None:
        """Only now are the entries there that the latents became."""
        self.observer.see(f"layers.{self.layer}.compressed_latent_pre_rope", self.latents)

    def _keep_scores(self, array: Array) -> None:
        """Scores by entry, -inf where a row may not see one or its block is no candidate."""
        config, segment = self.config, self.segment
        ratio, size = config.ratio(self.layer), config.candidate_block_size
        bound, count = entries_of(max(8, segment.stop))[ratio], segment.stop // ratio
        width = config.candidate_topk_blocks * size if self.narrowed else bound
        packed = read_array(array).reshape(-1)[: self.rows * width].reshape(self.rows, width)
        scores = packed.view(ml_dtypes.bfloat16).astype(np.float32)
        if self.narrowed:
            blocks = read_array(self.work["blocks"]).reshape(-1)[: self.rows * (width // size)].reshape(self.rows, -1)
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
        config, cache = self.config, device_cache(self.segment.cache)
        first = cache.first_row(config.kv_source(self.layer))
        own = read_array(self.work["selected"]).reshape(-1)[: self.rows * config.index_topk]
        own = own.reshape(self.rows, config.index_topk).astype(np.int64)
        forced = self.observer.force(name)
        if forced is None:
            # A row that is not the sequence's counts as none, so that the choice is found to be wrong.
            entries = self.segment.stop // config.ratio(self.layer)
            inside = (own >= first) & (own < first + entries)
            self.observer.see(name, np.where(inside, own - first, -1))
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
