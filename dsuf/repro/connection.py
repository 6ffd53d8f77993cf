"""HTTP to an OpenAI-compatible server: its model list, and a streamed chat completion."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from dsuf.errors import CommandError
from dsuf.repro.figures import Reply

_SILENCE_S = 120.0
_LISTING_S = 30.0
_DATA = b"data:"


class RunFailed(Exception):
    """A reply that began, or should have, and did not come to its end; the text says why."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where to ask: a base URL as OpenAI's SDKs take it, and the key to send, if any."""

    base: SplitResult
    key: str = ""

    @property
    def url(self) -> str:
        """The base URL."""
        return self.base.geturl()

    def find_model(self) -> str:
        """The first model that the server lists; raises `CommandError`."""
        response = self._ask("GET", "/models", None, _LISTING_S)
        try:
            return str(json.load(response)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError, OSError, http.client.HTTPException):
            raise CommandError(f"{self.url} lists no models: name one with --model") from None

    def stream(self, body: Mapping[str, Any], timeout_s: float) -> Reply:
        """The reply to `body`, within `timeout_s`. Raises `CommandError` where the server cannot be asked so, and
        `RunFailed` where its reply does not come to an end."""
        began_s = time.monotonic()
        response = self._ask("POST", "/chat/completions", json.dumps(body).encode(), min(timeout_s, _SILENCE_S))
        reply = Reply()
        try:
            for event in _read_events(response):
                at_s = time.monotonic() - began_s
                if at_s > timeout_s:
                    raise RunFailed(f"no end after {timeout_s:.0f} s")
                if "error" in event:
                    raise RunFailed(_word_error(event) or "the server told an error")
                reply.take(event, at_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RunFailed(f"the stream broke off: {error or type(error).__name__}") from error
        finally:
            response.close()
        if not reply.marks or "completion_tokens" not in reply.usage:
            raise RunFailed("an empty reply" if not reply.marks else "a reply without `usage`, so tokens are not known")
        return reply

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> http.client.HTTPResponse:
        """The response with status 200; raises `CommandError` for any other, and where there is none."""
        headers = {"accept": "*/*", "connection": "close"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            connection = self._connect(timeout_s)
            connection.request(method, self.base.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            told = b"" if response.status == 200 else response.read(1 << 16)
        except TimeoutError:
            raise CommandError(f"no answer from {self.url} within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise CommandError(f"cannot reach {self.url}: {reason} (`bin/serve` starts a server)") from None
        if response.status != 200:
            raise CommandError(f"{self.url}{path} answered {response.status}{_explain(told)}")
        return response

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        kind = http.client.HTTPSConnection if self.base.scheme == "https" else http.client.HTTPConnection
        return kind(self.base.hostname or "", self.base.port, timeout=timeout_s)


def read_base_url(text: str) -> SplitResult:
    """`text` as a base URL; one without a path gets `/v1`. Raises `CommandError`."""
    try:
        base = urlsplit(text if "://" in text else f"http://{text}")
        usable = base.scheme in ("http", "https") and bool(base.hostname) and (base.port is None or base.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise CommandError(f"--base-url {text}: no address like http://127.0.0.1:8000/v1")
    return base._replace(path=base.path.rstrip("/") or "/v1", query="", fragment="")


def _read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream up to `[DONE]`; raises `RunFailed` if that does not come."""
    for line in response:
        if line.startswith(_DATA):
            data = line[len(_DATA) :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise RunFailed("the stream ended without [DONE]")


def _explain(told: bytes) -> str:
    """What the body of an error says, as the end of a sentence."""
    try:
        message = _word_error(json.loads(told))
    except ValueError:
        message = ""
    return f": {message}" if message else ""


def _word_error(event: Any) -> str:
    """The message in an error of the OpenAI form, or ""."""
    error = event.get("error") if isinstance(event, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")
