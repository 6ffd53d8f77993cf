"""What the real client sends, taken down while it asks a server that answers by rule.

The client is the released `dsh` 0.2.1rc2 from its wheel. Its words are not kept in this repository; they go into the
package that training reads.
"""

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from bench.nano.data.package import Client
from tests.clients import dsh

QUESTION = "What is in there?"
FILE, LINES = "notes.txt", ("one line", "and another")


class Recording(NamedTuple):
    """The bodies that a run of the client sent: two turns and a request for a title; and its folder."""

    turns: tuple[dict[str, Any], dict[str, Any]]
    title: dict[str, Any]
    folder: str


def capture_client() -> Client:
    """The client's words; raises as `record_client` does."""
    return read_client(record_client())


def record_client() -> Recording:
    """Run the client once through a read of a file; raises `InstallError`, or `RuntimeError` on other bodies."""
    program = dsh.install(dsh.NEWEST, dsh.find_cache())
    with tempfile.TemporaryDirectory() as name, _listen() as (url, bodies):
        folder = Path(name)
        (folder / FILE).write_text("".join(f"{line}\n" for line in LINES))
        outcome = dsh.run(program, dsh.NEWEST, url, QUESTION, folder=folder)
    turns = [body for body in bodies if body.get("tools")]
    titles = [body for body in bodies if not body.get("tools")]
    if outcome.status or len(turns) != 2 or len(titles) != 1:
        raise RuntimeError(f"the client asked {len(turns)} and {len(titles)} times: {outcome.errors}")
    return Recording((turns[0], turns[1]), titles[0], str(folder))


def read_client(recording: Recording) -> Client:
    """The client's words, with places for what changes."""
    (first, second), title, folder = recording
    asked = _join(first["messages"][0]["content"])
    result = _join(second["messages"][-1]["content"][0]["content"])
    listed = "".join(f"{number}: {line}\n" for number, line in enumerate(LINES, 1))
    return Client(
        system=_join(first["system"]),
        tools=tuple(_spell(tool) for tool in first["tools"]),
        context=asked.removeprefix(QUESTION).replace(folder, "{folder}"),
        title_system=_join(title["system"]),
        title_question=_join(title["messages"][0]["content"]).replace(json.dumps(QUESTION), "{question}"),
        read_result=result.replace(folder, "{folder}")
        .replace(FILE, "{file}")
        .replace(listed, "{lines}")
        .replace(f"total {len(LINES)} lines", "total {count} lines"),
    )


def _join(content: Any) -> str:
    """The text of a message's content, a string or blocks (the renderer puts an empty line between blocks)."""
    if isinstance(content, str):
        return content
    return "\n\n".join(block["text"] for block in content)


def _spell(tool: dict[str, Any]) -> str:
    """A tool of the Messages protocol as the renderer shows it."""
    schema = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return json.dumps(schema, ensure_ascii=False)


@contextmanager
def _listen() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on loopback that answers the Messages protocol by rule; yields its URL and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(_reply(body))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()


def _reply(body: dict[str, Any]) -> bytes:
    """The events of a reply: first a call that reads the file, then some words."""
    calls = bool(body.get("tools")) and "tool_result" not in json.dumps(body["messages"])
    start: dict[str, Any] = {"type": "text", "text": ""}
    delta: dict[str, Any] = {"type": "text_delta", "text": "Two lines."}
    if calls:
        start = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps({"file_path": FILE})}
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "deepseek-flash", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": start},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
