"""Around every handler: request id, key, errors in the protocol's envelope, one log line and the counts."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from aiohttp import web

from dsuf.api.dialect import Dialect
from dsuf.api.exchange import CLIENT_LEFT, EXCHANGE, Exchange, choose_request_id
from dsuf.api.failure import NODE_HEADER, SERVER_NAME, error_response, internal_error, name_http_error
from dsuf.api.origin import let_in
from dsuf.api.parts import SETTINGS, Parts
from dsuf.errors import RequestError
from dsuf.observe.log import log_event

Access = Literal["open", "key", "admin"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def guard(
    request: web.Request, handler: Handler, parts: Parts, *, endpoint: str, dialect: Dialect, access: Access
) -> web.StreamResponse:
    """Run `handler` and see to it that the request ends in one response, one count and one log line.

    Nothing that `handler` raises reaches aiohttp, except that the client has left.
    """
    exchange = Exchange(choose_request_id(request.headers.get("x-request-id")), endpoint)
    request[EXCHANGE] = exchange
    status = CLIENT_LEFT
    try:
        with _admit(request, exchange, parts, access):
            response = await _run(request, handler, dialect)
        status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        parts.metrics.count_disconnect(exchange.where)
        raise
    except RequestError as error:
        exchange.failure, status = type(error).__name__, error.status
        return error_response(dialect.protocol, error, exchange.request_id)
    finally:
        parts.metrics.count_response(endpoint, status)
        if parts.traces is not None and (trace := exchange.trace(status, request.headers)) is not None:
            parts.traces.record(trace)
        probe = access == "open" and (status < 400 or status == 503)  # asked every few seconds: not to fill the log
        exchange.log(status, level="debug" if probe else "info")


@contextlib.contextmanager
def _admit(request: web.Request, exchange: Exchange, parts: Parts, access: Access) -> Iterator[None]:
    """Check the key; while the block runs a request that makes work counts against what the key may have."""
    if access == "admin":
        parts.keys.authenticate_admin(request.headers)
    key = parts.keys.authenticate(request.headers) if access == "key" else None
    exchange.tenant = key.name if key is not None else ""
    with parts.quotas.hold(key) if key is not None and request.method == "POST" else contextlib.nullcontext():
        yield


async def _run(request: web.Request, handler: Handler, dialect: Dialect) -> web.StreamResponse:
    """`handler`'s response, or a `RequestError`, a `ConnectionError` or the cancellation."""
    try:
        return await handler(request)
    except (RequestError, ConnectionError):
        raise
    except web.HTTPException as error:
        raise name_http_error(error) from error
    except Exception as error:
        log_event("handler failed", level="error", error=error, id=request[EXCHANGE].request_id)
        raise internal_error() from error


def stamp(request: web.Request, response: web.StreamResponse, dialect: Dialect) -> None:
    """Headers of every response, set before any of it is sent."""
    exchange, settings = request.get(EXCHANGE), request.app[SETTINGS]
    response.headers["Server"] = SERVER_NAME
    let_in(request, response, settings.cors_origins)
    if settings.node:
        response.headers[NODE_HEADER] = settings.node
    if exchange is not None:
        response.headers["x-request-id"] = exchange.request_id
        if dialect.request_id_header is not None:
            response.headers[dialect.request_id_header] = exchange.request_id
