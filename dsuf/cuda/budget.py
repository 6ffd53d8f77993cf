"""The memory that serving takes, of each GPU and of the host, added up from the regions that an engine allocates.

Nothing here needs a GPU. A rank's regions are the engine's own: of weights every tensor is cut to the rank's share of
it, index keys and the scores against them are spread over the ranks (the engine's ranks still have all of them),
everything else has a rank's sizes. On top stands what is no region: what the driver keeps, kernels and graphs.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache

import msgspec

from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.inventory import expected_tensors
from dsuf.cuda.arena import Region, add_up
from dsuf.cuda.caches import PAGE_TOKENS, CacheSizes
from dsuf.cuda.group import check_ranks, rank_config, split_tensors
from dsuf.cuda.machine import RESERVED_BYTES, Setup, plan_sizes, plan_working_regions
from dsuf.cuda.weights import COPY_THREADS, STAGING_BYTES, plan_weights
from dsuf.errors import CommandError

DRIVER_BYTES = 10**9
"""What the driver has of a GPU before anything is allocated: an allowance, not a count."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served: `streams` turns of up to `context_tokens` each, by `ranks` GPUs that work as one."""

    ranks: int
    context_tokens: int
    streams: int
    drafts: int
    engram_on_host: bool
    prefill_chunk_tokens: int

    @property
    def setup(self) -> Setup:
        """What an engine is loaded for."""
        return Setup(
            context_tokens=self.context_tokens, max_turns=self.streams, drafts=self.drafts > 0,
            prefill_rows=self.prefill_chunk_tokens, engram_on_host=self.engram_on_host,
        )  # fmt: skip


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part, of the fullest GPU and of the host."""

    gpu: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def gpu_bytes(self) -> int:
        """All of one GPU."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """All of the host."""
        return sum(self.host.values())


def plan_budget(config: ModelConfig, demand: Demand) -> Budget:
    """The budget for `demand`; raises `CommandError` where the model cannot be split, or has no such context."""
    check_ranks(config, demand.ranks)
    if demand.context_tokens > config.max_seq_len:
        raise CommandError(f"a context of {demand.context_tokens} tokens: the model has {config.max_seq_len}")
    if demand.drafts > config.dspark_block_size:
        raise CommandError(f"{demand.drafts} drafts: the draft head proposes {config.dspark_block_size}")
    gpu = add_up(rank_regions(config, demand)) | {"driver, kernels, graphs": DRIVER_BYTES + RESERVED_BYTES}
    return Budget(gpu, _host_parts(config, demand))


def rank_regions(config: ModelConfig, demand: Demand) -> list[Region]:
    """Every region of the rank that holds the most; the ranks differ in rows of the Engram tables alone."""
    weights = _weight_regions(config, demand.ranks, demand.drafts > 0, demand.engram_on_host)
    return [*weights, *(_spread(region, demand.ranks) for region in _working_regions(config, demand))]


def _working_regions(config: ModelConfig, demand: Demand) -> list[Region]:
    """The engine's regions beside the weights at a rank's sizes, with pages for every turn at its longest."""
    own, setup = rank_config(config, demand.ranks, demand.ranks - 1), demand.setup
    return plan_working_regions(own, setup, demand.streams * plan_sizes(own, setup, 1).table_pages)


def _spread(region: Region, ranks: int) -> Region:
    """`region` as one of `ranks` has it, where the rows of index keys are shared out."""
    axis = 0 if region.name.endswith(".index_keys") else 1 if region.name.endswith(".scores") else None
    part = "constants" if region.part == "weights" else region.part
    if axis is None:
        return msgspec.structs.replace(region, part=part)
    shape = [-(-size // ranks) if place == axis else size for place, size in enumerate(region.shape)]
    return msgspec.structs.replace(region, part=part, shape=tuple(shape))


@cache
def _weight_regions(config: ModelConfig, ranks: int, draft: bool, engram_on_host: bool) -> list[Region]:
    """The engine's regions of weights, cut to what the last rank holds, under the parts of the inventory."""
    whole, placements = plan_weights(config, draft=draft, engram_on_host=engram_on_host)
    parts = {spec.name: spec.part for spec in expected_tensors(config)}
    held, sizes, part_of = _share_bytes(config, ranks, ranks - 1), Counter[str](), {}
    for placement in placements:
        sizes[placement.region] += held[placement.tensor]
        part_of[placement.region] = parts[placement.tensor]
    return [Region(r.name, "u8", (sizes[r.name],), part_of[r.name], pinned=r.pinned) for r in whole]


@cache
def _share_bytes(config: ModelConfig, ranks: int, rank: int) -> Mapping[str, int]:
    """Bytes of every released tensor that `rank` holds."""
    return {
        spec.name: msgspec.structs.replace(spec, shape=share.shape(spec.shape)).bytes
        for spec, share in split_tensors(config, ranks, rank)
    }


def _host_parts(config: ModelConfig, demand: Demand) -> dict[str, int]:
    """What is pinned, the loaders' buffers, and a cache of each stream that outlives its place on the GPUs."""
    parts: Counter[str] = Counter()
    for region in _weight_regions(config, 1, demand.drafts > 0, demand.engram_on_host):
        if region.pinned:
            parts["Engram tables, pinned"] += region.reserved_bytes
    for region in _working_regions(config, demand):
        if region.pinned and region.part == "results":
            parts["results"] += demand.ranks * region.reserved_bytes
    parts["buffers of the loaders"] = demand.ranks * COPY_THREADS * 2 * STAGING_BYTES
    parts["session caches"] = demand.streams * session_bytes(config, demand.context_tokens)
    return dict(parts)


def session_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What the host keeps of one session: its pages, and the slot of its last commit point."""
    pages = -(-context_tokens // PAGE_TOKENS)
    sizes = CacheSizes(config, pages=pages, slots=1, ring_rows=config.window_size, context_tokens=context_tokens)
    return sum(region.bytes for region in sizes.plan())
