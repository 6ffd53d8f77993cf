"""Tools in prompts: no name can be known by heart, none that checks hold back is trained, calls keep to the schema."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.nano.data import calls, tools
from bench.nano.data.checks import list_dialogues
from bench.nano.data.draw import Draw
from bench.nano.data.format import Dialogue
from bench.nano.data.package import Package, Words
from bench.nano.data.tools import COMMON, HELD_NAMES, OTHERS, READ, TRAINED_NAMES, UNSEEN, VARIED, Offer, draw_offers

ALLOWED = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the protocols take as the name of a tool


def draw_training(package: Package, count: int) -> Iterator[list[Offer]]:
    """The tools of `count` sessions."""
    return (draw_offers(Draw(package, f"tools {number}"), VARIED) for number in range(count))


def check_calls(dialogue: Dialogue) -> int:
    """Every call names a tool of the prompt and its one argument; how many there are."""
    told = "\n".join(dialogue.tools) or "".join(map(str, dialogue.system))
    schemas = {schema["name"]: schema["parameters"] for schema in map(json.loads, told.splitlines())}
    made = [exchange.call for exchange in dialogue.exchanges if exchange.call is not None]
    for call in made:
        assert schemas[call.tool]["required"] == list(schemas[call.tool]["properties"]) == list(call.arguments)
    return len(made)


def test_names_cannot_be_guessed(package: Package) -> None:
    """The commonest name of a kind, and of its argument, is that of less than a third; most are seen once or twice."""
    seen: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for offer in (offer for offers in draw_training(package, 800) for offer in offers):
        names, arguments = seen.setdefault(offer.tool.kind, (Counter(), Counter()))
        names[offer.name] += 1
        arguments[offer.argument] += 1
    assert set(seen) == {tool.kind for tool in (READ, *OTHERS)}
    for kind, (names, arguments) in seen.items():
        assert max(names.values()) < names.total() / 3, kind
        assert max(arguments.values()) < arguments.total() / 2, kind
        assert sum(count <= 2 for count in names.values()) > names.total() / 3, kind


def test_held_names_are_not_trained(package: Package) -> None:
    """No tool of training has a name or an argument that only checks have, whatever the words are."""
    words = Words((*sorted(name for name in HELD_NAMES if name.isalpha()), "zygote"), ())
    offers = [offer for drawn in draw_training(replace(package, words=words), 400) for offer in drawn]
    assert not HELD_NAMES & {name for offer in offers for name in (offer.name, offer.argument)}
    assert not HELD_NAMES & TRAINED_NAMES


def test_unseen_names_are_unseen(package: Package) -> None:
    """The checks for names have no word of training in them, and none of its lists."""
    bare = replace(package, words=Words(("zygote",), package.words.held))
    dialogues = [dialogue for dialogue, _ in list_dialogues(bare, "tool.unseen")]
    schemas = [json.loads(schema) for dialogue in dialogues for schema in dialogue.tools]
    names = {schema["name"] for schema in schemas} | {key for one in schemas for key in one["parameters"]["properties"]}
    assert not names & TRAINED_NAMES
    assert 0.2 < len(names & HELD_NAMES) / len(HELD_NAMES) <= 1
    assert not any("zygote" in name.lower() for name in names)
    assert {check_calls(dialogue) for dialogue in dialogues} == {1}


@pytest.mark.parametrize("naming", [COMMON, VARIED, UNSEEN])
def test_tools_of_a_prompt_differ(package: Package, naming: tools.Naming) -> None:
    """One to five, all of other names that protocols allow, one of them reads files."""
    sizes = set()
    for number in range(150):
        offers = draw_offers(Draw(package, f"{number}", held=naming is not VARIED), naming)
        sizes.add(len(offers))
        assert len({offer.name for offer in offers}) == len(offers)
        assert sum(offer.tool is READ for offer in offers) == 1 and tools.find_reader(offers).tool is READ
        assert all(ALLOWED.fullmatch(name) for offer in offers for name in (offer.name, offer.argument))
    assert sizes == {1, 2, 3, 4, 5}


def test_calls_keep_to_the_schema(package: Package) -> None:
    """In every sort of session; the denser sorts have more calls in the same room."""
    counts = []
    for write in (calls.write_session, calls.write_calls, calls.drill_calls):
        made = [check_calls(write(Draw(package, f"{number}"), 1024)) for number in range(60)]
        assert min(made) >= (0 if write is calls.write_session else 1)
        counts.append(sum(made))
    assert counts[0] < counts[1] < counts[2]
