"""OpenAI Responses, without any state kept between two requests."""

from dsuf.api.dialect import Dialect
from dsuf.api.sse import frame
from dsuf.api.wire import read_responses
from dsuf.errors import InvalidRequest, RequestError
from dsuf.recipe.reader import Reader


def frame_failure(error: RequestError, _request_id: str, reader: Reader) -> bytes:
    """The protocol's own last event of a response that failed, after which the stream ends in the regular way."""
    code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
    return frame(reader.fail(error.message, code))


RESPONSES = Dialect(
    protocol="responses", reply_prefix="resp_", read=read_responses, frame_failure=frame_failure, breaks_off=False
)
