"""A node from settings to exit code: the only place where the parts meet."""

import asyncio
import errno
import gc
import os
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

import dsuf
from dsuf.api.connection import ApiRunner
from dsuf.api.parts import Parts
from dsuf.api.parts import Settings as ApiSettings
from dsuf.api.server import build_app
from dsuf.checkpoint.synthetic import discard_unfinished
from dsuf.config import Settings
from dsuf.errors import CommandError
from dsuf.kv.arena import Arena
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.sessions import Sessions
from dsuf.node.allocator import give_back_regularly, share_heap
from dsuf.node.drain import Signals, drain
from dsuf.node.engines import (
    Model,
    find_directory,
    foresee_facts,
    load_engine,
    name_checkpoint,
    open_model,
    warm_up,
)
from dsuf.node.fleet import FleetNode, check_fleet, name_node, open_fleet
from dsuf.node.gate import Gate
from dsuf.node.pulse import Pulse
from dsuf.node.records import Records
from dsuf.node.reload import Reload
from dsuf.node.startup import Startup
from dsuf.node.threads import limit_threads
from dsuf.observe.log import log_event, start_logging
from dsuf.observe.metrics import Metrics
from dsuf.observe.traces import Traces
from dsuf.recipe.names import SERVED_NAMES
from dsuf.sched.recorder import Recorder
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Engine, Origin

SWITCH_INTERVAL_S = 0.0005
BACKLOG = 1024
FAREWELL_S = 5.0  # for handlers to write their last bytes, and again for the engine to come back from its step
HANDSHAKE_S = 10.0  # for a client to agree on TLS
HANDOVER_S = 10.0  # for peers to fetch the hot sessions of a node that leaves
_ALONE = {
    "prefill": "  role       prefill: computes prompts for others; without redis_url there are none, clients get 503",
    "decode": "  role       decode: without redis_url there is no node for prompts, so they are computed here",
}


