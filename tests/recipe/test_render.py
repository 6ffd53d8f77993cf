"""From a body to a prompt: where it opens, what is resolved, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsuf.checkpoint.vocabulary_cut import cut_tokenizer
from dsuf.errors import CheckpointError, InvalidRequest
from dsuf.recipe.conversion import ConversionRefused
from dsuf.recipe.names import SERVED_NAMES
from dsuf.recipe.render import Limits, Rendered, count_prompt, render
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary, parse_vocabulary
from tests.recipe.replies import LIMITS, REPLIES, join, open_reader, read

USER = {"role": "user", "content": "Hi"}


def chat(vocabulary: Vocabulary, limits: Limits = LIMITS, **fields: Any) -> Rendered:
    """A rendered chat request."""
    body = {"model": "deepseek-flash", "messages": [USER]} | fields
    return render("chat", json.dumps(body).encode(), vocabulary, limits, salt="s")


def prefix(**message: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "prefix": True, **message}]


@pytest.mark.parametrize(
    ("fields", "opens_in", "tail"),
    [
        ({}, "reasoning", "<｜Assistant｜><think>"),
        ({"thinking": {"type": "disabled"}}, "content", "<｜Assistant｜></think>"),
        ({"messages": prefix(content="So")}, "content", "So"),
        ({"messages": prefix(content="", reasoning_content="Hm")}, "reasoning", "<think>Hm"),
    ],
)
def test_opens_in(vocabulary: Vocabulary, fields: dict[str, Any], opens_in: str, tail: str) -> None:
    prompt = chat(vocabulary, **fields).prompt
    assert prompt.opens_in == opens_in and vocabulary.decode(prompt.ids).endswith(tail)
    assert prompt.ids[0] == vocabulary.specials["<｜begin▁of▁sentence｜>"] and prompt.salt == "s"


@pytest.mark.parametrize(("effort", "budget"), [("low", 50), ("minimal", 50), ("medium", 75), ("high", 75),
                                                ("xhigh", 75), ("max", 100), ("ultra", 100), (None, 75)])  # fmt: skip
def test_effort_in_the_prompt(vocabulary: Vocabulary, effort: str | None, budget: int) -> None:
    text = vocabulary.decode(chat(vocabulary, reasoning_effort=effort).prompt.ids)
    assert f"Reasoning Effort: {budget} " in text


@pytest.mark.parametrize(
    ("fields", "context_tokens", "clamp", "max_tokens"),
    [
        ({}, 1 << 20, True, 65_536),
        ({"reasoning_effort": "max"}, 1 << 20, True, 131_072),
        ({"thinking": {"type": "disabled"}}, 1 << 20, True, 8_192),
        ({"max_tokens": 256_000}, 1 << 20, True, 256_000),
        ({"max_tokens": 256_000}, 1_000, True, -1),
        ({}, 1_000, True, -1),
        ({}, 1_000, False, -1),
        ({"max_tokens": 7}, 1_000, False, 7),
    ],
)
def test_max_tokens(
    vocabulary: Vocabulary, fields: dict[str, Any], context_tokens: int, clamp: bool, max_tokens: int
) -> None:
    rendered = chat(vocabulary, Limits(context_tokens=context_tokens, clamp_max_tokens=clamp), **fields)
    room = context_tokens - len(rendered.prompt.ids)
    assert rendered.sampling.max_tokens == (room if max_tokens < 0 else max_tokens)


def test_too_long(vocabulary: Vocabulary) -> None:
    long = [{"role": "user", "content": "word " * 200}]
    for fields, limits in [
        ({"messages": long}, Limits(context_tokens=100)),
        ({"messages": long, "max_tokens": 5}, Limits(context_tokens=100)),
        ({"max_tokens": 5_000}, Limits(context_tokens=1_000, clamp_max_tokens=False)),
    ]:
        with pytest.raises(ConversionRefused, match="maximum context length is") as caught:
            chat(vocabulary, limits, **fields)
        assert json.loads(caught.value.body)["error"]["message"] == caught.value.message


def test_a_hopeless_prompt_is_refused_before_it_is_encoded(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsuf.recipe.conversion.Conversion.encode", lambda *_: pytest.fail("was encoded"))
    messages = [{"role": "user", "content": "x" * (101 * vocabulary.longest_token)}]
    for fields in ({}, {"max_tokens": 5}):
        with pytest.raises(ConversionRefused, match="maximum context length is 100 tokens"):
            chat(vocabulary, Limits(context_tokens=100), messages=messages, **fields)


def test_the_longest_token_still_fits(vocabulary: Vocabulary) -> None:
    """The bound is never unfair: text made of the longest entry alone takes as many tokens as it says at least."""
    longest = max(vocabulary.plain.get_vocab(), key=len)
    text = vocabulary.plain.decode([vocabulary.plain.token_to_id(longest)]) * 50
    assert len(vocabulary.encode(text)) >= len(text) / vocabulary.longest_token


@pytest.mark.parametrize("name", SERVED_NAMES)
def test_names(vocabulary: Vocabulary, name: str) -> None:
    assert chat(vocabulary, model=name).model == name


def test_counting_needs_no_room(vocabulary: Vocabulary) -> None:
    body = json.dumps({"model": "deepseek-flash", "messages": [USER], "max_tokens": 393_216}).encode()
    assert count_prompt("messages", body, vocabulary)[0] == 0
    with pytest.raises(InvalidRequest):
        count_prompt("messages", b"{}", vocabulary)


def test_vocabulary(vocabulary: Vocabulary) -> None:
    assert (vocabulary.eos_id, vocabulary.size, vocabulary.dsml_id) == (1, 129_280, 128_825)
    assert vocabulary.specials["<｜deepseek_image｜>"] == 129_264
    assert vocabulary.decode(vocabulary.encode("Grüße 世界")) == "Grüße 世界"


def test_a_cut_vocabulary_renders_and_reads(released: Path) -> None:
    small = parse_vocabulary(cut_tokenizer(released / "tokenizer.json", 8192).decode())
    prompt = chat(small).prompt
    assert max(prompt.ids) < small.size == 8192 and small.decode(prompt.ids).endswith("Hi<｜Assistant｜><think>")
    for name, text in REPLIES.items():
        reply = join(read(open_reader(small), [[token] for token in small.encode(text)]))
        assert reply == join(read(open_reader(small), [small.encode(text)])), name


def test_damaged_vocabularies(tmp_path: Path, released: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_vocabulary(tmp_path)
    document = json.loads((released / "tokenizer.json").read_bytes())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "<｜System｜>"]
    with pytest.raises(CheckpointError, match="lacks <｜System｜>"):
        parse_vocabulary(json.dumps(document))
