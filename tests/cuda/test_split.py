"""Prefill's rows divided among ranks: on paper all depends on the same as undivided, on a GPU it has the same bits."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda import peers, ranks
from dsuf.cuda import split as module
from dsuf.cuda.arena import Array, Region
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.group import rank_config
from dsuf.cuda.machine import Machine, plan_sizes
from dsuf.cuda.prefill import PassKind
from dsuf.cuda.rank_loader import load_ranks
from dsuf.cuda.ranks import ANNOUNCING, SUMMED, SUMMING, RankedKernels, plan_rank_regions
from dsuf.cuda.split import SMALLEST_SHARE, SPLIT, RowSplit, plan_split
from dsuf.cuda.step import StepShape
from dsuf.errors import DeviceError
from tests.cuda.drive import generate, read_caches
from tests.cuda.paper import PaperKernels
from tests.cuda.symbols import Symbols
from tests.cuda.test_ranks import CONFIGS, SETUP, STRIDE, PaperRanks, find_devices

ROWS = {2: 32, 4: 64}
OTHERS = [("embedded", 4), ("released", 2)]
Written = dict[int, NDArray[Any]]


def make_paper(
    config: ModelConfig, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Machine, RowSplit, PaperKernels, Written]:
    """A machine of some ranks, what divides its rows, its launches, and what was written by address."""
    written: Written = {}
    for each in (module, peers):
        monkeypatch.setattr(
            each, "write_array", lambda array, values, stream=0: written.update({array.pointer: values})
        )
    own = rank_config(config, ranks, ranks - 1)
    arena = PaperRanks([*plan_rank_regions(own, SETUP, 40, ranks), *plan_split()], ranks)
    kernels = PaperKernels(own)
    ranked = RankedKernels([kernels], arena, own)  # type: ignore[list-item]
    machine = Machine(None, ranked, arena, own, plan_sizes(own, SETUP, 40), SETUP, 0)  # type: ignore[arg-type]
    return machine, RowSplit(ranked, arena, own.n_routed_experts), kernels, written


def run_pass(
    name: str, ranks: int, kind: PassKind, monkeypatch: pytest.MonkeyPatch, *, divided: bool
) -> tuple[Machine, Symbols, list[str]]:
    """Two passes one behind the other on symbols; the second finds what the first has left."""
    machine, split, kernels, written = make_paper(CONFIGS[name], ranks, monkeypatch)
    machine.prefiller.split = split if divided else None
    for _ in range(2):
        machine.prefiller.queue(kind, ROWS[ranks], 1024, 0)
    regions = {machine.arena[region].pointer: machine.arena.regions[region] for region in machine.arena.regions}
    symbols = Symbols(kernels.names, regions, written, STRIDE)
    symbols.run(kernels.launches)
    return machine, symbols, [entry for entry, _ in kernels.launches]


def kept(machine: Machine, symbols: Symbols, ranks: int, kind: PassKind) -> dict[tuple[int, int], int]:
    """What outlives a pass: all but workspaces, and the streams where a token may follow; by rank and address."""
    spans = [
        (machine.arena[name].pointer, machine.arena[name].bytes) for name, region in machine.arena.regions.items()
        if region.part != "workspaces" or (kind == "forward" and name in ("prefill.streams", "prefill.ffn.pre"))
    ]  # fmt: skip
    starts, found = np.array(sorted(spans)), {}
    for address, value in symbols.memory.items():
        rank, at = divmod(address, STRIDE)
        place = int(np.searchsorted(starts[:, 0], at, "right")) - 1
        if place >= 0 and at < starts[place].sum():
            found[rank, at] = value
    assert {rank for rank, _ in found} == set(range(ranks))
    return found


@pytest.mark.parametrize(
    ("name", "ranks"), [("embedded", 2), ("nano", 2), *[pytest.param(*o, marks=pytest.mark.full) for o in OTHERS]]
)
@pytest.mark.parametrize("kind", ["encode", "forward"])
def test_the_same_of_the_same(name: str, ranks: int, kind: PassKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What outlives a pass depends on the same as undivided, on every rank."""
    whole = kept(*run_pass(name, ranks, kind, monkeypatch, divided=False)[:2], ranks, kind)
    machine, symbols, entries = run_pass(name, ranks, kind, monkeypatch, divided=True)
    assert kept(machine, symbols, ranks, kind) == whole and len(whole) > 50 * ranks
    assert entries.count("gather_rows") > 4 * ranks


