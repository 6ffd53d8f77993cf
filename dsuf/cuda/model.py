"""The backbone on the device: queue some layers over the rows of a pass, and the logits of some of its rows."""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena
from dsuf.cuda.attention import Attention, place_angles
from dsuf.cuda.block import TransformerBlock
from dsuf.cuda.caches import PAGE_TOKENS, Caches
from dsuf.cuda.ends import enter_streams, project_logits
from dsuf.cuda.launches import Pass


class Layer(TransformerBlock):
    """Backbone layer `index`, Engram apart."""

    def __init__(self, arena: Arena, index: int, config: ModelConfig, caches: Caches) -> None:
        super().__init__(arena, f"layers.{index}", config, config.n_routed_experts, config.n_activated_experts)
        self.attention = Attention(arena, index, config, caches)


class Engram:
    """The n-gram memory before layer `layer`."""

    def __init__(self, arena: Arena, layer: int, config: ModelConfig) -> None:
        self.arena, self.prefix, self.config = arena, f"layers.{layer}.engram", config

    def run(self, todo: Pass) -> None:
        """Queue what the last tokens of each row add to its streams."""
        work, arena, prefix, c = todo.work, self.arena, self.prefix, self.config
        hashing = {name: arena[f"{prefix}.{name}"] for name in ("multipliers", "primes", "offsets")}
        todo.launch(
            "gather_engram", history=work["history"], **hashing, table=arena[f"{prefix}.embed.weight"],
            table_scale=arena[f"{prefix}.embed.scale"], **work.quantised("engram"),
        )  # fmt: skip
        todo.launch(
            "project_fp8_engram", **work.quantised("engram"), weight=arena[f"{prefix}.wkv.weight"],
            weight_scale=arena[f"{prefix}.wkv.scale"], out=work["engram.projected"], n=(c.hc_mult + 1) * c.dim,
            second=None, second_n=0,
        )  # fmt: skip
        todo.launch(
            "gate_engram", streams=work["streams"], projected=work["engram.projected"],
            q_weight=arena[f"{prefix}.q_weight"], k_weight=arena[f"{prefix}.k_weight"], out=work["streams"],
        )  # fmt: skip


class Model:
    """The backbone, its weights in `arena`, its cache rows in `caches`."""

    def __init__(self, arena: Arena, config: ModelConfig, caches: Caches, pad_id: int) -> None:
        self.arena, self.config, self.caches, self.pad_id = arena, config, caches, pad_id
        self.layers = [Layer(arena, index, config, caches) for index in range(config.n_layers)]
        self.engrams = {layer: Engram(arena, layer, config) for layer in config.engram_layer_ids}

    def place(self, todo: Pass) -> None:
        """Queue what follows from whose rows the pass has: places in the caches, window lists, Engram history."""
        work, turns, sizes = todo.work, todo.turns, self.caches.sizes
        rows = {name: work[name] for name in ("row_slot", "row_position", "row_id")}
        placed = ("positions", "group_positions", "ring_place", "entry_place", "reachable", "keep", "partner")
        todo.launch(
            "place_rows", **rows, ids=turns["ids"], table=turns["write_table"], floors=turns["floors"],
            engram_ids=self.arena["engram_ids"], **{name: work[name] for name in placed}, history=work["history"],
            windows=work["windows"], turns=sizes.slots, ring=sizes.ring_rows, table_pages=sizes.table_pages,
            page_tokens=PAGE_TOKENS, halves=sizes.halves, pad_id=self.pad_id, fresh=int(todo.fresh),
        )  # fmt: skip
        place_angles(todo, self.arena)
        todo.launch("keep_ids", **rows, ids=turns["ids"], turns=sizes.slots, ring=sizes.ring_rows)

    def forward(self, todo: Pass) -> None:
        """Queue everything from the rows' ids to `streams`, `ffn.pre` and `taps` behind the last layer."""
        self.place(todo)
        enter_streams(todo, self.arena)
        todo.see("h_embed", todo.work["streams"])
        self._run_layers(todo, self.config.n_layers)

    def encode(self, todo: Pass) -> None:
        """Queue the encoder alone, and what the first decoder layer takes from every position."""
        self.place(todo)
        enter_streams(todo, self.arena)
        self._run_layers(todo, self.config.decoder_start)
        self._write_boundary(todo)

    def _run_layers(self, todo: Pass, stop: int) -> None:
        """Queue the layers below `stop`, each of which makes the next one's input if nothing comes between them."""
        for index in range(stop):
            following = index + 1 < stop and index + 1 not in self.engrams
            self.run_layer(todo, index, collapsed=index > 0 and index not in self.engrams, prepares=following)

    def run_layer(self, todo: Pass, index: int, *, collapsed: bool = False, prepares: bool = False) -> None:
        """Queue layer `index` with its Engram; it is `collapsed` if its input is there, and `prepares` the next's."""
        layer = self.layers[index]
        if index in self.engrams:
            self.engrams[index].run(todo)
            todo.see(f"layers.{index}.h_after_engram", todo.work["streams"])
        if index in self.config.dspark_target_layer_ids and self.config.n_mtp_layers:
            tap = self.config.dspark_target_layer_ids.index(index)
            todo.launch("mean_streams", streams=todo.work["streams"], taps=todo.work["taps"], tap=tap)
        following = self.layers[index + 1].norm("attn_norm") if prepares else None
        layer.run(todo, layer.attention.run, collapsed=collapsed, following=following)

    def _write_boundary(self, todo: Pass) -> None:
        """Queue what the first decoder layer takes from every position: its Engram, entries and window rows."""
        index = self.config.decoder_start
        layer = self.layers[index]
        if index in self.engrams:
            self.engrams[index].run(todo)
        layer.collapse(todo, "ffn.pre", "attn_norm")
        layer.attention.write_entries(todo)
        layer.attention.write_window(todo)

    def head(self, todo: Pass) -> None:
        """Queue the `logits` of every row of the pass."""
        project_logits(todo, self.arena, self.arena["norm.weight"], self.config.vocab_size)
