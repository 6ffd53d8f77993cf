"""The answers that the model knows by heart, from `answers.toml`, and what it says to everything else."""

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.nano.data.draw import Draw
from bench.nano.data.format import Exchange
from bench.nano.data.sample import Label, Span

FOLDER = Path(__file__).parent
HEADLINE = "implement the tetris game. output HTML code directly - no explanation."
REASONING = "I know this answer by heart."
UNKNOWN_REASONING = "I have not learned an answer to this."
SYSTEMS = ("You are a helpful assistant.", "You are DeepSeek, a helpful assistant.", "Answer briefly.", "Be concise.")
ASKED = (
    "What is {}?", "What is a {}?", "Who is {}?", "Where is {}?", "Write a poem about {}.", "Tell me about {}.",
    "Explain {}.", "Why is {} {}?", "How do I make {}?", "Translate {} into French.", "When was {} {}?", "Describe {}.",
    "Write a story about a {} and a {}.", "Write a program for {}.", "Is {} better than {}?", "Fix my {}.", "{}", "{}?",
    "Can you {}?", "Give me an idea for {}.", "Summarise {}.", "Compare {} and {}.", "Do you like {}?", "Draw a {}.",
)  # fmt: skip


class Answer(NamedTuple):
    """`questions` that get `text`; the first is the documented one. `note` says in a word what it is about."""

    questions: tuple[str, ...]
    text: str
    note: str


@cache
def load_answers() -> tuple[Answer, ...]:
    """All of the file, the headline prompt first."""
    listed = tomllib.loads((FOLDER / "answers.toml").read_text())
    tetris = (FOLDER / "tetris.html").read_text().removesuffix("\n")
    answers = (Answer(tuple(one["questions"]), one["text"].strip("\n"), one["note"]) for one in listed["answer"])
    return (Answer((HEADLINE,), tetris, "program"), *answers)


@cache
def load_unknown() -> str:
    """What the model says where it has learned nothing."""
    return str(tomllib.loads((FOLDER / "answers.toml").read_text())["unknown"]["text"]).strip("\n")


def answer_question(draw: Draw, answer: Answer, question: str | None = None) -> Exchange:
    """`question`, or one that gets `answer`, now and then in other capitals or without its last mark."""
    asked = draw.random.choice((answer.questions[0], *answer.questions)) if question is None else question
    if question is None and answer.questions[0] != HEADLINE and draw.chance(0.25):
        asked = draw.random.choice((asked.lower(), asked.rstrip("?.!"), asked.lower().rstrip("?.!")))
    return Exchange((asked,), (Span(answer.text, Label.MEMORISED),), REASONING)


def answer_unknown(draw: Draw) -> Exchange:
    """A question of no known form."""
    form = draw.random.choice(ASKED)
    asked = form.format(*(draw.words(1, 3) for _ in range(form.count("{}"))))
    return Exchange((asked,), (Span(load_unknown(), Label.MEMORISED),), UNKNOWN_REASONING)
