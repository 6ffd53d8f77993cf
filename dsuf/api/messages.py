"""Anthropic Messages."""

from dsuf.api.dialect import Dialect
from dsuf.api.failure import envelope
from dsuf.api.sse import frame
from dsuf.api.wire import read_messages
from dsuf.errors import RequestError
from dsuf.recipe.reader import Reader
from dsuf.types import Event


def frame_failure(error: RequestError, request_id: str, _reader: Reader) -> bytes:
    """The protocol's own error event, after which the stream ends in the regular way."""
    return frame([Event("error", envelope("messages", error, request_id).decode())])


MESSAGES = Dialect(
    protocol="messages",
    reply_prefix="msg_",
    read=read_messages,
    frame_failure=frame_failure,
    breaks_off=False,
    request_id_header="request-id",
)