def serve(settings: Settings) -> int:
    """Serve until a signal comes; returns the exit code. Raises `CommandError` or `CheckpointError` from the start."""
    share_heap()
    limit_threads(settings.threads)
    with bind(settings.host, settings.port) as listener:
        check_fleet(settings)
        startup = Startup()
        writer = start_logging(settings.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                code, clean = runner.run(_serve(Node(settings, listener, startup)))
                if not clean:
                    # A thread that never comes back would keep the interpreter from ending.
                    discard_unfinished()
                    writer.close()
                    os._exit(code)
                return code
        finally:
            writer.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises `CommandError` if there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if taken else str(error.strerror or error).partition(" (")[0]
        raise CommandError(f"cannot listen on {host} port {port}: {reason}") from error
    except (TypeError, ValueError) as error:  # how the socket module refuses what cannot be encoded as a name
        raise CommandError(f"cannot listen on {host!r} port {port}: not a host name") from error


class Node:
    """The parts of one node. `start` it, let `work` run, then `drain` and `stop` it; `stop` comes last in any case.

    `url` is where it can be reached from this machine.
    """

    def __init__(self, settings: Settings, listener: socket.socket, startup: Startup) -> None:
        self.settings = settings
        self.reload = Reload(settings)
        self.url = _local_url(listener, secure=self.reload.certificate is not None)
        self.metrics = Metrics(SERVED_NAMES[0])
        self.pulse = Pulse(settings, self.metrics)
        self.pulse.watch_reload(self.reload)
        self.gate = Gate()
        self.engine: Engine | None = None
        self.scheduler: Scheduler | None = None
        self.sessions: Sessions | None = None
        self.fleet: FleetNode | None = None
        self.traces = self._open_traces()
        self.records = None if settings.record_dir is None else Records(settings.record_dir)
        self._listener = listener
        self._startup = startup
        self._loading = False
        self._cache_memory = memoryview(b"")
        self._runner: ApiRunner | None = None
        self._server: asyncio.AbstractServer | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._scheduling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the model, listen, load, warm up; each step prints its line."""
        self._cache_memory = _map_cache(self.settings.cache_bytes)
        self._loading = True
        model = await self._open_model()
        with self._startup.step("listening") as remarks:
            await self._listen(model)
            remarks.append(self.url)
        self.engine = await self._load(model)
        self._loading = False
        await self._warm_up(self.engine, model)
        self._sampling = asyncio.create_task(self.pulse.lag.run())
        self._tidying = asyncio.create_task(give_back_regularly())
        self._reloading = asyncio.create_task(self.reload.run())
        await self._schedule(self.engine, model)
        # What exists now lives as long as the process: collections need not walk through it, which takes milliseconds.
        gc.collect()
        gc.freeze()
        self.pulse.starting = None
        if self.fleet is None and (remark := _ALONE.get(self.settings.role)):
            self._startup.say(remark)
        self._startup.ready(self.url, self.settings, useful=self.settings.role != "prefill")

    async def work(self) -> None:
        """Return when the scheduler ended, which it does not do by itself: raises what made it."""
        if self._scheduling is not None:
            await asyncio.shield(self._scheduling)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let running turns finish, as far as the settings and `hurry` give them time."""
        if self.scheduler is None:
            return
        if self.fleet is not None:
            self.fleet.begin_drain()
        if await drain(self.scheduler, self.pulse, hurry, self.settings.drain_s) and self.fleet is not None:
            await until(hurry, self.fleet.leave(HANDOVER_S))

    async def stop(self) -> bool:
        """End everything, whatever was started; whether no thread is left behind."""
        if self.fleet is not None:
            await self.fleet.close()
        await _cancel(self._scheduling)
        if self.sessions is not None:
            await self.sessions.close()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await _cancel(self._sampling)
        await _cancel(self._tidying)
        await _cancel(self._reloading)
        for sink in (self.traces, self.records):
            if sink is not None:
                await asyncio.to_thread(sink.close)
        if (lag := self.pulse.lag.summarise()).samples:
            log_event("stopped", lag_p50_s=lag.p50_s, lag_p99_s=lag.p99_s, lag_max_s=lag.max_s)
        return await self._close_engine()

    def _open_traces(self) -> Traces | None:
        """Where traces go, if that is set; raises `CommandError` where what sends them is missing."""
        settings = self.settings
        if not settings.otlp_endpoint:
            return None
        node = name_node(settings)
        return Traces(settings.otlp_endpoint, share=settings.trace_share, node=node, version=dsuf.__version__)

    def _open_recorder(self, engine: Engine, model: Model) -> Recorder | None:
        """What keeps records of turns, where that is asked for."""
        settings = self.settings
        if self.records is None:
            return None
        origin = Origin(
            engine=engine.facts.name, fingerprint=engine.layout.fingerprint, prefill=settings.prefill,
            max_drafts=engine.facts.max_drafts, draft_rule=settings.draft_rule,
            draft_confidence=settings.draft_confidence,
        )  # fmt: skip
        self._startup.say(f"  records    token ids of all turns go to {self.records.path}")
        return Recorder(origin, model.vocabulary.encode, self.records.put)

    async def _open_model(self) -> Model:
        """The directory, its configuration and its tokenizer."""
        with self._startup.step("model") as remarks:
            directory = await asyncio.to_thread(find_directory, self.settings)
            remarks += [name_checkpoint(directory), str(directory)]
        with self._startup.step("tokenizer") as remarks:
            model = await asyncio.to_thread(open_model, directory)
            remarks.append(f"{model.vocabulary.size:,} ids")
        return model

    async def _listen(self, model: Model) -> None:
        """Answer HTTP from now on; turns are refused until the gate opens."""
        settings, facts = self.settings, foresee_facts(self.settings, model)
        parts = Parts(
            submit=self.gate,
            vocabulary=model.vocabulary,
            facts=facts,
            masks=model.masks if facts.constrains else None,
            status=self.pulse,
            metrics=self.metrics,
            keys=self.reload.keys,
            traces=self.traces,
            settings=ApiSettings(
                context_tokens=facts.context_tokens,
                node=name_node(settings) if settings.redis_url or settings.node_id else "",
                cors_origins=settings.cors_origins,
                body_limit_bytes=settings.body_limit_bytes,
                body_timeout_s=settings.body_timeout_s,
                write_timeout_s=settings.write_timeout_s,
                keep_alive_s=settings.keepalive_s,
                clamp_max_tokens=settings.clamp_max_tokens,
                checkpoint=name_checkpoint(model.directory),
            ),
        )
        self._runner = ApiRunner(build_app(parts), shutdown_s=FAREWELL_S)
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        certificate = self.reload.certificate
        secure = None if certificate is None else certificate.context
        patience_s = None if secure is None else HANDSHAKE_S
        self._server = await loop.create_server(
            self._runner.server, sock=self._listener, ssl=secure, ssl_handshake_timeout=patience_s
        )

    async def _load(self, model: Model) -> Engine:
        """The engine, with its weights."""

        def progress(layer: int) -> None:
            self.pulse.starting = f"loading weights (layer {layer} of {model.config.n_layers})"

        self.pulse.starting = "loading weights"
        with self._startup.step("engine") as remarks:
            engine = await asyncio.to_thread(load_engine, self.settings, model, progress)
            facts = engine.facts
            remarks += [facts.name, facts.device, f"{facts.context_tokens:,} tokens", f"{facts.max_turns} turns"]
        return engine

    async def _warm_up(self, engine: Engine, model: Model) -> None:
        """One short turn, except where a script counts turns."""
        self.pulse.starting = "warming up"
        with self._startup.step("warm-up"):
            if self.settings.engine != "scripted":
                await warm_up(engine, tuple(model.vocabulary.encode("Hello")))

    async def _schedule(self, engine: Engine, model: Model) -> None:
        """Start the scheduler, join the fleet if there is one, and let turns in."""
        settings = self.settings
        limits = Limits(
            queue_limit=settings.queue_limit,
            chunk_tokens=settings.prefill_chunk_tokens,
            gap_s=settings.decode_gap_s,
            step_deadline_s=settings.step_deadline_s,
            queue_timeout_s=settings.queue_timeout_s,
            turn_timeout_s=settings.turn_timeout_s,
            drafts=min(settings.drafts, engine.facts.max_drafts),
            audit_share=settings.audit_share,
            role=settings.role,
        )
        blocks = Blocks(engine.layout.page_bytes, self._cache_memory)
        self.sessions = Sessions(engine, Arena(blocks), self.metrics)
        if settings.redis_url:
            self.fleet = await open_fleet(settings, self.sessions, self.metrics)
        puller = None if self.fleet is None else self.fleet.puller
        recorder = self._open_recorder(engine, model)
        self.scheduler = Scheduler(engine, limits, self.metrics, self.sessions, puller, recorder)
        self.metrics.watch_load(self.scheduler.load)
        self.pulse.watch(self.scheduler, engine, limits, self.sessions)
        self._scheduling = asyncio.create_task(self.scheduler.run())
        if self.fleet is not None:
            self.pulse.starting = "joining the fleet"
            with self._startup.step("fleet") as remarks:
                remarks += [await self.fleet.join(self.scheduler), self.fleet.transport]
            self.pulse.watch_fleet(self.fleet.facts)
        self.gate.open(self.scheduler)

    async def _close_engine(self) -> bool:
        """Close the engine, unless its step or its loading does not come to an end; whether it was closed."""
        if self._loading or self.engine is None:
            return not self._loading
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.engine.close()
        except TimeoutError:
            log_event("engine left behind", level="warning")
            return False
        return True


def _map_cache(size_bytes: int) -> memoryview:
    """Memory for session caches; raises `CommandError` where the system has no such room."""
    try:
        return map_memory(size_bytes)
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise CommandError(f"cache_bytes = {size_bytes}: no such memory: {error}") from error


async def _serve(node: Node) -> tuple[int, bool]:
    """Run `node` until a signal comes; its exit code, and whether no thread is left behind."""
    signals = Signals()
    signals.on_hangup = node.reload.ask
    signals.install()
    try:
        await until(signals.stop, node.start())
        await until(signals.stop, node.work())
        await node.drain(signals.hurry)
    finally:
        clean = await node.stop()
    return signals.exit_code, clean


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` to its end, or until `stop` is set; raises what `work` raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await _cancel(working)
        await _cancel(stopping)


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancel `task` and wait for its end, however it ends."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _local_url(listener: socket.socket, *, secure: bool) -> str:
    """The base URL under which this machine reaches `listener`."""
    scheme = "https" if secure else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
