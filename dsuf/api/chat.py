"""OpenAI Chat Completions."""

from dsuf.api.dialect import Dialect
from dsuf.api.failure import envelope
from dsuf.api.sse import frame_data
from dsuf.api.wire import read_chat
from dsuf.errors import RequestError
from dsuf.recipe.reader import Reader


def frame_failure(error: RequestError, request_id: str, _reader: Reader) -> bytes:
    """The data line that OpenAI's SDK raises as an error. It is not enough for clients that look at the end of a stream
    only: a stream that ends in the regular way without `[DONE]` is final for them, a broken connection is retried.
    """
    return frame_data(envelope("chat", error, request_id).decode())


CHAT = Dialect(protocol="chat", reply_prefix="chatcmpl-", read=read_chat, frame_failure=frame_failure, breaks_off=True)
