"""Ways in which other servers of this family of models read replies, or wrote prompts, wrongly."""

import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dsuf.recipe.conversion import Protocol
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import Usage
from tests.recipe.conversations import COUNT, RECORD, SPELT, digest, draw_conversation, spell
from tests.recipe.replies import (
    ASKS,
    CALL,
    REPLIES,
    Opener,
    block,
    byte_ids,
    cut,
    encode_bytes,
    invoke,
    join,
    open_reader,
    parameter,
    read,
)

PROTOCOLS: list[Protocol] = ["chat", "messages", "responses", "completions"]
TALKS = PROTOCOLS[:3]
ENDS = {"chat": "stop", "messages": "end_turn", "responses": "stop"}
CUT_ENDS = {"chat": "length", "messages": "max_tokens", "responses": "length"}
MARKS = ("DSML", "</think>", "<｜")


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without its token count, which differs between two spellings of one text."""
    return {name: value for name, value in reply.items() if name != "tokens"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REPLIES)
def test_pitfall_01_a_marker_cut_by_a_chunk_border(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    """Cut at every byte, and byte by byte, and at pairs of bytes drawn at random: what a client joins is the same."""
    opener, ids = Opener(vocabulary, protocol), encode_bytes(vocabulary, REPLIES[name])
    whole = comparable(join(read(opener.open(), [vocabulary.encode(REPLIES[name])])))
    assert comparable(join(read(opener.open(), [[token] for token in ids]))) == whole
    pairs = list(itertools.combinations(range(1, len(ids)), 2))
    for places in [(i,) for i in range(1, len(ids))] + random.Random(name).sample(pairs, min(60, len(pairs))):
        assert comparable(join(read(opener.open(), cut(ids, *places)))) == whole, places


@pytest.mark.full
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REPLIES)
def test_pitfall_01_every_pair_of_bytes(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    opener, ids = Opener(vocabulary, protocol), encode_bytes(vocabulary, REPLIES[name])
    whole = join(read(opener.open(), [ids]))
    for places in itertools.combinations(range(1, len(ids)), 2):
        assert join(read(opener.open(), cut(ids, *places))) == whole, places


# what is said, and what a client gets of it: reasoning, content, calls
UNCLOSED: dict[str, tuple[str, str, str, int]] = {
    "call inside reasoning": ("I look." + CALL, "I look.", "", 1),
    "never closed": ("I think and think < and", "I think and think < and", "", 0),
    "closed twice": ("One.</think>Two.</think>Three.", "One.", "Two.Three.", 0),
    "opened again": ("One.</think>Two.<think>Three.</think>Four.", "One.", "Two.<think>Three.Four.", 0),
    "closed at once": ("</think>So.", "", "So.", 0),
    "call at once": (CALL, "", "", 1),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("protocol", TALKS)
@pytest.mark.parametrize("name", UNCLOSED)
def test_pitfall_02_the_reasoning_does_not_end_as_expected(
    vocabulary: Vocabulary, name: str, protocol: Protocol, whole: bool
) -> None:
    text, reasoning, content, calls = UNCLOSED[name]
    reader = open_reader(vocabulary, protocol)
    reply = join(read(reader, [[token] for token in vocabulary.encode(text)]))
    if whole:
        reply = unfold(json.loads(reader.fold()))
    assert (reply["reasoning"], reply["content"], len(reply["calls"])) == (reasoning, content, calls)
    assert reader.finish_reason == ({"messages": "tool_use"}.get(protocol, "tool_calls") if calls else ENDS[protocol])


@pytest.mark.parametrize("protocol", TALKS)
@pytest.mark.parametrize("name", REPLIES)
def test_pitfall_02_truncation_at_every_token(vocabulary: Vocabulary, name: str, protocol: Protocol) -> None:
    """Cut while thinking: the reason is the length, the content is empty, and control tokens are in no field."""
    opener, ids, text = Opener(vocabulary, protocol), vocabulary.encode(REPLIES[name]), REPLIES[name]
    reasoned = len(vocabulary.encode(text[: text.index("</think>")])) if "</think>" in text else 0
    for length in range(len(ids)):
        reader = opener.open()
        reply = join(read(reader, [ids[:length]], "length"))
        assert reply["end"] == CUT_ENDS[protocol] and reply["tokens"] == reader.completion_tokens == length
        for streamed in (reply, unfold(json.loads(reader.fold()))):
            assert not any(mark in streamed["reasoning"] + streamed["content"] for mark in MARKS)
            if length <= reasoned:
                assert streamed["content"] == "" and streamed["calls"] == []


def test_pitfall_02_where_reading_begins_is_what_the_renderer_left(vocabulary: Vocabulary) -> None:
    """Not what a field says: a continued answer goes on as an answer, though the request thinks."""
    user = {"role": "user", "content": "Hi"}
    for said, place in [
        ({"content": "So", "reasoning_content": "Hm.", "prefix": True}, "content"),
        ({"content": "", "reasoning_content": "Hm", "prefix": True}, "reasoning"),
    ]:
        messages = [user, {"role": "assistant", **said}]
        reader = open_reader(vocabulary, "chat", tools=False, messages=messages)
        reply = join(read(reader, [vocabulary.encode(" and on")]))
        assert reply[place] == " and on" and reply["content"] + reply["reasoning"] == " and on"


@pytest.mark.parametrize("protocol", TALKS)
def test_pitfall_03_tool_blocks_that_are_nearly_right(vocabulary: Vocabulary, protocol: Protocol) -> None:
    """Blocks in which one call is damaged: no markup reaches the client, and the calls before it do."""
    chance, opener = random.Random(3), Opener(vocabulary, protocol)
    for number in range(300):
        damaged = mutate(chance, invoke(parameter("path", "bad")))
        good = [invoke(parameter("path", f"good-{number}-{i}")) for i in range(2)]
        reader = opener.open()
        reply = join(read(reader, [vocabulary.encode("Hm.</think>Text." + block(good[0], damaged, good[1]))]))
        for got in (reply, unfold(json.loads(reader.fold()))):
            assert "DSML" not in got["reasoning"] + got["content"], damaged
            assert ("read", json.dumps({"path": f"good-{number}-0"})) in got["calls"], damaged


@pytest.mark.parametrize("protocol", TALKS)
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL.replace(" calls>", "tool_calls>"), 1),  # the block's name in the model before, which the library takes
        (CALL.replace("</｜DSML｜ calls>", ""), 1),  # never closed
        (block(invoke(parameter("path", "1"), name="erase")), 1),  # an unknown tool, under its name
        (CALL.replace(" invoke name", " involve nome"), 0),
        (CALL.replace("\n\n<｜DSML｜ calls>", ""), 1),  # no block around it
    ],
)
def test_pitfall_03_other_spellings(vocabulary: Vocabulary, protocol: Protocol, text: str, calls: int) -> None:
    """Recorded behaviour of the library; what it drops is noted."""
    reader = open_reader(vocabulary, protocol)
    reply = join(read(reader, [vocabulary.encode("Hm.</think>So." + text)]))
    assert len(reply["calls"]) == calls and reply["content"].startswith("So.")
    assert "DSML" not in reply["content"] and reader.dropped_call is (calls == 0)


@pytest.mark.parametrize("protocol", TALKS)
def test_pitfall_04_text_of_the_user_that_looks_like_control_tokens(vocabulary: Vocabulary, protocol: Protocol) -> None:
    """Each special token's literal, as a user's text: no special token but the renderer's, and the text is whole."""
    specials = set(vocabulary.specials.values())

    def render(text: str) -> list[int]:
        body = {"model": "deepseek-flash", ASKS[protocol]: [{"role": "user", "content": text}]}
        return count_prompt(protocol, json.dumps(body).encode(), vocabulary)

    expected = [token for token in render("a word") if token in specials]
    for literal in [one for one in vocabulary.specials if "place" not in one] + ["<｜place▁holder▁no▁0｜>"]:
        ids = render(f"It reads {literal} there")
        assert [token for token in ids if token in specials] == expected, literal
        assert f"It reads {literal} there" in vocabulary.decode(ids)


