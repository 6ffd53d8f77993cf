"""Time of every kernel at the released sizes, beside the time that its bytes take at the copy bandwidth of this GPU.

Each kernel runs as in a verify step of one stream: six rows, here with all heads and experts on one GPU. Launches are
captured in a graph and go round several sets of weights, so that these come from memory, not from the cache. A launch
alone costs 1 to 2 µs, which no small kernel can go below; its floor counts bytes only.

    python bench/kernels.py [--rows 6] [--context-tokens 65536] [--only TEXT]
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cupy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import publish
from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.sizes import from_config
from dsuf.cuda.table import SOURCES
from dsuf.cuda.toolchain import find_toolchain

CONFIG = load_config(RELEASED / "config.json")
SIZES = from_config(CONFIG)
N = SIZES.named()
COLD_BYTES = 256 << 20  # several times the second-level cache
LAUNCHES, REPLAYS = 40, 25
FLOOR_THAT_COUNTS_US = 0.5  # below it the launch alone decides, and a ratio would say nothing

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
        live | quantised | {"pre": mixes["pre"], "weight": bf16(dim)},
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
        "rotate_rows",
        "queries",
        lambda: {"x": bf16(rows, N["heads"], N["head_dim"])},
        live
        | {
            "positions": cupy.arange(rows),
            "frequencies": f32(N["rope_dim"] // 2),
            "heads": N["heads"],
            "width": N["head_dim"],
            "inverse": 0,
        },
        rows * N["heads"] * N["rope_dim"] * 4,
    )


def linear_cases(rows: int) -> Iterator[Case]:
    """Linears whose weights are read once."""
    live = {"live": i32([rows]), "rows": rows}
    for note, entry, k, n in (
        ("wq_a", "dim", N["dim"], N["q_lora"]),
        ("wq_b", "q_lora", N["q_lora"], N["heads"] * N["head_dim"]),
        ("wkv", "dim", N["dim"], N["head_dim"]),
        ("wo_b", "o", N["o_width"], N["dim"]),
        ("shared w1, w3", "dim", N["dim"], 2 * N["inter"]),
        ("shared w2", "inter", N["inter"], N["dim"]),
        ("Engram", "engram", N["engram_width"], (N["streams"] + 1) * N["dim"]),
    ):
        yield Case(
            f"project_fp8_{entry}",
            note,
            lambda n=n, k=k: {"weight": u8(n, k), "weight_scale": e8m0(-(-n // 32), k // 32)},
            live | {"codes": u8(rows, k), "scales": e8m0(rows, k // 32), "out": bf16(rows, n), "n": n},
            n * k * 1025 // 1024,
        )
    for note, n in (("router", CONFIG.n_routed_experts), ("LM head", CONFIG.vocab_size)):
        yield Case(
            "project_bf16_dim",
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
        live | {"x": bf16(rows, N["heads"], N["head_dim"]), "out": bf16(rows, N["o_width"])},
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
    kernels.launch("route_experts", **live, **sizes, **routed, logits=logits, bias=bias)
    kernels.launch("group_experts", **grouped, **sizes, chosen=routed["chosen"], rows=rows)
    used = int(grouped["used"][0])
    slots = min(experts, pairs)
    note = f"{used} of {experts} experts"
    yield Case(
        "route_experts",
        "",
        lambda: {"bias": bias.copy()},
        live | sizes | routed | {"logits": logits},
        4 * rows * experts,
    )
    yield Case("group_experts", "", lambda: {"chosen": routed["chosen"]}, sizes | grouped | {"rows": rows}, 8 * pairs)
    w13 = {
        "w1": u8(experts, inter, dim // 2),
        "w1_scale": e8m0(experts, inter, dim // 32),
        "w3": u8(experts, inter, dim // 2),
        "w3_scale": e8m0(experts, inter, dim // 32),
    }
    yield Case(
        "experts_up",
        note,
        lambda: w13,
        grouped
        | {
            "codes": u8(rows, dim),
            "scales": e8m0(rows, dim // 32),
            "weights": routed["weights"],
            "inner": bf16(pairs, inter),
            "slots": slots,
            "picks": picks,
        },
        used * inter * dim * 17 // 16,
    )
    w2 = {"w2": u8(experts, dim, inter // 2), "w2_scale": e8m0(experts, dim, inter // 32)}
    yield Case(
        "experts_down",
        note,
        lambda: w2,
        grouped
        | {"codes": u8(pairs, inter), "scales": e8m0(pairs, inter // 32), "out": bf16(pairs, dim), "slots": slots},
        used * inter * dim * 17 // 32,
    )
    yield Case(
        "swiglu_rows",
        "shared",
        lambda: {"hidden": bf16(rows, 2 * inter)},
        live | {"inner": bf16(rows, inter)},
        rows * inter * 6,
    )
    yield Case(
        "combine_experts",
        "",
        lambda: {"routed": bf16(rows, picks, dim)},
        live | {"shared": bf16(rows, dim), "out": bf16(rows, dim), "picks": picks},
        rows * dim * 2 * (picks + 2),
    )


def cache_cases(rows: int, context_tokens: int) -> Iterator[Case]:
    """What reads and writes caches, Engram, and the choice of a token."""
    dim, width, entries = N["head_dim"], N["index_dim"], context_tokens // 2
    live, topk, window = {"live": i32([rows]), "rows": rows}, CONFIG.index_topk, CONFIG.window_size
    slots = cupy.concatenate(
        [cupy.tile(cupy.arange(window), (rows, 1)), cupy.sort(cupy.random.randint(0, entries, (rows, topk)), axis=1)],
        axis=1,
    )
    yield Case(
        "attend_sparse",
        f"{window} + {topk} slots",
        lambda: {"window": u8(window, dim * 33 // 32), "entries": u8(entries, dim * 9 // 16)},
        live
        | {
            "q": bf16(rows, N["heads"], dim),
            "sink": f32(N["heads"]),
            "out": bf16(rows, N["heads"], dim),
            "slots": i32(slots),
            "heads": N["heads"],
            "window_slots": window,
            "entry_slots": topk,
        },
        rows * (window * dim * 33 // 32 + topk * dim * 9 // 16 + N["heads"] * dim * 4),
    )
    reachable = {"reachable": i32([entries] * rows), "entries": entries}
    scores = cupy.asarray(bf16(rows, entries).astype(cupy.uint32) << 16).view(cupy.float32)
    yield Case(
        "score_index",
        f"{entries} entries",
        lambda: {"keys": u8(entries, width * 17 // 32)},
        live
        | reachable
        | {
            "q": bf16(rows, N["index_heads"], width),
            "weights": bf16(rows, N["index_heads"]),
            "scores": f32(rows, entries),
        },
        entries * (width * 17 // 32 + 4 * rows),
    )
    yield Case(
        "select_rows",
        f"{entries} entries",
        lambda: {"scores": scores.copy()},
        live | reachable | {"selected": i32(cupy.zeros((rows, topk))), "count": topk},
        4 * rows * entries,
    )
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
    yield Case(
        "pick_tokens",
        "",
        lambda: {"logits": f32(rows, CONFIG.vocab_size)},
        live | {"picked": i32([0] * rows), "best": f32(rows), "vocabulary": CONFIG.vocab_size},
        4 * rows * CONFIG.vocab_size,
    )


def time_graph(record: Callable[[int], None], stream: Any) -> list[float]:
    """Microseconds a launch, one figure a replay, of what `record` queues on a stream."""
    stream.begin_capture()
    record(stream.ptr)
    graph = stream.end_capture()
    times = []
    for _ in range(REPLAYS + 3):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / LAUNCHES)
    return sorted(times[3:])


def copy_bytes_per_us(stream: Any) -> float:
    """Bytes read and written a microsecond by a copy of 2 GiB within the device."""
    source, target = cupy.zeros(2 << 30, cupy.uint8), cupy.zeros(2 << 30, cupy.uint8)
    with stream:
        start, stop, times = cupy.cuda.Event(), cupy.cuda.Event(), []
        for _ in range(10):
            start.record(stream)
            cupy.copyto(target, source)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return 2 * source.nbytes / statistics.median(times)


def main() -> None:
    """Measure, print, write `results/kernels.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context-tokens", type=int, default=65_536)
    parser.add_argument("--only", default="", help="kernels whose name holds this text; nothing is written")
    args = parser.parse_args()
    device = Device()
    kernels = Kernels(device, find_toolchain().build_all(SOURCES, device.sm, SIZES.macros()), SIZES)
    stream = cupy.cuda.Stream(non_blocking=True)
    rate = copy_bytes_per_us(stream)
    rows = []
    for cases in (
        stream_cases(args.rows),
        linear_cases(args.rows),
        expert_cases(args.rows, kernels),
        cache_cases(args.rows, args.context_tokens),
    ):
        for case in cases:
            if args.only in case.entry:
                rows.append(measure(case, args.rows, kernels, stream, rate))
                cupy.get_default_memory_pool().free_all_blocks()
    label = f"{device.name}, copies {rate / 1e6:.2f} TB/s"
    if args.only:
        print(label, *rows, sep="\n")
    else:
        publish("kernels", rows, label)


def measure(case: Case, rows: int, kernels: Kernels, stream: Any, rate: float) -> dict[str, object]:
    """The row of one case."""
    count = max(1, min(LAUNCHES, COLD_BYTES // max(1, case.moved_bytes)))
    sets = [case.draw() for _ in range(count)]
    cupy.cuda.Device().synchronize()

    def record(pointer: int) -> None:
        for i in range(LAUNCHES):
            kernels.launch(case.entry, pointer, **case.common, **sets[i % count])

    times, floor = time_graph(record, stream), case.moved_bytes / rate
    median = statistics.median(times)
    return {
        "kernel": case.entry,
        "what": case.note,
        "rows": rows,
        "megabytes": round(case.moved_bytes / 1e6, 3),
        "median_us": round(median, 2),
        "p90_us": round(times[int(0.9 * (len(times) - 1))], 2),
        "floor_us": round(floor, 2),
        "ratio": round(median / floor, 1) if floor >= FLOOR_THAT_COUNTS_US else None,
    }


if __name__ == "__main__":
    main()
