"""A machine whose device memory is the host's, and whose kernels are a toy: the engine's own logic without a GPU.

The driver stand-in copies at once and knows which events and streams are alive. A pass of the toy writes each
position's token into the entries of the turn's pages, and its next token depends on all that is stored there: a row
that is wrong, missing or another turn's changes the reply.
"""

import ctypes
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsuf.checkpoint.config import ModelConfig
from dsuf.cuda import arena, graphs, pages, states, streams, weights
from dsuf.cuda.arena import Arena, Array, Region, view_host
from dsuf.cuda.machine import Machine, Setup, plan_regions, plan_sizes
from dsuf.cuda.results import RECORD_HEAD, RESULT_STEPS

SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
NOT_READY = SimpleNamespace(name="CUDA_ERROR_NOT_READY")
CAPTURING = SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
GONE = SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE")


class HostDriver:
    """As much of the driver's interface as the engine's host code calls."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_NOT_READY=NOT_READY)
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUDA_MEMCPY2D = SimpleNamespace

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.memory: dict[int, Any] = {}
        self.told: list[tuple[str, int]] = []
        self.capturing: set[int] = set()
        self.priorities: dict[int, int] = {}
        self._next = 100

    def _new(self) -> tuple[Any, int]:
        self._next += 1
        self.alive.add(self._next)
        return SUCCESS, self._next

    def _check(self, handle: int) -> tuple[Any]:
        return (SUCCESS if handle == 0 or handle in self.alive else GONE,)

    def _end(self, handle: int) -> tuple[Any]:
        outcome = self._check(handle)
        self.alive.discard(handle)
        return outcome

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[Any, int]:
        status, stream = self._new()
        self.priorities[stream] = priority
        return status, stream

    def cuStreamGetPriority(self, stream: int) -> tuple[Any, int]:
        return SUCCESS, self.priorities[stream]

    def cuEventCreate(self, flags: int) -> tuple[Any, int]:
        return self._new()

    def cuStreamDestroy(self, stream: int) -> tuple[Any]:
        return self._end(stream)

    def cuEventDestroy(self, event: int) -> tuple[Any]:
        return self._end(event)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        return self._check(stream)

    def cuStreamQuery(self, stream: int) -> tuple[Any]:
        return (CAPTURING,) if stream in self.capturing else self._check(stream)

    def cuEventQuery(self, event: int) -> tuple[Any]:
        return self._check(event)

    def cuEventSynchronize(self, event: int) -> tuple[Any]:
        return self._check(event)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any]:
        return self._check(event)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any]:
        return self._check(event)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any]:
        self.told.append(("begin", stream))
        self.capturing.add(stream)
        return self._check(stream)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, int]:
        self.told.append(("end", stream))
        self.capturing.remove(stream)
        return self._new()

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, int]:
        return self._new()

    def cuGraphDestroy(self, graph: int) -> tuple[Any]:
        return self._end(graph)

    def cuGraphExecDestroy(self, graph: int) -> tuple[Any]:
        return self._end(graph)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any]:
        self.told.append(("launch", graph))
        return self._check(graph)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, int]:
        held = (ctypes.c_uint8 * max(1, size))()
        self.memory[ctypes.addressof(held)] = held
        return SUCCESS, ctypes.addressof(held)

    def cuMemFreeHost(self, address: int) -> tuple[Any]:
        del self.memory[address]
        return (SUCCESS,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any]:
        ctypes.memmove(to, source, size)
        return (SUCCESS,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any]:
        return self.cuMemcpyHtoDAsync(to, source, size, stream)

    def cuMemcpy2DAsync(self, block: Any, stream: int) -> tuple[Any]:
        source = block.srcHost if block.srcMemoryType == 1 else block.srcDevice
        to = block.dstHost if block.dstMemoryType == 1 else block.dstDevice
        for row in range(block.Height):
            ctypes.memmove(to + row * block.dstPitch, source + row * block.srcPitch, block.WidthInBytes)
        return (SUCCESS,)


class HostArena(Arena):
    """All regions in host memory."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = {region.name: region for region in regions}
        self._pools = []
        self._held = np.zeros(sum(region.reserved_bytes for region in self.regions.values()), np.uint8)
        self._arrays, at = {}, self._held.ctypes.data
        for region in self.regions.values():
            self._arrays[region.name] = Array(at, region.kind, region.shape)
            at += region.reserved_bytes

    def close(self) -> None:
        """Nothing to free."""


