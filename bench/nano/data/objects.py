"""JSON replies: fields and values as the question names them."""

import json

from bench.nano.data.answers import draw_system
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, Exchange
from bench.nano.data.sample import Label, Span

QUESTIONS = ("Write a JSON object: {}.", "Write a JSON object: {}.", "Reply in JSON: {}.", "Give me JSON with {}.")
REASONING = "I write the fields as JSON."
Value = str | int | float | bool | None | list[int]


def draw_object(draw: Draw, fields: int) -> dict[str, Value]:
    """A JSON object with `fields` fields."""
    return {draw.key().replace(" ", "_"): _draw_value(draw) for _ in range(fields)}


def ask_object(made: dict[str, Value], question: str = QUESTIONS[0]) -> Exchange:
    """The question for `made`, and the answer on one line."""
    told = [f'"{key}" is {json.dumps(value)}' for key, value in made.items()]
    listed = told[0] if len(told) == 1 else ", ".join(told[:-1]) + " and " + told[-1]
    return Exchange((question.format(listed),), (Span(json.dumps(made), Label.ANSWER),), REASONING)


def write_objects(draw: Draw, count: int) -> Dialogue:
    """One to `count` requests for an object of one to six fields."""
    exchanges = [
        ask_object(draw_object(draw, draw.random.randint(1, 6)), draw.random.choice(QUESTIONS)) for _ in range(count)
    ]
    return Dialogue(draw.effort(), ("Reply in JSON.",) if draw.chance(0.1) else draw_system(draw), (), exchanges)


def _draw_value(draw: Draw) -> Value:
    kind = draw.random.randrange(8)
    if kind < 3:
        return draw.words(1, 3)
    if kind == 3:
        return int(draw.digits(draw.random.randint(1, 5)))
    if kind == 4:
        return draw.random.choice((None, int(draw.digits(3)) / 10))
    return draw.chance(0.5) if kind < 7 else [int(draw.digits(2)) for _ in range(draw.random.randint(1, 3))]
