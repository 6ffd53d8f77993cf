"""From a checkpoint directory to a model that can run."""

from collections.abc import Callable
from pathlib import Path

from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.token_map import TokenMap
from dsuf.reference.arithmetic import OFFICIAL, Arithmetic
from dsuf.reference.draft import Draft
from dsuf.reference.model import Model
from dsuf.reference.weights import WeightSource


def load_model(
    directory: Path, arithmetic: Arithmetic = OFFICIAL, *, own_keys: bool = True,
    progress: Callable[[int], None] = lambda layer: None,
) -> Model:  # fmt: skip
    """The backbone of the checkpoint in `directory`; `progress` hears of each layer. Raises `CheckpointError`."""
    checkpoint = Checkpoint.open(directory)
    tokens = TokenMap.from_tokenizer(directory / "tokenizer.json")
    engram_hash = EngramHash.from_config(checkpoint.config, tokens)
    source = WeightSource(checkpoint.tensor)
    return Model(checkpoint.config, source, engram_hash, arithmetic, own_keys=own_keys, progress=progress)


def load_draft(directory: Path, model: Model) -> Draft:
    """The draft head that belongs to `model`, from the same checkpoint. Raises `CheckpointError`."""
    return Draft(WeightSource(Checkpoint.open(directory).tensor), model)
