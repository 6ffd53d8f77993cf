"""What a body says of its output that the library does not pass on as it stands.

That a call must be made is lost where Messages ask for one of any tool, and where there are no tools. That none may be
made takes the tools out of the prompt and does no more, whatever calls the conversation shows the model. The form that
Messages ask for is lost as a whole. Of a schema that is `strict` the library keeps the names and types, and leaves out
what bounds them (`maxItems`, `maxLength`, …): a reply that followed what is left would not follow what was sent.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dsuf.errors import InvalidRequest

_FORCING = ("required", "any", "tool", "function", "custom")
_FORMS = {"response_format": "json_schema", "text": "format"}  # of a chat, and of Responses
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the reply has to call a tool, or may call none of those there are; what its answer, and the arguments of
    tools by name, have to follow.

    `form` is what an answer of Messages has to follow, of which the library does not know that it has to follow any.
    """

    must_call: bool = False
    must_not_call: bool = False
    answer: Mapping[str, Any] | None = None
    form: Mapping[str, Any] | None = None
    tools: Mapping[str, Mapping[str, Any]] = {}


class _Body(msgspec.Struct):
    """The fields that say it, in all protocols."""

    tool_choice: Any = None
    tools: Any = None
    response_format: Any = None
    text: Any = None


class _MessagesBody(_Body):
    """And where Messages say the form, today and in its beta."""

    output_config: Any = None
    output_format: Any = None


def read_wishes(body: bytes) -> Wishes:
    """The wishes of `body`, which the library has read."""
    return _read(body, msgspec.json.decode(body, type=_Body))


def _read(body: bytes, fields: _Body) -> Wishes:
    """The wishes in `fields` of `body`."""
    choice = fields.tool_choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    calls = Wishes(must_call=kind in _FORCING, must_not_call=kind == "none" and bool(fields.tools))
    if b'"strict"' not in body:
        return calls
    forms = [_get(getattr(fields, name), inner) for name, inner in _FORMS.items()]
    answer = next((schema for form in forms if (schema := _find_strict(form)) is not None), None)
    return msgspec.structs.replace(calls, answer=answer, tools=_read_tools(fields.tools))


def read_messages_wishes(body: bytes) -> Wishes:
    """The wishes of a `body` of Messages; raises `InvalidRequest` for a form that is none."""
    fields = msgspec.json.decode(body, type=_MessagesBody)
    form, field = _get(fields.output_config, "format"), "output_config.format"
    if form is None:
        form, field = fields.output_format, "output_format"
    schema = _get(form, "schema")
    if form is not None and (_get(form, "type") != "json_schema" or not isinstance(schema, dict)):
        raise InvalidRequest(f"`{field}` must be of type `json_schema`, with an object `schema`", param=field)
    return msgspec.structs.replace(_read(body, fields), answer=None, form=schema)


def relax(body: bytes) -> bytes:
    """`body` without the strictness of its answer's schema, which is kept to here (`Wishes.answer`): the library would
    refuse what SDKs make of classes, such as a reference within `anyOf`. Tools keep theirs, which their prompt shows,
    except where one has a map: that it refuses, too. What cannot be read is left to the library."""
    if b'"strict"' not in body:
        return body
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        forms = {name: msgspec.json.decode(members[name]) for name in _FORMS if name in members}
        tools = msgspec.json.decode(members.get("tools", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    for name, form in forms.items():
        if _get(inner := _get(form, _FORMS[name]), "strict") is True:
            inner["strict"] = False
            members[name] = msgspec.Raw(msgspec.json.encode(form))
    if _relax_tools(tools):
        members["tools"] = msgspec.Raw(msgspec.json.encode(tools))
    return msgspec.json.encode(members)


def _relax_tools(tools: Any) -> bool:
    """Take strictness from those of `tools` that have a map; whether there are some."""
    found = False
    for tool in tools if isinstance(tools, list) else ():
        found |= _relax_tools(_get(tool, "tools"))
        function = _get(tool, "function") or tool
        if _get(function, "strict") is True and _has_map(_get(function, "parameters")):
            function["strict"], found = False, True
    return found


def _has_map(schema: Any) -> bool:
    """Whether some object of `schema` has a schema for properties that it does not name."""
    if isinstance(schema, list):
        return any(map(_has_map, schema))
    values = schema.values() if isinstance(schema, dict) else ()
    return isinstance(_get(schema, "additionalProperties"), dict) or any(map(_has_map, values))


def tighten(schema: Any) -> Any:
    """`schema` in its strict form: every object has all the properties that are named, and no others but those that a
    schema is given for."""
    if not isinstance(schema, dict):
        return schema
    tight = dict(schema)
    for name in _MAPS:
        if isinstance(inner := schema.get(name), dict):
            tight[name] = {key: tighten(value) for key, value in inner.items()}
    for name in _LISTS:
        if isinstance(inner := schema.get(name), list):
            tight[name] = [tighten(value) for value in inner]
    for name in _ONES:
        if name in schema:
            tight[name] = tighten(schema[name])
    if "properties" in schema or schema.get("type") == "object":
        others = tight.get("additionalProperties")
        tight["additionalProperties"] = others if isinstance(others, dict) else False
        tight["required"] = list(schema.get("properties") or ())
    return tight


def _read_tools(tools: Any, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """The schemas of strict tools: within `function` in a chat, at the tool itself elsewhere, maybe in a namespace."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        name = _get(tool, "name")
        if _get(tool, "type") == "namespace":
            found |= _read_tools(_get(tool, "tools"), f"{prefix}{name}::")
        elif (schema := _find_strict(_get(tool, "function") or tool)) is not None:
            found[f"{prefix}{_get(_get(tool, 'function'), 'name') or name}"] = schema
    return found


def _find_strict(form: Any) -> Mapping[str, Any] | None:
    """The schema of a format or a tool that is strict. That of Messages may have properties that are not required."""
    if _get(form, "strict") is not True:
        return None
    for name in ("schema", "parameters"):
        if isinstance(schema := _get(form, name), dict):
            return dict(tighten(schema))
    schema = _get(form, "input_schema")
    return schema if isinstance(schema, dict) else None


def _get(value: Any, name: str) -> Any:
    """A member of a JSON object; None of anything else."""
    return value.get(name) if isinstance(value, dict) else None
