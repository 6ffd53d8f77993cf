"""From what a request says of its output to a grammar, in the notation of `llguidance`.

Blocks of tool calls are kept to the canonical spelling, the one that the renderer gives calls of earlier turns:

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="tool">
    <｜DSML｜ parameter name="a" string="true">text as it is</｜DSML｜ parameter>
    <｜DSML｜ parameter name="b" string="false">JSON</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

Parameters come in the order of the schema. The lexer takes the longest literal, so none that may come at some place is
the beginning of another one there, unless a marker follows it.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

MARK = "｜DSML｜"
_SPACE = r" |\n {0,24}"
"""Between tokens of JSON there may be one space, or one line break with an indentation: of more, models find no end."""
_COMPACT = {"x-guidance": {"whitespace_pattern": _SPACE, "lenient": True}}
_ANY_TEXT = r"(?s:.)*"
_LEAD = "\n\n<"
"""What the renderer puts between the reasoning, or no text at all, and the first marker."""
_SHARED = ("$defs", "definitions")
_DEPTH = 8
NAME = r'[^"<>\\\x00-\x1f]+'
"""What may name a parameter of a call: nothing in a name can be escaped, and it comes out as it stands, within JSON."""


class Form(NamedTuple):
    """A way to write a parameter: as text that matches `pattern`, and `length`, or as JSON that follows `schema`.
    `given` tells of a pattern that the schema has."""

    pattern: str | None
    schema: Any = None
    length: str | None = None
    given: bool = False


def write_json(schema: str) -> str:
    """The grammar of JSON text that follows `schema`; without one it is any object."""
    return str(
        LLMatcher.grammar_from_json_schema(schema or '{"type":"object"}', overrides={"whitespace_pattern": _SPACE})
    )


def write_regex(pattern: str) -> str:
    """The grammar of text that `pattern` matches as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


def write_text() -> str:
    """The grammar of any text: no special token is a part of one."""
    return write_regex(_ANY_TEXT)


def write_calls(
    tools: Sequence[Mapping[str, Any]], mark_id: int, *, opened: bool, whole: bool = False, loose: Collection[str] = ()
) -> str:  # fmt: skip
    """The grammar of a block of calls of `tools` (the `function` of each), from behind the first marker; from behind
    the first line where the prompt has `opened` the block; or of a `whole` answer that is a block. Parameters of tools
    that are `loose` may be anything.
    """
    writer = _Writer(mark_id)
    names = [writer.add_tool(number, tool, loose=tool["name"] in loose) for number, tool in enumerate(tools)]
    head = "" if opened else f"{_quote(' calls>')} "
    if whole:
        head = f"{_quote(_LEAD)} {writer.mark} {head}"
    # The line break belongs to what follows it, so that a block cannot end before its first call.
    first, mark = ('"<"' if opened else r'"\n<"'), writer.mark
    calls = " | ".join(names)
    rules = [f'start: {head}{first} call ({_quote(chr(10) + "<")} call)* {_quote(chr(10) + "</")} {mark} " calls>"']
    rules.append(f'call: {mark} ({calls}) {mark} " invoke>"')
    return str(LLMatcher.grammar_from_lark("\n".join([*rules, *writer.finish()])))


