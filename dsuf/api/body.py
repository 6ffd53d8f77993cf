"""Reading a request's body under limits of size and time.

Compressed bodies are unpacked here, beside the loop; the HTTP parser would do it on the loop, and 64 kB can hold 64 MB.
"""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from dsuf.errors import BodyTimeout, BodyTooLarge, InvalidRequest, MediaTypeRefused

# What curl and hand-written clients send with a JSON body, besides the types that say so.
_LENIENT_TYPES = {"application/octet-stream", "application/x-www-form-urlencoded", "text/plain", "text/json"}
_PLAIN = {"", "identity"}
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_UNPACKING = ThreadPoolExecutor(1, "unpack")
"""One at a time, since each can take as much memory as a body may have."""


class BodyBroken(InvalidRequest):
    """Framing or compression of the body is damaged: where the next request begins cannot be known."""


async def read_body(request: web.Request, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The body, decompressed; raises `MediaTypeRefused`, `BodyTooLarge`, `BodyTimeout` or `BodyBroken`."""
    encoding = _check_type(request)
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.read()
            return body if encoding in _PLAIN else await _unpack(body, encoding, limit_bytes)
    except TimeoutError as error:
        raise BodyTimeout(f"the request body did not arrive within {timeout_s:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit_bytes) from error
    except (web.RequestPayloadError, zlib.error) as error:
        raise BodyBroken("the request body is broken: its framing or compression cannot be read") from error


async def _unpack(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """What `body` holds; raises `BodyTooLarge`, or `zlib.error` for what is none or is cut short."""
    loop = asyncio.get_running_loop()
    unpacked = await loop.run_in_executor(_UNPACKING, _inflate, body, _WINDOW_BITS[encoding], limit_bytes)
    if len(unpacked) > limit_bytes:
        raise _too_large(limit_bytes)
    return unpacked


def _inflate(body: bytes, window_bits: int, limit_bytes: int) -> bytes:
    """At most a byte over the limit of what `body` holds; in a thread, which lets others run meanwhile."""
    if window_bits == zlib.MAX_WBITS and body[:1] and body[0] & 0x0F != 8:
        window_bits = -zlib.MAX_WBITS  # some clients leave the zlib header out
    stream = zlib.decompressobj(window_bits)
    unpacked = stream.decompress(body, limit_bytes + 1)
    if len(unpacked) <= limit_bytes and (not stream.eof or stream.unused_data):
        raise zlib.error("cut short, or something follows")
    return unpacked


def _check_type(request: web.Request) -> str:
    """How the body is packed. Refuses one that says it is something else than JSON; a missing type is no objection."""
    media_type = request.content_type
    if not (media_type in _LENIENT_TYPES or media_type == "application/json" or media_type.endswith("+json")):
        raise MediaTypeRefused(f"the content type must be application/json, not {media_type}")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _PLAIN | _WINDOW_BITS.keys():
        raise MediaTypeRefused("the content encoding must be gzip, deflate or none")
    return encoding


def _too_large(limit_bytes: int) -> BodyTooLarge:
    """The refusal of a body over the limit."""
    return BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")
