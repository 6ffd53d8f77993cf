"""`dsuf golden`: the recorded set holds, each classic mistake fails, other sizes work, bad directories are refused."""

import shutil
import tarfile
from collections.abc import Callable
from os import environ
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.__main__ import main
from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import read_safetensors
from dsuf.reference import attention, compress, draft, hyper, indexer, moe, norm, quant, rope, rows
from dsuf.reference.engram import Engram
from tests.reference.conftest import small_config
from tests.reference.forge import forge_cases, forge_checkpoint, write_case

GOLDEN = Path(__file__).parents[1] / "golden"
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="session")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded set of the repository: the first ten layers on forty tokens, the primitives, the hashes."""
    directory = tmp_path_factory.mktemp("reduced")
    with tarfile.open(GOLDEN / "prefix.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2, Debian 12, has no filters
        archive.extractall(directory)
    for path in (GOLDEN / "cases").iterdir():
        shutil.copy(path, directory / "cases")
    return directory


@pytest.fixture(scope="session")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, made by ourselves: nine layers, three draft stages."""
    return forge(tmp_path_factory.mktemp("forged"), small_config(), positions=36)


def forge(directory: Path, config: ModelConfig, positions: int) -> Path:
    forge_checkpoint(directory, config, (GOLDEN / "tiny" / "tokenizer.json").read_bytes(), seed=5)
    forge_cases(directory, seed=5, positions=positions)
    return directory


