"""Tools that sessions offer: what they do, and the many names that each of them and its one argument go by.

A small model soon knows the commonest name of a tool by heart and says it where the tool is called otherwise. Hence
most names in training are rare or made of any words: only the schema in the prompt tells them.
"""

import json
from typing import NamedTuple

from bench.nano.data.draw import Draw

PREFIX_SHARE = 0.15  # of sessions in training whose tools' names all begin alike, as those of one server do
NOTE_SHARE = 0.2  # of arguments in training that the schema describes
OTHER_WORDS_SHARE = 0.4  # of tools in training that are not described as the checks have it


class Names(NamedTuple):
    """What clients call a thing most often; other names that training has; names that only checks have."""

    common: tuple[str, ...]
    rare: tuple[str, ...]
    held: tuple[str, ...]


class Tool(NamedTuple):
    """A kind of tool: its names and those of its argument, what it does in some wordings, how it is asked for."""

    kind: str
    names: Names
    arguments: Names
    does: tuple[str, ...]
    question: str = ""


class Naming(NamedTuple):
    """Shares of the names that are rare, made of any words, and held back; the others are the common ones."""

    rare: float = 0.0
    invented: float = 0.0
    held: float = 0.0


COMMON = Naming()
VARIED = Naming(rare=0.15, invented=0.45)
UNSEEN = Naming(invented=0.5, held=0.5)

READ = Tool(
    "read",
    Names(("read", "read_file", "open_file", "view_file", "cat"), ("get_file", "load_file", "file_read", "fs_read"),
          ("show_file", "print_file")),
    Names(("path", "file_path", "file", "filename"), ("name", "target", "file_name"), ("document", "source")),
    ("Read a text file and return its lines.", "Read a file.", "Show the contents of a file."),
)  # fmt: skip
OTHERS = (
    Tool(
        "run",
        Names(("bash", "run", "shell", "execute"), ("terminal", "run_command", "exec", "sh"), ("console", "run_shell")),
        Names(("command", "cmd"), ("script", "line", "input"), ("commandline", "program")),
        ("Run a shell command and return its output.", "Run a command.", "Execute a command in the shell."),
        'Run the command "{}".',
    ),
    Tool(
        "find",
        Names(("glob", "find_files", "list_files"), ("find", "file_search", "match"), ("walk", "scan_files")),
        Names(("pattern",), ("glob", "mask", "expression"), ("wildcard", "shape")),
        ("Find files whose paths match a pattern.", "Find files by a pattern.", "List the files that match."),
        'Which files match "{}"?',
    ),
    Tool(
        "grep",
        Names(("grep", "search_text"), ("rg", "search_files", "find_text", "grep_files"), ("text_grep", "seek")),
        Names(("pattern", "text"), ("regex", "needle", "words"), ("phrase", "fragment")),
        ("Search file contents.", "Search the lines of files.", "Find lines that contain a text."),
        'Which lines contain "{}"?',
    ),
    Tool(
        "weather",
        Names(("get_weather", "weather"), ("forecast", "current_weather", "weather_at"), ("climate", "weather_now")),
        Names(("city", "place"), ("location", "town", "where"), ("region", "spot")),
        ("The weather of a place now.", "Get the weather of a place.", "Current weather."),
        'What is the weather in "{}"?',
    ),
    Tool(
        "web",
        Names(("web_search", "search"), ("google", "search_web", "browse", "internet"), ("ask_web", "net_search")),
        Names(("query", "q"), ("search", "terms", "question"), ("keywords", "topic")),
        ("Search the web.", "Search the internet.", "Look for pages on the web."),
        'Search the web for "{}".',
    ),
    Tool(
        "define",
        Names(("define", "dictionary"), ("lookup", "word_info", "get_definition"), ("glossary", "explain_word")),
        Names(("word", "term"), ("entry", "lemma", "key"), ("headword", "token")),
        ("Look a word up.", "Look up a word in the dictionary.", "What a word means."),
        'Look up the word "{}".',
    ),
    Tool(
        "note",
        Names(("save_note", "remember"), ("note", "add_note", "memo", "write_note"), ("keep", "store_note")),
        Names(("text", "note"), ("content", "body", "message"), ("remark", "jotting")),
        ("Keep a note.", "Save a note.", "Store a note for later."),
        'Save the note "{}".',
    ),
)
ALL_NAMES = [names for tool in (READ, *OTHERS) for names in (tool.names, tool.arguments)]
TRAINED_NAMES = frozenset(name for names in ALL_NAMES for name in names.common + names.rare)
HELD_NAMES = frozenset(name for names in ALL_NAMES for name in names.held)


class Offer(NamedTuple):
    """A tool as a session has it; `note` is what its schema says of the argument."""

    tool: Tool
    name: str
    argument: str
    does: str
    note: str = ""

    @property
    def schema(self) -> str:
        """The schema as the prompt shows it."""
        described = {"type": "string"} | ({"description": self.note} if self.note else {})
        parameters = {"type": "object", "properties": {self.argument: described}, "required": [self.argument]}
        return json.dumps({"name": self.name, "description": self.does, "parameters": parameters})


def draw_offers(draw: Draw, naming: Naming = COMMON, least: int = 1, most: int = 5) -> list[Offer]:
    """`least` to `most` tools in any order, no two of one name; one of them reads files."""
    kinds = [READ, *draw.random.sample(OTHERS, draw.random.randint(least - 1, most - 1))]
    draw.random.shuffle(kinds)
    if naming is COMMON:
        return [_name_as_known(draw, tool) for tool in kinds]
    prefix = f"{draw.identifier()}_" if naming.rare and draw.chance(PREFIX_SHARE) else ""
    offers: dict[str, Offer] = {}
    for tool in kinds:
        while (offer := _name(draw, tool, naming, prefix)).name in offers:
            pass
        offers[offer.name] = offer
    return list(offers.values())


def find_reader(offers: list[Offer]) -> Offer:
    """The one that reads files."""
    return next(offer for offer in offers if offer.tool is READ)


def _name_as_known(draw: Draw, tool: Tool) -> Offer:
    """A tool under one of its common names, in the first wording."""
    name, argument = draw.random.choice(tool.names.common), draw.random.choice(tool.arguments.common)
    return Offer(tool, name, argument, tool.does[0])


def _name(draw: Draw, tool: Tool, naming: Naming, prefix: str) -> Offer:
    """A tool under any name that `naming` allows."""
    name = prefix + _draw_name(draw, tool.names, naming)
    argument = _draw_name(draw, tool.arguments, naming)
    if not naming.rare:
        return Offer(tool, name, argument, tool.does[0])
    does = draw.random.choice(tool.does[1:]) if draw.chance(OTHER_WORDS_SHARE) else tool.does[0]
    return Offer(tool, name, argument, does, f"The {argument}." if draw.chance(NOTE_SHARE) else "")


def _draw_name(draw: Draw, names: Names, naming: Naming) -> str:
    share = draw.random.random()
    if share < naming.invented:
        while (made := draw.identifier()) in HELD_NAMES | TRAINED_NAMES:
            pass
        return made
    if share < naming.invented + naming.held:
        return draw.random.choice(names.held)
    rare = share < naming.invented + naming.held + naming.rare
    return draw.random.choice(names.rare if rare else names.common)
