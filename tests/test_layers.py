"""The house rules that a machine can check, for every file of the project; then the checker itself on bad sources."""

from pathlib import Path

import pytest

from tests import house

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "dsuf").rglob("*.py"))


def test_there_are_sources() -> None:
    """An empty list would make every test below pass."""
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_the_rules(path: Path) -> None:
    """Import directions, dangers in one place, no late imports, docstrings, sizes."""
    assert house.check_source(str(path.relative_to(ROOT)), path.read_text()) == []


def test_functions_are_short() -> None:
    """Nine functions in ten within 30 lines, over the whole package."""
    lengths = sorted(length for path in SOURCES for _, length in house.measure_functions(path.read_text()))
    within = sum(length <= 30 for length in lengths)
    assert within >= 0.9 * len(lengths), f"{len(lengths) - within} of {len(lengths)} functions are over 30 lines"


def test_kernels_are_short() -> None:
    """A kernel file has at most 700 lines."""
    lengths = {str(path): len(path.read_text().splitlines()) for path in (ROOT / "kernels").rglob("*.cu*")}
    assert {name for name, lines in lengths.items() if lines > house.KERNEL_LINES} == set()


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("dsuf/types.py", "'''T.'''\nfrom dsuf.observe import log\n", "types may not import dsuf.observe"),
        ("dsuf/reference/rope.py", "'''R.'''\nimport dsuf.recipe.render\n", "reference may not import dsuf.recipe"),
        ("dsuf/sched/loop.py", "'''S.'''\nfrom dsuf import reference\n", "sched may not import dsuf.reference"),
        ("dsuf/kv/pages.py", "'''K.'''\nfrom ..sched import queue\n", "relative import"),
        ("dsuf/sched/loop.py", "'''S.'''\nimport aiohttp.web\n", "sched/loop.py may not import aiohttp"),
        ("dsuf/checkpoint/reader.py", "'''C.'''\nimport tokenizers\n", "may not import tokenizers"),
        ("dsuf/api/chat.py", "'''A.'''\nimport torch\n", "may not import torch"),
        ("dsuf/api/chat.py", "'''A.'''\ndef _f():\n    import json\n", "line 3: import inside a function"),
        ("dsuf/api/chat.py", "'''A.'''\nimport importlib\nimportlib.import_module('x')\n", "late import"),
        ("dsuf/api/__init__.py", "import json\n", "no module docstring"),
        ("dsuf/api/chat.py", "'''A.'''\ndef f():\n    pass\n", "f has no docstring"),
        (
            "dsuf/api/chat.py",
            "'''A.'''\nclass C:\n    '''C.'''\n    def f(self):\n        pass\n",
            "C.f has no docstring",
        ),
        ("dsuf/api/chat.py", "'''A.'''\n" + "x = 1\n" * 500, "501 lines"),
        ("dsuf/api/chat.py", "'''A.'''\ndef _f():\n" + "    x = 1\n" * 60, "_f has 61 lines"),
    ],
)
def test_checker_sees_a_fault(name: str, source: str, fault: str) -> None:
    """Each rule can fail."""
    found = house.check_source(name, source)
    assert len(found) == 1, found
    assert fault in found[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("dsuf/node/node.py", "'''N.'''\nimport uvloop\nfrom dsuf.api import server\nfrom dsuf.sched import loop\n"),
        ("dsuf/sched/loop.py", "'''S.'''\nfrom typing import TYPE_CHECKING\nfrom dsuf.types import Turn\n"),
        ("dsuf/checkpoint/fetch.py", "'''C.'''\nimport huggingface_hub\n"),
        ("dsuf/__main__.py", "'''M.'''\nimport importlib\nimportlib.import_module('x')\n"),
        ("dsuf/api/chat.py", "'''A.'''\nclass _C:\n    def f(self):\n        pass\n"),
        ("dsuf/api/chat.py", "'''A.'''\ndef _f():\n" + "    x = 1\n" * 59),
    ],
)
def test_checker_lets_good_sources_pass(name: str, source: str) -> None:
    """What is allowed is not reported."""
    assert house.check_source(name, source) == []
