"""Several ranks as one engine: on paper every rank gets its own arrays; on a GPU they agree, and say what one says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from bench.nano.sizes import SIZES
from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import table_primes
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.synthetic import EMBEDDED, write_synthetic
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer
from dsuf.cuda import peers as module
from dsuf.cuda import ranks as ranks_module
from dsuf.cuda.arena import Array, read_array, write_array
from dsuf.cuda.devices import count_devices, open_devices
from dsuf.cuda.ends import enter_streams
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.group import rank_config
from dsuf.cuda.kernels import Device
from dsuf.cuda.launches import Pass
from dsuf.cuda.machine import Machine, Setup, plan_sizes
from dsuf.cuda.peers import CHOSEN
from dsuf.cuda.rank_loader import load_ranks
from dsuf.cuda.ranks import ANNOUNCING, SUMMED, SUMMING, RankedKernels, plan_rank_regions
from dsuf.cuda.step import StepShape, entries_of
from dsuf.cuda.streams import Handle
from dsuf.errors import DeviceError
from dsuf.types import Sampling
from tests.cuda.conftest import GOLDEN
from tests.cuda.drive import RULE, ThirdMask, generate, make_turn
from tests.cuda.paper import PaperArena, PaperKernels
from tests.cuda.test_constraints import ids_of, run_turns
from tests.cuda.test_engine import Watcher, row_errors

STRIDE = 1 << 44
SETUP = Setup(context_tokens=1024, max_turns=4, prefill_rows=64)
SPLITS = [("embedded", 2), ("embedded", 4), ("nano", 2), ("released", 2), ("released", 4)]
CONFIGS = {"embedded": EMBEDDED, "nano": SIZES, "released": load_config(RELEASED / "config.json")}


def widen(config: ModelConfig) -> ModelConfig:
    """`config` with as many heads, groups and columns as eight ranks need."""
    wide = msgspec.structs.replace(config, n_heads=16, o_groups=8, moe_inter_dim=256, engram_n_heads=8)
    return msgspec.structs.replace(wide, engram_num_embeddings=tuple(table_primes(wide).sum(axis=(1, 2)).tolist()))


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
    ranked = RankedKernels([kernels], arena, own)  # type: ignore[list-item]
    return Machine(None, ranked, arena, own, plan_sizes(own, SETUP, 40), SETUP, 0), kernels, written  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "ranks"), [("embedded", 2), ("embedded", 4), ("nano", 2), ("released", 2), ("released", 4)]
)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("extras", [False, True])
def test_every_rank_has_its_own(
    name: str, ranks: int, drafts: int, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is the same launches for each rank, with arrays of its own alone; sums and gathers wait for everybody."""
    machine, kernels, _ = make_paper(CONFIGS[name], ranks, monkeypatch)
    machine.decoder.queue(StepShape(2, drafts, 1024, extras), 7)
    by_rank: list[list[str]] = [[] for _ in range(ranks)]
    for entry, values in kernels.launches:
        places = {a.pointer // STRIDE for n, a in values.items() if isinstance(a, Array)}
        assert len(places) == 1, entry
        follows = entry == "gather_peers" and values["ranks"] == 1
        by_rank[places.pop()].append("follow" if follows else entry)
    others = [entry for entry in by_rank[1] if entry != "follow"]
    assert others == by_rank[0] and all(entries == by_rank[1] for entries in by_rank[1:])
    count = {entry: by_rank[1].count(entry) for entry in set(by_rank[1])}
    choices = count["sample_rows"] + count.get("judge_drafts", 0)
    assert count["gather_peers"] == count["sample_rows"] == 1 + (machine.config.dspark_block_size if drafts else 0)
    if extras:  # what is ruled out stays ruled out
        order = [entry for entry in by_rank[1] if entry in ("rank_logits", "mask_logits", "gather_peers")]
        assert order[-3:] == ["gather_peers", "rank_logits", "mask_logits"]
    assert count["follow"] == choices + count.get("judge_drafts", 0)
    assert not {*ANNOUNCING, *SUMMING} & set(count)
    assert sum(count[entry] for entry in SUMMING.values()) == sum(count[entry] for entry in ANNOUNCING.values()) > 1
    assert count["reduce_peers"] == count["project_fp8_engram"]
    assert count["announce_partial"] == count["gather_peers"] + count["reduce_peers"] + choices


def test_many_rows_are_summed_by_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode passes of more rows than may wait within their expansion."""
    machine, kernels, _ = make_paper(EMBEDDED, 2, monkeypatch)
    monkeypatch.setattr(ranks_module, "MOST_ROWS_WITHIN", 5)
    machine.decoder.queue(StepShape(2, 0, 1024), 7)
    few = [entry for entry, _ in kernels.launches]
    kernels.launches.clear()
    machine.decoder.queue(StepShape(3, 1, 1024), 7)
    many = [entry for entry, values in kernels.launches if values.get("rows") == 6]
    assert not {*ANNOUNCING.values(), *SUMMING.values()} & set(many)
    assert many.count("reduce_peers") == sum(many.count(entry) for entry in SUMMED) > few.count("reduce_peers")
    assert {*ANNOUNCING.values(), *SUMMING.values()} <= set(few)


def test_branches_are_read_where_their_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode pass: all ranks have announced a branch before one adds it up, from the parts that they made last."""
    machine, kernels, written = make_paper(EMBEDDED, 2, monkeypatch)
    machine.decoder.queue(StepShape(2, 3, 1024), 7)
    made: list[int] = []
    for entry, values in kernels.launches:
        if entry in ANNOUNCING.values():
            rank, at = divmod(values["out"].pointer, STRIDE)
            made = [*(made if rank else []), values["out"].pointer]
            assert values["rank"] == rank and values["arrived"].pointer // STRIDE == rank and made[0] == at
        elif entry in SUMMING.values():
            table = values["partials"].pointer % STRIDE
            base = max(start for start in written if start <= table)
            row = (table - base) // values["partials"].bytes
            assert list(written[base][row][:2]) == made and len(made) == 2
            assert "branch" not in values and values["ranks"] == 2


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


def test_the_first_rank_s_choice_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every choice the others read the first rank's, in its place, and all have announced in between."""
    machine, kernels, written = make_paper(EMBEDDED, 2, monkeypatch)
    machine.decoder.queue(StepShape(2, 3, 1024), 7)
    chosen = next(values for values in written.values() if values.shape == (len(CHOSEN), 1))
    followed = []
    for i, (entry, values) in enumerate(kernels.launches):
        if entry == "gather_peers" and values["ranks"] == 1:
            leader, own = values["partials"], values["out"].pointer - STRIDE
            base = min(written, key=lambda at: abs(at - leader.pointer % STRIDE))
            assert chosen[(leader.pointer % STRIDE - base) // leader.bytes, 0] == own
            before = [launch[0] for launch in kernels.launches[:i]][-4:]
            assert before.count("announce_partial") >= 2 or before[-1] == "gather_peers"
            followed.append(own)
    names = {machine.arena[name].pointer: name for name in CHOSEN}
    block = machine.config.dspark_block_size
    assert [names[own] for own in followed] == ["draft.picked"] * block + ["decode.picked", "step.kept", "step.next"]


class Noted:
    """A device that remembers when it was made current, and kernels that remember for whom they were launched."""

    def __init__(self, number: int, log: list[tuple[int, str, int]], config: ModelConfig) -> None:
        self.number, self.log, self.names = number, log, PaperKernels(config).names

    def use(self) -> None:
        self.log.append((self.number, "use", 0))

    def launch(self, entry: str, stream: int = 0, **values: Any) -> None:
        self.log.append((self.number, entry, stream))


def test_ranks_on_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's launches go to its device's kernels and stream, with that device current; then the first is again."""
    monkeypatch.setattr(module, "write_array", lambda array, values: None)
    own = rank_config(EMBEDDED, 2, 1)
    arena, log = PaperRanks(plan_rank_regions(own, SETUP, 40, 2), 2), list[tuple[int, str, int]]()
    both: Any = [Noted(number, log, own) for number in range(2)]
    ranked = RankedKernels(both, arena, own, both)
    machine = Machine(both[0], ranked, arena, own, plan_sizes(own, SETUP, 40), SETUP, 0, devices=both)
    machine.decoder.queue(StepShape(1, 0, 1024), Handle.of([7, 8]))
    current = 0
    for number, entry, stream in log:
        if entry == "use":
            current = number
        else:
            assert (number, stream) == (current, 7 + current)
    assert current == 0 and {number for number, entry, _ in log if entry == "sum_expand_collapse"} == {0, 1}


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its kernels have left in pinned memory."""
    told = {STRIDE * rank: np.zeros(1, np.int32) for rank in range(2)}
    monkeypatch.setattr(module, "view_host", lambda array: told[array.pointer // STRIDE * STRIDE])
    monkeypatch.setattr(module, "write_array", lambda array, values: None)
    own = rank_config(EMBEDDED, 2, 1)
    kernels: Any = PaperKernels(own)
    ranked = RankedKernels([kernels], PaperRanks(plan_rank_regions(own, SETUP, 40, 2), 2), own)
    ranked.check()
    told[STRIDE][0] = 1
    with pytest.raises(DeviceError, match="rank 1 did not hear of rank 0 in time"):
        ranked.check()


def last_logits(machine: Machine, rank: int) -> NDArray[np.float32]:
    """The logits behind the last prompt, as a rank has them."""
    found: NDArray[np.float32] = read_array(machine.arena["prefill.logits"].on(rank))[0]
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint that eight ranks can share."""
    directory = tmp_path_factory.mktemp("wide")
    write_synthetic(directory, widen(load_config(GOLDEN / "config.json")), 4, (GOLDEN / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the small model's sizes, whose experts have three blocks for two ranks."""
    directory = tmp_path_factory.mktemp("nano")
    write_synthetic(directory, SIZES, 5, cut_tokenizer(RELEASED / "tokenizer.json", SIZES.vocab_size))
    return directory


OTHERS = [("wide", 2, False), ("wide", 8, False), ("nano", 2, False), ("nano", 2, True)]  # kernels for five more sizes


def find_devices(count: int) -> list[Device]:
    """As many GPUs."""
    if count_devices() < count:
        pytest.skip(f"ranks were not run on {count} GPUs: there are fewer")
    return open_devices(count)


@pytest.fixture(
    scope="module",
    params=[
        *[("checkpoint", 2, False), ("checkpoint", 2, True), ("checkpoint", 4, False)],
        *(pytest.param(other, marks=pytest.mark.full) for other in OTHERS),
    ],
)
def pair(request: pytest.FixtureRequest, machine: Machine) -> Iterator[tuple[Machine, Machine]]:
    """A checkpoint on one rank, and split over some, which share a GPU or have their own."""
    name, ranks, apart = request.param
    directory = request.getfixturevalue(name)
    whole = machine if name == "checkpoint" else Machine.load(directory, machine.setup)
    split = load_ranks(directory, machine.setup, ranks, streams=8, devices=find_devices(ranks) if apart else ())
    yield whole, split
    split.check()
    split.close()
    if whole is not machine:
        whole.close()


@pytest.fixture
def prompts(machine: Machine) -> list[NDArray[np.int64]]:
    """Prompts of many lengths."""
    return [np.random.default_rng(n).integers(3, machine.config.vocab_size, n) for n in (1, 2, 17, 64, 90, 127, 129)]


def begin_pass(machine: Machine, ids: NDArray[np.int64]) -> tuple[Pass, Watcher]:
    """A pass over a prompt by hand, up to its first layer."""
    watcher, prefiller = Watcher(), machine.prefiller
    machine.turns.begin(0, Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=1), range(8), 0)
    prefiller.put_rows(0, 0, ids, 0)
    todo = Pass(
        prefiller.kernels, 0, prefiller.work, machine.turns, 128, entries_of(1024), fresh=True, observer=watcher
    )
    machine.model.place(todo)
    enter_streams(todo, machine.arena)
    return todo, watcher


def copy_across(source: Machine, target: Machine, *names: str) -> None:
    """Give `target` what a pass of `source` left."""
    for name in names:
        write_array(target.prefiller.work[name], read_array(source.prefiller.work[name]))


def assert_near(own: NDArray[Any], expected: NDArray[Any], place: str) -> None:
    """Within what parts rounded to BF16 make of a sum."""
    found = row_errors(own[:96], np.asarray(expected[:96], np.float32))
    assert np.median(found) <= 5e-3 and (found <= 4e-2).mean() >= 0.97, (place, np.median(found), found.max())


def assert_slices(many: Machine, one: Machine, rows: int, *names: str) -> None:
    """What the ranks have of an activation lies side by side in that of one rank, to the bit; zeros may follow."""
    for name in names:
        own = many.prefiller.work[name]
        slices = [read_array(own.on(rank))[:rows] for rank in range(many.arena.ranks)]
        whole = read_array(one.prefiller.work[name])[:rows]
        found, rest = np.split(np.concatenate(slices, axis=1), [whole.shape[1]], axis=1)
        np.testing.assert_array_equal(found, whole, name)
        assert not rest.any()


def assert_same_caches(many: Machine, one: Machine, positions: int) -> None:
    """Every rank's entries and index keys of a turn in the first pages are one rank's, to the bit."""
    for layer in one.config.kv_source_layers:
        for store in (f"layers.{layer}.entries", f"layers.{layer}.index_keys"):
            whole = read_array(one.arena[store])[: positions // one.config.ratio(layer)]
            for rank in range(many.arena.ranks):
                np.testing.assert_array_equal(read_array(many.arena[store].on(rank))[: len(whole)], whole, store)


def read_branch(many: Machine) -> NDArray[np.float32]:
    """A branch as all ranks have it."""
    branches = [read_array(many.prefiller.work["branch"].on(rank)) for rank in range(many.arena.ranks)]
    assert all(np.array_equal(branch, branches[0]) for branch in branches)
    return branches[0].view(ml_dtypes.bfloat16).astype(np.float32)


def test_layers_with_the_input_of_one_rank(pair: tuple[Machine, Machine]) -> None:
    """Attention and experts of every layer, and Engrams, each given what one rank's were given.

    What ranks have a part of, and what all of them compute, is one rank's to the bit; the three sums over ranks differ,
    since their parts are rounded to BF16 before they are added. Quantisers behind a sum would magnify that, those of
    cached rows for all layers that read them: hence an input of its own for each.
    """
    machine, many = pair
    if len({device.index for device in many.devices}) > 1:
        pytest.skip("a pass by hand is queued where ranks share a GPU")
    config, rows = machine.config, 96
    ids = np.random.default_rng(8).integers(3, config.vocab_size, rows)
    (one, theirs), (split, ours) = begin_pass(machine, ids), begin_pass(many, ids)
    passes = ((machine, one), (many, split))
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}"
        copy_across(machine, many, "streams", "ffn.pre")
        if layer in config.engram_layer_ids:
            for each, todo in passes:
                each.model.engrams[layer].run(todo)
                todo.see(f"{prefix}.h_after_engram", todo.work["streams"])
            assert_near(ours.seen[f"{prefix}.h_after_engram"], theirs.seen[f"{prefix}.h_after_engram"], prefix)
            copy_across(machine, many, "streams")
        for each, todo in passes:
            each.model.layers[layer].run(todo, each.model.layers[layer].attention.run)
        for name in (name for name in (f"{prefix}.attn_in", f"{prefix}.index_topk") if name in theirs.seen):
            np.testing.assert_array_equal(ours.seen[name][:rows], theirs.seen[name][:rows], name)
        assert_slices(many, machine, rows, "low.codes", "low.scales")
        assert_near(ours.seen[f"{prefix}.attn_out"], theirs.seen[f"{prefix}.attn_out"], f"{prefix}.attn")
        copy_across(machine, many, "input", "input.codes", "input.scales", "input.meaning")
        many.model.layers[layer].moe.run(split)
        np.testing.assert_array_equal(*[read_array(each.prefiller.work["chosen"])[:rows] for each in (machine, many)])
        assert_slices(many, machine, rows * config.n_activated_experts, "inner")
        assert_slices(many, machine, rows, "shared.inner")
        assert_near(read_branch(many), theirs.seen[f"{prefix}.ffn_out"], f"{prefix}.ffn")
    assert_same_caches(many, machine, rows)


def test_whole_runs(pair: tuple[Machine, Machine], prompts: list[NDArray[np.int64]]) -> None:
    """Ranks agree to the bit. From one rank's logits theirs are as far as roundings grow to in a random model."""
    machine, many = pair
    one, split = (CudaEngine(each, "weights", "exact") for each in (machine, many))
    same, distances = 0, []
    for prompt in prompts:
        first = [generate(engine, [prompt], 1) for engine in (one, split)]
        same += first[0] == first[1]
        whole, ours = last_logits(machine, 0), last_logits(many, 0)
        for rank in range(many.arena.ranks):
            np.testing.assert_array_equal(last_logits(many, rank), ours)
        distances.append(float(np.linalg.norm(ours - whole) / np.linalg.norm(whole)))
    print(f"\n{many.arena.ranks} ranks: same first token {same} of {len(prompts)}, distances {np.round(distances, 3)}")
    assert np.median(distances) < 0.5  # of unrelated logits it is 1.4


def test_ranks_agree_with_themselves(pair: tuple[Machine, Machine], prompts: list[NDArray[np.int64]]) -> None:
    """Drafts on or off, chunked or whole, graph or launches, together or alone: the same tokens."""
    _, many = pair
    engine = CudaEngine(many, "weights", "exact")
    tokens = generate(engine, prompts, 24)
    assert generate(engine, prompts, 24, drafts=5) == tokens
    assert generate(engine, prompts, 24, chunk=7) == tokens
    assert generate(CudaEngine(many, "weights", "exact", captures=False), prompts, 24, drafts=3) == tokens
    assert [generate(engine, [prompt], 24)[0] for prompt in prompts] == tokens


def test_a_rule_over_ranks(pair: tuple[Machine, Machine], prompts: list[NDArray[np.int64]]) -> None:
    """Ranks keep to it as one, and drafts change neither tokens nor log-probabilities."""
    many, _ = pair
    vocabulary, eos_id = many.config.vocab_size, many.config.eos_token_id
    engine = CudaEngine(many, "weights", "exact", open_mask=lambda constraint: ThirdMask(vocabulary, end=eos_id))
    said = []
    for drafts in (0, engine.facts.max_drafts):
        turns = [make_turn(ids, 20, RULE if i % 2 else None, logprobs=3) for i, ids in enumerate(prompts)]
        found = run_turns(engine, turns, drafts, 1)
        rated = [one for results in found for result in results for one in result.logprobs]
        said.append(([ids_of(results) for results in found], rated))
    plain, drafted = said
    assert plain == drafted
    for ids in plain[0][1::2]:
        assert all(ThirdMask(vocabulary)._find(ids[:at])[token] for at, token in enumerate(ids))
