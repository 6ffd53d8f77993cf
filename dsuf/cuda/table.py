"""The table of kernels: where each stands, what it takes, and the geometry of its launch."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dsuf.cuda import contract
from dsuf.cuda.contract import Params

Names = Mapping[str, int]
Grid = Callable[[Names], tuple[int, int]]

MANY_ROWS = 32
"""From so many rows on an entry that holds more of them at once is the faster one (kernels/README.md)."""


class Kernel(NamedTuple):
    """An entry of a source: its parameters, threads a block, and grid and shared bytes from fields and sizes.

    `aliases` gives the shapes' `k` for an entry that is compiled for one contraction width. `many` names the entry that
    serves `MANY_ROWS` rows and more in its place, with the same parameters, geometry and results.
    """

    entry: str
    source: str
    params: Params
    threads: int
    grid: Grid
    aliases: Mapping[str, str] = {}
    shared_bytes: Callable[[Names], int] = lambda n: 0
    many: str = ""

    def pick_entry(self, names: Names) -> str:
        """The entry for a launch with these fields."""
        return self.many if self.many and names["rows"] >= MANY_ROWS else self.entry

    def names(self, sizes: Names) -> dict[str, int]:
        """`sizes` with this entry's own name for its contraction width."""
        return dict(sizes) | {alias: sizes[name] for alias, name in self.aliases.items()}


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _tiles(n: Names) -> tuple[int, int]:
    """Sixteen outputs by eight rows."""
    return _blocks(n["n"], 16), _blocks(n["rows"], 8)


def _wide_tiles(n: Names) -> tuple[int, int]:
    """Sixteen outputs by four times eight rows."""
    return _blocks(n["n"] + n["second_n"], 16), _blocks(n["rows"], 32)


def _each_row(n: Names) -> tuple[int, int]:
    return n["rows"], 1


def _cluster_a_row(n: Names) -> tuple[int, int]:
    """The eight blocks of a cluster for every row."""
    return 8, n["rows"]


def _wide_rows(n: Names) -> tuple[int, int]:
    """256 threads of eight channels."""
    return _blocks(n["dim"], 8 * 256), n["rows"]


def _channels_a_row(n: Names) -> tuple[int, int]:
    """256 threads of a channel."""
    return _blocks(n["dim"], 256), n["rows"]


def _once(n: Names) -> tuple[int, int]:
    return 1, 1


def _quantisers() -> list[Kernel]:
    def grid(n: Names) -> tuple[int, int]:
        return _blocks(n["width"], 8 * 256), n["rows"]

    names = ("quantize_fp8", "quantize_index", "quantize_entry")
    return [Kernel(name, "quantize_rows", contract.QUANTIZE_ROWS, 256, grid) for name in names]


def _latents() -> list[Kernel]:
    widths = {"store_window": "head_dim", "store_entry": "head_dim", "store_index_key": "index_dim"}
    return [
        Kernel("norm_dim", "norm_quantize", contract.NORM_QUANTIZE, 256, _each_row, {"k": "dim"}),
        *(
            Kernel(name, "store_rows", contract.STORE_ROWS, 256, _each_row, {"k": width})
            for name, width in widths.items()
        ),
        Kernel(
            "norm_latents", "store_rows", contract.NORM_LATENTS, 256, lambda n: (n["rows"], 2), {"k": "head_dim"}
        ),
        Kernel("place_angles", "place_angles", contract.PLACE_ANGLES, 128, _each_row),
    ]  # fmt: skip


