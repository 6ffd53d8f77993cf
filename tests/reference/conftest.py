"""A small random model with every layer mode, for tests that compare the reference with itself."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.synthetic import write_synthetic
from dsuf.reference.arithmetic import I64
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model

TINY = Path(__file__).parents[1] / "golden" / "tiny"


def small_config() -> ModelConfig:
    """Nine layers: window twice, Full, Reindex, Reuse at ratio 2, then Full (candidate source), Reuse, Reindex, Reuse.

    Window 16, top-k 8 and 4 candidate blocks of 4, so that a prompt of a few dozen tokens is past all of them.
    """
    return msgspec.structs.replace(
        load_config(TINY / "config.json"),
        dim=64, n_layers=9, n_heads=4, head_dim=64, rope_head_dim=16, q_lora_rank=64, o_groups=2, o_lora_rank=32,
        window_size=16, compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layers=(2, 5),
        index_source_layers=(2, 3, 5, 7), index_n_heads=4, index_head_dim=32, candidate_source_layer=5,
        candidate_topk_blocks=4, candidate_block_size=4, n_routed_experts=8, n_activated_experts=3, moe_inter_dim=32,
        engram_layer_ids=(1, 2), dspark_target_layer_ids=(6, 7, 8), dspark_markov_rank=32,
    )  # fmt: skip


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model on disk, in the released layout."""
    directory = tmp_path_factory.mktemp("small")
    write_synthetic(directory, small_config(), 7, (TINY / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="session")
def model(small_checkpoint: Path) -> Model:
    """The small model in the released arithmetic."""
    return load_model(small_checkpoint)


@pytest.fixture(scope="session")
def ids(model: Model) -> I64:
    """A prompt that is longer than window, top-k and candidate pool."""
    return np.random.default_rng(11).integers(3, model.config.vocab_size - 8, 150)
