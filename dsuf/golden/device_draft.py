"""The CUDA engine's draft head as the comparisons handle the reference's."""

import numpy as np

from dsuf.cuda.arena import Array, read_array, write_array
from dsuf.cuda.attention import place_angles
from dsuf.cuda.launches import Pass
from dsuf.cuda.step import entries_of
from dsuf.cuda.turns import DRAFT
from dsuf.golden.device import DeviceModel
from dsuf.golden.device_cache import device_cache, read_values, round_bf16
from dsuf.reference.arithmetic import F32
from dsuf.reference.batch import ForcedChoices
from dsuf.reference.cache import SequenceCache
from dsuf.reference.draft import Block, Draft, Pick, pick_greedy


class DeviceDraft(Draft):
    """The draft head of a model on the device."""

    def __init__(self, model: DeviceModel) -> None:
        assert model.machine.draft is not None, "the checkpoint has no draft head"
        self.device, self.head, self.machine = model, model.machine.draft, model.machine

    def feed(self, cache: SequenceCache, start: int, taps: F32) -> None:
        """Put context rows for positions `start` and after, from their `taps`, into `cache`."""
        work, rows, own = self.device.work, len(taps), device_cache(cache)
        write_array(work["taps"], round_bf16(taps))
        write_array(work["positions"], np.arange(start, start + rows))
        write_array(work["ring_place"], own.ring_places(start, start + rows))
        write_array(work["live"], np.array([rows]))
        kernels, turns = self.machine.prefiller.kernels, self.machine.turns
        todo = Pass(kernels, 0, work, turns, rows, entries_of(8), fresh=True)
        place_angles(todo, self.machine.arena, groups="positions")
        self.head.feed(todo, work["ring_place"])
        if start > cache.drafted:
            write_array(turns["floors"][own.slot].rows(DRAFT, DRAFT + 1), np.array([start]))
        cache.drafted = start + rows

    def propose(self, anchors: list[tuple[SequenceCache, int, int]], pick: Pick = pick_greedy) -> Block:
        """The draft block after one anchor, greedy."""
        ((cache, position, anchor),) = anchors
        slot, size, turns = device_cache(cache).slot, self.device.config.dspark_block_size, self.machine.turns
        turns.write("length", slot, position, 0)
        turns.write("anchor", slot, anchor, 0)
        decoder, stages = self.machine.decoder, ForcedChoices({})
        work = decoder.draft_work
        write_array(decoder["turn"], np.array([slot]))
        write_array(decoder["live_turns"], np.array([1]))
        write_array(work["live"], np.array([size]))
        watch = StageWatch(stages, size)
        todo = Pass(decoder.kernels, 0, work, turns, size, entries_of(8), fresh=False, observer=watch)
        self.head.propose(todo, 1, decoder["live_turns"], decoder["turn"], rate=True)
        after = tuple(np.asarray(stages.seen[f"mtp.{stage}.h"], np.float32) for stage in range(len(self.head.stages)))
        ids = read_array(work["picked"].rows(0, size)).astype(np.int64)
        confidence = read_array(work["confidence"].rows(0, size))
        return Block(ids[None], read_values(work["logits"], size)[None], confidence[None], after)


class StageWatch:
    """Keeps the streams after each stage."""

    def __init__(self, stages: ForcedChoices, rows: int) -> None:
        self.stages, self.rows = stages, rows

    def see(self, name: str, array: Array) -> None:
        """Keep `array` if it is a stage's."""
        if name.endswith(".h"):
            self.stages.see(name, read_values(array, self.rows))

    def force(self, name: str) -> None:
        """Nothing is forced."""
