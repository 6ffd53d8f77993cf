"""Ids with a loss weight and a label each, written piece by piece."""

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

LONG_TEXT = 2000  # characters from which on an encoded text is kept: schemas and system texts come again and again


class Label(IntEnum):
    """What a token is to the model: not judged, filler, an answer, its value, a repeated list, a memorised answer."""

    NONE = 0
    TEXT = 1
    ANSWER = 2
    VALUE = 3
    COPY = 4
    MEMORISED = 5


# What a wrong token of each label costs.
WEIGHTS = np.array([0.0, 0.1, 1.0, 1.0, 0.5, 1.0], np.float32)


class Span(NamedTuple):
    """Text all of whose tokens have one label."""

    text: str
    label: Label = Label.NONE


class Piece(NamedTuple):
    """Filler as ids; its text ends in an empty line, so that what stands beside it does not change its tokens."""

    ids: NDArray[np.uint16]


class Sample(NamedTuple):
    """Ids [n] int32, and of each the loss weight [n] float32 and the label [n] uint8."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    labels: NDArray[np.uint8]


class Writer:
    """Collects spans, pieces and special tokens; texts that touch are encoded as one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[NDArray[np.int32]] = []
        self._labels: list[NDArray[np.uint8]] = []
        self._open: list[Span] = []

    def add(self, *parts: str | Span | Piece) -> None:
        """Append parts; a plain string is not judged."""
        for part in parts:
            if isinstance(part, Piece):
                self._close()
                self._append(part.ids, np.full(len(part.ids), Label.TEXT, np.uint8))
            else:
                self._open.append(part if isinstance(part, Span) else Span(part))

    def add_special(self, token: int, label: Label = Label.NONE) -> None:
        """Append a token that no text spells."""
        self._close()
        self._append(np.array([token]), np.array([label], np.uint8))

    def finish(self) -> Sample:
        """Everything so far."""
        self._close()
        ids = np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32)
        labels = np.concatenate(self._labels) if self._labels else np.zeros(0, np.uint8)
        return Sample(ids, WEIGHTS[labels], labels)

    def _append(self, ids: NDArray[np.integer], labels: NDArray[np.uint8]) -> None:
        self._ids.append(ids.astype(np.int32))
        self._labels.append(labels)

    def _close(self) -> None:
        """Encode the open spans together; a token belongs to the span that its first character is in."""
        spans, self._open = [span for span in self._open if span.text], []
        if not spans:
            return
        ids, starts = _encode(self._tokenizer, "".join(span.text for span in spans))
        ends = np.cumsum([len(span.text) for span in spans])
        owners = np.searchsorted(ends, starts, side="right")
        self._append(ids, np.array([span.label for span in spans], np.uint8)[owners])


def _encode(tokenizer: Tokenizer, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids of `text`, and where in it each begins."""
    if len(text) >= LONG_TEXT:
        return _encode_long(tokenizer, text)
    coded = tokenizer.encode(text, add_special_tokens=False)
    return np.array(coded.ids, np.int32), np.array([start for start, _ in coded.offsets], np.int32)


@lru_cache(maxsize=256)
def _encode_long(tokenizer: Tokenizer, text: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    coded = tokenizer.encode(text, add_special_tokens=False)
    return np.array(coded.ids, np.int32), np.array([start for start, _ in coded.offsets], np.int32)
