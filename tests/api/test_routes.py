"""Paths, methods, keys, and the routes that tell about the server."""

import asyncio
import base64
import gzip
import hashlib
import json
import re
import time
import zlib
from typing import Any

import pytest

from dsuf import __version__
from dsuf.api import server
from dsuf.api.exchange import Exchange
from dsuf.recipe.names import SERVED_NAMES
from dsuf.recipe.vocabulary import Vocabulary
from tests.api.rig import MODEL, Rig, chat_body, connect, message_body, receive, serve

OPEN = ["/health", "/healthz", "/livez", "/readyz", "/ready", "/metrics"]
GUARDED = ["/v1/models", "/models", "/anthropic/v1/models", "/version", "/server_info", "/v1/models/" + MODEL]


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/anthropic/v1/models", "//v1//models/"])
async def test_model_list(rig: Rig, path: str) -> None:
    listing = await (await rig.client.get(rig.url + path)).json()
    names = [name for name in SERVED_NAMES if name != "deepseek-v4-flash-vision-exp"]  # pictures are not served
    assert listing["object"] == "list" and [entry["id"] for entry in listing["data"]] == names
    entry = listing["data"][0]
    assert entry["object"] == "model" and isinstance(entry["created"], int) and entry["owned_by"]
    assert entry["max_model_len"] == entry["context_window"] == 1_048_576


@pytest.mark.parametrize(
    ("path", "headers"), [("/anthropic/v1/models", {}), ("/v1/models", {"anthropic-version": "2023-06-01"})]
)
async def test_model_list_of_messages_clients(rig: Rig, path: str, headers: dict[str, str]) -> None:
    """One page of their fields; the others stay."""
    listing = await (await rig.client.get(rig.url + path, headers=headers)).json()
    names = [entry["id"] for entry in listing["data"]]
    assert (listing["has_more"], listing["first_id"], listing["last_id"]) == (False, names[0], names[-1])
    entry = await (await rig.client.get(f"{rig.url}{path}/{MODEL}", headers=headers)).json()
    assert entry == listing["data"][0] and (entry["type"], entry["display_name"]) == ("model", MODEL)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["created_at"]) and entry["object"] == "model"
    plain = await (await rig.client.get(rig.url + "/v1/models")).json()
    assert set(plain) == {"object", "data"} and "type" not in plain["data"][0]


@pytest.mark.parametrize("name", [*SERVED_NAMES, "deepseek-ai%2FDeepSeek-V4.1-Flash"])
async def test_one_model(rig: Rig, name: str) -> None:
    for prefix in ("/v1/models/", "/models/"):
        entry = await (await rig.client.get(rig.url + prefix + name)).json()
        assert entry["id"] == name.replace("%2F", "/")


async def test_an_unknown_model(rig: Rig) -> None:
    """Whoever asks gets the same list, of names that promise nothing that is not served."""
    listing = await (await rig.client.get(rig.url + "/v1/models")).json()
    names = sorted(entry["id"] for entry in listing["data"])
    message = (await (await rig.chat(model="gpt-9")).json())["error"]["message"]
    assert message == f"The supported API model names are {', '.join(names)}, but you passed gpt-9."
    response = await rig.client.get(rig.url + "/v1/models/gpt-9")
    error = (await response.json())["error"]
    assert response.status == 404 and error["type"] == "not_found_error" and "gpt-9" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/healthz", "/livez"])
async def test_health(rig: Rig, path: str) -> None:
    rig.status.draining = True
    response = await rig.client.get(rig.url + path)
    assert response.status == 200 and await response.json() == {"alive": True, "failing": []}
    rig.status.dead = ["loop"]
    response = await rig.client.get(rig.url + path)
    assert response.status == 503 and await response.json() == {"alive": False, "failing": ["loop"]}


@pytest.mark.parametrize("path", ["/readyz", "/ready"])
async def test_readiness(rig: Rig, path: str) -> None:
    response = await rig.client.get(rig.url + path)
    assert response.status == 200 and await response.json() == {"ready": True, "failing": []}
    rig.status.failing = ["weights"]
    response = await rig.client.get(rig.url + path)
    assert response.status == 503 and await response.json() == {"ready": False, "failing": ["weights"]}


