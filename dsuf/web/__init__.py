"""The page at `/`: a chat, how fast it is, and what came of it. Two static files; nothing is built or loaded besides.

Decided here:

- `index.html` is the whole page. Its policy names its one style and its one script by digest, and lets it talk to its
  own server alone; text of the model is put into it as nodes, never as HTML.
- What the model writes as a page runs in a frame. A frame that is filled in place has the policy of the page around
  it, which lets no such script run, so `frame.html` is served with a policy of its own: an origin that is nobody's,
  any script and style, and no network at all. It fills a frame within itself, which can then go nowhere: where a frame
  may go, the policy around it says.
- The page asks for usage with every event (`stream_options.continuous_usage_stats`), so its figures are the server's.

Imports nothing of ours.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; media-src data: blob:; font-src data:; form-action 'none'; frame-ancestors 'self'"
)


class Page(NamedTuple):
    """A file as it is served, and its Content-Security-Policy."""

    body: bytes
    policy: str


def load_page() -> Page:
    """The page itself."""
    text = (_HERE / "index.html").read_text("utf-8")
    digests = {kind: _digest(inner) for kind, inner in _INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src 'self'; "
        "frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.encode(), policy)


def load_frame() -> Page:
    """The document in which a page that the model wrote is shown."""
    return Page((_HERE / "frame.html").read_bytes(), _FRAME_POLICY)


def _digest(text: str) -> str:
    """How a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
