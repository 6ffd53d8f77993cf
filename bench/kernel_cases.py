"""What the kernel benchmark times of a layer: streams, linears, experts, caches; at the released sizes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import cupy

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.kernels import Kernels
from dsuf.cuda.sizes import from_config
from dsuf.cuda.workspace import FEW_ROWS

CONFIG = load_config(RELEASED / "config.json")
SIZES = from_config(CONFIG)
N = SIZES.named()

Values = Mapping[str, Any]


class Case(NamedTuple):
    """A launch to time: what varies between sets, what is common, and the bytes that it must move."""

    entry: str
    note: str
    draw: Callable[[], Values]
    common: Values
    moved_bytes: int


def u8(*shape: int) -> Any:
    """Codes without NaN."""
    return cupy.random.randint(0, 0x70, shape, dtype=cupy.uint8)


def e8m0(*shape: int) -> Any:
    """Scales of 2^-7."""
    return cupy.full(shape, 120, cupy.uint8)


def bf16(*shape: int) -> Any:
    """Normal numbers."""
    return (cupy.random.standard_normal(shape, dtype=cupy.float32).view(cupy.uint32) >> 16).astype(cupy.uint16)


def f32(*shape: int) -> Any:
    """Normal numbers."""
    return cupy.random.standard_normal(shape, dtype=cupy.float32)


def i32(values: Any) -> Any:
    """Given numbers."""
    return cupy.asarray(values, cupy.int32)


def stream_cases(rows: int) -> Iterator[Case]:
    """What surrounds a sublayer."""
    s, dim, outputs = N["streams"], N["dim"], N["outputs"]
    live = {"live": i32([rows]), "rows": rows}
    streams, partial = bf16(rows, s, dim), f32(rows, N["splits"], outputs + 1)
    mixes = {"pre": f32(rows, s), "post": f32(rows, s), "comb": f32(rows, s, s)}
    quantised = {"y": bf16(rows, dim), "codes": u8(rows, dim), "scales": u8(rows, dim // 32)}
    yield Case(
        "project_streams",
        "",
        lambda: {"fn": f32(outputs, s * dim)},
        live | {"streams": streams, "partial": partial},
        4 * outputs * s * dim + 2 * streams.size,
    )
    yield Case(
        "mix_streams",
        "",
        lambda: {"base": f32(outputs), "scale": f32(3)},
        live | mixes | {"partial": partial},
        4 * partial.size,
    )
    yield Case(
        "collapse_norm",
        "",
        lambda: {"streams": bf16(rows, s, dim)},
        live | quantised | {"pre": mixes["pre"], "weight": bf16(dim), "meaning": bf16(rows, dim)},
        rows * dim * (2 * s + 3),
    )
    yield Case(
        "expand_streams",
        "",
        lambda: {"streams": bf16(rows, s, dim)},
        live | {"branch": bf16(rows, dim), "post": mixes["post"], "comb": mixes["comb"], "out": bf16(rows, s, dim)},
        rows * dim * (4 * s + 2),
    )
    yield Case("norm_dim", "", lambda: {"x": bf16(rows, dim)}, live | quantised | {"weight": bf16(dim)}, rows * dim * 5)
    yield Case(
        "quantize_fp8",
        "",
        lambda: {"x": bf16(rows, dim)},
        live
        | {
            "codes": u8(rows, dim),
            "scales": u8(rows, dim // 32),
            "meaning": None,
            "place": None,
            "codes_stride": dim,
            "scales_stride": dim // 32,
            "width": dim,
        },
        rows * dim * 3,
    )
    yield Case(
        "expand_collapse",
        "",
        lambda: {"streams": bf16(rows, s, dim)},
        live
        | quantised
        | {"branch": bf16(rows, dim), "post": mixes["post"], "comb": mixes["comb"], "out": bf16(rows, s, dim)}
        | {"pre": mixes["pre"], "weight": bf16(dim), "meaning": bf16(rows, dim)},
        rows * dim * (4 * s + 7),
    )
    latents, width = N["q_lora"], N["head_dim"]
    yield Case(
        "norm_latents",
        "",
        lambda: {"latent": bf16(rows, latents), "key": bf16(rows, width)},
        live
        | {
            "weight": bf16(latents),
            "query": bf16(rows, latents),
            "codes": u8(rows, latents),
            "scales": u8(rows, latents // 32),
            "key_weight": bf16(width),
            "turned": None,
            "packed": u8(rows, width * 33 // 32),
            "place": cupy.arange(rows),
            "angles": f32(rows, N["rope_dim"]),
            "row_bytes": width * 33 // 32,
        },
        rows * (5 * latents + 3 * width),
    )


def linear_cases(rows: int) -> Iterator[Case]:
    """Linears whose weights are read once."""
    live = {"live": i32([rows]), "rows": rows}
    for note, entry, k, n in (
        ("wq_a", "dim", N["dim"], N["q_lora"]),
        ("wq_b", "q_lora", N["q_lora"], N["heads"] * N["head_dim"]),
        ("wkv", "dim", N["dim"], N["head_dim"]),
        ("wo_b", "o", N["o_width"], N["dim"]),
        ("Engram", "engram", N["engram_width"], (N["streams"] + 1) * N["dim"]),
    ):
        yield Case(
            f"project_fp8_{entry}",
            note,
            lambda n=n, k=k: {"weight": u8(n, k), "weight_scale": e8m0(-(-n // 32), k // 32)},
            live
            | {"codes": u8(rows, k), "scales": e8m0(rows, k // 32), "out": bf16(rows, n), "n": n}
            | {"second": None, "second_n": 0},
            n * k * 1025 // 1024,
        )
    for note, entry, n in (("router", "few", CONFIG.n_routed_experts), ("LM head", "dim", CONFIG.vocab_size)):
        yield Case(
            f"project_bf16_{entry}",
            note,
            lambda n=n: {"weight": bf16(n, N["dim"])},
            live | {"x": bf16(rows, N["dim"]), "out": f32(rows, n), "rounded": None, "n": n},
            2 * n * N["dim"],
        )
    k = N["group_width"]
    yield Case(
        "project_groups",
        "wo_a",
        lambda: {"weight": u8(N["o_width"], k), "weight_scale": e8m0(N["o_width"] // 32, k // 32)},
        live
        | {"x": bf16(rows, N["heads"], N["head_dim"]), "out": None}
        | {"codes": u8(rows, N["o_width"]), "scales": u8(rows, N["o_width"] // 32)},
        N["o_width"] * k,
    )


def expert_cases(rows: int, kernels: Kernels) -> Iterator[Case]:
    """Routing, and the experts that random rows choose."""
    experts, picks, dim, inter = CONFIG.n_routed_experts, CONFIG.n_activated_experts, N["dim"], N["inter"]
    live, pairs = {"live": i32([rows]), "rows": rows}, rows * picks
    routed = {"chosen": i32(cupy.zeros((rows, picks))), "weights": f32(rows, picks)}
    grouped = {
        "used": i32([0]),
        "expert": i32(cupy.zeros(experts)),
        "first": i32(cupy.zeros(experts + 1)),
        "order": i32(cupy.zeros(pairs)),
    }
    logits, bias = f32(rows, experts), f32(experts) * 0.01
    sizes = {"picks": picks, "experts": experts}
    arrived = i32([0])
    kernels.launch("route_experts", **live, **sizes, **routed, **grouped, arrived=arrived, logits=logits, bias=bias)
    used = int(grouped["used"][0])
    slots = min(experts, pairs)
    note = f"{used} of {experts} experts"
    yield Case(
        "route_experts",
        "",
        lambda: {"bias": bias.copy()},
        live | sizes | routed | grouped | {"logits": logits, "arrived": arrived},
        4 * rows * experts,
    )
    if rows <= FEW_ROWS:
        rated = {"scores": logits.copy(), "biased": logits + bias}
        yield Case(
            "score_input",
            "router",
            lambda: {"weight": bf16(experts, dim)},
            live | rated | {"x": bf16(rows, dim), "bias": bias, "experts": experts},
            2 * experts * dim,
        )
        own = {name: array.copy() for name, array in (routed | grouped).items()}
        yield Case(
            "choose_few",
            "",
            lambda: {"scores": logits.copy()},
            live | sizes | own | {"biased": logits + bias},
            8 * rows * experts,
        )
    yield Case("group_experts", "", lambda: {"chosen": routed["chosen"]}, sizes | grouped | {"rows": rows}, 8 * pairs)
    w13 = {
        "w1": u8(experts, inter, dim // 2),
        "w1_scale": e8m0(experts, inter, dim // 32),
        "w3": u8(experts, inter, dim // 2),
        "w3_scale": e8m0(experts, inter, dim // 32),
    }
    count = w13["w1"].size // 16
    yield Case(
        "arrange_codes",
        f"{experts} experts",
        lambda: {"codes": w13["w1"].copy()},
        {"count": count},
        32 * count,
    )
    yield Case(
        "experts_up",
        note,
        lambda: w13,
        grouped
        | {
            "x": bf16(rows, dim),
            "weights": routed["weights"],
            "inner": bf16(pairs, inter),
            "shared": u8(2 * inter, dim),
            "shared_scale": e8m0(2 * inter // 32, dim // 32),
            "shared_inner": bf16(rows, inter),
            "slots": slots,
            "picks": picks,
        }
        | live,
        used * inter * dim * 17 // 16 + 2 * inter * dim,
    )
    w2 = {"w2": u8(experts, dim, inter // 2), "w2_scale": e8m0(experts, dim, inter // 32)}
    yield Case(
        "experts_down",
        note,
        lambda: w2,
        grouped
        | {"inner": bf16(pairs, inter), "out": bf16(pairs, dim), "slots": slots, "shared": u8(dim, inter)}
        | {"shared_scale": e8m0(dim // 32, inter // 32), "shared_inner": bf16(rows, inter)}
        | {"shared_out": bf16(rows, dim)}
        | live,
        used * inter * dim * 17 // 32 + inter * dim,
    )
    yield Case(
        "combine_experts",
        "",
        lambda: {"routed": bf16(rows, picks, dim)},
        live | {"shared": bf16(rows, dim), "out": bf16(rows, dim), "picks": picks},
        rows * dim * 2 * (picks + 2),
    )


def cache_cases(rows: int, context_tokens: int) -> Iterator[Case]:
    """What reads and writes caches, and Engram."""
    dim, entries = N["head_dim"], context_tokens // 2
    live, topk, window = {"live": i32([rows]), "rows": rows}, CONFIG.index_topk, CONFIG.window_size
    yield Case(
        "attend_sparse",
        f"{window} + {topk} slots",
        lambda: {"window": u8(window, dim * 33 // 32), "entries": u8(entries, dim * 9 // 16)},
        live
        | {
            "q": bf16(rows, N["heads"], dim),
            "fresh": None,
            "sink": f32(N["heads"]),
            "angles": f32(rows, N["rope_dim"]),
            "out": bf16(rows, N["heads"], dim),
            "slots": i32(cupy.tile(cupy.arange(window), (rows, 1))),
            "selected": i32(cupy.sort(cupy.random.randint(0, entries, (rows, topk)), axis=1)),
            "heads": N["heads"],
            "window_slots": window,
            "entry_slots": topk,
            "early": 0,
        },
        rows * (window * dim * 33 // 32 + topk * dim * 9 // 16 + N["heads"] * dim * 4),
    )
    yield from index_cases(rows, entries)
    yield Case(
        "compress_rows",
        "",
        lambda: {"kv": f32(rows, dim)},
        live
        | {
            "gate": f32(rows, dim),
            "halves": f32(16, 2, dim),
            "keep": cupy.full(rows, -1),
            "partner": cupy.full(rows, -2),
            "pooled": bf16(rows, dim),
        },
        rows * dim * 18,
    )
    table_rows, columns = 1 << 20, N["engram_columns"]
    yield Case(
        "gather_engram",
        "",
        lambda: {"table": u8(table_rows, N["engram_dim"])},
        live
        | {
            "history": cupy.random.randint(0, 99_092, (rows, N["engram_shifts"])),
            "primes": cupy.full(columns, 43_669),
            "multipliers": cupy.random.randint(1, 1 << 45, N["engram_shifts"]),
            "offsets": cupy.arange(columns) * 43_669,
            "table_scale": e8m0(table_rows, N["engram_dim"] // 32),
            "codes": u8(rows, N["engram_width"]),
            "scales": u8(rows, N["engram_width"] // 32),
        },
        rows * N["engram_width"] * 33 // 16,
    )
    s, channels = N["streams"], N["dim"]
    yield Case(
        "gate_engram",
        "",
        lambda: {"projected": bf16(rows, s + 1, channels)},
        live
        | {
            "streams": bf16(rows, s, channels),
            "q_weight": bf16(s, channels),
            "k_weight": bf16(s, channels),
            "out": bf16(rows, s, channels),
        },
        rows * channels * 2 * (3 * s + 1),
    )


def index_cases(rows: int, entries: int) -> Iterator[Case]:
    """Scores of one turn's entries through its page table, and what is selected of them."""
    width, page_rows, blocks = N["index_dim"], 64, CONFIG.candidate_topk_blocks
    live, seen = {"live": i32([rows]), "rows": rows}, i32([entries] * rows)
    paged = {
        "row_slot": i32([0] * rows),
        "table": i32(cupy.random.permutation(entries // page_rows)),
        "table_pages": entries // page_rows,
        "page_rows": page_rows,
        "block_size": CONFIG.candidate_block_size,
    }
    whole = {"blocks": None, "block_count": 0, "reachable": seen, "entries": entries}
    scores = bf16(rows, entries)
    queries = {"q": bf16(rows, N["index_heads"], width), "weights": bf16(rows, N["index_heads"])}
    yield Case(
        "score_index",
        f"{entries} entries",
        lambda: {"keys": u8(entries, width * 17 // 32)},
        live | paged | whole | queries | {"scores": bf16(rows, entries)},
        entries * (width * 17 // 32 + 2 * rows),
    )
    some = min(blocks, entries // paged["block_size"])
    inside = some * paged["block_size"]
    chosen = cupy.sort(
        cupy.argsort(cupy.random.random((rows, entries // paged["block_size"])), axis=1)[:, :some], axis=1
    )
    yield Case(
        "score_index",
        f"{some} blocks",
        lambda: {"keys": u8(entries, width * 17 // 32)},
        live
        | paged
        | queries
        | {
            "blocks": i32(chosen),
            "block_count": some,
            "reachable": i32([inside] * rows),
            "entries": inside,
            "scores": bf16(rows, inside),
        },
        rows * inside * (width * 17 // 32 + 2),
    )
    yield Case(
        "select_rows",
        f"{entries} entries",
        lambda: {"scores": scores.copy()},
        live | paged | whole | {"selected": i32(cupy.zeros((rows, CONFIG.index_topk))), "count": CONFIG.index_topk},
        2 * rows * entries,
    )
    yield Case(
        "mark_blocks",
        f"{entries} entries",
        lambda: {"scores": scores.copy()},
        live
        | {
            "reachable": seen,
            "entries": entries,
            "blocks": i32(cupy.zeros((rows, blocks))),
            "inside": i32([0] * rows),
            "block_count": blocks,
            "block_size": paged["block_size"],
        },
        2 * rows * entries,
    )