async def test_page_and_frame_are_open(vocabulary: Vocabulary) -> None:
    """Each under a policy of its own: the page's names its script and style, the frame's lets nothing out."""
    async with serve(vocabulary, keys=("sk-one",)) as rig:
        page, frame = [await rig.client.get(rig.url + path) for path in ("/", "/frame")]
        text = await page.text()
        for response in (page, frame):
            assert response.status == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        for kind in ("script", "style"):
            (inner,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert "unsafe" not in policy and "default-src 'none'" in policy
        assert frame.headers["content-security-policy"].startswith("sandbox allow-scripts; default-src 'none'; ")
        assert "connect-src" not in frame.headers["content-security-policy"]
        assert (await rig.client.head(rig.url + "/")).status == 200


async def test_page_loads_nothing_from_elsewhere(rig: Rig) -> None:
    """Neither the page nor its frame names another host; names of XML are no addresses."""
    for path in ("/", "/frame"):
        text = await (await rig.client.get(rig.url + path)).text()
        assert re.findall(r"https?://[\w.]+", text.replace("http://www.w3.org/2000/svg", "")) == []


async def test_metrics_version_and_facts(rig: Rig) -> None:
    response = await rig.client.get(rig.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"dsuf_example_total" in await response.read()
    assert await (await rig.client.get(rig.url + "/version")).json() == {"version": __version__}
    facts = await (await rig.client.get(rig.url + "/server_info")).json()
    assert facts["engine"]["name"] == "scripted" and facts["node"] == {"role": "both"}
    assert facts["constrained_decoding"] is False and facts["checkpoint"] == ""


async def test_probes_do_not_fill_the_log(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those that ask all through a start."""
    lines: list[tuple[str, int, str]] = []
    monkeypatch.setattr(
        Exchange, "log", lambda self, status, *, level="info": lines.append((self.endpoint, status, level))
    )
    rig.status.failing = ["weights"]
    for path in ("/readyz", "/health", "/v1/models", "/no/such"):
        await rig.client.get(rig.url + path)
    assert lines == [
        ("/readyz", 503, "debug"), ("/health", 200, "debug"), ("/v1/models", 200, "info"), ("other", 404, "info"),
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/files", "/v1/files", "/v1/files/abc", "/page", "/index.html", "/v1/chat", "/%ff%00x"]
)
async def test_unknown_paths(rig: Rig, method: str, path: str) -> None:
    response = await rig.client.request(method, rig.url + path, data=b"x" * 1000 if method != "GET" else None)
    assert response.status == 404 and response.content_type == "application/json"
    assert (await response.json())["error"]["type"] == "not_found_error"
    assert rig.metrics.responses == [("other", 404)]


async def test_unknown_paths_of_messages_clients(rig: Rig) -> None:
    response = await rig.post("/v1/files", {}, anthropic_version="2023-06-01")
    body = await response.json()
    assert response.status == 404 and body["type"] == "error" and body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"), ("DELETE", "/v1/messages", "POST"), ("OPTIONS", "/messages", "POST"),
        ("POST", "/", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"), ("POST", "/v1/models/x", "GET, HEAD"), ("PUT", "/health", "GET, HEAD"),
    ],
)  # fmt: skip
async def test_wrong_methods(rig: Rig, method: str, path: str, allow: str) -> None:
    response = await rig.client.request(method, rig.url + path)
    body = await response.json()
    assert response.status == 405 and response.headers["allow"] == allow
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("route", server.ROUTES, ids=lambda route: route.path)
async def test_every_path_of_every_route(rig: Rig, route: server.Route) -> None:
    """Each alias leads to its route, with a slash more or less; the wrong method is told the right one, in JSON."""
    wrong = "DELETE" if route.method == "POST" else "POST"
    for path in (route.path, *route.aliases):
        for spelt in {path, "/" + path, path + "/"}:
            response = await rig.client.request(wrong, rig.url + spelt)
            body = await response.json()
            assert response.status == 405 and response.headers["allow"] == ", ".join(route.methods)
            assert body["error"]["type"] == "invalid_request_error" and wrong in body["error"]["message"]
            assert ("request_id" in body) == (route.dialect.protocol == "messages")
            response = await rig.client.request(route.method, rig.url + spelt, data=b"{")
            assert response.status in (200, 400), await response.text()
            if response.status == 400:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert {endpoint for endpoint, _ in rig.metrics.responses} == {route.path}


async def test_head(rig: Rig) -> None:
    response = await rig.client.head(rig.url + "/readyz")
    assert response.status == 200 and await response.read() == b""


@pytest.mark.parametrize("target", [b"OPTIONS * HTTP/1.1", b"CONNECT x.org:443 HTTP/1.1", b"GET http://x/v HTTP/1.1"])
async def test_targets_that_are_no_path(rig: Rig, target: bytes) -> None:
    raw = await connect(rig.port, "/", b"", close=True)
    await receive(raw)
    raw.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(target + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert reply.split(b" ")[1] in (b"400", b"404") and b"application/json" in reply


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-token: " + b"a" * 9_000, 431, "longer than 8,190 bytes"),
        (b"GET /health?" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: x", 431, "longer than 8,190 bytes"),
        (b"GET /health HTTP/1.1\r\nhost: x" + b"\r\nx: y" * 200, 431, "more than 128 headers"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx y: z", 400, "not a valid HTTP request"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-token: " + b"a" * 8_000, 200, "alive"),
    ],
)
async def test_heads(rig: Rig, head: bytes, status: int, reason: str) -> None:
    """A head that is too large is told from one that is no HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(head + b"\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert int(reply.split()[1]) == status and reason.encode() in reply
    assert isinstance(json.loads(reply.partition(b"\r\n\r\n")[2]), dict)


async def test_keys(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=("sk-one", "sk-two")) as rig:
        for path in OPEN:
            assert (await rig.client.get(rig.url + path)).status == 200
        for path in GUARDED:
            assert (await rig.client.get(rig.url + path)).status == 401
            for key in ("sk-one", "sk-two"):
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    assert (await rig.client.get(rig.url + path, headers=headers)).status == 200
        wrong = [{"authorization": "Bearer sk-on"}, {"x-api-key": ""}, {"authorization": "Basic sk-one"},
                 {"authorization": "Bearer wrong", "x-api-key": "sk-one"}, {"x-api-key": "sk-\xe9"}]  # fmt: skip
        for headers in wrong:
            response = await rig.client.get(rig.url + "/v1/models", headers=headers)
            error = (await response.json())["error"]
            assert response.status == 401 and error["type"] == "authentication_error"
        response = await rig.post("/v1/messages", message_body())
        body = await response.json()
        assert response.status == 401 and body["error"]["type"] == "authentication_error" and body["type"] == "error"
        assert rig.submit.tickets == []


async def test_tenants_and_users_get_salts_of_their_own(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, keys=("sk-one", "sk-two")) as rig:
        for key, user in [("sk-one", "a"), ("sk-one", "b"), ("sk-two", "a"), ("sk-one", "a")]:
            await rig.post("/v1/chat/completions", chat_body(user_id=user), x_api_key=key)
        turns = [ticket.turn for ticket in rig.submit.tickets]
        assert len({turn.prompt.salt for turn in turns}) == 3 and turns[0].prompt.salt == turns[3].prompt.salt
        assert turns[0].tenant == turns[1].tenant != turns[2].tenant and "sk-" not in turns[0].tenant


async def test_count_tokens(rig: Rig) -> None:
    for path in ("/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"):
        counted = await (await rig.post(path, message_body())).json()
        await rig.message()
        assert counted == {"input_tokens": len(rig.submit.last.turn.prompt.ids)}
    response = await rig.post("/v1/messages/count_tokens", {"model": MODEL})
    assert response.status == 400 and (await response.json())["type"] == "error"


@pytest.mark.parametrize("text", [rb"\ud800", rb"\ud800 and more", rb"\udc00", rb"\ud83d\ude00\uDE00"])
async def test_tokenize_names_a_lone_surrogate(rig: Rig, text: bytes) -> None:
    response = await rig.post("/tokenize", b'{"prompt": "' + text + b'"}')
    assert response.status == 400 and "a lone surrogate" in (await response.json())["error"]["message"]
    assert (await rig.post("/tokenize", b'{"prompt": "' + rb"\ud83d\ude00" + b'"}')).status == 200


async def test_tokenize_and_back(rig: Rig) -> None:
    text = "Grüße, 世界! <｜User｜>"
    made = await (await rig.post("/tokenize", {"prompt": text})).json()
    assert made["tokens"] == rig.vocabulary.encode(text) and made["count"] == len(made["tokens"])
    read = await (await rig.post("/v1/detokenize", {"tokens": made["tokens"]})).json()
    assert read == {"prompt": text}
    rendered = await (await rig.post("/tokenize", {"messages": chat_body()["messages"]})).json()
    await rig.chat()
    assert rendered["tokens"] == list(rig.submit.last.turn.prompt.ids)


@pytest.mark.parametrize("body", [{}, {"prompt": 5}, {"messages": "x"}, [], {"messages": [{"role": "x"}]}, b"{"])
async def test_tokenize_refuses(rig: Rig, body: Any) -> None:
    response = await rig.post("/tokenize", body)
    assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("tokens", [[-1], [10**9], ["a"], 5, None, [1.5]])
async def test_detokenize_refuses(rig: Rig, tokens: Any) -> None:
    assert (await rig.post("/detokenize", {"tokens": tokens})).status == 400


async def test_drain(rig: Rig) -> None:
    rig.status.draining = True
    for response, kind in [(await rig.chat(), "chat"), (await rig.message(stream=True), "messages")]:
        assert response.status == 503 and response.headers["retry-after"] == "2"
        assert response.headers["connection"] == "close"
        body = await response.json()
        assert body["error"]["type"] == "overloaded_error" and ("request_id" in body) == (kind == "messages")
    assert (await rig.client.get(rig.url + "/readyz")).status == 503
    assert (await rig.client.get(rig.url + "/v1/models")).status == 200


async def test_body_limits(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, body_limit_bytes=2000, body_timeout_s=0.2) as rig:
        response = await rig.chat(messages=[{"role": "user", "content": "x" * 3000}])
        error = (await response.json())["error"]
        assert response.status == 413 and error["type"] == "request_too_large"

        async def pieces():  # type: ignore[no-untyped-def]
            for _ in range(10):
                yield b" " * 500

        response = await rig.client.post(rig.url + "/v1/messages", data=pieces())
        assert response.status == 413 and (await response.json())["type"] == "error"
        bomb = gzip.compress(b" " * 1_000_000)
        headers = {"content-encoding": "gzip"}
        response = await rig.client.post(rig.url + "/v1/messages", data=bomb, headers=headers)
        assert response.status == 413

        raw = await connect(rig.port, "/v1/chat/completions", b"")
        raw.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        reply = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        assert b" 408 " in reply and b"timeout_error" in reply


async def test_content_types(rig: Rig) -> None:
    rig.play("Hm.</think>Hi")
    body = json.dumps(chat_body()).encode()
    url = rig.url + "/v1/chat/completions"
    for media_type in ("application/json; charset=utf-8", "application/vnd.x+json", "text/plain",
                       "application/x-www-form-urlencoded", "application/octet-stream"):  # fmt: skip
        assert (await rig.client.post(url, data=body, headers={"content-type": media_type})).status == 200
    for media_type in ("multipart/form-data; boundary=x", "image/png", "application/xml"):
        response = await rig.client.post(url, data=body, headers={"content-type": media_type})
        assert response.status == 415 and (await response.json())["error"]["type"] == "invalid_request_error"
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    assert (await rig.client.post(url, data=gzip.compress(body), headers=packed)).status == 200
    for broken in (b"no gzip", b"", gzip.compress(body)[:-9], gzip.compress(body) + b"x"):
        assert (await rig.client.post(url, data=broken, headers=packed)).status == 400
    deflated = packed | {"content-encoding": "deflate"}
    for data in (zlib.compress(body), zlib.compress(body)[2:-4]):
        assert (await rig.client.post(url, data=data, headers=deflated)).status == 200
    response = await rig.client.post(url, data=body, headers=packed | {"content-encoding": "zz"})
    assert response.status == 415


async def test_a_large_body_passes(rig: Rig) -> None:
    body = chat_body(dsh_session_log="x" * 20_000_000)
    assert (await rig.post("/v1/chat/completions", body)).status == 200


async def test_a_head_must_arrive_in_time(vocabulary: Vocabulary) -> None:
    async with serve(vocabulary, header_timeout_s=0.2) as rig:
        for start in (b"", b"POST /v1/chat"):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        for _ in range(2):  # an idle connection is kept: only a head that has begun must go on
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 20)
            await asyncio.sleep(0.4)
        writer.write(b"GET /hea")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_a_packed_body_does_not_hold_up_the_loop(rig: Rig) -> None:
    """32 kB that hold 32 MB are unpacked beside the loop, one after the other."""
    bomb, longest_s = gzip.compress(b" " * 30_000_000), 0.0
    before_s = time.thread_time()
    gzip.decompress(bomb)
    unpacking_s = time.thread_time() - before_s
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    url = rig.url + "/v1/chat/completions"
    sent = [asyncio.ensure_future(rig.client.post(url, data=bomb, headers=headers)) for _ in range(3)]
    while not all(reply.done() for reply in sent):
        before_s = time.thread_time()  # of the loop's own work: the machine may have other things to do
        await asyncio.sleep(0.01)
        longest_s = max(longest_s, time.thread_time() - before_s)
    assert {(await reply).status for reply in sent} <= {400, 413}
    assert longest_s < 0.5 * unpacking_s
