"""DSpark on the device: context rows for committed positions, and blocks of drafts behind every anchor.

A block is computed in a workspace of its own, since its rows are not those that the backbone verifies afterwards.
"""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.attention import WINDOW_ANGLES, Projections, angles_of, place_angles
from dsuf.cuda.block import TransformerBlock
from dsuf.cuda.caches import Caches
from dsuf.cuda.ends import enter_streams, project_logits, sample_rows
from dsuf.cuda.launches import Pass

FOR_DRAFTS = 1
"""The purpose of a draft's random numbers, as the sampling kernel counts purposes."""


class Stage(TransformerBlock):
    """One of the draft head's transformer blocks; it has a window and no compressed entries."""

    def __init__(self, arena: Arena, index: int, config: ModelConfig, caches: Caches) -> None:
        prefix, experts = f"mtp.{index}", config.dspark_n_routed_experts
        super().__init__(arena, prefix, config, experts, config.dspark_n_activated_experts)
        self.projections = Projections(arena, f"{prefix}.attn", config, compressed=False)
        self.ring, self.row_bytes = caches.draft_window(index), caches.sizes.window_bytes

    def forward(self, todo: Pass, *, collapsed: bool, following: Array | None) -> None:
        """Queue the stage over blocks of rows, as `run` does."""
        self.run(todo, self._attend, collapsed=collapsed, following=following)

    def keep(self, todo: Pass, places: Array) -> None:
        """Queue context rows from `context` into the ring."""
        self.projections.keys(todo, "context", self.ring, places, self.row_bytes)

    def _attend(self, todo: Pass) -> None:
        """Every row of a block attends to the turn's context window and to the whole block, later rows included."""
        work, c = todo.work, self.config
        self.projections.latents(todo, work["fresh"], None, self.row_bytes)
        self.projections.queries(todo)
        todo.launch(
            "attend_sparse", q=work["q"], window=self.ring, fresh=work["fresh"], entries=None, slots=work["windows"],
            selected=None, sink=self.arena[f"{self.prefix}.attn.attn_sink"], angles=angles_of(todo, WINDOW_ANGLES),
            out=work["attended"], heads=c.n_heads, window_slots=c.window_size + c.dspark_block_size, entry_slots=0,
            early=1,
        )  # fmt: skip
        self.projections.output(todo)


class Draft:
    """The draft head: it shares the backbone's embedding and head."""

    def __init__(self, arena: Arena, config: ModelConfig, caches: Caches) -> None:
        self.arena, self.config, self.caches = arena, config, caches
        self.stages = [Stage(arena, index, config, caches) for index in range(config.n_mtp_layers)]
        self.last = f"mtp.{config.n_mtp_layers - 1}"

    def feed(self, todo: Pass, places: Array) -> None:
        """Queue context rows for the rows of a backbone pass, from its `taps` into the ring rows `places` names."""
        work, c = todo.work, self.config
        todo.quantize("taps", len(c.dspark_target_layer_ids) * c.dim)
        todo.launch(
            "project_fp8_taps", **work.quantised("taps"), weight=self.arena["mtp.0.main_proj.weight"],
            weight_scale=self.arena["mtp.0.main_proj.scale"], out=work["context.projected"], n=c.dim,
            second=None, second_n=0,
        )  # fmt: skip
        todo.launch(
            "norm_dim", x=work["context.projected"], weight=self.arena["mtp.0.main_norm.weight"], y=work["context"],
            **work.quantised("context"),
        )  # fmt: skip
        for stage in self.stages:
            stage.keep(todo, places)

    def propose(self, todo: Pass, batch: int, live_turns: Array, turn: Array, *, rate: bool) -> None:
        """Queue blocks for the turns in `turn` [batch], into `picked` and `logits`; with `rate` their `confidence`."""
        work, c, turns = todo.work, self.config, todo.turns
        todo.launch_plain(
            "place_drafts", turn=turn, length=turns["length"], anchor=turns["anchor"], floors=turns["floors"],
            row_slot=work["row_slot"], row_position=work["row_position"], row_id=work["row_id"],
            positions=work["positions"], windows=work["windows"], live=live_turns, batch=batch,
            turns=self.caches.sizes.slots, ring=self.caches.sizes.ring_rows, noise_id=c.dspark_noise_token_id,
        )  # fmt: skip
        place_angles(todo, self.arena, groups="positions")
        enter_streams(todo, self.arena)
        for index, stage in enumerate(self.stages):
            following = self.stages[index + 1].norm("attn_norm") if index + 1 < len(self.stages) else None
            stage.forward(todo, collapsed=index > 0, following=following)
            todo.see(f"mtp.{index}.h", work["streams"])
        project_logits(todo, self.arena, self.arena[f"{self.last}.norm.weight"], c.vocab_size)
        for place in range(c.dspark_block_size):
            self._choose(todo, batch, live_turns, place)
        if rate:
            self._rate(todo, batch, live_turns)

    def _choose(self, todo: Pass, batch: int, live_turns: Array, place: int) -> None:
        """Queue the choice of the drafts at `place` of every block: the bias of the token before, then a draw."""
        work, c, head = todo.work, self.config, f"{self.last}.markov_head"
        todo.launch_plain(
            "add_markov", embed=self.arena[f"{head}.embed.weight"], head=self.arena[f"{head}.head.weight"],
            anchors=work["row_id"], drafts=work["picked"], logits=work["logits"], live=live_turns, batch=batch,
            place=place, vocabulary=c.vocab_size,
        )  # fmt: skip
        sample_rows(todo, c.vocab_size, batch, live_turns, first=place, step=c.dspark_block_size, purpose=FOR_DRAFTS)

    def _rate(self, todo: Pass, batch: int, live_turns: Array) -> None:
        work = todo.work
        todo.launch_plain(
            "rate_drafts", streams=work["streams"], pre=work["ffn.pre"],
            embed=self.arena[f"{self.last}.markov_head.embed.weight"], weight=self.arena["confidence"],
            anchors=work["row_id"], drafts=work["picked"], confidence=work["confidence"], live=live_turns, batch=batch,
        )  # fmt: skip
