"""From released tensors to device memory: where each one goes, and the copies that bring it there.

The kernels read the released formats; of the routed experts, the bits of each word of FP4 codes are rearranged on the
device once all are there. Matrices that one launch multiplies lie behind each other
(the shared expert's w1 and w3, an attention's wq_a and wkv), and the routed experts of a layer lie in one array a
matrix. So a tensor is a run of bytes inside a region, and loading is some threads that copy runs out of the page cache
through pinned memory.
"""

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsuf.checkpoint.config import QUANTISED, ModelConfig
from dsuf.checkpoint.inventory import TensorSpec, expected_tensors
from dsuf.cuda.arena import Arena, Array, Region, view_host
from dsuf.cuda.driver import api as driver
from dsuf.cuda.driver import call
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.streams import Event, Stream

Bytes = NDArray[np.uint8]

COPY_THREADS = 8
STAGING_BYTES = 16 << 20
CODES_BYTES = 16
"""What a thread of `arrange_codes` takes."""

_KINDS = {"BF16": "bf16", "F32": "f32", "F8_E4M3": "u8", "F8_E8M0": "u8", "I8": "u8"}
_EXPERT = re.compile(r"(.+\.ffn\.experts)\.(\d+)\.(w[123]\.\w+)")
_CODES = re.compile(r".+\.ffn\.experts\.w[123]\.weight")
_SHARED = re.compile(r"(.+\.ffn\.shared_experts)\.w([13])\.(\w+)")
_LATENTS = re.compile(r"(.+\.attn)\.(wq_a|wkv)\.(weight|scale)")
# What the text path never reads.
_UNREAD = re.compile(r"vision\.|aligner\.|image_(start|end|newline)|.+\.gate\.bias_vl")


class Placement(NamedTuple):
    """Tensor `tensor` begins `offset_bytes` into region `region`."""

    tensor: str
    region: str
    offset_bytes: int


def plan_weights(config: ModelConfig, *, draft: bool, engram_on_host: bool) -> tuple[list[Region], list[Placement]]:
    """The regions of all weights, and the place of every tensor in them; pure.

    Without `draft` the draft head is left out; with `engram_on_host` the Engram tables are in pinned host memory.
    """
    shapes: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}
    placements = []
    for spec in expected_tensors(config):
        if _UNREAD.match(spec.name) or (spec.part == "draft" and not draft):
            continue
        region, offset_bytes, shape = _place(spec, config)
        shapes.setdefault(region, (spec, shape))
        placements.append(Placement(spec.name, region, offset_bytes))
    regions = [
        Region(name, _KINDS[spec.dtype], shape, _part(spec), pinned=engram_on_host and spec.part == "engram tables")
        for name, (spec, shape) in shapes.items()
    ]
    return regions, placements


def _part(spec: TensorSpec) -> str:
    return "Engram tables" if spec.part == "engram tables" else "weights"


def _place(spec: TensorSpec, config: ModelConfig) -> tuple[str, int, tuple[int, ...]]:
    """The region of a tensor, where it begins there in bytes, and the region's shape."""
    if found := _EXPERT.fullmatch(spec.name):
        count = config.dspark_n_routed_experts if spec.name.startswith("mtp.") else config.n_routed_experts
        return f"{found[1]}.{found[3]}", int(found[2]) * spec.bytes, (count, *spec.shape)
    if found := _SHARED.fullmatch(spec.name):
        return f"{found[1]}.w13.{found[3]}", "13".index(found[2]) * spec.bytes, (2, *spec.shape)
    if found := _LATENTS.fullmatch(spec.name):
        each = QUANTISED if found[3] == "scale" else 1
        before, columns = config.q_lora_rank // each, spec.shape[1]
        rows = before + config.head_dim // each
        return f"{found[1]}.wq_a_kv.{found[3]}", before * columns if found[2] == "wkv" else 0, (rows, columns)
    return spec.name, 0, spec.shape


class Loader:
    """Copies runs of host bytes to the device through two pinned buffers of its own; for one thread."""

    def __init__(self) -> None:
        self._stream, self._turn = Stream(), 0
        self._buffers = [Array(int(call(driver.cuMemHostAlloc(STAGING_BYTES, 0))), "u8", (STAGING_BYTES,))
                         for _ in range(2)]  # fmt: skip
        self._sent = [Event() for _ in self._buffers]

    def copy(self, source: Bytes, target: int) -> None:
        """Queue the copy of `source` to device address `target`; `source` may be forgotten when this returns."""
        for start in range(0, len(source), STAGING_BYTES):
            part = source[start : start + STAGING_BYTES]
            self._turn = 1 - self._turn
            buffer, sent = self._buffers[self._turn], self._sent[self._turn]
            sent.synchronize()
            np.copyto(view_host(buffer)[: len(part)], part)
            call(driver.cuMemcpyHtoDAsync(target + start, buffer.pointer, len(part), self._stream.handle))
            self._stream.record(sent)

    def close(self) -> None:
        """Wait for the copies and free the buffers."""
        self._stream.close()
        for buffer, sent in zip(self._buffers, self._sent, strict=True):
            sent.close()
            call(driver.cuMemFreeHost(buffer.pointer))


def load_weights(
    arena: Arena, placements: Iterable[Placement], tensor: Callable[[str], NDArray[Any]], device: Device,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Copy every placed tensor into `arena`; blocks. `tensor` gives a tensor by name as it is stored.

    `progress` hears of bytes that are there, from any thread. Raises `CheckpointError` or `DeviceError`.
    """
    shares = _share_out(list(placements), min(COPY_THREADS, len(os.sched_getaffinity(0))))

    def work(share: list[Placement]) -> None:
        device.use()
        loader = Loader()
        try:
            for placement in share:
                source = np.ascontiguousarray(tensor(placement.tensor)).reshape(-1).view(np.uint8)
                _bring(arena, placement, source, loader)
                progress(len(source))
        finally:
            loader.close()

    with ThreadPoolExecutor(len(shares), thread_name_prefix="weights") as pool:
        for done in [pool.submit(work, share) for share in shares]:
            done.result()


def arrange_experts(arena: Arena, kernels: Kernels) -> None:
    """Rearrange the FP4 codes that `load_weights` has brought, once, into what the expert kernels read; blocks."""
    stream = Stream()
    for name in filter(_CODES.fullmatch, arena.regions):
        codes = arena[name].viewed("u8", arena[name].bytes)
        kernels.launch("arrange_codes", stream.handle, codes=codes, count=codes.bytes // CODES_BYTES)
    stream.close()


def _bring(arena: Arena, placement: Placement, source: Bytes, loader: Loader) -> None:
    """Put the bytes of one tensor in their place, by copy within the host where that place is pinned."""
    region = arena[placement.region]
    if arena.regions[placement.region].pinned:
        held = view_host(region.viewed("u8", region.bytes))
        np.copyto(held[placement.offset_bytes : placement.offset_bytes + len(source)], source)
    else:
        loader.copy(source, region.pointer + placement.offset_bytes)


def _share_out(placements: list[Placement], shares: int) -> list[list[Placement]]:
    """Neighbours together, since they lie together in the files; as many in each share."""
    size = max(1, -(-len(placements) // shares))
    return [placements[start : start + size] for start in range(0, len(placements), size)]
