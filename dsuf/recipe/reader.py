"""Token ids of a reply -> events of the client's protocol, and their fold into a whole reply."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    MessagesRequest,
    MessagesResponse,
    PromptUsage,
    StreamProcessor,
)

from dsuf.recipe.tail import Tail
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Event, Finish, Logprob, Usage

_REASONS = {"stop": InferenceFinishReason.Stop, "length": InferenceFinishReason.Length}
_DECODER = json.JSONDecoder()
_BEGINS_ANSWER = re.compile(r'(?<!\\)"content":"[^"]')
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
        self,
        protocol: Literal["chat", "messages"],
        request: ConversationRequest,
        reply_id: str,
        model: str,
        vocabulary: Vocabulary,
        *,
        folds: bool = True,
        live_usage: bool = False,
    ) -> None:
        options = request.parsing_options
        kind = ChatCompletionRequest if protocol == "chat" else MessagesRequest
        self._responses = ChatCompletionResponse if protocol == "chat" else MessagesResponse
        self._processor = StreamProcessor(kind.chunk_generator(request, reply_id, model), options, vocabulary.tokenizer)
        self._identity = (reply_id, model, int(time.time()))
        self._folds, self._live_usage = folds, live_usage
        self._whole: Any = None
        self._usage = Usage()
        self._tail = Tail(vocabulary)
        self._one_by_one = bool(options.stop_sequences)
        self._dsml_id = vocabulary.dsml_id if options.parse_tool_calls else -1
        self._saw_markup = False
        self._answered = False
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
        return self._responses.sse_done_data()

    def open(self, usage: Usage) -> list[Event]:
        """Start the reply; `usage` says what the prompt cost (`completion_tokens` is not looked at)."""
        self._usage = usage
        counts = (usage.prompt_tokens, usage.cached_tokens)
        self._whole = self._responses(*self._identity, *counts) if self._folds else None
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
        return self._extend(self._whole.to_json())

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
        events = []
        for chunk in chunks:
            data = chunk.to_json()
            # Marks are looked for as they stand outside of strings, where quotation marks are not escaped.
            if '_reason":"' in data:
                self._note_reason(data)
            self._answered = self._answered or '"tool_calls":' in data or _BEGINS_ANSWER.search(data) is not None
            data = self._extend(data) if '"usage":{' in data else self._tell(data)
            events.append(Event(self._responses.sse_event_name(chunk), data))
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
        usage["prompt_tokens_details"] = self._details()
        self._correct_reasoning(usage)
        if "completion_tokens" in usage:
            usage.setdefault("completion_tokens_details", {})["decode_steps"] = self.steps
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

    def _correct_reasoning(self, usage: dict[str, Any]) -> None:
        """Make the count of reasoning tokens fit the count of all.

        The library's is a few off where tokens end within a character: where there was nothing but reasoning it is the
        count of all, and never more.
        """
        if counts := usage.get("completion_tokens_details"):
            total = usage["completion_tokens"]
            thinks = counts["reasoning_tokens"] > 0 and not self._answered
            counts["reasoning_tokens"] = total if thinks else min(total, counts["reasoning_tokens"])

    def _note_reason(self, data: str) -> None:
        """Remember the reason for the end that the event `data` gives the client."""
        event = msgspec.json.decode(data)
        for ending in (*event.get("choices", ()), event.get("delta", {})):
            self.finish_reason = ending.get("finish_reason") or ending.get("stop_reason") or self.finish_reason
