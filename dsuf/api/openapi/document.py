"""The document: every route with what it takes and gives, and the schemas of these types."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

import dsuf
from dsuf.api.openapi.chat import ChatReply, ChatRequest
from dsuf.api.openapi.completions import CompletionReply, CompletionRequest
from dsuf.api.openapi.messages import CountReply, CountRequest, MessagesReply, MessagesRequest
from dsuf.api.openapi.responses import InputTokensReply, ResponsesReply, ResponsesRequest
from dsuf.api.openapi.server import (
    DetokenizeReply,
    DetokenizeRequest,
    FactsReply,
    FlushReply,
    HealthReply,
    ModelEntry,
    ModelList,
    ReadinessReply,
    TokenizeReply,
    TokenizeRequest,
    VersionReply,
)
from dsuf.api.openapi.shared import ErrorReply, MessagesErrorReply
from dsuf.api.route import Route

_JSON, _EVENTS = "application/json", "text/event-stream"
_KEYS: tuple[dict[str, list[str]], ...] = ({}, {"bearer": []}, {"key": []})
_REFERENCE = "#/components/schemas/{name}"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What a route is for, the type of its body, and of its reply: a struct, or the media type of what is no JSON.
    `also` are statuses besides 200 that have the same reply."""

    summary: str
    takes: type | None = None
    gives: type | str
    streams: bool = False
    also: tuple[int, ...] = ()


OPERATIONS = {
    "/v1/chat/completions": Operation(
        summary="the next message of a conversation", takes=ChatRequest, gives=ChatReply, streams=True
    ),
    "/v1/messages": Operation(
        summary="the next message of a conversation", takes=MessagesRequest, gives=MessagesReply, streams=True
    ),
    "/v1/messages/count_tokens": Operation(summary="tokens of a prompt", takes=CountRequest, gives=CountReply),
    "/v1/responses": Operation(summary="what comes next", takes=ResponsesRequest, gives=ResponsesReply, streams=True),
    "/v1/responses/input_tokens": Operation(
        summary="tokens of a prompt", takes=ResponsesRequest, gives=InputTokensReply
    ),
    "/v1/completions": Operation(
        summary="a text continued, or its gap filled", takes=CompletionRequest, gives=CompletionReply, streams=True
    ),
    "/v1/models": Operation(summary="names that a request may carry", gives=ModelList),
    "/v1/models/{id}": Operation(summary="one of these names", gives=ModelEntry),
    "/tokenize": Operation(summary="tokens of a text", takes=TokenizeRequest, gives=TokenizeReply),
    "/detokenize": Operation(summary="text of tokens", takes=DetokenizeRequest, gives=DetokenizeReply),
    "/": Operation(summary="a page to try the server on", gives="text/html"),
    "/frame": Operation(summary="the frame of that page", gives="text/html"),
    "/health": Operation(summary="whether the node is alive", gives=HealthReply, also=(503,)),
    "/readyz": Operation(summary="whether turns are welcome", gives=ReadinessReply, also=(503,)),
    "/metrics": Operation(summary="metrics in Prometheus' text format", gives="text/plain"),
    "/version": Operation(summary="the server's version", gives=VersionReply),
    "/server_info": Operation(summary="engine and configuration", gives=FactsReply),
    "/openapi.json": Operation(summary="this document", gives=dict[str, Any]),
    "/flush_cache": Operation(summary="drop what is kept for later turns (admin keys)", gives=FlushReply),
}


def build_document(routes: Iterable[Route]) -> bytes:
    """The document as JSON; each of `routes` stands in `OPERATIONS`."""
    operations = [(route, OPERATIONS[route.path]) for route in routes]
    kinds = [kind for _, operation in operations for kind in (operation.takes, operation.gives) if _is_struct(kind)]
    _, schemas = msgspec.json.schema_components([*kinds, ErrorReply, MessagesErrorReply], ref_template=_REFERENCE)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "dsuf", "version": dsuf.__version__,
                 "description": "An inference server for DeepSeek-V4.1-Flash."},
        "paths": {route.path: {route.method.lower(): _describe(route, operation)} for route, operation in operations},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }  # fmt: skip
    return msgspec.json.encode(document)


def _describe(route: Route, operation: Operation) -> dict[str, Any]:
    """One operation object."""
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{route.method.lower()}_{_name(route.path)}",
        "security": [] if route.access == "open" else list(_KEYS),
        "responses": dict(_describe_replies(route, operation)),
    }
    if route.aliases:
        described["description"] = f"Also under {', '.join(route.aliases)}."
    if "{id}" in route.path:
        described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _refer(operation.takes)}}}
    return described


def _describe_replies(route: Route, operation: Operation) -> Iterator[tuple[str, dict[str, Any]]]:
    """What comes back, by status."""
    kind = operation.gives
    content = {kind: {}} if isinstance(kind, str) else {_JSON: {"schema": _refer(kind)}}
    if operation.streams:
        content[_EVENTS] = {}  # no schema: what one would be of, the text or an event, this version does not say
    for status in (200, *operation.also):
        yield str(status), {"description": operation.summary, "content": content}
    refusal = MessagesErrorReply if route.dialect.protocol == "messages" else ErrorReply
    yield "default", {"description": "an error", "content": {_JSON: {"schema": _refer(refusal)}}}


def _refer(kind: Any) -> dict[str, Any]:
    """A reference to the schema of `kind`; of what is no struct the schema itself."""
    return {"$ref": _REFERENCE.format(name=kind.__name__)} if _is_struct(kind) else msgspec.json.schema(kind)


def _is_struct(kind: Any) -> bool:
    """Whether `kind` has a schema of its own name."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _name(path: str) -> str:
    """A path as part of a name."""
    return "".join(letter if letter.isalnum() else "_" for letter in path.strip("/")) or "page"
