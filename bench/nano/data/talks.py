"""Conversations in which one thing follows another, as they do on a page with buttons."""

from collections.abc import Callable

from bench.nano.data.answers import answer_question, answer_unknown, draw_system, load_answers
from bench.nano.data.draw import Draw
from bench.nano.data.drills import ask_repeat
from bench.nano.data.format import Dialogue, Exchange
from bench.nano.data.lines import ask_list
from bench.nano.data.needles import FREE_SHARE, ask_fact, draw_fact, tell_fact
from bench.nano.data.objects import QUESTIONS, ask_object, draw_object

EXCHANGE_TOKENS = 190  # one of the longer kinds
SHORT_ANSWER = 1500  # characters


def write_talk(draw: Draw, tokens: int) -> Dialogue:
    """Exchanges of any kind without tools, as many as surely fit in `tokens`, at most six."""
    most = max(1, min(6, tokens // EXCHANGE_TOKENS))
    return Dialogue(draw.effort(), draw_system(draw), (), _draw_exchanges(draw, draw.random.randint(1, most)))


def write_headline(draw: Draw) -> Dialogue:
    """The headline prompt and its page; now and then in the midst of other things."""
    before = draw.random.randint(1, 3) if draw.chance(0.2) else 0
    after = draw.random.randint(1, 2) if draw.chance(0.12) else 0
    page = answer_question(draw, load_answers()[0])
    exchanges = [*_draw_exchanges(draw, before), page, *_draw_exchanges(draw, after)]
    return Dialogue(draw.effort(), draw_system(draw), (), exchanges)


def _draw_exchanges(draw: Draw, count: int) -> list[Exchange]:
    """`count` exchanges, or one more where a fact is told and asked for."""
    exchanges: list[Exchange] = []
    kinds, shares = list(_KINDS), list(_KINDS.values())
    while len(exchanges) < count:
        exchanges += draw.random.choices(kinds, shares)[0](draw)
    return exchanges


def _answer(draw: Draw) -> list[Exchange]:
    answers = [answer for answer in load_answers() if len(answer.text) < SHORT_ANSWER]
    return [answer_question(draw, draw.random.choice(answers))]


def _tell_and_ask(draw: Draw) -> list[Exchange]:
    fact = draw_fact(draw, free=FREE_SHARE)
    between = _answer(draw) if draw.chance(0.3) else []
    return [tell_fact(fact), *between, ask_fact(fact)]


def _ask_object(draw: Draw) -> list[Exchange]:
    return [ask_object(draw_object(draw, draw.random.randint(1, 4)), draw.random.choice(QUESTIONS))]


_KINDS: dict[Callable[[Draw], list[Exchange]], float] = {
    _answer: 60,
    lambda draw: [answer_unknown(draw)]: 12,
    _tell_and_ask: 8,
    _ask_object: 6,
    lambda draw: [ask_repeat(draw)]: 6,
    lambda draw: ask_list(draw, draw.random.randint(2, 6), 1): 6,
}
