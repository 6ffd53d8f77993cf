"""Engram's integers: token map, multipliers, primes, and the table rows of two texts with and without a picture."""

import numpy as np

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.token_map import TokenMap
from dsuf.golden.folder import Folder
from dsuf.golden.measure import Array
from dsuf.golden.report import Report


def compare_hashes(report: Report, folder: Folder) -> None:
    """Every integer of the case is equal. Raises `CheckpointError` for a tokenizer of another model."""
    case, tokens = folder.cases["engram_hash"], TokenMap.from_tokenizer(folder.checkpoint / "tokenizer.json")
    engram_hash = EngramHash.from_config(folder.config, tokens)
    parts: dict[str, Array] = {
        "token_map": tokens.ids, "multipliers": engram_hash.multipliers, "primes": engram_hash.primes,
        "offsets": engram_hash.offsets, "pad_id_compressed": np.array([engram_hash.pad_id]),
    }  # fmt: skip
    for name, own in parts.items():
        report.judge_equal(case.name, "", name, own, case[name])
    ids, alive = case.whole("input_ids"), case["token_mask"] != 0
    masked = _hash(engram_hash, folder.config, ids, alive)
    report.judge_equal(case.name, "", "hash_ids_masked", masked, case["hash_ids_masked"])
    whole = _hash(engram_hash, folder.config, ids, np.ones_like(alive))
    report.judge_equal(case.name, "", "hash_ids_nomask", whole, case["hash_ids_nomask"])


def _hash(engram_hash: EngramHash, config: ModelConfig, ids: Array, alive: Array) -> Array:
    """Table rows [texts, T, layers, hashes] of `ids` [texts, T] where `alive` [texts, T] marks tokens."""
    layers = range(len(config.engram_layer_ids))
    histories = [engram_hash.history(text, alive=mask) for text, mask in zip(ids, alive, strict=True)]
    return np.stack([np.stack([engram_hash.rows(layer, history) for layer in layers], 1) for history in histories])
