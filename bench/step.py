"""Time of a whole decode step of one rank of eight, beside the time that its bytes take at the read bandwidth.

The rank has the true shapes of the released model at tensor parallel 8 (8 heads, experts of width 288, an eighth of the
vocabulary, three Engram columns), every layer its own random weights, 36 GB of experts. It runs the engine's own
decode step, draft head included, captured as one graph. In it: everything on this GPU. Not in it, since there is one
GPU: what the other ranks do, how long their data takes to come, the gathering of their best entries and logits. An
index layer scores the eighth of the context that this rank has the index keys of, and attends to the best of those; at
1k all of it. Engram tables are cut to a million rows each. Times are from device events around each replay; turns are
put back to their length before each.

    python bench/step.py [--rows 1 6 8 16 96] [--context 1024 65536 1048576] [--replays 200]
"""

import argparse
import statistics
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.launchlist import Launch, Recorder, arrays_of, capture, profile, time_us
from bench.report import Row, publish
from bench.synthetic import fill_rows, fill_weights
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.arena import Arena, Array, read_array
from dsuf.cuda.caches import PAGE_TOKENS, Caches, CacheSizes
from dsuf.cuda.constants import plan_constants, write_constants
from dsuf.cuda.draft import Draft
from dsuf.cuda.group import rank_config
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.model import Model
from dsuf.cuda.sizes import from_config
from dsuf.cuda.step import Decoder, StepShape, plan_step
from dsuf.cuda.table import SOURCES
from dsuf.cuda.toolchain import find_toolchain
from dsuf.cuda.turns import Turns, plan_turns
from dsuf.cuda.weights import plan_weights
from dsuf.cuda.workspace import plan_workspace

RANKS = 8
ENGRAM_ROWS = 1 << 20
RING_ROWS = 256
SHAPES = {1: (1, 0), 6: (1, 5), 8: (2, 3), 16: (4, 3), 96: (16, 5)}
"""Turns and drafts of each number of rows."""

MOST_ROWS = 96
MOST_TURNS = 16
MARGIN_TOKENS = 8  # positions that a step may write beyond the length
STEADY = 0.03  # change of the read bandwidth beyond which a run says so
GIB = 1 << 30

