"""The OpenAPI document: it has every route, what the server says fits it, and what fits it the server can take."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import jsonschema
import msgspec
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dsuf.api.openapi.chat import ChatReply, ChatRequest
from dsuf.api.openapi.document import OPERATIONS, build_document
from dsuf.api.server import ROUTES, find_route
from dsuf.recipe.vocabulary import Vocabulary
from tests.api.rig import MODEL, Rig, chat_body, serve

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CALL = 'Hm.</think>Hi\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        chat_body(), chat_body(max_tokens=5, seed=3, stop=["x"], user_id="u", reasoning_effort="low"),
        chat_body(tools=[{"type": "function", "function": TOOL}]),
        chat_body(thinking={"type": "disabled"}, temperature=0, max_completion_tokens=5),
    ],
    "/v1/messages": [
        chat_body(max_tokens=5), chat_body(max_tokens=5, system="s", metadata={"user_id": "u"}),
        chat_body(tools=[{"name": "f", "input_schema": TOOL["parameters"]}], output_config={"effort": "high"}),
    ],
    "/v1/messages/count_tokens": [chat_body()],
    "/v1/responses": [
        {"model": MODEL, "input": "x"}, {"model": MODEL, "input": chat_body()["messages"], "instructions": "i"},
    ],
    "/v1/responses/input_tokens": [{"model": MODEL, "input": "x"}],
    "/v1/completions": [
        {"model": MODEL, "prompt": "x"}, {"model": MODEL, "prompt": "x", "suffix": "y", "max_tokens": 3},
    ],
    "/tokenize": [{"prompt": "x"}, {"messages": chat_body()["messages"]}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/flush_cache": [{}],
}  # fmt: skip


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise unless `value` fits `schema`, whose references lead into `document`."""
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


async def test_the_document_has_every_route(rig: Rig) -> None:
    response = await rig.client.get(rig.url + "/openapi.json")
    document = await response.json()
    assert response.content_type == "application/json" and document["openapi"] == "3.1.0"
    assert set(document["paths"]) == {route.path for route in ROUTES} | {"/v1/models/{id}"} == set(OPERATIONS)
    for path, methods in document["paths"].items():
        route = find_route(path)
        assert route is not None and set(methods) == {route.method.lower()}
        (operation,) = methods.values()
        assert ("requestBody" in operation) == (path in BODIES and path != "/flush_cache")
        assert (operation["security"] == []) == (route.access == "open")
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description"), name


def test_a_route_without_a_description_is_a_fault() -> None:
    with pytest.raises(KeyError):
        build_document([msgspec.structs.replace(ROUTES[0], path="/new")])


async def test_what_is_sent_and_said_fits_the_types(rig: Rig) -> None:
    """Bodies that clients send, then the whole replies to them, each in two ways: schema and type."""
    document = await (await rig.client.get(rig.url + "/openapi.json")).json()
    for text in ("Hm.</think>Hi", CALL):
        rig.play(text)
        for path, methods in document["paths"].items():
            (described,) = methods.values()
            operation = OPERATIONS[path]
            for body in BODIES.get(path, [None]):
                if operation.takes is not None:
                    validate(document, described["requestBody"]["content"]["application/json"]["schema"], body)
                    assert msgspec.convert(body, operation.takes)
                if body is None:
                    response = await rig.client.get(rig.url + path.replace("{id}", MODEL))
                else:
                    response = await rig.post(path, body)
                assert response.status == 200, (path, body, await response.text())
                if isinstance(operation.gives, str):
                    assert response.content_type == operation.gives
                    continue
                reply = await response.json()
                validate(document, described["responses"]["200"]["content"]["application/json"]["schema"], reply)
                assert msgspec.convert(reply, operation.gives) is not None


async def test_errors_fit_the_types(rig: Rig) -> None:
    document = await (await rig.client.get(rig.url + "/openapi.json")).json()
    for path, methods in document["paths"].items():
        (described,) = methods.values()
        if "requestBody" in described:
            for body in (b"{", b"[]", {}):
                reply = await (await rig.post(path, body)).json()
                validate(document, described["responses"]["default"]["content"]["application/json"]["schema"], reply)


def test_the_types_can_refuse() -> None:
    """A type that takes everything would make the tests above pass."""
    for wrong in ({"model": MODEL}, chat_body(messages=[]), chat_body(temperature=3), chat_body(stop=[""])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, ChatRequest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"id": "x", "object": "chat.completion"}, ChatReply)


@contextmanager
def serving_in_thread(vocabulary: Vocabulary) -> Iterator[Rig]:
    """A server on a loop of its own, for clients that wait."""
    started, ended = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def run() -> None:
        async with serve(vocabulary) as rig:
            rig.play("Hm.</think>Hi")
            found.extend([rig, asyncio.get_running_loop()])
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(10)
    try:
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(ended.set)
        thread.join(10)


NOTHING_TO_SPOIL = {path for path, operation in OPERATIONS.items() if operation.takes is None}


def visit(url: str, examples: int, mode: GenerationMode) -> Counter[tuple[str, int]]:
    """Send requests that fit the document, or that do not; how often which path answered with which status."""
    statuses: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        if not (mode.is_negative and operation.path in NOTHING_TO_SPOIL):
            ask(operation, examples, mode, statuses)
    return statuses


def ask(operation: Any, examples: int, mode: GenerationMode, statuses: Counter[tuple[str, int]]) -> None:
    """Send some requests for one operation."""

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(timeout=60)
        statuses[operation.path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()


@pytest.mark.parametrize("examples", [4, pytest.param(50, marks=pytest.mark.full)])
def test_what_fits_the_document_is_answered_by_it(vocabulary: Vocabulary, examples: int) -> None:
    """Nothing of that is a fault of the server's, and much of it is answered with 200."""
    with serving_in_thread(vocabulary) as rig:
        statuses = visit(rig.url, examples, GenerationMode.POSITIVE)
    print(json.dumps(sorted((*key, count) for key, count in statuses.items())))
    assert {status for _, status in statuses} <= {200, 400, 404}
    generating = {"/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"}
    assert examples < 50 or generating <= {path for path, status in statuses if status == 200}


@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.full)])
def test_what_does_not_fit_the_document_is_no_fault_of_the_server(vocabulary: Vocabulary, examples: int) -> None:
    with serving_in_thread(vocabulary) as rig:
        statuses = visit(rig.url, examples, GenerationMode.NEGATIVE)
    print(json.dumps(sorted((*key, count) for key, count in statuses.items())))
    assert {status for _, status in statuses} <= {200, 400, 404, 405, 415}
    assert sum(count for (_, status), count in statuses.items() if status == 400) > 0.3 * statuses.total()
