"""What makes a schema one that no reply can follow, though the grammar library compiles it, or one that parameters of a
call cannot be written by."""

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from dsuf.recipe.grammar import MARK, NAME

_SHARED = ("$defs", "definitions")
_WRITABLE = re.compile(NAME)


def find_loop(schema: Any) -> str | None:
    """A reference in use that leads back to itself with nothing on the way, so that no value follows it."""
    graph = {reference: set(_needs(_resolve(schema, reference))) for reference in _list_references(schema)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return str(error.args[1][0])
    return None


def find_unwritable(parameters: Any) -> str | None:
    """A parameter whose name cannot stand in a call: it would not come out as it is."""
    known = parameters.get("properties") if isinstance(parameters, dict) else None
    names = known if isinstance(known, dict) else {}
    return next((name for name in names if not _WRITABLE.fullmatch(name) or MARK in name), None)


def _list_references(root: Any) -> set[str]:
    """All references that lie on a way from the root of a schema."""
    found: set[str] = set()
    parts = [root]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += [value for name, value in part.items() if name not in _SHARED]
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in found:
                found.add(reference)
                parts.append(_resolve(root, reference))
    return found


def _needs(schema: Any) -> Iterator[str]:
    """The references that a value of `schema` has to follow as a whole."""
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference
    for key in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and (key == "allOf" or len(parts) == 1):
            for part in parts:
                yield from _needs(part)


def _resolve(root: Any, reference: str) -> Any:
    """The part of `root` that a reference into it names; None for anything else."""
    head, *names = reference.split("/")
    part = root if head == "#" else None
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(key)
        else:
            part = part[int(key)] if isinstance(part, list) and key.isdecimal() and int(key) < len(part) else None
    return part
