"""Random checkpoints in the released layout, the embedded one among them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from dsuf.checkpoint import synthetic
from dsuf.checkpoint.config import load_config, parse_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.forms import RELEASED, flat_form, nested_form
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.packing import pack_dense, pack_fp4, pack_table
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.synthetic import EMBEDDED, ensure_embedded, write_synthetic
from dsuf.checkpoint.token_map import TokenMap
from dsuf.errors import CheckpointError

SERVE_WITHOUT_NANO = """
import pathlib, sys
from dsuf.node import engines
engines.NANO = pathlib.Path("nowhere")
from dsuf.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    started = time.process_time()
    place = ensure_embedded(tmp_path_factory.mktemp("cache"))
    assert time.process_time() - started < 20
    return place


def test_embedded_is_sound_small_and_alive(embedded: Path) -> None:
    assert sum(path.stat().st_size for path in embedded.rglob("*") if path.is_file()) < 40e6
    with Checkpoint.open(embedded) as checkpoint:
        assert checkpoint.config == EMBEDDED
        for name in checkpoint.names():
            values = checkpoint.tensor(name).astype(np.float32)
            assert np.isfinite(values).all() and values.any(), name


def test_embedded_layers_have_every_mode() -> None:
    assert [EMBEDDED.mode(layer) for layer in range(8)] == [
        "window", "window", "full", "reuse", "full", "reuse", "reindex", "reuse",
    ]  # fmt: skip
    assert (EMBEDDED.decoder_start, EMBEDDED.candidate_source_layer, EMBEDDED.ratio(2), EMBEDDED.ratio(4)) == (
        4,
        4,
        2,
        1,
    )


def test_embedded_tokenizer_fits_its_configuration(embedded: Path) -> None:
    token_map = TokenMap.from_tokenizer(embedded / "tokenizer.json")
    assert len(token_map.ids) == EMBEDDED.vocab_size
    EngramHash.from_config(EMBEDDED, token_map)


def test_embedded_is_made_once(embedded: Path) -> None:
    before = (embedded / "config.json").stat()
    assert ensure_embedded(embedded.parent) == embedded
    assert (embedded / "config.json").stat() == before
    assert [path.name for path in embedded.parent.iterdir()] == [embedded.name]


