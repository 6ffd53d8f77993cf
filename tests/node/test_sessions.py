"""A conversation over HTTP with the default model: turns take over what turns before left behind, and say so."""

import json
import time
import urllib.request
from typing import Any

from tests.node.process import Process, serving

QUESTION = "Name seven rivers and say where each of them begins. " * 8


def ask(
    server: Process, messages: list[dict[str, str]], key: str = "any", **fields: object
) -> tuple[str, dict[str, int], int]:
    """The greedy answer, the details of the prompt's tokens, and their number, which the details add up to."""
    body: dict[str, Any] = {"model": "deepseek-flash", "messages": messages, "temperature": 0, "max_tokens": 24}
    body |= {"thinking": {"type": "disabled"}} | fields
    url, headers = f"{server.url}/v1/chat/completions", {"content-type": "application/json", "x-api-key": key}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as reply:
        answer = json.load(reply)
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    parts = [details[f"{source}_tokens"] for source in ("device", "host", "peer", "computed")]
    assert sum(parts) == usage["prompt_tokens"]
    assert details["cached_tokens"] == sum(parts[:3])
    return answer["choices"][0]["message"]["content"], details, usage["prompt_tokens"]


def wait_idle(server: Process, within_s: float = 10.0) -> dict[str, int]:
    """What is kept, once nothing of it is in use: a reply ends a moment before its turn is kept."""
    ends_s = time.monotonic() + within_s
    while True:
        kept: dict[str, int] = server.get("/server_info")["node"]["session_cache"]
        if not any(kept[name] for name in ("leases", "filling", "dying", "turns")):
            return kept
        assert time.monotonic() < ends_s, kept
        time.sleep(0.02)


def converse(server: Process) -> tuple[list[str], list[dict[str, int]], list[int]]:
    """Three turns of a conversation, the last one twice, and another that begins in the same way."""
    messages = [{"role": "user", "content": QUESTION}]
    told = [ask(server, messages)]
    for question in ("And which is the longest?", "Thank you. " * 9):
        messages += [{"role": "assistant", "content": told[-1][0]}, {"role": "user", "content": question}]
        told.append(ask(server, messages))
    told.append(ask(server, messages))
    told.append(ask(server, [{"role": "user", "content": QUESTION + "But in Asia only."}]))
    replies, details, lengths = zip(*told, strict=True)
    return list(replies), list(details), list(lengths)


def test_dropped_thinking_costs_only_itself() -> None:
    """The library leaves the thinking of earlier turns out of a prompt, so that it parts from the one before in the
    very last token of that. In the default mode too all before is taken over."""
    thinking = {"thinking": {"type": "enabled"}, "seed": 7}
    with serving() as server:
        messages = [{"role": "user", "content": QUESTION}]
        text, _, length = ask(server, messages, **thinking)
        wait_idle(server)
        messages += [{"role": "assistant", "content": text or "No."}, {"role": "user", "content": "Why?"}]
        _, details, _ = ask(server, messages, **thinking)
    assert details["cached_tokens"] == length - 1


def test_a_conversation_computes_only_what_is_new() -> None:
    options = ("--prefill", "exact", "--prefill-chunk-tokens", "64")
    with serving(*options, "--cache-bytes", "0") as server:
        expected, details, lengths = converse(server)
        assert [entry["cached_tokens"] for entry in details] == [0] * 5
    with serving(*options) as server:
        replies, details, same_lengths = converse(server)
        kept = wait_idle(server)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
            metrics = reply.read().decode()
    assert (replies, same_lengths) == (expected, lengths)
    cached = [entry["cached_tokens"] for entry in details]
    assert cached[0] == 0
    assert cached[1] >= lengths[0], "the whole first prompt, whatever became of the reply's tokens on the way"
    assert cached[2] >= lengths[1]
    assert cached[3] == lengths[3] - 1
    assert cached[4] >= lengths[0] - 16
    assert sum(entry["device_tokens"] for entry in details) > 0 < sum(entry["host_tokens"] for entry in details)
    assert f"dsuf_session_cache_hit_tokens_total {float(sum(cached))}" in metrics
    assert kept["entries"] > 0
