"""The arithmetic of a load run: what was seen of each request, and the figures made of it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

SOURCES = ("device", "host", "peer", "computed")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds of a monotonic clock; `turn` counts within its session from 0.

    `arrivals_s` are those of the events that held text or a call; an event can hold several tokens. `usage` is what the
    server said; `error` names what went wrong, None where the reply is whole.
    """

    turn: int
    started_s: float
    ended_s: float
    arrivals_s: tuple[float, ...] = ()
    completion_tokens: int = 0
    prompt_tokens: int = 0
    sources: Mapping[str, int] = {}
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token; None where there was none."""
        return self.arrivals_s[0] - self.started_s if self.arrivals_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times from one event to the next."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float | None:
        """Speed behind the first event, in which at least one token came; None where too little came to tell."""
        if len(self.arrivals_s) < 2 or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / (self.arrivals_s[-1] - self.arrivals_s[0])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def read_sources(usage: Mapping[str, object]) -> dict[str, int]:
    """Prompt tokens by source, from the usage of a reply. Other servers only say how many were cached."""
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, Mapping) else {}
    if "computed_tokens" in details:
        return {source: int(details.get(f"{source}_tokens", 0)) for source in SOURCES}
    prompt, cached = usage.get("prompt_tokens"), details.get("cached_tokens")
    prompt, cached = (value if isinstance(value, int) else 0 for value in (prompt, cached))
    return {"device": cached, "host": 0, "peer": 0, "computed": prompt - cached}


def summarise(what: str, records: Sequence[Record]) -> dict[str, object]:
    """One line of the table: percentiles over whole replies, rates over the time from first start to last end.

    A figure of which there is none is None.
    """
    whole = [record for record in records if record.error is None]
    firsts_ms = [record.first_token_s * 1e3 for record in whole if record.first_token_s is not None]
    gaps_ms = [gap * 1e3 for record in whole for gap in record.gaps_s]
    speeds = [record.tokens_per_s for record in whole if record.tokens_per_s is not None]
    row: dict[str, object] = {"what": what, "requests": len(records), "whole": len(whole)}
    for name, values in (("first_token_ms", firsts_ms), ("gap_ms", gaps_ms)):
        row |= {f"{name}_p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    row |= {
        "stream_tokens_per_s_p50": percentile(speeds, 0.5),
        "stream_tokens_per_s_p10": percentile(speeds, 0.1),
        "tokens_per_s": sum(record.completion_tokens for record in whole) / _span_s(records),
        "prompt_tokens": sum(record.prompt_tokens for record in whole),
        "completion_tokens": sum(record.completion_tokens for record in whole),
    }
    row |= share_sources(whole)
    found = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
    return found | {"errors": count_errors(records)}


def share_sources(records: Sequence[Record]) -> dict[str, float]:
    """Which part of all prompt tokens came from where."""
    total = sum(record.prompt_tokens for record in records)
    return {
        f"{source}_share": sum(record.sources.get(source, 0) for record in records) / total if total else math.nan
        for source in SOURCES
    }


def count_errors(records: Sequence[Record]) -> dict[str, int]:
    """How often each kind of error came."""
    return dict(sorted(Counter(record.error for record in records if record.error is not None).items()))


def _span_s(records: Sequence[Record]) -> float:
    """From the first start to the last end; infinite for no records, so that rates are 0."""
    if not records:
        return math.inf
    return max(record.ended_s for record in records) - min(record.started_s for record in records)
