"""JSON replies: fields and values as the question names them."""

import json

from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue, Exchange
from bench.nano.data.sample import Label, Span

QUESTIONS = ("Write a JSON object: {}.", "Write a JSON object: {}.", "Reply in JSON: {}.", "Give me JSON with {}.")
SYSTEMS = ("", "", "Reply in JSON.", "You are a helpful assistant.")
REASONING = "I write the fields as JSON."
Value = str | int | bool | list[int]


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
    system = draw.random.choice(SYSTEMS)
    return Dialogue(draw.effort(), (system,) if system else (), (), exchanges)


def _draw_value(draw: Draw) -> Value:
    kind = draw.random.randrange(6)
    if kind < 3:
        return draw.words(1, 3)
    if kind == 3:
        return int(draw.digits(draw.random.randint(1, 5)))
    return draw.chance(0.5) if kind == 4 else [int(draw.digits(2)) for _ in range(draw.random.randint(1, 3))]
