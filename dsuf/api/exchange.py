"""What is known of one HTTP exchange while it runs: for its log line, its counts and its reply's id."""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from dsuf.observe.log import Level, log_event
from dsuf.observe.traces import Passage, TurnTrace
from dsuf.types import Times, Usage

Stage = Literal["reading", "rendering", "queued", "prefilling", "decoding", "answered"]

_ID_LIMIT = 128
CLIENT_LEFT = 499


def choose_request_id(sent: str | None) -> str:
    """The client's request id if it is short and of visible ASCII characters, else a new one."""
    if sent and len(sent) <= _ID_LIMIT and all("!" <= character <= "~" for character in sent):
        return sent
    return uuid.uuid4().hex


@dataclass
class Exchange:
    """One request and its response. Times are seconds since `started_s`; nothing in here is content."""

    request_id: str
    endpoint: str
    tenant: str = ""
    started_s: float = field(default_factory=time.monotonic)
    stage: Stage = "reading"
    blocked: bool = False
    model: str | None = None
    read_s: float | None = None
    turn: str | None = None
    times: Times | None = None
    usage: Usage | None = None
    first_token_s: float | None = None
    finish: str | None = None
    failure: str | None = None

    def elapsed_s(self) -> float:
        """Seconds since the request's head was read."""
        return time.monotonic() - self.started_s

    @property
    def where(self) -> str:
        """The stage at which the client would leave now: its own unread bytes come before what the turn does."""
        return "writing" if self.blocked else self.stage

    def mark_rendering(self) -> None:
        """The body is here."""
        self.stage, self.read_s = "rendering", time.monotonic()

    def trace(self, status: int, headers: Mapping[str, str]) -> TurnTrace | None:
        """What became of the turn, in parts; None where there was none. `headers` may name whose part it is."""
        if self.times is None:
            return None
        usage = self.usage or Usage()
        said: dict[str, str | int | None] = {
            "http.request.method": "POST", "http.route": self.endpoint, "http.response.status_code": status,
            "gen_ai.request.model": self.model, "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens, "dsuf.cached_tokens": usage.cached_tokens,
            "dsuf.request_id": self.request_id, "dsuf.turn": self.turn, "dsuf.tenant": self.tenant or None,
            "dsuf.finish": self.finish, "error.type": self.failure,
        }  # fmt: skip
        ends_s = time.monotonic()
        return TurnTrace(
            whole=Passage(f"POST {self.endpoint}", self.started_s, ends_s),
            parts=list(divide(self.started_s, self.read_s, self.times, ends_s)),
            attributes={name: value for name, value in said.items() if value is not None},
            headers=headers, failure=self.failure,
        )  # fmt: skip

    def _queue_s(self) -> float | None:
        """How long the turn waited for its place, if there is one."""
        times = self.times
        return None if times is None or times.attached_s is None else times.attached_s - times.submitted_s

    def log(self, status: int, *, level: Level = "info") -> None:
        """Write the exchange's one line."""
        usage = self.usage or Usage()
        log_event(
            "request",
            level=level,
            id=self.request_id,
            endpoint=self.endpoint,
            status=status,
            model=self.model,
            turn=self.turn,
            tenant=self.tenant or None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_s=_round(self._queue_s()),
            first_token_s=_round(self.first_token_s),
            total_s=_round(self.elapsed_s()),
            finish=self.finish,
            failure=self.failure,
            left_while=self.where if status == CLIENT_LEFT else None,
        )


EXCHANGE = web.RequestKey("exchange", Exchange)


def divide(started_s: float, read_s: float | None, times: Times, ends_s: float) -> Iterator[Passage]:
    """The parts of a turn, one behind the other: what it did not come to is left out, what it ended in ends with it.
    What is written while tokens still come is part of decoding."""
    over_s = times.ended_s or ends_s
    marks = [
        ("read", started_s), ("render", read_s), ("queued", times.submitted_s), ("attach", times.attached_s),
        ("prefill", times.filled_s), ("decode", times.first_token_s), ("write", over_s),
    ]  # fmt: skip
    reached = [(name, start_s) for name, start_s in marks if start_s is not None]
    stops_s = [*(start_s for _, start_s in reached[1:]), max(ends_s, over_s)]
    for (name, start_s), stop_s in zip(reached, stops_s, strict=True):
        yield Passage(name, start_s, stop_s)


def _round(seconds: float | None) -> float | None:
    """Seconds to the microsecond."""
    return None if seconds is None else round(seconds, 6)
