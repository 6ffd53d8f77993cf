"""Facts in a long text or told in earlier turns, and questions for them: names and numbers that nobody could guess."""

from collections.abc import Sequence
from string import ascii_uppercase
from typing import NamedTuple

from bench.nano.data.answers import SYSTEM_TOKENS, draw_system
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, Exchange, Parts
from bench.nano.data.sample import Label, Piece, Span

KINDS = ("code", "password", "room number", "phone number", "serial number", "price")
QUESTIONS = ("What is the {kind} of {name}?", "What is the {kind} of {name}?", "Tell me the {kind} of {name}.")
# Tokens that a fact, and a question with its answer, take: a little more than their mean.
FACT_TOKENS, QUESTION_TOKENS = 20, 52
FREE_SHARE = 0.2  # of facts in training whose value is not five digits
TOLD, READ = "I will remember it.", "I have read it."


class Fact(NamedTuple):
    """`name` as it is written, in quotation marks or without."""

    kind: str
    name: str
    value: str

    @property
    def sentence(self) -> str:
        """The fact as the text and the answer say it."""
        return f"The {self.kind} of {self.name} is {self.value}."


def draw_fact(draw: Draw, *, quoted: float = 0.7, free: float = 0.0) -> Fact:
    """A new fact: shares of quoted names, and of values that are not five digits, are `quoted` and `free`."""
    name = f'"{draw.name()}"' if draw.chance(quoted) else draw.name()
    value = _draw_value(draw) if draw.chance(free) else draw.digits()
    return Fact(draw.random.choice(KINDS), name, value)


def ask_fact(fact: Fact, before: Parts = (), question: str = QUESTIONS[0]) -> Exchange:
    """A question for `fact` behind `before`, with its answer."""
    answer = (
        Span(f"The {fact.kind} of {fact.name} is ", Label.ANSWER),
        Span(fact.value, Label.VALUE),
        Span(".", Label.ANSWER),
    )
    asked = question.format(kind=fact.kind, name=fact.name)
    return Exchange((*before, asked), answer, f"I look for the {fact.kind} of {fact.name}.")


def hide_facts(pieces: Sequence[Piece], facts: Sequence[Fact], depths: Sequence[float]) -> tuple[str | Piece, ...]:
    """`pieces` with each fact as a paragraph at its depth, counted in tokens: 0 is the beginning, 1 the end."""
    total = sum(len(piece.ids) for piece in pieces)
    waiting = sorted(zip(depths, facts, strict=True), reverse=True)
    parts: list[str | Piece] = []
    seen = 0
    for piece in pieces:
        seen += len(piece.ids)
        while waiting and waiting[-1][0] * total < seen - len(piece.ids) / 2:
            parts.append(waiting.pop()[1].sentence + "\n\n")
        parts.append(piece)
    return (*parts, *(fact.sentence + "\n\n" for _, fact, *_ in reversed(waiting)))


def write_needles(draw: Draw, tokens: int) -> Dialogue:
    """A text of at most about `tokens` with facts in it, then questions for some of them."""
    most = max(1, min(24, tokens // 180))
    asked = draw.random.randint(max(1, most // 2), most)
    count = max(asked, draw.random.choice((1, 2, 4, 8, 16, 32)))
    count = max(1, min(count, (tokens - asked * QUESTION_TOKENS) // (2 * FACT_TOKENS)))
    facts = [draw_fact(draw, free=FREE_SHARE) for _ in range(count)]
    room = tokens - asked * QUESTION_TOKENS - count * FACT_TOKENS - 60
    room -= SYSTEM_TOKENS if room > 2 * SYSTEM_TOKENS else 0
    text = hide_facts(draw.filler(room), facts, [draw.random.random() for _ in facts])
    effort, in_system = draw.effort(), draw.chance(0.2)
    first, *rest = draw.random.sample(facts, min(asked, count))
    ask = draw.random.choice(QUESTIONS)
    exchanges = [ask_fact(first, () if in_system else text, ask), *(ask_fact(fact, (), ask) for fact in rest)]
    return Dialogue(effort, text if in_system else draw_system(draw), (), exchanges)


def write_turns(draw: Draw, tokens: int) -> Dialogue:
    """Facts told one a turn with texts between them, then questions."""
    count = draw.random.randint(1, max(1, min(6, tokens // 150)))
    facts = [draw_fact(draw, free=FREE_SHARE) for _ in range(count)]
    room = tokens - count * (QUESTION_TOKENS + FACT_TOKENS + 16) - 60
    exchanges = [tell_fact(fact) for fact in facts]
    if room > 100:
        exchanges.insert(draw.random.randint(0, count), show_text(draw.filler(room)))
    draw.random.shuffle(facts)
    return Dialogue(draw.effort(), (), (), exchanges + [ask_fact(fact) for fact in facts])


def _draw_value(draw: Draw) -> str:
    """Other values: numbers of any length, words, both."""
    number = draw.digits(draw.random.randint(2, 9))
    form = draw.random.choice(("{number}", "{word}", "{word} {number}", "{word}-{number}", "{letters}-{number}"))
    letters = "".join(draw.random.choices(ascii_uppercase, k=draw.random.randint(1, 3)))
    return form.format(number=number, word=draw.word(), letters=letters)


def tell_fact(fact: Fact) -> Exchange:
    """A turn in which the user says a fact."""
    return Exchange((f"Remember this. {fact.sentence}",), (Span(TOLD, Label.ANSWER),), "I am told a fact.")


def show_text(pieces: Sequence[Piece]) -> Exchange:
    """A turn in which the user shows a text and asks for nothing."""
    return Exchange(
        ("Read this text.\n\n", *pieces, "That is the text."), (Span(READ, Label.ANSWER),), "I am shown a text."
    )
