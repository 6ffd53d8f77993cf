"""A turn's state between its slot and a value: what it leaves for a later turn, and what such a turn begins with.

Copies are queued on the launching thread, which never waits for them; what follows them is for the event loop, once the
engine has waited. In between an image of the slot is in use, in pinned memory.
"""

import asyncio
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsuf.cuda.arena import Array, view_host
from dsuf.cuda.launcher import Launcher, Seat
from dsuf.cuda.prefill import PrefillMode
from dsuf.cuda.states import ImagePool, Marks
from dsuf.cuda.streams import Event
from dsuf.errors import CheckpointError, EngineFailed
from dsuf.types import CacheLayout, SessionState

ID = np.dtype("<i8")
"""How a state holds token ids."""


class Reading(NamedTuple):
    """A turn's slot on its way into the image at `memory`, with the turn's marks as of then."""

    seat: Seat
    marks: Marks
    memory: Array
    copied: Event


class Writing(NamedTuple):
    """A state's image at `memory` on its way into a slot, whose turn goes on behind `length` positions."""

    length: int
    memory: Array
    copied: Event


class Handover:
    """Reads and writes states of the turns of `launcher`, for an engine with this layout and prefill."""

    def __init__(self, launcher: Launcher, layout: CacheLayout, prefill: PrefillMode) -> None:
        self._launcher, self._layout, self._prefill = launcher, layout, prefill
        self._images = ImagePool(launcher.shape)

    def read(self, seat: Seat) -> Reading | None:
        """On the launching thread: queue the copy of a turn's slot; None in the midst of a replay."""
        if seat.decoded < seat.fed:
            return None
        image = self._images.take()
        return Reading(seat, seat.marks, image, self._launcher.read_image(seat, image))

    async def pack(self, reading: Reading) -> SessionState:
        """The state of a turn whose slot is copied."""
        seat, marks, memory = reading.seat, reading.marks, reading.memory
        shape, image = self._images.shape, self._images.shape.view_image(view_host(memory))
        length = int(image.length[0])
        known = np.append(seat.ids, seat.generated).astype(np.int64)
        payload = await asyncio.to_thread(shape.pack, image, length, marks)
        ids = shape.last_ids(image, known, length)
        self._images.give_back(memory)
        return SessionState(
            fingerprint=self._layout.fingerprint, length=length, ids=ids.astype(ID).tobytes(), payload=payload,
            spare=marks.count_spare(length), near=marks.count_near(length, self._layout.replay_tokens),
            repeats=marks.count_slack(length) > 0,
        )  # fmt: skip

    def take_over(self, seat: Seat, length: int, state: SessionState | None) -> Writing | int:
        """On the launching thread: check the state, lay it out, queue its copy; without one only where the turn begins.

        Raises `EngineFailed` if the turn has positions, `CheckpointError` if it cannot go on from the state.
        """
        if seat.fed:
            raise EngineFailed(f"Turn {seat.turn.id} has {seat.fed} positions of its own.")
        if not 0 <= length < len(seat.ids):
            raise CheckpointError(f"a prompt of {len(seat.ids)} positions cannot go on behind {length}")
        if state is None:
            if self._prefill == "exact" and length:
                raise CheckpointError("an exact prefill goes on from a state only")
            return self._launcher.begin_behind(seat, length)
        ids = self._check_state(seat, length, state)
        memory, shape = self._images.take(), self._images.shape
        try:
            marks = shape.unpack(state.payload, ids, length, shape.view_image(view_host(memory)))
        except CheckpointError:
            self._images.give_back(memory)
            raise
        return Writing(length, memory, self._launcher.take_over(seat, memory, length, marks))

    def forget(self, writing: Writing) -> None:
        """The image of `writing` is copied."""
        self._images.give_back(writing.memory)

    def close(self) -> None:
        """Free all images; none is in use."""
        self._images.close()

    def _check_state(self, seat: Seat, length: int, state: SessionState) -> NDArray[np.int64]:
        """The tokens of `state`; raises `CheckpointError` unless the turn can go on from it behind `length`."""
        own = self._layout.fingerprint
        if state.fingerprint != own:
            raise CheckpointError(f"the state is of {state.fingerprint}, this engine's are of {own}")
        if len(state.ids) != state.length * ID.itemsize:
            raise CheckpointError(f"a state of {state.length} positions has {len(state.ids)} bytes of ids")
        ids = np.frombuffer(state.ids, ID).astype(np.int64)
        if length > state.length or not np.array_equal(ids[:length], seat.ids[:length]):
            raise CheckpointError(f"a state of {state.length} positions is of another prompt than the first {length}")
        repeats = state.length == len(seat.ids) and state.repeats
        if state.length - length > max(state.spare, state.near, int(repeats)):
            raise CheckpointError(f"a state of {state.length} positions cannot be cut to {length}")
        return ids
