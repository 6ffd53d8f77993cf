"""A machine of several ranks, loaded: every rank's share of the weights, its constants, how they work together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.arena import Arena, Array, free_bytes, view_host, write_array
from dsuf.cuda.constants import write_constants
from dsuf.cuda.devices import synchronize
from dsuf.cuda.group import check_ranks, rank_config, split_tensors
from dsuf.cuda.kernels import Device
from dsuf.cuda.machine import RESERVED_BYTES, Machine, Setup, build_kernels, count_pages, plan_sizes
from dsuf.cuda.ranks import STREAMS, RankedKernels, plan_rank_regions
from dsuf.cuda.split import RowSplit, plan_split
from dsuf.cuda.streams import make_each
from dsuf.cuda.weights import arrange_experts, load_weights, plan_weights


class RankView(Arena):
    """One rank's arrays of `arena`, for what fills them."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self.regions, self._arena, self._rank = arena.regions, arena, rank

    def __getitem__(self, name: str) -> Array:
        return self._arena[name].on(self._rank)

    def __contains__(self, name: str) -> bool:
        return name in self._arena

    def host(self, name: str) -> NDArray[Any]:
        """A pinned region of this rank as a NumPy array of the same memory."""
        return view_host(self[name])


def load_ranks(
    directory: Path, setup: Setup, ranks: int, progress: Callable[[int], None] = lambda done: None,
    streams: int = STREAMS, devices: Sequence[Device] = (), splits: bool = True,
) -> Machine:  # fmt: skip
    """A machine of `ranks` ranks with the checkpoint in `directory`; raises as `Machine.load` does.

    Each has the device at its place in `devices`; without any they share the first GPU. Work may be queued on up to
    `streams` streams. With `splits` the ranks divide the rows of prefill among them, which changes no result.
    """
    config = load_config(directory / "config.json")
    check_ranks(config, ranks)
    own, each = rank_config(config, ranks, ranks - 1), devices or (Device(),)
    pages = count_pages(own, setup, _count_free(each, setup) // (1 if devices else ranks))
    kernels = [build_kernels(device, own) for device in each]
    arena = Arena([*plan_rank_regions(own, setup, pages, ranks, streams), *plan_split()], ranks, devices)
    try:
        pad_id = _fill_ranks(
            arena, directory, config, setup, [each[rank % len(each)] for rank in range(ranks)], progress
        )
        for rank in range(ranks):
            each[rank % len(each)].use()
            arrange_experts(RankView(arena, rank), kernels[rank % len(each)])
        synchronize(each)
        ranked = RankedKernels(kernels, arena, own, devices)
    except BaseException:
        arena.close()
        raise
    sizes = plan_sizes(own, setup, pages)
    machine = Machine(each[0], ranked, arena, own, sizes, setup, pad_id, devices=devices, check=ranked.check)
    machine.prefiller.split = RowSplit(ranked, arena, own.n_routed_experts) if splits else None
    return machine


def _count_free(devices: Sequence[Device], setup: Setup) -> int:
    """Bytes that may be used of each device; the first is current then."""
    free = make_each(devices, lambda: setup.budget_bytes or free_bytes())
    return int(min(free)) - RESERVED_BYTES


def _fill_ranks(
    arena: Arena, directory: Path, config: ModelConfig, setup: Setup, devices: Sequence[Device],
    progress: Callable[[int], None],
) -> int:  # fmt: skip
    """Bring every rank's share of the weights, and its constants, into `arena`; the Engram id that fills a history."""
    tokens, drafts = TokenMap.from_tokenizer(directory / "tokenizer.json"), setup.drafts and config.n_mtp_layers > 0
    whole = EngramHash.from_config(config, tokens)
    with Checkpoint.open(directory) as checkpoint:
        for rank in range(arena.ranks):
            devices[rank].use()
            view = RankView(arena, rank)
            take = _sharer(checkpoint, config, arena.ranks, rank)
            here = rank_config(config, arena.ranks, rank)
            _, placements = plan_weights(here, draft=drafts, engram_on_host=setup.engram_on_host)
            load_weights(view, placements, take, devices[rank], progress)
            if drafts:
                rating = checkpoint.tensor(f"mtp.{config.n_mtp_layers - 1}.confidence_head.proj.weight")
                write_array(view["confidence"], np.asarray(rating).astype(np.float32).reshape(-1))
            heads = config.engram_n_heads
            first, last = heads * rank // arena.ranks, heads * (rank + 1) // arena.ranks
            primes = np.ascontiguousarray(whole.primes[:, :, first:last])
            own_hash = EngramHash(tokens.ids, config.engram_pad_id, whole.multipliers, primes)
            write_constants(view, here, own_hash, tokens.ids)
    return whole.pad_id


def _sharer(checkpoint: Checkpoint, config: ModelConfig, ranks: int, rank: int) -> Callable[[str], NDArray[np.generic]]:
    """What gives a rank's share of a tensor by its name."""
    shares = {spec.name: share for spec, share in split_tensors(config, ranks, rank)}
    return lambda name: shares[name].take(checkpoint.tensor(name))