class ToyKernels:
    """Runs what decides a turn's course; the rest of a pass is nothing here."""

    def __init__(self, config: ModelConfig, machine_arena: HostArena) -> None:
        self.config, self.arena, self.runs = config, machine_arena, True
        self.allowed: dict[int, NDArray[np.uint8]] = {}

    def launch(self, entry: str, stream: int = 0, **values: Any) -> None:
        """Run the launch if the toy knows how."""
        run = getattr(self, f"_{entry}", None)
        if run is not None and self.runs:
            run(**{name: view_host(value) if isinstance(value, Array) else value for name, value in values.items()})

    def _gather_turns(self, wanted: Any, done: Any, turn: Any, live_turns: Any, batch: int, **rest: Any) -> None:
        going = [slot for slot in wanted[:batch] if slot >= 0 and not done[slot]]
        turn[: len(going)], live_turns[0] = going, len(going)

    def _place_verify(self, turn: Any, length: Any, anchor: Any, live: Any, live_rows: Any, **rest: Any) -> None:
        for place, slot in enumerate(turn[: live[0]]):
            rest["row_slot"][place], rest["row_position"][place] = slot, length[slot]
            rest["row_id"][place] = anchor[slot]
        live_rows[0] = live[0]

    def _stored(self, slot: int, length: int) -> NDArray[np.uint8]:
        """What the turn's pages hold of its first positions."""
        positions = np.arange(length)
        table = view_host(self.arena["turns.table"])[slot]
        rows: NDArray[np.uint8] = self._entries()[table[positions // 128] * 128 + positions % 128, 0]
        return rows

    def _entries(self) -> NDArray[np.uint8]:
        """The entries of the first source with one a position."""
        layer = next(one for one in self.config.kv_source_layers if self.config.ratio(one) == 1)
        rows: NDArray[np.uint8] = view_host(self.arena[f"layers.{layer}.entries"])
        return rows

    def _place_rows(self, row_slot: Any, row_position: Any, row_id: Any, table: Any, live: Any, **rest: Any) -> None:
        """The first entry byte of each position is its token, where the turn may write."""
        entries = self._entries()
        for slot, position, token in zip(*(rows[: live[0]] for rows in (row_slot, row_position, row_id)), strict=True):
            page = table[slot, position // 128]
            if page >= 0:
                entries[page * 128 + position % 128, 0] = token % 251

    def _keep_ids(
        self, row_slot: Any, row_position: Any, row_id: Any, ids: Any, live: Any, ring: int, **rest: Any
    ) -> None:
        for slot, position, token in zip(*(rows[: live[0]] for rows in (row_slot, row_position, row_id)), strict=True):
            ids[slot, position % ring] = token

    def _advance_turns(
        self, turn: Any, live: Any, fed: int, results: Any, sequence: Any, step: Any, **rest: Any
    ) -> None:
        number = int(step[0])
        record, count = results[number % RESULT_STEPS], int(live[0])
        record[0, 0] = count
        for place, slot in enumerate(turn[:count]):
            length = int(rest["length"][slot]) + fed
            token = self._choose(place, next_token(self._stored(int(slot), length), self.config.vocab_size))
            ended = 1 if token == rest["eos_id"] else 0
            rest["generated"][slot] += not ended
            if not ended and rest["generated"][slot] >= rest["max_tokens"][slot]:
                ended = 2
            rest["length"][slot], rest["anchor"][slot], rest["done"][slot] = length, token, ended
            record[place + 1, :RECORD_HEAD] = slot, int(ended != 1), ended, 0, 0, length
            record[place + 1, RECORD_HEAD] = token
        self.allowed.clear()
        step[0] = number + 1
        sequence[number % RESULT_STEPS] = number + 1

    def _choose(self, place: int, token: int) -> int:
        """`token`, or the next one that may come for the turn at `place` of the step."""
        if place not in self.allowed:
            return token
        return int((token + np.argmax(np.roll(self.allowed[place], -token))) % len(self.allowed[place]))

    def _ask_masks(self, turn: Any, length: Any, anchor: Any, ids: Any, live: Any, **rest: Any) -> None:
        block, questions = self.config.dspark_block_size, rest["questions"]
        if not rest["ruled"][0]:
            return
        questions[0, 0] = live[0]
        for place, slot in enumerate(turn[: live[0]]):
            at = np.arange(length[slot] - block, length[slot])
            last = np.where(at >= 0, ids[slot, at % rest["ring"]], -1)
            questions[place + 1] = [slot, length[slot], 0, *last, anchor[slot], *[-1] * block]
        rest["asked"][0] = rest["step"][0] + 1

    def _await_masks(self, ruled: Any, answered: Any, late: Any, step: Any, patience_us: int) -> None:
        deadline = time.monotonic() + patience_us / 1e6
        while ruled[0] and answered[0] < step[0] + 1 and not late[0]:
            late[0] = time.monotonic() > deadline
            time.sleep(0.0001)

    def _mask_logits(self, masks: Any, masked: Any, ruled: Any, live: Any, vocabulary: int, **rest: Any) -> None:
        for place in range(live[0] if ruled[0] else 0):
            if masked[place, 0]:
                self.allowed[place] = np.unpackbits(masks[place, 0].view(np.uint8), count=vocabulary, bitorder="little")

    def _rank_logits(self, row_slot: Any, logprobs: Any, live: Any, **rest: Any) -> None:
        """The likeliest tokens of a row are as many from the turn's length on, each less likely by one."""
        at = rest["step"][0] % RESULT_STEPS
        length = view_host(self.arena["turns.length"])
        for row, slot in enumerate(row_slot[: live[0]]):
            for i in range(logprobs[slot]):
                rest["likeliest"][at, row, i], rest["likeliest_logprobs"][at, row, i] = length[slot] + i, -i

    def _rate_tokens(self, turn: Any, live: Any, logprobs: Any, chosen_logprobs: Any, step: Any, **rest: Any) -> None:
        length = view_host(self.arena["turns.length"])
        for row, slot in enumerate(turn[: live[0]]):
            if logprobs[slot] >= 0:
                chosen_logprobs[step[0] % RESULT_STEPS, row] = -length[slot] / 8


def next_token(stored: NDArray[np.uint8], vocabulary: int) -> int:
    """What the toy says behind positions of which these bytes are stored: each of them counts."""
    weights = np.arange(1, len(stored) + 1) * 7919 % 10007
    return int((stored.astype(np.int64) * weights).sum() * 31 + len(stored) * 17) % (vocabulary - 2) + 2


def use_host_driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """Let everything under `dsuf.cuda` call a driver of the host."""
    driver = HostDriver()
    for module in (arena, graphs, pages, states, streams, weights):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr("dsuf.cuda.driver.api", driver)
    return driver


def make_host_machine(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, setup: Setup, driver: HostDriver | None = None
) -> Machine:  # fmt: skip
    """A machine in host memory with a toy for a model; several share a `driver`."""
    driver = driver or use_host_driver(monkeypatch)
    memory = HostArena(plan_regions(config, setup, setup.pages))
    view_host(memory["one"])[0] = 1
    device: Any = SimpleNamespace(name="toy", use=lambda: None, driver=driver)
    kernels: Any = ToyKernels(config, memory)
    return Machine(device, kernels, memory, config, plan_sizes(config, setup, setup.pages), setup, 0)


def read_tokens(machine: Machine, page: int) -> NDArray[np.uint8]:
    """What the toy left of the tokens of a page's positions."""
    layer = next(one for one in machine.config.kv_source_layers if machine.config.ratio(one) == 1)
    rows: NDArray[np.uint8] = view_host(machine.caches.entries(layer))[page * 128 : (page + 1) * 128, 0]
    return rows
