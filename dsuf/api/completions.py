"""OpenAI's older protocol: raw text completion, and completion in the middle of a text."""

from dsuf.api.chat import frame_failure
from dsuf.api.dialect import Dialect
from dsuf.api.wire import read_completion

COMPLETIONS = Dialect(
    protocol="completions", reply_prefix="cmpl-", read=read_completion, frame_failure=frame_failure, breaks_off=True
)
