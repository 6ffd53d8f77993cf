"""One rank of eight with the true shapes of the released model and random contents, to be timed.

It is the engine's own machine at a rank's sizes: 8 heads, experts of width 288, an eighth of the vocabulary, three
Engram columns, every layer its own weights, 36 GB of experts. Engram tables are cut to a million rows each. An index
layer scores the eighth of the context that the rank has the index keys of, and attends to the best of those; of a
short context all.
"""

import subprocess
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import cupy
import msgspec
import numpy as np

from bench.launchlist import Launch, Recorder, arrays_of
from bench.synthetic import fill_rows, fill_weights
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.arena import Arena, Array, read_array
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.constants import write_constants
from dsuf.cuda.group import rank_config
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import Machine, Setup, plan_regions, plan_sizes
from dsuf.cuda.step import StepShape
from dsuf.cuda.streams import Sides
from dsuf.cuda.weights import plan_weights
from dsuf.types import Sampling

RANKS = 8
ENGRAM_ROWS = 1 << 20
MARGIN_TOKENS = 8  # positions that a step may write beyond the length


def rank_of_eight() -> ModelConfig:
    """The sizes of a rank, with what is an eighth there and whole in a rank's configuration cut as well."""
    own = rank_config(load_config(RELEASED / "config.json"), RANKS, 0)
    return msgspec.structs.replace(
        own, vocab_size=own.vocab_size // RANKS, image_token_id=3, dspark_noise_token_id=4,
        candidate_topk_blocks=own.candidate_topk_blocks // RANKS,
        engram_num_embeddings=(ENGRAM_ROWS,) * len(own.engram_layer_ids),
    )  # fmt: skip


def scored_tokens(context_tokens: int) -> int:
    """Positions whose index keys the rank has, of a turn of that length."""
    share = context_tokens // RANKS
    return share if share >= 2 * PAGE_TOKENS * RANKS else context_tokens


