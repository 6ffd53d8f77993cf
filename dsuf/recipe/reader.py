"""Token ids of a reply -> events of the client's protocol, and their fold into a whole reply."""

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from deepseek_recipe import InferenceChunk, InferenceFinishReason, PromptUsage, StreamProcessor

from dsuf.recipe.conversion import Conversion
from dsuf.recipe.tail import Tail
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Event, Finish, Logprob, Usage

_REASONS = {"stop": InferenceFinishReason.Stop, "length": InferenceFinishReason.Length}
_DECODER = json.JSONDecoder()
_NO_USAGE = '"usage":null}'
_SOURCES = ("device_tokens", "host_tokens", "peer_tokens", "computed_tokens")


class Reader:
    """Reads one reply: `open`, then `feed` each step's ids until `finished`, then `finish`.

    Single use. With stop strings the ids are fed one by one, so that text and usage end at the token that completes
    one, wherever in a step it lies; `finished` then says that nothing more may be fed, and generation should be
    cancelled. The end-of-sentence token must not be fed; `completion_tokens` counts what was, `steps` how many steps
    gave it. Only one that `folds` can give the whole reply in the end: for a stream that would be work, and memory, for
    nothing. With `live_usage` every event of a chat tells the usage so far.
    """

    def __init__(
        self, conversion: Conversion, reply_id: str, vocabulary: Vocabulary, *, folds: bool = True,
        live_usage: bool = False,
    ) -> None:  # fmt: skip
        options = conversion.options
        self._form = conversion.form
        self._processor = StreamProcessor(conversion.generate(reply_id), options, vocabulary.tokenizer)
        self._identity = (reply_id, conversion.model, int(time.time()))
        self._folds, self._live_usage = folds, live_usage
        self._whole: Any = None
        self._usage = Usage()
        self._tail = Tail(vocabulary)
        self._one_by_one = bool(options.stop_sequences)
        self._dsml_id = vocabulary.dsml_id if options.parse_tool_calls else -1
        self._saw_markup = False
        self._answered = self._opened = False
        self.completion_tokens = 0
        self.steps = 0
        self.finish_reason: str | None = None
        self.finished = False

    @property
    def dropped_call(self) -> bool:
        """Whether a complete reply held tool markup of which the library made no call."""
        return self._saw_markup and self.finish_reason in ("stop", "end_turn")

    @property
    def usage(self) -> Usage:
        """What the prompt cost and what was generated so far."""
        return msgspec.structs.replace(self._usage, completion_tokens=self.completion_tokens)

    @property
    def done_data(self) -> str | None:
        """Data of the message that ends a stream, where the protocol has one."""
        data: str | None = self._form.response.sse_done_data()
        return data

    def open(self, usage: Usage) -> list[Event]:
        """Start the reply; `usage` says what the prompt cost (`completion_tokens` is not looked at)."""
        self._usage, self._opened = usage, True
        counts = (usage.prompt_tokens, usage.cached_tokens)
        self._whole = self._form.response(*self._identity, *counts) if self._folds else None
        prompt_usage = PromptUsage(prompt_tokens=counts[0], prompt_cache_hit_tokens=counts[1])
        return self._take(self._processor.push(InferenceChunk.ready(prompt_usage=prompt_usage)))

    def feed(self, ids: tuple[int, ...], logprobs: tuple[Logprob, ...] = ()) -> list[Event]:
        """Read the ids of one step, with the log-probability of each if they were asked for."""
        if not ids:
            return []
        self.steps += 1
        self._saw_markup = self._saw_markup or self._dsml_id in ids
        if not self._one_by_one and self._tail.releases(ids):
            return self._push(ids, logprobs)
        events: list[Event] = []
        for piece in [(token,) for token in ids] if self._one_by_one else self._tail.cut(ids):
            self._tail.add(piece)
            events += self._push(piece, logprobs[: len(piece)])
            logprobs = logprobs[len(piece) :]
            if self.finished:
                break
        return events

    def finish(self, finish: Finish) -> list[Event]:
        """End the reply; after a stop string `finish` has no say."""
        events = self._flush()
        if not self.finished:
            events += self._take(self._processor.push(InferenceChunk.finish(_REASONS[finish])))
        return events + self._take(self._processor.finish())

    def close(self) -> None:
        """Drop a reply that will not be finished."""
        self._processor.close()

    def fold(self) -> str:
        """The whole reply as JSON: all events so far, folded by the library."""
        return self._form.write_whole(self._extend(self._whole.to_json()))

    def fail(self, message: str, code: str) -> list[Event]:
        """The events that tell of a failure, with a `code` of the protocol's; none where it has no such events."""
        events = [] if self._opened else self.open(self._usage)
        return events + self._form.fail(message, code)

    def _push(self, piece: Sequence[int], logprobs: Sequence[Logprob]) -> list[Event]:
        """Give `piece` to the library."""
        self.completion_tokens += len(piece)
        events = self._take(self._processor.push(InferenceChunk.tokens(piece, logprobs or None)))
        self.finished = self._processor.finished
        return events

    def _flush(self) -> list[Event]:
        """Hand over what the library holds of an unfinished character."""
        if self.finished or not self._tail:
            return []
        chunk = InferenceChunk.text(self._tail.text, len(self._tail))
        self._tail.clear()
        return self._take(self._processor.push(chunk))

    def _take(self, chunks: list[Any]) -> list[Event]:
        """Chunks as events; each also goes into the fold, if there is one."""
        events, form = [], self._form
        for chunk in chunks:
            data, name = chunk.to_json(), form.response.sse_event_name(chunk)
            self.finish_reason = form.find_end(data) or self.finish_reason
            self._answered = self._answered or form.begins_answer(data)
            data = self._extend(data) if form.tells_usage(data) else self._tell(data)
            if (event := form.write(name, data)) is not None:
                events.append(event)
            if self._whole is not None:
                self._whole.accumulate(chunk)  # consumes the chunk, so it comes last
        return events

    def _extend(self, data: str) -> str:
        """Add to the usage in `data`, where there is one, how much of the prompt came from where, and the steps.

        The key can only be found outside of strings, where quotation marks are escaped; the usage comes last. The rest
        stays as the library wrote it.
        """
        head, key, _ = data.rpartition('"usage":{')
        if not key:
            return data
        start = len(head) + len(key) - 1
        usage, stop = _DECODER.raw_decode(data, start)
        form = self._form
        usage[form.prompt_details] = self._details()
        if form.output_tokens in usage:
            details = usage.setdefault(form.output_details, {})
            self._correct_reasoning(details, usage[form.output_tokens])
            details["decode_steps"] = self.steps
        return data[:start] + msgspec.json.encode(usage).decode() + data[stop:]

    def _tell(self, data: str) -> str:
        """Put the usage so far where `data` has none, if that is wanted."""
        if not self._live_usage or not data.endswith(_NO_USAGE):
            return data
        prompt_tokens = self._usage.prompt_tokens
        usage = {
            "prompt_tokens": prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens, "prompt_tokens_details": self._details(),
            "completion_tokens_details": {"decode_steps": self.steps},
        }  # fmt: skip
        return data.removesuffix("null}") + msgspec.json.encode(usage).decode() + "}"

    def _details(self) -> dict[str, int]:
        """How much of the prompt came from where."""
        return {name: getattr(self._usage, name) for name in ("cached_tokens", *_SOURCES)}

    def _correct_reasoning(self, details: dict[str, Any], total: int) -> None:
        """Make the count of reasoning tokens fit the count of all.

        The library's is a few off where tokens end within a character: where there was nothing but reasoning it is the
        count of all, and never more.
        """
        if (counted := details.get("reasoning_tokens")) is not None:
            thinks = counted > 0 and not self._answered
            details["reasoning_tokens"] = total if thinks else min(total, counted)
