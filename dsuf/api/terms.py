"""On which terms a request wants to be computed: how soon among others, and until when."""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dsuf.errors import InvalidRequest

PRIORITY_HEADER = "x-dsuf-priority"
TIMEOUT_HEADER = "x-dsuf-timeout-s"
PRIORITIES = 100
"""A priority is between minus this and this; lower goes first, 0 is what a request has that asks for none."""
TIMEOUT_LIMIT_S = 86_400.0
# Python would also read digits of other scripts, and underscores between digits.
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_DECIMAL = re.compile(r"\+?([0-9]{1,9}(\.[0-9]{0,18})?|\.[0-9]{1,18})")


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Priority of a turn (None: not given), and the seconds after which it ends with an error (None: never)."""

    priority: int | None = None
    timeout_s: float | None = None


def read_terms(headers: Mapping[str, str]) -> Terms:
    """The terms in the headers; raises `InvalidRequest`."""
    timeout_s = None
    if (text := headers.get(TIMEOUT_HEADER)) is not None:
        timeout_s = _to_number(text)
        if not 0 < timeout_s <= TIMEOUT_LIMIT_S:
            raise InvalidRequest(
                f"{TIMEOUT_HEADER} must be a number of seconds above 0, at most {TIMEOUT_LIMIT_S:.0f}, "
                "in plain decimals such as 2.5"
            )
    priority = headers.get(PRIORITY_HEADER)
    return Terms(priority=None if priority is None else _to_priority(priority, PRIORITY_HEADER), timeout_s=timeout_s)


def settle_priority(headers: int | None, body: Any, *, trusted: bool) -> int:
    """The priority of a turn; the header wins over the field `priority`. Raises `InvalidRequest`.

    Where keys tell clients apart, none can put itself before what others send without asking for anything.
    """
    priority = headers if headers is not None else 0 if body is None else _to_priority(body)
    if priority < 0 and not trusted:
        field = "priority" if headers is None else PRIORITY_HEADER
        raise InvalidRequest(f"`{field}` must not be negative on a server with keys", param=field)
    return priority


def _to_priority(value: Any, field: str = "priority") -> int:
    """A priority from the body, or from the header `field`."""
    priority = value
    if isinstance(value, str):
        priority = int(value) if _WHOLE.fullmatch(value) else None
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITIES:
        raise InvalidRequest(f"`{field}` must be a whole number from -{PRIORITIES} to {PRIORITIES}", param=field)
    return priority


def _to_number(text: str) -> float:
    """A number from a header; not a number where it is none."""
    return float(text) if _DECIMAL.fullmatch(text) else math.nan
