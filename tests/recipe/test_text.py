"""Characters across tokens, stop strings inside a step, and text that looks like control tokens."""

import json
import random
from typing import Any

import pytest

from dsuf.recipe.conversion import Protocol
from dsuf.recipe.render import render
from dsuf.recipe.vocabulary import Vocabulary
from tests.recipe.replies import LIMITS, byte_ids, cut, join, open_reader, read

OFF = {"thinking": {"type": "disabled"}}
PLANES = [(0x20, 0x7E), (0xA1, 0x24F), (0x370, 0x5FF), (0x900, 0xDFF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
          (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF), (0x1100, 0x11FF), (0x200B, 0x200F)]  # fmt: skip


def random_text(chance: random.Random, length: int) -> str:
    """Text over all planes."""
    return "".join(chr(chance.randint(*chance.choice(PLANES))) for _ in range(length)).replace("<", "(")


def stream(vocabulary: Vocabulary, ids: list[int], **fields: Any) -> str:
    """The content of a reply whose ids come one a step."""
    reply = join(read(open_reader(vocabulary, tools=False, **OFF, **fields), [[token] for token in ids]))
    content: str = reply["content"]
    return content


def test_text_over_all_planes(vocabulary: Vocabulary) -> None:
    chance = random.Random(11)
    for _ in range(60):
        text = "x" + random_text(chance, 60)
        assert stream(vocabulary, vocabulary.encode(text)) == text


def test_events_hold_whole_characters_only(vocabulary: Vocabulary) -> None:
    text = "x" + random_text(random.Random(12), 200)
    for event in read(open_reader(vocabulary, tools=False, **OFF), [[token] for token in vocabulary.encode(text)]):
        assert "\ufffd" not in event.data


def test_random_bytes_decode_as_in_one_piece(vocabulary: Vocabulary) -> None:
    chance, ids = random.Random(13), byte_ids(vocabulary)
    for _ in range(100):
        data = b"x" + bytes(chance.choice([chance.randrange(0x21, 0x3C), chance.randrange(0x80, 0x100)])
                            for _ in range(chance.randrange(1, 40)))  # fmt: skip
        expected = data.decode("utf-8", "replace")
        assert stream(vocabulary, [ids[byte] for byte in data]) == expected, data


def test_a_truncated_tail_is_flushed(vocabulary: Vocabulary) -> None:
    ids = byte_ids(vocabulary)
    assert stream(vocabulary, [ids[byte] for byte in "x世".encode()[:-1]]) == "x\ufffd"


GROUNDING = ("ref", "box", "point", "polygon")
REPLY = "Certainly, here is the first line.\nSTOP And 世界 the second one, which nobody reads."


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize(
    "stop", ["STOP", "\nSTOP And", "ne.\nST", "世", "界 the", "the", "Certainly", " nobody reads."]
)
def test_a_stop_string_ends_text_and_usage_at_one_token(vocabulary: Vocabulary, protocol: Protocol, stop: str) -> None:
    ids, name = vocabulary.encode(REPLY), "stop" if protocol == "chat" else "stop_sequences"
    fields = OFF | {name: [stop]}
    last = next(n for n in range(1, len(ids) + 1) if stop in vocabulary.decode(ids[:n]))
    for offset in range(len(ids)):
        for size in (1, 2, 5, len(ids)):
            pieces = cut(ids, *range(offset, len(ids), size)) if offset else cut(ids, *range(size, len(ids), size))
            reader = open_reader(vocabulary, protocol, tools=False, **fields)
            reply = join(read(reader, pieces))
            assert reader.finished and reply["content"] == REPLY[: REPLY.index(stop)]
            assert reply["tokens"] == reader.completion_tokens == last
            assert reply["end"] == ("stop" if protocol == "chat" else "stop_sequence")


def test_a_stop_string_does_not_end_reasoning(vocabulary: Vocabulary) -> None:
    reader = open_reader(vocabulary, tools=False, stop=["STOP"])
    reply = join(read(reader, [vocabulary.encode("I say STOP here.</think>Yes. STOP No.")]))
    assert (reply["reasoning"], reply["content"]) == ("I say STOP here.", "Yes. ")


def test_half_a_stop_string_is_given_in_the_end(vocabulary: Vocabulary) -> None:
    reader = open_reader(vocabulary, tools=False, stop=["STOP NOW"], **OFF)
    reply = join(read(reader, [[token] for token in vocabulary.encode("Yes. STOP NO")], "length"))
    assert reply["content"] == "Yes. STOP NO" and reply["end"] == "length" and not reply["calls"]


def place(where: str, text: str) -> dict[str, Any]:
    """A conversation with `text` in the part named `where`."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    user = {"role": "user", "content": "Hi"}
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    conversations: dict[str, list[dict[str, Any]]] = {
        "system": [{"role": "system", "content": text}, user],
        "user": [{"role": "user", "content": text}],
        "assistant": [user, {"role": "assistant", "content": text}, user],
        "reasoning": [user, {"role": "assistant", "content": "x", "reasoning_content": text, "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c", "content": "x"}],
        "call": [user, {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "c", "content": "x"}],
        "tool": [user, {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "c", "content": text}],
        "schema": [user],
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}]
    body = {"model": "deepseek-flash", "messages": conversations[where]}
    return body | ({"tools": tools} if where in ("schema", "reasoning") else {})


@pytest.mark.parametrize("where", ["system", "user", "assistant", "reasoning", "call", "tool", "schema"])
def test_literals_of_special_tokens_stay_text(vocabulary: Vocabulary, where: str) -> None:
    specials = set(vocabulary.specials.values())

    def specials_of(text: str) -> tuple[list[int], str]:
        prompt = render("chat", json.dumps(place(where, text)).encode(), vocabulary, LIMITS).prompt
        return [token for token in prompt.ids if token in specials], vocabulary.decode(prompt.ids)

    if where in ("assistant", "reasoning"):  # here the renderer takes marks of places in a picture for the model's own
        specials -= {vocabulary.specials[f"<｜{end}{mark}｜>"] for end in ("", "/") for mark in GROUNDING}
    expected, _ = specials_of("a word")
    literals = [s for s in vocabulary.specials if "place" not in s] + ["<｜place▁holder▁no▁0｜>"]
    assert len(literals) > 60
    for literal in literals:
        found, text = specials_of(f"It reads {literal} there")
        assert found == expected, literal
        assert f"It reads {literal} there" in text or where in ("call", "schema")  # these two are JSON in the prompt
