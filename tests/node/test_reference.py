"""The default model through the whole node: the same text alone and together, whatever the chunks and the drafts."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.node.process import Process, serving

pytestmark = pytest.mark.full

PROMPTS = ["Hello", "Name seven rivers. " * 40, "What is dsuf?", "long text " * 300]


def ask(server: Process, prompt: str) -> str:
    """The greedy answer; tokens that came together are one event, so only the text can be compared."""
    with server.stream(prompt, max_tokens=24, temperature=0) as stream:
        lines = [line for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_together_as_alone_in_any_chunks_and_with_drafts() -> None:
    with serving("--prefill", "exact", "--drafts", "0") as server:
        alone = [ask(server, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as readers:
            assert list(readers.map(lambda prompt: ask(server, prompt), PROMPTS)) == alone
    with serving("--prefill", "exact", "--prefill-chunk-tokens", "37") as server:
        assert [ask(server, prompt) for prompt in PROMPTS] == alone
    with serving("--prefill", "exact", "--drafts", "5") as server:
        assert [ask(server, prompt) for prompt in PROMPTS] == alone
    assert len(set(alone)) == len(PROMPTS)
