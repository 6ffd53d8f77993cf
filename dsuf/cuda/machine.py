"""A loaded model on one GPU: memory planned and filled, kernels built, and what queues prefill and decode on it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from dsuf.checkpoint.config import ModelConfig, load_config
from dsuf.checkpoint.engram import EngramHash
from dsuf.checkpoint.shards import Checkpoint
from dsuf.checkpoint.token_map import TokenMap
from dsuf.cuda.arena import Arena, Region, check_budget, free_bytes, write_array
from dsuf.cuda.caches import PAGE_TOKENS, Caches, CacheSizes
from dsuf.cuda.constants import plan_constants, write_constants
from dsuf.cuda.draft import Draft
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.logits.ratings import plan_ratings
from dsuf.cuda.logits.rules import plan_rules
from dsuf.cuda.model import Model
from dsuf.cuda.prefill import Prefiller
from dsuf.cuda.results import plan_results
from dsuf.cuda.sizes import from_config
from dsuf.cuda.step import Decoder, plan_step
from dsuf.cuda.table import SOURCES
from dsuf.cuda.toolchain import find_toolchain
from dsuf.cuda.turns import Turns, plan_turns
from dsuf.cuda.weights import arrange_experts, load_weights, plan_weights
from dsuf.cuda.workspace import plan_workspace
from dsuf.errors import CommandError

MOST_TURNS = 1024
"""Turns that the kernels of a step hold in one block."""

RESERVED_BYTES = 1 << 30
"""Device memory left to the driver, modules and graphs."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is loaded for. `pages` 0 takes as many as the turns can use and the budget leaves.

    `budget_bytes` 0 is what is free on the device, less what the driver needs. Drafts whose running confidence is below
    `confidence` are not verified; `rule` accepts sampled ones.
    """

    context_tokens: int
    max_turns: int
    drafts: bool = True
    prefill_rows: int = 256
    ring_rows: int = 0
    pages: int = 0
    budget_bytes: int = 0
    engram_on_host: bool = False
    rule: str = "block"
    confidence: float = 0.0

    def ring_of(self, config: ModelConfig) -> int:
        """Rows of a ring: a window, and as many again for what a step or a replay may go back over."""
        return self.ring_rows or max(256, 2 * config.window_size)

    def reach_of(self, config: ModelConfig) -> int:
        """Positions that a turn can have rows for: the context, and what a step may write behind it."""
        return self.context_tokens + self.overrun_of(config)

    def overrun_of(self, config: ModelConfig) -> int:
        """Positions past a turn's last that a step may write."""
        return config.dspark_block_size + 1 if self.drafts else 1


def plan_regions(config: ModelConfig, setup: Setup, pages: int) -> list[Region]:
    """Every region of the engine with this many pages; pure."""
    draft = setup.drafts and config.n_mtp_layers > 0
    weights, _ = plan_weights(config, draft=draft, engram_on_host=setup.engram_on_host)
    return [*weights, *plan_working_regions(config, setup, pages)]


def plan_working_regions(config: ModelConfig, setup: Setup, pages: int) -> list[Region]:
    """Every region but the weights."""
    sizes = plan_sizes(config, setup, pages)
    block = config.dspark_block_size if setup.drafts and config.n_mtp_layers > 0 else 0
    rows, context = setup.max_turns * (block + 1), setup.reach_of(config)
    return [
        *plan_constants(config),
        *sizes.plan(),
        *plan_turns(config, sizes),
        *plan_workspace("decode", config, rows, context, rows),
        *plan_workspace("draft", config, setup.max_turns * config.dspark_block_size, 8,
                        setup.max_turns * config.dspark_block_size),
        *plan_workspace("prefill", config, max(setup.prefill_rows, config.window_size), context, 1),
        *plan_step(config, setup.max_turns),
        *plan_results("prefill", 1, config.dspark_block_size),
        *plan_rules("prefill", config, 1),
        *plan_ratings("prefill", 1, config.dspark_block_size),
    ]  # fmt: skip


def plan_sizes(config: ModelConfig, setup: Setup, pages: int) -> CacheSizes:
    """The sizes of the caches with this many pages."""
    reach, ring = setup.reach_of(config), setup.ring_of(config)
    return CacheSizes(config, pages=pages, slots=setup.max_turns, ring_rows=ring, context_tokens=reach)


