"""Compressed sparse attention on the device: a window of own rows, and selected entries of a shared compressed cache.

The modes are those of the reference: `window`, `full`, `reindex`, `reuse`. A row's selection is published as a list of
physical entry rows, which the layers that reuse it read as it is.
"""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.caches import Caches
from dsuf.cuda.launches import BRANCH, Pass


class Projections:
    """The query, key and output projections of an attention, a backbone layer's and a draft stage's alike."""

    def __init__(self, arena: Arena, prefix: str, config: ModelConfig, *, compressed: bool) -> None:
        self.arena, self.prefix, self.config = arena, prefix, config
        self.frequencies = arena["frequencies.compressed" if compressed else "frequencies.window"]

    def query_latent(self, todo: Pass) -> None:
        """`input` to the normed query latent, whose FP8 form also feeds the indexer."""
        work, c = todo.work, self.config
        self._project_fp8(todo, "dim", "wq_a", "input", work["latent"], c.q_lora_rank)
        todo.launch(
            "norm_q_lora", x=work["latent"], weight=self.arena[f"{self.prefix}.q_norm.weight"], y=work["query"],
            **work.quantised("query"),
        )  # fmt: skip

    def queries(self, todo: Pass) -> None:
        """The query latent to rotated queries in `q`."""
        c = self.config
        self._project_fp8(todo, "q_lora", "wq_b", "query", todo.work["q"], c.n_heads * c.head_dim)
        self.rotate(todo, todo.work["q"], c.n_heads, c.head_dim)

    def keys(self, todo: Pass, source: str = "input") -> None:
        """Quantised `source` to rotated window rows in `window_key`, before their quantiser."""
        work, c = todo.work, self.config
        self._project_fp8(todo, "dim", "wkv", source, work["key"], c.head_dim)
        weight = self.arena[f"{self.prefix}.kv_norm.weight"]
        todo.launch("norm_head_dim", x=work["key"], weight=weight, y=work["window_key"], codes=None, scales=None)
        self.rotate(todo, work["window_key"], 1, c.head_dim)

    def output(self, todo: Pass) -> None:
        """`attended` to `branch`: turn back, project group by group, then together."""
        work, c = todo.work, self.config
        self.rotate(todo, work["attended"], c.n_heads, c.head_dim, inverse=1)
        todo.launch(
            "project_groups", x=work["attended"], weight=self.arena[f"{self.prefix}.wo_a.weight"],
            weight_scale=self.arena[f"{self.prefix}.wo_a.scale"], out=work["low"],
        )  # fmt: skip
        todo.quantize("low", c.o_groups * c.o_lora_rank)
        self._project_fp8(todo, "o", "wo_b", "low", work["branch"], c.dim)

    def rotate(
        self, todo: Pass, x: Array, heads: int, width: int, *, positions: str = "positions", inverse: int = 0
    ) -> None:
        """Rotate the last channels of `x` [rows, heads, width] in place."""
        todo.launch(
            "rotate_rows", x=x, positions=todo.work[positions], frequencies=self.frequencies, heads=heads, width=width,
            inverse=inverse,
        )  # fmt: skip

    def _project_fp8(self, todo: Pass, width: str, matrix: str, source: str, out: Array, n: int) -> None:
        name = f"{self.prefix}.{matrix}"
        todo.launch(
            f"project_fp8_{width}", **todo.work.quantised(source), weight=self.arena[f"{name}.weight"],
            weight_scale=self.arena[f"{name}.scale"], out=out, n=n,
        )  # fmt: skip


def store_rows(
    todo: Pass, quantiser: str, source: str, store: Array, places: Array | None, row_bytes: int, width: int
) -> None:
    """Queue packing the rows of activation `source` into the rows of `store` that `places` names, row to row without.

    A packed row is its codes, then its scales.
    """
    code_bytes = width if quantiser == "quantize_fp8" else width // 2
    packed = store.viewed("u8", store.bytes)
    todo.launch(
        quantiser, x=todo.work[source], codes=packed, scales=packed.rows(code_bytes), meaning=None, place=places,
        codes_stride=row_bytes, scales_stride=row_bytes, width=width,
    )  # fmt: skip


def pack_fresh(todo: Pass, width: int, row_bytes: int) -> None:
    """Queue packing the window rows of this pass into `fresh`, where its own rows read them."""
    store_rows(todo, "quantize_fp8", "window_key", todo.work["fresh"], None, row_bytes, width)


