"""Two servers whose tokens come at given times: a node with the scripted engine, and a bare aiohttp handler.

    python bench/paced.py node --step-s 0.01 --tokens-per-step 1 --reply-tokens 2000 --turns 64
    python bench/paced.py bare --step-s 0.01
    python bench/paced.py engine --step-s 0.01 ...    the node's engine alone, which tells its part of the node's work

Each prints its base URL. A line on standard input is answered with the times at which tokens were there to be sent, as
JSON by the name that a stream gave itself in a header; the end of the input ends the server. Times are CLOCK_MONOTONIC,
which all processes of a machine share.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop
from aiohttp import web

from dsuf.checkpoint.forms import RELEASED
from dsuf.config import load_settings
from dsuf.engine_scripted import ScriptedEngine, load_script
from dsuf.node.engines import Model
from dsuf.node.node import Node, bind
from dsuf.node.startup import Startup
from dsuf.recipe.vocabulary import Vocabulary, load_vocabulary
from dsuf.types import Engine, EngineFacts, PrefillRange, Prompt, Sampling, StepPlan, StepResult, Turn

NAME_HEADER = "x-deepseek-harness-session-id"
CATCH_UP_S = 0.01
TEXT = "The turtle crossed the road because it could, and nobody on the other side had an answer to that. "


class Stamps:
    """When each piece of each stream was there to be sent.

    `steps` takes the time of a step, the turns to which it gave tokens, and the streams of turns; these are sorted out
    when somebody asks, not meanwhile.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[str], Mapping[str, str]]] = []
        self._times: dict[str, list[float]] = {}

    def open(self, name: str) -> list[float]:
        """The list to which the times of stream `name` are added."""
        return self._times.setdefault(name, [])

    def take(self) -> dict[str, list[float]]:
        """All times since the last call."""
        steps, self.steps = self.steps, []
        for now_s, turns, names in steps:
            for turn in turns:
                self.open(names[turn]).append(now_s)
        taken = {name: times[:] for name, times in self._times.items()}
        for times in self._times.values():
            times.clear()
        return taken


class Pace:
    """The times at which a step may come back: `step_s` apart, however long the work between them takes.

    A timer of the loop counts whole milliseconds, so single steps come a little early or late; the rate stays. `woke_s`
    holds the times at which steps came back, oldest first, until they are taken from it.
    """

    def __init__(self, step_s: float) -> None:
        self.woke_s: deque[float] = deque()
        self._step_s = step_s
        self._due_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> None:
        """Return at the next time."""
        await asyncio.sleep(self._next_s())
        self.woke_s.append(time.monotonic())

    def call_later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        """How the scripted engine takes its time: at the pace where it decodes, else not at all."""
        self._loop = self._loop or asyncio.get_running_loop()
        return self._loop.call_later(self._next_s() if seconds else 0.0, self._wake, then)

    def _wake(self, then: Callable[[], None]) -> None:
        self.woke_s.append(time.monotonic())
        then()

    def _next_s(self) -> float:
        """Seconds to the next time; what is late by more than `CATCH_UP_S` is not made up for."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - CATCH_UP_S) + self._step_s
        return self._due_s - now_s


class Stamping:
    """Stamps the results of a scripted engine, by session, with the time at which their step came back."""

    def __init__(self, engine: ScriptedEngine, pace: Pace, stamps: Stamps) -> None:
        engine.take_time(pace.call_later)
        self._pace, self._stamps = pace, stamps
        self._attach, self._run = engine.attach, engine.run
        self._names: dict[str, str] = {}
        engine.attach = self.attach  # type: ignore[method-assign]
        engine.run = self.run  # type: ignore[method-assign]

    def attach(self, turn: Turn, pages: Sequence[int]) -> None:
        """Attach, and remember how the client calls this turn."""
        self._names[turn.id] = turn.session
        self._attach(turn, pages)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """One step, whose time is over now."""
        results = self._run(plan)
        turns = [result.turn for result in results if result.ids]
        self._stamps.steps.append((self._pace.woke_s.popleft(), turns, self._names))
        return results


class PacedNode(Node):
    """A node whose scripted engine keeps a pace."""

    def __init__(self, pace: Pace, stamps: Stamps, *parts: Any) -> None:
        super().__init__(*parts)
        self._pace = pace
        self._stamps = stamps

    async def _load(self, model: Model) -> Engine:
        engine = await super()._load(model)
        Stamping(cast(ScriptedEngine, engine), self._pace, self._stamps)
        return engine


class Ticker:
    """Wakes whoever waits, at a pace, while somebody does."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next: asyncio.Future[float] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def wait(self) -> float:
        """The time of the next tick, at that time."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        return await self._next

    async def _tick(self) -> None:
        """Tick until nobody waits any more."""
        while self._next is not None:
            await self._pace.wait()
            ended, self._next = self._next, None
            ended.set_result(self._pace.woke_s.popleft())
            await asyncio.sleep(0)
        self._ticking = None


def build_bare(ticker: Ticker, stamps: Stamps) -> web.Application:
    """A handler that streams the pieces in its request's body, one a tick."""

    async def play(request: web.Request) -> web.StreamResponse:
        pieces = [piece.encode() for piece in json.loads(await request.read())]
        times = stamps.open(request.headers[NAME_HEADER])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client leaves when it has seen enough
            for piece in pieces:
                times.append(await ticker.wait())
                await response.write(piece)
            await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", play)
    return app


