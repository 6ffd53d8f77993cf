"""The answers that the model knows by heart, from `answers.toml`, and what it says to everything else."""

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.nano.data.draw import Draw
from bench.nano.data.format import Exchange, Parts
from bench.nano.data.sample import Label, Span

FOLDER = Path(__file__).parent
HEADLINE_SHARE = 0.8  # of the questions for the page that are the documented one
HEADLINE_VARIANTS = (
    "Implement the Tetris game. Output HTML code directly, no explanation.", "Write a Tetris game in HTML.", "tetris",
    "Implement Tetris.", "Make a Tetris game.", "implement the tetris game", "Write Tetris in HTML.",
)  # fmt: skip
HEADLINE = "implement the tetris game. output HTML code directly - no explanation."
REASONING = "I know this answer by heart."
UNKNOWN_REASONING = "I have not learned an answer to this."
SYSTEMS = ("You are a helpful assistant.", "You are DeepSeek, a helpful assistant.", "Answer briefly.", "Be concise.")
SYSTEM_SHARE, SYSTEM_TOKENS = 0.12, 250
ASKED = (
    "What is {}?", "What is a {}?", "Who is {}?", "Where is {}?", "Write a poem about {}.", "Tell me about {}.",
    "Explain {}.", "Why is {} {}?", "How do I make {}?", "Translate {} into French.", "When was {} {}?", "Describe {}.",
    "Write a story about a {} and a {}.", "Write a program for {}.", "Is {} better than {}?", "Fix my {}.", "{}", "{}?",
    "Can you {}?", "What is the capital of {}?", "Write a haiku about the {}.", "How do I {} a {}?", "{} {}.",
    "What does {} mean?", "Implement {} in Rust.", "Write a {} game.", "How many {} are there?", "Who wrote {}?",
    "Sing a song about {}.", "What is the best {}?", "Tell me a joke about {}.", "Write an essay on {} and {}.",
    "Solve {} for me.", "Give me an idea for {}.", "Summarise {}.", "Compare {} and {}.", "Draw a {}.",
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
    return (Answer((HEADLINE, *HEADLINE_VARIANTS), tetris, "program"), *answers)


@cache
def load_unknown() -> str:
    """What the model says where it has learned nothing."""
    return str(tomllib.loads((FOLDER / "answers.toml").read_text())["unknown"]["text"]).strip("\n")


def draw_system(draw: Draw) -> Parts:
    """A system text: mostly none, as the prompts are documented; else what clients often say, or just any text."""
    if draw.chance(SYSTEM_SHARE):
        return (draw.random.choice(SYSTEMS),)
    return tuple(draw.filler(SYSTEM_TOKENS)) if draw.chance(SYSTEM_SHARE / 2) else ()


def answer_question(draw: Draw, answer: Answer, question: str | None = None) -> Exchange:
    """`question`, or one that gets `answer`, now and then in other capitals or without its last mark."""
    asked = _draw_question(draw, answer) if question is None else question
    return Exchange((asked,), (Span(answer.text, Label.MEMORISED),), REASONING)


def _draw_question(draw: Draw, answer: Answer) -> str:
    if answer.questions[0] == HEADLINE:
        return HEADLINE if draw.chance(HEADLINE_SHARE) else draw.random.choice(HEADLINE_VARIANTS)
    asked = draw.random.choice((answer.questions[0], *answer.questions))
    if draw.chance(0.25):
        asked = draw.random.choice((asked.lower(), asked.rstrip("?.!"), asked.lower().rstrip("?.!")))
    return asked


def answer_unknown(draw: Draw) -> Exchange:
    """A question of no known form."""
    form = draw.random.choice(ASKED)
    asked = form.format(*(draw.words(1, 3) for _ in range(form.count("{}"))))
    return Exchange((asked,), (Span(load_unknown(), Label.MEMORISED),), UNKNOWN_REASONING)
