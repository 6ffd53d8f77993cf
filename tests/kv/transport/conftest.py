"""What goes over sockets is tried on both event loops: the standard one, and the one that serves."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Two for files whose name says that they are about sockets."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return loops if item.path.stem.endswith("tcp") else {"asyncio": loops["asyncio"]}
