"""The routes that tell about the server: models, health, readiness, metrics, facts."""

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

import dsuf
from dsuf.api.parts import Parts, Readiness
from dsuf.errors import PathNotFound
from dsuf.observe.metrics import CONTENT_TYPE
from dsuf.recipe.names import LISTED_NAMES, SERVED_NAMES

_OWNER = "deepseek-ai"
_STARTED = int(time.time())


def reply_json(value: Any, *, status: int = 200) -> web.Response:
    """`value` as the body of a response."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def list_models(request: web.Request, parts: Parts) -> web.Response:
    """The names that a request may carry, but for those that promise what is not served. For Anthropic's clients the
    same list has their fields too: it is always one page."""
    listing: dict[str, Any] = {"object": "list", "data": [_describe(name, parts, request) for name in LISTED_NAMES]}
    if speaks_anthropic(request):
        listing |= {"has_more": False, "first_id": LISTED_NAMES[0], "last_id": LISTED_NAMES[-1]}
    return reply_json(listing)


async def show_model(request: web.Request, parts: Parts, name: str) -> web.Response:
    """One of them; raises `PathNotFound`."""
    if name not in SERVED_NAMES:
        raise PathNotFound(f"the model {name!r} does not exist; served: {', '.join(LISTED_NAMES)}", param="model")
    return reply_json(_describe(name, parts, request))


async def report_health(_request: web.Request, parts: Parts) -> web.Response:
    """200 while process and engine are alive, draining or not."""
    return _report(parts.status.liveness(), "alive")


async def report_readiness(_request: web.Request, parts: Parts) -> web.Response:
    """200 if turns should be sent here; else 503 and what fails."""
    return _report(parts.status.readiness(), "ready")


async def report_metrics(_request: web.Request, parts: Parts) -> web.Response:
    """Prometheus' text format."""
    return web.Response(body=parts.status.metrics_text(), headers={"Content-Type": CONTENT_TYPE})


async def report_version(_request: web.Request, parts: Parts) -> web.Response:
    """The server's version."""
    return reply_json({"version": dsuf.__version__})


async def report_facts(_request: web.Request, parts: Parts) -> web.Response:
    """Engine and configuration, no secrets."""
    settings = parts.settings
    return reply_json(
        {
            "version": dsuf.__version__,
            "model": SERVED_NAMES[0],
            "checkpoint": settings.checkpoint,
            "engine": parts.facts,
            "context_tokens": settings.context_tokens,
            "clamp_max_tokens": settings.clamp_max_tokens,
            "body_limit_bytes": settings.body_limit_bytes,
            "keep_alive_s": settings.keep_alive_s,
            "constrained_decoding": parts.masks is not None,
            "pictures": False,
            "logprobs": parts.facts.logprobs,
            "node": dict(parts.status.facts()),
        }
    )


async def flush_cache(_request: web.Request, parts: Parts) -> web.Response:
    """Drop what is kept for later turns; running turns keep what they have."""
    return reply_json({"flushed": parts.status.flush_cache()})


def speaks_anthropic(request: web.Request) -> bool:
    """Whether a client of Anthropic's API asks, as far as the request tells."""
    return "anthropic-version" in request.headers or request.path.lstrip("/").startswith("anthropic/")


def _describe(name: str, parts: Parts, request: web.Request) -> dict[str, Any]:
    """A model list entry, with the context under both names that clients look for."""
    context = parts.settings.context_tokens
    entry: dict[str, Any] = {"id": name, "object": "model", "created": _STARTED, "owned_by": _OWNER}
    if speaks_anthropic(request):
        started = datetime.fromtimestamp(_STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        entry |= {"type": "model", "display_name": name, "created_at": started}
    return entry | {"max_model_len": context, "context_window": context}


def _report(readiness: Readiness, key: str) -> web.Response:
    """A state as JSON under `key`, 503 if it is bad."""
    body: dict[str, Any] = {key: readiness.ready, "failing": list(readiness.failing)}
    if readiness.degraded:
        body["degraded"] = list(readiness.degraded)
    return reply_json(body, status=200 if readiness.ready else 503)
