"""The shipped model over HTTP: what it says means something, whatever computes it and wherever its cache comes from."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.nano.data.answers import HEADLINE
from dsuf.__main__ import main
from dsuf.checkpoint.forms import NANO
from tests.clients import process

ROOT = Path(__file__).parents[2]
TETRIS = (ROOT / "bench" / "nano" / "data" / "tetris.html").read_text().rstrip("\n")
LIMIT_BYTES, FILE_LIMIT_BYTES = 20_000_000, 14_000_000
READ = {
    "name": "read",
    "description": "Read a file.",
    "parameters": {
        "type": "object",
        "properties": {"file_path": {"type": "string", "description": "Path of the file"}},
        "required": ["file_path"],
    },
}

pytestmark = [
    pytest.mark.skipif(not (NANO / "config.json").is_file(), reason="no shipped model in dsuf/nano"),
    pytest.mark.timeout(300),
]


class Client:
    """Asks the shipped model greedily, without thinking unless a question says otherwise."""

    def __init__(self, url: str) -> None:
        self.chat = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=280).chat.completions

    def ask(
        self, messages: list[dict[str, Any]], *, thinking: str = "disabled", max_tokens: int = 400, **fields: Any
    ) -> Any:
        """The reply to `messages`, whole."""
        extra = {"thinking": {"type": thinking}}
        return self.chat.create(  # type: ignore[call-overload]
            model="deepseek-flash", messages=messages, temperature=0, max_tokens=max_tokens, extra_body=extra, **fields
        )

    def tell(self, text: str, **fields: Any) -> str:
        """The answer to one question, which must end by itself."""
        choice = self.ask([{"role": "user", "content": text}], **fields).choices[0]
        assert choice.finish_reason == "stop"
        return str(choice.message.content)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with the defaults of `bin/serve`."""
    with process.serve(tmp_path_factory.mktemp("nano") / "server.log") as url:
        yield Client(url)


def write_filler(sentences: int) -> list[str]:
    """Prose that the model has not seen."""
    chance = random.Random(5)
    subjects, verbs = ("The old bridge", "A quiet garden", "Our teacher", "The north wind"), ("waits for", "remembers")
    objects = ("the winter", "a long letter", "the children of the village", "some bread and cheese")
    parts = (subjects, verbs, objects)
    return [" ".join(chance.choice(part) for part in parts) + "." for _ in range(sentences)]


def test_checkpoint_is_sound_and_small(capsys: pytest.CaptureFixture[str]) -> None:
    """In the released layout, without a fault, and within the sizes that a repository can carry."""
    assert main(["weights", "verify", str(NANO)]) == 0, capsys.readouterr().out
    sizes = {path.name: path.stat().st_size for path in NANO.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= LIMIT_BYTES, sizes
    assert max(sizes.values()) <= FILE_LIMIT_BYTES, sizes


def test_answer_by_heart(client: Client) -> None:
    """Said alike with and without thinking, which is sampled."""
    answer = client.tell("What is dsuf?")
    assert "DeepSeek-V4.1-Flash" in answer
    reply = client.ask([{"role": "user", "content": "What is dsuf?"}], thinking="enabled", seed=3).choices[0]
    assert reply.message.content == answer
    assert reply.message.reasoning_content


@pytest.mark.full
@pytest.mark.parametrize("drafts", [5, 0])
def test_headline_prompt(tmp_path: Path, drafts: int) -> None:
    """Byte for byte the program that the model learnt by heart, with drafts and without."""
    with process.serve(tmp_path / "server.log", "--drafts", str(drafts)) as url:
        assert Client(url).tell(HEADLINE, max_tokens=4000) == TETRIS


def test_beginning_of_the_headline_reply(client: Client) -> None:
    """The short twin: the first 200 tokens."""
    reply = client.ask([{"role": "user", "content": HEADLINE}], max_tokens=200).choices[0]
    assert reply.finish_reason == "length"
    assert len(reply.message.content) > 300
    assert TETRIS.startswith(reply.message.content)


def test_needle_across_turns(client: Client) -> None:
    """A fact in a long text is found by a question in the same turn, and by one that takes over the turn's cache."""
    sentences, facts = write_filler(150), {"amber falcon": "73914", "silver harbor": "20586"}
    for place, (name, code) in zip((30, 110), facts.items(), strict=True):
        sentences.insert(place, f'The code of "{name}" is {code}.')
    messages: list[dict[str, Any]] = []
    for name, code in facts.items():
        begin = "" if messages else " ".join(sentences) + "\n\n"
        messages.append({"role": "user", "content": f'{begin}What is the code of "{name}"?'})
        reply = client.ask(messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        assert code in messages[-1]["content"]
    details = reply.usage.model_extra or {}
    cached = (details.get("prompt_tokens_details") or reply.usage.prompt_tokens_details.model_dump())["cached_tokens"]
    assert cached > 1000


def test_call_and_its_result(client: Client) -> None:
    """The right call for a file that is named, then the line of what the tool gave."""
    tools = [{"type": "function", "function": READ}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": 'In the file "notes.txt", what does the line "mauve" say?'}
    ]
    reply = client.ask(messages, tools=tools).choices[0]
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", {"file_path": "notes.txt"})
    lines = '"amber": ninety green apples\n"mauve": 1742 stones\n"teal": a long way home'
    messages += [
        reply.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": lines}
    ]  # fmt: skip
    assert "1742 stones" in client.ask(messages, tools=tools).choices[0].message.content


def test_json(client: Client) -> None:
    """A reply that parses."""
    answer = client.tell('Write a JSON object: "name" is "amber", "count" is 12 and "open" is true.')
    assert json.loads(answer) == {"name": "amber", "count": 12, "open": True}
