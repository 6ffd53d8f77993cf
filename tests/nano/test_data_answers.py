"""What the small model says by heart: its programs do what they say, and what it says of dsuf is so."""

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from bench.nano.data.answers import HEADLINE, Answer, load_answers, load_unknown

ROOT = Path(__file__).parents[2]
ALL = {answer.questions[0]: answer for answer in load_answers()}
ABOUT = [answer for answer in load_answers() if answer.note in ("about", "use", "inside")]


@cache
def read_sources() -> str:
    """All Python of the product."""
    return "\n".join(path.read_text() for path in (ROOT / "dsuf").rglob("*.py"))


def read_program(question: str, language: str) -> str:
    """The code in the answer to `question`."""
    found = re.fullmatch(rf"```{language}\n(.*)\n```", ALL[question].text, re.DOTALL)
    assert found, ALL[question].text
    return found[1]


def load(question: str) -> Mapping[str, object]:
    """The names that the Python program in an answer defines."""
    names: dict[str, object] = {}
    exec(read_program(question, "python"), names)
    return names


def test_questions_are_told_apart() -> None:
    """Nothing is asked in two ways that differ in capitals or marks alone; two dozen answers are about dsuf."""
    asked = [question.lower().rstrip("?.!, ") for answer in load_answers()[1:] for question in answer.questions]
    assert len(set(asked)) == len(asked)
    assert len(ABOUT) >= 20
    assert load_answers()[0].questions[0] == HEADLINE
    assert "What can you do?" in load_unknown() and "What can you do?" in ALL


@pytest.mark.parametrize(
    ("question", "lines"),
    [
        ("Write hello world in Python.", ["Hello, world!"]),
        ("Write FizzBuzz in Python.", [
            "FizzBuzz" if n % 15 == 0 else "Fizz" if n % 3 == 0 else "Buzz" if n % 5 == 0 else str(n)
            for n in range(1, 101)
        ]),
    ],
)  # fmt: skip
def test_programs_print(question: str, lines: list[str]) -> None:
    """What they should."""
    done = subprocess.run(
        [sys.executable, "-c", read_program(question, "python")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == lines


def test_functions_compute() -> None:
    """Each against an easier way to the same."""
    fibonacci = load("Write a Fibonacci function in Python.")["fibonacci"]
    assert [fibonacci(n) for n in range(10)] == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]  # type: ignore[operator]
    is_prime = load("Write a prime test in Python.")["is_prime"]
    assert [n for n in range(-3, 40) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]  # type: ignore[operator]
    quicksort = load("Write quicksort in Python.")["quicksort"]
    mixed = [(n * 37) % 23 for n in range(60)]
    assert quicksort(mixed) == sorted(mixed)  # type: ignore[operator]
    binary_search = load("Write binary search in Python.")["binary_search"]
    items = list(range(0, 40, 2))
    for wanted in range(-1, 42):
        assert binary_search(items, wanted) == (items.index(wanted) if wanted in items else -1)  # type: ignore[operator]


def test_word_count_counts(tmp_path: Path) -> None:
    """The most frequent words of a file, with their numbers."""
    (tmp_path / "text").write_text("to be or not To Be that is to do\n")
    program = read_program("Write a word count in Python.", "python")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "text")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[:2] == ["     3 to", "     2 be"]


@pytest.mark.parametrize("answer", ABOUT, ids=lambda answer: answer.questions[0])
def test_what_is_named_is_there(answer: Answer) -> None:
    """Commands, folders, flags and routes that an answer names exist."""
    source = read_sources()
    for command in re.findall(r"\bbin/[a-z-]+", answer.text):
        assert (ROOT / command).exists() or command == "bin/train-nano"
    for folder in re.findall(r"\bdsuf/[a-z_]+(?:/[a-z_]+)*", answer.text):
        assert (ROOT / folder).is_dir(), folder
    for flag in re.findall(r"--([a-z-]+)", answer.text):
        assert flag.replace("-", "_") in source or flag in (ROOT / "bin" / "test").read_text(), flag
    for route in re.findall(r"(?<![\w.])/(?:v1|readyz|metrics)[a-z/_]*", answer.text):
        assert f'"{route}"' in source or f'"{route.removeprefix("/v1")}"' in source, route