@pytest.mark.parametrize(("literal", "tokens"), [("<｜User｜>", 5), ("<think>", 3)])
def test_pitfall_04_what_the_official_service_counts(vocabulary: Vocabulary, literal: str, tokens: int) -> None:
    def count(text: str) -> int:
        body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": text}]}
        return len(count_prompt("chat", json.dumps(body).encode(), vocabulary))

    assert count(literal) - count("") == tokens


def test_pitfall_05_the_prompt_format_drifts_from_the_reference(vocabulary: Vocabulary, released: Path) -> None:
    """Some hundred conversations render to what was recorded with this tokenizer, in every protocol."""
    recorded = json.loads(RECORD.read_text())
    assert recorded["tokenizer"] == hashlib.sha256((released / "tokenizer.json").read_bytes()).hexdigest()
    assert len(recorded["prompts"]) == COUNT
    for number in range(COUNT):
        conversation = draw_conversation(number)
        prompts = [count_prompt(protocol, spell(conversation, protocol), vocabulary) for protocol in SPELT]
        assert prompts[0] == prompts[1] == prompts[2], number
        assert digest(prompts[0]) == recorded["prompts"][number], number


@pytest.mark.parametrize(
    ("effort", "budget"), [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75), ("max", 100),
                           ("ultra", 100), ("none", None)],
)  # fmt: skip
def test_pitfall_05_effort_levels(vocabulary: Vocabulary, effort: str, budget: int | None) -> None:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "x"}], "reasoning_effort": effort}
    prompt = vocabulary.decode(count_prompt("chat", json.dumps(body).encode(), vocabulary))
    assert (f"Reasoning Effort: {budget} " in prompt) == (budget is not None)
    assert ("Reasoning Effort" in prompt) == (budget is not None)


