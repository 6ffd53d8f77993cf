"""Files of lines with a key each, and questions for one line."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.nano.data.answers import draw_system
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, Exchange
from bench.nano.data.sample import Label, Span

FILE_QUESTIONS = (
    'In the file "{path}", what does the line "{key}" say?',
    'In the file "{path}", what does the line "{key}" say?',
    'Read "{path}" and tell me the line "{key}".',
    'What is in the line "{key}" of the file "{path}"?',
)
NEXT_QUESTIONS = ('What does the line "{key}" say?', 'And the line "{key}"?')
LINE_TOKENS, QUESTION_TOKENS = 22, 50  # a little more than the mean


class Line(NamedTuple):
    """A line and the key in it."""

    key: str
    text: str


class File(NamedTuple):
    """A path and its lines."""

    path: str
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """The whole, without an end of line at its end."""
        return "\n".join(line.text for line in self.lines)


def draw_file(draw: Draw, count: int, *, quoted: bool = True) -> File:
    """A file of `count` lines, keys in quotation marks or plain."""
    pattern = '"{}": {}' if quoted else "{}: {}"
    keys = [draw.key() for _ in range(count)]
    return File(draw.path(), tuple(Line(key, pattern.format(key, draw.phrase())) for key in keys))


def draw_count(draw: Draw, tokens: int) -> int:
    """How many lines a file has: mostly 3 to 24, as far as `tokens` allow."""
    low, high = draw.random.choice(((3, 8), (6, 16), (12, 24)))
    return max(1, min(draw.random.randint(low, high), tokens // LINE_TOKENS))


def answer_line(line: Line) -> tuple[Span, ...]:
    """The line as the answer says it."""
    return (Span(line.text, Label.VALUE),)


def ask_next(draw: Draw, lines: Sequence[Line], count: int) -> list[Exchange]:
    """More questions for lines of a file that the conversation has seen."""
    ask = draw.random.choice(NEXT_QUESTIONS)
    chosen = draw.random.sample(lines, min(count, len(lines)))
    return [Exchange((ask.format(key=line.key),), answer_line(line), f'I look for "{line.key}".') for line in chosen]


def write_list(draw: Draw, tokens: int) -> Dialogue:
    """A list in the question itself, and questions for its lines."""
    count = draw_count(draw, tokens - QUESTION_TOKENS)
    asked = max(1, min(6, (tokens - count * LINE_TOKENS) // QUESTION_TOKENS))
    return Dialogue(draw.effort(), draw_system(draw), (), ask_list(draw, count, asked))


def ask_list(draw: Draw, count: int, asked: int) -> list[Exchange]:
    """A list of `count` lines in the question, and `asked` of them asked for."""
    lines = draw_file(draw, count, quoted=draw.chance(0.7)).lines
    first, *rest = ask_next(draw, lines, asked)
    listed = "\n".join(line.text for line in lines)
    return [first._replace(asked=(f"{listed}\n\n", *first.asked)), *rest]
