"""One request for generation, from its body to the last byte of its reply."""

import contextlib
import uuid

from aiohttp import web

from dsuf.api.body import read_body
from dsuf.api.dialect import Dialect
from dsuf.api.exchange import EXCHANGE, Exchange
from dsuf.api.keyring import make_salt
from dsuf.api.parts import Parts
from dsuf.api.relay import Relay
from dsuf.api.sse import EventStream, frame, frame_data
from dsuf.api.terms import Terms, read_terms, settle_priority
from dsuf.api.wire import Reading
from dsuf.errors import InvalidRequest, RequestError, Unavailable
from dsuf.recipe.reader import Reader
from dsuf.recipe.render import Limits, Rendered, render
from dsuf.types import Turn

_SESSION_HEADER = "x-deepseek-harness-session-id"
_SESSION_LIMIT = 200
_USER_LIMIT = 200


async def answer(request: web.Request, parts: Parts, dialect: Dialect) -> web.StreamResponse:
    """Generate the reply to `request`, whole or as a stream.

    Raises a `RequestError` before anything was sent; a failure after that is told within the stream. However it ends,
    the turn is cancelled, which does nothing to a finished one.
    """
    exchange = request[EXCHANGE]
    refuse_while_draining(parts)
    terms = read_terms(request.headers)
    reading, rendered = await _render(request, parts, dialect)
    exchange.model = rendered.model
    priority = settle_priority(terms.priority, reading.priority, trusted=not parts.keys.asked)
    turn = _make_turn(request, rendered, reading, Terms(priority=priority, timeout_s=terms.timeout_s))
    reply_id = dialect.reply_prefix + exchange.request_id
    reader = rendered.open_reader(
        reply_id, parts.vocabulary, folds=not rendered.stream, live_usage=rendered.stream and reading.live_usage
    )
    ticket = parts.submit.submit(turn)
    exchange.stage, exchange.turn = "queued", turn.id
    try:
        relay = Relay(ticket, reader, exchange)
        if rendered.stream:
            return await _reply_in_stream(request, parts, dialect, relay)
        return await _reply_whole(relay)
    finally:
        ticket.cancel()
        exchange.times = ticket.times
        _settle(exchange, reader, parts)


def refuse_while_draining(parts: Parts) -> None:
    """Raise `Unavailable` if no new turn is taken."""
    if parts.status.draining:
        raise Unavailable("the server is shutting down; please retry", retry_after_s=parts.settings.drain_retry_s)


async def _render(request: web.Request, parts: Parts, dialect: Dialect) -> tuple[Reading, Rendered]:
    """Read and convert the body off the loop. What the library refuses comes first, then what we do not serve."""
    settings, exchange = parts.settings, request[EXCHANGE]
    body = await read_body(request, limit_bytes=settings.body_limit_bytes, timeout_s=settings.body_timeout_s)
    exchange.mark_rendering()
    limits = Limits(
        context_tokens=settings.context_tokens,
        clamp_max_tokens=settings.clamp_max_tokens,
        logprobs=parts.facts.logprobs,
    )

    def convert() -> tuple[Reading, Rendered]:
        reading = dialect.read(body)
        salt = make_salt(exchange.tenant, reading.user)
        rendered = render(dialect.protocol, reading.body, parts.vocabulary, limits, salt=salt, masks=parts.masks)
        if reading.refusal is not None:
            raise reading.refusal
        return reading, rendered

    try:
        return await parts.convert(convert)
    except InvalidRequest:
        parts.metrics.count_conversion_error(exchange.endpoint)
        raise


def _make_turn(request: web.Request, rendered: Rendered, reading: Reading, terms: Terms) -> Turn:
    """The turn for the scheduler. Its id is ours: clients may repeat a request id while the first is still running.

    Where no keys tell tenants apart, the user that a request names does.
    """
    return Turn(
        id=uuid.uuid4().hex,
        prompt=rendered.prompt,
        sampling=rendered.sampling,
        session=request.headers.get(_SESSION_HEADER, "")[:_SESSION_LIMIT],
        tenant=request[EXCHANGE].tenant or reading.user[:_USER_LIMIT],
        priority=terms.priority or 0,
        timeout_s=terms.timeout_s,
        constraint=rendered.constraint,
    )


async def _reply_whole(relay: Relay) -> web.Response:
    """The fold of all events."""
    relay.push_to(None)
    async with contextlib.aclosing(relay.events()) as steps:
        async for _ in steps:
            pass
    return web.Response(body=relay.reader.fold().encode(), content_type="application/json")


async def _reply_in_stream(request: web.Request, parts: Parts, dialect: Dialect, relay: Relay) -> web.StreamResponse:
    """The events as they come; a failure becomes the last of them."""
    settings, exchange = parts.settings, request[EXCHANGE]
    with EventStream(request, exchange, parts.outbox, write_timeout_s=settings.write_timeout_s) as stream:
        await stream.open()
        try:
            async with stream.keep_alive(settings.keep_alive_s), contextlib.aclosing(relay.events()) as steps:
                relay.push_to(stream)
                async for events in steps:
                    await stream.send(frame(events))
                if relay.reader.done_data is not None:
                    await stream.send(frame_data(relay.reader.done_data))
        except RequestError as error:
            exchange.failure = type(error).__name__
            last = dialect.frame_failure(error, exchange.request_id, relay.reader)
            if dialect.breaks_off and not isinstance(error, InvalidRequest):  # which is final: nobody should try again
                await stream.break_off(last)
                return stream.response
            await stream.send(last)
        await stream.close()
        return stream.response


def _settle(exchange: Exchange, reader: Reader, parts: Parts) -> None:
    """Record what became of the reply."""
    exchange.usage, exchange.finish = reader.usage, reader.finish_reason
    if reader.dropped_call:
        parts.metrics.count_malformed_call()
    reader.close()
