"""What differs between the protocols that generate."""

from collections.abc import Callable

import msgspec

from dsuf.api.wire import Reading
from dsuf.errors import RequestError
from dsuf.recipe.conversion import Protocol
from dsuf.recipe.reader import Reader


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A protocol's own ways.

    `read` prepares a body for the library; `reply_prefix` begins a reply's id; `frame_failure` makes the last event of
    a stream that failed, from the error, the request id and the reply's reader; `breaks_off` says whether the
    connection is then broken (where clients would take a regular end for a final failure).
    """

    protocol: Protocol
    reply_prefix: str
    read: Callable[[bytes], Reading]
    frame_failure: Callable[[RequestError, str, Reader], bytes]
    breaks_off: bool
    request_id_header: str | None = None