def _projections() -> list[Kernel]:
    fp8 = {
        "dim": ("dim", 16), "q_lora": ("q_lora", 4), "o": ("o_width", 8),
        "engram": ("engram_width", 8), "taps": ("tap_width", 8),
    }  # fmt: skip
    return [
        *(
            Kernel(
                f"project_fp8_{name}{ending}", "project_fp8", contract.PROJECT_FP8, 32 * warps, _wide_tiles,
                {"k": width}, many="" if ending else f"project_fp8_{name}_many",
            )
            for name, (width, warps) in fp8.items() for ending in ("", "_many")
        ),
        Kernel("announce_fp8_o", "project_fp8", contract.ANNOUNCE_FP8, 256, _wide_tiles, {"k": "o_width"}),
        *(
            Kernel(f"project_bf16_{name}", "project_bf16", contract.PROJECT_BF16, 256, _tiles, {"k": name})
            for name in ("dim", "head_dim")
        ),
        Kernel(
            "project_bf16_few", "project_bf16", contract.PROJECT_BF16, 128,
            lambda n: (8 * _blocks(n["n"], 16), _blocks(n["rows"], 8)), {"k": "dim"},
        ),
        Kernel(
            "project_groups", "project_groups", contract.PROJECT_GROUPS, 256,
            lambda n: (4 * n["o_width"] // 32, _blocks(n["rows"], 32)), {"k": "group_width"},
        ),
    ]  # fmt: skip


def _streams() -> list[Kernel]:
    return [
        Kernel(
            "project_streams", "project_streams", contract.PROJECT_STREAMS, 256,
            lambda n: (n["splits"], _blocks(n["rows"], 8)),
        ),
        Kernel("mix_streams", "mix_streams", contract.MIX_STREAMS, 256, _each_row),
        Kernel("collapse_norm", "collapse_norm", contract.COLLAPSE_NORM, 128, _cluster_a_row),
        Kernel("expand_streams", "expand_streams", contract.EXPAND_STREAMS, 256, _wide_rows),
        Kernel("expand_collapse", "expand_streams", contract.EXPAND_COLLAPSE, 128, _cluster_a_row),
        Kernel("sum_expand", "expand_streams", contract.SUM_EXPAND, 256, _wide_rows),
        Kernel("sum_expand_collapse", "expand_streams", contract.SUM_EXPAND_COLLAPSE, 128, _cluster_a_row),
        Kernel("gather_engram", "gather_engram", contract.GATHER_ENGRAM, 256, _each_row),
        Kernel("gate_engram", "gate_engram", contract.GATE_ENGRAM, 256, lambda n: (n["streams"], n["rows"])),
    ]  # fmt: skip


def expert_split(width: int) -> int:
    """Of a block's eight warps in the expert kernels, how many share a contraction of this width."""
    return 8 if width > 2560 else 4 if width > 1280 else 2 if width > 640 else 1


def expert_tile_bytes(width: int) -> int:
    """Sixteen rows of FP4 weights of this width with their scales, as the expert kernels keep them (`Fp4Tile`)."""
    split, (chunks, left) = expert_split(width), divmod(width // 32, 4)
    return split * max(1, _blocks(chunks, split)) * 1024 + max(1, left) * 256 + 16 * (width // 32)


def _up_bytes(n: Names) -> int:
    """The weights of a block."""
    return 8 // expert_split(n["dim"]) * expert_tile_bytes(n["dim"])


def _down_bytes(n: Names) -> int:
    """Sixteen pairs with their rows, and the weights of a block."""
    split = expert_split(n["inter"])
    return 64 + 32 * n["inter"] + (16 if split == 1 else 8 // split) * expert_tile_bytes(n["inter"])


def _up_grid(n: Names) -> tuple[int, int]:
    """Eight outputs a tile; 32 rows of the shared expert, then an expert each."""
    return _blocks(n["inter"], 8 * 8 // expert_split(n["dim"])), _blocks(n["rows"], 32) + n["slots"]


def _down_grid(n: Names) -> tuple[int, int]:
    """Sixteen outputs a tile; two tiles a warp that shares with none."""
    split = expert_split(n["inter"])
    return _blocks(n["dim"], 16 * (16 if split == 1 else 8 // split)), _blocks(n["rows"], 32) + n["slots"]


def _experts() -> list[Kernel]:
    return [
        Kernel("route_experts", "route_experts", contract.ROUTE_EXPERTS, 512, lambda n: (_blocks(n["rows"], 8) * 8, 1)),
        Kernel(
            "score_input", "score_input", contract.SCORE_INPUT, 128, lambda n: (8 * _blocks(n["experts"], 16), 1)
        ),
        Kernel("choose_few", "choose_few", contract.CHOOSE_FEW, 256, _once),
        Kernel("group_experts", "group_experts", contract.GROUP_EXPERTS, 512, _once),
        Kernel("arrange_codes", "arrange_codes", contract.ARRANGE_CODES, 256, lambda n: (_blocks(n["count"], 256), 1)),
        Kernel("experts_up", "experts_up", contract.EXPERTS_UP, 256, _up_grid, shared_bytes=_up_bytes),
        Kernel("experts_down", "experts_down", contract.EXPERTS_DOWN, 256, _down_grid, shared_bytes=_down_bytes),
        Kernel("combine_experts", "combine_experts", contract.COMBINE_EXPERTS, 256, _channels_a_row),
        Kernel("announce_experts", "combine_experts", contract.ANNOUNCE_EXPERTS, 256, _channels_a_row),
    ]  # fmt: skip


def _attention_bytes(n: Names) -> int:
    """Eighty unpacked rows, and the largest of sixteen queries, three quarters of scores, and the sums of the heads."""
    pitch, held = 2 * (n["head_dim"] + 8), 16 if n["heads"] > 8 else 8
    return 80 * pitch + max(16 * pitch, 3 * 16 * 80 * 4, held * n["head_dim"] * 4)


def _score_grid(n: Names) -> tuple[int, int]:
    """A block for 256 entries and a row, or four rows where there would be more blocks than a GPU runs at once."""
    columns = _blocks(n["entries"], 256)
    return columns, n["rows"] if columns * n["rows"] <= 512 else _blocks(n["rows"], 4)


def _caches() -> list[Kernel]:
    return [
        Kernel(
            "attend_sparse", "attend_sparse", contract.ATTEND_SPARSE, 512,
            lambda n: (8 * _blocks(n["heads"], 16), n["rows"]), shared_bytes=_attention_bytes,
        ),
        Kernel(
            "index_queries", "index_queries", contract.INDEX_QUERIES, 256,
            lambda n: (_blocks(n["index_heads"] * n["index_dim"], 8 * 256), n["rows"]),
        ),
        Kernel("score_index", "score_index", contract.SCORE_INDEX, 256, _score_grid),
        Kernel("select_rows", "select_rows", contract.SELECT_ROWS, 512, _cluster_a_row),
        Kernel("mark_blocks", "select_rows", contract.MARK_BLOCKS, 512, _cluster_a_row),
        Kernel("compress_rows", "compress_rows", contract.COMPRESS_ROWS, 256, _each_row),
        Kernel("place_rows", "place_rows", contract.PLACE_ROWS, 128, _each_row),
        Kernel("keep_ids", "place_rows", contract.KEEP_IDS, 128, lambda n: (_blocks(n["rows"], 128), 1)),
        Kernel("embed_rows", "embed_rows", contract.EMBED_ROWS, 256, _wide_rows),
        Kernel("mean_streams", "embed_rows", contract.MEAN_STREAMS, 256, _wide_rows),
    ]  # fmt: skip


def _drafts() -> list[Kernel]:
    def block_rows(n: Names) -> tuple[int, int]:
        return n["batch"] * n["block"], 1

    return [
        Kernel("gather_turns", "place_drafts", contract.GATHER_TURNS, 1024, _once),
        Kernel("place_drafts", "place_drafts", contract.PLACE_DRAFTS, 128, block_rows),
        Kernel("place_verify", "place_drafts", contract.PLACE_VERIFY, 1024, _once),
        Kernel(
            "add_markov", "add_markov", contract.ADD_MARKOV, 256,
            lambda n: (_blocks(n["vocabulary"], 128), _blocks(n["batch"], 8)),
        ),
        Kernel("rate_drafts", "add_markov", contract.RATE_DRAFTS, 256, block_rows),
    ]  # fmt: skip


def _tokens() -> list[Kernel]:
    return [
        Kernel("pick_tokens", "pick_tokens", contract.PICK_TOKENS, 1024, _each_row),
        Kernel("sample_rows", "sample_rows", contract.SAMPLE_ROWS, 512, _cluster_a_row),
        Kernel("weigh_drafts", "judge_drafts", contract.JUDGE_DRAFTS, 512, lambda n: (8, n["batch"] * n["block"])),
        Kernel("judge_drafts", "judge_drafts", contract.JUDGE_DRAFTS, 512, lambda n: (8, n["batch"])),
        Kernel("advance_turns", "advance_turns", contract.ADVANCE_TURNS, 1024, _once),
    ]


def _extras() -> list[Kernel]:
    def places(n: Names) -> int:
        return n["batch"] * (n["block"] + 1)

    return [
        Kernel("ask_masks", "mask_logits", contract.ASK_MASKS, 1024, _once),
        Kernel("await_masks", "mask_logits", contract.AWAIT_MASKS, 32, _once),
        Kernel(
            "mask_logits", "mask_logits", contract.MASK_LOGITS, 64, lambda n: (_blocks(n["words"], 256), places(n))
        ),
        Kernel("rank_logits", "rank_logits", contract.RANK_LOGITS, 512, _cluster_a_row),
        Kernel(
            "rate_tokens", "rank_logits", contract.RATE_TOKENS, 128, lambda n: (_blocks(places(n), 128), 1)
        ),
    ]  # fmt: skip


def _peers() -> list[Kernel]:
    return [
        Kernel("announce_partial", "reduce_peers", contract.ANNOUNCE_PARTIAL, 32, _once),
        Kernel(
            "reduce_peers", "reduce_peers", contract.REDUCE_PEERS, 128, lambda n: (_blocks(n["width"], 1024), n["rows"])
        ),
        Kernel(
            "gather_peers", "reduce_peers", contract.GATHER_PEERS, 128, lambda n: (_blocks(n["width"], 512), n["rows"])
        ),
        Kernel("gather_rows", "reduce_peers", contract.GATHER_ROWS, 256, lambda n: (32, n["count"] * n["ranks"])),
    ]


_GROUPS = (_quantisers, _latents, _projections, _streams, _experts, _caches, _drafts, _tokens, _extras, _peers)

KERNELS: Mapping[str, Kernel] = {kernel.entry: kernel for group in _GROUPS for kernel in group()}
"""Every kernel by the name of its entry."""

SOURCES = sorted({kernel.source for kernel in KERNELS.values()})
"""File names under `kernels/any`, without the ending."""
