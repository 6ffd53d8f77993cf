"""Errors as each protocol wants them: envelopes, status codes and headers."""

import msgspec
from aiohttp import web

from dsuf.api.body import BodyBroken
from dsuf.errors import (
    BodyTooLarge,
    EngineFailed,
    InvalidRequest,
    MethodNotAllowed,
    PathNotFound,
    RequestError,
)
from dsuf.recipe.conversion import ConversionRefused, Protocol

SERVER_NAME = "dsuf"
NODE_HEADER = "x-dsuf-node"
"""Which node of a fleet has answered."""
_CLOSING = {408, 413, 503}  # what is left of the body is not worth reading, or the node is going away
_RETRY_AFTER_S = 1  # for a 429 or 503 that names no time of its own


def envelope(protocol: Protocol, error: RequestError, request_id: str) -> bytes:
    """The JSON body that tells a client of `protocol` about `error`."""
    if protocol == "messages":
        detail: dict[str, object] = {"type": error.type, "message": error.message}
        if error.details is not None:
            detail["details"] = error.details
        return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})
    if isinstance(error, ConversionRefused):
        return error.body.encode()
    names = {"param": error.param, "code": error.code or error.type}
    return msgspec.json.encode({"error": {"message": error.message, "type": error.type, **names}})


def error_response(protocol: Protocol, error: RequestError, request_id: str) -> web.Response:
    """The response that ends a request with `error`."""
    response = web.Response(
        status=error.status, body=envelope(protocol, error, request_id), content_type="application/json"
    )
    if error.status in (429, 503) or error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s or _RETRY_AFTER_S)
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(error.allowed)
    if error.status in _CLOSING or isinstance(error, BodyBroken):
        response.force_close()
    return response


def name_http_error(error: web.HTTPException) -> RequestError:
    """An error that aiohttp raised by itself, as one of ours."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("the request body is larger than this server accepts")
    if error.status in (404, 405):
        return PathNotFound("no such path")
    if error.status < 500:
        return InvalidRequest(error.reason or "bad request")
    return internal_error()


def internal_error() -> EngineFailed:
    """What a client is told of a fault of ours."""
    return EngineFailed("internal error")
