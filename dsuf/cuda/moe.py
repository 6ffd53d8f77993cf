"""The experts of a block: the router, the routed FP4 experts grouped so that each is read once, the shared FP8 one."""

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.launches import BRANCH, Pass

_FORMS = (("", "weight"), ("_scale", "scale"))

GROUPED = ("used", "expert", "first", "order")
"""Lists of a pass's pairs of row and expert, by expert."""


class Moe:
    """The experts `prefix` of one block; it has `experts` routed ones, of which a row uses `picks`."""

    def __init__(self, arena: Arena, prefix: str, config: ModelConfig, experts: int, picks: int) -> None:
        self.arena, self.prefix = arena, prefix
        self.dim, self.inter, self.experts, self.picks = config.dim, config.moe_inter_dim, experts, picks

    def run(self, todo: Pass) -> None:
        """Queue the branch of `input` into `branch`."""
        self._run_shared(todo.beside(BRANCH))
        self._route(todo)
        self._run_routed(todo)
        todo.join(BRANCH)
        work = todo.work
        todo.launch(
            "combine_experts", routed=work["routed"], shared=work["shared"], out=work["branch"], picks=self.picks
        )

    def _route(self, todo: Pass) -> None:
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

    def _run_routed(self, todo: Pass) -> None:
        work = todo.work
        grouped: dict[str, Array | int] = {name: work[name] for name in GROUPED}
        grouped["slots"] = min(self.experts, todo.rows * self.picks)
        up = {f"{matrix}{ending}": self._expert(matrix, kind) for matrix in ("w1", "w3") for ending, kind in _FORMS}
        todo.launch_plain(
            "experts_up", x=work["input.meaning"], **up, weights=work["chosen_weights"], **grouped,
            inner=work["inner"], picks=self.picks,
        )  # fmt: skip
        todo.launch_plain(
            "experts_down", inner=work["inner"], w2=self._expert("w2", "weight"),
            w2_scale=self._expert("w2", "scale"), **grouped, out=work["routed"],
        )  # fmt: skip

    def _run_shared(self, todo: Pass) -> None:
        work, name = todo.work, f"{self.prefix}.shared_experts"
        todo.launch(
            "project_fp8_dim", **work.quantised("input"), weight=self.arena[f"{name}.w13.weight"],
            weight_scale=self.arena[f"{name}.w13.scale"], out=work["shared.hidden"], n=2 * self.inter,
            second=None, second_n=0,
        )  # fmt: skip
        todo.launch("swiglu_rows", hidden=work["shared.hidden"], inner=work["shared.inner"])
        todo.quantize("shared.inner", self.inter)
        todo.launch(
            "project_fp8_inter", **work.quantised("shared.inner"), weight=self.arena[f"{name}.w2.weight"],
            weight_scale=self.arena[f"{name}.w2.scale"], out=work["shared"], n=self.dim,
            second=None, second_n=0,
        )  # fmt: skip

    def _expert(self, matrix: str, kind: str) -> Array:
        return self.arena[f"{self.prefix}.experts.{matrix}.{kind}"]
