"""A block of the transformer on the device: attention and experts, each between a collapse and an expansion.

The backbone's layers and the draft head's stages are such blocks; they differ in what their attention looks at.
"""

from collections.abc import Callable

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array
from dsuf.cuda.launches import MIXES, Pass
from dsuf.cuda.moe import Moe


class TransformerBlock:
    """The block `prefix`, attention and Engram apart; a row goes to `picks` of `experts` experts."""

    def __init__(self, arena: Arena, prefix: str, config: ModelConfig, experts: int, picks: int) -> None:
        self.arena, self.prefix, self.config = arena, prefix, config
        self.moe = Moe(arena, f"{prefix}.ffn", config, experts, picks)

    def run(
        self, todo: Pass, attend: Callable[[Pass], None], *, collapsed: bool = False, following: Array | None = None
    ) -> None:
        """Queue the block: streams in place, and the weights for the next collapse in `ffn.pre`.

        `attend` queues attention, from `input` to `branch`. What is `collapsed` has its `input` already; with the norm
        weights of the sublayer `following`, that one's `input` is made as well.
        """
        work, prefix = todo.work, self.prefix
        self._mix(todo.beside(MIXES), "attn")
        if not collapsed:
            self.collapse(todo, "ffn.pre", "attn_norm")
        todo.see(f"{prefix}.attn_in", work["input"])
        attend(todo)
        todo.see(f"{prefix}.attn_out", work["branch"])
        todo.join(MIXES)
        self._expand(todo, "attn", self.norm("ffn_norm"))
        self._mix(todo.beside(MIXES), "ffn")
        todo.see(f"{prefix}.ffn_in", work["input"])
        self.moe.run(todo)
        todo.see(f"{prefix}.ffn_out", work["branch"])
        todo.join(MIXES)
        self._expand(todo, "ffn", following)
        todo.see(f"{prefix}.h_out", work["streams"])
        todo.see(f"{prefix}.pre_mix_out", work["ffn.pre"])

    def norm(self, name: str) -> Array:
        """The weights of a sublayer's norm."""
        return self.arena[f"{self.prefix}.{name}.weight"]

    def collapse(self, todo: Pass, pre: str, norm: str) -> None:
        """Queue the normed collapse of the streams by the weights `pre`, with its FP8 form, into `input`."""
        work = todo.work
        todo.launch(
            "collapse_norm", streams=work["streams"], pre=work[pre], weight=self.norm(norm), y=work["input"],
            **work.quantised("input"), meaning=work["input.meaning"],
        )  # fmt: skip

    def _mix(self, todo: Pass, site: str) -> None:
        work, name = todo.work, f"{self.prefix}.hc_{site}"
        todo.launch("project_streams", streams=work["streams"], fn=self.arena[f"{name}_fn"], partial=work["partial"])
        mixes = {part: work[f"{site}.{part}"] for part in ("pre", "post", "comb")}
        todo.launch(
            "mix_streams", partial=work["partial"], base=self.arena[f"{name}_base"],
            scale=self.arena[f"{name}_scale"], **mixes,
        )  # fmt: skip

    def _expand(self, todo: Pass, site: str, norm: Array | None) -> None:
        """Queue the streams behind `site`, and with `norm` the input of the sublayer after it."""
        work = todo.work
        values = {
            "branch": work["branch"], "streams": work["streams"], "post": work[f"{site}.post"],
            "comb": work[f"{site}.comb"], "out": work["streams"],
        }  # fmt: skip
        if norm is None:
            todo.launch("expand_streams", **values)
            return
        todo.launch(
            "expand_collapse", **values, pre=work[f"{site}.pre"], weight=norm, y=work["input"],
            **work.quantised("input"), meaning=work["input.meaning"],
        )  # fmt: skip
