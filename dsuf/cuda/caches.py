"""The caches of all turns: pages of the global cache, and what each turn's slot holds of a window's worth.

A *page* is `PAGE_TOKENS` positions: for each Full layer their entries and their index keys, each an array over all
pages, so that entry r of a turn with page table t is row t[r / page rows] * page rows + r % page rows. A *slot* is what
an attached turn has to itself: rings of the last positions of every layer's window and of the draft stages', the first
halves of groups that a later position completes, token ids.
"""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region

PAGE_TOKENS = 128


class CacheSizes:
    """How many pages and slots there are, and the sizes that follow from the configuration."""

    def __init__(self, config: ModelConfig, *, pages: int, slots: int, ring_rows: int, context_tokens: int) -> None:
        self.config, self.pages, self.slots, self.ring_rows = config, pages, slots, ring_rows
        self.table_pages = -(-context_tokens // PAGE_TOKENS)
        self.window_bytes = config.head_dim + config.head_dim // 32
        self.entry_bytes = config.head_dim // 2 + config.head_dim // 16
        self.index_key_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
        self.rings = config.n_layers + config.n_mtp_layers
        # Those of a window and of what a step may take back: the end of a replayed prompt is computed twice.
        self.halves = config.window_size // 2 + 16

    def page_rows(self, layer: int) -> int:
        """Entries of Full layer `layer` in a page."""
        return PAGE_TOKENS // self.config.ratio(layer)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all Full layers."""
        row = self.entry_bytes + self.index_key_bytes
        return sum(self.page_rows(layer) * row for layer in self.config.kv_source_layers)

    def plan(self) -> list[Region]:
        """The regions of pages and slots."""
        regions = []
        for layer in self.config.kv_source_layers:
            rows = self.pages * self.page_rows(layer)
            regions.append(Region(f"layers.{layer}.entries", "u8", (rows, self.entry_bytes), "pages"))
            regions.append(Region(f"layers.{layer}.index_keys", "u8", (rows, self.index_key_bytes), "pages"))
            if self.config.ratio(layer) == 2:
                shape = (self.slots, self.halves, 2, self.config.head_dim)
                regions.append(Region(f"layers.{layer}.halves", "f32", shape, "slots"))
        shape = (self.rings, self.slots, self.ring_rows, self.window_bytes)
        regions.append(Region("windows", "u8", shape, "slots"))
        return regions


class Caches:
    """The arrays of pages and slots."""

    def __init__(self, arena: Arena, sizes: CacheSizes) -> None:
        self.arena, self.sizes = arena, sizes

    def window(self, layer: int) -> Array:
        """The rings of backbone layer `layer`: [slots, ring rows, bytes]."""
        return self.arena["windows"][layer]

    def draft_window(self, stage: int) -> Array:
        """The rings of draft stage `stage`."""
        return self.arena["windows"][self.sizes.config.n_layers + stage]

    def entries(self, layer: int) -> Array:
        """The compressed entries of Full layer `layer`: [physical rows, bytes]."""
        return self.arena[f"layers.{layer}.entries"]

    def index_keys(self, layer: int) -> Array:
        """Its index keys."""
        return self.arena[f"layers.{layer}.index_keys"]

    def halves(self, layer: int) -> Array:
        """First halves of a ratio-2 layer: [slots, halves, kv and gate, head_dim]."""
        return self.arena[f"layers.{layer}.halves"]
