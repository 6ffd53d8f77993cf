"""Several ranks that work as one engine: each launch goes to all of them, and what each has a part of is put together.

The ranks' arenas have one layout, so the first rank's launch with shifted addresses is every rank's, and what the host
writes is written to all. Three kinds of results are sums over ranks (attention's, the experts', an Engram
projection's); logits are slices of the vocabulary that are gathered before a choice is made of them. All else the ranks
compute alike, choices too, from the same bits; index keys every rank has in full so far. Here the ranks share one GPU
and one stream; nothing but the order of launches (all announce, then all read) makes use of that.

Decided here: parts are rounded to BF16 before they are added, half the bytes of float32 on every link, as the usual
reduction has it. What goes into a sum is one rank's to the bit, and so is everything that follows from equal sums; the
sums themselves are not (about 0.3 % of a row's length), and quantisers and choices carry that on. One rank that
imitated the parts of eight would have to keep eight roundings of every expert's output, which the model has not.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.arena import Arena, Array, Region, free_bytes, read_array, view_host, write_array
from dsuf.cuda.constants import write_constants
from dsuf.cuda.contract import DeviceArray
from dsuf.cuda.group import MAX_RANKS, check_ranks, rank_config, split_tensors
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.machine import RESERVED_BYTES, Machine, Setup, build_kernels, count_pages, plan_regions, plan_sizes
from dsuf.cuda.weights import arrange_experts, load_weights, plan_weights
from dsuf.errors import DeviceError

SUMMED = ("project_fp8_o", "combine_experts", "project_fp8_engram")
"""Entries whose `out` is a part of a sum where a rank runs them."""

STREAMS = 2
"""Streams on which ranks meet: decode's and prefill's."""

PATIENCE_US = 2_000_000
ALIGNMENT_BYTES = 256

Value = DeviceArray | int | float | None
Values = Mapping[str, Value]


def plan_rank_regions(
    own: ModelConfig, setup: Setup, pages: int, ranks: int, streams: int = STREAMS
) -> list[Region]:  # fmt: skip
    """The regions of one of `ranks` ranks whose sizes are `own`: the engine's, with a slice of what makes logits, and
    what it needs to meet the others on some streams."""
    slices = {"head.weight", f"mtp.{own.n_mtp_layers - 1}.markov_head.head.weight"}
    regions = [
        msgspec.structs.replace(r, shape=(own.vocab_size // ranks, *r.shape[1:])) if r.name in slices else r
        for r in plan_regions(own, setup, pages)
    ]
    block = own.dspark_block_size + 1 if setup.drafts else 1
    rows = max(setup.max_turns * block, setup.prefill_rows, own.window_size)
    return regions + [region for number in range(streams) for region in _plan_peers(own, number, rows, ranks)]


def _plan_peers(own: ModelConfig, number: int, rows: int, ranks: int) -> list[Region]:
    """What a rank shows the others, and how it knows them."""
    width_bytes = -(-(own.hc_mult + 1) * own.dim * 2 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "parts": ("u8", (2, rows * width_bytes)),
        "slices": ("f32", (rows, own.vocab_size // ranks)),
        "arrived": ("i32", (MAX_RANKS,)),
        "epoch": ("i32", (1,)),
        "missing": ("i32", (1,)),
        "words": ("i64", (MAX_RANKS,)),
        "partials": ("i64", (3, MAX_RANKS)),
    }
    return [Region(f"peers.{number}.{name}", kind, shape, "workspaces") for name, (kind, shape) in shapes.items()]


class Peers:
    """The arrays with which the ranks meet on one stream; two parts take turns."""

    def __init__(self, arena: Arena, number: int) -> None:
        self._arrays = {name: arena[f"peers.{number}.{name}"] for name in
                        ("parts", "slices", "arrived", "epoch", "missing", "words", "partials")}  # fmt: skip
        self._turn = 0
        shown = [self["parts"][0], self["parts"][1], self["slices"]]
        write_array(self["partials"], np.array([_addresses(array) for array in shown]))
        write_array(self["words"], np.array(_addresses(self["arrived"])))

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def next_part(self, rows: int, width: int) -> tuple[Array, Array]:
        """Where the next sum's parts go, BF16 [rows, width], and the table of their addresses."""
        self._turn = 1 - self._turn
        return self["parts"][self._turn].viewed("bf16", rows, width), self["partials"][self._turn]


