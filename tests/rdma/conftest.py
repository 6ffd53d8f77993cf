"""Reading by RDMA is tried on the loop that serves too; the test machines have the standard one."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """By file."""
    return {"uvloop": uvloop.new_event_loop} if item.path.stem == "test_mover" else {"asyncio": asyncio.new_event_loop}
