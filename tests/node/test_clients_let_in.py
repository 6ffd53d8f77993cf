"""How clients are let in: keys that change under a running node, HTTPS, and tenants that share no prefix."""

import asyncio
import json
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from dsuf.errors import CommandError
from dsuf.node.drain import Signals
from dsuf.node.node import Node
from tests.certificates import make_certificates
from tests.node.process import serving
from tests.node.rig import Client, get, running, write_script
from tests.node.test_sessions import QUESTION, ask
from tests.sched.rig import until

REPLY = {"reply": "one two three four five six seven eight", "step_s": 0.02}


async def status_of(node: Node, key: str) -> int:
    """What the model list answers to `key`."""
    client = await Client.connect(node)
    client.writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode())
    head = await client.read_until(b"\r\n")
    client.close()
    return int(head.split()[1])


async def ready(node: Node) -> dict[str, object]:
    """What readiness says; a node whose files are broken stays ready."""
    status, _, body = await get(node, "/readyz")
    assert status == 200
    return dict(body)


async def test_keys_are_read_again_when_the_file_changes_or_a_signal_comes(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    async with running(model_dir, write_script(tmp_path, [REPLY]), api_key_file=str(file), api_keys="sk-kept") as node:
        node._reloading.cancel()  # type: ignore[union-attr]  # one that looks more often takes its place
        reloading = asyncio.create_task(node.reload.run(look_s=0.02))
        signals = Signals()
        signals.on_hangup = node.reload.ask
        signals.install()
        assert [await status_of(node, key) for key in ("sk-old", "sk-kept", "sk-new")] == [200, 200, 401]
        changed = tmp_path / "changed"
        changed.write_text("sk-new tenant=a\n")
        changed.rename(file)
        await until(lambda: len(node.reload.keys._keys) == 2 and node.reload.keys._keys[1].text == "sk-new")
        assert [await status_of(node, key) for key in ("sk-old", "sk-kept", "sk-new")] == [401, 200, 200]
        for spoil in (lambda: file.write_text("\n"), file.unlink):  # neither opens the server nor closes it
            spoil()
            await until(lambda: node.reload.trouble is not None)
            assert [await status_of(node, key) for key in ("sk-old", "", "sk-new")] == [401, 401, 200]
            assert "api_key_file" in str((await ready(node))["degraded"])
            file.write_text("sk-new\n")
            await until(lambda: node.reload.trouble is None)
        assert await ready(node) == {"ready": True, "failing": []}
        reads = node.reload.keys._keys
        os.kill(os.getpid(), signal.SIGHUP)  # reads again though nothing changed
        await until(lambda: node.reload.keys._keys is not reads)
        reloading.cancel()


async def ask_over_tls(port: int, context: ssl.SSLContext, text: bytes, until_: bytes) -> bytes:
    """Send `text` and read to the end of `until_`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(text)
        return await asyncio.wait_for(reader.readuntil(until_), 10)
    finally:
        writer.close()


def request(body: bytes) -> bytes:
    """A chat request."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def trusting(ca: Path) -> ssl.SSLContext:
    """A client's context."""
    return ssl.create_default_context(cafile=str(ca))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_https_serves_streams_and_hears_clients_leave(
    model_dir: Path, tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_over_tls(model_dir, tmp_path))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def serve_over_tls(model_dir: Path, tmp_path: Path) -> None:
    """Streams, leaving, and what is refused."""
    made = make_certificates(tmp_path)
    files = {"tls_cert_file": str(made.certificate), "tls_key_file": str(made.key)}
    message = {"role": "user", "content": "x"}
    fields = {"model": "deepseek-flash", "stream": True, "thinking": {"type": "disabled"}, "messages": [message]}
    body = json.dumps(fields).encode()
    slow = REPLY | {"match": "slow", "step_s": 0.5}
    async with running(model_dir, write_script(tmp_path, [slow, REPLY]), **files) as node:
        assert node.url.startswith("https://")
        port = int(node.url.rpartition(":")[2])
        whole = await ask_over_tls(port, trusting(made.ca), request(body), b"[DONE]")
        assert b"eight" in whole and b"200 OK" in whole
        plain = await Client.connect(node)
        await plain.send("GET", "/health")
        assert await plain.read_all() == b"", "plain HTTP is no way in"
        await ask_over_tls(port, trusting(made.ca), request(body.replace(b'"x"', b'"slow"')), b"one")
        await until(lambda: node.scheduler is not None and not any(node.scheduler.counters().values()))


async def test_a_new_certificate_is_taken(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    made, new = make_certificates(tmp_path), make_certificates(tmp_path / "new", name="renewed")
    files = {"tls_cert_file": str(made.certificate), "tls_key_file": str(made.key)}
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    async with running(model_dir, write_script(tmp_path, [REPLY]), **files) as node:
        port = int(node.url.rpartition(":")[2])
        made.certificate.write_bytes(new.certificate.read_bytes())
        node.reload.ask()
        await until(lambda: node.reload.trouble is not None)  # it does not fit the key: the old pair goes on
        assert b"200 OK" in await ask_over_tls(port, trusting(made.ca), health, b"}")
        made.key.write_bytes(new.key.read_bytes())
        node.reload.ask()
        await until(lambda: node.reload.trouble is None)
        assert b"200 OK" in await ask_over_tls(port, trusting(new.ca), health, b"}")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask_over_tls(port, trusting(made.ca), health, b"}")


@pytest.mark.parametrize("spoil", [lambda made: made.key.write_text("x"), lambda made: made.certificate.unlink()])
async def test_no_start_without_the_certificate(
    model_dir: Path, tmp_path: Path, spoil: Callable[[object], object]
) -> None:
    made = make_certificates(tmp_path)
    spoil(made)
    files = {"tls_cert_file": str(made.certificate), "tls_key_file": str(made.key)}
    with pytest.raises(CommandError, match="tls_cert_file"):
        async with running(model_dir, write_script(tmp_path, [REPLY]), **files):
            pass


@pytest.mark.full
def test_two_tenants_share_no_prefix(tmp_path: Path) -> None:
    """The same prompt: a tenant's other key finds what the first left, another tenant and another user do not."""
    file = tmp_path / "keys"
    file.write_text("sk-a1 tenant=a\nsk-a2 tenant=a\nsk-b tenant=b\n")
    with serving("--api-keys", "sk-x", "--api-key-file", str(file)) as server:
        messages = [{"role": "user", "content": QUESTION}]
        cached = {}
        for key, user in (("sk-a1", ""), ("sk-b", ""), ("sk-x", ""), ("sk-a2", "u"), ("sk-a2", ""), ("sk-b", "")):
            _, details, length = ask(server, messages, key=key, user_id=user or None)
            cached[key, user] = details["cached_tokens"] if (key, user) not in cached else -details["cached_tokens"]
            time.sleep(0.2)
    assert cached == {
        ("sk-a1", ""): 0, ("sk-b", ""): 1 - length, ("sk-x", ""): 0, ("sk-a2", "u"): 0, ("sk-a2", ""): length - 1,
    }  # fmt: skip
