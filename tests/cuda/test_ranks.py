"""Several ranks as one engine: on paper every rank gets its own arrays; on a GPU they agree, and say what one says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.synthetic import EMBEDDED, ensure_embedded
from dsuf.cuda import ranks as module
from dsuf.cuda.arena import Array, read_array, write_array
from dsuf.cuda.group import rank_config
from dsuf.cuda.machine import Machine, Setup, plan_sizes
from dsuf.cuda.ranks import SUMMED, RankedKernels, load_ranks, plan_rank_regions
from dsuf.cuda.step import StepShape
from dsuf.cuda.streams import Stream
from dsuf.types import Sampling
from tests.cuda.paper import PaperArena, PaperKernels
from tests.kernels.gpu import missing

STRIDE = 1 << 44
SETUP = Setup(context_tokens=1024, max_turns=4, prefill_rows=64)
CONFIGS = {"embedded": EMBEDDED, "released": load_config(RELEASED / "config.json")}


class PaperRanks(PaperArena):
    """Arrays of several ranks, far apart."""

    def __init__(self, regions: Any, ranks: int) -> None:
        super().__init__(regions)
        self.ranks = ranks
        shifts = tuple(STRIDE * rank for rank in range(1, ranks))
        self._arrays = {name: Array(a.pointer, a.kind, a.shape, shifts) for name, a in self._arrays.items()}


def make_paper(
    config: ModelConfig, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Machine, PaperKernels, dict[int, NDArray[Any]]]:
    """A machine of some ranks, its launches, and what was written by address."""
    written: dict[int, NDArray[Any]] = {}
    monkeypatch.setattr(module, "write_array", lambda array, values: written.update({array.pointer: values}))
    own = rank_config(config, ranks, ranks - 1)
    arena, kernels = PaperRanks(plan_rank_regions(own, SETUP, 40, ranks), ranks), PaperKernels(own)
    ranked = RankedKernels(kernels, arena, own)  # type: ignore[arg-type]
    return Machine(None, ranked, arena, own, plan_sizes(own, SETUP, 40), SETUP, 0), kernels, written  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("drafts", [0, 3])
def test_every_rank_has_its_own(name: str, ranks: int, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is the same launches for each rank, with arrays of its own alone; sums and gathers wait for everybody."""
    machine, kernels, _ = make_paper(CONFIGS[name], ranks, monkeypatch)
    machine.decoder.queue(StepShape(2, drafts, 1024), 7)
    by_rank: list[list[str]] = [[] for _ in range(ranks)]
    for entry, values in kernels.launches:
        places = {a.pointer // STRIDE for n, a in values.items() if isinstance(a, Array)}
        assert len(places) == 1, entry
        by_rank[places.pop()].append(entry)
    assert all(entries == by_rank[0] for entries in by_rank)
    count = {entry: by_rank[0].count(entry) for entry in set(by_rank[0])}
    gathers = count["sample_rows"]
    assert count["gather_peers"] == gathers == 1 + (machine.config.dspark_block_size if drafts else 0)
    assert count["reduce_peers"] == sum(count[entry] for entry in SUMMED)
    assert count["announce_partial"] == gathers + count["reduce_peers"]


def test_nobody_reads_before_all_have_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a part and its sum every rank announces; parts take turns, and the sum goes where the part would have."""
    machine, kernels, written = make_paper(EMBEDDED, 2, monkeypatch)
    machine.prefiller.queue("forward", 64, 1024, 0)
    entries = [entry for entry, _ in kernels.launches]
    outs = []
    for i, (entry, values) in enumerate(kernels.launches):
        if entry in SUMMED and values["out"].pointer < STRIDE:
            assert entries[i : i + 6] == [entry] * 2 + ["announce_partial"] * 2 + ["reduce_peers"] * 2
            tables = kernels.launches[i + 4][1]["partials"]
            base = min(written, key=lambda at: abs(at - tables.pointer))
            turn = (tables.pointer - base) // tables.bytes
            assert list(written[base][turn][:2]) == [values["out"].pointer, values["out"].pointer + STRIDE]
            assert kernels.launches[i + 4][1]["out"].pointer != values["out"].pointer
            outs.append(turn)
    assert outs[:6] == [1, 0, 1, 0, 1, 0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model; skips where no kernel can run."""
    if reason := missing():
        pytest.skip(f"ranks not run: {reason}")
    return ensure_embedded(tmp_path_factory.mktemp("ranks"))


class Driver:
    """Runs turns on a machine, step by step."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.stream = machine, Stream()

    def begin(self, slot: int, ids: NDArray[np.int64]) -> int:
        """Prefill `ids` in slot `slot`; the first token."""
        machine, stream = self.machine, self.stream.handle
        pages = -(-1100 // 128)
        own = tuple(range(slot * pages, (slot + 1) * pages))
        machine.turns.begin(slot, Sampling(temperature=0, top_p=1, seed=1, max_tokens=500), own, stream)
        for start in range(0, len(ids), 64):
            part = ids[start : start + 64]
            machine.prefiller.put_rows(slot, start, part, stream)
            machine.prefiller.queue("forward", 64, 1024, stream)
        step = machine.prefiller.choose_first(slot, len(part) - 1, len(ids), stream)
        self.stream.synchronize()
        return machine.prefiller.results.read(step)[0].ids[0]

    def go_on(self, slot: int, tokens: int, drafts: int) -> list[int]:
        """At least `tokens` more tokens of the turn in `slot`."""
        machine, found = self.machine, []
        while len(found) < tokens:
            write_array(machine.decoder["wanted"], np.array([slot, -1, -1, -1]), self.stream.handle)
            machine.decoder.queue(StepShape(1, drafts, 1024), self.stream.handle)
            step = machine.decoder.results.launch()
            self.stream.synchronize()
            found += machine.decoder.results.read(step)[0].ids
        return found[:tokens]

    def logits(self, pipeline: str, rank: int = 0) -> NDArray[np.float32]:
        """The logits of the last choice, as a rank has them."""
        return read_array(self.machine.arena[f"{pipeline}.logits"].on(rank), self.stream.handle)[0]


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Any:
    """The engine's own machine."""
    machine = Machine.load(checkpoint, SETUP)
    yield Driver(machine)
    machine.close()


PROMPTS = [np.random.default_rng(n).integers(5, 8000, n) for n in (1, 2, 40, 65, 130, 200, 257, 300)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_say_what_one_says(checkpoint: Path, one: Driver, ranks: int) -> None:
    """Bits agree between ranks; with one rank they agree but for roundings of the parts that are summed."""
    machine = load_ranks(checkpoint, SETUP, ranks)
    many, same, distance = Driver(machine), 0, []
    for number, ids in enumerate(PROMPTS):
        slot = number % 4
        first, firsts = one.begin(slot, ids), many.begin(slot, ids)
        theirs, ours = one.logits("prefill"), many.logits("prefill")
        for rank in range(ranks):
            np.testing.assert_array_equal(many.logits("prefill", rank), ours)
        assert np.isfinite(ours).all()
        distance.append(float(np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std()))
        same += first == firsts
    plain = many.go_on(0, 24, 0)
    many.begin(0, PROMPTS[4])
    drafted = many.go_on(0, 24, 5)
    one.begin(0, PROMPTS[4])
    alone = one.go_on(0, 24, 5)
    for rank in range(ranks):
        np.testing.assert_array_equal(many.logits("decode", rank), many.logits("decode"))
    machine.decoder.kernels.check()  # type: ignore[attr-defined]
    machine.close()
    agree = sum(a == b for a, b in zip(drafted, alone, strict=True))
    print(f"\n{ranks} ranks: first token {same}/{len(PROMPTS)}, distance {np.round(distance, 4)}, tokens {agree}/24")
    assert plain == drafted
    assert float(np.median(distance)) < 0.05
    assert same >= 6
