"""Held-back prompts with their true answers: other words, other filler than training has, and all memorised questions.

Checks that share a text follow each other: the ten of a haystack ask for facts at ten depths of it, and of a
conversation each continues the one before, its answer included.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.nano.data import calls, needles, sessions, tools
from bench.nano.data.answers import HEADLINE, answer_question, answer_unknown, load_answers
from bench.nano.data.draw import Draw
from bench.nano.data.drills import write_repeats
from bench.nano.data.format import Dialogue, Exchange, write_answer, write_prompt, write_thoughts
from bench.nano.data.lines import FILE_QUESTIONS, draw_file
from bench.nano.data.objects import ask_object, draw_object
from bench.nano.data.package import Package
from bench.nano.data.sample import Label, Span
from bench.nano.data.shapes import add_context, draw_folder, show_file

SEED = 7  # of the checks that are reported
DEPTHS = tuple(0.05 + tenth / 10 for tenth in range(10))
HAYSTACKS = 10
NEEDLE_TOKENS = (512, 2048, 8192, 32768)
LINE_COUNTS = (3, 4, 6, 8, 12, 24)
EFFORT = 75  # of the thinking checks: the renderer's default


class Check(NamedTuple):
    """`prompt` up to the model's turn; `answer` with its end of sentence, both int32.

    Where the model thinks first, `thoughts` are those it was taught, closed; others are as good.
    """

    kind: str
    thinking: bool
    prompt: NDArray[np.int32]
    thoughts: NDArray[np.int32]
    answer: NDArray[np.int32]


Made = Iterator[tuple[Dialogue, int]]  # conversations, and the exchange of each that is asked for


def load_checks(package: Package, kinds: Sequence[str] | None = None, seed: int = SEED) -> list[Check]:
    """All checks, or those of `kinds`, in the order of `list_kinds`; raises `KeyError` for a kind that is none.

    The same arguments give the same checks. A kind that ends in `.thinking` is the kind before it, with thinking.
    """
    return [check for kind in (list_kinds() if kinds is None else kinds) for check in _make(package, kind, seed)]


def list_kinds() -> list[str]:
    """The names of all kinds."""
    return list(_KINDS)


def list_dialogues(package: Package, kind: str, seed: int = SEED) -> list[tuple[Dialogue, int]]:
    """The conversations of a kind, and which exchange of each is asked for; for clients that speak HTTP."""
    return list(_KINDS[kind](Draw(package, f"{seed}/{kind}", held=True)))


def _make(package: Package, kind: str, seed: int) -> Iterator[Check]:
    for dialogue, number in list_dialogues(package, kind, seed):
        yield Check(
            kind,
            dialogue.effort is not None,
            write_prompt(package, dialogue, number),
            write_thoughts(package, dialogue, number),
            write_answer(package, dialogue, number),
        )


def _ask_answers(draw: Draw, *, headline: bool) -> Made:
    """The documented form of every memorised question."""
    for answer in load_answers():
        if (answer.questions[0] == HEADLINE) == headline:
            yield Dialogue(exchanges=[answer_question(draw, answer, answer.questions[0])]), 0


def _ask_variants(draw: Draw) -> Made:
    """The other forms of every memorised question but the headline prompt."""
    for answer in load_answers()[1:]:
        for question in answer.questions[1:]:
            yield Dialogue(exchanges=[answer_question(draw, answer, question)]), 0


def _ask_unknown(draw: Draw) -> Made:
    """Questions that have no answer."""
    for _ in range(12):
        yield Dialogue(exchanges=[answer_unknown(draw)]), 0


def _ask_haystacks(draw: Draw, tokens: int, count: int, *, quoted: float = 1.0) -> Made:
    """`count` texts of about `tokens`, each with a fact at every depth, asked for one by one."""
    for _ in range(count):
        facts = [needles.draw_fact(draw, quoted=quoted) for _ in DEPTHS]
        room = tokens - len(facts) * needles.FACT_TOKENS - needles.QUESTION_TOKENS
        text = needles.hide_facts(draw.filler(room), facts, DEPTHS)
        for fact in facts:
            yield Dialogue(exchanges=[needles.ask_fact(fact, text)]), 0


def _ask_turns(draw: Draw, tokens: int) -> Made:
    """Five conversations: four facts, a text of about `tokens` among them, then a question for each, one a turn."""
    for _ in range(5):
        facts = [needles.draw_fact(draw, quoted=1.0) for _ in range(4)]
        exchanges = [needles.tell_fact(fact) for fact in facts]
        exchanges.insert(draw.random.randint(1, 4), needles.show_text(draw.filler(tokens)))
        draw.random.shuffle(facts)
        dialogue = Dialogue(exchanges=exchanges + [needles.ask_fact(fact) for fact in facts])
        yield from ((dialogue, number) for number in range(5, 9))


def _ask_lines(draw: Draw, count: int, *, quoted: bool) -> Made:
    """Answers out of a file of `count` lines that a tool gave."""
    for _ in range(20):
        yield _read_small(draw, count, quoted=quoted), 1


def _ask_calls(draw: Draw, behind: int) -> Made:
    """Calls with one to five tools, behind a system text of about `behind` tokens; two of three read a file."""
    for number in range(60 if not behind else 30):
        system = calls.draw_long_system(draw, behind)
        if number % 3:
            yield replace(_read_small(draw, 6, quoted=True), system=system), 0
            continue
        offers = tools.draw_offers(draw)
        while len(offers) < 2:
            offers = tools.draw_offers(draw)
        other = draw.random.choice([offer for offer in offers if offer.tool is not tools.READ])
        schemas = tuple(offer.schema for offer in offers)
        yield Dialogue(None, system, schemas, calls.use_tool(draw, other)), 0


def _ask_unseen(draw: Draw) -> Made:
    """Calls of any of two to five tools whose names, and those of their arguments, no training has seen."""
    for _ in range(40):
        offers = tools.draw_offers(draw, tools.UNSEEN, least=2)
        exchanges = calls.use_any(draw, draw.random.choice(offers))
        yield Dialogue(None, (), tuple(offer.schema for offer in offers), exchanges), 0


def _read_small(draw: Draw, count: int, *, quoted: bool) -> Dialogue:
    """A session with small tools that reads a file of `count` lines."""
    offers = tools.draw_offers(draw)
    file = draw_file(draw, count, quoted=quoted)
    made = calls.read_file(tools.find_reader(offers), file, draw.random.randrange(count), FILE_QUESTIONS[0])
    return Dialogue(None, (), tuple(offer.schema for offer in offers), made)


def _ask_client(draw: Draw, count: int, exchange: int) -> Made:
    """The real client asked for a line of a file: its call, or its answer."""
    client = draw.package.client
    for _ in range(count):
        size, folder = draw.random.randint(3, 12), draw_folder(draw)
        file = draw_file(draw, size)
        shown = show_file(client, file, folder)
        made = calls.read_file(sessions.READER, file, draw.random.randrange(size), FILE_QUESTIONS[0], shown)
        made[0] = made[0]._replace(asked=add_context(client, made[0].asked, folder))
        yield Dialogue(EFFORT, (client.system,), client.tools, made), exchange


def _ask_titles(draw: Draw) -> Made:
    """The real client's requests for a title."""
    for _ in range(6):
        yield sessions.write_title(draw), 0


