"""A prompt of a million tokens through HTTP, while another client's reply streams; then the next turn of its session.

The server is one of this checkout with random weights, in a process of its own. Printed: how long the prompt and
the next two turns took, how much of those came from the caches, and the gaps between the other stream's events
meanwhile.

    python bench/million.py [--engine cuda] [--tokens 1000000] [--publish]
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import publish
from bench.server import serve_noise

TEXT = "alpha beta gamma delta the quick brown fox jumps over lazy dogs and keeps on running through a forest"
WORDS = TEXT.split(" ")
REPLY_TOKENS = 16
TIMEOUT_S = 1800.0

Message = dict[str, str]


def ask(url: str, messages: Sequence[Message], max_tokens: int, *, stream: bool = False) -> HTTPResponse:
    """An open reply to `messages`, greedy."""
    body = {
        "model": "deepseek-flash", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0,
        "stream": stream, "thinking": {"type": "disabled"},
    }  # fmt: skip
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    reply: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    return reply


def take_turn(url: str, messages: list[Message]) -> tuple[dict[str, Any], float]:
    """Usage and seconds of a turn, whose reply goes into `messages`."""
    start = time.perf_counter()
    with ask(url, messages, REPLY_TOKENS) as reply:
        answer = json.load(reply)
    took_s = time.perf_counter() - start
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"].get("content") or "-"})
    usage: dict[str, Any] = answer["usage"]
    return usage, took_s


class Listener:
    """Another client, whose replies stream one after the other; `gaps_s` are those between two events of a reply."""

    def __init__(self, url: str) -> None:
        self.url, self.over, self.gaps_s = url, False, list[float]()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> list[float]:
        """Leave; the gaps, in order of size."""
        self.over = True
        self._thread.join(TIMEOUT_S)
        return sorted(self.gaps_s)

    def _listen(self) -> None:
        while not self.over:
            with ask(self.url, [{"role": "user", "content": " ".join(WORDS)}], 4000, stream=True) as reply:
                self._follow(reply)

    def _follow(self, reply: HTTPResponse) -> None:
        last_s = None
        for line in reply:
            if self.over:
                return
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s


def draw_text(url: str, tokens: int) -> str:
    """Random words that make about `tokens` tokens."""
    sample = " ".join(WORDS * 100)
    with ask(url, [{"role": "user", "content": sample}], 1) as reply:
        tokens_a_word = json.load(reply)["usage"]["prompt_tokens"] / (100 * len(WORDS))
    rng = random.Random(3)
    return " ".join(rng.choice(WORDS) for _ in range(int(tokens / tokens_a_word)))


def measure(url: str, engine: str, tokens: int) -> dict[str, object]:
    """One row of figures."""
    messages = [{"role": "user", "content": draw_text(url, tokens)}]
    listener = Listener(url)
    first, first_s = take_turn(url, messages)
    gaps_s = listener.stop()
    messages.append({"role": "user", "content": "and then?"})
    second, second_s = take_turn(url, messages)
    again, again_s = take_turn(url, messages[:-1])
    details = second["prompt_tokens_details"]
    return {
        "engine": engine, "prompt_tokens": first["prompt_tokens"], "first_s": round(first_s, 2),
        "tokens_per_s": round(first["prompt_tokens"] / first_s), "gaps": len(gaps_s),
        "gap_median_ms": round(1e3 * gaps_s[len(gaps_s) // 2], 2),
        "gap_p99_ms": round(1e3 * gaps_s[int(0.99 * len(gaps_s))], 2), "gap_max_ms": round(1e3 * gaps_s[-1], 2),
        "next_turn_s": round(second_s, 2), "next_turn_device_tokens": details["device_tokens"],
        "next_turn_host_tokens": details["host_tokens"], "next_turn_computed_tokens": details["computed_tokens"],
        "repeated_turn_s": round(again_s, 2),
        "repeated_turn_computed_tokens": again["prompt_tokens_details"]["computed_tokens"],
    }  # fmt: skip


def main() -> None:
    """Run, print, and with --publish keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="", help="names the GPU in the results")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    settings = {
        "engine": args.engine, "context-tokens": args.tokens + 8192, "max-turns": 3, "prefill-chunk-tokens": 512,
        "drafts": 5, "body-timeout-s": 60,
    }  # fmt: skip
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder, serve_noise(Path(folder) / "log", *arguments) as server:
        row = measure(server.url, args.engine, args.tokens)
    if args.publish:
        publish("million", [row], args.device)
    else:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
