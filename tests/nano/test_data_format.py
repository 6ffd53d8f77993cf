"""Our writer of prompts against the official renderer, over every kind of conversation that the model trains on."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bench.nano import pack
from bench.nano.data import answers, calls, lines, needles, objects, sessions, talks
from bench.nano.data.checks import list_dialogues, list_kinds
from bench.nano.data.draw import Draw
from bench.nano.data.drills import write_repeats
from bench.nano.data.format import EFFORT_NAMES, Dialogue, list_messages, write_answer, write_prompt, write_sample
from bench.nano.data.package import Package
from bench.nano.data.sample import WEIGHTS, Label
from dsuf.recipe.render import count_prompt
from dsuf.recipe.vocabulary import Vocabulary, parse_vocabulary

KINDS: dict[str, Callable[[Draw], Dialogue]] = {
    "needles": lambda draw: needles.write_needles(draw, 900),
    "turns": lambda draw: needles.write_turns(draw, 700),
    "list": lambda draw: lines.write_list(draw, 600),
    "session": lambda draw: calls.write_session(draw, 1000, system=(*draw.filler(200), "Be brief.")),
    "objects": lambda draw: objects.write_objects(draw, 2),
    "talk": lambda draw: talks.write_talk(draw, 1200),
    "headline": talks.write_headline,
    "repeats": lambda draw: write_repeats(draw, 2),
    "client": lambda draw: sessions.write_client_session(draw, 10_000, list(answers.load_answers())),
    "title": sessions.write_title,
}


@pytest.fixture(scope="module")
def vocabulary(package: Package) -> Vocabulary:
    """The product's own view of the same tokenizer."""
    return parse_vocabulary(package.tokenizer_text)


@pytest.fixture(scope="module")
def real(package: Package, vocabulary: Vocabulary) -> Package:
    """The package with the renderer's true words in it."""
    note, preamble = pack.probe_renderer(vocabulary)
    return replace(package, effort_note=note, tools_preamble=preamble)


@pytest.mark.parametrize("effort", list(EFFORT_NAMES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_prompts_are_those_of_the_renderer(
    real: Package, vocabulary: Vocabulary, kind: str, effort: int | None
) -> None:
    """Every prompt of a conversation has the ids that a request with its messages renders to."""
    dialogue = replace(KINDS[kind](Draw(real, f"{kind}/1")), effort=effort)
    for number in range(len(dialogue.exchanges)):
        body = {"model": "deepseek-flash", **list_messages(real, dialogue, number)}
        assert write_prompt(real, dialogue, number).tolist() == count_prompt(
            "chat", json.dumps(body).encode(), vocabulary
        )


@pytest.mark.parametrize("kind", [kind for kind in list_kinds() if not kind.startswith("needle.32")])
def test_checks_are_those_of_the_renderer(real: Package, vocabulary: Vocabulary, kind: str) -> None:
    """The prompt of a check is what a client that asks it over HTTP would have computed."""
    for dialogue, number in list_dialogues(real, kind)[:3]:
        body = {"model": "deepseek-flash", **list_messages(real, dialogue, number)}
        assert write_prompt(real, dialogue, number).tolist() == count_prompt(
            "chat", json.dumps(body).encode(), vocabulary
        )


@pytest.mark.parametrize("kind", list(KINDS))
def test_sample_holds_prompt_and_answer(real: Package, kind: str) -> None:
    """A sample is its last prompt, the thoughts, and the last answer; what is judged is the model's own."""
    dialogue = KINDS[kind](Draw(real, f"{kind}/2"))
    last = len(dialogue.exchanges) - 1
    sample, answer = write_sample(real, dialogue), write_answer(real, dialogue, last)
    prompt = write_prompt(real, dialogue, last)
    assert sample.ids[: len(prompt)].tolist() == prompt.tolist()
    assert sample.ids[-len(answer) :].tolist() == answer.tolist()
    assert (sample.weights[len(prompt) :] == 1).all()
    thoughts = real.decode(sample.ids[len(prompt) : len(sample.ids) - len(answer)])
    assert thoughts == (dialogue.exchanges[last].reasoning + "</think>" if dialogue.effort else "")
    assert np.array_equal(sample.weights, WEIGHTS[sample.labels])
    ends = sample.ids == real.special["<｜end▁of▁sentence｜>"]
    assert ends.sum() == len(dialogue.exchanges)
    assert (sample.labels[ends] == Label.ANSWER).all()


def test_values_are_the_digits_of_a_fact(real: Package) -> None:
    """The label of values marks the number that is asked for, and nothing else."""
    draw = Draw(real, "value")
    fact = needles.draw_fact(draw)
    sample = write_sample(real, Dialogue(None, (), (), [needles.ask_fact(fact, (fact.sentence,))]))
    assert real.decode(sample.ids[sample.labels == Label.VALUE]) == fact.value
