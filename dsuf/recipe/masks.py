"""Token masks: what may come next in a turn whose output is under a grammar, by `llguidance`.

A compiled grammar is kept, and turns copy it: the copy costs microseconds. Everything that takes time runs in threads
of its own, where the library lets others run meanwhile. Until a grammar begins no mask is computed.
"""

import copy
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dsuf.errors import InvalidRequest
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Allowed, Constraint, Mask

KEPT_GRAMMARS = 64
_THREADS = 4
_WORD_BYTES = 4
_NO_TEXT = "no text does"
_CROWD = re.compile(r"row has (\d+) items; max is (\d+)")


class Masks:
    """The masks of a model with `width` logits. Its methods may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        self.vocabulary, self.row_bytes = vocabulary, -(-width // 32) * _WORD_BYTES
        self.only_end, self.nothing = _pack([vocabulary.eos_id], width), _pack([], width)
        ends = {vocabulary.eos_id, vocabulary.dsml_id}  # calls end a reasoning, too
        self.within_reasoning = _pack([token for token in range(width) if token not in ends], width)
        self._width = width
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "masks")

    def check(self, grammar: str, parts: Sequence[str] = ()) -> None:
        """Compile `grammar` and begin a reply with it, or raise `InvalidRequest` with the library's reason; takes its
        time. `parts` are grammars of what lies farther in, and compiled where `grammar` is not known yet."""
        if parts and self.find(grammar) is None:
            for part in parts:
                self._compile(part)
        self.copy(grammar)

    def open(self, constraint: Constraint) -> Mask:
        """The mask of a turn under `constraint`."""
        return _TurnMask(self, constraint, self._threads)

    def copy(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of `grammar`; raises as `check` does. Who comes while another thread compiles the
        same waits for that."""
        with self._lock:
            found = self._compiled.get(grammar)
            mine = found is None
            if found is None:
                found = self._compiled[grammar] = Future()
                if len(self._compiled) > KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
        if mine:
            self._fill(found, grammar)
        return found.result().deep_copy()

    def find(self, grammar: str) -> LLMatcher | None:
        """The same if it is compiled already, at once."""
        found = self._compiled.get(grammar)
        ready = found is not None and found.done() and found.exception() is None
        return found.result().deep_copy() if found is not None and ready else None

    def _fill(self, found: "Future[LLMatcher]", grammar: str) -> None:
        """Compile `grammar` into `found`; what fails is forgotten."""
        try:
            found.set_result(self._compile(grammar))
        except Exception as error:
            with self._lock:
                self._compiled.pop(grammar, None)
            found.set_exception(error)

    def _compile(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._open_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"the output constraint cannot be compiled: {_read_error(matcher)}")
        self._try_out(matcher.deep_copy())
        return matcher

    def _try_out(self, matcher: LLMatcher) -> None:
        """Take one token: what is too large, or matches nothing, is found only there. Raises `InvalidRequest`."""
        row = np.frombuffer(matcher.compute_bitmask()[: self.row_bytes], np.uint8)
        tokens = np.flatnonzero(np.unpackbits(row, bitorder="little"))
        first = next((int(token) for token in tokens if token != self.vocabulary.eos_id), None)
        if first is not None and not matcher.is_error():
            matcher.consume_token(first)
        if matcher.is_error():
            raise InvalidRequest(f"the output constraint cannot be followed: {_read_error(matcher)}")

    def _open_tokenizer(self) -> LLTokenizer:
        """The vocabulary as the library wants it. Reading it takes most of a second where it is large, so that is done
        when it is first needed."""
        with self._reading:
            if self._tokenizer is None:
                text, end_id = _set_apart(self.vocabulary), self.vocabulary.eos_id
                self._tokenizer = LLTokenizer(text, n_vocab=self._width, eos_token=end_id)
            return self._tokenizer


