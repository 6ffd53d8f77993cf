"""Seeded random checkpoints in the released layout, and the one that is served when there is no model to serve.

Their text means nothing; sizes, names and packing are real, so all code paths are.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from dsuf.checkpoint.config import ModelConfig, VisionConfig
from dsuf.checkpoint.draw import draw_tensors
from dsuf.checkpoint.forms import RELEASED
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.vocabulary_cut import cut_tokenizer
from dsuf.checkpoint.writer import write_descriptions, write_shards
from dsuf.errors import CheckpointError

EMBEDDED = ModelConfig(
    vocab_size=8192, dim=256, n_layers=8, n_heads=8, head_dim=64, rope_head_dim=32, q_lora_rank=128, o_groups=4,
    o_lora_rank=64, norm_eps=1e-20, window_size=64, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    kv_source_layers=(2, 4), index_source_layers=(2, 4, 6), rope_theta=10_000, compress_rope_theta=160_000,
    rope_factor=16, beta_fast=32, beta_slow=1, original_seq_len=65_536, index_n_heads=4, index_head_dim=64,
    index_topk=64, candidate_source_layer=4, candidate_topk_blocks=128, candidate_block_size=8, hc_mult=4,
    hc_sinkhorn_iters=20, hc_eps=1e-6, n_routed_experts=16, n_shared_experts=1, n_activated_experts=2,
    moe_inter_dim=128, route_scale=1.5, swiglu_limit=10.0, engram_layer_ids=(1, 2),
    engram_num_embeddings=(24_562, 25_586), engram_vocab_size=2_000, engram_n_heads=4, engram_head_dim=32,
    engram_pad_id=2, engram_compressed_vocab_size=6_776, n_mtp_layers=3, dspark_block_size=5,
    dspark_noise_token_id=8_135, dspark_target_layer_ids=(5, 6, 7), dspark_markov_rank=32, dspark_n_routed_experts=8,
    dspark_n_activated_experts=2, image_token_id=8_183, max_seq_len=1_048_576,
    vision=VisionConfig(
        n_layers=2, dim=64, n_heads=4, inter_dim=128, patch_size=14, rope_theta=10_000, downsample_ratio=3,
        max_n_token=1024, min_pixels=295_936,
    ),
)  # fmt: skip
"""Every layer mode, both Engram layers, three draft stages and a picture tower, in about 27 MB."""

_EMBEDDED_SEED = 1
_EDITION = 1  # part of the folder's name: count up when the same configuration should give other bytes
_STALE_S = 3600.0
_UNFINISHED: set[Path] = set()
_DISCARD_TRIES = 5


def write_synthetic(directory: Path, config: ModelConfig, seed: int, tokenizer: bytes, n_shards: int = 2) -> None:
    """Write a random checkpoint of these sizes into the existing `directory`; `tokenizer` is its `tokenizer.json`.

    Equal arguments give equal bytes. Needs memory for one shard.
    """
    specs = list(expected_tensors(config))
    write_shards(directory, draw_tensors(specs, seed), sum(spec.bytes for spec in specs), n_shards)
    write_descriptions(directory, config, tokenizer)


def ensure_embedded(cache_dir: Path) -> Path:
    """The directory of the embedded checkpoint in `cache_dir`, made now if it is not there.

    It appears complete or not at all: it is written beside its place and renamed, and of two processes that do so at
    once the second takes what the first has made. Raises `CheckpointError` if `cache_dir` cannot be written.
    """
    place = cache_dir / f"embedded-{_fingerprint()}"
    if _is_sound(place):
        return place
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_dir)
        made = Path(tempfile.mkdtemp(prefix=".embedded-", dir=cache_dir))
        _UNFINISHED.add(made)
        try:
            tokenizer = cut_tokenizer(RELEASED / "tokenizer.json", EMBEDDED.vocab_size)
            write_synthetic(made, EMBEDDED, _EMBEDDED_SEED, tokenizer)
            _sync(made)
            _put(made, place)
        finally:
            _remove(made)
            _UNFINISHED.discard(made)
    except OSError as error:
        raise CheckpointError(f"cannot make the embedded model in {cache_dir}: {error.strerror}") from error
    return place


def discard_unfinished() -> None:
    """Delete what a thread inside `ensure_embedded` has written so far; for a process that will not wait for it."""
    for made in tuple(_UNFINISHED):
        for _ in range(_DISCARD_TRIES):  # the thread may make a file while the folder is being emptied
            _remove(made)
            if not made.exists():
                break


def _fingerprint() -> str:
    """Names what `ensure_embedded` makes: another configuration or edition gets another folder."""
    return hashlib.sha256(msgspec.json.encode((_EDITION, _EMBEDDED_SEED, EMBEDDED))).hexdigest()[:12]


def _is_sound(place: Path) -> bool:
    """Whether a checkpoint with all its tensors lies in `place`; somebody may have deleted a part of a cache."""
    try:
        with Checkpoint.open(place) as checkpoint:
            return checkpoint.config == EMBEDDED and (place / "tokenizer.json").is_file()
    except CheckpointError:
        return False


def _put(made: Path, place: Path) -> None:
    """Rename `made` to `place`, unless a sound checkpoint has come to be there meanwhile; a damaged one is deleted."""
    damaged = made.with_name(f"{made.name}-damaged")
    for _ in range(3):
        try:
            made.rename(place)
            return
        except OSError:
            if _is_sound(place):
                return
        with contextlib.suppress(FileNotFoundError):
            place.rename(damaged)
        _remove(damaged)
    raise CheckpointError(f"cannot make the embedded model: {place} cannot be replaced")


def _remove_stale(cache_dir: Path) -> None:
    """Delete what a process left that was killed while it wrote."""
    for path in cache_dir.glob(".embedded-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                _remove(path)


def _remove(path: Path) -> None:
    """Delete `path`, whatever it is, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sync(directory: Path) -> None:
    """Have the files on disk before their folder gets its name: a power cut must not leave a name without content."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
