"""Replies come out the same however their tokens are cut into steps, and markers never leak."""

import itertools
import json
import random

import pytest

from dsuf.recipe.conversion import Protocol
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Usage
from tests.recipe.replies import (
    CALL,
    REPLIES,
    Opener,
    block,
    cut,
    invoke,
    join,
    open_reader,
    parameter,
    read,
    read_text,
)

PROTOCOLS: list[Protocol] = ["chat", "messages", "responses"]
HOSTS = ("read", '{"path": "/etc/hosts"}')
# reasoning, content, calls, chat's reason for the end: the library's behaviour, which is the contract
EXPECTED: dict[str, tuple[str, str, list[tuple[str, str]], str]] = {
    "answer": ("Hm, a greeting.", "Hello there,\n  世界 👋🏽 <b>!", [], "stop"),
    "call": ("I look.", "Let me see.", [HOSTS], "tool_calls"),
    "two calls": ("I look.", "", [("read", '{"path": "a < b</p> \\"q\\" 世界"}'), ("read", '{"n": 5}')], "tool_calls"),
    "call inside reasoning": ("I look.", "", [HOSTS], "tool_calls"),
    "never closed": ("I think and think < and", "", [], "stop"),
    "closed twice": ("One.", "Two.Three.", [], "stop"),
    "opened again": ("One.", "Two.<think>Three.Four.", [], "stop"),
    "unknown tool": ("Hm.", "", [("erase", '{"path": "x"}')], "tool_calls"),
    "call cut off": ("Hm.", "So.", [("read", '{"path": "/e')], "tool_calls"),
    "malformed call": ("Hm.", "So.", [], "stop"),
    "broken between good": ("Hm.", "", [("read", '{"path": "1"}'), ("read", '{"path": "2"}')], "tool_calls"),
    "text behind the block": ("Hm.", "So.", [HOSTS], "tool_calls"),
}
ITEMS = ("reasoning", "message", "function_call")
MESSAGES_ENDS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REPLIES)
def test_what_a_client_gets(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    reasoning, content, calls, end = EXPECTED[name]
    reply = read_text(vocabulary, REPLIES[name], protocol)
    tokens = len(vocabulary.encode(REPLIES[name]))
    assert reply == {
        "reasoning": reasoning, "content": content, "calls": calls, "tokens": tokens,
        "end": MESSAGES_ENDS[end] if protocol == "messages" else end,
    }  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REPLIES)
def test_every_pair_of_cuts(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    opener, ids = Opener(vocabulary, protocol), vocabulary.encode(REPLIES[name])
    whole = join(read(opener.open(), [ids]))
    assert join(read(opener.open(), [[token] for token in ids])) == whole
    pairs = list(itertools.combinations(range(1, len(ids)), 2))
    for places in random.Random(name).sample(pairs, min(150, len(pairs))) + [(i,) for i in range(1, len(ids))]:
        assert join(read(opener.open(), cut(ids, *places))) == whole, places


@pytest.mark.parametrize(("name", "dropped"), [("malformed call", True), ("call", False), ("answer", False)])
def test_dropped_calls_are_noted(vocabulary: Vocabulary, name: str, dropped: bool) -> None:
    for protocol in PROTOCOLS:
        reader = open_reader(vocabulary, protocol)
        read(reader, [vocabulary.encode(REPLIES[name])])
        assert reader.dropped_call is dropped


def test_markup_is_text_where_no_tool_is_declared(vocabulary: Vocabulary) -> None:
    reader = open_reader(vocabulary, tools=False)
    reply = join(read(reader, [vocabulary.encode("Hm.</think>So." + CALL)]))
    assert reply["content"] == "So." + CALL and reply["calls"] == [] and not reader.dropped_call


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REPLIES)
def test_the_fold_holds_what_the_events_hold(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    reader = open_reader(vocabulary, protocol)
    reply = join(read(reader, [vocabulary.encode(REPLIES[name])]))
    whole = json.loads(reader.fold())
    if protocol == "chat":
        message = whole["choices"][0]["message"]
        texts = (message.get("reasoning_content") or "", message.get("content") or "")
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        assert (*texts, calls) == (reply["reasoning"], reply["content"], reply["calls"])
        assert whole["choices"][0]["finish_reason"] == reply["end"] == reader.finish_reason
    elif protocol == "responses":
        items = {kind: [item for item in whole["output"] if item["type"] == kind] for kind in ITEMS}
        texts = ["".join(part["text"] for item in items[kind] for part in item["content"]) for kind in ITEMS[:2]]
        assert texts == [reply["reasoning"], reply["content"]]
        assert [(item["name"], item["arguments"]) for item in items["function_call"]] == reply["calls"]
        assert whole["usage"]["output_tokens"] == reply["tokens"] and reader.finish_reason == reply["end"]
    else:
        content = whole["content"]
        assert "".join(b["text"] for b in content if b["type"] == "text") == reply["content"]
        assert "".join(b["thinking"] for b in content if b["type"] == "thinking") == reply["reasoning"]
        assert [b["name"] for b in content if b["type"] == "tool_use"] == [name for name, _ in reply["calls"]]
        assert whole["stop_reason"] == reply["end"] == reader.finish_reason


def test_big_numbers_in_arguments_survive_the_fold(vocabulary: Vocabulary) -> None:
    text = "Hm.</think>" + block(invoke(parameter("n", str(2**80), string=False)))
    reader = open_reader(vocabulary, "messages")
    read(reader, [vocabulary.encode(text)])
    assert json.loads(reader.fold())["content"][-1]["input"] == {"n": 2**80}


def test_usage(vocabulary: Vocabulary) -> None:
    reader = open_reader(vocabulary)
    reader.open(Usage(device_tokens=3, computed_tokens=4))
    reader.feed(tuple(vocabulary.encode("Hm.</think>Hi")))
    last = json.loads(reader.finish("stop")[-1].data)["usage"]
    assert last["prompt_tokens"] == 7 and last["prompt_cache_hit_tokens"] == 3
    assert last["prompt_tokens_details"] == {
        "cached_tokens": 3, "device_tokens": 3, "host_tokens": 0, "peer_tokens": 0, "computed_tokens": 4,
    }  # fmt: skip
    assert reader.usage == Usage(device_tokens=3, computed_tokens=4, completion_tokens=last["completion_tokens"])


def test_reasoning_is_never_more_than_all(vocabulary: Vocabulary) -> None:
    """Random ids end within characters again and again, where the library's own count of reasoning tokens is off."""
    draw = random.Random(4)
    for length in (1, 7, 20, 60):
        for _ in range(20):
            ids = [draw.randrange(3, vocabulary.size - 200) for _ in range(length)]
            reader = open_reader(vocabulary, "chat")
            reader.open(Usage(computed_tokens=5))
            for token in ids:
                reader.feed((token,))
            reader.finish("length")
            usage = json.loads(reader.fold())["usage"]
            assert usage["completion_tokens"] == length
            reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
            assert reasoning <= length
            if not json.loads(reader.fold())["choices"][0]["message"]["content"]:
                assert reasoning == length
