"""A small server on loopback that speaks as much of the hub's protocol as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "someone/model"
COMMIT = "c" * 40
LARGE_BYTES = 10_000


class Hub:
    """One repository, `files` by name. Large ones are under LFS: they have a SHA-256, and are served from another path.

    `cuts`: break off the next answers for a file, each after so many bytes. `lies`: files of which the listing states a
    wrong digest. `requests`: path and range header of each request for content.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.cuts: dict[str, list[int]] = {}
        self.lies: set[str] = set()
        self.requests: list[tuple[str, str | None]] = []
        self.honours_range = True
        self.url = ""

    def listing(self) -> dict[str, object]:
        """What `/api/models/...?blobs=true` answers."""
        return {"id": REPO, "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, object]:
        content = self.files[name] + (b"?" if name in self.lies else b"")
        sha256 = hashlib.sha256(content).hexdigest()
        git_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(self.files[name]), "blobId": git_id}
        if len(content) > LARGE_BYTES:
            entry["lfs"] = {"size": len(self.files[name]), "sha256": sha256, "pointerSize": 130}
        return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        resolve = f"/{REPO}/resolve/{COMMIT}/"
        if path in (f"/api/models/{REPO}/revision/main", f"/api/models/{REPO}/revision/{COMMIT}"):
            self._send(200, json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"})
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.hub.files:
            self._resolve(path.removeprefix(resolve))
        elif path.startswith("/blob/"):
            self._content(path.removeprefix("/blob/"))
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _resolve(self, name: str) -> None:
        content = self.hub.files[name]
        if len(content) <= LARGE_BYTES:
            return self._content(name)
        headers = {"Location": f"/blob/{name}", "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content)),
                   "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}  # fmt: skip
        return self._send(302, b"", headers)

    def _content(self, name: str) -> None:
        content, asked = self.hub.files[name], self.headers.get("Range")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        status = 200
        if self.command == "GET":
            self.hub.requests.append((name, asked))
        if asked and self.hub.honours_range:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        cuts = self.hub.cuts.get(name) if self.command == "GET" else None
        self._send(status, content, headers, cuts.pop(0) if cuts else None)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of loopback; its `url` is set meanwhile."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
