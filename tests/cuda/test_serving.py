"""A server on the CUDA engine: replies alone and together, with drafts and without, and the next turns of a session."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsuf.repro.command import make_body
from dsuf.repro.connection import Server, read_base_url
from dsuf.repro.figures import read_run
from tests.kernels.gpu import missing
from tests.node import test_sessions as sessions
from tests.node.process import Process, serving

PAGE = Path(__file__).parents[2] / "bench" / "nano" / "data" / "tetris.html"
TEXTS = [" ".join(f"word {number * size}" for number in range(size)) for size in (1, 20, 90, 150)]


def ask(server: Process, text: str, max_tokens: int = 40) -> tuple[str, dict[str, Any]]:
    """A whole reply, and its usage."""
    with server.stream(text, stream=False, temperature=0, max_tokens=max_tokens) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def collect(*arguments: str) -> list[str]:
    """Replies to all texts, the same whether asked alone or together; a repeated text comes from the caches."""
    with serving("--prefill", "exact", *arguments) as server:
        alone = [ask(server, text)[0] for text in TEXTS]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda text: ask(server, text)[0], TEXTS * 4)) == alone * 4
        again, usage = ask(server, TEXTS[-1])
        assert again == alone[-1]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1
        assert server.get("/readyz")["ready"]
    return alone


@pytest.mark.full
def test_serving() -> None:
    """`auto` finds the GPU; greedy replies do not depend on drafts."""
    if reason := missing():
        pytest.skip(f"no server ran on the CUDA engine: {reason}")
    assert collect("--engine", "cuda", "--drafts", "5") == collect("--engine", "auto", "--drafts", "0")


@pytest.mark.full
def test_a_session() -> None:
    """Turns take over all that they can, and where thinking is dropped it costs only itself, as on the other engine."""
    if reason := missing():
        pytest.skip(f"no server ran on the CUDA engine: {reason}")
    thinking = {"thinking": {"type": "enabled"}, "seed": 7}
    with serving("--engine", "cuda") as server:
        messages = [{"role": "user", "content": sessions.QUESTION}]
        text, _, length = sessions.ask(server, messages, **thinking)
        sessions.wait_idle(server)
        messages += [{"role": "assistant", "content": text or "No."}, {"role": "user", "content": "Why?"}]
        _, details, _ = sessions.ask(server, messages, **thinking)
    assert details["cached_tokens"] == length - 1


@pytest.mark.full
@pytest.mark.parametrize(("drafts", "least"), [(5, 5.9), (0, 1.0)])
def test_the_shipped_model(drafts: int, least: float) -> None:
    """Its documented page, byte by byte, with nearly every draft kept."""
    if reason := missing():
        pytest.skip(f"the shipped model was not served by the CUDA engine: {reason}")
    body = make_body("deepseek-flash", thinks=False, plain=False, max_tokens=4000)
    with serving("--engine", "cuda", "--drafts", str(drafts)) as server:
        reply = Server(base=read_base_url(f"{server.url}/v1")).stream(body, 120.0)
    assert reply.text == PAGE.read_text().rstrip("\n")
    run = read_run(reply)
    assert run.steps_told and run.accepted_tokens_per_step is not None
    assert least <= run.accepted_tokens_per_step < drafts + 1.01
