"""The tokenizer cut from the released one, under the libraries that will use it."""

import json
from pathlib import Path

import deepseek_recipe
import pytest
import tokenizers

from dsuf.checkpoint.vocabulary_cut import cut_tokenizer
from dsuf.errors import CheckpointError

SAMPLE = "Hello, world! 1234567 naïve 巴黎 🗼\ndef f(x):\n    return x ** 2\n\x00\x7f"
CHAT = {
    "model": "DeepSeek-V4.1-Flash",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": {
            "name": "weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def cut(released: Path) -> str:
    return cut_tokenizer(released / "tokenizer.json").decode()


@pytest.fixture(scope="module")
def whole(released: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(released / "tokenizer.json"))


def test_ids_are_dense_and_the_first_ones_are_kept(cut: str, whole: tokenizers.Tokenizer) -> None:
    small = tokenizers.Tokenizer.from_str(cut)
    assert small.get_vocab_size() == 8192
    assert sorted(small.get_vocab().values()) == list(range(8192))
    assert [small.id_to_token(id_) for id_ in range(2000)] == [whole.id_to_token(id_) for id_ in range(2000)]


def test_every_merge_has_its_parts_and_every_byte_its_token(cut: str) -> None:
    model = json.loads(cut)["model"]
    vocabulary = set(model["vocab"])
    for merge in model["merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= vocabulary
    assert len([token for token in vocabulary if len(token) == 1]) == 256


def test_special_tokens_keep_spelling_and_flags(cut: str, whole: tokenizers.Tokenizer) -> None:
    small = tokenizers.Tokenizer.from_str(cut).get_added_tokens_decoder().values()
    theirs = {
        token.content: token for token in whole.get_added_tokens_decoder().values() if "place" not in token.content
    }
    assert {token.content for token in small} == set(theirs)
    assert all(token.special == theirs[token.content].special for token in small)


def test_any_text_comes_back(cut: str) -> None:
    small = tokenizers.Tokenizer.from_str(cut)
    assert small.decode(small.encode(SAMPLE).ids) == SAMPLE


def test_chat_with_tools_renders_to_the_same_text_as_under_the_released_one(cut: str, released: Path) -> None:
    request = deepseek_recipe.ChatCompletionRequest(json.dumps(CHAT).encode())
    conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
    texts = []
    for text in (cut, (released / "tokenizer.json").read_text()):
        tokenizer = deepseek_recipe.Tokenizer.from_str(text)
        ids = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer).encode(conversation)
        texts.append(tokenizers.Tokenizer.from_str(text).decode(ids, skip_special_tokens=False))
    assert texts[0] == texts[1]
    assert "｜DSML｜" in texts[0] and "21 degrees" in texts[0]


@pytest.mark.parametrize("size", [100, 200_000])
def test_impossible_size_is_refused(released: Path, size: int) -> None:
    with pytest.raises(CheckpointError, match="cannot be cut"):
        cut_tokenizer(released / "tokenizer.json", size)
