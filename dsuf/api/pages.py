"""The page for people: a chat at `/`, and the frame in which it shows what came of one."""

from aiohttp import web

from dsuf.api.parts import Parts
from dsuf.web import Page, load_frame, load_page

_PAGE, _FRAME = load_page(), load_frame()


async def show_page(_request: web.Request, parts: Parts) -> web.Response:
    """The page."""
    return _reply(_PAGE)


async def show_frame(_request: web.Request, parts: Parts) -> web.Response:
    """The document that its frame loads."""
    return _reply(_FRAME)


def _reply(page: Page) -> web.Response:
    """`page` under its policy; asked for again each time, so that it fits its server."""
    headers = {
        "Content-Security-Policy": page.policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }  # fmt: skip
    return web.Response(body=page.body, content_type="text/html", charset="utf-8", headers=headers)
