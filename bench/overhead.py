"""What the server adds to an engine: processor time, and time from a token to its client.

The scripted engine gives tokens at a pace; beside it, in the same run and by turns, a bare aiohttp handler writes the
same bytes at the same pace (bench/paced.py). Latency is counted from the moment at which the tokens are there, to their
arrival at a client in this process. `cpu_ratio` compares all of the node with all of the bare server; `net_ratio` takes
off the node's time what the scripted engine takes when it runs alone.

    python bench/overhead.py [--window-s 5] [--rounds 3]
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import uvloop

from bench.paced import NAME_HEADER
from bench.report import publish

SETTLE_S = 0.5
STOP_S = 20.0
SLACK_S = 3.0
"""Streams go on for so long behind the window, since they do not begin at the same time."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Streams at the same time, tokens a second in each, and tokens that a step gives each."""

    streams: int
    tokens_per_s: int
    tokens_per_step: int

    @property
    def step_s(self) -> float:
        """Time from step to step."""
        return self.tokens_per_step / self.tokens_per_s


CASES = tuple(
    Case(streams=streams, tokens_per_s=rate, tokens_per_step=tokens)
    for streams, rate in ((1, 2000), (64, 100))
    for tokens in (1, 6)
)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one server: processor seconds, wall seconds, events, and how long each was under way."""

    cpu_s: float
    wall_s: float
    events: int
    latencies_s: Sequence[float]


class Child:
    """A server of bench/paced.py in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None and process.stdout is not None
        self._pid = process.pid
        self._input, self._output = process.stdin, process.stdout
        if not (line := self._output.readline()):
            raise RuntimeError("the server did not start")
        self.host, port = line.strip().removeprefix("http://").split(":")
        self.port = int(port)

    def cpu_s(self) -> float:
        """Processor time of all its threads: the clock that Linux has for every process."""
        return time.clock_gettime(~self._pid << 3 | 2)

    def take_stamps(self) -> dict[str, list[float]]:
        """When the pieces of each stream were there to be sent."""
        self._input.write("\n")
        self._input.flush()
        stamps: dict[str, list[float]] = json.loads(self._output.readline())
        return stamps


@contextmanager
def start(what: str, case: Case, lasting_s: float) -> Iterator[Child]:
    """Run a server whose streams last for `lasting_s`."""
    tokens = int(lasting_s * case.tokens_per_s)
    options = ("--step-s", case.step_s, "--tokens-per-step", case.tokens_per_step, "--reply-tokens", tokens,
               "--turns", case.streams)  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("paced.py")), what, *map(str, options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process)
        finally:
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


class Listener(asyncio.Protocol):
    """One client: sends a request and notes when each event arrives."""

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.arrivals_s: list[float] = []
        self.received = bytearray()
        self.begun = asyncio.Event()
        self.over = False
        self._body = body
        self._half = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{NAME_HEADER}: {self.name}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        self.transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        """Count the ends of events in `data`; they all arrived now."""
        now_s = time.monotonic()
        self.received += data
        ends = data.count(b"\n\n") + (self._half and data.startswith(b"\n"))
        self._half = data.endswith(b"\n") and not data.endswith(b"\n\n")
        self.arrivals_s += [now_s] * ends
        if len(self.arrivals_s) > 1:
            self.begun.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream has ended."""
        self.over = True


async def listen(child: Child, bodies: Sequence[bytes], lasting_s: float) -> tuple[Window, list[Listener]]:
    """Open a stream for each of `bodies`, let them settle, and look on for `lasting_s`."""
    loop = asyncio.get_running_loop()
    streams = [Listener(f"stream-{i}", body) for i, body in enumerate(bodies)]
    for stream in streams:
        await loop.create_connection(partial(_same, stream), child.host, child.port)
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
    await asyncio.sleep(SETTLE_S)
    started_s, cpu_s = time.monotonic(), child.cpu_s()
    await asyncio.sleep(lasting_s)
    stopped_s, cpu_s = time.monotonic(), child.cpu_s() - cpu_s
    if any(stream.over for stream in streams):
        raise RuntimeError("a stream ended within the window")
    for stream in streams:
        stream.transport.abort()
    await asyncio.sleep(SETTLE_S)
    latencies = [
        arrived_s - stamp_s
        for stream, stamps in pair(streams, child.take_stamps())
        # The first event is the opening of the reply and comes with the first tokens.
        for arrived_s, stamp_s in zip(stream.arrivals_s[1:], stamps, strict=False)
        if started_s <= arrived_s < stopped_s
    ]
    window = Window(cpu_s=cpu_s, wall_s=stopped_s - started_s, events=len(latencies), latencies_s=latencies)
    return window, streams


def _same(stream: Listener) -> Listener:
    """The protocol of a connection is the listener itself."""
    return stream


def pair(streams: Sequence[Listener], stamps: Mapping[str, list[float]]) -> list[tuple[Listener, list[float]]]:
    """Each stream with its stamps."""
    return [(stream, stamps[stream.name]) for stream in streams]


def read_pieces(received: bytes) -> list[str]:
    """What was written at a time: the chunks of a response in HTTP's chunked coding, without its head."""
    rest = received.partition(b"\r\n\r\n")[2]
    pieces = []
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if len(rest) < length + 2:
            break
        pieces.append(rest[:length].decode())
        rest = rest[length + 2 :]
    return pieces


