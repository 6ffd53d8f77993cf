"""The same sums by NCCL, as `bench/peers.py` times its own: a chain of them in a graph on every GPU."""

from collections.abc import Sequence
from typing import Any

import cupy

try:
    from cupy.cuda import nccl
except ImportError:
    nccl = None


def lacks_nccl() -> str:
    """Why NCCL cannot be measured, empty where it can."""
    return "" if nccl is not None and getattr(nccl, "available", True) else "no NCCL for CuPy"


class NcclGroup:
    """Communicators of some GPUs in one process, and chains of sums on them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.comms: list[Any] = nccl.NcclCommunicator.initAll(count)

    def capture(self, parts: Sequence[Any], outs: Sequence[Any], streams: Sequence[Any], chain: int) -> list[Any]:
        """A graph for each GPU with `chain` sums of `parts` into `outs`, BF16 bits held as uint16."""
        for gpu, stream in enumerate(streams):
            cupy.cuda.Device(gpu).use()
            stream.begin_capture()
        for _ in range(chain):
            nccl.groupStart()
            for gpu in range(self.count):
                cupy.cuda.Device(gpu).use()
                self.comms[gpu].allReduce(
                    parts[gpu].data.ptr, outs[gpu].data.ptr, parts[gpu].size, nccl.NCCL_BFLOAT16, nccl.NCCL_SUM,
                    streams[gpu].ptr,
                )  # fmt: skip
            nccl.groupEnd()
        graphs = []
        for gpu, stream in enumerate(streams):
            cupy.cuda.Device(gpu).use()
            graphs.append(stream.end_capture())
        return graphs