READ = r"""
extern "C" __global__ void read_all(const uint4* from, size_t count, unsigned* out) {
  unsigned sum = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    const uint4 x = __ldcs(from + i);
    sum ^= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 12345u) *out = sum;
}
"""


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
    """One rank with random weights and caches, and its decoder."""

    def __init__(self, kernels: Kernels, config: ModelConfig, context_tokens: int) -> None:
        tokens = scored_tokens(context_tokens)
        pages = MOST_TURNS * -(-tokens // PAGE_TOKENS)
        self.config, self.kernels = config, kernels
        self.sizes = CacheSizes(config, pages=pages, slots=MOST_TURNS, ring_rows=RING_ROWS, context_tokens=tokens)
        self.weights, _ = plan_weights(config, draft=True, engram_on_host=False)
        block = MOST_TURNS * config.dspark_block_size
        self.arena = Arena(
            [
                *self.weights, *plan_constants(config), *self.sizes.plan(), *plan_turns(config, self.sizes),
                *plan_workspace("decode", config, MOST_ROWS, tokens, MOST_ROWS),
                *plan_workspace("draft", config, block, 8, block), *plan_step(config, MOST_TURNS),
            ]
        )  # fmt: skip
        caches = Caches(self.arena, self.sizes)
        self.turns = Turns(self.arena)
        self.model = Model(self.arena, config, caches, config.engram_pad_id)
        self.draft = Draft(self.arena, config, caches)

    def decoder(self, kernels: Any) -> Decoder:
        """A decoder whose launches go to `kernels`; no token ends a turn."""
        return Decoder(self.arena, kernels, self.model, self.draft, self.turns, rule="block", threshold=0.0, eos_id=-1)

    def fill(self) -> None:
        """Random weights and caches; the pages of the turns are shuffled."""
        fill_weights(self.arena, self.weights)
        for layer in self.config.kv_source_layers:
            fill_rows(
                cupy.asarray(self.arena[f"layers.{layer}.entries"]), layer, self.config.head_dim // 16, e8m0=False
            )
            keys = cupy.asarray(self.arena[f"layers.{layer}.index_keys"])
            fill_rows(keys, layer, self.config.index_head_dim // 32, e8m0=True)
        fill_rows(cupy.asarray(self.arena["windows"]), 1, self.config.head_dim // 32, e8m0=True)
        order = np.random.default_rng(1).permutation(self.sizes.pages).reshape(MOST_TURNS, -1)
        self.put("table", order)
        self.put("ids", np.random.default_rng(2).integers(5, self.config.vocab_size, (MOST_TURNS, RING_ROWS)))
        for name, value in {"max_tokens": 1 << 30, "temperature": 0.0, "top_p": 1.0, "seed": 7, "done": 0}.items():
            self.put(name, value)
        write_constants(self.arena, self.config, small_hash(self.config), np.arange(self.config.vocab_size))

    def put(self, name: str, values: Any) -> None:
        """Set a fact of all turns."""
        array = cupy.asarray(self.turns[name])
        array[...] = cupy.asarray(values, array.dtype)

    def want(self, shape: StepShape) -> Callable[[], None]:
        """Make the first turns take part, and return what puts all turns back to the length of `shape`."""
        wanted = cupy.asarray(self.arena["step.wanted"])
        wanted[...] = cupy.where(cupy.arange(len(wanted)) < shape.batch, cupy.arange(len(wanted)), -1)
        self.put("anchor", np.arange(MOST_TURNS) + 5)
        facts = {name: cupy.asarray(self.turns[name]) for name in ("length", "generated")}

        def reset() -> None:
            facts["length"].fill(shape.tokens - MARGIN_TOKENS)
            facts["generated"].fill(0)

        return reset

    def record(self, shape: StepShape) -> list[Launch]:
        """The launches of a step."""
        recorder = Recorder()
        self.decoder(recorder).queue(shape, 0)
        return recorder.launches

    def count_experts(self, shape: StepShape, stream: Any) -> dict[str, int]:
        """How many experts a step reads, by layer and draft stage."""
        counter = ExpertCounter(self.config, shape, stream.ptr)
        self.decoder(self.kernels).queue(shape, stream.ptr, counter)
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


def reduced(launches: Sequence[Launch], rank: Rank) -> list[Launch]:
    """`launches` with a sum over eight ranks where a rank has only a part; the other seven are buffers here."""
    config, peers = rank.config, LocalPeers()
    out: list[Launch] = []
    for launch in launches:
        values = dict(launch.values)
        if launch.entry == "expand_streams":
            values["branch"] = peers.result
        elif launch.entry == "gate_engram":
            values["projected"] = peers.result
        out.append(Launch(launch.entry, values))
        if launch.entry in ("project_fp8_o", "combine_experts"):
            out += peers.sum(values["out"], values["rows"], config.dim, values["live"])
        elif launch.entry == "project_fp8_engram":
            out += peers.sum(values["out"], values["rows"], (config.hc_mult + 1) * config.dim, values["live"])
    return out


class LocalPeers:
    """The memory of eight ranks as seen by one of them, all of it on this GPU; the others have always arrived."""

    def __init__(self) -> None:
        widest = MOST_ROWS * 5 * 5120
        self.others = cupy.zeros((RANKS - 1, widest), cupy.uint16)
        self.result, self.epoch = cupy.zeros(widest, cupy.uint16), cupy.zeros(1, cupy.int32)
        self.missing, self.arrived = cupy.zeros(1, cupy.int32), cupy.full((RANKS, RANKS), 1 << 30, cupy.int32)
        self.arrived[0, 0] = 0
        self.words = cupy.asarray([row.data.ptr for row in self.arrived], cupy.int64)
        self.tables: list[Any] = []

    def sum(self, part: Array, rows: int, width: int, live: Array) -> list[Launch]:
        """The two launches that add up `part` [rows, width] and the others'."""
        others = [row.data.ptr for row in self.others]
        self.tables.append(cupy.asarray([part.pointer, *others], cupy.int64))
        announce = {"arrived": self.words, "epoch": self.epoch, "rank": 0, "ranks": RANKS}
        reduce = {
            "partials": self.tables[-1], "arrived": self.arrived[0], "epoch": self.epoch, "out": self.result,
            "missing": self.missing, "live": live, "rows": rows, "width": width, "ranks": RANKS,
            "patience_us": 1_000_000,
        }  # fmt: skip
        return [Launch("announce_partial", announce), Launch("reduce_peers", reduce)]


def read_rate(stream: Any) -> float:
    """Bytes a microsecond of a kernel that only reads, the best of some runs over 8 GiB."""
    source, out = cupy.zeros(8 * GIB, cupy.uint8), cupy.zeros(1, cupy.uint32)
    kernel, times = cupy.RawKernel(READ, "read_all"), []
    with stream:
        for _ in range(40):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            kernel((132 * 4,), (512,), (source, np.uint64(source.nbytes // 16), out))
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    rate = source.nbytes / min(times)
    del source
    cupy.get_default_memory_pool().free_all_blocks()
    return rate


def measure(rank: Rank, rows: int, context_tokens: int, stream: Any, rate: float, replays: int) -> Iterator[Row]:
    """The rows of one shape, without and with the sums over ranks; the figures of one step, at its floor."""
    batch, drafts = SHAPES[rows]
    shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
    with stream:
        reset = rank.want(shape)
        reset()
        distinct = rank.count_experts(shape, stream)
        launches = rank.record(shape)
        counted = Bytes(rank, shape, distinct)
        total = sum(counted.of(launch) for launch in launches)
        for reduction in ("none", "local"):
            todo = launches if reduction == "none" else reduced(launches, rank)
            times = time_us(capture(rank.kernels, todo, stream), stream, replays, reset)
            median, floor = statistics.median(times), total / rate
            print(f"{rows} rows, {context_tokens} tokens, {reduction}: {median:.0f} us", flush=True)
            yield {
                "tp": RANKS, "rows": rows, "turns": batch, "drafts": drafts, "context": context_tokens,
                "reduction": reduction, "experts": round(mean_experts(distinct, "layers."), 1),
                "draft_experts": round(mean_experts(distinct, "mtp."), 1), "gigabytes": round(total / 1e9, 3),
                "floor_ms": round(floor / 1e3, 3), "median_ms": round(median / 1e3, 3),
                "p90_ms": round(times[int(0.9 * (len(times) - 1))] / 1e3, 3), "min_ms": round(times[0] / 1e3, 3),
                "ratio": round(median / floor, 2), "tb_per_s": round(total / median / 1e6, 2), "launches": len(todo),
                "finite": bool(cupy.isfinite(cupy.asarray(rank.arena["decode.logits"])[:rows]).all()),
            }  # fmt: skip


def mean_experts(distinct: Mapping[str, int], prefix: str) -> float:
    """Experts a layer reads, over those whose name begins with `prefix`."""
    counts = [count for name, count in distinct.items() if name.startswith(prefix)]
    return statistics.mean(counts) if counts else 0.0


def profile_rows(rank: Rank, rows: int, context_tokens: int, stream: Any, rate: float) -> Iterator[Row]:
    """A row an entry: its launches in a step, how long they take by themselves, and what their bytes take."""
    batch, drafts = SHAPES[rows]
    shape = StepShape(batch=batch, drafts=drafts, tokens=scored_tokens(context_tokens))
    with stream:
        reset = rank.want(shape)
        reset()
        distinct = rank.count_experts(shape, stream)
        launches = rank.record(shape)
        counted = Bytes(rank, shape, distinct)
        found = profile(rank.kernels, launches, stream, reset)
        total = sum(time for _, time in found.values())
        for entry, (count, time) in found.items():
            floor = sum(counted.of(launch) for launch in launches if launch.entry == entry) / rate
            yield {
                "rows": rows, "context": context_tokens, "kernel": entry, "launches": count, "us": round(time, 1),
                "share": round(time / total, 3), "us_a_launch": round(time / count, 2), "floor_us": round(floor, 1),
            }  # fmt: skip


def gpu_state() -> str:
    """Clocks, temperature and power right after the work."""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().replace(", ", " ")


def main() -> None:
    """Measure, print, write `results/step.json` and `results/step-profile.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 65_536, 1_048_576])
    parser.add_argument("--replays", type=int, default=200)
    args = parser.parse_args()
    device, config = Device(), rank_of_eight()
    sizes = from_config(config)
    kernels = Kernels(device, find_toolchain().build_all(SOURCES, device.sm, sizes.macros()), sizes)
    stream = cupy.cuda.Stream(non_blocking=True)
    free, total = cupy.cuda.runtime.memGetInfo()
    print(f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free with kernels loaded", flush=True)
    rates = [read_rate(stream)]
    rank = Rank(kernels, config, max(args.context))
    rank.fill()
    cupy.cuda.Device().synchronize()
    rows = [row for n in args.rows for tokens in args.context for row in measure(rank, n, tokens, stream, rates[0],
                                                                                  args.replays)]  # fmt: skip
    shares = [row for n in {6, 96} & set(args.rows) for row in profile_rows(rank, n, 65_536, stream, rates[0])]
    rank.arena.close()
    rates.append(read_rate(stream))
    label = f"{device.name} ({gpu_state()}), reads {rates[0] / 1e6:.2f} and {rates[1] / 1e6:.2f} TB/s before and after"
    if abs(rates[1] / rates[0] - 1) > STEADY:
        label += ", NOT STEADY"
    publish("step", rows, label)
    if shares:
        publish("step-profile", shares, label)


if __name__ == "__main__":
    main()