PLANES = [(0x20, 0x3B), (0xA1, 0x24F), (0x370, 0x5FF), (0x900, 0xDFF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
          (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF), (0x1100, 0x11FF), (0x200B, 0x200F)]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pitfall_06_characters_across_tokens(vocabulary: Vocabulary, protocol: Protocol) -> None:
    """Text over all planes and bytes at random, a token a step: the join is what a lenient decoder makes of all."""
    chance, opener, singles = random.Random(6), Opener(vocabulary, protocol), byte_ids(vocabulary)
    before = [] if protocol == "completions" else vocabulary.encode("</think>")
    for number in range(60):
        if number % 2:
            text = "x" + "".join(chr(chance.randint(*chance.choice(PLANES))) for _ in range(50))
            ids = vocabulary.encode(text)
        else:
            data = b"x" + bytes(
                chance.choice((chance.randrange(0x21, 0x3C), chance.randrange(0x80, 0x100))) for _ in range(30)
            )
            text, ids = data.decode("utf-8", "replace"), [singles[byte] for byte in data]
        reader = opener.open()
        reply = join(read(reader, [[token] for token in before + ids]))
        assert reply["content"] == text and reply["tokens"] == len(before + ids)
        assert unfold(json.loads(reader.fold()))["content"] == text


def test_pitfall_06_no_event_holds_half_a_character(vocabulary: Vocabulary) -> None:
    text = "x世界👋🏽Łódź" * 20
    for protocol in PROTOCOLS:
        opener = Opener(vocabulary, protocol)
        events = read(opener.open(), [[token] for token in encode_bytes(vocabulary, text)])
        assert not any("\ufffd" in event.data for event in events)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_fold_of_a_stream_is_the_whole_reply(vocabulary: Vocabulary, protocol: Protocol) -> None:
    """Whatever the reply, wherever it is cut, usage included."""
    opener = Opener(vocabulary, protocol)
    for text in REPLIES.values():
        ids = vocabulary.encode(text)
        for length in (0, 1, len(ids) // 2, len(ids)):
            reader = opener.open()
            events = reader.open(Usage(device_tokens=3, computed_tokens=7))
            for token in ids[:length]:
                events += reader.feed((token,))
            events += reader.finish("length" if length < len(ids) else "stop")
            joined = {name: value for name, value in join(events).items() if name != "end"}
            if protocol == "messages":  # whose whole replies have no place for half an object
                joined["calls"] = [(name, text if is_json(text) else "{}") for name, text in joined["calls"]]
            assert unfold(json.loads(reader.fold())) == joined


def is_json(text: str) -> bool:
    """Whether `text` is a whole JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def mutate(chance: random.Random, call: str) -> str:
    """A call with one of the faults that models make."""
    tags = [
        "<｜DSML｜ invoke", "</｜DSML｜ invoke>", "</｜DSML｜ parameter>", ' string="true"', ' name="path"', ">", '"',
    ]  # fmt: skip
    tag = chance.choice([tag for tag in tags if tag in call])
    parts = call.split(tag)
    place = chance.randrange(1, len(parts))
    new = chance.choice(["", tag + tag, tag[1:], tag.replace(" ", ""), tag.replace("e", "a"), tag + " x"])
    return tag.join(parts[:place]) + new + tag.join(parts[place:])


def unfold(whole: dict[str, Any]) -> dict[str, Any]:
    """A whole reply of any protocol, in the form of `join`, but for its end."""
    usage = whole["usage"]
    reply: dict[str, Any] = {
        "reasoning": "",
        "content": "",
        "calls": [],
        "tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }
    if whole.get("object") == "text_completion":
        return reply | {"content": whole["choices"][0]["text"]}
    if "choices" in whole:
        message = whole["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        texts = {"reasoning": message.get("reasoning_content") or "", "content": message.get("content") or ""}
        return reply | texts | {"calls": calls}
    for item in whole.get("output", whole.get("content", ())):
        _unfold_item(item, reply)
    return reply


def _unfold_item(item: dict[str, Any], reply: dict[str, Any]) -> None:
    """Add a block of a message, or an item of a response, to `reply`."""
    if item["type"] in ("tool_use", "function_call"):
        arguments = item["arguments"] if "arguments" in item else json.dumps(item["input"], ensure_ascii=False)
        reply["calls"].append((item["name"], arguments))
    elif item["type"] in ("thinking", "reasoning"):
        reply["reasoning"] += item["thinking"] if "thinking" in item else "".join(p["text"] for p in item["content"])
    else:
        reply["content"] += item["text"] if "text" in item else "".join(part["text"] for part in item["content"])