def test_a_gather_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is compared above."""
    whole = kept(*run_pass("embedded", 2, "forward", monkeypatch, divided=False)[:2], 2, "forward")
    for left_out in ("selected", "streams"):
        gather = module.SplitKernels._launch_gather

        def leave_out(self: Any, stream: int, first: int, stop: int, name: str = left_out, go: Any = gather) -> None:
            if name not in module.GATHERED[first:stop]:
                go(self, stream, first, stop)

        with monkeypatch.context() as patch:
            patch.setattr(module.SplitKernels, "_launch_gather", leave_out)
            found = kept(*run_pass("embedded", 2, "forward", patch, divided=True)[:2], 2, "forward")
        assert found != whole, left_out


class Readers:
    """At which meeting every rank read what of the others' memory, and to which one it knows all to have come."""

    def __init__(self, symbols: Symbols, ranks: int) -> None:
        self.symbols, self.announced, self.met = symbols, [0] * ranks, [0] * ranks
        self.read_at: dict[int, int] = {}
        self.broken: list[str] = []

    def follow(self, entry: str, values: Mapping[str, Any]) -> None:
        """A launch, in the order of its rank; overwriting what others may still read is taken down."""
        rank = next(value.pointer for value in values.values() if isinstance(value, Array)) // STRIDE
        if entry in ("reduce_peers", "gather_rows", *SUMMING.values()):
            self.met[rank] = self.announced[rank]
            tables = values["tables"] if entry == "gather_rows" else values["partials"].viewed("i64", 1, 8)
            for address in np.delete(self.symbols._table(tables)[:, : values["ranks"]], rank, axis=1).reshape(-1):
                self.read_at[int(address)] = self.announced[rank]
        else:
            fields = ("out",) if entry in (*SUMMED, *ANNOUNCING.values()) else SPLIT.get(entry, ())
            for address in (values[name].pointer for name in fields if isinstance(values[name], Array)):
                if self.read_at.get(self._base(address), -1) >= self.met[rank]:
                    self.broken.append(f"{entry} of rank {rank}")
        self.announced[rank] += entry in ("announce_partial", *ANNOUNCING.values())

    def _base(self, address: int) -> int:
        """Where the region begins in which that is."""
        at = address % STRIDE
        return address - at + max(start for start in self.symbols.regions if start <= at)


