"""The application: which path leads to which handler."""

import re
from functools import partial

from aiohttp import HttpVersion11, web

from dsuf.api import ops, pages, tokens
from dsuf.api.chat import CHAT
from dsuf.api.completions import COMPLETIONS
from dsuf.api.dialect import Dialect
from dsuf.api.guard import Handler, guard, stamp
from dsuf.api.messages import MESSAGES
from dsuf.api.openapi.document import build_document
from dsuf.api.origin import answer_preflight, is_preflight
from dsuf.api.parts import SETTINGS, Parts
from dsuf.api.responses import RESPONSES
from dsuf.api.route import Route
from dsuf.api.turn import answer
from dsuf.errors import MethodNotAllowed, PathNotFound


async def _show_model(request: web.Request, parts: Parts) -> web.StreamResponse:
    """One model, by the name behind the path's prefix."""
    path = _SLASHES.sub("/", request.path)
    prefix = next(prefix for prefix in _MODEL_PREFIXES if path.startswith(prefix))
    return await ops.show_model(request, parts, path.removeprefix(prefix))


async def _show_document(_request: web.Request, /, parts: Parts) -> web.Response:
    """The OpenAPI document."""
    return web.Response(body=_DOCUMENT, content_type="application/json")


ROUTES = (
    Route(
        path="/v1/chat/completions",
        method="POST",
        endpoint=partial(answer, dialect=CHAT),
        aliases=("/chat/completions", "/beta/chat/completions", "/beta/v1/chat/completions"),
    ),
    Route(
        path="/v1/messages",
        method="POST",
        endpoint=partial(answer, dialect=MESSAGES),
        aliases=("/messages", "/anthropic/v1/messages", "/anthropic/messages"),
        dialect=MESSAGES,
    ),
    Route(
        path="/v1/messages/count_tokens",
        method="POST",
        endpoint=tokens.count_tokens,
        aliases=("/messages/count_tokens", "/anthropic/v1/messages/count_tokens", "/anthropic/messages/count_tokens"),
        dialect=MESSAGES,
    ),
    Route(
        path="/v1/responses",
        method="POST",
        endpoint=partial(answer, dialect=RESPONSES),
        aliases=("/responses",),
        dialect=RESPONSES,
    ),
    Route(
        path="/v1/responses/input_tokens",
        method="POST",
        endpoint=tokens.count_input,
        aliases=("/responses/input_tokens",),
        dialect=RESPONSES,
    ),
    Route(
        path="/v1/completions",
        method="POST",
        endpoint=partial(answer, dialect=COMPLETIONS),
        aliases=("/completions", "/beta/completions", "/beta/v1/completions"),
        dialect=COMPLETIONS,
    ),
    Route(path="/v1/models", method="GET", endpoint=ops.list_models, aliases=("/models", "/anthropic/v1/models")),
    Route(path="/tokenize", method="POST", endpoint=tokens.tokenize, aliases=("/v1/tokenize",)),
    Route(path="/detokenize", method="POST", endpoint=tokens.detokenize, aliases=("/v1/detokenize",)),
    Route(path="/", method="GET", endpoint=pages.show_page, access="open"),
    Route(path="/frame", method="GET", endpoint=pages.show_frame, access="open"),
    Route(path="/health", method="GET", endpoint=ops.report_health, aliases=("/healthz", "/livez"), access="open"),
    Route(path="/readyz", method="GET", endpoint=ops.report_readiness, aliases=("/ready",), access="open"),
    Route(path="/metrics", method="GET", endpoint=ops.report_metrics, access="open"),
    Route(path="/version", method="GET", endpoint=ops.report_version),
    Route(path="/server_info", method="GET", endpoint=ops.report_facts),
    Route(path="/openapi.json", method="GET", endpoint=_show_document),
    Route(
        path="/flush_cache",
        method="POST",
        endpoint=ops.flush_cache,
        aliases=("/reset_prefix_cache",),
        access="admin",
    ),
)
_MODEL = Route(path="/v1/models/{id}", method="GET", endpoint=_show_model)
_DOCUMENT = build_document((*ROUTES, _MODEL))
_BY_PATH = {path: route for route in ROUTES for path in (route.path, *route.aliases)}
_MODEL_PREFIXES = ("/v1/models/", "/models/", "/anthropic/v1/models/")
_SLASHES = re.compile("/{2,}")


def build_app(parts: Parts) -> web.Application:
    """The application that serves `parts`. Run it with `connection.ApiRunner`, which tells handlers of lost clients."""
    app = web.Application(client_max_size=parts.settings.body_limit_bytes)
    app[SETTINGS] = parts.settings
    parts.submit.on_delivered = parts.outbox.flush
    app.router.add_route("*", "/{path:.*}", partial(_dispatch, parts=parts), expect_handler=_expect)

    @web.middleware
    async def catch_unrouted(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Requests whose target is no path at all (`OPTIONS *`, a proxy's `CONNECT`) do not reach `_dispatch`."""
        if request.match_info.http_exception is None:
            return await handler(request)
        return await guard(request, _refuse_path, parts, endpoint="other", dialect=CHAT, access="key")

    app.middlewares.append(catch_unrouted)
    app.on_response_prepare.append(_stamp)
    return app


def find_route(path: str) -> Route | None:
    """The route that `path` leads to; repeated and trailing slashes do not count."""
    path = _SLASHES.sub("/", path)
    for prefix in _MODEL_PREFIXES:
        if path.startswith(prefix) and path != prefix:
            return _MODEL
    return _BY_PATH.get(path.rstrip("/") if path != "/" else path)


async def _expect(request: web.Request) -> None:
    """Ask for the body of a client that waits to be asked; other expectations are nothing that we could refuse for."""
    if request.headers["Expect"].lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the response itself is out


async def _dispatch(request: web.Request, parts: Parts) -> web.StreamResponse:
    """Run the route's endpoint under `guard`."""
    route = find_route(request.path)
    if parts.settings.cors_origins and is_preflight(request):
        return await guard(request, _answer_preflight, parts, endpoint="other", dialect=CHAT, access="open")
    if route is None:
        return await guard(
            request, _refuse_path, parts, endpoint="other", dialect=_guess_dialect(request), access="key"
        )
    handler: Handler = partial(route.endpoint, parts=parts)
    if request.method not in route.methods:
        handler = partial(_refuse_method, route=route)
    return await guard(request, handler, parts, endpoint=route.path, dialect=route.dialect, access=route.access)


async def _answer_preflight(request: web.Request) -> web.StreamResponse:
    """What pages of other sites may send here."""
    return answer_preflight(request)


async def _refuse_path(request: web.Request) -> web.StreamResponse:
    """404 for what is not there."""
    raise PathNotFound(f"no such path: {request.method} {request.path}")


async def _refuse_method(request: web.Request, route: Route) -> web.StreamResponse:
    """405 for a known path."""
    raise MethodNotAllowed(f"{request.method} is not allowed on {request.path}", allowed=route.methods)


def _guess_dialect(request: web.Request) -> Dialect:
    """Whose envelope an unknown path gets."""
    return MESSAGES if ops.speaks_anthropic(request) else CHAT


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every response."""
    route = find_route(request.path)
    stamp(request, response, route.dialect if route is not None else _guess_dialect(request))
