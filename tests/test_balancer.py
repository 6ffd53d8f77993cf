"""What a node hears of its clients through the balancer."""

import contextlib
import socket
import socketserver
import threading
import time
from pathlib import Path

import pytest

from tests.test_trial import balance

BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize("begun", [b"", BEGUN], ids=["before", "between"])
def test_a_node_hears_at_once_that_a_client_has_left(tmp_path: Path, begun: bytes) -> None:
    """Before it has sent anything as between two tokens: else it computes on for nobody."""
    asked, left = threading.Event(), threading.Event()

    class Node(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if b"/turn" not in self.request.recv(65_536):
                self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                return
            self.request.sendall(begun)
            asked.set()
            with contextlib.suppress(ConnectionError):
                self.request.recv(1)
            left.set()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Node) as node:
        node.daemon_threads, node.block_on_close = True, False
        threading.Thread(target=node.serve_forever, args=(0.05,), daemon=True).start()
        try:
            with balance(tmp_path, f"node 127.0.0.1:{node.server_address[1]}") as port:
                time.sleep(0.5)
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(b"POST /turn HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                    assert asked.wait(10.0) and not left.wait(0.3)
                assert left.wait(5.0)
        finally:
            node.shutdown()