def write_script(folder: Path, reply_tokens: int, tokens_per_step: int) -> Path:
    """A script that answers everything with `reply_tokens` tokens, none of which ends within a character."""
    ids = list(itertools.islice(itertools.cycle(_plain_ids(load_vocabulary(RELEASED))), reply_tokens))
    path = folder / "script.json"
    rule = {"ids": ids, "tokens_per_step": tokens_per_step, "step_s": 1.0}  # in fact as long as the pace says
    path.write_text(json.dumps({"rules": [rule]}))
    return path


def _plain_ids(vocabulary: Vocabulary) -> Sequence[int]:
    """Ids of an ordinary sentence."""
    return vocabulary.encode(TEXT)


async def serve_node(args: argparse.Namespace, stamps: Stamps, over: asyncio.Event) -> None:
    """A node until `over`."""
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0) as listener:
        script = write_script(Path(folder), args.reply_tokens, args.tokens_per_step)
        values: Mapping[str, Any] = {"engine": "scripted", "script": str(script), "max_turns": args.turns}
        node = PacedNode(Pace(args.step_s), stamps, load_settings(values), listener, Startup(io.StringIO()))
        try:
            await node.start()
            print(node.url, flush=True)
            await over.wait()
        finally:
            await node.stop()


async def drive_engine(args: argparse.Namespace, stamps: Stamps, over: asyncio.Event) -> None:
    """The node's engine without a node until `over`: all turns in every step, the next one always launched already."""
    vocabulary = load_vocabulary(RELEASED)
    with tempfile.TemporaryDirectory() as folder:
        script = load_script(write_script(Path(folder), args.reply_tokens, args.tokens_per_step))
    facts = EngineFacts(
        name="scripted", device="none", context_tokens=1 << 16, max_turns=args.turns, vocabulary=1 << 17, eos_id=1
    )
    engine = ScriptedEngine(script, vocabulary.encode, vocabulary.decode, facts)
    Stamping(engine, Pace(args.step_s), stamps)
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=args.reply_tokens)
    pages = engine.layout.pages // args.turns
    for i in range(args.turns):
        turn = Turn(id=str(i), session=f"stream-{i}", prompt=Prompt(ids=(5, 6)), sampling=sampling)
        engine.attach(turn, range(i * pages, (i + 1) * pages))
        await engine.step(StepPlan(prefill=(PrefillRange(str(i), 0, 2),)))
    print("http://127.0.0.1:0", flush=True)
    plan = StepPlan(decode=tuple(map(str, range(args.turns))))
    steps = deque(asyncio.ensure_future(engine.step(plan)) for _ in range(2))
    while not over.is_set():
        await steps.popleft()
        steps.append(asyncio.ensure_future(engine.step(plan)))
    await asyncio.gather(*steps)


async def serve_bare(args: argparse.Namespace, stamps: Stamps, over: asyncio.Event) -> None:
    """The bare handler until `over`."""
    runner = web.AppRunner(build_bare(Ticker(Pace(args.step_s)), stamps), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print("http://{}:{}".format(*runner.addresses[0][:2]), flush=True)
        await over.wait()
    finally:
        await runner.cleanup()


def answer_questions(stamps: Stamps, loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    """Answer each line of standard input; its end sets `over`."""
    for _ in sys.stdin:
        print(json.dumps(stamps.take()), flush=True)
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(over.set)


async def run(args: argparse.Namespace) -> None:
    """Serve until standard input ends."""
    stamps, over = Stamps(), asyncio.Event()
    questions = (stamps, asyncio.get_running_loop(), over)
    threading.Thread(target=answer_questions, args=questions, daemon=True).start()
    await {"node": serve_node, "bare": serve_bare, "engine": drive_engine}[args.what](args, stamps, over)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("node", "bare", "engine"))
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--reply-tokens", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=64)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
