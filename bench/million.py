"""A prompt of a million tokens through HTTP, while another client's reply streams; then the next turns of its session.

The server is one of this checkout with the random embedded model, in a process of its own, with device pages for little
more than one such prompt. The next turn comes at once, then one behind another session's million, which has the pages:
it goes on from host memory. Printed: how long prompt and turns took, how much came from the caches, the gaps between
the other stream's events meanwhile, and the memory of device and host beside what is planned.

    python bench/million.py [--engine cuda] [--tokens 1000000] [--publish]
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import publish
from bench.server import Server, serve
from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.cuda.caches import PAGE_TOKENS
from dsuf.cuda.machine import Setup, plan_regions

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


def draw_text(url: str, tokens: int, seed: int = 3) -> str:
    """Random words that make about `tokens` tokens."""
    sample = " ".join(WORDS * 100)
    with ask(url, [{"role": "user", "content": sample}], 1) as reply:
        tokens_a_word = json.load(reply)["usage"]["prompt_tokens"] / (100 * len(WORDS))
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(int(tokens / tokens_a_word)))


def measure(server: Server, engine: str, tokens: int) -> dict[str, object]:
    """One row of figures."""
    url, resident, used = server.url, server.resident_bytes(), read_used_bytes()
    messages = [{"role": "user", "content": draw_text(url, tokens)}]
    listener = Listener(url)
    first, first_s = take_turn(url, messages)
    gaps_s = listener.stop()
    messages.append({"role": "user", "content": "and then?"})
    second, second_s = take_turn(url, messages)
    again, again_s = take_turn(url, messages[:-1])
    take_turn(url, [{"role": "user", "content": draw_text(url, tokens, seed=4)}])
    messages.append({"role": "user", "content": "and now?"})
    third, third_s = take_turn(url, messages)
    details, later = second["prompt_tokens_details"], third["prompt_tokens_details"]
    return {
        "engine": engine, "prompt_tokens": first["prompt_tokens"], "first_s": round(first_s, 2),
        "tokens_per_s": round(first["prompt_tokens"] / first_s), "gaps": len(gaps_s),
        "gap_median_ms": pick_ms(gaps_s, 0.5), "gap_p99_ms": pick_ms(gaps_s, 0.99), "gap_max_ms": pick_ms(gaps_s, 1.0),
        "next_turn_s": round(second_s, 2), "next_turn_device_tokens": details["device_tokens"],
        "next_turn_host_tokens": details["host_tokens"], "next_turn_computed_tokens": details["computed_tokens"],
        "repeated_turn_s": round(again_s, 2),
        "repeated_turn_computed_tokens": again["prompt_tokens_details"]["computed_tokens"],
        "later_turn_s": round(third_s, 2), "later_turn_device_tokens": later["device_tokens"],
        "later_turn_host_tokens": later["host_tokens"], "later_turn_computed_tokens": later["computed_tokens"],
        "device_grown_gb": round((read_used_bytes() - used) / 1e9, 2),
        "host_grown_gb": round((server.resident_bytes() - resident) / 1e9, 2),
        "host_caches_gb": round(read_cache_bytes(url) / 1e9, 2),
    }  # fmt: skip


def pick_ms(sorted_s: Sequence[float], share: float) -> float:
    """The time below which that share of the times lies, in milliseconds; 0 if there are none."""
    return round(1e3 * sorted_s[min(int(share * len(sorted_s)), len(sorted_s) - 1)], 2) if sorted_s else 0.0


def read_used_bytes() -> int:
    """Memory in use on the first GPU, 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return int(told.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def read_cache_bytes(url: str) -> float:
    """Host memory that session caches have, as the server's metrics say."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        found = re.search(r"^dsuf_session_cache_bytes (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def plan_device_bytes(model: Path, settings: Mapping[str, int | str]) -> int:
    """What an engine of these settings allocates on the GPU; kernels and graphs come on top."""
    config = load_config(model / "config.json")
    setup = Setup(
        context_tokens=int(settings["context-tokens"]), max_turns=int(settings["max-turns"]),
        prefill_rows=int(settings["prefill-chunk-tokens"]),
    )  # fmt: skip
    regions = plan_regions(config, setup, -(-int(settings["device-cache-tokens"]) // PAGE_TOKENS))
    return sum(region.reserved_bytes for region in regions if not region.pinned)


def main() -> None:
    """Run, print, and with --publish keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="cuda", choices=["cuda", "reference"])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="", help="names the GPU in the results")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    model = ensure_embedded(Path.home() / ".cache" / "dsuf")
    settings: dict[str, int | str] = {
        "engine": args.engine, "model": str(model), "context-tokens": args.tokens + 8192, "max-turns": 3,
        "prefill-chunk-tokens": 512, "drafts": 5, "body-timeout-s": 60, "device-cache-tokens": args.tokens * 5 // 4,
    }  # fmt: skip
    before = read_used_bytes()
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "log", *arguments) as server:
        ready = read_used_bytes() - before
        row = measure(server, args.engine, args.tokens)
    row |= {
        "device_planned_gb": round(plan_device_bytes(model, settings) / 1e9, 2),
        "device_at_start_gb": round(ready / 1e9, 2),
    }
    if args.publish:
        publish("million", [row], args.device)
    else:
        print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
