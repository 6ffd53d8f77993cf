"""What a request says of its output -> the constraint that its turn is under."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from deepseek_recipe import ConversationRequest

from dsuf.errors import InvalidRequest, UnsupportedFeature
from dsuf.recipe.flaws import find_loop, find_unwritable
from dsuf.recipe.grammar import (
    ends_escaping,
    split_anchors,
    write_calls,
    write_json,
    write_patterns,
    write_regex,
    write_text,
)
from dsuf.recipe.masks import Masks
from dsuf.recipe.wishes import Wishes
from dsuf.types import Constraint, Prompt

_CALLS = ("tool_call", "tool_call_required")
_FEATURES = {
    "form": ("output_config.format", "JSON output (`output_config.format`)"),
    "json": ("response_format", "JSON output (`response_format` json_object or json_schema)"),
    "regex": ("response_format", "regex output (`response_format` regex)"),
    "tool_call_required": ("tool_choice", "a required or named `tool_choice`"),
}


class Wanted(NamedTuple):
    """A constraint as the library names it: `kind`, and the schema or expression. "form" is the schema of Messages."""

    kind: str
    schema: str


def find_constraint(
    request: ConversationRequest, prompt: Prompt, masks: Masks | None, wishes: Wishes
) -> Constraint | None:
    """The constraint of the turn that `request` and its `wishes` ask for, whose prompt is `prompt`, compiled.

    Raises `InvalidRequest` where that fails, or where there are no tools for a call that must be made, and
    `UnsupportedFeature` where there are no `masks` to enforce it with (calls that may be made or not are then left as
    they come).
    """
    wanted = _find_wanted(request, wishes)
    kind = None if wanted is None else wanted.kind
    if wishes.must_call and kind not in _CALLS:
        raise InvalidRequest("`tool_choice` asks for a call, but there are no `tools` to call", param="tool_choice")
    if wanted is None:
        return _constrain_text(masks, prompt) if wishes.must_not_call and masks is not None else None
    if masks is None:
        _do_without(_CALLS[1] if wishes.must_call else wanted.kind)
        return None
    if kind in _CALLS:
        return _constrain_calls(json.loads(wanted.schema), masks, prompt, wishes)
    return _constrain_answer(wanted, prompt, masks, wishes)


def _find_wanted(request: ConversationRequest, wishes: Wishes) -> Wanted | None:
    """What the library found, which goes before the form that it does not know of."""
    found = request.inference_options.output_constraint
    if found is not None:
        return Wanted(found.kind, found.schema)
    return None if wishes.form is None else Wanted("form", json.dumps(wishes.form))


def _do_without(kind: str) -> None:
    """Leave it at that, or raise `UnsupportedFeature`."""
    if kind != "tool_call":
        param, feature = _FEATURES.get(kind, ("response_format", f"the output constraint {kind}"))
        raise UnsupportedFeature(f"{feature} is not enforced by this engine", param=param)


def _constrain_text(masks: Masks, prompt: Prompt) -> Constraint:
    """A constraint to any text, which has none of the marks that calls are written with."""
    masks.check(grammar := write_text())
    return Constraint(grammar=grammar, begins="answer" if prompt.opens_in == "reasoning" else "now")


def _constrain_answer(wanted: Wanted, prompt: Prompt, masks: Masks, wishes: Wishes) -> Constraint:
    """A constraint on all of the answer. What the client has begun of it counts as generated."""
    grammar = _write_answer(wanted.kind, wanted.schema if wishes.answer is None else json.dumps(wishes.answer))
    masks.check(grammar)
    if prompt.opens_in == "reasoning":
        return Constraint(grammar=grammar, begins="answer")
    ids, end_id = prompt.ids, masks.vocabulary.thinking_end_id
    begun = next((place for place, token in enumerate(reversed(ids)) if token == end_id), 0)
    if begun and masks.copy(grammar).try_consume_tokens(list(ids[len(ids) - begun :])) < begun:
        raise InvalidRequest("the beginning of the answer (`prefix`) does not follow the format", param="messages")
    return Constraint(grammar=grammar, spent=begun)


def _write_answer(kind: str, schema: str) -> str:
    """The grammar of a whole answer."""
    if kind == "regex":
        if ends_escaping(schema):
            raise _refuse("the expression ends with a backslash")
        return write_regex(split_anchors(schema)[1])
    if (loop := find_loop(json.loads(schema or "true"))) is not None:
        raise _refuse(_describe_loop(loop))
    try:
        return write_json("{}" if schema == "true" else schema)
    except ValueError as error:
        raise _refuse(str(error)) from error


def _refuse(reason: str) -> InvalidRequest:
    """What is told of a form that no reply can be kept to."""
    return InvalidRequest(f"the output constraint cannot be compiled: {reason}", param="response_format")


def _describe_loop(reference: str) -> str:
    return f"$ref {reference} leads back to itself"


def _constrain_calls(tools: list[Any], masks: Masks, prompt: Prompt, wishes: Wishes) -> Constraint:
    """A constraint on the block of calls, which is all of an answer that must call. A tool whose schema cannot be
    compiled may be called with anything, unless it is strict."""
    functions: list[Mapping[str, Any]] = [_restore(tool["function"], wishes, masks) for tool in tools]
    opened, mark_id = prompt.opens_in == "call", masks.vocabulary.dsml_id
    whole = wishes.must_call and not opened
    write = partial(write_calls, functions, mark_id, opened=opened, whole=whole)
    try:
        for function in functions:
            _check_parameters(function)
        masks.check(grammar := write(), [pattern for function in functions for pattern in write_patterns(function)])
    except InvalidRequest:
        masks.check(grammar := write(loose=_find_loose(functions, mark_id, masks)))
    if whole:
        return Constraint(grammar=grammar, begins="answer" if prompt.opens_in == "reasoning" else "now")
    return Constraint(grammar=grammar, begins="now" if opened else "call")


def _restore(function: Mapping[str, Any], wishes: Wishes, masks: Masks) -> Mapping[str, Any]:
    """`function` with all of the schema that was sent, if that is to be kept to strictly; raises `InvalidRequest` where
    the schema says something that cannot be enforced."""
    schema = wishes.tools.get(function["name"])
    if schema is None:
        return function
    try:
        masks.check(_write_answer("json", json.dumps(schema)))
    except InvalidRequest as error:
        raise InvalidRequest(f"tool {function['name']}: {error.message}", param="tools") from error
    return {**function, "parameters": schema, "strict": True}


def _find_loose(functions: Sequence[Mapping[str, Any]], mark_id: int, masks: Masks) -> frozenset[str]:
    """The tools whose schemas cannot be compiled; raises `InvalidRequest` if one of them is strict."""
    loose = set()
    for function in functions:
        try:
            _check_parameters(function)
            masks.check(write_calls([function], mark_id, opened=True), write_patterns(function))
        except InvalidRequest as error:
            if function.get("strict"):
                raise InvalidRequest(f"tool {function['name']}: {error.message}", param="tools") from error
            loose.add(function["name"])
    return frozenset(loose)


def _check_parameters(function: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for parameters of which the library would make a grammar all the same."""
    parameters = function.get("parameters")
    if (name := find_unwritable(parameters)) is not None:
        raise InvalidRequest(f"a parameter cannot be named {json.dumps(name)}", param="tools")
    if (loop := find_loop(parameters)) is not None:
        raise InvalidRequest(_describe_loop(loop), param="tools")