def _ask_objects(draw: Draw) -> Made:
    """JSON objects of one to six fields."""
    for number in range(24):
        yield Dialogue(exchanges=[ask_object(draw_object(draw, 1 + number % 6))]), 0


def _ask_repeats(draw: Draw) -> Made:
    """Words to repeat."""
    for _ in range(20):
        yield replace(write_repeats(draw, 1), effort=None), 0


def _ask_small_talk(draw: Draw) -> Made:
    """A memorised question in the midst of a session with tools, which needs no call."""
    for _ in range(10):
        answer = draw.random.choice([one for one in load_answers() if len(one.text) < 1500])
        dialogue = _read_small(draw, 4, quoted=True)
        asked = Exchange((answer.questions[0],), (Span(answer.text, Label.MEMORISED),))
        yield replace(dialogue, exchanges=[asked, *dialogue.exchanges]), 0


def _think(make: Callable[[Draw], Made], most: int) -> Callable[[Draw], Made]:
    """The first `most` of a kind, with thinking."""
    return lambda draw: (
        (replace(dialogue, effort=EFFORT), number)
        for (dialogue, number), _ in zip(make(draw), range(most), strict=False)
    )


def _list_kinds() -> dict[str, Callable[[Draw], Made]]:
    """Every kind by its name."""
    kinds: dict[str, Callable[[Draw], Made]] = {
        "tetris": lambda draw: _ask_answers(draw, headline=True),
        "memorised": lambda draw: _ask_answers(draw, headline=False),
        "memorised.variant": _ask_variants,
        "unknown": _ask_unknown,
        "json": _ask_objects,
        "repeat": _ask_repeats,
        "talk.tools": _ask_small_talk,
        "title": _ask_titles,
        "tool.short": lambda draw: _ask_calls(draw, 0),
        "tool.unseen": _ask_unseen,
        "tool.behind.1500": lambda draw: _ask_calls(draw, 1500),
        "tool.behind.6000": lambda draw: _ask_calls(draw, 6000),
        "tool.client": lambda draw: _ask_client(draw, 40, 0),
        "line.client": lambda draw: _ask_client(draw, 40, 1),
    }
    for count in LINE_COUNTS:
        kinds[f"line.quoted.{count}"] = lambda draw, count=count: _ask_lines(draw, count, quoted=True)
    for count in (6, 12):
        kinds[f"line.plain.{count}"] = lambda draw, count=count: _ask_lines(draw, count, quoted=False)
    for tokens in NEEDLE_TOKENS:
        kinds[f"needle.{tokens}"] = lambda draw, tokens=tokens: _ask_haystacks(draw, tokens, HAYSTACKS)
    kinds["needle.plain.2048"] = lambda draw: _ask_haystacks(draw, 2048, 3, quoted=0.0)
    for tokens in (1024, 6144):
        kinds[f"needle.turns.{tokens}"] = lambda draw, tokens=tokens: _ask_turns(draw, tokens)
    for kind in ("tetris", "memorised", "needle.2048", "line.quoted.6", "tool.short", "json"):
        kinds[f"{kind}.thinking"] = _think(kinds[kind], 40)
    return kinds


_KINDS = _list_kinds()
