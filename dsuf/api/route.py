"""An entry of the table of routes."""

from collections.abc import Awaitable
from typing import Protocol

import msgspec
from aiohttp import web

from dsuf.api.chat import CHAT
from dsuf.api.dialect import Dialect
from dsuf.api.guard import Access
from dsuf.api.parts import Parts


class Endpoint(Protocol):
    """A handler that is given the server's parts."""

    def __call__(self, request: web.Request, /, parts: Parts) -> Awaitable[web.StreamResponse]:
        """The response to `request`."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint under its canonical path. `access` is open to all only for what probes and scrapers ask,
    and for the page, which holds nothing of the server's."""

    path: str
    method: str
    endpoint: Endpoint
    aliases: tuple[str, ...] = ()
    dialect: Dialect = CHAT
    access: Access = "key"

    @property
    def methods(self) -> tuple[str, ...]:
        """What `Allow` lists."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)
