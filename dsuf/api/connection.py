"""Connections: what aiohttp does by default is changed in four ways.

- The end of the client's stream aborts the connection while a POST runs, so that its handler is cancelled at once,
  even where unsent data would keep the connection half open. A probe by GET still gets its answer.
- A request's head must arrive within a time limit.
- A client must read a whole reply within the write deadline, as it must each event of a stream.
- What cannot be parsed as HTTP is answered in JSON, and not logged as an error of ours.
"""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import _ErrInfo

from dsuf.api.failure import NODE_HEADER, SERVER_NAME, error_response, internal_error
from dsuf.api.parts import SETTINGS, Settings
from dsuf.errors import HeadTooLarge, InvalidRequest, RequestError

_CLIENT_FAULTS = (web.RequestPayloadError, HttpProcessingError, ConnectionError)
_READING = ("GET", "HEAD")
_TOO_MANY = "Too many headers received"
_TICKS = 5
_IDLE_S = 3600.0  # between two requests of one connection: longer than a proxy in front is likely to wait


def _explain(fault: BaseException | None, message: str | None) -> RequestError:
    """What a client is told of a head that could not be parsed."""
    if isinstance(fault, LineTooLong):
        return HeadTooLarge("the request's line, or one of its headers, is longer than 8,190 bytes")
    if message == _TOO_MANY:
        return HeadTooLarge("the request has more than 128 headers")
    return InvalidRequest("not a valid HTTP request")


class Connection(web.RequestHandler):
    """One client connection."""

    __slots__ = ("_head_deadline", "_settings")

    def __init__(self, server: web.Server, *, settings: Settings, **options: Any) -> None:
        super().__init__(server, **options)
        self._settings = settings
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the first request's head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take data; in between requests it must make up a head in time."""
        super().data_received(data)
        self._fail_broken_bodies()
        if not self._awaits_head():
            self._stop_waiting()
        elif self._head_deadline is None:
            self._expect_head()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the answer
        """The client will send no more. Returns that the connection stays open until `_end` has looked at it; one with
        TLS closes all the same, and the loop would say so in the log each time."""
        asyncio.get_running_loop().call_soon(self._end, _TICKS)
        return self.transport is not None and self.transport.get_extra_info("sslcontext") is None

    def _end(self, ticks: int) -> None:
        """After the end of the client's stream it has left, unless it only waits for what a GET answers at once.

        Between two turns of the loop a request can be neither queued nor running; then look again, for some `ticks`.
        """
        if self.transport is None:
            return
        methods = [message.method for message, _ in self._messages if not isinstance(message, _ErrInfo)]
        if self._current_request is not None:
            methods.append(self._current_request.method)
        if methods and all(method in _READING for method in methods):
            self.close()  # when the responses are out
        elif methods or self._request_in_progress or ticks == 0:
            self.transport.abort()
        elif self._waiter is not None or self._request_count == 0:
            self.transport.close()
        else:
            asyncio.get_running_loop().call_soon(self._end, ticks - 1)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop the timer with the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write what the handler left to be written, under the write deadline."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError as error:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionError("the client does not read") from error

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what could not be parsed. `guard` leaves nothing else to be handled here."""
        if status >= 500:
            self.log_exception("Unhandled error", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun already")
        response = error_response("chat", _explain(exc, message) if status < 500 else internal_error(), "")
        response.headers["Server"] = SERVER_NAME
        if self._settings.node:
            response.headers[NODE_HEADER] = self._settings.node
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a fault of ours; what a client's bytes did is told to the client alone."""
        if not isinstance(options.get("exc_info"), _CLIENT_FAULTS):
            super().log_exception(*args, **options)

    def _fail_broken_bodies(self) -> None:
        """After bytes that are no HTTP, no body before them can be completed: do not let its handler wait for it."""
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        payloads = [payload for _, payload in self._messages]
        if self._current_request is not None:
            payloads.append(self._current_request.content)
        for payload in payloads:
            if not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("the body's framing is broken"))

    def _awaits_head(self) -> bool:
        """Whether no request is running or parsed. Before the first, aiohttp may not have begun to wait yet."""
        waits = self._waiter is not None or self._request_count == 0
        return waits and not self._messages and not self._request_in_progress

    def _expect_head(self) -> None:
        """Give the next head its time."""
        loop = asyncio.get_running_loop()
        self._head_deadline = loop.call_later(self._settings.header_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        """A head has arrived, or none is awaited."""
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _give_up(self) -> None:
        """Close a connection on which a head is overdue."""
        self._head_deadline = None
        if self.transport is not None and self._awaits_head():
            self.transport.abort()


class ApiServer(web.Server):
    """Makes a `Connection` of each accepted socket."""

    def __init__(self, handler: Any, *, settings: Settings, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=True, **options)
        self._settings = settings

    def __call__(self) -> web.RequestHandler:
        """A protocol for a new connection."""
        loop = asyncio.get_running_loop()
        options = {**self._kwargs, "auto_decompress": False}  # `body` unpacks
        return Connection(self, settings=self._settings, loop=loop, **options)


class ApiRunner(web.AppRunner):
    """Runs an application that `build_app` made; use it like aiohttp's own runner: `setup`, sites, `cleanup`.

    `shutdown_s` is how long `cleanup` waits for running requests.
    """

    def __init__(self, app: web.Application, *, shutdown_s: float = 60.0) -> None:
        super().__init__(app, access_log=None, keepalive_timeout=_IDLE_S, shutdown_timeout=shutdown_s)
        self._settings = app[SETTINGS]

    async def _make_server(self) -> web.Server:
        """The application's handler in a server of ours."""
        plain = await super()._make_server()
        return ApiServer(
            plain.request_handler,
            request_factory=plain.request_factory,
            settings=self._settings,
            **plain._kwargs,
        )