def compare(directory: Path, capture: Capture, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `dsuf golden`."""
    code = main(["golden", str(directory), *arguments])
    return code, capture.readouterr().out


def test_recorded_set_holds(reduced: Path, capsys: Capture) -> None:
    code, out = compare(reduced, capsys)
    assert code == 0, out
    assert "not compared" not in out
    for flavour in ("fp32", "official"):
        assert f"trace_{flavour}" in out
    assert out.splitlines()[-1].startswith("golden: ")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_whole_recorded_set_holds(capsys: Capture) -> None:
    if not environ.get("DSUF_GOLDEN"):
        pytest.skip("DSUF_GOLDEN is not set: the whole golden set is not here")
    code, out = compare(Path(environ["DSUF_GOLDEN"]), capsys)
    print(out)
    assert code == 0, out
    assert "not compared" not in out


def without_sink(patch: Patch) -> None:
    right = attention.attend
    patch.setattr(attention, "attend", lambda q, v, slots, sink, a: right(q, v, slots, np.full_like(sink, -1e4), a))


def without_turning_back(patch: Patch) -> None:
    right = rope.Rotation.apply
    patch.setattr(
        rope.Rotation, "apply", lambda self, x, a, *, inverse=False: np.array(x) if inverse else right(self, x, a)
    )


def without_yarn(patch: Patch) -> None:
    patch.setattr(rope, "_yarn", lambda plain, theta, config: plain)


def with_a_narrow_window(patch: Patch) -> None:
    right = attention.window_slots
    patch.setattr(attention, "window_slots", lambda p, first, floor, window: right(p, first, floor, window - 1))


def with_one_entry_less(patch: Patch) -> None:
    right = attention.select
    patch.setattr(attention, "select", lambda scores, allowed, count: np.pad(
        right(scores, allowed, count - 1), ((0, 0), (0, 1)), constant_values=-1))  # fmt: skip


def without_candidate_filter(patch: Patch) -> None:
    right = attention.Attention._restrict

    def record_only(self, segment, rows, scores, allowed, reachable, *, filters):  # type: ignore[no-untyped-def]
        right(self, segment, rows, scores, allowed, reachable, filters=filters)
        return allowed

    patch.setattr(attention.Attention, "_restrict", record_only)


def with_the_oldest_block_pinned(patch: Patch) -> None:
    right = attention.candidate_mask
    patch.setattr(attention, "candidate_mask", lambda scores, reachable, blocks, size: right(
        scores, np.ones_like(reachable), blocks, size))  # fmt: skip


def without_relu(patch: Patch) -> None:
    patch.setattr(indexer.Indexer, "scores", lambda self, queries, weights, keys: np.einsum(
        "thd,jd,th->tj", queries, keys, weights).astype(np.float32))  # fmt: skip


def with_mixing_transposed(patch: Patch) -> None:
    right = hyper.HyperSite.mixes

    def transposed(self: hyper.HyperSite, streams: np.ndarray) -> hyper.Mixes:
        mixes = right(self, streams)
        return mixes._replace(comb=mixes.comb.swapaxes(1, 2))

    patch.setattr(hyper.HyperSite, "mixes", transposed)


def with_three_sinkhorn_rounds(patch: Patch) -> None:
    right = hyper._sinkhorn
    patch.setattr(hyper, "_sinkhorn", lambda a, rounds, eps: right(a, 3, eps))


def without_router_bias(patch: Patch) -> None:
    patch.setattr(moe.Router, "choose", lambda self, scores: np.sort(np.argsort(-scores, axis=1)[:, : self.chosen]))


def without_clamp(patch: Patch) -> None:
    right = moe.swiglu
    patch.setattr(moe, "swiglu", lambda hidden, limit: right(hidden, np.float32(1e6)))


def with_mean_pooling(patch: Patch) -> None:
    right = compress.Compressor.project

    def open_gate(self: compress.Compressor, u: np.ndarray) -> np.ndarray:
        projected = right(self, u)
        projected[:, self.config.head_dim :] = 0
        return projected

    patch.setattr(compress.Compressor, "project", open_gate)


def with_another_pad(patch: Patch) -> None:
    right = EngramHash.__init__
    patch.setattr(EngramHash, "__init__", lambda self, ids, pad, m, primes: right(self, ids, pad + 1, m, primes))


def without_engram(patch: Patch) -> None:
    patch.setattr(Engram, "forward", lambda self, streams, rows: streams)


MISTAKES: list[Callable[[Patch], None]] = [
    without_sink, without_turning_back, without_yarn, with_a_narrow_window, with_one_entry_less,
    without_candidate_filter, with_the_oldest_block_pinned, without_relu, with_mixing_transposed,
    with_three_sinkhorn_rounds, without_router_bias, without_clamp, with_mean_pooling, with_another_pad, without_engram,
]  # fmt: skip


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake.__name__, marks=[pytest.mark.full] if number % 3 else [])
        for number, mistake in enumerate(MISTAKES)
    ],
)
def test_a_wrong_formula_fails(
    reduced: Path, mistake: Callable[[Patch], None], capsys: Capture, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    code, out = compare(reduced, capsys, "--case", "trace_fp32")
    assert code == 1, out


def with_window_rows_unquantised(patch: Patch) -> None:
    right = attention.extend_window

    def unquantised(ring, start, keys, arithmetic, config):  # type: ignore[no-untyped-def]
        return np.concatenate([right(ring, start, keys, arithmetic, config)[: -len(keys)], keys.astype(np.float64)])

    patch.setattr(attention, "extend_window", unquantised)


def with_entries_in_the_format_of_index_keys(patch: Patch) -> None:
    patch.setattr(rows, "FP4_ENTRY", quant.FP4_INDEX)


def with_routing_weights_after_the_expert(patch: Patch) -> None:
    """The weight belongs before the second quantiser: here an expert's output is weighted instead."""
    right = moe.Moe._routed

    def weighted_last(self, v, experts, weights):  # type: ignore[no-untyped-def]
        return right(self, v, experts, np.ones_like(weights)) * weights[:, :, None]

    patch.setattr(moe.Moe, "_routed", weighted_last)


ROUNDING_MISTAKES = [
    with_window_rows_unquantised, with_entries_in_the_format_of_index_keys, with_routing_weights_after_the_expert,
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mistake", ROUNDING_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_wrong_rounding_point_fails(
    reduced: Path, mistake: Callable[[Patch], None], capsys: Capture, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    code, out = compare(reduced, capsys, "--case", "trace_official")
    assert code == 1, out


def test_mistakes_too_small_for_a_trace_fail(reduced: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """One Sinkhorn round less, and an epsilon of 1e-6."""
    sinkhorn, inverse_rms = hyper._sinkhorn, norm.inverse_rms
    monkeypatch.setattr(hyper, "_sinkhorn", lambda a, rounds, eps: sinkhorn(a, rounds - 1, eps))
    monkeypatch.setattr(norm, "inverse_rms", lambda x, eps: inverse_rms(x, 1e-6))
    code, out = compare(reduced, capsys, "--case", "primitives")
    assert code == 1
    failed = {line.split()[2] for line in out.splitlines() if line.startswith("FAIL ")}
    assert failed == {"hc.comb", "hc_hard.comb", "rmsnorm.y"} or failed == {"hc_hard.comb", "rmsnorm.y"}


@pytest.mark.full
def test_forged_cases_hold(forged: Path, capsys: Capture) -> None:
    code, out = compare(forged, capsys)
    assert code == 0, out
    assert "not compared" not in out
    for flavour in ("fp32", "fp32q", "official"):
        for case in ("text_full", "short", "decode", "greedy", "dspark"):
            assert f"{case:<14} {flavour}" in out
    assert out.count("all cases") == 2


def late_config() -> ModelConfig:
    """Ratio 1 only, one window layer, one draft stage of three tokens, two streams, all experts used."""
    small = small_config()
    return msgspec.structs.replace(
        small, n_layers=6, hc_mult=2, compress_ratios=(0, 1, 1, 1, 1, 1, 0), kv_source_layers=(1, 3),
        index_source_layers=(1, 3, 4), candidate_source_layer=3, engram_layer_ids=(2,), index_topk=12, window_size=8,
        engram_num_embeddings=small.engram_num_embeddings[:1], n_mtp_layers=1, dspark_target_layer_ids=(0, 5),
        dspark_block_size=3, n_routed_experts=4, n_activated_experts=4,
    )  # fmt: skip


@pytest.mark.parametrize("positions", [9, pytest.param(29, marks=pytest.mark.full)])
def test_another_schedule_holds(positions: int, tmp_path: Path, capsys: Capture) -> None:
    code, out = compare(forge(tmp_path, late_config(), positions), capsys)
    assert code == 0, out
    assert "not compared" not in out


def with_keys_of_the_other_kind(patch: Patch) -> None:
    right = attention.Attention._key_layer
    patch.setattr(attention.Attention, "_key_layer", lambda self, segment: (
        self.config.kv_source(self.layer) if not self.own_keys else right(self, segment)))  # fmt: skip


def with_another_noise_token(patch: Patch) -> None:
    right = draft.Draft.__init__

    def wrong(self, source, model):  # type: ignore[no-untyped-def]
        right(self, source, model)
        self.config = msgspec.structs.replace(model.config, dspark_noise_token_id=7)

    patch.setattr(draft.Draft, "__init__", wrong)


def without_the_context_of_a_draft(patch: Patch) -> None:
    patch.setattr(draft.Stage, "_context", lambda self, segment: np.zeros((0, self.config.head_dim)))


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        ("decode", with_keys_of_the_other_kind),
        ("dspark", with_another_noise_token),
        ("dspark", without_the_context_of_a_draft),
        ("greedy", without_sink),
        ("short", without_sink),
        ("text_full", without_sink),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_wrong_path_fails(
    forged: Path, case: str, mistake: Callable[[Patch], None], capsys: Capture, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    code, out = compare(forged, capsys, "--case", case, "--flavour", "fp32")
    assert code == 1, out


def test_a_stack_that_rounds_wrong_fails_by_its_arg_max(forged: Path, capsys: Capture, monkeypatch: Patch) -> None:
    without_sink(monkeypatch)
    without_router_bias(monkeypatch)
    without_clamp(monkeypatch)
    without_turning_back(monkeypatch)
    code, out = compare(forged, capsys, "--case", "decode", "--flavour", "official")
    assert code == 1, out
    assert "FAIL all cases official pooled" in out


@pytest.fixture
def copied(forged: Path, tmp_path: Path) -> Path:
    """A copy of the forged directory, to damage; the checkpoint is linked."""
    (tmp_path / "tiny").mkdir()
    for path in (forged / "tiny").iterdir():
        (tmp_path / "tiny" / path.name).symlink_to(path)
    shutil.copytree(forged / "cases", tmp_path / "cases")
    return tmp_path


def change(directory: Path, case: str, **changes: object) -> None:
    """Rewrite a case file; a tensor whose new value is None is left out."""
    path = directory / "cases" / f"{case}.safetensors"
    tensors = {name: np.array(value) for name, value in read_safetensors(path).items()} | changes
    write_case(path, {name: value for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize(
    ("case", "changes", "complaint"),
    [
        ("text_full", {"input_ids": None}, "text_full.safetensors: missing tensor input_ids"),
        ("text_full", {"input_ids": np.full(36, 512)}, "tensor input_ids: values from 512 to 512, expected 0 to 511"),
        ("text_full", {"input_ids": np.ones(35, np.int64)}, "expected [35, 512]"),
        ("text_full", {"input_ids": np.ones(36, np.float32)}, "expected an integer"),
        ("text_full", {"logits.fp32": np.ones(36, np.float32)}, "expected 2 axes"),
        ("short", {"prefix_lens": np.array([0, 1, 2, 3])}, "values from 0 to 3, expected 1 to 36"),
        ("decode", {"prefill_len": np.array([37])}, "expected 1 to 36"),
        ("decode", {"prefill_len": np.array([12])}, "expected [25, 512]"),
        ("dspark", {"last_step_stage2_h.fp32": np.ones((5, 3, 64), np.float32)}, "expected [5, 4, 64]"),
        ("trace_fp32", {"layers.3.h_out": None}, "missing tensor layers.3.h_out"),
        ("trace_fp32", {"layers.3.router_indices": np.full((36, 3), 8, np.int32)}, "expected 0 to 7"),
        ("trace_fp32", {"layers.2.index_topk": np.full((36, 8), 18, np.int32)}, "expected -1 to 17"),
        ("trace_fp32", {"layers.2.index_k": np.ones((36, 32), np.float32)}, "expected [18, 32]"),
    ],
)  # fmt: skip
def test_a_malformed_case_is_one_line(
    copied: Path, case: str, changes: dict[str, object], complaint: str, capsys: Capture
) -> None:
    change(copied, case, **changes)
    assert main(["golden", str(copied)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"dsuf: {case}.safetensors: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def cut_file(directory: Path) -> None:
    path = directory / "cases" / "short.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def remove_config(directory: Path) -> None:
    (directory / "tiny" / "config.json").unlink()


def remove_shard(directory: Path) -> None:
    next((directory / "tiny").glob("*.safetensors")).unlink()


def remove_tokenizer(directory: Path) -> None:
    (directory / "tiny" / "tokenizer.json").unlink()


def remove_cases(directory: Path) -> None:
    shutil.rmtree(directory / "cases")


def empty_cases(directory: Path) -> None:
    remove_cases(directory)
    (directory / "cases").mkdir()


@pytest.mark.parametrize(
    "damage", [cut_file, remove_config, remove_shard, remove_tokenizer, remove_cases, empty_cases],
    ids=lambda damage: damage.__name__,
)  # fmt: skip
def test_a_damaged_directory_is_one_line(copied: Path, damage: Callable[[Path], None], capsys: Capture) -> None:
    damage(copied)
    assert main(["golden", str(copied)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsuf: ")
    assert captured.err.count("\n") == 1


def test_what_is_missing_or_unknown_is_named(copied: Path, capsys: Capture) -> None:
    (copied / "cases" / "decode.safetensors").unlink()
    change(copied, "short", **{"last_logits.fp32q": None, "surprise": np.ones(3, np.float32)})
    write_case(copied / "cases" / "later.safetensors", {"x": np.ones(3, np.float32)})
    write_case(copied / "cases" / "vision.safetensors", {"logits.fp32": np.ones((3, 4), np.float32)})
    chosen = [part for name in ("short", "decode", "vision") for part in ("--case", name)]
    code, out = compare(copied, capsys, *chosen)
    assert code == 0
    printed = [line.split() for line in out.splitlines()]
    assert ["decode", "absent"] in printed
    assert ["short", "fp32q", "last_logits", "absent"] in printed
    assert ["short", "surprise", "unknown", "tensor", "not", "compared"] in printed
    assert ["later.safetensors", "unknown", "file", "not", "compared"] in printed
    assert ["vision", "1", "tensors", "not", "yet"] in printed
    assert out.splitlines()[-1].startswith("golden: ")
    assert "0 fail, 2 absent, 1 not yet, 2 not compared" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("case", "flavour", "dropped"),
    [
        ("trace_official", "official", "layers.4.ffn_out"),
        ("trace_official", "official", "layers.0.attn_in"),
        ("trace_fp32", "fp32", "layers.2.ffn_in"),
        ("trace_fp32", "fp32", "layers.5.candidates"),
        ("trace_fp32", "fp32", "layers.7.index_margin"),
        ("trace_fp32", "fp32", "layers.1.engram_hash_ids"),
        ("greedy", "fp32", "greedy_ids"),
        ("text_full", "fp32", "main_hidden"),
        ("decode", "fp32", "logits.as_released"),
        ("dspark", "fp32", "last_step_stage1_h"),
    ],
)
def test_a_promised_tensor_that_is_missing_is_a_fault(
    copied: Path, case: str, flavour: str, dropped: str, capsys: Capture
) -> None:
    name = dropped if case.startswith("trace_") else f"{dropped}.{flavour}"
    change(copied, case, **{name: None})
    code, out = compare(copied, capsys, "--case", case, "--flavour", flavour)
    assert code == 1
    assert [case, flavour, dropped, "absent"] in [line.split() for line in out.splitlines()]
    assert f"ABSENT {case} {flavour} {dropped}" in out.splitlines()
    assert "0 fail, 1 absent" in out.splitlines()[-1]


def test_a_renamed_tensor_is_missing_and_unknown(copied: Path, capsys: Capture) -> None:
    values = read_safetensors(copied / "cases" / "short.safetensors")["last_logits.fp32"]
    change(copied, "short", **{"last_logits.fp32": None, "logits_last.fp32": np.array(values)})
    code, out = compare(copied, capsys, "--case", "short")
    assert code == 1
    assert "0 fail, 1 absent, 1 not compared" in out.splitlines()[-1]


def test_a_missing_tensor_of_another_flavour_does_not_matter(copied: Path, capsys: Capture) -> None:
    change(copied, "greedy", **{"greedy_ids.fp32q": None})
    code, out = compare(copied, capsys, "--case", "greedy", "--flavour", "fp32")
    assert (code, "absent" in out) == (0, False)


def test_a_missing_group_of_primitives_is_a_fault(reduced: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(reduced / "cases", tmp_path / "cases")
    (tmp_path / "tiny").symlink_to(reduced / "tiny")
    names = read_safetensors(tmp_path / "cases" / "primitives.safetensors")
    change(tmp_path, "primitives", **{name: None for name in names if name.startswith(("fp8.", "vision_rope."))})
    code, out = compare(tmp_path, capsys, "--case", "primitives")
    assert code == 1
    assert {"ABSENT primitives fp8", "ABSENT primitives vision_rope"} <= set(out.splitlines())
