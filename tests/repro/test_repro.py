"""`dsuf repro` against servers of several manners, and its figures against such as can be told beforehand."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsuf.__main__ import main
from dsuf.repro.connection import read_base_url
from dsuf.repro.figures import Mark, Reply, find_ranges, read_run
from tests.clients import process

PAGE = "<!DOCTYPE html>\n<html><body>game</body></html>"
PIECES = [PAGE[place : place + 8] for place in range(0, len(PAGE), 8)]
Piece = tuple[float, str]
"""Seconds to wait, then a line of the stream."""


def chunk(text: str = "", *, usage: Any = None, finish: str | None = None) -> str:
    """A data line of a stream."""
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": usage}
    return f"data: {json.dumps(event)}\n\n"


def usage(tokens: int, steps: int | None = None) -> dict[str, Any]:
    """A usage, with steps where the server tells them."""
    details = {} if steps is None else {"completion_tokens_details": {"decode_steps": steps}}
    return {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens} | details


def tell_all_along() -> list[Piece]:
    """What this project's server sends: five tokens a step behind the first."""
    told = [(0.01, chunk(piece, usage=usage(1 + 5 * place, 1 + place))) for place, piece in enumerate(PIECES)]
    total = usage(1 + 5 * (len(PIECES) - 1), len(PIECES))
    return [*told, (0.0, chunk(usage=total, finish="stop")), (0.0, "data: [DONE]\n\n")]


def tell_at_the_end() -> list[Piece]:
    """What other servers send: usage in an event of its own, and nothing of steps."""
    last = json.dumps({"choices": [], "usage": usage(2 * len(PIECES) - 1)})
    pieces = [(0.01, chunk(piece)) for piece in PIECES]
    return [*pieces, (0.0, chunk(finish="stop")), (0.0, f"data: {last}\n\n"), (0.0, "data: [DONE]\n\n")]