def ask(case: Case, lasting_s: float) -> bytes:
    """A request for a stream that lasts."""
    body = {"model": "deepseek-flash", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    body |= {"thinking": {"type": "disabled"}, "max_tokens": int(lasting_s * case.tokens_per_s)}
    return json.dumps(body).encode()


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def measure_engine(case: Case, window_s: float) -> float:
    """Processor time an event of the scripted engine alone, in microseconds."""
    with start("engine", case, 2 * SETTLE_S + window_s + SLACK_S) as child:
        await asyncio.sleep(SETTLE_S)
        child.take_stamps()
        cpu_s = child.cpu_s()
        await asyncio.sleep(window_s)
        cpu_s = child.cpu_s() - cpu_s
        return cpu_s / sum(map(len, child.take_stamps().values())) * 1e6


async def compare(case: Case, window_s: float, rounds: int) -> dict[str, object]:
    """Both servers by turns; the first round of the node is the recording that the bare one plays."""
    lasting_s = 2 * SETTLE_S + window_s + SLACK_S
    with start("node", case, lasting_s) as node, start("bare", case, lasting_s) as bare:
        asked = [ask(case, lasting_s)] * case.streams
        before_s, cpu_s = time.monotonic(), node.cpu_s()
        await asyncio.sleep(1.0)
        idle = (node.cpu_s() - cpu_s) / (time.monotonic() - before_s)
        _, recorded = await listen(node, asked, window_s + SLACK_S / 2)
        played = [json.dumps(read_pieces(bytes(stream.received))).encode() for stream in recorded]
        await listen(bare, played, 0.5)
        pairs = [
            ((await listen(node, asked, window_s))[0], (await listen(bare, played, window_s))[0]) for _ in range(rounds)
        ]
    return describe(case, idle, await measure_engine(case, window_s), pairs)


def describe(case: Case, idle: float, engine_us: float, pairs: Sequence[tuple[Window, Window]]) -> dict[str, object]:
    """One line of the table: medians over the rounds of each pair's figures."""
    row: dict[str, object] = {
        "streams": case.streams,
        "tokens_per_event": case.tokens_per_step,
        "cpu_ratio": statistics.median(cost_us(node) / cost_us(bare) for node, bare in pairs),
        "net_ratio": statistics.median((cost_us(node) - engine_us) / cost_us(bare) for node, bare in pairs),
        "idle_cpu_share": idle,
        "engine_event_us": engine_us,
    }
    for name, windows in (("node", [node for node, _ in pairs]), ("bare", [bare for _, bare in pairs])):
        row |= {
            f"{name}_events_per_s": statistics.median(window.events / window.wall_s for window in windows),
            f"{name}_cpu_share": statistics.median(window.cpu_s / window.wall_s for window in windows),
            f"{name}_event_us": statistics.median(cost_us(window) for window in windows),
            f"{name}_p50_ms": statistics.median(percentile(window.latencies_s, 0.5) * 1e3 for window in windows),
            f"{name}_p99_ms": statistics.median(percentile(window.latencies_s, 0.99) * 1e3 for window in windows),
        }
    return row


def cost_us(window: Window) -> float:
    """Processor time an event."""
    return window.cpu_s / window.events * 1e6


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        publish("overhead", [runner.run(compare(case, args.window_s, args.rounds)) for case in CASES])


if __name__ == "__main__":
    main()
