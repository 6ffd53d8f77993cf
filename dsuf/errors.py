"""Every error that dsuf raises on purpose.

    DsufError
    ├── RequestError              what a client did, or meets; has an HTTP status
    │   ├── InvalidRequest        400  the body, a field or a value
    │   │   ├── UnsupportedFeature 400  understood, not served (names the feature)
    │   │   ├── ContextTooLong    400  prompt, or prompt and max_tokens, over the context
    │   │   └── FormFailed        400  the form that was asked for leads a reply to where nothing can follow
    │   ├── AuthenticationFailed  401
    │   ├── PermissionDenied      403  a key that is known, but not for this
    │   ├── PathNotFound          404
    │   ├── MethodNotAllowed      405
    │   ├── BodyTimeout           408  the body did not arrive in time
    │   ├── BodyTooLarge          413
    │   ├── MediaTypeRefused      415  a content type or encoding that is not JSON
    │   ├── HeadTooLarge          431  a line or a header is too long, or there are too many headers
    │   ├── QueueFull             429  bounded queue is full; retry
    │   ├── RateLimited           429  this key has as much under way, or has begun as much, as it may; retry
    │   ├── EngineFailed          500  the engine raised; no internals in the text
    │   ├── Unavailable           503  starting, draining or stalled; retry
    │   └── DeadlineExceeded      504  the turn's time is up, at whatever stage it is
    ├── CheckpointError           weights, config or tokenizer on disk are not what they must be
    ├── PeerError                 another node refused, or said something that makes no sense
    │   └── PeerLost              it is gone, or cannot be reached, or does not answer
    ├── DeviceError               the GPU or its driver refused or failed
    └── CommandError              wrong use of a command: one line, exit code 2

A `RequestError` holds all that a protocol needs to print itself; `api/` alone knows the envelopes.
"""

from collections.abc import Mapping
from typing import ClassVar


class DsufError(Exception):
    """Base of all errors raised on purpose; its text is one line meant for people."""


class RequestError(DsufError):
    """An ending of a request other than an answer.

    `param` names the offending field where there is one; `retry_after_s` is 1 to 10 where a retry helps
    (clients treat more than 10 s as a final failure), else None. `details` are what a program reads of it (Messages).
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "api_error"
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.param, self.details = param, details
        self.retry_after_s = None if retry_after_s is None else min(10, max(1, retry_after_s))


class InvalidRequest(RequestError):
    """The body, a field or a value is wrong; the same request will fail again."""

    status = 400
    type = "invalid_request_error"


class UnsupportedFeature(InvalidRequest):
    """The request is well-formed and asks for something that this server does not do."""

    code = "unsupported_feature"


class ContextTooLong(InvalidRequest):
    """The prompt, or prompt and `max_tokens` together, exceed the context."""

    code = "context_length_exceeded"


class FormFailed(InvalidRequest):
    """A reply under a constraint has come to where it cannot be continued; what was asked for is to blame, and a client
    that sends it again will not fare better."""

    code = "form_failed"


class AuthenticationFailed(RequestError):
    """Keys are configured and the request carries none of them."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The request's key is known, and does not allow this."""

    status = 403
    type = "permission_error"


class PathNotFound(RequestError):
    """No such path, or no such object under it."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not. `allowed` goes into the `Allow` header."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTimeout(RequestError):
    """The request body did not arrive in time."""

    status = 408
    type = "timeout_error"


class BodyTooLarge(RequestError):
    """The request body is over the configured limit."""

    status = 413
    type = "request_too_large"


class MediaTypeRefused(RequestError):
    """The request's content type or content encoding is not one that is read."""

    status = 415
    type = "invalid_request_error"


class HeadTooLarge(RequestError):
    """The request's line or a header is longer than is read, or there are more headers."""

    status = 431
    type = "invalid_request_error"


class QueueFull(RequestError):
    """More requests wait than the queue may hold."""

    status = 429
    type = "rate_limit_error"


class RateLimited(RequestError):
    """The key has as many requests under way, or has begun as many, as it may."""

    status = 429
    type = "rate_limit_error"


class EngineFailed(RequestError):
    """The engine raised while it computed this turn."""


class Unavailable(RequestError):
    """The server is starting, draining, or its engine makes no progress."""

    status = 503
    type = "overloaded_error"


class DeadlineExceeded(RequestError):
    """The turn took longer, or waited longer, than it may."""

    status = 504
    type = "timeout_error"


class CheckpointError(DsufError):
    """A checkpoint, its config or its tokenizer is missing, damaged or of another model."""


class PeerError(DsufError):
    """Another node refused what it was asked, or said something that makes no sense. Costs reuse, never a turn."""


class PeerLost(PeerError, ConnectionError):
    """Another node is gone, or cannot be reached, or does not answer."""


class DeviceError(DsufError):
    """The GPU or its driver refused or failed; what was queued on it cannot be trusted."""


class CommandError(DsufError):
    """A command line that cannot be carried out; printed as one line, exit code 2."""