def count_pages(config: ModelConfig, setup: Setup, budget_bytes: int) -> int:
    """Pages for `setup` within the budget: all that its turns can use, or what is left, but a whole context's.

    Raises `CommandError` with the numbers if that does not fit, or for more turns than a step can have.
    """
    if setup.max_turns > MOST_TURNS:
        raise CommandError(
            f"max_turns is {setup.max_turns}: the CUDA engine runs at most {MOST_TURNS} at the same time"
        )
    one_turn = -(-setup.reach_of(config) // PAGE_TOKENS)
    least = plan_regions(config, setup, setup.pages or one_turn)
    check_budget(least, budget_bytes)
    if setup.pages:
        return setup.pages
    left = budget_bytes - sum(region.reserved_bytes for region in least if not region.pinned)
    # Every region of pages is rounded up by less than one page's bytes.
    more = max(0, left // plan_sizes(config, setup, 1).page_bytes - len(config.kv_source_layers))
    return min(setup.max_turns * one_turn, one_turn + more)


class Machine:
    """The parts of a loaded model; `close` frees its memory."""

    def __init__(
        self, device: Device, kernels: Kernels, arena: Arena, config: ModelConfig, sizes: CacheSizes, setup: Setup,
        pad_id: int, *, devices: Sequence[Device] = (), check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`devices` are those of the ranks where each has its own, the first among them; `check` raises `DeviceError`
        where ranks have lost each other."""
        self.device, self.arena, self.config, self.sizes, self.setup = device, arena, config, sizes, setup
        self.devices, self.check = devices, check
        self.turns, self.caches = Turns(arena), Caches(arena, sizes)
        self.model = Model(arena, config, self.caches, pad_id)
        drafts = setup.drafts and config.n_mtp_layers > 0
        self.draft = Draft(arena, config, self.caches) if drafts else None
        parts = (arena, kernels, self.model, self.draft, self.turns)
        self.prefiller = Prefiller(*parts, eos_id=config.eos_token_id)
        self.decoder = Decoder(*parts, rule=setup.rule, threshold=setup.confidence, eos_id=config.eos_token_id)

    @classmethod
    def load(cls, directory: Path, setup: Setup, progress: Callable[[int], None] = lambda done: None) -> Self:
        """Load the checkpoint in `directory`; blocks. `progress` hears of bytes of weights, from any thread.

        Raises `CheckpointError`, `CommandError` (no device, no compiler, too little memory) or `DeviceError`.
        """
        config = load_config(directory / "config.json")
        device = Device()
        budget = setup.budget_bytes or free_bytes() - RESERVED_BYTES
        if budget <= 0:
            raise CommandError(f"device memory: nothing is free on {device.name}")
        pages = count_pages(config, setup, budget)
        kernels = build_kernels(device, config)
        arena = Arena(plan_regions(config, setup, pages))
        try:
            pad_id = _fill(arena, directory, config, setup, device, progress)
            arrange_experts(arena, kernels)
        except BaseException:
            arena.close()
            raise
        return cls(device, kernels, arena, config, plan_sizes(config, setup, pages), setup, pad_id)

    def close(self) -> None:
        """Free all memory; nothing runs any more."""
        self.device.use()
        self.arena.close()


def find_lack() -> str:
    """Why no model can be loaded on this machine's GPU, in one line; empty where nothing lacks."""
    try:
        Device()
        find_toolchain()
    except CommandError as error:
        return str(error)
    return ""


def build_kernels(device: Device, config: ModelConfig) -> Kernels:
    """The kernels for the sizes of `config`, compiled unless they are kept; raises `CommandError`."""
    sizes = from_config(config)
    target = os.environ.get("DSUF_SM", device.sm)
    device.use()  # what is loaded belongs to the device that is current
    return Kernels(device, find_toolchain().build_all(SOURCES, target, sizes.macros()), sizes)


def _fill(
    arena: Arena, directory: Path, config: ModelConfig, setup: Setup, device: Device, progress: Callable[[int], None]
) -> int:
    """Bring weights and constants into `arena`; the Engram id that fills a history."""
    tokens = TokenMap.from_tokenizer(directory / "tokenizer.json")
    engram_hash = EngramHash.from_config(config, tokens)
    drafts = setup.drafts and config.n_mtp_layers > 0
    _, placements = plan_weights(config, draft=drafts, engram_on_host=setup.engram_on_host)
    with Checkpoint.open(directory) as checkpoint:
        load_weights(arena, placements, checkpoint.tensor, device, progress)
        if drafts:
            rating = checkpoint.tensor(f"mtp.{config.n_mtp_layers - 1}.confidence_head.proj.weight")
            write_array(arena["confidence"], np.asarray(rating).astype(np.float32).reshape(-1))
    write_constants(arena, config, engram_hash, tokens.ids)
    return engram_hash.pad_id
