"""Compressed sparse attention on the device: a window of own rows, and selected entries of a shared compressed cache.

The modes are those of the reference: `window`, `full`, `reindex`, `reuse`. A row's selection is published as a list of
physical entry rows, which the layers that reuse it read as it is.
"""

from dsuf.checkpoint.config import QUANTISED, ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.caches import Caches
from dsuf.cuda.launches import BRANCH, Pass

LATENTS = "wq_a_kv"
"""The region of the matrices that make query latents and window keys, one behind the other."""

INDEXED = ("full", "reindex")
"""Modes of layers that select entries themselves, between the queries and attention."""

WINDOW_ANGLES, COMPRESSED_ANGLES, GROUP_ANGLES = range(3)
"""Kinds of angles: of rows in window layers, of rows in compressed layers, of the groups that become entries there."""


def place_angles(todo: Pass, arena: Arena, *, groups: str = "group_positions") -> None:
    """Queue the angles of the rows' positions, and of the positions `groups`."""
    work = todo.work
    frequencies = {name: arena[f"frequencies.{name}"] for name in ("window", "compressed")}
    todo.launch(
        "place_angles", positions=work["positions"], group_positions=work[groups], **frequencies, angles=work["angles"]
    )


def angles_of(todo: Pass, kind: int) -> Array:
    """The angles of `kind` for the rows of the pass."""
    angles = todo.work["angles"]
    return angles.viewed("f32", 3, todo.rows, angles.shape[-1])[kind]


