"""The scratch arrays of one pipeline: what a pass over some rows leaves from kernel to kernel.

Two pipelines never share a workspace, so that prefill and decode can run at the same time. An array serves every layer
in turn; what one layer leaves for the next is the streams, the weights of their collapse, and the published selection.
"""

from collections.abc import Iterator, Mapping

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda.arena import Arena, Array, Region
from dsuf.cuda.sizes import Sizes, from_config

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]

FEW_ROWS = 8
"""Rows whose experts are chosen by one block."""


def plan_workspace(pipeline: str, config: ModelConfig, rows: int, entries: int, logit_rows: int) -> list[Region]:
    """The regions of `pipeline` for passes of up to `rows` rows that score up to `entries` entries each."""
    sizes = from_config(config)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in (
        _table_shapes(sizes, rows),
        _stream_shapes(sizes, rows),
        _attention_shapes(sizes, config, rows),
        _index_shapes(sizes, config, rows, entries),
        _expert_shapes(sizes, config, rows),
    ):
        shapes |= group
    shapes |= _choice_shapes(sizes, config, rows, logit_rows)
    return [Region(f"{pipeline}.{name}", kind, shape, "workspaces") for name, (kind, shape) in shapes.items()]


def _table_shapes(s: Sizes, rows: int) -> Shapes:
    """Whose row each row is, and what follows from it: places in the caches, what it may see."""
    by_row = dict.fromkeys(("row_slot", "row_position", "row_id"), ("i32", (rows,)))
    by_row |= dict.fromkeys(("positions", "group_positions", "ring_place", "keep", "partner"), ("i64", (rows,)))
    return {
        "live": ("i32", (1,)),
        **by_row,
        "feed_place": ("i64", (rows,)),
        "entry_place": ("i64", (2, rows)),
        "reachable": ("i32", (2, rows)),
        "history": ("i64", (rows, s.engram_shifts)),
        "windows": ("i32", (3, rows, s.window + s.block)),
        "angles": ("f32", (3, rows, s.rope_dim)),
        "fresh": ("u8", (rows, s.head_dim + s.head_dim // 32)),
    }


def _stream_shapes(s: Sizes, rows: int) -> Shapes:
    n = s.named()
    mixes = {
        f"{site}.{part}": ("f32", (rows, s.streams, *([s.streams] if part == "comb" else [])))
        for site in ("attn", "ffn") for part in ("pre", "post", "comb")
    }  # fmt: skip
    return mixes | {
        "streams": ("bf16", (rows, s.streams, s.dim)),
        "partial": ("f32", (rows, n["splits"], n["outputs"] + 1)),
        **_quantised("input", rows, s.dim),
        "input.meaning": ("bf16", (rows, s.dim)),
        "branch": ("bf16", (rows, s.dim)),
        "engram.codes": ("u8", (rows, s.engram_width)),
        "engram.scales": ("u8", (rows, s.engram_width // 32)),
        "engram.projected": ("bf16", (rows, s.streams + 1, s.dim)),
        **_quantised("taps", rows, s.taps * s.dim),
        "context.projected": ("bf16", (rows, s.dim)),
        **_quantised("context", rows, s.dim),
    }


def _attention_shapes(s: Sizes, c: ModelConfig, rows: int) -> Shapes:
    n = s.named()
    return {
        "latent": ("bf16", (rows, s.q_lora)),
        **_quantised("query", rows, s.q_lora),
        "key": ("bf16", (rows, s.head_dim)),
        "window_key": ("bf16", (rows, s.head_dim)),
        "q": ("bf16", (rows, s.heads, s.head_dim)),
        "attended": ("bf16", (rows, s.heads, s.head_dim)),
        "low.codes": ("u8", (rows, n["o_width"])),
        "low.scales": ("u8", (rows, n["o_width"] // 32)),
        "kv": ("f32", (rows, s.head_dim)),
        "gate": ("f32", (rows, s.head_dim)),
        "pooled": ("bf16", (rows, s.head_dim)),
        "pooled_latent": ("bf16", (rows, s.head_dim)),
        "index_key": ("bf16", (rows, s.index_dim)),
    }


def _index_shapes(s: Sizes, c: ModelConfig, rows: int, entries: int) -> Shapes:
    return {
        "index_q": ("bf16", (rows, s.index_heads, s.index_dim)),
        "index_q.meaning": ("bf16", (rows, s.index_heads, s.index_dim)),
        "index_weights": ("bf16", (rows, s.index_heads)),
        "scores": ("bf16", (rows, -(-entries // 8) * 8)),
        "blocks": ("i32", (rows, c.candidate_topk_blocks)),
        "inside": ("i32", (rows,)),
        "selected": ("i32", (rows, c.index_topk)),
    }


def _expert_shapes(s: Sizes, c: ModelConfig, rows: int) -> Shapes:
    picks, experts = c.n_activated_experts, c.n_routed_experts
    if c.n_mtp_layers:
        picks, experts = max(picks, c.dspark_n_activated_experts), max(experts, c.dspark_n_routed_experts)
    return {
        "router": ("f32", (rows, experts)),
        "biased": ("f32", (min(rows, FEW_ROWS), experts)),
        "chosen": ("i32", (rows, picks)),
        "chosen_weights": ("f32", (rows, picks)),
        "arrived": ("i32", (1,)),
        "used": ("i32", (1,)),
        "expert": ("i32", (experts,)),
        "first": ("i32", (experts + 1,)),
        "order": ("i32", (rows * picks,)),
        "inner": ("bf16", (rows * picks, s.inter)),
        "routed": ("bf16", (rows * picks, s.dim)),
        "shared.inner": ("bf16", (rows, s.inter)),
        "shared": ("bf16", (rows, s.dim)),
    }


def _choice_shapes(s: Sizes, c: ModelConfig, rows: int, logit_rows: int) -> Shapes:
    """Logits, and what sampling finds of them."""
    return {
        "final": ("bf16", (rows, s.dim)),
        "logits": ("f32", (logit_rows, c.vocab_size)),
        "picked": ("i32", (logit_rows,)),
        "peak": ("f32", (logit_rows,)),
        "least": ("f32", (logit_rows,)),
        "last": ("i32", (logit_rows,)),
        "mass": ("i64", (logit_rows,)),
        "confidence": ("f32", (logit_rows,)),
    }


def _quantised(name: str, rows: int, width: int) -> Shapes:
    """An activation and its FP8 form."""
    return {
        name: ("bf16", (rows, width)),
        f"{name}.codes": ("u8", (rows, width)),
        f"{name}.scales": ("u8", (rows, width // 32)),
    }


class Workspace:
    """The arrays of one pipeline by their own names."""

    def __init__(self, arena: Arena, pipeline: str, instead: Mapping[str, Array] | None = None) -> None:
        """`instead` names arrays that stand in for the pipeline's own."""
        self._arena, self._prefix, self._instead = arena, f"{pipeline}.", dict(instead or {})

    def __getitem__(self, name: str) -> Array:
        return self._instead[name] if name in self._instead else self._arena[self._prefix + name]

    def names(self) -> Iterator[str]:
        """All names."""
        return (name.removeprefix(self._prefix) for name in self._arena.regions if name.startswith(self._prefix))

    def quantised(self, name: str) -> dict[str, Array]:
        """The FP8 form of activation `name`, as launches name it."""
        return {"codes": self[f"{name}.codes"], "scales": self[f"{name}.scales"]}