class Attention:
    """The attention of backbone layer `layer`."""

    def __init__(self, arena: Arena, layer: int, config: ModelConfig, caches: Caches) -> None:
        self.arena, self.layer, self.config, self.caches = arena, layer, config, caches
        self.prefix, self.mode, self.ratio = f"layers.{layer}.attn", config.mode(layer), config.ratio(layer)
        self.projections = Projections(arena, self.prefix, config, compressed=self.ratio > 0)
        self.source = config.kv_source(layer) if self.ratio else layer

    def run(self, todo: Pass) -> None:
        """Queue the branch of `input` into `branch`; the rows' cache rows are written on the way."""
        self._make_rows(todo.beside(BRANCH))
        self.projections.query_latent(todo)
        self.projections.queries(todo)
        indexed = self.mode in ("full", "reindex")
        if indexed:
            self._score_inputs(todo)
        todo.join(BRANCH)
        if indexed:
            self._select(todo)
        self._attend(todo)
        if todo.fresh:
            self._write_ring(todo)
        self.projections.output(todo)

    def _make_rows(self, todo: Pass) -> None:
        """Queue the cache rows that this pass attends to."""
        self.projections.keys(todo)
        if todo.fresh:
            # The rings still hold what the first rows of a long pass look back at; they are written afterwards.
            pack_fresh(todo, self.config.head_dim, self.caches.sizes.window_bytes)
        else:
            self._write_ring(todo)
        if self.mode == "full":
            self.write_entries(todo)

    def write_window(self, todo: Pass) -> None:
        """Queue the window rows of `input` into the rings, for rows that attend to nothing here."""
        self.projections.keys(todo)
        self._write_ring(todo)

    def _write_ring(self, todo: Pass) -> None:
        sizes, ring = self.caches.sizes, self.caches.window(self.layer)
        places = todo.work["ring_place"]
        store_rows(todo, "quantize_fp8", "window_key", ring, places, sizes.window_bytes, self.config.head_dim)

    def write_entries(self, todo: Pass) -> None:
        """Queue compressed entries and index keys of `input` into the pages."""
        work, c, name = todo.work, self.config, f"{self.prefix}.compressor"
        self._pool(todo)
        todo.launch(
            "norm_head_dim", x=work["pooled"], weight=self.arena[f"{name}.norm.weight"], y=work["pooled_latent"],
            codes=None, scales=None,
        )  # fmt: skip
        todo.see(f"layers.{self.layer}.compressed_latent_pre_rope", work["pooled_latent"])
        todo.launch(
            "project_bf16_head_dim", x=work["pooled_latent"], weight=self.arena[f"{self.prefix}.indexer.wk.weight"],
            out=None, rounded=work["index_key"], n=c.index_head_dim,
        )  # fmt: skip
        todo.launch(
            "norm_index_dim", x=work["index_key"], weight=self.arena[f"{self.prefix}.indexer.k_norm.weight"],
            y=work["index_key_normed"], codes=None, scales=None,
        )  # fmt: skip
        sizes, places = self.caches.sizes, work["entry_place"].viewed("i64", 2, todo.rows)[self.ratio - 1]
        first = "positions" if self.ratio == 1 else "group_positions"
        for x, width in (("index_key_normed", c.index_head_dim), ("pooled_latent", c.head_dim)):
            self.projections.rotate(todo, work[x], 1, width, positions=first)
        keys, entries = self.caches.index_keys(self.layer), self.caches.entries(self.layer)
        row, width = sizes.index_key_bytes, c.index_head_dim
        store_rows(todo, "quantize_index", "index_key_normed", keys, places, row, width)
        store_rows(todo, "quantize_entry", "pooled_latent", entries, places, sizes.entry_bytes, c.head_dim)
        todo.see(f"layers.{self.layer}.entries", entries)

    def _pool(self, todo: Pass) -> None:
        """What each row's group is made of, into `pooled`; rows that complete no group are zero."""
        work, c, name = todo.work, self.config, f"{self.prefix}.compressor"
        single = self.ratio == 1
        todo.launch(
            "project_bf16_few", x=work["input"], weight=self.arena[f"{name}.wkv.weight"],
            out=None if single else work["kv"], rounded=work["pooled"] if single else None, n=c.head_dim,
        )  # fmt: skip
        if single:
            return
        todo.launch(
            "project_bf16_few", x=work["input"], weight=self.arena[f"{name}.wgate.weight"], out=work["gate"],
            rounded=None, n=c.head_dim,
        )  # fmt: skip
        todo.launch(
            "compress_rows", kv=work["kv"], gate=work["gate"], halves=self.caches.halves(self.layer),
            keep=work["keep"], partner=work["partner"], pooled=work["pooled"],
        )  # fmt: skip

    def _score_inputs(self, todo: Pass) -> None:
        """Index queries and head weights, from the query latent and `input`."""
        work, c, name = todo.work, self.config, f"{self.prefix}.indexer"
        width = c.index_n_heads * c.index_head_dim
        todo.launch(
            "project_fp8_q_lora", **work.quantised("query"), weight=self.arena[f"{name}.wq_b.weight"],
            weight_scale=self.arena[f"{name}.wq_b.scale"], out=work["index_q"], n=width,
        )  # fmt: skip
        self.projections.rotate(todo, work["index_q"], c.index_n_heads, c.index_head_dim)
        todo.launch(
            "quantize_index", x=work["index_q"], **work.quantised("index_q"), meaning=work["index_q.meaning"],
            place=None, codes_stride=width // 2, scales_stride=width // 32, width=width,
        )  # fmt: skip
        todo.launch(
            "project_bf16_few", x=work["input"], weight=self.arena[f"{name}.weights_proj.weight"], out=None,
            rounded=work["index_weights"], n=c.index_n_heads,
        )  # fmt: skip
        todo.launch("scale_heads", weights=work["index_weights"])

    def _select(self, todo: Pass) -> None:
        """Score the entries that each row may see, and publish the physical rows of the best in `selected`."""
        work, c = todo.work, self.config
        entries, size = todo.entries[self.ratio], c.candidate_block_size
        blocks = min(c.candidate_topk_blocks, -(-entries // size))
        # Where all blocks fit among the candidates there is nothing to narrow down.
        filtered = blocks * size < entries and self.source == c.candidate_source_layer
        narrowed = filtered and self.mode == "reindex"
        scored = blocks * size if narrowed else entries
        reachable = work["reachable"].viewed("i32", 2, todo.rows)[self.ratio - 1]
        paged: dict[str, Array | int | None] = {
            "row_slot": work["row_slot"], "table": todo.turns["table"], "table_pages": self.caches.sizes.table_pages,
            "page_rows": self.caches.sizes.page_rows(self.source), "blocks": work["blocks"] if narrowed else None,
            "block_count": blocks if narrowed else 0, "block_size": size if narrowed else 0,
            "reachable": work["inside"] if narrowed else reachable,
            "scores": work["scores"], "entries": scored,
        }  # fmt: skip
        todo.launch(
            "score_index", q=work["index_q.meaning"], weights=work["index_weights"],
            keys=self.caches.index_keys(self.source), **paged,
        )  # fmt: skip
        todo.see(f"layers.{self.layer}.index_score", work["scores"])
        if filtered and self.layer == c.candidate_source_layer:
            todo.launch(
                "mark_blocks", scores=work["scores"], reachable=reachable,
                blocks=work["blocks"], inside=work["inside"], entries=entries, block_count=blocks, block_size=size,
            )  # fmt: skip
        todo.launch("select_rows", selected=work["selected"], count=c.index_topk, **paged)
        todo.force(f"layers.{self.layer}.index_topk", work["selected"])

    def _attend(self, todo: Pass) -> None:
        """Queries `q` over each row's window and selection, into `attended`."""
        work, c = todo.work, self.config
        todo.launch(
            "attend_sparse", q=work["q"], window=self.caches.window(self.layer),
            fresh=work["fresh"] if todo.fresh else None,
            entries=self.caches.entries(self.source) if self.ratio else None,
            slots=work["windows"].viewed("i32", 3, todo.rows, c.window_size)[self._part],
            selected=work["selected"] if self.ratio else None,
            sink=self.arena[f"{self.prefix}.attn_sink"], out=work["attended"], heads=c.n_heads,
            window_slots=c.window_size, entry_slots=c.index_topk if self.ratio else 0,
        )  # fmt: skip

    @property
    def _part(self) -> int:
        """Which windows the layer has: those of the encoder, of the boundary, of the decoder."""
        start = self.config.decoder_start
        return 0 if self.layer < start else 1 if self.layer == start else 2
