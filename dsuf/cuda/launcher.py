"""Turns step plans into work on the device: which slot a turn has, which shapes its steps have, what waits for what.

All of it runs on one thread, in the order of the calls, and never waits for the device. Decode and prefill have a
stream each; a turn's work moves from one to the other behind an event.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from dsuf.cuda.arena import Array, write_array
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.graphs import Graphs
from dsuf.cuda.logits.answers import Answers
from dsuf.cuda.logits.masking import Masking
from dsuf.cuda.logits.rules import Rules
from dsuf.cuda.machine import Machine
from dsuf.cuda.prefill import Part, PassKind, PrefillMode, plan_parts
from dsuf.cuda.results import RESULT_STEPS, Record, Results
from dsuf.cuda.states import Marks, SlotCopier, StateShape
from dsuf.cuda.step import StepShape
from dsuf.cuda.streams import Event, Sides, Stream
from dsuf.errors import EngineFailed
from dsuf.types import Logprob, PrefillRange, Turn

SMALLEST_ROWS, ROWS_GROWTH, SMALLEST_TOKENS, TOKENS_GROWTH = 32, 4, 1024, 4
PREFILL_PRIORITY, DECODE_PRIORITY = 0, -1


class Seat:
    """An attached turn: its slot, its prompt, and how far its launched work goes.

    `length` is the number of positions as the host last heard of it, `decoded` how many of them all layers have seen,
    `fed` how many of the prompt have been launched, and `pending` the decode steps that the host has not heard of.
    """

    def __init__(self, turn: Turn, slot: int, masking: Masking | None = None) -> None:
        self.turn, self.slot, self.masking = turn, slot, masking
        self.ids = np.array(turn.prompt.ids, np.int64)
        self.length = self.decoded = self.pending = self.fed = 0
        self.marks = Marks()
        self.pages: tuple[int, ...] = ()
        self.generated: list[int] = []
        self.finished = False
        self.event: Event | None = None

    @property
    def extras(self) -> bool:
        """Whether its tokens take more than a choice among logits: a mask, or log-probabilities."""
        return self.masking is not None or self.turn.sampling.logprobs is not None

    def let_go(self) -> None:
        """Forget the event that later work waits for."""
        if self.event is not None:
            self.event.close()
            self.event = None

    def reach(self, each: int) -> int:
        """Positions at most after one more step, where a step has up to `each` rows of a turn."""
        return self.length + (self.pending + 1) * each


class Outcome(NamedTuple):
    """What a piece of a step did for a turn: a record, or only more of its prompt, which is there up to `prefilled`."""

    seat: Seat
    prefilled: int
    record: Record | None = None
    logprobs: tuple[Logprob, ...] = ()


class Launched(NamedTuple):
    """A piece of a step that is under way on `stream`: whether it is done, and then what it did.

    Pieces of one `kind` take about the same time.
    """

    stream: Stream
    kind: Hashable
    ready: Callable[[], bool]
    take: Callable[[], list[Outcome]]


class Launcher:
    """Launches for one machine. `captures` replays graphs; without it every kernel is launched by itself."""

    def __init__(self, machine: Machine, mode: PrefillMode, *, captures: bool = True) -> None:
        self.machine, self.mode = machine, mode
        gpus = machine.devices
        self.decode_stream, self.prefill_stream = Stream(DECODE_PRIORITY, gpus), Stream(PREFILL_PRIORITY, gpus)
        self.decode_sides, self.prefill_sides = Sides(2, DECODE_PRIORITY, gpus), Sides(2, PREFILL_PRIORITY, gpus)
        machine.decoder.sides, machine.prefiller.sides = self.decode_sides, self.prefill_sides
        self.graphs = Graphs(captures=captures, devices=gpus)
        self.answers = Answers(machine.arena)
        self.free = list(range(machine.setup.max_turns - 1, -1, -1))
        self.shape = StateShape(machine.sizes)
        self.copier = SlotCopier(machine.arena, self.shape)
        self._overrun = machine.setup.overrun_of(machine.config)
        self._most_rows = max(machine.setup.prefill_rows, machine.config.window_size)

    def prepare(self) -> None:
        """Capture the shapes that most steps have, so that no turn waits for them later.

        Those are all batches without drafts and with all of them, and all sizes of a pass, over short contexts.
        """
        drafts = (0, self.machine.config.dspark_block_size) if self.machine.draft else (0,)
        tokens = self._pick_tokens(1)
        for batch in sorted({self._pick_batch(turns) for turns in range(1, self.machine.setup.max_turns + 1)}):
            for count in drafts:
                self._prepare_step(StepShape(batch, count, tokens))
        for rows in sorted({self._pick_rows(rows) for rows in range(1, self._most_rows + 1)}):
            self._prepare_pass("forward", rows, tokens)
            if self.mode == "replay":
                self._prepare_pass("encode", rows, tokens)

    def _prepare_step(self, shape: StepShape) -> None:
        decoder = self.machine.decoder
        self.graphs.prepare(shape, lambda handle: decoder.queue(shape, handle), self.decode_stream.handle)

    def _prepare_pass(self, kind: PassKind, rows: int, tokens: int) -> None:
        prefiller, stream = self.machine.prefiller, self.prefill_stream.handle
        self.graphs.prepare((kind, rows, tokens), lambda handle: prefiller.queue(kind, rows, tokens, handle), stream)

    def begin(self, seat: Seat, pages: Sequence[int]) -> None:
        """Put the turn of `seat` into its slot, without positions."""
        seat.pages = tuple(pages)
        # What is still being read of the slot is its last turn's.
        before = record_event(self.decode_stream)
        self.prefill_stream.follow(before)
        before.close()
        self.machine.turns.begin(seat.slot, seat.turn.sampling, seat.pages, self.prefill_stream.handle)
        self._mark(seat, self.prefill_stream)

    def take_over(self, seat: Seat, image: Array, length: int, marks: Marks) -> Event:
        """Let the turn of `seat` go on behind `length` positions from the slot image at `image`, which must stay until
        the event is done."""
        self.copier.write(seat.slot, image, self.prefill_stream.handle)
        seat.length = seat.decoded = seat.fed = length
        seat.marks = marks
        self._mark(seat, self.prefill_stream)
        return record_event(self.prefill_stream)

    def begin_behind(self, seat: Seat, kept: int) -> int:
        """Let the turn of `seat` go on without a state, its pages filled up to position `kept`, whole pages.

        Its windows begin anew a window before that; returns where.
        """
        turns, stream, slot = self.machine.turns, self.prefill_stream.handle, seat.slot
        start = max(0, kept - self.machine.config.window_size)
        image = np.zeros(self.machine.sizes.ring_rows, np.int64)
        positions = np.arange(max(0, start - len(image)), start)
        image[positions % len(image)] = seat.ids[positions]
        turns.write("ids", slot, image, stream)
        turns.write("floors", slot, np.full(4, start), stream)
        turns.write("write_table", slot, turns.fill_table(seat.pages, kept // PAGE_TOKENS), stream)
        seat.length = seat.decoded = seat.fed = start
        seat.marks = Marks(replayed=kept, least=start)
        return start

    def read_image(self, seat: Seat, image: Array) -> Event:
        """Queue the copy of the turn's slot to `image`, as the work launched so far leaves it."""
        stream = self.decode_stream if seat.event is None else self.prefill_stream
        self.copier.read(seat.slot, image, stream.handle)
        return record_event(stream)

    def mark_all(self) -> list[Event]:
        """Events behind all that is queued now."""
        return [record_event(stream) for stream in (self.decode_stream, self.prefill_stream)]

    def decode(self, seats: list[Seat], drafts: int) -> Launched:
        """Launch one step for `seats`, with up to `drafts` drafts each."""
        decoder, stream = self.machine.decoder, self.decode_stream
        check_room(decoder.results)
        for seat in seats:
            if seat.event is not None:
                stream.follow(seat.event)
                seat.let_go()
        longest = max(seat.reach(self._overrun) for seat in seats)
        extras = any(seat.extras for seat in seats)
        shape = StepShape(self._pick_batch(len(seats)), drafts, self._pick_tokens(longest), extras)
        wanted = np.full(shape.batch, -1)
        wanted[: len(seats)] = [seat.slot for seat in seats]
        write_array(decoder["wanted"], wanted, stream.handle)
        if extras:
            self._expect("decode", decoder.rules, decoder.results, seats, stream)
        self.graphs.run(shape, lambda handle: decoder.queue(shape, handle), stream.handle)
        step, by_slot = decoder.results.launch(), {seat.slot: seat for seat in seats}
        for seat in seats:
            seat.pending += 1
        return Launched(stream, shape, lambda: decoder.results.ready(step), lambda: self._take_decoded(step, by_slot))

    def prefill(self, seat: Seat, part: PrefillRange) -> Launched:
        """Launch the passes over `part` of a prompt, and its first token if the prompt ends there."""
        stream, prefiller, last = self.prefill_stream, self.machine.prefiller, part.stop == len(seat.ids)
        check_room(prefiller.results)
        window = self.machine.config.window_size
        parts = plan_parts(
            part.start, part.stop, seat.decoded, last=last, mode=self.mode, window=window, most=self._most_rows
        )
        for each in parts:
            self._launch_part(seat, each)
        seat.fed = part.stop
        kind = tuple((each.kind, self._pick_rows(each.stop - each.start)) for each in parts)
        if last:
            row = parts[-1].stop - parts[-1].start - 1
            if seat.extras:
                self._expect("prefill", prefiller.rules, prefiller.results, [seat], stream)
            step = prefiller.choose_first(seat.slot, row, part.stop, stream.handle, extras=seat.extras)
            self._mark(seat, stream)
            return Launched(stream, kind, lambda: prefiller.results.ready(step), lambda: self._take_first(step, seat))
        self._mark(seat, stream)
        event = record_event(stream)
        return Launched(stream, kind, lambda: event.done, lambda: self._take_part(event, Outcome(seat, part.stop)))

    def check(self, seat: Seat, part: PrefillRange) -> None:
        """Raise `EngineFailed` if `part` does not go on where the turn's prompt is."""
        if part.start != seat.fed or not part.start < part.stop <= len(seat.ids):
            raise EngineFailed(f"The plan prefills {part.start} to {part.stop} after {seat.fed} positions.")

    def close(self) -> None:
        """Wait for all work, and free graphs and streams."""
        for stream in (self.decode_stream, self.prefill_stream):
            stream.synchronize()
        self.answers.close()
        self.graphs.close()
        for streams in (self.decode_stream, self.prefill_stream, self.decode_sides, self.prefill_sides):
            streams.close()

    def _expect(self, pipeline: str, rules: Rules, results: Results, seats: list[Seat], stream: Stream) -> None:
        """Say who of `seats` keeps to a constraint in the step that is launched next."""
        maskings = {seat.slot: seat.masking for seat in seats if seat.masking is not None}
        rules.set(len(maskings), stream.handle)
        if maskings:
            self.answers.expect(pipeline, results.launched, maskings)

    def _launch_part(self, seat: Seat, part: Part) -> None:
        prefiller, stream = self.machine.prefiller, self.prefill_stream.handle
        if part.kind == "forward":
            if part.start > seat.decoded:
                prefiller.cut_windows(seat.slot, part.start, stream)
                seat.marks = seat.marks._replace(replayed=part.stop)
            seat.decoded = part.stop
        prefiller.put_rows(seat.slot, part.start, seat.ids[part.start : part.stop], stream)
        rows, tokens = self._pick_rows(part.stop - part.start), self._pick_tokens(part.stop)
        self.graphs.run(
            (part.kind, rows, tokens), lambda handle: prefiller.queue(part.kind, rows, tokens, handle), stream
        )
        seat.length = part.stop

    def _mark(self, seat: Seat, stream: Stream) -> None:
        """Let later work of the turn on another stream wait for what is queued now."""
        seat.let_go()
        seat.event = record_event(stream)

    def _take_part(self, event: Event, outcome: Outcome) -> list[Outcome]:
        event.close()
        return [outcome]

    def _take_decoded(self, step: int, by_slot: dict[int, Seat]) -> list[Outcome]:
        for seat in by_slot.values():
            seat.pending -= 1
        decoder, row, outcomes = self.machine.decoder, 0, []
        for record in decoder.results.read(step):
            seat = by_slot[record.slot]
            rated = decoder.ratings.read(step, row, len(record.ids), seat.turn.sampling.logprobs)
            outcomes.append(Outcome(seat, len(seat.ids), record, rated))
            row += record.verified + 1
        return outcomes

    def _take_first(self, step: int, seat: Seat) -> list[Outcome]:
        prefiller, top = self.machine.prefiller, seat.turn.sampling.logprobs
        return [
            Outcome(seat, len(seat.ids), record, prefiller.ratings.read(step, 0, len(record.ids), top))
            for record in prefiller.results.read(step)
        ]

    def _pick_batch(self, turns: int) -> int:
        return min(1 << (turns - 1).bit_length(), self.machine.setup.max_turns)

    def _pick_rows(self, rows: int) -> int:
        return pick_bucket(rows, SMALLEST_ROWS, ROWS_GROWTH, self._most_rows)

    def _pick_tokens(self, tokens: int) -> int:
        return pick_bucket(tokens, SMALLEST_TOKENS, TOKENS_GROWTH, self.machine.setup.reach_of(self.machine.config))


def record_event(stream: Stream) -> Event:
    """A new event behind all that `stream` has queued; who waits for it closes it."""
    event = Event(stream.devices)
    stream.record(event)
    return event


def pick_bucket(wanted: int, smallest: int, growth: int, largest: int) -> int:
    """The smallest of `smallest`, `smallest` · `growth` … that holds `wanted`, at most `largest`."""
    size = smallest
    while size < wanted:
        size *= growth
    return min(size, largest)


def check_room(results: Results) -> None:
    """Raise `EngineFailed` if a step more would overwrite a record that the host may not have read."""
    if results.launched - results.taken >= RESULT_STEPS:
        raise EngineFailed(f"More than {RESULT_STEPS} steps are under way.")
