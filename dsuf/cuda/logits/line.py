"""The questions of one pipeline's steps, in their order: heard of in pinned memory, asked of masks, answered there."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from dsuf.cuda.arena import Arena
from dsuf.cuda.logits.masking import Masking
from dsuf.cuda.logits.rules import QUESTION_HEAD
from dsuf.types import Allowed

WORD = np.dtype("<i4")


class Expected(NamedTuple):
    """A question that step `step` of a pipeline will ask, with the masks of its turns by slot."""

    step: int
    maskings: Mapping[int, Masking]


class Asked(NamedTuple):
    """What was asked for the turn at `place` of a step."""

    place: int
    masking: Masking
    answer: "Future[Allowed]"


class Line:
    """The questions of one pipeline, in their order; `first` where a turn has no token yet."""

    def __init__(self, arena: Arena, pipeline: str, *, first: bool) -> None:
        names = ("questions", "asked", "masks", "masked", "answered", "late")
        self._questions, self._asked, self._masks, self._masked, self._answered, self._late = (
            arena.host(f"{pipeline}.{name}") for name in names
        )
        self._first = first
        self._expected: deque[Expected] = deque()
        self._open: list[Asked] | None = None

    @property
    def waits(self) -> bool:
        """Whether a question is still to be answered."""
        return bool(self._expected)

    @property
    def late(self) -> bool:
        """Whether a step did not get its answer in time."""
        return bool(self._late[0])

    def expect(self, expected: Expected) -> None:
        """A step with a question has been, or will at once be, launched."""
        self._expected.append(expected)

    def go_on(self) -> bool:
        """Do what can be done without waiting; whether that was anything."""
        if not self._expected:
            return False
        expected = self._expected[0]
        if self._open is None:
            if self._asked[0] != expected.step + 1:
                return False
            self._open = self._ask(expected.maskings)
        if not all(asked.answer.done() for asked in self._open):
            return False
        self._write(self._open)
        self.release()
        return True

    def release(self) -> None:
        """Let the step of the oldest question go on."""
        self._answered[0] = self._expected[0].step + 1
        self._expected.popleft()
        self._open = None

    def forgo(self) -> None:
        """Rule nothing out, whatever is asked from now on: the engine has failed."""
        self._masked[:] = 0
        while self._expected:
            self.release()

    def _ask(self, maskings: Mapping[int, Masking]) -> list[Asked]:
        block = self._masks.shape[1] - 1
        asked = []
        for place in range(int(self._questions[0, 0])):
            row = self._questions[place + 1].tolist()
            (slot, length, verified), tokens = row[:QUESTION_HEAD], row[QUESTION_HEAD:]
            masking = maskings.get(slot)
            if masking is None:
                continue
            if not self._first:
                masking.follow(length, tokens[: block + 1])
            asked.append(Asked(place, masking, masking.ask(tokens[block + 1 : block + 1 + verified])))
        return asked

    def _write(self, asked: list[Asked]) -> None:
        self._masked[:] = 0
        for place, masking, answer in asked:
            allowed = answer.result()
            masking.note(allowed)
            for i, row in enumerate(allowed.rows):  # behind a draft that may not come there are none
                if row is not None:
                    words = np.frombuffer(row, WORD)
                    self._masks[place, i, : len(words)], self._masked[place, i] = words, 1
