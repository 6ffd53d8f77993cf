"""What bodies of Messages hold that the library reads as something else: a client's own tools that say so, and
documents of text."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_MARKS = re.compile(rb'"custom"|"document"|"type"\s*:\s*null')
_OWN = ("custom", None)
_Raw = dict[str, msgspec.Raw]


def rewrite(body: bytes) -> bytes:
    """`body` whose tools of type `custom`, or null, have none, which is the same and what the library knows, and whose
    documents of text are that text, in place of which the library puts a remark. What cannot be read is left to the
    library."""
    if _MARKS.search(body) is None:
        return body
    try:
        members = msgspec.json.decode(body, type=_Raw)
        found = _rewrite_tools(members) | _rewrite_messages(members)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return msgspec.json.encode(members) if found else body


def _rewrite_tools(members: _Raw) -> bool:
    """Take the type from the client's own tools; whether there are some."""
    tools = msgspec.json.decode(members.get("tools", b"null"), type=list[_Raw] | None) or []
    own = [tool for tool in tools if "type" in tool and msgspec.json.decode(tool["type"]) in _OWN]
    for tool in own:
        del tool["type"]
    if own:
        members["tools"] = msgspec.Raw(msgspec.json.encode(tools))
    return bool(own)


def _rewrite_messages(members: _Raw) -> bool:
    """Put their text in place of documents; whether there are some."""
    messages = msgspec.json.decode(members.get("messages", b"null"), type=list[_Raw] | None) or []
    found = False
    for message in messages:
        content = message.get("content", msgspec.Raw(b"null"))
        if b'"document"' in memoryview(content).tobytes():
            read = _read_blocks(decoded := msgspec.json.decode(content))
            if read != decoded:
                message["content"], found = msgspec.Raw(msgspec.json.encode(read)), True
    if found:
        members["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return found


def _read_blocks(content: Any) -> Any:
    """`content` of a message, or of a tool's result, with documents read."""
    return [part for block in content for part in _read(block)] if isinstance(content, list) else content


def _read(block: Any) -> Iterator[Any]:
    """What stands for `block`: for a document that is sent as text its title, its context, and its text."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result":
        yield {**block, "content": _read_blocks(block["content"])} if "content" in block else block
        return
    source = block.get("source") if kind == "document" else None
    text = _find_text(source) if isinstance(source, dict) else None
    if text is None:
        yield block
        return
    yield from (_write(block[name]) for name in ("title", "context") if isinstance(block.get(name), str))
    yield from text


def _find_text(source: dict[str, Any]) -> list[Any] | None:
    """The blocks of a document's source; None where it is not text."""
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return [_write(source["data"])]
    content = source.get("content") if source.get("type") == "content" else None
    if isinstance(content, str):
        return [_write(content)]
    return content if isinstance(content, list) else None


def _write(text: str) -> dict[str, str]:
    """A block of text."""
    return {"type": "text", "text": text}
