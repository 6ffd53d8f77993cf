"""Which pages of other sites may use this server from a browser (CORS); none unless the settings name them."""

from collections.abc import Sequence

from aiohttp import web

ANY = "*"
_METHODS = "GET, HEAD, POST"
_MAX_AGE_S = 600
_EXPOSED = "x-request-id, request-id, retry-after, x-dsuf-node"


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks if a page may send something else than a plain form; it sends no key with that."""
    return request.method == "OPTIONS" and {"Origin", "Access-Control-Request-Method"} <= request.headers.keys()


def answer_preflight(request: web.Request) -> web.Response:
    """What a page may send; whether its origin is let in, `let_in` says."""
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
        "Access-Control-Max-Age": str(_MAX_AGE_S),
    }
    return web.Response(status=204, headers=headers)


def let_in(request: web.Request, response: web.StreamResponse, origins: Sequence[str]) -> None:
    """Say whether the page that asks may read `response`. Never with a browser's cookies: keys are headers here."""
    if not origins:
        return
    response.headers.add("Vary", "Origin")
    origin = request.headers.get("Origin")
    if origin is not None and (ANY in origins or origin in origins):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