class _TurnMask:
    """`Mask` of one turn."""

    def __init__(self, masks: Masks, constraint: Constraint, threads: ThreadPoolExecutor) -> None:
        self._place, self._threads = _Place(masks, constraint), threads

    def ask(self, ids: Sequence[int], drafts: Sequence[int]) -> "Future[Allowed]":
        """See `Mask`; the work is done in a thread."""
        return self._threads.submit(self._answer, tuple(ids), tuple(drafts))

    def _answer(self, ids: Sequence[int], drafts: Sequence[int]) -> Allowed:
        place = self._place
        for token in ids:
            place.take(token)
        rows = [place.find_row()]
        ahead = place.fork() if drafts else place  # the library cannot take back special tokens
        for token in drafts:
            if not ahead.may_take(token, rows[-1]):
                break
            ahead.take(token)
            rows.append(ahead.find_row())
        return Allowed(tuple(rows), ahead.fault)


class _Place:
    """A place in a turn: whether its grammar has begun, and how far it is followed."""

    def __init__(self, masks: Masks, constraint: Constraint) -> None:
        self._masks, self._constraint = masks, constraint
        self._matcher = masks.find(constraint.grammar)
        self._opened = constraint.begins == "now"
        self._before: int | None = None  # the token before, until the grammar begins
        self.fault: str | None = None

    def fork(self) -> "_Place":
        """A place that can go on by itself."""
        other = copy.copy(self)
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return other

    def may_take(self, token: int, row: bytes | None) -> bool:
        """Whether `token`, a draft, may come where `row` is allowed, and something behind it."""
        allowed = row is None or bool(row[token >> 3] >> (token & 7) & 1)
        return allowed and self.fault is None and token != self._masks.vocabulary.eos_id

    def take(self, token: int) -> None:
        """Go on behind `token`."""
        if self._opened:
            self._open().consume_token(token)
            self._note_fault()
            return
        vocabulary = self._masks.vocabulary
        if self._constraint.begins == "answer":
            self._opened = token == vocabulary.thinking_end_id
        else:
            before = "" if self._before is None or token != vocabulary.dsml_id else vocabulary.decode((self._before,))
            self._opened = before.endswith("<")
        self._before = token

    def find_row(self) -> bytes | None:
        """What may come here."""
        if self.fault is None and not self._opened:
            return self._masks.within_reasoning if self._constraint.begins == "answer" else None
        if self.fault is None:
            row = bytes(self._open().compute_bitmask()[: self._masks.row_bytes])
            self._note_fault()
            if row == self._masks.nothing:
                self.fault = self.fault or _NO_TEXT
        return self._masks.only_end if self.fault is not None else row

    def _open(self) -> LLMatcher:
        """The matcher, compiled again where it was forgotten meanwhile."""
        if self._matcher is None:
            self._matcher = self._masks.copy(self._constraint.grammar)
        return self._matcher

    def _note_fault(self) -> None:
        """Remember if the matcher cannot go on."""
        if self._open().is_error():
            self.fault = _read_error(self._open())


def _read_error(matcher: LLMatcher) -> str:
    """The library's reason as one line."""
    reason = " ".join(matcher.get_error().split()).removesuffix(" <non-verbose/>")
    if crowd := _CROWD.search(reason):
        return f"too many ways to go on at one place, such as optional properties ({crowd[1]}, at most {crowd[2]})"
    return _NO_TEXT if reason == "NoExtensionBias" else reason


def _set_apart(vocabulary: Vocabulary) -> str:
    """The tokenizer's file with every added token marked as special: text that a grammar allows is never one of them,
    though some of them are listed as plain."""
    whole = msgspec.json.decode(vocabulary.plain.to_str())
    for token in whole["added_tokens"]:
        token["special"] = True
    return msgspec.json.encode(whole).decode()


def _pack(tokens: Sequence[int], width: int) -> bytes:
    """The mask of `tokens`."""
    row = np.zeros(-(-width // 32) * 32, np.uint8)
    row[tokens] = 1
    return np.packbits(row, bitorder="little").tobytes()