class Projections:
    """The query, key and output projections of an attention, a backbone layer's and a draft stage's alike."""

    def __init__(self, arena: Arena, prefix: str, config: ModelConfig, *, compressed: bool) -> None:
        self.arena, self.prefix, self.config = arena, prefix, config
        self.kind = COMPRESSED_ANGLES if compressed else WINDOW_ANGLES

    def latents(self, todo: Pass, store: Array, places: Array | None, row_bytes: int) -> None:
        """`input` to the normed query latent, whose FP8 form also feeds the indexer, and to window rows in `store`.

        `places` names their rows of the store, row to row without.
        """
        work, c = todo.work, self.config
        self._project_fp8(
            todo, "dim", LATENTS, "input", work["latent"], c.q_lora_rank, second=work["key"], second_n=c.head_dim
        )
        todo.launch(
            "norm_latents", latent=work["latent"], weight=self.arena[f"{self.prefix}.q_norm.weight"],
            query=work["query"], **work.quantised("query"), key=work["key"],
            key_weight=self.arena[f"{self.prefix}.kv_norm.weight"], turned=work["window_key"] if todo.fresh else None,
            **self._stored(todo, store, places, row_bytes),
        )  # fmt: skip

    def queries(self, todo: Pass) -> None:
        """The query latent to queries in `q`, which attention turns to their positions."""
        c = self.config
        self._project_fp8(todo, "q_lora", "wq_b", "query", todo.work["q"], c.n_heads * c.head_dim)

    def keys(self, todo: Pass, source: str, store: Array, places: Array, row_bytes: int) -> None:
        """Quantised `source` to window rows in the rows of `store` that `places` names."""
        first = self.config.q_lora_rank
        todo.launch(
            "project_fp8_dim", **todo.work.quantised(source), second=None, second_n=0, out=todo.work["key"],
            weight=self.arena[f"{self.prefix}.{LATENTS}.weight"].rows(first),
            weight_scale=self.arena[f"{self.prefix}.{LATENTS}.scale"].rows(first // QUANTISED), n=self.config.head_dim,
        )  # fmt: skip
        todo.launch(
            "store_window", x=todo.work["key"], weight=self.arena[f"{self.prefix}.kv_norm.weight"], normed=None,
            turned=None, **self._stored(todo, store, places, row_bytes),
        )  # fmt: skip

    def output(self, todo: Pass) -> None:
        """`attended` to `branch`: project group by group, then together."""
        work, c = todo.work, self.config
        todo.launch(
            "project_groups", x=work["attended"], weight=self.arena[f"{self.prefix}.wo_a.weight"],
            weight_scale=self.arena[f"{self.prefix}.wo_a.scale"], out=None, **work.quantised("low"),
        )  # fmt: skip
        self._project_fp8(todo, "o", "wo_b", "low", work["branch"], c.dim)

    def _stored(self, todo: Pass, store: Array, places: Array | None, row_bytes: int) -> dict[str, Array | int | None]:
        """Where window rows go, and how they are turned."""
        packed = store.viewed("u8", store.bytes)
        return {"packed": packed, "place": places, "angles": angles_of(todo, self.kind), "row_bytes": row_bytes}

    def _project_fp8(
        self, todo: Pass, width: str, matrix: str, source: str, out: Array, n: int, *, second: Array | None = None,
        second_n: int = 0,
    ) -> None:  # fmt: skip
        name = f"{self.prefix}.{matrix}"
        todo.launch(
            f"project_fp8_{width}", **todo.work.quantised(source), weight=self.arena[f"{name}.weight"],
            weight_scale=self.arena[f"{name}.scale"], out=out, n=n, second=second, second_n=second_n,
        )  # fmt: skip


class Attention:
    """The attention of backbone layer `layer`."""

    def __init__(self, arena: Arena, layer: int, config: ModelConfig, caches: Caches) -> None:
        self.arena, self.layer, self.config, self.caches = arena, layer, config, caches
        self.prefix, self.mode, self.ratio = f"layers.{layer}.attn", config.mode(layer), config.ratio(layer)
        self.projections = Projections(arena, self.prefix, config, compressed=self.ratio > 0)
        self.source = config.kv_source(layer) if self.ratio else layer

    def run(self, todo: Pass) -> None:
        """Queue the branch of `input` into `branch`; the rows' cache rows are written on the way."""
        self._make_latents(todo)
        indexed = self.mode in INDEXED
        if indexed:
            self._prepare_index(todo.beside(BRANCH))
        self.projections.queries(todo)
        if indexed:
            self._project_index(todo)
            todo.join(BRANCH)
            self._select(todo)
        self._attend(todo)
        if todo.fresh:
            self._write_ring(todo)
        self.projections.output(todo)

    def _make_latents(self, todo: Pass) -> None:
        """Queue query latents, and the window rows that this pass attends to."""
        row_bytes = self.caches.sizes.window_bytes
        if todo.fresh:
            # The rings still hold what the first rows of a long pass look back at; they are written afterwards.
            self.projections.latents(todo, todo.work["fresh"], None, row_bytes)
        else:
            self.projections.latents(todo, self.caches.window(self.layer), todo.work["ring_place"], row_bytes)

    def write_window(self, todo: Pass) -> None:
        """Queue the window rows of `input` into the rings, for rows that attend to nothing here."""
        ring, places = self.caches.window(self.layer), todo.work["ring_place"]
        self.projections.keys(todo, "input", ring, places, self.caches.sizes.window_bytes)

    def _write_ring(self, todo: Pass) -> None:
        """Queue the window rows of a long pass into the rings."""
        width, row_bytes = self.config.head_dim, self.caches.sizes.window_bytes
        ring = self.caches.window(self.layer)
        packed = ring.viewed("u8", ring.bytes)
        todo.launch(
            "quantize_fp8", x=todo.work["window_key"], codes=packed, scales=packed.rows(width), meaning=None,
            place=todo.work["ring_place"], codes_stride=row_bytes, scales_stride=row_bytes, width=width,
        )  # fmt: skip

    def write_entries(self, todo: Pass) -> None:
        """Queue compressed entries and index keys of `input` into the pages."""
        work, c, name = todo.work, self.config, f"{self.prefix}.compressor"
        sizes, entries, keys = self.caches.sizes, self.caches.entries(self.layer), self.caches.index_keys(self.layer)
        stored = {
            "place": work["entry_place"].viewed("i64", 2, todo.rows)[self.ratio - 1], "turned": None,
            "angles": angles_of(todo, COMPRESSED_ANGLES if self.ratio == 1 else GROUP_ANGLES),
        }  # fmt: skip
        self._pool(todo)
        todo.launch(
            "store_entry", x=work["pooled"], weight=self.arena[f"{name}.norm.weight"], normed=work["pooled_latent"],
            packed=entries.viewed("u8", entries.bytes), row_bytes=sizes.entry_bytes, **stored,
        )  # fmt: skip
        todo.see(f"layers.{self.layer}.compressed_latent_pre_rope", work["pooled_latent"])
        todo.launch(
            "project_bf16_head_dim", x=work["pooled_latent"], weight=self.arena[f"{self.prefix}.indexer.wk.weight"],
            out=None, rounded=work["index_key"], n=c.index_head_dim,
        )  # fmt: skip
        todo.launch(
            "store_index_key", x=work["index_key"], weight=self.arena[f"{self.prefix}.indexer.k_norm.weight"],
            normed=None, packed=keys.viewed("u8", keys.bytes), row_bytes=sizes.index_key_bytes, **stored,
        )  # fmt: skip
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

    def _prepare_index(self, todo: Pass) -> None:
        """Queue what the index takes from `input` itself: head weights, and in a full layer entries and their keys."""
        work, c, name = todo.work, self.config, f"{self.prefix}.indexer"
        todo.launch(
            "project_bf16_few", x=work["input"], weight=self.arena[f"{name}.weights_proj.weight"], out=None,
            rounded=work["index_weights"], n=c.index_n_heads,
        )  # fmt: skip
        if self.mode == "full":
            self.write_entries(todo)

    def _project_index(self, todo: Pass) -> None:
        """Queue index queries, from the query latent."""
        work, c, name = todo.work, self.config, f"{self.prefix}.indexer"
        todo.launch(
            "project_fp8_q_lora", **work.quantised("query"), weight=self.arena[f"{name}.wq_b.weight"],
            weight_scale=self.arena[f"{name}.wq_b.scale"], out=work["index_q"],
            n=c.index_n_heads * c.index_head_dim, second=None, second_n=0,
        )  # fmt: skip

    def _select(self, todo: Pass) -> None:
        """Score the entries that each row may see, and publish the physical rows of the best in `selected`."""
        work, c = todo.work, self.config
        todo.launch(
            "index_queries", q=work["index_q"], meaning=work["index_q.meaning"], weights=work["index_weights"],
            angles=angles_of(todo, self.projections.kind),
        )  # fmt: skip
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
            sink=self.arena[f"{self.prefix}.attn_sink"], angles=angles_of(todo, self.projections.kind),
            out=work["attended"], heads=c.n_heads, window_slots=c.window_size,
            entry_slots=c.index_topk if self.ratio else 0, early=int(self.mode not in INDEXED),
        )  # fmt: skip

    @property
    def _part(self) -> int:
        """Which windows the layer has: those of the encoder, of the boundary, of the decoder."""
        start = self.config.decoder_start
        return 0 if self.layer < start else 1 if self.layer == start else 2
