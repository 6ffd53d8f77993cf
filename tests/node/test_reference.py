"""The embedded model through the whole node: the same tokens alone and together, whatever the chunks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.node.process import Process, serving

pytestmark = pytest.mark.full

PROMPTS = ["Hello", "Name seven rivers. " * 40, "What is 17 times 23?", "long text " * 300]


def ask(server: Process, prompt: str) -> bytes:
    """The greedy answer, as the deltas of the stream."""
    with server.stream(prompt, max_tokens=24, temperature=0) as stream:
        events = [line for line in stream.read().splitlines() if line.startswith(b"data: {")]
    return b"".join(event.partition(b'"delta":')[2].partition(b"}")[0] for event in events)


def test_together_as_alone_and_in_any_chunks() -> None:
    with serving("--prefill", "exact") as server:
        alone = [ask(server, prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as readers:
            assert list(readers.map(lambda prompt: ask(server, prompt), PROMPTS)) == alone
    with serving("--prefill", "exact", "--prefill-chunk-tokens", "37") as server:
        assert [ask(server, prompt) for prompt in PROMPTS] == alone
    assert len(set(alone)) == len(PROMPTS)
