"""Small arrays that kernels read beside the released tensors: rotary frequencies, the Engram hash.

`confidence` is the weight of the head that rates drafts as float32, the form in which its kernel wants it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.engram import EngramHash
from dsuf.cuda.arena import Arena, Region, write_array

EVERY_ROW = 2**31 - 1
"""A count of living rows for launches over all that they cover."""


def plan_constants(config: ModelConfig) -> list[Region]:
    """The regions that `write_constants` fills."""
    shifts = config.engram_max_ngram_size
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "frequencies.window": ("f32", (config.rope_head_dim // 2,)),
        "frequencies.compressed": ("f32", (config.rope_head_dim // 2,)),
        "all": ("i32", (1,)),
        "one": ("i32", (1,)),
        "engram_ids": ("i32", (config.vocab_size,)),
        "confidence": ("f32", (config.dim + config.dspark_markov_rank,)),
    }
    for layer in config.engram_layer_ids:
        shapes[f"layers.{layer}.engram.multipliers"] = ("i64", (shifts,))
        for name in ("primes", "offsets"):
            shapes[f"layers.{layer}.engram.{name}"] = ("i64", ((shifts - 1) * config.engram_n_heads,))
    return [Region(name, kind, shape, "weights") for name, (kind, shape) in shapes.items()]


def write_constants(arena: Arena, config: ModelConfig, engram_hash: EngramHash, engram_ids: NDArray[np.int64]) -> None:
    """Fill the regions of `plan_constants`, but `confidence`; `engram_ids` maps tokens to Engram ids."""
    for name, compressed in (("window", False), ("compressed", True)):
        write_array(arena[f"frequencies.{name}"], rope_frequencies(config, compressed=compressed))
    write_array(arena["all"], np.array([EVERY_ROW]))
    write_array(arena["one"], np.array([1]))
    write_array(arena["engram_ids"], engram_ids[: config.vocab_size])
    for slot, layer in enumerate(config.engram_layer_ids):
        prefix = f"layers.{layer}.engram"
        write_array(arena[f"{prefix}.multipliers"], engram_hash.multipliers[slot])
        write_array(arena[f"{prefix}.primes"], engram_hash.primes[slot].reshape(-1))
        write_array(arena[f"{prefix}.offsets"], engram_hash.offsets[slot])


def rope_frequencies(config: ModelConfig, *, compressed: bool) -> NDArray[np.float32]:
    """Radians a position of each channel pair [rope width / 2], float32.

    theta^(-2i/width); layers with compressed KV have the YaRN table: slow frequencies divided by the factor, fast ones
    kept, a ramp between the frequencies that turn `beta_slow` and `beta_fast` times over the original context.
    """
    theta = config.compress_rope_theta if compressed else config.rope_theta
    share = np.arange(0, config.rope_head_dim, 2, dtype=np.float32) / np.float32(config.rope_head_dim)
    plain = np.float32(1) / np.power(np.float64(theta), share.astype(np.float64)).astype(np.float32)
    if not compressed:
        return plain
    edges = [
        config.rope_head_dim * math.log(config.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (config.beta_fast, config.beta_slow)
    ]
    first, last = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), config.rope_head_dim - 1)
    place = (np.arange(len(plain), dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 0.001))
    slow = np.clip(place, 0, 1)
    blended: NDArray[np.float32] = plain / np.float32(config.rope_factor) * slow + plain * (np.float32(1) - slow)
    return blended
