"""Reading a request's body under limits of size and time."""

import asyncio

from aiohttp import web

from dsuf.errors import BodyTimeout, BodyTooLarge, InvalidRequest, MediaTypeRefused

# What curl and hand-written clients send with a JSON body, besides the types that say so.
_LENIENT_TYPES = {"application/octet-stream", "application/x-www-form-urlencoded", "text/plain", "text/json"}
_ENCODINGS = {"", "identity", "gzip", "deflate"}


class BodyBroken(InvalidRequest):
    """Framing or compression of the body is damaged: where the next request begins cannot be known."""


async def read_body(request: web.Request, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The body, decompressed; raises `MediaTypeRefused`, `BodyTooLarge`, `BodyTimeout` or `BodyBroken`."""
    _check_type(request)
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise BodyTimeout(f"the request body did not arrive within {timeout_s:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit_bytes) from error
    except web.RequestPayloadError as error:
        raise BodyBroken("the request body is broken: its framing or compression cannot be read") from error


def _check_type(request: web.Request) -> None:
    """Refuse a body that says it is something else than JSON; a missing type is no objection."""
    media_type = request.content_type
    if not (media_type in _LENIENT_TYPES or media_type == "application/json" or media_type.endswith("+json")):
        raise MediaTypeRefused(f"the content type must be application/json, not {media_type}")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise MediaTypeRefused("the content encoding must be gzip, deflate or none")


def _too_large(limit_bytes: int) -> BodyTooLarge:
    """The refusal of a body over the limit."""
    return BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")