@pytest.mark.parametrize("divided", [True, False])
def test_nobody_writes_what_another_reads(divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with GPUs of their own are ahead of each other as far as meetings let them, from pass to pass too."""
    machine, split, kernels, written = make_paper(CONFIGS["embedded"], 2, monkeypatch)
    machine.prefiller.split = split if divided else None
    for kind in ("encode", "encode", "forward", "forward", "encode"):
        machine.prefiller.queue(kind, 32, 1024, 0)
    readers = read_along(machine, kernels, written)
    assert not readers.broken and len(readers.read_at) > (8 if divided else 2)


@pytest.mark.parametrize("most", [0, 32])
def test_nobody_writes_what_another_adds_up(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of decode steps, their branches added up by launches or within their expansions."""
    monkeypatch.setattr(ranks, "MOST_ROWS_WITHIN", most)
    machine, _, kernels, written = make_paper(CONFIGS["embedded"], 2, monkeypatch)
    for drafts in (0, 3, 3, 0):
        machine.decoder.queue(StepShape(2, drafts, 1024), 0)
    readers = read_along(machine, kernels, written)
    assert not readers.broken and len(readers.read_at) == 4
    assert any(entry in SUMMING.values() for entry, _ in kernels.launches) == bool(most)


def read_along(machine: Machine, kernels: PaperKernels, written: dict[int, NDArray[Any]]) -> Readers:
    """Readers that have followed all launches."""
    regions = {machine.arena[region].pointer: machine.arena.regions[region] for region in machine.arena.regions}
    second = machine.arena["peers.0.parts"][1]
    regions[second.pointer] = Region("the second part", "u8", (second.bytes,), "workspaces")
    readers = Readers(Symbols(kernels.names, regions, written, STRIDE), 2)
    for entry, values in kernels.launches:
        readers.follow(entry, values)
    return readers


def test_every_rank_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the launches that are split: that many rows, behind each other, alive as far as the pass goes."""
    machine, split, kernels, written = make_paper(CONFIGS["embedded"], 2, monkeypatch)
    machine.prefiller.split = split
    split.put_live(45, 0)
    machine.prefiller.queue("forward", 64, 1024, 0)
    live = written[machine.arena["shares.live"].pointer]
    base, places = machine.arena["shares.live"].pointer, set()
    for entry, values in kernels.launches:
        if entry in SPLIT and values["rows"] == 32:
            rank, at = divmod(values["live"].pointer, STRIDE)
            places.add((rank, int(live.reshape(-1)[(at - base) // 4])))
    assert places == {(0, 32), (1, 13)}
    assert [list(row[:2]) for row in live[:3]] == [[16, 16], [32, 13], [45, 0]]


@pytest.mark.parametrize(("rows", "share"), [(32, 16), (64, 32), (128, 64), (8192, 4096), (48, 0), (16, 0), (33, 0)])
def test_shares(rows: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sixteens that have a place in the table of what lives; else a pass is not split."""
    split = make_paper(CONFIGS["embedded"], 2, monkeypatch)[1]
    assert split.share_of(rows) == share and share % SMALLEST_SHARE == 0


def test_what_cannot_be_gathered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch over all rows of an array that nobody gathers."""
    machine, split, _, _ = make_paper(CONFIGS["embedded"], 2, monkeypatch)
    machine.prefiller.split = split
    monkeypatch.setitem(module.SPLIT, "expand_streams", ("out",))  # type: ignore[arg-type]
    monkeypatch.delitem(module.SPLIT, "mix_streams")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="mix_streams reads all rows"):
        machine.prefiller.queue("forward", 64, 1024, 0)


@pytest.fixture(scope="module", params=[(2, False), (4, False), (2, True)])
def both(request: pytest.FixtureRequest, machine: Machine) -> Iterator[tuple[Machine, Machine]]:
    """The checkpoint on some ranks that divide rows, and on as many that do not; on one GPU, or on their own."""
    ranks, apart = request.param
    directory = request.getfixturevalue("checkpoint")
    devices = find_devices(ranks) if apart else ()
    split, whole = (
        load_ranks(directory, machine.setup, ranks, streams=16, devices=devices, splits=splits)
        for splits in (True, False)
    )
    yield split, whole
    for each in (split, whole):
        each.check()
        each.close()


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_the_same_bits(both: tuple[Machine, Machine], mode: Any) -> None:
    """Tokens and caches, in one piece and in chunks, graphs or launches, with drafts behind."""
    split, whole = both
    assert split.prefiller.split is not None and whole.prefiller.split is None
    prompts = [np.random.default_rng(n).integers(3, split.config.vocab_size, n) for n in (17, 90, 129, 400)]
    own, other = (CudaEngine(each, "weights", mode) for each in both)
    plain = CudaEngine(split, "weights", mode, captures=False)
    expected = generate(other, prompts, 24)
    assert generate(own, prompts, 24) == expected
    assert generate(plain, prompts, 24, drafts=3) == expected
    if mode == "exact":
        assert generate(own, prompts, 24, drafts=5, chunk=50, ahead=2) == expected
    for prompt in prompts[1:]:
        for engine in (own, other):
            generate(engine, [prompt], 1)
        assert read_caches(split, len(prompt)) == read_caches(whole, len(prompt))
