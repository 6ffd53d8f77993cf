"""What a run was like, from when its events came."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

_PAGE = re.compile(r"<(!doctype html|html)\b.*</html>", re.IGNORECASE | re.DOTALL)
_TEXTS = ("content", "reasoning_content", "reasoning")


class Mark(NamedTuple):
    """An event with text: when it came, in seconds since the request, and how many tokens and steps there were then,
    where the server tells them all along (else 0)."""

    at_s: float
    tokens: int
    steps: int


class Reply(msgspec.Struct, kw_only=True):
    """A streamed reply as far as it has come."""

    marks: list[Mark] = []
    text: str = ""
    usage: dict[str, Any] = {}
    finish: str | None = None

    def take(self, event: dict[str, Any], at_s: float) -> None:
        """One event of the stream."""
        self.usage = event.get("usage") or self.usage
        spoke = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self.finish = choice.get("finish_reason") or self.finish
            self.text += delta.get("content") or ""
            spoke = spoke or any(delta.get(name) for name in _TEXTS)
        if spoke:
            self.marks.append(Mark(at_s, self.usage.get("completion_tokens", 0), _told_steps(self.usage)))


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Speed, step time and tokens a step are of what came behind the first event, None where that was all."""

    tokens: int
    tokens_per_s: float | None
    first_token_s: float
    total_s: float
    steps: int
    steps_told: bool
    step_ms: float | None
    accepted_tokens_per_step: float | None
    prompt_tokens: int
    cached_tokens: int
    finish: str | None
    whole_page: bool
    text_sha256: str

    @property
    def trouble(self) -> str | None:
        """What is wrong with the reply, if anything is."""
        if self.finish != "stop":
            return f"it ended by {self.finish!r}, not by itself"
        return None if self.whole_page else "it is no whole HTML page"


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """The least and the most of a figure over all runs."""

    least: float
    most: float


def read_run(reply: Reply) -> Run:
    """The figures of a complete `reply`, which holds at least one event with text and a usage."""
    first, last = reply.marks[0], reply.marks[-1]
    tokens, told = reply.usage["completion_tokens"], _told_steps(reply.usage)
    steps = told or len(reply.marks)
    span_s = last.at_s - first.at_s
    later_tokens, later_steps = tokens - max(1, first.tokens), steps - max(1, first.steps)
    moved = span_s > 0 and later_tokens > 0 and later_steps > 0
    details = reply.usage.get("prompt_tokens_details") or {}
    return Run(
        tokens=tokens,
        tokens_per_s=later_tokens / span_s if moved else None,
        first_token_s=first.at_s,
        total_s=last.at_s,
        steps=steps,
        steps_told=told > 0,
        step_ms=1000 * span_s / later_steps if moved else None,
        accepted_tokens_per_step=later_tokens / later_steps if moved else None,
        prompt_tokens=reply.usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        finish=reply.finish,
        whole_page=_PAGE.search(reply.text) is not None,
        text_sha256=hashlib.sha256(reply.text.encode()).hexdigest(),
    )


def find_ranges(runs: Sequence[Run]) -> dict[str, Range]:
    """Of speed, step time and tokens a step, where any run has them."""
    named = ("tokens_per_s", "step_ms", "accepted_tokens_per_step")
    ranges = {name: _range(getattr(run, name) for run in runs) for name in named}
    return {name: found for name, found in ranges.items() if found is not None}


def _range(values: Iterable[float | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return Range(least=min(known), most=max(known)) if known else None


def _told_steps(usage: dict[str, Any]) -> int:
    """The steps that the server says it took, 0 where it does not."""
    return (usage.get("completion_tokens_details") or {}).get("decode_steps") or 0