def _addresses(array: Array) -> list[int]:
    """Where each rank has `array`, in a row of fixed length."""
    found = [array.pointer + shift for shift in (0, *array.shifts)]
    return found + [0] * (MAX_RANKS - len(found))


class RankedKernels(Kernels):
    """`kernels`, each launched for all ranks of `arena`."""

    def __init__(self, kernels: Kernels, arena: Arena, own: ModelConfig) -> None:
        self.names, self.ranks = kernels.names, arena.ranks
        self._kernels, self._arena, self._config = kernels, arena, own
        self._peers = [Peers(arena, n) for n in range(len(arena.regions)) if f"peers.{n}.parts" in arena]
        self._by_stream: dict[int, Peers] = {}
        self._slice_rows: dict[int, tuple[int, Array]] = {}  # of each array of logits: its rows, and how many live

    def launch(self, entry: str, stream: int = 0, **values: DeviceArray | int | float | None) -> None:
        """As `Kernels.launch`."""
        if entry in SUMMED:
            self._sum(entry, stream, values)
        elif entry == "project_bf16_dim" and _address(values["weight"]) == self._arena["head.weight"].pointer:
            self._project_slice(entry, stream, values)
        elif entry == "add_markov":
            logits: dict[str, Value] = {
                "logits": self._meet(stream)["slices"],
                "vocabulary": self._config.vocab_size // self.ranks,
            }
            self._each(entry, stream, {**values, **logits})
        else:
            if entry == "sample_rows":
                self._gather(stream, values["logits"])
            self._each(entry, stream, values)

    def check(self) -> None:
        """Raise `DeviceError` if a rank was ever waited for in vain; blocks."""
        for peers in self._peers:
            for rank in range(self.ranks):
                missing = int(read_array(peers["missing"].on(rank))[0])
                if missing:
                    raise DeviceError(f"rank {rank} did not hear of rank {missing - 1} in time")

    def _each(self, entry: str, stream: int, values: Values) -> None:
        for rank in range(self.ranks):
            own = {name: value.on(rank) if isinstance(value, Array) else value for name, value in values.items()}
            self._kernels.launch(entry, stream, **own)

    def _meet(self, stream: int) -> Peers:
        """The set of arrays that belongs to `stream`."""
        if stream not in self._by_stream:
            if not len(self._by_stream) < len(self._peers):
                raise DeviceError(f"ranks meet on at most {len(self._peers)} streams")
            self._by_stream[stream] = self._peers[len(self._by_stream)]
        return self._by_stream[stream]

    def _sum(self, entry: str, stream: int, values: Values) -> None:
        peers, rows = self._meet(stream), values["rows"]
        width = values.get("n", self._config.dim)
        assert isinstance(rows, int) and isinstance(width, int)
        part, partials = peers.next_part(rows, width)
        self._each(entry, stream, {**values, "out": part})
        self._bring_together("reduce_peers", stream, partials, values["out"], rows, width, values["live"])

    def _project_slice(self, entry: str, stream: int, values: Values) -> None:
        """Each rank's slice of the logits, which stay apart until a choice is made of them."""
        logits, rows, live = values["out"], values["rows"], values["live"]
        assert isinstance(rows, int) and isinstance(live, Array)
        self._slice_rows[_address(logits)] = rows, live
        own: dict[str, Value] = {"out": self._meet(stream)["slices"], "n": self._config.vocab_size // self.ranks}
        self._each(entry, stream, {**values, **own})

    def _gather(self, stream: int, logits: DeviceArray | float | None) -> None:
        rows, live = self._slice_rows[_address(logits)]
        partials, width = self._meet(stream)["partials"][2], self._config.vocab_size // self.ranks
        self._bring_together("gather_peers", stream, partials, logits, rows, width, live)

    def _bring_together(
        self, entry: str, stream: int, partials: Array, out: DeviceArray | float | None, rows: int, width: int,
        live: DeviceArray | float | None,
    ) -> None:  # fmt: skip
        peers, sizes = self._meet(stream), {"rows": rows, "width": width, "ranks": self.ranks}
        for rank in range(self.ranks):
            own = {"arrived": peers["words"].on(rank), "epoch": peers["epoch"].on(rank)}
            self._kernels.launch("announce_partial", stream, **own, rank=rank, ranks=self.ranks)
        shared = {name: peers[name] for name in ("arrived", "epoch", "missing")}
        self._each(entry, stream, {**shared, "partials": partials, "out": out, "live": live, **sizes,
                                   "patience_us": PATIENCE_US})  # fmt: skip


def _address(value: DeviceArray | float | None) -> int:
    assert isinstance(value, Array)
    return value.pointer


class RankView(Arena):
    """One rank's arrays of `arena`, for what fills them."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self.regions, self._arena, self._rank = arena.regions, arena, rank

    def __getitem__(self, name: str) -> Array:
        return self._arena[name].on(self._rank)

    def __contains__(self, name: str) -> bool:
        return name in self._arena

    def host(self, name: str) -> NDArray[Any]:
        """A pinned region of this rank as a NumPy array of the same memory."""
        return view_host(self[name])


def load_ranks(
    directory: Path, setup: Setup, ranks: int, progress: Callable[[int], None] = lambda done: None,
    streams: int = STREAMS,
) -> Machine:  # fmt: skip
    """A machine of `ranks` ranks on this GPU with the checkpoint in `directory`; raises as `Machine.load` does.

    Work may be queued on up to `streams` streams.
    """
    config = load_config(directory / "config.json")
    check_ranks(config, ranks)
    own, device = rank_config(config, ranks, ranks - 1), Device()
    pages = count_pages(own, setup, ((setup.budget_bytes or free_bytes()) - RESERVED_BYTES) // ranks)
    kernels = build_kernels(device, own)
    arena = Arena(plan_rank_regions(own, setup, pages, ranks, streams), ranks)
    try:
        pad_id = _fill_ranks(arena, directory, config, own, setup, device, progress)
        for rank in range(ranks):
            arrange_experts(RankView(arena, rank), kernels)
        ranked = RankedKernels(kernels, arena, own)
    except BaseException:
        arena.close()
        raise
    return Machine(device, ranked, arena, own, plan_sizes(own, setup, pages), setup, pad_id)


def _fill_ranks(
    arena: Arena, directory: Path, config: ModelConfig, own: ModelConfig, setup: Setup, device: Device,
    progress: Callable[[int], None],
) -> int:  # fmt: skip
    """Bring every rank's share of the weights, and its constants, into `arena`; the Engram id that fills a history."""
    tokens, drafts = TokenMap.from_tokenizer(directory / "tokenizer.json"), setup.drafts and config.n_mtp_layers > 0
    whole = EngramHash.from_config(config, tokens)
    with Checkpoint.open(directory) as checkpoint:
        for rank in range(arena.ranks):
            view = RankView(arena, rank)
            take = _sharer(checkpoint, config, arena.ranks, rank)
            here = rank_config(config, arena.ranks, rank)
            _, placements = plan_weights(here, draft=drafts, engram_on_host=setup.engram_on_host)
            load_weights(view, placements, take, device, progress)
            if drafts:
                rating = checkpoint.tensor(f"mtp.{config.n_mtp_layers - 1}.confidence_head.proj.weight")
                write_array(view["confidence"], np.asarray(rating).astype(np.float32).reshape(-1))
            heads = config.engram_n_heads
            first, last = heads * rank // arena.ranks, heads * (rank + 1) // arena.ranks
            primes = np.ascontiguousarray(whole.primes[:, :, first:last])
            own_hash = EngramHash(tokens.ids, config.engram_pad_id, whole.multipliers, primes)
            write_constants(view, here, own_hash, tokens.ids)
    return whole.pad_id


def _sharer(checkpoint: Checkpoint, config: ModelConfig, ranks: int, rank: int) -> Callable[[str], NDArray[np.generic]]:
    """What gives a rank's share of a tensor by its name."""
    shares = {spec.name: share for spec, share in split_tensors(config, ranks, rank)}
    return lambda name: shares[name].take(checkpoint.tensor(name))