def test_two_processes_at_once_give_one_sound_checkpoint(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from dsuf.checkpoint.synthetic import ensure_embedded as e;"
    command = [sys.executable, "-c", code + "print(e(Path(sys.argv[1])))", str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    places = [process.communicate(timeout=60)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert places[0] == places[1]
    Checkpoint.open(Path(places[0])).close()
    assert len(list(tmp_path.iterdir())) == 1


def test_damaged_embedded_is_made_anew_and_remains_are_cleared(embedded: Path, tmp_path: Path) -> None:
    place = tmp_path / embedded.name
    place.mkdir()
    (place / "config.json").write_bytes((embedded / "config.json").read_bytes())
    left = tmp_path / ".embedded-killed"
    left.mkdir()
    os.utime(left, (0, 0))
    assert ensure_embedded(tmp_path) == place
    Checkpoint.open(place).close()
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_whatever_has_the_name_of_the_embedded_is_replaced(embedded: Path, tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "cache" / embedded.name, tmp_path / "other"
    place.parent.mkdir()
    if kind == "link":
        other.mkdir()
        (other / "kept").touch()
    if kind == "file":
        place.write_text("not a model")
    else:
        place.symlink_to(other)
    assert ensure_embedded(place.parent) == place
    Checkpoint.open(place).close()
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert kind != "link" or (other / "kept").exists()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, MemoryError])
def test_nothing_is_left_of_an_interrupted_one(
    ending: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(directory: Path, *arguments: object) -> None:
        (directory / "shard").write_text("half")
        raise ending

    monkeypatch.setattr(synthetic, "write_synthetic", interrupt)
    with pytest.raises(ending):
        ensure_embedded(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_nothing_is_left_of_a_node_that_is_stopped_while_it_makes_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVE_WITHOUT_NANO, "serve", "--cache-dir", str(tmp_path), "--port", "0"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".embedded-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(tmp_path.glob(".embedded-*"))
        node.send_signal(number)
        assert node.wait(30) == code
    finally:
        node.kill()
    assert list(tmp_path.glob(".*")) == []


def test_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make the embedded model"):
        ensure_embedded(tmp_path / "file" / "cache")


def test_seed_decides_every_byte(golden: Path, tmp_path: Path, small: Path) -> None:
    config = load_config(small / "config.json")
    tokenizer = (small / "tokenizer.json").read_bytes()
    shard = "model-00001-of-00002.safetensors"
    for seed in (7, 8):
        (tmp_path / str(seed)).mkdir()
        write_synthetic(tmp_path / str(seed), config, seed, tokenizer)
    assert (tmp_path / "7" / shard).read_bytes() == (small / shard).read_bytes()
    assert (tmp_path / "8" / shard).read_bytes() != (small / shard).read_bytes()


def test_sizes_that_are_no_multiple_of_a_block(golden: Path, tmp_path: Path) -> None:
    config = msgspec.structs.replace(load_config(golden / "tiny/config.json"), n_layers=3, n_mtp_layers=1,
                                     compress_ratios=(0, 0, 2, 0), kv_source_layers=(2,), index_source_layers=(2,),
                                     candidate_source_layer=2, n_routed_experts=1, n_activated_experts=1,
                                     engram_layer_ids=(1, 2), engram_head_dim=40, dspark_target_layer_ids=(0, 2),
                                     vocab_size=509, image_token_id=508, dspark_noise_token_id=507)  # fmt: skip
    write_synthetic(tmp_path, config, 1, b"{}", n_shards=3)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensor("layers.1.engram.embed.scale").shape == (2304, 2)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


@pytest.mark.parametrize("config", [EMBEDDED, load_config(RELEASED / "config.json")], ids=["embedded", "released"])
def test_both_forms_give_the_configuration_back(config: object) -> None:
    assert parse_config(nested_form(config)) == config
    assert parse_config(flat_form(config)) == config


def test_forms_of_the_release_are_the_released_files() -> None:
    config = load_config(RELEASED / "config.json")
    for form, name in ((nested_form, "config.json"), (flat_form, "inference_config.json")):
        written = msgspec.json.decode(msgspec.json.encode(form(config)))
        assert written == msgspec.json.decode((RELEASED / name).read_bytes())


def test_packing_keeps_values_within_the_step_of_their_format() -> None:
    values = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    codes, scales = pack_dense(values)
    assert (codes.shape, scales.shape) == ((64, 96), (2, 3))
    scale = scales.astype(np.float32).repeat(32, 0).repeat(32, 1)
    assert np.abs(codes.astype(np.float32) * scale - values).max() <= np.abs(values).max() / 16
    codes, scales = pack_table(values)
    assert scales.shape == (64, 3)
    pairs, scales = pack_fp4(values)
    assert (pairs.shape, pairs.dtype, scales.shape) == ((64, 48), np.int8, (64, 3))
    nibbles = np.stack([pairs.view(np.uint8) & 15, pairs.view(np.uint8) >> 4], -1).reshape(64, 96)
    read = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales.astype(np.float32).repeat(32, 1)
    largest = np.abs(values).reshape(64, 3, 32).max(2).repeat(32, 1)
    assert (np.abs(read - values) <= largest / 5).all()


def test_scales_are_the_least_that_fit() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, 0], values[0, 32] = 6.0, 6.01
    _, scales = pack_fp4(values)
    assert scales.astype(np.float32).tolist() == [[1.0, 2.0]]


def test_every_tensor_is_drawn_in_its_dtype(small: Path) -> None:
    with Checkpoint.open(small) as checkpoint:
        assert {spec.name for spec in expected_tensors(checkpoint.config)} == set(checkpoint.names())
        assert checkpoint.tensor("layers.0.attn.attn_sink").flags.aligned
