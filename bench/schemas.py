"""Random JSON schemas of the kinds that clients send, the same for the same number; and those of the public test suite.

The suite is that of https://github.com/json-schema-org/JSON-Schema-Test-Suite, draft 2020-12, as the package jsonschema
4.26.0 carries it in its source archive: one case a line, with what it says is valid and what is not. Its licence stands
beside it.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12.jsonl"

_WORDS = ("name", "age", "tags", "city", "unit", "note", "id", "path", "größe", "a b")
_TEXTS = ("red", "green", "", "two words", "ü", 'quo"te', "back\\slash", "{", "x/y")
_PATTERNS = ("^[a-z]{1,4}$", "^[0-9]{2}-[A-F]$", "^(yes|no)$", "^x*y?$")

Schema = dict[str, Any]


class SuiteCase(NamedTuple):
    """A schema (or `True`, or `False`) of the suite, the file that it is from, and values that follow it or do not."""

    group: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def read_suite() -> Iterator[SuiteCase]:
    """All cases of the suite, the optional ones included."""
    for line in _SUITE.read_text("utf-8").splitlines():
        case = json.loads(line)
        yield SuiteCase(case["group"], case["schema"], case["valid"], case["invalid"])


def make_schema(number: int) -> Schema:
    """Schema `number`."""
    draw = random.Random(number)
    schema = _draw(draw, depth=0)
    if draw.random() < 0.2:
        properties = {"one": {"$ref": "#/$defs/leaf"}, "more": schema}
        schema = {"$defs": {"leaf": _draw(draw, depth=2)}, "type": "object", "properties": properties}
    return schema


def _draw(draw: random.Random, depth: int) -> Schema:
    """A schema; the deeper, the simpler."""
    kinds: list[Callable[[random.Random, int], Schema]] = [_text, _number, _choice]
    kinds += [_object, _object, _array, _either] if depth < 3 else []
    return draw.choice(kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _draw(draw, depth + 1) for name in names}}
    if draw.random() < 0.7:
        schema["required"] = [name for name in names if draw.random() < 0.7]
    if draw.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _draw(draw, depth + 1)}
    if draw.random() < 0.6:
        schema["minItems"] = draw.randint(0, 2)
        schema["maxItems"] = schema["minItems"] + draw.randint(0, 3)
    return schema


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(draw, depth + 1) for _ in range(draw.randint(1, 3))]}


def _text(draw: random.Random, _: int) -> Schema:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind == 1:
        least = draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}
    if kind == 2:
        return {"type": "string", "format": draw.choice(("date", "time", "uuid", "ipv4"))}
    return {"type": "string", "maxLength": 40}


def _number(draw: random.Random, _: int) -> Schema:
    kind = draw.choice(("integer", "number"))
    if draw.random() < 0.5:
        return {"type": kind, "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 900)}
    return {"type": [kind, "null"]} if draw.random() < 0.3 else {"type": kind}


def _choice(draw: random.Random, _: int) -> Schema:
    if draw.random() < 0.3:
        return {"type": draw.choice(("boolean", "null"))}
    if draw.random() < 0.3:
        return {"const": draw.choice((*_TEXTS, 3, None, [1, "a"]))}
    return {"enum": draw.sample((*_TEXTS, 1, 2.5, True, None), draw.randint(1, 5))}
