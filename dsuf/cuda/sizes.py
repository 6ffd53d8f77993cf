"""The sizes that kernels are compiled for, taken from a checkpoint's configuration."""

from collections.abc import Mapping

import msgspec

from dsuf.checkpoint.config import ModelConfig
from dsuf.errors import CheckpointError

GROUP = 32
"""Values that share a scale along the contraction of a quantised linear."""

STREAM_SPLIT = 256
"""Values of a row that one block of `project_streams` multiplies; the same constant stands in the source."""

MOST_SLOTS = 640
"""Cache rows that `attend_sparse` holds at once: what eight blocks have room for."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel may depend on at compile time. Equal sizes give equal binaries, whatever the checkpoint."""

    dim: int
    streams: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    index_heads: int
    index_dim: int
    inter: int
    engram_shifts: int
    engram_heads: int
    engram_dim: int
    engram_width: int
    window: int
    block: int
    taps: int
    markov_rank: int
    sinkhorn_rounds: int
    hc_eps: float
    norm_eps: float
    route_scale: float
    swiglu_limit: float

    def macros(self) -> Mapping[str, str]:
        """`DSUF_…` definitions for the compiler, floats as float32 literals."""
        return {f"DSUF_{name.upper()}": _literal(getattr(self, name)) for name in self.__struct_fields__}

    def named(self) -> dict[str, int]:
        """Integers by the names that the contract's shapes use."""
        own = {name: getattr(self, name) for name in self.__struct_fields__}
        derived = {
            "outputs": (2 + self.streams) * self.streams,
            "splits": -(-self.streams * self.dim // STREAM_SPLIT),
            "o_width": self.o_groups * self.o_lora,
            "engram_columns": (self.engram_shifts - 1) * self.engram_heads,
            "tap_width": self.taps * self.dim,
            "group_width": self.heads * self.head_dim // self.o_groups,
        }
        return {name: value for name, value in own.items() if isinstance(value, int)} | derived


def from_config(config: ModelConfig) -> Sizes:
    """The sizes of `config`; raises `CheckpointError` where the kernels ask for more than the architecture does."""
    sizes = Sizes(
        dim=config.dim, streams=config.hc_mult, heads=config.n_heads, head_dim=config.head_dim,
        rope_dim=config.rope_head_dim, q_lora=config.q_lora_rank, o_groups=config.o_groups, o_lora=config.o_lora_rank,
        index_heads=config.index_n_heads, index_dim=config.index_head_dim, inter=config.moe_inter_dim,
        engram_shifts=config.engram_max_ngram_size, engram_heads=config.engram_n_heads,
        engram_dim=config.engram_head_dim,
        engram_width=(config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim,
        window=config.window_size, block=config.dspark_block_size, taps=len(config.dspark_target_layer_ids),
        markov_rank=config.dspark_markov_rank, sinkhorn_rounds=config.hc_sinkhorn_iters, hc_eps=config.hc_eps,
        norm_eps=config.norm_eps, route_scale=config.route_scale, swiglu_limit=config.swiglu_limit,
    )  # fmt: skip
    for problem in _problems(sizes, config):
        raise CheckpointError(f"config: the CUDA kernels need {problem}")
    return sizes


def _problems(s: Sizes, config: ModelConfig) -> list[str]:
    """What is wrong with `s`, in words."""
    widths = {
        "dim": s.dim, "q_lora_rank": s.q_lora, "o_lora_rank": s.o_lora, "index_head_dim": s.index_dim,
        "moe_inter_dim": s.inter, "engram_head_dim": s.engram_dim, "dspark_markov_rank": s.markov_rank,
        "the heads of an output group": s.heads * s.head_dim // s.o_groups,
    }  # fmt: skip
    found = [f"{name} in whole groups of {GROUP}, not {width}" for name, width in widths.items() if width % GROUP]
    if s.head_dim % 64:
        found.append(f"head_dim in whole groups of 64, not {s.head_dim}")
    if s.index_dim not in (32, 64, 128):
        found.append(f"index_head_dim of 32, 64 or 128, not {s.index_dim}")
    if s.block > 31:
        found.append(f"draft blocks of at most 31, not {s.block}")
    if s.streams > 5:
        found.append(f"at most 5 streams, not {s.streams}")
    if s.window + max(config.index_topk, s.block) > MOST_SLOTS:
        found.append(f"at most {MOST_SLOTS} rows that a row attends to, not {s.window} and {config.index_topk}")
    if config.n_routed_experts > 1024:
        found.append(f"at most 1024 experts, not {config.n_routed_experts}")
    return found


def _literal(value: int | float) -> str:
    return str(value) if isinstance(value, int) else f"{value!r}f"