@contextmanager
def listen(
    answer: Callable[[dict[str, Any]], Sequence[Piece]], *, status: int = 200, models: Any = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that sends what `answer` makes of a body; yields its URL and the requests that it got."""
    requests: list[dict[str, Any]] = []
    listing = {"data": [{"id": "some-model"}]} if models is None else models

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.begin(200, {"path": self.path})
            self.wfile.write(json.dumps(listing).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.begin(status, {"path": self.path, "body": body, "key": self.headers["authorization"]})
            if status != 200:
                self.wfile.write(b'{"error": {"message": "not like this"}}')
                return
            for wait_s, line in answer(body):
                time.sleep(wait_s)
                self.wfile.write(line.encode())
                self.wfile.flush()

        def begin(self, code: int, request: dict[str, Any]) -> None:
            requests.append(request)
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_prints_a_line_a_run_and_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    """In the form that is documented."""
    with listen(lambda body: tell_all_along()) as (url, requests):
        assert main(["repro", "--base-url", url, "--runs", "2"]) == 0
    *runs, speed, step, accepted = capsys.readouterr().out.splitlines()
    tokens = 1 + 5 * (len(PIECES) - 1)
    assert len(runs) == 2 and all(line.startswith(f"{tokens} tokens at ") for line in runs)
    assert all(line.endswith(" s)") and "tokens/s (first token after 0.0" in line for line in runs)
    assert speed.startswith("tokens/s: ") and step.startswith("step time: ") and step.endswith(" ms")
    assert accepted == "accepted tokens a step: 5.00 to 5.00"
    assert [request["path"] for request in requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    body = requests[1]["body"]
    assert body["model"] == "some-model" and body["temperature"] == 0 and body["thinking"] == {"type": "disabled"}
    assert body["messages"][0]["content"].startswith("implement the tetris game.")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object, whose figures fit each other; a server that tells no steps is counted by events."""
    with listen(lambda body: tell_at_the_end()) as (url, requests):
        command = ["repro", "--base-url", url, "--runs", "3", "--json", "--plain", "--api-key", "sk-1", "--model", "m"]
        assert main(command) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["model"] == "m" and outcome["base_url"] == f"{url}/v1" and outcome["failures"] == {}
    assert len(outcome["runs"]) == 3
    for run in outcome["runs"]:
        assert run["steps"] == len(PIECES) and not run["steps_told"] and run["whole_page"]
        assert run["accepted_tokens_per_step"] == 2
        assert run["tokens_per_s"] * run["step_ms"] / 1000 == pytest.approx(run["accepted_tokens_per_step"])
        for name, bounds in outcome["ranges"].items():
            assert bounds["least"] <= run[name] <= bounds["most"]
    assert len({run["text_sha256"] for run in outcome["runs"]}) == 1
    assert all(request["key"] == "Bearer sk-1" for request in requests)
    assert "thinking" not in requests[0]["body"]
    assert requests[0]["body"]["stream_options"] == {"include_usage": True}


def test_figures() -> None:
    """Of times that are given: the first event is the prompt's."""
    reply = Reply(text=PAGE, usage=usage(25, 6) | {"prompt_tokens_details": {"cached_tokens": 7}}, finish="stop")
    reply.marks = [Mark(0.5, 1, 1), Mark(0.6, 6, 2), Mark(1.0, 25, 6)]
    run = read_run(reply)
    assert (run.tokens, run.first_token_s, run.cached_tokens, run.steps) == (25, 0.5, 7, 6)
    assert run.tokens_per_s == pytest.approx(48) and run.step_ms == pytest.approx(100)
    assert run.accepted_tokens_per_step == pytest.approx(4.8) and run.trouble is None
    reply.marks = reply.marks[:1]
    alone = read_run(reply)
    assert alone.tokens_per_s is None and find_ranges([alone]) == {}
    ranges = find_ranges([run, alone])
    assert ranges["tokens_per_s"].least == ranges["tokens_per_s"].most == run.tokens_per_s


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([(0.0, chunk(PAGE, usage=usage(3), finish="stop"))], "without [DONE]"),
        ([(0.0, 'data: {"error": {"message": "engine failed"}}\n\n')], "engine failed"),
        ([(0.0, chunk(PAGE, finish="stop")), (0.0, "data: [DONE]\n\n")], "without `usage`"),
        ([(0.0, "data: [DONE]\n\n")], "empty reply"),
        ([(0.0, "data: {broken\n\n")], "broke off"),
        ([(0.0, chunk("noise", usage=usage(3), finish="stop")), (0.0, "data: [DONE]\n\n")], "no whole HTML page"),
        ([(0.0, chunk(PAGE, usage=usage(3), finish="length")), (0.0, "data: [DONE]\n\n")], "'length'"),
        ([(0.0, chunk("a")), (0.4, chunk("b")), (0.4, chunk("c"))], "no end after"),
    ],
)
def test_a_bad_reply_is_a_failed_check(pieces: list[Piece], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, the other runs go on, and the exit code is 1."""
    answers = iter([pieces, tell_at_the_end()])
    with listen(lambda body: next(answers)) as (url, _):
        assert main(["repro", "--base-url", url, "--runs", "2", "--timeout-s", "0.6"]) == 1
    bad, good, *_ = capsys.readouterr().out.splitlines()
    assert told in bad and "tokens/s" in good


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--base-url", "ftp://x"], "no address"), (["--base-url", "http://x:99999999"], "no address"),
        (["--base-url", "http://127.0.0.1:1"], "cannot reach"), (["--runs", "0"], "--runs 0"),
        (["--timeout-s", "-1"], "--timeout-s"),
    ],
)  # fmt: skip
def test_wrong_use(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what, and the exit code is 2."""
    assert main(["repro", *arguments]) == 2
    errors = capsys.readouterr().err
    assert told in errors and errors.count("\n") == 1


def test_what_the_server_refuses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """With its own words; a server that lists no models has to be told one."""
    with listen(lambda body: [], status=401) as (url, _):
        assert main(["repro", "--base-url", url]) == 2
        assert "answered 401: not like this" in capsys.readouterr().err
    with listen(lambda body: [], models={"data": []}) as (url, _):
        assert main(["repro", "--base-url", url]) == 2
        assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:1", "http://h:1/v1"), ("http://h:1/", "http://h:1/v1"), ("h:1/v1/", "http://h:1/v1"),
        ("https://h/api/v3", "https://h/api/v3"), ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)  # fmt: skip
def test_base_urls(text: str, url: str) -> None:
    """As the SDKs take them, or the root of a server."""
    assert read_base_url(text).geturl() == url


@pytest.mark.full
def test_our_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells steps: the prompt's with one token, then six tokens each, as its script has it, the last one less."""
    rules = [{"reply": PAGE * 5, "tokens_per_step": 6, "step_s": 0.02}]
    with process.serve_script(tmp_path, rules) as url:
        assert main(["repro", "--base-url", url, "--runs", "2", "--json"]) == 0
    for run in json.loads(capsys.readouterr().out)["runs"]:
        assert run["steps_told"] and run["steps"] == 1 + -(-(run["tokens"] - 1) // 6)
        assert 5 < run["accepted_tokens_per_step"] <= 6 and run["step_ms"] > 18
