"""`dsuf plan`: every part against arithmetic written out here, the search for limits, and what it refuses."""

import json
from collections.abc import Mapping

import pytest

from dsuf.__main__ import main
from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.synthetic import EMBEDDED
from dsuf.cuda.arena import add_up
from dsuf.cuda.budget import Demand, plan_budget, rank_regions, session_bytes
from dsuf.cuda.machine import plan_regions, plan_sizes
from dsuf.cuda.plan import GPUS, search_largest
from dsuf.cuda.weights import plan_weights

CONFIG = load_config(RELEASED / "config.json")
ALIGNMENT = 256
# One matrix of each kind: values, and with one scale a block of 32 x 32.
WQ_A, WKV, WQ_B, WO_A, WO_B = 1280 * 5120, 512 * 5120, 32768 * 1280, 8192 * 4096, 5120 * 8192
SHARED = 3 * 2304 * 5120
EXPERT = 2304 * 5120 * 3 * 17 // 32


def fp8(values: int) -> int:
    """Bytes of E4M3 values with their scales."""
    return values + values // 1024


def demand(ranks: int = 8, **other: int | bool) -> Demand:
    """Two streams of 64k unless stated."""
    fields = {"context_tokens": 65_536, "streams": 2, "drafts": 5, "engram_on_host": True, "prefill_chunk_tokens": 256}
    return Demand(ranks=ranks, **(fields | other))  # type: ignore[arg-type]


