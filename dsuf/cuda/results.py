"""What steps leave for the host: a ring of records in pinned memory that the device writes and the host polls.

A record is written whole before its sequence number, so a number that is there means a record that is. Steps are
numbered as they are launched; the host reads each once, in order, before the ring comes round.
"""

from typing import NamedTuple

from dsuf.cuda.arena import Arena, Array, Region

RECORD_HEAD = 6
"""Numbers of a turn's record before its ids: slot, ids handed out, done, verified, drafts among them, length."""

RESULT_STEPS = 64
"""Records that the device may be ahead of the host."""

ENDED_BY_EOS, ENDED_BY_LENGTH = 1, 2


class Record(NamedTuple):
    """What a step did for the turn in `slot`: the ids handed out, and its state afterwards."""

    slot: int
    ids: tuple[int, ...]
    done: int
    verified: int
    accepted: int
    length: int


def plan_results(pipeline: str, batch: int, block: int) -> list[Region]:
    """The regions of a ring for steps of up to `batch` turns and `block` drafts each."""
    record = (RESULT_STEPS, batch + 1, RECORD_HEAD + block + 1)
    return [
        Region(f"{pipeline}.results", "i32", record, "results", pinned=True),
        Region(f"{pipeline}.sequence", "i64", (RESULT_STEPS,), "results", pinned=True),
        Region(f"{pipeline}.step", "i64", (1,), "workspaces"),
    ]


class Results:
    """The ring of one pipeline."""

    def __init__(self, arena: Arena, pipeline: str) -> None:
        self.arrays: dict[str, Array] = {name: arena[f"{pipeline}.{name}"] for name in ("results", "sequence", "step")}
        self.batch = self.arrays["results"].shape[1] - 1
        self._records, self._sequence = arena.host(f"{pipeline}.results"), arena.host(f"{pipeline}.sequence")
        self.launched = self.taken = 0

    def launch(self) -> int:
        """Number the step that is launched now."""
        self.launched += 1
        return self.launched - 1

    def ready(self, step: int) -> bool:
        """Whether the record of `step` is there."""
        return int(self._sequence[step % RESULT_STEPS]) == step + 1

    def read(self, step: int) -> list[Record]:
        """The record of `step`, which is ready."""
        self.taken += 1
        rows = self._records[step % RESULT_STEPS]
        return [_read(rows[1 + place].tolist()) for place in range(int(rows[0, 0]))]


def _read(numbers: list[int]) -> Record:
    slot, given, done, verified, accepted, length = numbers[:RECORD_HEAD]
    return Record(slot, tuple(numbers[RECORD_HEAD : RECORD_HEAD + given]), done, verified, accepted, length)
