"""Time until the weights of one rank of eight are on the GPU, beside what the link to it allows.

A checkpoint of a rank's true shapes (about 38 GB with Engram tables cut to a million rows) is written to a folder in
memory, so that it is read from the page cache as on a second start. Then it is opened and checked, memory is allocated,
and the tensors are copied by the engine's own loader; some tensors are read back and compared. The limit is a copy of
1 GiB from pinned memory.

    python bench/load.py [--folder /dev/shm]
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupy
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rank import rank_of_eight
from bench.report import publish
from dsuf.checkpoint.config import ModelConfig
from dsuf.checkpoint.header import DTYPES
from dsuf.checkpoint.inventory import TensorSpec, expected_tensors
from dsuf.checkpoint.shards import INDEX_NAME, Checkpoint
from dsuf.checkpoint.writer import write_descriptions, write_safetensors
from dsuf.cuda.arena import Arena
from dsuf.cuda.kernels import Device
from dsuf.cuda.weights import Placement, load_weights, plan_weights

SHARDS = 48
WRITERS = 12
POOL_BYTES = 1 << 30
CHECKED = 200
GIB = 1 << 30


def write_rank(folder: Path, config: ModelConfig) -> None:
    """A checkpoint of `config` with random bytes; every tensor's come from another place of a pool."""
    pool = np.frombuffer(np.random.default_rng(1).bytes(POOL_BYTES), np.uint8)
    specs = list(expected_tensors(config))
    groups = [specs[start::SHARDS] for start in range(SHARDS)]
    names = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]

    def write(name: str, group: list[TensorSpec]) -> None:
        write_safetensors(folder / name, [(spec, draw(pool, spec)) for spec in group])

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, names, groups))
    where = {spec.name: name for name, group in zip(names, groups, strict=True) for spec in group}
    total = sum(spec.bytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX_NAME).write_bytes(msgspec.json.encode(index))
    write_descriptions(folder, config, b"{}")


def draw(pool: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    """A view of `pool` as the tensor `spec`, from a place that follows from its name."""
    start = zlib.crc32(spec.name.encode()) % (len(pool) - spec.bytes) // 8 * 8
    return pool[start : start + spec.bytes].view(DTYPES[spec.dtype]).reshape(spec.shape)


def copy_rate() -> float:
    """Bytes a second from pinned memory to the GPU."""
    source = cupy.cuda.alloc_pinned_memory(GIB)
    target, times = cupy.empty(GIB, cupy.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        target.data.copy_from_host(source.ptr, GIB)
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return GIB / statistics.median(times)


def compare(arena: Arena, placements: Iterable[Placement], checkpoint: Checkpoint) -> int:
    """How many of some tensors differ on the device from their file."""
    wrong = 0
    for placement in placements:
        stored = np.ascontiguousarray(checkpoint.tensor(placement.tensor)).reshape(-1).view(np.uint8)
        held = cupy.asarray(arena[placement.region]).reshape(-1).view(cupy.uint8)
        held = held[placement.offset_bytes : placement.offset_bytes + len(stored)]
        wrong += not np.array_equal(cupy.asnumpy(held), stored)
    return wrong


def measure(folder: Path, device: Device) -> dict[str, object]:
    """Open, allocate, copy; the row of the result."""
    limit, marks = copy_rate(), [time.perf_counter()]
    with Checkpoint.open(folder) as checkpoint:
        regions, placements = plan_weights(checkpoint.config, draft=True, engram_on_host=False)
        marks.append(time.perf_counter())
        with Arena(regions) as arena:
            cupy.cuda.Device().synchronize()
            marks.append(time.perf_counter())
            load_weights(arena, placements, checkpoint.tensor, device, lambda size: None)
            cupy.cuda.Device().synchronize()
            marks.append(time.perf_counter())
            chosen = np.random.default_rng(2).choice(len(placements), min(CHECKED, len(placements)), replace=False)
            wrong = compare(arena, [placements[i] for i in chosen], checkpoint)
    total = sum(region.bytes for region in regions)
    opened, allocated, copied = np.diff(marks)
    return {
        "gigabytes": round(total / 1e9, 2), "tensors": len(placements), "open_s": round(opened, 2),
        "allocate_s": round(allocated, 2), "copy_s": round(copied, 2), "ready_s": round(marks[-1] - marks[0], 2),
        "gb_per_s": round(total / copied / 1e9, 1), "limit_gb_per_s": round(limit / 1e9, 1),
        "share": round(total / copied / limit, 2), "compared": len(chosen), "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    """Write, measure, print, write `results/load.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where 38 GB have room")
    args = parser.parse_args()
    device, folder = Device(), Path(tempfile.mkdtemp(prefix="dsuf-load-", dir=args.folder))
    try:
        write_rank(folder, rank_of_eight())
        rows = [measure(folder, device) for _ in range(2)]
    finally:
        shutil.rmtree(folder)
    publish("load", rows, device.name)


if __name__ == "__main__":
    main()
