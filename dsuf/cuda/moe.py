"""The experts of a block: the router, the routed FP4 experts grouped so that each is read once, the shared FP8 one."""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.launches import Pass
from dsuf.cuda.workspace import FEW_ROWS

_FORMS = (("", "weight"), ("_scale", "scale"))

FEW_EXPERTS, FEW_PAIRS = 512, 64
"""What `choose_few` serves, of `FEW_ROWS` rows."""

GROUPED = ("used", "expert", "first", "order")
"""Lists of a pass's pairs of row and expert, by expert."""


class Moe:
    """The experts `prefix` of one block; it has `experts` routed ones, of which a row uses `picks`."""

    def __init__(self, arena: Arena, prefix: str, config: ModelConfig, experts: int, picks: int) -> None:
        self.arena, self.prefix = arena, prefix
        self.dim, self.inter, self.experts, self.picks = config.dim, config.moe_inter_dim, experts, picks

    def run(self, todo: Pass) -> None:
        """Queue the branch of `input` into `branch`."""
        self._route(todo)
        self._run_experts(todo)
        work = todo.work
        todo.launch(
            "combine_experts", routed=work["routed"], shared=work["shared"], out=work["branch"], picks=self.picks
        )

    def _route(self, todo: Pass) -> None:
        """Queue router, choice and grouping: by one block for few rows, unless a choice may be exchanged."""
        few = todo.rows <= FEW_ROWS and todo.rows * self.picks <= FEW_PAIRS and self.experts <= FEW_EXPERTS
        if few and not todo.observer:
            self._route_few(todo)
        else:
            self._route_many(todo)

    def _route_few(self, todo: Pass) -> None:
        work, gate = todo.work, f"{self.prefix}.gate"
        scored: dict[str, Array | int] = {"scores": work["router"], "biased": work["biased"], "experts": self.experts}
        todo.launch(
            "score_input", x=work["input"], weight=self.arena[f"{gate}.weight"], bias=self.arena[f"{gate}.bias"],
            **scored,
        )  # fmt: skip
        todo.launch(
            "choose_few", **scored, chosen=work["chosen"], weights=work["chosen_weights"],
            **{name: work[name] for name in GROUPED}, picks=self.picks,
        )  # fmt: skip

    def _route_many(self, todo: Pass) -> None:
        work, gate = todo.work, f"{self.prefix}.gate"
        todo.launch(
            "project_bf16_few", x=work["input"], weight=self.arena[f"{gate}.weight"], out=work["router"],
            rounded=None, n=self.experts,
        )  # fmt: skip
        chosen = {"chosen": work["chosen"], "weights": work["chosen_weights"]}
        grouped: dict[str, Array] = {name: work[name] for name in GROUPED}
        # Choices that may be exchanged are grouped afterwards.
        aside = dict.fromkeys((*GROUPED, "arrived"))
        todo.launch(
            "route_experts", logits=work["router"], bias=self.arena[f"{gate}.bias"], **chosen,
            **(aside if todo.observer else {**grouped, "arrived": work["arrived"]}), experts=self.experts,
            picks=self.picks,
        )  # fmt: skip
        if not todo.observer:
            return
        todo.see(f"{self.prefix}.router_logits", work["router"])
        todo.force(f"{self.prefix}.router_indices", work["chosen"])
        todo.force(f"{self.prefix}.router_weights", work["chosen_weights"])
        todo.launch_plain(
            "group_experts", chosen=work["chosen"], **grouped, rows=todo.rows, picks=self.picks, experts=self.experts
        )

    def _run_experts(self, todo: Pass) -> None:
        """Queue both halves of all experts: pairs to `routed`, the shared one's rows to `shared`."""
        work, shared = todo.work, f"{self.prefix}.shared_experts"
        grouped: dict[str, Array | int] = {name: work[name] for name in GROUPED}
        grouped["slots"] = min(self.experts, todo.rows * self.picks)
        up = {f"{matrix}{ending}": self._expert(matrix, kind) for matrix in ("w1", "w3") for ending, kind in _FORMS}
        todo.launch(
            "experts_up", x=work["input.meaning"], **up, weights=work["chosen_weights"], **grouped,
            inner=work["inner"], picks=self.picks, shared=self.arena[f"{shared}.w13.weight"],
            shared_scale=self.arena[f"{shared}.w13.scale"], shared_inner=work["shared.inner"],
        )  # fmt: skip
        todo.launch(
            "experts_down", inner=work["inner"], w2=self._expert("w2", "weight"),
            w2_scale=self._expert("w2", "scale"), **grouped, out=work["routed"],
            shared=self.arena[f"{shared}.w2.weight"], shared_scale=self.arena[f"{shared}.w2.scale"],
            shared_inner=work["shared.inner"], shared_out=work["shared"],
        )  # fmt: skip

    def _expert(self, matrix: str, kind: str) -> Array:
        return self.arena[f"{self.prefix}.experts.{matrix}.{kind}"]