def gpu_parts(ranks: int, **other: int | bool) -> Mapping[str, int]:
    """Of the released model."""
    return plan_budget(CONFIG, demand(ranks, **other)).gpu


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_matrices_of_a_rank(ranks: int) -> None:
    """Column- and row-parallel matrices are divided, first projections, router and hyper-connections are not."""
    parts = gpu_parts(ranks)
    assert parts["routed experts"] == 40 * 384 * EXPERT // ranks
    assert EXPERT == 18_800_640
    mixing = 40 * 2 * (24 * 20480 * 4 + ALIGNMENT + ALIGNMENT)
    assert parts["mixing"] == mixing
    router = 40 * (384 * 5120 * 2 + 384 * 4 + 5120 * 2)
    assert parts["shared experts"] == pytest.approx(40 * fp8(SHARED) // ranks + router, abs=40 * 4 * ALIGNMENT)
    layers = 40 * (fp8(WQ_A) + fp8(WKV) + fp8(WQ_B + WO_A + WO_B) // ranks)
    compressors = 3 * 2 * 512 * 5120 * 2 + 512 * 5120 * 2 + 4 * 128 * 512 * 2
    index_queries = 8 * (fp8(4096 * 1280) + 32 * 5120 * 2)
    norms = 40 * 2 * (5120 + 1280 + 512)
    whole = layers + compressors + index_queries + norms
    assert parts["attention"] == pytest.approx(whole, abs=40 * 14 * ALIGNMENT)
    assert parts["embedding"] == 129280 * 5120 * 2
    assert parts["head"] == 129280 * 5120 * 2 // ranks + 5120 * 2
    assert parts["engram"] == 2 * (fp8(25600 * 6144) // ranks + 2 * 4 * 5120 * 2)


@pytest.mark.parametrize(("ranks", "attention", "engram", "head"), [(8, 955, 39, 166), (4, 1543, 79, 331)])
def test_megabytes_a_step_reads(ranks: int, attention: int, engram: int, head: int) -> None:
    """The rows of the performance page that a step reads whole: attention matrices, Engram projection, LM head."""
    held = {region.name: region.bytes for region in rank_regions(CONFIG, demand(ranks))}
    names = [f"layers.{i}.attn.{m}.{k}" for i in range(40) for m in ("wq_a_kv", "wq_b", "wo_a", "wo_b")
             for k in ("weight", "scale")]  # fmt: skip
    assert round(sum(held[name] for name in names) / 1e6) == attention
    projections = [f"layers.{i}.engram.wkv.weight" for i in (1, 14)]
    assert round(sum(held[name] for name in projections) / 1e6) == engram
    assert held["head.weight"] / 1e6 == pytest.approx(head, abs=0.6)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_draft_head(ranks: int) -> None:
    """Three stages like layers with 128 experts; what takes the taps in and the Markov embedding are whole."""
    stage = fp8(WQ_A) + fp8(WKV) + fp8(WQ_B + WO_A + WO_B + SHARED) // ranks + 128 * EXPERT // ranks
    stage += 2 * 24 * 20480 * 4 + 128 * 5120 * 2
    whole = 3 * stage + fp8(5120 * 15360) + 129280 * 256 * 2 * (1 + 1 / ranks)
    parts = gpu_parts(ranks)
    assert parts["draft"] == pytest.approx(whole, abs=200_000)
    assert "draft" not in gpu_parts(ranks, drafts=0)


@pytest.mark.parametrize("ranks", [1, 8])
def test_caches(ranks: int) -> None:
    """890 bytes a token on one GPU; with more, latents are on all and index keys are shared out."""
    parts = gpu_parts(ranks, context_tokens=1_048_576, streams=3)
    tokens = 3 * (1_048_576 + 128)  # the last step may write past the end, into one more page
    latents, keys = tokens * (3 * 288 // 2 + 288), tokens * (3 * 68 // 2 + 68) // ranks
    assert parts["pages"] == pytest.approx(latents + keys, abs=8 * ALIGNMENT)
    if ranks == 1:
        assert parts["pages"] == tokens * 890
    rings, halves = 43 * 256 * 528, 3 * (64 + 16) * 2 * 512 * 4
    assert parts["slots"] == pytest.approx(3 * (rings + halves), rel=0.01)
    assert session_bytes(CONFIG, 1_048_576) == 933_232_640 + 43 * 128 * 528 + halves


def test_engram_tables() -> None:
    """On the GPUs each has an eighth, give or take that prime numbers differ; on the host they are once."""
    rows = 384_006_168 + 384_016_682
    assert rows * 264 == 202_758_032_400
    on_card, on_host = demand(8, engram_on_host=False), demand(8)
    share = plan_budget(CONFIG, on_card).gpu["engram tables"]
    assert share >= rows * 264 / 8
    assert share == pytest.approx(rows * 264 / 8, rel=1e-4)
    assert plan_budget(CONFIG, on_card).host.get("Engram tables, pinned") is None
    assert plan_budget(CONFIG, on_host).host["Engram tables, pinned"] == pytest.approx(rows * 264, abs=4 * ALIGNMENT)
    assert "engram tables" not in plan_budget(CONFIG, on_host).gpu


@pytest.mark.parametrize("draft", [True, False])
def test_one_rank_is_what_the_engine_loads(draft: bool) -> None:
    """Without a split it is the engine's regions, name for name and byte for byte; all text is loaded."""
    wanted = demand(1, drafts=5 * draft, engram_on_host=False)
    planned = rank_regions(EMBEDDED, wanted)
    pages = wanted.streams * plan_sizes(EMBEDDED, wanted.setup, 1).table_pages
    regions = plan_regions(EMBEDDED, wanted.setup, pages)
    assert {r.name: (r.bytes, r.pinned) for r in planned} == {r.name: (r.bytes, r.pinned) for r in regions}
    regions, _ = plan_weights(EMBEDDED, draft=draft, engram_on_host=False)
    text = sum(spec.bytes for spec in expected_tensors(EMBEDDED)
               if spec.part != "vision" and "bias_vl" not in spec.name and (draft or spec.part != "draft"))  # fmt: skip
    assert sum(region.bytes for region in regions) == text
    assert set(add_up(planned)) >= {"routed experts", "pages", "slots", "workspaces"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_add_up(ranks: int) -> None:
    """What is split is there once, however many share it."""
    split = {"routed experts", "engram tables"}
    one, many = (plan_budget(EMBEDDED, demand(n, engram_on_host=False)).gpu for n in (1, ranks))
    for part in split:
        assert many[part] * ranks == pytest.approx(one[part], rel=0.01)
    assert many["embedding"] == one["embedding"]


def test_workspaces_grow_with_what_they_serve() -> None:
    """More rows and a longer context take more, and a rank scores only its share of the entries."""
    small, rows = gpu_parts(1, streams=1)["workspaces"], gpu_parts(1, streams=9)["workspaces"]
    longer, shared = gpu_parts(1, context_tokens=1 << 20), gpu_parts(8, context_tokens=1 << 20)
    assert small < rows < longer["workspaces"]
    assert shared["workspaces"] < longer["workspaces"] / 3


@pytest.mark.parametrize("answer", [0, 1, 2, 63, 64, 99, 100])
def test_search(answer: int) -> None:
    """The last good number, at both ends too."""
    assert search_largest(lambda number: number <= answer, 100) == answer


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit code and output of `dsuf plan`."""
    code = main(["plan", *flags])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_json_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """The limits that are printed are limits: that many streams fit, one more does not."""
    flags = ["--gpu", "h200", "--tp", "4", "--context", "262144", "--streams", "7", "--json"]
    code, text = plan(capsys, *flags)
    told = json.loads(text)
    assert code == 0
    assert told["fits"]
    assert told["gpu_bytes"] == sum(told["gpu_parts"].values())
    most = told["most_streams"]
    assert most > 7
    flags[flags.index("7")] = str(most)
    assert plan(capsys, *flags)[0] == 0
    flags[flags.index(str(most))] = str(most + 1)
    code, text = plan(capsys, *flags)
    told = json.loads(text)
    assert code == 1
    assert not told["fits"]
    assert 0 < told["longest_context_tokens"] < 262_144


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU cannot hold it; the host is judged when its memory is known."""
    code, text = plan(capsys, "--gpu", "h200", "--tp", "1")
    assert code == 1
    assert "IT DOES NOT FIT" in text
    assert "with this context: nothing fits" in text
    code, text = plan(capsys, "--gpu", "b300", "--tp", "4", "--host-gb", "200")
    assert code == 1
    assert "IT DOES NOT FIT" in text
    code, text = plan(capsys, "--gpu", "b300", "--tp", "4", "--host-gb", "400", "--drafts", "0")
    assert code == 0
    assert "\nit fits\n" in text
    assert "no drafts" in text
    assert "routed experts" in text


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gpu", "h200", "--tp", "3"], "3 ranks: n_heads is 64, no multiple of 3"),
        (["--gpu", "gb300", "--tp", "8"], "--tp is 8; a host with gb300 has 1 to 4 GPUs"),
        (["--gpu", "h200", "--tp", "0"], "--tp is 0"),
        (["--gpu", "h200", "--context", "0"], "--context is 0"),
        (["--gpu", "h200", "--context", "2000000"], "a context of 2000000 tokens: the model has 1048576"),
        (["--gpu", "h200", "--streams", "-1"], "--streams is -1"),
        (["--gpu", "h200", "--drafts", "6"], "6 drafts: the draft head proposes 5"),
        (["--gpu", "h200", "--drafts", "-1"], "--drafts is -1"),
        (["--gpu", "h200", "--host-gb", "nan"], "--host-gb is nan"),
        (["--gpu", "h200", "--config", "/nonexistent.json"], "cannot read"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str) -> None:
    """Exit code 2 and one line."""
    code, text = plan(capsys, *flags)
    assert code == 2
    assert complaint in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--gpu", "a100"], ["--gpu", "h200", "--tp", "two"], ["--gpu", "h200", "--hot"]])
def test_wrong_use(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """What argparse refuses leaves with 2 and one line too."""
    with pytest.raises(SystemExit) as left:
        main(["plan", *flags])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_gpus() -> None:
    """Memory is what the driver reports of each kind, in MiB."""
    assert GPUS["h200"].memory_bytes == 143_771 * 1024**2
    assert GPUS["h100"].memory_bytes == 81_559 * 1024**2
    assert all(gpu.memory_bytes > 80e9 for gpu in GPUS.values())


@pytest.mark.parametrize(("ranks", "code"), [("2", 1), ("4", 0)])
def test_the_released_model_takes_four_gpus_of_80_gb(ranks: str, code: int) -> None:
    """With the full context and one stream."""
    assert main(["plan", "--gpu", "h100", "--tp", ranks]) == code
