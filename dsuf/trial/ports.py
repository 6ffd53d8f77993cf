"""Ports of this machine: whether somebody could listen there."""

import socket


def can_bind(host: str, port: int) -> bool:
    """Whether a server could listen at `host`:`port` now; the system may still be about a connection that has ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