def write_patterns(tool: Mapping[str, Any]) -> list[str]:
    """A grammar for each parameter of `tool` that is text by a pattern of its own: the values that it may have."""
    schema = tool.get("parameters") or {}
    known = (schema.get("properties") if isinstance(schema, dict) else None) or {}
    forms = {form for part in known.values() for form in _find_forms(part, schema)}
    bodies = {_closed(form.pattern, form.length) for form in forms if form.pattern is not None and form.given}
    return [str(LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {body}")) for body in sorted(bodies)]


class _Writer:
    """Collects the rules of all tools. What many parameters have in common is written, and compiled, once."""

    def __init__(self, mark_id: int) -> None:
        self.mark = f"<[{mark_id}]>"
        self._shared: dict[str, str] = {}
        head, tail = f'{self.mark} " parameter name=\\"" NAME', f'{self.mark} " parameter>"'
        any_json = self._share("json", f"%json {json.dumps(_COMPACT)}")
        self.rules = [
            f"NAME: /{NAME}/",
            "any_parameter: any_text | any_json",
            f'any_text: {head} "\\" string=\\"true\\">" {self._share("TEXT", _closed(_ANY_TEXT))} {tail}',
            f'any_json: {head} "\\" string=\\"false\\">" {any_json} "</" {tail}',
        ]

    def _share(self, kind: str, body: str) -> str:
        """The name of a rule with this body."""
        return self._shared.setdefault(body, f"{kind}{len(self._shared)}")

    def finish(self) -> list[str]:
        """All rules."""
        return [*self.rules, *(f"{name}: {body}" for body, name in self._shared.items())]

    def add_tool(self, number: int, tool: Mapping[str, Any], *, loose: bool) -> str:
        """Rules of one tool, from its name to behind its last parameter; the name of the first."""
        name = f"tool{number}"
        head = _quote(f' invoke name="{tool["name"]}">\n')
        schema = tool.get("parameters") or {}
        known = None if loose or not isinstance(schema, dict) else schema.get("properties")
        if not known:
            self.rules.append(f'{name}: {head} ("<" any_parameter ("\\n<" any_parameter)*)? "\\n</"')
            return name
        self.rules.append(f'{name}: {head} {name}_first0 "\\n</"')
        self._add_parameters(name, schema, list(known))
        return name

    def _add_parameters(self, name: str, schema: Mapping[str, Any], keys: list[str]) -> None:
        """Rules for parameters in order: what may come from each place on, as the first one or behind others."""
        needed = set(schema.get("required") or ())
        more = '("\\n<" any_parameter)*' if schema.get("additionalProperties") else '""'
        for place, key in enumerate(keys):
            forms = self._add_forms(f"{name}_{place}", key, schema)
            for state, lead in (("first", "<"), ("rest", "\\n<")):
                skip = "" if key in needed else f" | {name}_{state}{place + 1}"
                self.rules.append(f'{name}_{state}{place}: "{lead}" {forms} {name}_rest{place + 1}{skip}')
        self.rules.append(f'{name}_first{len(keys)}: ""\n{name}_rest{len(keys)}: {more}')

    def _add_forms(self, name: str, key: str, schema: Mapping[str, Any]) -> str:
        """Rules for one parameter; the name of the first."""
        shared = {part: schema[part] for part in _SHARED if part in schema}
        ways = []
        for number, form in enumerate(dict.fromkeys(_find_forms(schema["properties"][key], schema))):
            way, kind = f"{name}_{number}", "false" if form.pattern is None else "true"
            head = f"{self.mark} {_quote(f' parameter name={chr(34)}{key}{chr(34)} string={chr(34)}{kind}{chr(34)}>')}"
            if form.pattern is None:
                own = {**shared, **json.loads(form.schema), **_COMPACT}
                body = self._share("json", f"%json {json.dumps(own)}") + ' "</"'
            else:
                body = self._share("TEXT", _closed(form.pattern, form.length))
            self.rules.append(f'{way}: {head} {body} {self.mark} " parameter>"')
            ways.append(way)
        self.rules.append(f"{name}: {' | '.join(ways)}")
        return name


def _find_forms(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Form]:
    """The ways to write a value that follows `schema`: strings as text, all else as JSON (as text of JSON)."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        yield from (Form(_ANY_TEXT), Form(None, "{}"))
        return
    if isinstance(target := _follow(schema.get("$ref"), root), dict):
        yield from _find_forms(target, root, depth + 1)
        return
    for key in ("anyOf", "oneOf", "allOf"):
        several = isinstance(schema.get(key), list) and (key != "allOf" or len(schema[key]) == 1)
        if several and "type" not in schema:
            for part in schema[key]:
                yield from _find_forms(part, root, depth + 1)
            return
    if "const" in schema or isinstance(schema.get("enum"), list):
        yield from _list_values([schema["const"]] if "const" in schema else schema["enum"])
        return
    kinds = schema.get("type", ["string", "number", "boolean", "object", "array", "null"])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "string" in kinds:
        yield _describe_text(schema)
    if others := [kind for kind in kinds if kind != "string"]:
        yield Form(None, json.dumps({**schema, "type": others}))


def _follow(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference to a shared part of the schema `root` names; None for anything else."""
    if not isinstance(reference, str):
        return None
    head, *rest = reference.split("/")
    found = root.get(rest[0]) if head == "#" and len(rest) == 2 and rest[0] in _SHARED else None
    return found.get(rest[1]) if isinstance(found, dict) else None


def _list_values(values: Sequence[Any]) -> Iterator[Form]:
    """The ways to write one of `values`."""
    if texts := [value for value in values if isinstance(value, str)]:
        yield Form("(" + "|".join(map(_escape, texts)) + ")")
    if others := [value for value in values if not isinstance(value, str)]:
        yield Form(None, json.dumps({"enum": others}))


def _describe_text(schema: Mapping[str, Any]) -> Form:
    """A string as text, by its pattern and its length."""
    own, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    length = f"(?s:.){{{least},{'' if most is None else most}}}" if least or most is not None else None
    if not isinstance(own, str):
        return Form(length or _ANY_TEXT)
    begins, inner, ends = split_anchors(own)
    pattern = ("" if begins else _ANY_TEXT) + f"({inner})" + ("" if ends else _ANY_TEXT)
    return Form(pattern, length=length, given=True)


def split_anchors(pattern: str) -> tuple[bool, str, bool]:
    """Whether `pattern` is bound to the beginning, what is between, whether it is bound to the end."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not ends_escaping(pattern[:-1])
    return begins, pattern[begins : len(pattern) - ends], ends


def ends_escaping(pattern: str) -> bool:
    """Whether `pattern` ends with a backslash that escapes what comes next."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _closed(pattern: str, length: str | None = None) -> str:
    """A lexeme of text that `pattern` and `length` match and of what begins the closing tag, without a marker."""
    bodies = [part.replace("/", "\\/").replace("\\\\/", "\\/") for part in (pattern, length) if part is not None]
    return " & ".join([*(f"/({body})<\\//" for body in bodies), f"~/{_ANY_TEXT}{MARK}{_ANY_TEXT}/"])


def _escape(text: str) -> str:
    """`text` as a pattern that matches it alone."""
    return "".join(c if c.isalnum() or c in " _-" else f"\\u{{{ord(c):x}}}" for c in text)


def _quote(text: str) -> str:
    """`text` as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
