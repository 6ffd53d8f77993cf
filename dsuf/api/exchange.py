"""What is known of one HTTP exchange while it runs: for its log line, its counts and its reply's id."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from dsuf.observe.log import Level, log_event
from dsuf.types import Usage

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
    turn: str | None = None
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
            first_token_s=_round(self.first_token_s),
            total_s=_round(self.elapsed_s()),
            finish=self.finish,
            failure=self.failure,
            left_while=self.where if status == CLIENT_LEFT else None,
        )


EXCHANGE = web.RequestKey("exchange", Exchange)


def _round(seconds: float | None) -> float | None:
    """Seconds to the microsecond."""
    return None if seconds is None else round(seconds, 6)