class Rank:
    """One rank with random weights and caches, for turns of up to `context_tokens` of the whole context."""

    def __init__(self, device: Device, kernels: Kernels, config: ModelConfig, context_tokens: int, turns: int,
                 prefill_rows: int = 128) -> None:  # fmt: skip
        self.device, self.kernels, self.config = device, kernels, config
        self.setup = Setup(context_tokens=scored_tokens(context_tokens), max_turns=turns, prefill_rows=prefill_rows)
        self.sizes = plan_sizes(config, self.setup, 1)
        self.sizes = plan_sizes(config, self.setup, turns * self.sizes.table_pages)
        self.arena = Arena(plan_regions(config, self.setup, self.sizes.pages))
        self.weights, _ = plan_weights(config, draft=True, engram_on_host=False)
        self.sides = Sides(2)

    def branched(self, kernels: Any) -> Machine:
        """As `machine`, with parts of a pass beside each other as in the engine."""
        machine = self.machine(kernels)
        machine.decoder.sides = machine.prefiller.sides = self.sides
        return machine

    def machine(self, kernels: Any) -> Machine:
        """The rank as a machine whose launches go to `kernels`."""
        return Machine(self.device, kernels, self.arena, self.config, self.sizes, self.setup, self.config.engram_pad_id)

    def fill(self) -> None:
        """Random weights and caches; the pages of the turns are shuffled, no token ends a turn."""
        fill_weights(self.arena, self.weights)
        for layer in self.config.kv_source_layers:
            entries, keys = (cupy.asarray(self.arena[f"layers.{layer}.{name}"]) for name in ("entries", "index_keys"))
            fill_rows(entries, layer, self.config.head_dim // 16, e8m0=False)
            fill_rows(keys, layer, self.config.index_head_dim // 32, e8m0=True)
        fill_rows(cupy.asarray(self.arena["windows"]), 1, self.config.head_dim // 32, e8m0=True)
        write_constants(self.arena, self.config, small_hash(self.config), np.arange(self.config.vocab_size))
        self.begin()

    def begin(self) -> None:
        """A turn in every slot."""
        turns = self.machine(self.kernels).turns
        greedy = Sampling(temperature=0.0, top_p=1.0, seed=7, max_tokens=1 << 30)
        order = np.random.default_rng(1).permutation(self.sizes.pages).reshape(self.setup.max_turns, -1)
        for slot, pages in enumerate(order.tolist()):
            turns.begin(slot, greedy, pages, 0)
        cupy.cuda.Device().synchronize()
        ids = cupy.asarray(turns["ids"])
        ids[...] = cupy.asarray(np.random.default_rng(2).integers(5, self.config.vocab_size, ids.shape), ids.dtype)
        cupy.asarray(turns["anchor"])[...] = cupy.arange(self.setup.max_turns, dtype=cupy.int32) + 5

    def want(self, shape: StepShape) -> Callable[[], None]:
        """Make the first turns take part, and return what puts all turns back to the length of `shape`."""
        wanted = cupy.asarray(self.arena["step.wanted"])
        wanted[...] = cupy.where(cupy.arange(len(wanted)) < shape.batch, cupy.arange(len(wanted)), -1)
        facts = {name: cupy.asarray(self.arena[f"turns.{name}"]) for name in ("length", "generated", "done")}

        def reset() -> None:
            facts["length"].fill(shape.tokens - MARGIN_TOKENS)
            facts["generated"].fill(0)
            facts["done"].fill(0)

        return reset

    def record(self, queue: Callable[[Machine], None]) -> list[Launch]:
        """The launches that `queue` makes of a machine."""
        recorder = Recorder()
        queue(self.machine(recorder))
        return recorder.launches

    def count_experts(self, shape: StepShape, stream: Any) -> dict[str, int]:
        """How many experts a step reads, by layer and draft stage."""
        counter = ExpertCounter(self.config, shape, stream.ptr)
        self.machine(self.kernels).decoder.queue(shape, stream.ptr, counter)
        return counter.distinct


class ExpertCounter:
    """Looks at the routing of a step."""

    def __init__(self, config: ModelConfig, shape: StepShape, stream: int) -> None:
        self.stream, self.distinct = stream, dict[str, int]()
        self.pairs = {
            "layers": shape.rows * config.n_activated_experts,
            "mtp": shape.batch * config.dspark_block_size * config.dspark_n_activated_experts,
        }

    def see(self, name: str, array: Array) -> None:
        """Count where `array` is a layer's choice."""
        if name.endswith(".router_indices"):
            chosen = read_array(array, self.stream).reshape(-1)[: self.pairs[name.split(".")[0]]]
            self.distinct[name.removesuffix(".router_indices")] = len(set(chosen[chosen >= 0].tolist()))

    def force(self, name: str) -> None:
        """Nothing is forced."""


def small_hash(config: ModelConfig) -> EngramHash:
    """A hash into tables that are cut."""
    shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
    multipliers = np.random.default_rng(3).integers(1, 1 << 40, (shape[0], config.engram_max_ngram_size)) * 2 + 1
    primes = np.full(shape, ENGRAM_ROWS // (shape[1] * shape[2]), np.int64)
    return EngramHash(np.arange(config.vocab_size), config.engram_pad_id, multipliers, primes)


class Bytes:
    """What launches must read: weights once a launch, of experts those in use, and rows of the caches."""

    def __init__(self, rank: Rank, shape: StepShape, distinct: Mapping[str, int]) -> None:
        self.rank, self.shape, self.distinct, self.config = rank, shape, distinct, rank.config
        self.spans = sorted((rank.arena[r.name].pointer, r.bytes, r.name) for r in rank.weights)
        self.starts = [start for start, _, _ in self.spans]

    def of(self, launch: Launch) -> int:
        """Bytes of weights and cache rows that `launch` reads."""
        gathered = self._gathered(launch)
        if gathered is not None:
            return gathered
        return sum(self._weight_bytes(array) for array in arrays_of(launch).values()) + self._cache_bytes(launch)

    def _gathered(self, launch: Launch) -> int | None:
        """Of launches that take rows out of a table."""
        c, rows = self.config, launch.values.get("rows", 0)
        if launch.entry == "embed_rows":
            return int(rows) * c.dim * 2
        if launch.entry == "gather_engram":
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
            return int(rows) * columns * c.engram_head_dim * 33 // 32
        if launch.entry == "add_markov":
            return self._weight_bytes(launch.values["head"]) + self.shape.batch * c.dspark_markov_rank * 2
        return None

    def _weight_bytes(self, array: Array) -> int:
        place = bisect_right(self.starts, array.pointer) - 1
        if place < 0 or array.pointer >= self.spans[place][0] + self.spans[place][1]:
            return 0
        name = self.spans[place][2]
        block, found, _ = name.partition(".experts.")
        if not found:
            return array.bytes
        return array.bytes // array.shape[0] * self.distinct[block]

    def _cache_bytes(self, launch: Launch) -> int:
        """Rows of windows, of selected entries (at most as many as there are), and of index keys, once a turn."""
        v, c = launch.values, self.config
        if launch.entry == "attend_sparse":
            entries = min(v["entry_slots"], self.shape.tokens // 2)
            return int(v["rows"]) * (v["window_slots"] * c.head_dim * 33 // 32 + entries * c.head_dim * 9 // 16)
        if launch.entry == "score_index":
            return self.shape.batch * int(v["entries"]) * c.index_head_dim * 17 // 32
        return 0


def gpu_state() -> str:
    """Clocks, temperature and power of the first GPU right after the work."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return told[0].strip().replace(", ", " ") if told else ""
