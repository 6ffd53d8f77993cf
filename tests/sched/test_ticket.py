"""What a ticket gives its reader, and what it offers before a reader has to wake."""

import asyncio

import pytest

from dsuf.sched.ticket import TurnTicket
from dsuf.types import Prompt, Sampling, StepResult, Turn


def make_ticket() -> TurnTicket:
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=100)
    turn = Turn(id="a", prompt=Prompt(ids=(1, 2)), sampling=sampling)
    ticket = TurnTicket(turn, 0.0, lambda ticket, reason: None)
    ticket.begin(1.0)
    return ticket


def result(*ids: int, last: bool = False) -> StepResult:
    return StepResult(turn="a", ids=ids, prefilled=2, finish="stop" if last else None)


async def test_the_first_and_the_last_result_come_by_iteration() -> None:
    ticket, taken = make_ticket(), list[int]()

    def take(offered: StepResult) -> bool:
        taken.extend(offered.ids)
        return True

    ticket.offer_to(take)
    assert [ticket.feed(part) for part in (result(1), result(2))] == [False, False], "the first one is still unread"
    read = [(await anext(ticket)).ids, (await anext(ticket)).ids]
    assert [ticket.feed(part) for part in (result(3), result(4, 5), result(6, last=True))] == [True, True, False]
    read.append((await anext(ticket)).ids)
    assert read == [(1,), (2,), (6,)] and taken == [3, 4, 5]
    assert ticket.ids == [1, 2, 3, 4, 5, 6] and ticket.usage.completion_tokens == 6
    with pytest.raises(StopAsyncIteration):
        await anext(ticket)


async def test_what_is_not_taken_is_read_and_so_is_all_that_comes_meanwhile() -> None:
    ticket, offered, takes = make_ticket(), list[tuple[int, ...]](), [True]

    def take(part: StepResult) -> bool:
        offered.append(part.ids)
        return takes[0]

    ticket.feed(result(1))
    await anext(ticket)
    ticket.offer_to(take)
    for takes[0], number in ((True, 2), (False, 3), (True, 4), (True, 5)):
        ticket.feed(result(number))
    assert offered == [(2,), (3,)]
    assert [(await anext(ticket)).ids for _ in range(3)] == [(3,), (4,), (5,)]
    assert ticket.feed(result(6)) and offered[-1] == (6,)


async def test_a_taker_that_leaves_ends_the_iteration() -> None:
    ticket = make_ticket()

    def leave(part: StepResult) -> bool:
        ticket.cancel("stop", 2)
        return True

    ticket.feed(result(1))
    await anext(ticket)
    ticket.offer_to(leave)
    waiting = asyncio.ensure_future(anext(ticket, None))
    await asyncio.sleep(0)
    assert ticket.feed(result(2, 3))
    assert await waiting is None
    assert ticket.stage == "gone" and ticket.usage.completion_tokens == 2
